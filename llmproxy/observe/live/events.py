"""Recent log lines about the state of the proxy and its backends, for the live page.

Events are collected where log lines are written, so that page and log agree. Lines of finished requests are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import count

from msgspec import Struct

from llmproxy.observe.text import shown

EVENTS_MAX = 500  # The number of events that are kept. The oldest event is dropped first.
TEXT_CHARS_MAX = 400
HIDDEN = frozenset({"exception", "exc_info", "level", "event"})  # Log fields that are not part of the text of an event.
EJECTED = "backend_ejected"
STATE_EVENTS = frozenset(
    {"backend_down", EJECTED, "backend_up", "backend_back", "backend_drained", "backend_undrained"}
)
"""Events after which a backend begins or stops to take requests."""


class Event(Struct, frozen=True):
    """A log line about the state of the proxy or of a backend."""

    serial: int
    at_s: float  # On the clock of the history.
    level: str
    name: str
    backend: str | None
    why: str  # The field `why` of the line.
    text: str  # All fields except HIDDEN, as in the log; the beginning of a long text.


class Events:
    """The last EVENTS_MAX events."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._serials = count(1)

    @property
    def last(self) -> int:
        """The serial number of the newest event; 0 without events."""
        return self._kept[-1].serial if self._kept else 0

    def note(self, level: str, name: str, fields: Mapping[str, object], at_s: float) -> None:
        """Adds a log line, with its time `at_s` on the clock of the history."""
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
