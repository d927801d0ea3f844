"""Reads key presses, and removes control characters from untrusted text before it is printed."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import termios
import tty
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

PLAIN_WIDTH = 80  # The width of texts, if standard output is no terminal.
NAME_MAX = 256  # The maximum number of characters of a name that are shown.
SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O[@-~])")
"""The sequences that arrows and function keys send.

They are ignored; otherwise their first character would count as Escape.
"""


def can_draw() -> bool:
    """Returns whether standard output is a terminal that understands control sequences."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def console() -> Console:
    """Returns a console for standard output.

    If standard output is no terminal, the console prints plain text of PLAIN_WIDTH columns.
    """
    if can_draw():
        return Console(highlight=False)
    return Console(highlight=False, force_terminal=False, color_system=None, width=PLAIN_WIDTH)


@contextmanager
def pressed(on_key: Callable[[str], None]) -> Iterator[None]:
    """Calls `on_key` with each key pressed during the block. Does nothing if standard input is no terminal.

    Ctrl-C still sends SIGINT.
    """
    if not sys.stdin.isatty():
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            keys = os.read(fd, 64)
        except OSError:
            keys = b""
        if not keys:
            loop.remove_reader(fd)
        for key in SEQUENCE.sub("", keys.decode(errors="ignore")):
            on_key(key)

    tty.setcbreak(fd)
    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def printable(text: str, limit: int = NAME_MAX) -> str:
    """Returns `text` as one line of at most `limit` characters, with an ellipsis if it is longer.

    Characters that control a terminal or reverse the direction of text are replaced.
    """
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(_shown(character) for character in cut)


def _shown(character: str) -> str:
    category = unicodedata.category(character)
    if character.isspace():
        return " "
    return "\N{REPLACEMENT CHARACTER}" if category[0] == "C" else character
