"""`make tour`: plays the scenes of the demo, opens every view meanwhile, and writes the pictures of the documentation.

It fails if the page does not show the point of a scene.
"""

from __future__ import annotations

import asyncio
import io
import re
import sys
from pathlib import Path

from PIL import Image
from playwright.async_api import Page, async_playwright

from tests.compat.browser import found_browser

PICTURES = Path("docs/pictures")
KEPT = ("now", "flows", "decisions", "phone")
STRIP = ("now", "flows", "replicas", "time")
WIDTH, HEIGHT = 1280, 800
STRIP_WIDTH = 800
"""Of one picture of the strip."""
COLOURS = 128
LINE_MAX_S = 150.0

# (line of the demo, seconds later, view, what must be seen there, name of the picture).
STOPS = (
    ("flood of batch work", 8.0, "now", "#summary:has-text('sheddable requests wait')", "now"),
    ("burst of critical", 4.0, "time", ".u-over", ""),
    ("a noisy tenant", 12.0, "flows", "tbody:has-text('noisy')", "flows"),
    ("8 times slower", 8.0, "replicas", "tr:has-text('replica-3') .highlighted", "replicas"),
    ("was killed", 4.0, "now", "#summary:has-text('is down')", ""),
    ("a new adapter", 6.0, "caches", "tbody:has-text('sim-8b-legal')", ""),
    ("adapter: over", 1.0, "decisions", ".prices .chosen", "decisions"),
    ("", 1.0, "requests", ".outcome[data-kind=completed]", ""),
    ("", 1.0, "configuration", "tbody:has-text('queue.max_wait_s')", ""),
    ("", 1.0, "time", ".events:has-text('name=kill')", "time"),
)


async def main() -> int:
    demo = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "llmproxy", "demo", "--port", "0", stdout=-1, stderr=-2, limit=1 << 20
    )
    assert demo.stdout is not None
    try:
        url = (await said(demo.stdout, r"(http://\S+)/ui")).group(1)
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=found_browser(), args=["--no-sandbox"])
            page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
            wrong: list[str] = []
            page.on("console", lambda line: wrong.append(line.text) if line.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: wrong.append(str(error)))
            await page.goto(f"{url}/ui")
            # The page has these buttons in the demo alone.
            await page.locator("#scenes").evaluate("bar => bar.remove()")
            pictures = await visit_all(page, url, demo.stdout)
            await browser.close()
        assert wrong == [], wrong
    finally:
        demo.terminate()
        await demo.wait()
    write(pictures)
    return 0


async def said(lines: asyncio.StreamReader, pattern: str) -> re.Match[str]:
    """The next line of the demo that has this pattern."""
    async with asyncio.timeout(LINE_MAX_S):
        while line := await lines.readline():
            if found := re.search(pattern, line.decode(errors="replace")):
                return found
    raise RuntimeError(f"the demo ended before it said {pattern}")


async def visit_all(page: Page, url: str, lines: asyncio.StreamReader) -> dict[str, bytes]:
    pictures = {}
    for news, later_s, view, seen, name in STOPS:
        await page.goto(f"{url}/ui#{view}")
        if news:
            await said(lines, re.escape(news))
        await asyncio.sleep(later_s)
        await page.locator(seen).first.wait_for(timeout=15_000)
        print(f"{view}: {await page.locator('#summary').inner_text()}", flush=True)
        if name:
            pictures[name] = await page.screenshot()
    await page.set_viewport_size({"width": 375, "height": 800})
    await page.emulate_media(color_scheme="dark")
    await page.goto(f"{url}/ui#now")
    await asyncio.sleep(1.5)
    pictures["phone"] = await page.screenshot()
    return pictures


def write(pictures: dict[str, bytes]) -> None:
    """The pictures to keep, with few colours, and the strip of the README from several of them."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    opened = {name: Image.open(io.BytesIO(data)).convert("RGB") for name, data in pictures.items()}
    for name in KEPT:
        few(opened[name]).save(PICTURES / f"{name}.png", optimize=True)
    height = STRIP_WIDTH * HEIGHT // WIDTH
    strip = Image.new("RGB", (2 * STRIP_WIDTH + 8, 2 * height + 8), "#8a8f98")
    for at, name in enumerate(STRIP):
        small = opened[name].resize((STRIP_WIDTH, height), Image.Resampling.LANCZOS)
        strip.paste(small, (at % 2 * (STRIP_WIDTH + 8), at // 2 * (height + 8)))
    few(strip).save(PICTURES / "tour.png", optimize=True)


def few(image: Image.Image) -> Image.Image:
    return image.quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
