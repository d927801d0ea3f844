"""How long requests may wait. One clock runs while their pool has a backend that is up, another while it has none."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from llmproxy.core.queueing.lazy_heap import LazyHeap
from llmproxy.core.queueing.queue import Queued

ROUNDING_S = 1e-6
"""Sums of times differ by rounding: without this, a timer that is set to a deadline may fire just before it, again and
again."""


@dataclass(slots=True)
class _Clock:
    """A clock that can be stopped. `since_s` is when it was last started, None while it is stopped."""

    elapsed_s: float = 0.0
    since_s: float | None = None

    def read(self, now: float) -> float:
        return self.elapsed_s if self.since_s is None else self.elapsed_s + now - self.since_s

    def stop(self, now: float) -> None:
        self.elapsed_s, self.since_s = self.read(now), None


class Deadlines:
    """The deadlines of the requests that wait in one pool.

    While some backend is up, the own time to wait of a request runs. While none is, it stands still, and the request
    is *held*: for `hold_s`, or for its own time to wait if that is shorter. So no request loses its place in a rolling
    restart. With `hold_s` 0 nothing is held, and the first clock always runs.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._clocks = (_Clock(), _Clock())
        self._heaps = (_deadlines(0), _deadlines(1))
        self._running = 0

    def reconfigure(self, hold_s: float, waiting: Collection[Queued], now: float) -> None:
        """Hold for another time from now on, also those in `waiting`."""
        if hold_s == self._hold_s:
            return
        self._hold_s = hold_s
        self._heaps = (self._heaps[0], _deadlines(1))
        for queued in waiting:
            held_s = min(self.own_left_s(queued, now), hold_s)
            queued.due_s = (queued.due_s[0], self._clocks[1].read(now) + held_s)
            self._heaps[1].push(queued.due_s[1], queued, len(waiting))

    def set_pool_up(self, up: bool, now: float) -> None:
        """Run the clock of a pool that has a backend that is `up`, or of one that has none."""
        running = 0 if up or not self._hold_s else 1
        clock = self._clocks[running]
        # Called with every event, while a pool goes up or down once a day.
        if clock.since_s is None:
            self._running = running
            self._clocks[1 - running].stop(now)
            clock.since_s = now

    def enter(self, queued: Queued, now: float, waiting: int, left_s: float) -> None:
        """Note that `queued` is due in `left_s`; `waiting` is how many wait."""
        queued.due_s = (self._clocks[0].read(now) + left_s, self._clocks[1].read(now) + min(left_s, self._hold_s))
        self.keep(queued, waiting)

    def keep(self, queued: Queued, waiting: int) -> None:
        """Note a request that waited before, with its old deadlines."""
        for heap, due_s in zip(self._heaps, queued.due_s, strict=True):
            heap.push(due_s, queued, waiting)

    def next(self, now: float) -> float | None:
        """When the next request is due if nothing changes, None without any."""
        entry = self._heaps[self._running].least()
        return None if entry is None else now + entry[0] - self._clocks[self._running].read(now)

    def left_s(self, queued: Queued, now: float) -> float:
        """Seconds that `queued` may still wait if nothing changes."""
        return queued.due_s[self._running] - self._clocks[self._running].read(now)

    def own_left_s(self, queued: Queued, now: float) -> float:
        """What is left of the time to wait of `queued`, the time for which it was held not counted."""
        return queued.due_s[0] - self._clocks[0].read(now)

    def due(self, now: float, most: int) -> list[Queued]:
        """Take out the requests whose time is over, the earliest first, at most `most`."""
        heap, elapsed_s = self._heaps[self._running], self._clocks[self._running].read(now) + ROUNDING_S
        due: list[Queued] = []
        while len(due) < most and (entry := heap.least()) is not None and entry[0] <= elapsed_s:
            due.append(heap.pop())
        return due


def _deadlines(clock: int) -> LazyHeap[float, Queued]:
    return LazyHeap(lambda entry: not entry[2].gone and entry[2].due_s[clock] == entry[0])
