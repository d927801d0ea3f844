"""Deadlines of waiting requests, on two clocks: one runs while a backend is up, the other while no backend is up."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from llmproxy.core.queueing.lazy_heap import LazyHeap
from llmproxy.core.queueing.queue import Queued

ROUNDING_S = 1e-6
"""Tolerance for rounding: without it, a timer set to a deadline could fire just before it, again and again."""


@dataclass(slots=True)
class _Clock:
    """A clock that can be stopped."""

    elapsed_s: float = 0.0
    # When the clock was last started, None while it is stopped.
    since_s: float | None = None

    def read(self, now: float) -> float:
        return self.elapsed_s if self.since_s is None else self.elapsed_s + now - self.since_s

    def stop(self, now: float) -> None:
        self.elapsed_s, self.since_s = self.read(now), None


class Deadlines:
    """The deadlines of the requests that wait in one pool.

    A pool has two clocks, and one of them runs at a time. While a backend is up, the normal clock measures each
    request's maximum wait. While no backend is up, requests are held and the hold clock runs: for `no_backend_wait_s`,
    or for their maximum wait if that is shorter. So a rolling restart costs no request its position. With
    `no_backend_wait_s` 0, the normal clock always runs.
    """

    def __init__(self, no_backend_wait_s: float) -> None:
        self._no_backend_wait_s = no_backend_wait_s
        # In each pair below, index 0 is the normal clock, and index 1 the hold clock.
        self._clocks = (_Clock(), _Clock())
        self._heaps = (_deadlines(0), _deadlines(1))
        self._running = 0

    def reconfigure(self, no_backend_wait_s: float, waiting: Collection[Queued], now: float) -> None:
        """Applies another `no_backend_wait_s` from now on, also to the requests in `waiting`."""
        if no_backend_wait_s == self._no_backend_wait_s:
            return
        self._no_backend_wait_s = no_backend_wait_s
        self._heaps = (self._heaps[0], _deadlines(1))
        for queued in waiting:
            held_s = min(self.own_left_s(queued, now), no_backend_wait_s)
            queued.due_s = (queued.due_s[0], self._clocks[1].read(now) + held_s)
            self._heaps[1].push(queued.due_s[1], queued, len(waiting))

    def set_pool_up(self, up: bool, now: float) -> None:
        """Switches to the normal clock if a backend is `up`, else to the hold clock."""
        running = 0 if up or not self._no_backend_wait_s else 1
        clock = self._clocks[running]
        # Called with every event; the pool rarely changes.
        if clock.since_s is None:
            self._running = running
            self._clocks[1 - running].stop(now)
            clock.since_s = now

    def enter(self, queued: Queued, now: float, waiting: int, left_s: float) -> None:
        """Add `queued`, which is due in `left_s`. `waiting` is the number of waiting requests."""
        hold_left_s = min(left_s, self._no_backend_wait_s)
        queued.due_s = (self._clocks[0].read(now) + left_s, self._clocks[1].read(now) + hold_left_s)
        self.reenter(queued, waiting)

    def reenter(self, queued: Queued, waiting: int) -> None:
        """Adds the new object of a request that already waits, with its old deadlines."""
        for heap, due_s in zip(self._heaps, queued.due_s, strict=True):
            heap.push(due_s, queued, waiting)

    def next(self, now: float) -> float | None:
        """Returns when the next request is due, as long as the same clock runs; None without requests."""
        entry = self._heaps[self._running].least()
        return None if entry is None else now + entry[0] - self._clocks[self._running].read(now)

    def left_s(self, queued: Queued, now: float) -> float:
        """Returns the seconds that `queued` may still wait, as long as the same clock runs."""
        return queued.due_s[self._running] - self._clocks[self._running].read(now)

    def own_left_s(self, queued: Queued, now: float) -> float:
        """Returns the seconds left to `queued` on the normal clock, which does not run while the request is held."""
        return queued.due_s[0] - self._clocks[0].read(now)

    def due(self, now: float, most: int) -> list[Queued]:
        """Take out at most `most` requests whose deadline has passed, the earliest first."""
        heap, elapsed_s = self._heaps[self._running], self._clocks[self._running].read(now) + ROUNDING_S
        due: list[Queued] = []
        while len(due) < most and (entry := heap.least()) is not None and entry[0] <= elapsed_s:
            due.append(heap.pop())
        return due


def _deadlines(clock: int) -> LazyHeap[float, Queued]:
    return LazyHeap(lambda entry: not entry[2].gone and entry[2].due_s[clock] == entry[0])
