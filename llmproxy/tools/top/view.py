"""The settings of a user of `top`: the order of the replicas, a filter, a pause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmproxy.tools.top.document import Backend

STATES = ("down", "ejected", "leaving", "drained", "starting", "up")
FILTER_MAX = 64
KEYS = {
    "q": ("quit", "leave"),
    "?": ("help", "explain keys and columns; any key goes back"),
    "/": ("filter", "show only replicas, flows and events with a text; Esc ends it"),
    "s": ("sort", "sort the replicas by the next column"),
    "r": ("reverse", "reverse the order of the replicas"),
    "p": ("pause", "keep this picture, and go on"),
}
"""Key -> a word for the last line of the screen, and a sentence for the help."""
COLUMNS: dict[str, tuple[Callable[[Backend], Any], bool]] = {
    "replica": (lambda one: one.backend, False),
    "state": (lambda one: STATES.index(one.state) if one.state in STATES else -1, False),
    "load": (lambda one: one.load, True),
    "KV": (lambda one: one.kv_used, True),
    "hit": (lambda one: one.hit_share, True),
    "tokens/s": (lambda one: one.output_tokens_per_s, True),
    "pace": (lambda one: one.tokens_slower, True),
}
"""The columns by which replicas can be sorted: the value, and whether the largest comes first."""


@dataclass(slots=True)
class View:
    """The settings of the user. Keys change them, and `picture` reads them."""

    column: str = "replica"
    reverse: bool = False
    filter: str = ""
    typing: bool = False
    paused: bool = False
    help: bool = False
    quit: bool = False

    def press(self, key: str) -> None:
        """Changes the settings as the pressed key says."""
        if self.typing:
            self._type(key)
        elif self.help and key != "q":
            self.help = False
        elif key == "s":
            names = list(COLUMNS)
            self.column, self.reverse = names[(names.index(self.column) + 1) % len(names)], False
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "/":
            self.typing = True
        elif key == "p":
            self.paused = not self.paused
        elif key == "?":
            self.help = True
        elif key == "\x1b":
            self.filter = ""
        elif key == "q":
            self.quit = True

    def _type(self, key: str) -> None:
        if key in "\r\n":
            self.typing = False
        elif key == "\x1b":
            self.typing, self.filter = False, ""
        elif key in "\x7f\b":
            self.filter = self.filter[:-1]
        elif key.isprintable() and len(self.filter) < FILTER_MAX:
            self.filter += key

    def shows(self, *names: str) -> bool:
        """Returns whether one of these names contains the filter, in upper or lower case."""
        return any(self.filter.casefold() in name.casefold() for name in names)

    @property
    def descending(self) -> bool:
        """Whether the replicas are sorted from the largest value to the smallest."""
        return COLUMNS[self.column][1] is not self.reverse

    def ordered(self, backends: tuple[Backend, ...]) -> list[Backend]:
        """Returns the replicas that the filter shows, sorted. Replicas without a value come last."""
        value = COLUMNS[self.column][0]
        shown = sorted((one for one in backends if self.shows(one.backend)), key=lambda one: one.backend)
        known = [one for one in shown if value(one) is not None]
        return sorted(known, key=value, reverse=self.descending) + [one for one in shown if value(one) is None]
