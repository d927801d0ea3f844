"""How long an attempt may take: to its first token, in silence after it, and in all."""

from __future__ import annotations

import asyncio

from llmproxy.config import TimeoutsConfig


class AttemptTimer:
    """The time limits of one attempt on one timer, moved as the attempt gets along.

    Streams have a limit for their first token and one for silence after it; everything has one in total.
    """

    def __init__(self, timeouts: TimeoutsConfig, streams: bool) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time
        self.streams = streams
        self.scope: asyncio.Timeout | None = None
        began_s = loop.time()
        self._end_s = began_s + timeouts.total_s
        self._stall_s = timeouts.stall_s
        self._moved_s = 0.0
        self._phase = f"sent no first byte within {timeouts.first_byte_s:g} s (timeouts.first_byte_s)"
        self._total = f"did not finish within {timeouts.total_s:g} s (timeouts.total_s)"
        self.deadline_s = min(self._end_s, began_s + timeouts.first_byte_s) if streams else self._end_s
        self._speaking = False

    def streaming(self, now: float) -> None:
        """The first token came; from here on silence is what is limited."""
        self._speaking = True
        self._phase = f"was silent for {self._stall_s:g} s in mid-stream (timeouts.stall_s)"
        self._move(now)

    def alive(self, now: float) -> None:
        # Moving the timer for every chunk would cost more than relaying it; an eighth of the limit is exact enough.
        if self._speaking and now - self._moved_s > self._stall_s / 8:
            self._move(now)

    def cut(self) -> None:
        """End the attempt now."""
        if self.scope is not None and not self.scope.expired():
            self.scope.reschedule(self.now())

    def reason(self) -> str:
        # Not by the clock: timers of the loop go off up to a millisecond early.
        return "The backend " + (self._total if self.deadline_s >= self._end_s else self._phase) + "."

    def _move(self, now: float) -> None:
        self._moved_s = now
        self.deadline_s = min(self._end_s, now + self._stall_s * 1.125)
        if self.scope is not None and not self.scope.expired():
            self.scope.reschedule(self.deadline_s)
