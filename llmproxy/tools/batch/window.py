"""How many requests of a batch are open at once, and how long a failed request pauses."""

from __future__ import annotations

FIRST = 4
SIZE_MAX = 1024
WAIT_S = 1.0
"""The window grows while its requests wait shorter than this in the proxy: more would only lengthen the queue."""
PAUSE_S = 1.0
PAUSE_MAX_S = 60.0


class Window:
    """The number of requests that may be open. It doubles until the first sign of a full server, and then grows by one
    for as many answers as are open. A refusal halves it.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self.size = float(fixed or FIRST)
        self.lines = 0
        """Requests without a result that were begun."""
        self.sending = 0
        """Requests that the server has now."""
        self._fixed = fixed is not None
        self._full_before = False
        self._shrunk_s = float("-inf")

    @property
    def takes_line(self) -> bool:
        return self.lines < int(self.size)

    @property
    def has_room(self) -> bool:
        return self.sending < int(self.size)

    def answered(self, wait_s: float) -> None:
        """Counts an answer to a request that waited `wait_s` in the proxy."""
        if wait_s > WAIT_S:
            self._full_before = True
        elif not (self._fixed or self.has_room):
            self.size = min(SIZE_MAX, self.size + (1 / self.size if self._full_before else 1))

    def refused(self, sent_s: float, now: float) -> None:
        """Counts a refusal. Refusals of requests that were sent before the last halving say nothing new."""
        self._full_before = True
        if not self._fixed and sent_s > self._shrunk_s:
            self.size, self._shrunk_s = max(1.0, self.size / 2), now


def pause_s(failures: int) -> float:
    """Returns the pause after so many failures of a request."""
    return min(PAUSE_MAX_S, PAUSE_S * 2.0 ** (failures - 1))


def retry_after_s(text: str | None) -> float | None:
    """Returns the seconds of a `Retry-After` field; None without usable ones."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0.0 <= seconds < 1e9 else None
