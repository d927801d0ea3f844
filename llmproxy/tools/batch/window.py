"""Decides how many requests of a batch are open at once, and how long a failed request pauses."""

from __future__ import annotations

FIRST = 4  # The number of requests that are open at first.
SIZE_MAX = 1024
WAIT_S = 1.0
"""The window grows while its requests wait for less than this in the proxy.

More requests would only lengthen the queue.
"""
PAUSE_S = 1.0  # The pause of a request after its first failure. Each further failure doubles the pause.
PAUSE_MAX_S = 60.0


class Window:
    """The number `size` of requests that may be open at once; with `fixed` it stays constant.

    While all places are in use, it grows by 1 with each answer, so it doubles after `size` answers. After the first
    refusal, failure, or wait of more than WAIT_S, it grows by 1 per `size` answers. A refusal or failure halves it,
    once for all requests that were already sent.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self.size = float(fixed or FIRST)
        self.lines = 0
        """The requests that were begun and have no result, including paused requests."""
        self.sending = 0
        """The requests that the server has now."""
        self._fixed = fixed is not None
        self._full_before = False
        self._shrunk_s = float("-inf")

    @property
    def takes_line(self) -> bool:
        """Whether another request of the file may begin."""
        return self.lines < int(self.size)

    @property
    def has_room(self) -> bool:
        """Whether another request may be sent now."""
        return self.sending < int(self.size)

    def answered(self, wait_s: float) -> None:
        """Counts an answer to a request that waited for `wait_s` in the proxy."""
        if wait_s > WAIT_S:
            self._full_before = True
        elif not (self._fixed or self.has_room):
            self.size = min(SIZE_MAX, self.size + (1 / self.size if self._full_before else 1))

    def refused(self, sent_s: float, now: float) -> None:
        """Counts a refusal or a failure. `sent_s` and `now` are on one clock.

        A request that was sent before the last halving says nothing new.
        """
        self._full_before = True
        if not self._fixed and sent_s > self._shrunk_s:
            self.size, self._shrunk_s = max(1.0, self.size / 2), now


def pause_s(failures: int) -> float:
    """Returns the seconds of the pause after so many failures of a request."""
    return min(PAUSE_MAX_S, PAUSE_S * 2.0 ** (failures - 1))


def retry_after_s(text: str | None) -> float | None:
    """Returns the seconds in a `Retry-After` field; None if it is absent or no usable number."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0.0 <= seconds < 1e9 else None
