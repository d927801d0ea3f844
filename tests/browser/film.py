"""`make film`: records the demo in a terminal and its page in a browser, for the moving picture of the README."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from html import escape
from pathlib import Path

import pyte
from PIL import Image, ImageDraw, ImageFont
from playwright.async_api import async_playwright

from llmproxy.lab.demo.scenes import ADMIN_KEY
from tests.compat.browser import found_browser

FILM = Path("docs/pictures/demo.webp")
BYTES_MAX = 1_000_000
COLUMNS, ROWS = 100, 42
WIDTH, HEIGHT, CAPTION_HEIGHT = 960, 600, 40
START_MAX_S = 60.0
FRAME_MS = 1000
QUALITY = 60
TERMINAL = """<body style="margin:0;background:#16181d;color:#d6d9de"><pre style="margin:8px 16px;
font:13px/13.8px 'DejaVu Sans Mono',monospace">%s</pre></body>"""
COLOURS = {
    "default": "",
    "red": "#f0716a",
    "green": "#7cc58a",
    "brown": "#e0b45c",
    "cyan": "#6cbcd6",
    "blue": "#7aa2f7",
}
# (key of a scene or "", caption, view of the page or "" for the terminal, seconds, what must be seen: a selector of
# the page, or a pattern of the terminal).
SHOTS = (
    ("", "llmproxy demo: three simulated replicas, the proxy, traffic", "", 4, r"replica-3 +up"),
    ("f", "A flood of batch work: sheddable requests wait, critical ones go first", "now", 7,
     "#summary:has-text('sheddable requests wait')"),
    ("", "Each caller's share, and who waits for whom", "flows", 3, "tbody:has-text('batch')"),
    ("k", "kill -9 a replica: its requests are retried, its streams go on", "now", 6, "#summary:has-text('is down')"),
    ("", "No stream broke, and no request was lost", "", 4, r"critical( +\d+){3} +0 +0\s+default( +\d+){3} +0 +0\s"),
    ("", "Why each request went to its replica: the price of each, in seconds", "decisions", 3, ".prices .chosen"),
)  # fmt: skip


class Terminal:
    """The demo in a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def _read(self) -> None:
        with suppress(OSError):
            self._stream.feed(os.read(self._descriptor, 1 << 16))
        if not self._url.done() and (found := re.search(r"(http://\S+)/ui", self.text)) is not None:
            self._url.set_result(found[1])

    async def url(self) -> str:
        """Returns the address of the demo, as soon as it is on the screen."""
        return await asyncio.wait_for(self._url, START_MAX_S)

    def press(self, key: str) -> None:
        os.write(self._descriptor, key.encode())

    @property
    def text(self) -> str:
        return "\n".join(self._screen.display)

    @property
    def html(self) -> str:
        """The screen, each run of characters of one style in an element."""
        lines = []
        for row in range(ROWS):
            cells = [self._screen.buffer[row][column] for column in range(COLUMNS)]
            lines.append("".join(_cell(cell) for cell in cells).rstrip())
        return TERMINAL % "\n".join(lines)


def _cell(cell: pyte.screens.Char) -> str:
    colour = COLOURS.get(cell.fg, "")
    styles = [f"color:{colour}"] if colour else []
    if cell.bold:
        styles.append("font-weight:bold")
    if cell.reverse:
        styles.append("background:#d6d9de;color:#16181d")
    return f'<span style="{";".join(styles)}">{escape(cell.data)}</span>' if styles else escape(cell.data)


@asynccontextmanager
async def demo() -> AsyncIterator[Terminal]:
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = (sys.executable, "-m", "llmproxy", "demo", "--port", "0")
    variables = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    process = await asyncio.create_subprocess_exec(*command, stdin=its, stdout=its, stderr=its, env=variables)
    os.close(its)
    try:
        yield Terminal(own)
    finally:
        process.terminate()
        await process.wait()
        asyncio.get_running_loop().remove_reader(own)
        os.close(own)


async def main() -> int:
    frames: list[Image.Image] = []
    async with demo() as terminal, async_playwright() as playwright:
        url = await terminal.url()
        browser = await playwright.chromium.launch(executable_path=found_browser(), args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        drawn = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        await page.set_extra_http_headers({"authorization": f"Bearer {ADMIN_KEY}"})
        for key, caption, view, seconds, seen in SHOTS:
            terminal.press(key)
            if view:
                await page.goto(f"{url}/ui#{view}")
            for _ in range(seconds):
                await asyncio.sleep(FRAME_MS / 1000)
                if not view:
                    await drawn.set_content(terminal.html)
                frames.append(framed(await (page if view else drawn).screenshot(), caption))
            if view:
                await page.locator(seen).first.wait_for(timeout=1_000)
            else:
                assert re.search(seen, terminal.text), f"{seen} is not in:\n{terminal.text}"
        await browser.close()
    write(frames)
    return 0


def framed(data: bytes, caption: str) -> Image.Image:
    """Returns a frame with its caption above it."""
    frame = Image.new("RGB", (WIDTH, HEIGHT + CAPTION_HEIGHT), "#2f6f4f")
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    frame.paste(picture.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS), (0, CAPTION_HEIGHT))
    draw = ImageDraw.Draw(frame)
    draw.text((16, CAPTION_HEIGHT // 2), caption, fill="white", anchor="lm", font=ImageFont.load_default(20))
    return frame


def write(frames: list[Image.Image]) -> None:
    """Writes the film. Raises AssertionError if it is too large."""
    data = io.BytesIO()
    frames[0].save(
        data, "WEBP", save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0, quality=QUALITY, method=6
    )
    size = len(data.getvalue())
    print(f"{FILM}: {len(frames)} frames, {size:,} bytes")
    assert size <= BYTES_MAX, "too large"
    FILM.write_bytes(data.getvalue())


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
