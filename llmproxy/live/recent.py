"""The last requests that ended, whole, so that the story of each can be told from its id."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from llmproxy.telemetry.exit import RequestExit

RECENT_MAX = 1_000
PENDING_MAX = 20_000
"""Requests that ended since the last row of the history; further ones are in the metrics, and not in the history."""


class RecentRequests:
    """Takes every exit record."""

    def __init__(self) -> None:
        self._kept: deque[RequestExit] = deque(maxlen=RECENT_MAX)
        self._pending: deque[RequestExit] = deque(maxlen=PENDING_MAX)

    def record(self, ended: RequestExit) -> None:
        self._kept.append(ended)
        self._pending.append(ended)

    def take(self) -> list[RequestExit]:
        """What ended since the last call."""
        taken = list(self._pending)
        self._pending.clear()
        return taken

    def newest_first(self) -> Iterator[RequestExit]:
        return reversed(self._kept)
