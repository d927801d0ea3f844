"""Deadlines of waiting requests, on two clocks: one runs while a backend is up, the other while no backend is up."""

from __future__ import annotations

from collections.abc import Mapping

from llmproxy.core.queueing.lazy_heap import LazyHeap
from llmproxy.core.queueing.queue import Queued

ROUNDING_S = 1e-6  # Tolerance, because a timer set to a deadline could fire just before it again and again.


class Deadlines:
    """The deadlines of the requests that wait in one pool.

    A pool has two clocks, and one of them runs at a time. While a backend is up, the normal clock measures each
    request's maximum wait. While no backend is up, the hold clock measures `no_backend_wait_s`, or the maximum wait if
    that is shorter. So requests keep their positions while all backends restart. With `no_backend_wait_s` 0, the normal
    clock always runs.
    """

    def __init__(self, no_backend_wait_s: float, waiting: Mapping[str, Queued]) -> None:
        self._waiting = waiting  # By id. The waiting room keeps it up to date.
        self._no_backend_wait_s = no_backend_wait_s
        # Index 0 is the normal clock, and index 1 the hold clock.
        self._elapsed_s, self._heaps = [0.0, 0.0], (_deadlines(0), _deadlines(1))
        self._running = 0  # The clock that runs.
        self._since_s: float | None = None  # Time at which the running clock was started; None before the first start.
        # `_entered`: requests that entered after the last call of `due`. `_unsorted`: earlier requests in no heap yet.
        # Most requests leave in the pass after their arrival, so only the others are put into the heaps.
        self._entered: list[Queued] = []
        self._unsorted: list[Queued] = []

    def reconfigure(self, no_backend_wait_s: float, now: float) -> None:
        """Applies a new `no_backend_wait_s` from now on, also to waiting requests."""
        if no_backend_wait_s == self._no_backend_wait_s:
            return
        self._no_backend_wait_s = no_backend_wait_s
        self._entered, self._unsorted = list(self._waiting.values()), []
        self._heaps = (_deadlines(0), _deadlines(1))
        for queued in self._entered:
            own_left_s = self.own_left_s(queued, now)
            if queued.on_hold:
                # The old value bounded the wait on the normal clock too.
                own_left_s = min(queued.request.deadline_s - now, no_backend_wait_s)
            held_s = min(own_left_s, no_backend_wait_s)
            queued.due_s = (self._read(0, now) + own_left_s, self._read(1, now) + held_s)

    def set_pool_up(self, up: bool, now: float) -> None:
        """Switches to the normal clock if a backend is `up`, else to the hold clock."""
        running = 0 if up or not self._no_backend_wait_s else 1
        # Called with every event; the pool rarely changes.
        if running != self._running or self._since_s is None:
            self._elapsed_s[self._running] = self._read(self._running, now)
            self._running, self._since_s = running, now

    def enter(self, queued: Queued, now: float, left_s: float) -> None:
        """Adds `queued`, which may wait for `left_s` on the normal clock, and at most as long on the hold clock."""
        normal_s, hold_s = self._elapsed_s
        if self._since_s is None:
            pass
        elif self._running:
            hold_s = hold_s + now - self._since_s
        else:
            normal_s = normal_s + now - self._since_s
        queued.due_s = (normal_s + left_s, hold_s + min(left_s, self._no_backend_wait_s))
        self._entered.append(queued)

    def reenter(self, queued: Queued) -> None:
        """Adds the new object of a request that already waits, with its old deadlines."""
        self._entered.append(queued)

    def next(self, now: float) -> float | None:
        """Returns when, on the clock of `now`, the next deadline passes if the running clock runs until then.

        Returns None if no request waits.
        """
        self._sort()
        entry = self._heaps[self._running].least()
        return None if entry is None else now + entry[0] - self._read(self._running, now)

    def left_s(self, queued: Queued, now: float) -> float:
        """Returns the seconds that `queued` may still wait on the running clock."""
        return queued.due_s[self._running] - self._read(self._running, now)

    def own_left_s(self, queued: Queued, now: float) -> float:
        """Returns the seconds that `queued` may still wait on the normal clock."""
        elapsed_s = self._elapsed_s[0]
        if not self._running and self._since_s is not None:
            elapsed_s = elapsed_s + now - self._since_s
        return queued.due_s[0] - elapsed_s

    def due(self, now: float, most: int) -> list[Queued]:
        """Removes and returns at most `most` requests whose deadline has passed, the earliest first."""
        running, elapsed_s = self._running, self._elapsed_s[self._running]
        if self._since_s is not None:
            elapsed_s = elapsed_s + now - self._since_s
        elapsed_s += ROUNDING_S
        for queued in self._unsorted:
            if not queued.gone:
                self._push(queued)
        self._unsorted, self._entered = self._entered, []
        for queued in self._unsorted:
            if queued.due_s[running] <= elapsed_s:
                self._sort()
                break
        due: list[Queued] = []
        heap = self._heaps[running]
        while heap.entries and len(due) < most and (entry := heap.least()) is not None and entry[0] <= elapsed_s:
            due.append(heap.pop())
        return due

    def clean(self) -> None:
        """Frees the memory of requests that are gone."""
        for heap in self._heaps:
            heap.clean()

    def _read(self, clock: int, now: float) -> float:
        elapsed_s = self._elapsed_s[clock]
        return elapsed_s if clock != self._running or self._since_s is None else elapsed_s + now - self._since_s

    def _sort(self) -> None:
        for queued in (*self._unsorted, *self._entered):
            if not queued.gone:
                self._push(queued)
        self._entered, self._unsorted = [], []

    def _push(self, queued: Queued) -> None:
        for heap, due_s in zip(self._heaps, queued.due_s, strict=True):
            heap.push(due_s, queued, len(self._waiting))


def _deadlines(clock: int) -> LazyHeap[float, Queued]:
    return LazyHeap(lambda entry: not entry[2].gone and entry[2].due_s[clock] == entry[0])
