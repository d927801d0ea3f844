"""The display of the demo: the picture of `llmproxy top` and the clients' results, redrawn or printed periodically."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from llmproxy.lab.demo.clients import OUTCOMES, Outcomes
from llmproxy.tools.terminal import can_draw, console
from llmproxy.tools.top.document import Document
from llmproxy.tools.top.picture import Column, Section, picture
from llmproxy.tools.top.view import View

PLAIN_INTERVAL_S = 10.0  # Interval between two pictures if the picture cannot be redrawn in place.
STYLES = dict.fromkeys(OUTCOMES, "") | {"refused": "yellow", "broken": "red", "lost": "red"}
HEIGHT_MIN = 24  # The minimum height of the picture, if the terminal has so many lines.
ABOVE = 18  # Lines above the picture on a high terminal: the guide stays on the screen.


class Display:
    """The output to a terminal. A pipe or TERM=dumb gets plain lines without control sequences."""

    def __init__(self) -> None:
        self._drawn = can_draw()
        self._console = console()
        self.keys = self._drawn and sys.stdin.isatty()  # Whether key presses can be read.
        self._live: Live | None = None
        self._message = ""
        self._printed_s = time.monotonic()
        self.plain_interval_s = PLAIN_INTERVAL_S

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Redraws the picture in place during the block, if the output is a terminal."""
        if not self._drawn:
            yield
            return
        live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        with live as self._live:
            yield

    def say(self, text: str) -> None:
        """Prints lines that stay on the screen."""
        try:
            print(text, flush=True)
        except BrokenPipeError:
            _end_demo()

    def show_message(self, text: str) -> None:
        """Shows a line about the current scene or error, until the next call."""
        self._message = f"{time.strftime('%H:%M:%S')}  {text}"
        if not self._drawn:
            self.say(self._message)

    def show(self, document: Document, bands: Mapping[str, Outcomes]) -> None:
        """Draws the proxy's state and the clients' results, keyed by band."""
        if self._live is not None:
            width, height = self._console.size
            drawn = demo_picture(document, bands, width, max(min(height, HEIGHT_MIN), height - ABOVE), self._message)
            self._live.update(drawn, refresh=True)
        elif time.monotonic() - self._printed_s >= self.plain_interval_s:
            self._printed_s = time.monotonic()
            try:
                self._console.print(demo_picture(document, bands, self._console.width))
                self._console.file.flush()
            except BrokenPipeError:
                _end_demo()


def demo_picture(
    document: Document, bands: Mapping[str, Outcomes], width: int, height: int | None = None, message: str = ""
) -> RenderableType:
    """Returns the picture of `top`, with a section about the clients, and `message` below it."""
    columns = [Column("clients", words=True), *(Column(name) for name in OUTCOMES), Column("", words=True)]
    rows = [
        [Text(band), *(Text(f"{counts[name]:,}", STYLES[name] if counts[name] else "") for name in OUTCOMES), Text()]
        for band, counts in bands.items()
    ]
    foot = [Text(message, no_wrap=True, overflow="ellipsis")]
    return picture(document, View(), width, height, more=Section(columns, rows), foot=foot)


def _end_demo() -> None:
    """Ends the demo like a signal, because its output is closed. Discards further output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    signal.raise_signal(signal.SIGTERM)
