"""The last requests that ended, whole, so that the story of each can be told from its id."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from llmproxy.telemetry.exit import RequestExit

RECENT_MAX = 1_000


class RecentRequests:
    """Takes every exit record."""

    def __init__(self) -> None:
        self._kept: deque[RequestExit] = deque(maxlen=RECENT_MAX)
        self.record = self._kept.append
        """Remember one request."""

    def newest_first(self) -> Iterator[RequestExit]:
        return reversed(self._kept)
