"""The last log lines about the state of the proxy and its fleet, so that a page can say what happened, and when.

They are taken where lines are written, so that the page and the log never differ. Lines of single requests are not
among them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import count

from msgspec import Struct

from llmproxy.observe.text import shown

EVENTS_MAX = 500
TEXT_CHARS_MAX = 400
HIDDEN = frozenset({"exception", "exc_info", "level", "event"})
"""Fields of a log line that are no part of the text of an event."""
EJECTED = "backend_ejected"
STATE_EVENTS = frozenset(
    {"backend_down", EJECTED, "backend_up", "backend_back", "backend_drained", "backend_undrained"}
)
"""Events after which a backend takes requests, or takes none."""


class Event(Struct, frozen=True):
    """One log line. `at_s` is on the clock of the history, `text` has the fields as in the log, `why` one of them."""

    serial: int
    at_s: float
    level: str
    name: str
    backend: str | None
    why: str
    text: str


class Events:
    """The last `EVENTS_MAX` of them."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._serials = count(1)

    @property
    def last(self) -> int:
        """The serial of the newest event, 0 without any."""
        return self._kept[-1].serial if self._kept else 0

    def note(self, level: str, name: str, fields: Mapping[str, object], at_s: float) -> None:
        """Remember one line."""
        text = " ".join(f"{key}={shown(value)}" for key, value in fields.items() if key not in HIDDEN)
        backend = fields.get("backend")
        event = Event(
            next(self._serials),
            at_s,
            level,
            name[:100],
            backend if isinstance(backend, str) else None,
            str(fields.get("why", ""))[:TEXT_CHARS_MAX],
            text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}...",
        )
        self._kept.append(event)

    def newest_first(self) -> Iterator[Event]:
        return reversed(self._kept)
