"""The terminal of a person: keys that are pressed, and text of others that cannot control it."""

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

NAME_MAX = 256
"""Most characters of a name that are looked at."""
SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O[@-~])")
"""What arrows and function keys send: no key that means anything here, and its first character is Escape."""


def can_draw() -> bool:
    """Whether standard output is a terminal that understands control sequences."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


@contextmanager
def pressed(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call `on_key` with each key that is pressed meanwhile, if standard input is a terminal. Ctrl-C stays what it is.

    Where the terminal is gone, it is not read again.
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
    """One line of `text` without what could control a terminal or turn the order of its characters."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(_shown(character) for character in cut)


def _shown(character: str) -> str:
    category = unicodedata.category(character)
    if character.isspace():
        return " "
    return "\N{REPLACEMENT CHARACTER}" if category[0] == "C" else character
