"""The commands `top`, `explain`, `scale` and `whatif`, which ask a running proxy and print its answers."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from llmproxy.tools.terminal import can_draw, console, pressed
from llmproxy.tools.top.ask import LIVE, REQUESTS, SCALE, Asker, ProxyAddress, UnreachableError, asking
from llmproxy.tools.top.document import Document, read
from llmproxy.tools.top.picture import picture
from llmproxy.tools.top.scale import scale as scale_table
from llmproxy.tools.top.story import story
from llmproxy.tools.top.view import View
from llmproxy.tools.top.whatif import weights_of
from llmproxy.tools.top.whatif import whatif as shares

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def top(target: ProxyAddress, interval_s: float, *, once: bool, as_json: bool) -> None:
    """Shows the state of the proxy until the user presses `q`. Raises AskError.

    With `once`, with `as_json`, or without a terminal, prints the state once.
    """
    async with asking(target) as asker:
        if once or as_json or not can_draw():
            found = await asker.get(LIVE)
            if as_json:
                print(json.dumps(found, indent=2))
            else:
                screen = console()
                screen.print(picture(read(found, Document), View(), screen.width))
            return
        await _Screen(asker, interval_s).run()


async def explain(target: ProxyAddress, request: str, *, as_json: bool) -> None:
    """Prints the history of a request. Raises AskError."""
    async with asking(target) as asker:
        found = await asker.get(REQUESTS, {"request": request})
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        console().print(story(found))


async def scale(target: ProxyAddress, *, as_json: bool) -> None:
    """Prints how many replicas each pool needs. Raises AskError."""
    async with asking(target) as asker:
        found = await asker.get(SCALE)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        console().print(scale_table(found))


async def whatif(target: ProxyAddress, weights: Sequence[str]) -> None:
    """Prints the rates that flows would get under other weights. Raises AskError.

    `weights` are texts such as `team-a=3`.
    """
    given = weights_of(weights)
    async with asking(target) as asker:
        found = await asker.get(LIVE)
    console().print(shares(read(found, Document), given))


class _Screen:
    """The full-screen mode of `top`."""

    def __init__(self, asker: Asker, interval_s: float) -> None:
        self._asker = asker
        self._interval_s = interval_s
        self._console = Console(highlight=False)
        self._view = View()
        self._document: Document | None = None
        self._trouble = ""
        self._changed = asyncio.Event()
        self._stopped = False

    async def run(self) -> None:
        """Draws until the user quits. Retries an unreachable proxy. Raises AskError for any other error."""
        await self._ask()
        polls = asyncio.create_task(self._poll())
        try:
            with self._signals():
                while not self._view.quit:
                    with Live(console=self._console, screen=True, auto_refresh=False) as live, pressed(self._press):
                        await self._draw(live, polls)
                    if self._stopped:
                        self._stopped = False
                        self._suspend()
        finally:
            polls.cancel()
        if polls.done() and not polls.cancelled():
            polls.result()

    async def _draw(self, live: Live, polls: asyncio.Task[None]) -> None:
        while not (self._view.quit or self._stopped or polls.done()):
            live.update(self._picture(), refresh=True)
            await self._changed.wait()
            self._changed.clear()
        self._view.quit |= polls.done()

    def _picture(self) -> RenderableType:
        width, height = self._console.size
        if self._document is None:
            return Text(f"{self._trouble}; trying again. q quit", "red")
        return picture(self._document, self._view, width, height, trouble=self._trouble)

    async def _poll(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                if not self._view.paused:
                    await self._ask()
                    self._changed.set()
        finally:
            self._changed.set()

    async def _ask(self) -> None:
        try:
            document = read(await self._asker.get(LIVE), Document)
        except UnreachableError as error:
            if not self._trouble:
                self._trouble = f"not reachable since {time.strftime('%H:%M:%S')}"
                if self._document is None:
                    self._trouble = f"{error} ({self._trouble})"
        else:
            self._document, self._trouble = document, ""

    def _press(self, key: str) -> None:
        self._view.press(key)
        self._changed.set()

    def _end(self) -> None:
        self._view.quit = True
        self._changed.set()

    def _stop(self) -> None:
        self._stopped = True
        self._changed.set()

    def _suspend(self) -> None:
        """Stops the process as SIGTSTP does by default. Without a shell to continue it (`ssh -t`), nothing happens."""
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGTSTP)
        signal.raise_signal(signal.SIGTSTP)
        loop.add_signal_handler(signal.SIGTSTP, self._stop)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Handles the signals that end or stop `top` during the block, so that the terminal is restored first."""
        loop = asyncio.get_running_loop()
        handlers = dict.fromkeys(ENDS, self._end) | {signal.SIGTSTP: self._stop, signal.SIGWINCH: self._changed.set}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)
