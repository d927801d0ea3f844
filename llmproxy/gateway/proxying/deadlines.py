"""The time limits of attempts, which share one timer of the event loop. A timer for each attempt would cost more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf
from types import TracebackType

from msgspec import Struct

from llmproxy.config import TimeoutsConfig
from llmproxy.core.retry import Cause
from llmproxy.lifecycle.paced import PacedCalls

SWEEP_S = 0.1  # The seconds between two sweeps. An attempt ends less than this time after its limit.


class Deadlines:
    """Ends the attempts whose time limit is over, in one sweep every SWEEP_S.

    Each attempt is in the group of the sweep that checks it next. If bytes have moved its limit, that sweep puts it
    into a later group. So the arrival of a chunk only stores a time.
    """

    def __init__(self) -> None:
        # Number of a sweep -> the attempts that it checks. The sweep is at this number times `SWEEP_S`.
        self._groups: dict[int, dict[Timed, None]] = {}
        self._swept = 0
        self._next: asyncio.TimerHandle | None = None
        # Ends the attempts in slices, because thousands of them may be late in one sweep.
        self._ending = PacedCalls()

    def add(self, timer: Timed, check_s: float) -> None:
        """Checks the limit of an attempt in the first sweep after the time `check_s` of the event loop."""
        if self._next is None:
            self._swept = int(timer.now() // SWEEP_S)
            self._plan()
        number = timer.group = max(self._swept, int(check_s // SWEEP_S)) + 1
        self._groups.setdefault(number, {})[timer] = None

    def remove(self, timer: Timed) -> None:
        """Removes an attempt that has ended."""
        group = self._groups.get(timer.group)
        if group is not None:
            group.pop(timer, None)
            if not group:
                del self._groups[timer.group]

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        number = max(self._swept, int(loop.time() // SWEEP_S)) + 1
        self._next = loop.call_at(number * SWEEP_S, self._sweep, number)

    def _sweep(self, number: int) -> None:
        for swept in range(self._swept + 1, number + 1):
            self._swept = swept
            for timer in self._groups.pop(swept, ()):
                if timer.limit_s() > swept * SWEEP_S:
                    self.add(timer, timer.check_s(swept * SWEEP_S))
                else:
                    self._ending.add(partial(timer.expire, swept * SWEEP_S))
        self._next = None
        if self._groups:
            self._plan()


class Timed(Struct, eq=False, kw_only=True):
    """The time limits of one attempt, as a context manager that raises TimeoutError when a limit is exceeded.

    A stream has a limit for its first token. After the first bytes, every answer has a limit for silence. Every attempt
    has a total limit. All times are on the clock `now`, the clock of the event loop.
    """

    deadlines: Deadlines
    timeouts: TimeoutsConfig
    now: Callable[[], float]
    stream: bool
    # Limits in addition to the configured ones: the seconds to the first byte, and the time of the end.
    first_byte_s: float = inf
    end_s: float = inf
    # When bytes came last, or the client began to read again.
    heard_s: float = 0.0
    # Whether a limit or `cut` has ended the attempt, and whether `cut` was called.
    expired: bool = False
    was_cut: bool = False
    # The number of the sweep that checks the attempt next.
    group: int = 0
    _first_limit_s: float = inf
    _streaming: bool = False
    _task: asyncio.Task[object] | None = None
    _cancelling: int = 0

    def __enter__(self) -> None:
        limits, began_s = self.timeouts, self.now()
        self.heard_s, self.end_s = began_s, min(began_s + limits.total_s, self.end_s)
        first_byte_s = min(self.first_byte_s, limits.first_byte_s) if self.stream else inf
        self._first_limit_s = min(self.end_s, began_s + first_byte_s)
        task = self._task = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()
        self.deadlines.add(self, min(self._first_limit_s, began_s + limits.stall_s))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        self.deadlines.remove(self)
        if self.expired and task is not None and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def limit_s(self) -> float:
        """Returns when the attempt ends, unless more bytes come."""
        if self._streaming:
            return min(self.end_s, self.heard_s + self.timeouts.stall_s)
        return self._first_limit_s

    def check_s(self, now: float) -> float:
        """Returns when to check the limit again.

        This is at most `stall_s` later, because the answer may begin before its limit, and then the limit for silence
        counts.
        """
        return min(self.limit_s(), now + self.timeouts.stall_s)

    def streaming(self, now: float) -> None:
        """Notes at `now` that the answer has begun. From now on, silence is limited."""
        self._streaming, self.heard_s = True, now

    def expire(self, at_s: float) -> None:
        """Ends the attempt.

        Does nothing if it has ended already. If bytes have moved its limit beyond `at_s`, checks it again later.
        """
        if self._task is None:
            return
        if self.limit_s() > at_s:
            self.deadlines.add(self, self.check_s(at_s))
        else:
            self._end()

    def cut(self) -> None:
        """Ends the attempt now, whatever its limits: its `with` block raises TimeoutError."""
        self.was_cut = True
        self._end()

    def _end(self) -> None:
        if self._task is not None and not self.expired:
            self.expired = True
            self._task.cancel()

    @property
    def cause(self) -> Cause:
        """The limit that was exceeded: OVERRAN (total), STALLED (silence) or LATE (first token)."""
        # The time of the sweep is no evidence: it may be later than both limits.
        if self.limit_s() >= self.end_s:
            return Cause.OVERRAN
        return Cause.STALLED if self._streaming else Cause.LATE

    def reason(self) -> str:
        """Returns a sentence for the client about the exceeded limit."""
        limits, cause = self.timeouts, self.cause
        if cause is Cause.OVERRAN:
            phrase = f"did not finish within {limits.total_s:g} s (timeouts.total_s)"
        elif cause is Cause.STALLED:
            phrase = f"was silent for {limits.stall_s:g} s in mid-stream (timeouts.stall_s)"
        elif self.first_byte_s < limits.first_byte_s:
            phrase = f"did not compute the prompt within {self.first_byte_s:.0f} s, much longer than predicted"
        else:
            phrase = f"sent no first byte within {limits.first_byte_s:g} s (timeouts.first_byte_s)"
        return f"The backend {phrase}."
