"""Requests that wait outside their flows, because a usage limit is used up or their only backend has no room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import inf

from llmproxy.core.queueing.lazy_heap import LazyHeap
from llmproxy.core.queueing.queue import Queued, waits
from llmproxy.core.queueing.usage_limits import UsageLimits

Key = tuple[float, float]
NONE_BLOCKED: Key = (inf, inf)
OF_BACKEND = "backend:"
"""Prefix of the queues of backends; those of usage limits begin with `tenant:` or `model:`."""


class BlockedRequests:
    """Requests that were first in line and yet could not be granted, for a reason of their own.

    Either a usage limit of their tenant or model has no place in flight left, or the only backend that they may go to
    has no room. Each limit and each such backend has a queue here: highest band, then earliest arrival. A request is
    blocked when it would have been its turn, so that it does not hold up those behind it in its flow, and goes back to
    its place in the flow when there is room.
    """

    def __init__(self) -> None:
        self._queues: dict[str, LazyHeap[Key, Queued]] = {}
        self._sizes: dict[str, int] = {}
        self.size = 0
        self._by_band: Counter[tuple[int, str]] = Counter()
        self._back: Counter[str] = Counter()

    def block(self, name: str, queued: Queued) -> None:
        queued.blocked_by = name
        self._by_band[queued.request.band, name] += 1
        size = self._sizes[name] = self._sizes.get(name, 0) + 1
        self.size += 1
        line = self._queues.get(name)
        if line is None:
            line = self._queues[name] = LazyHeap(waits)
        line.push((-queued.request.band, queued.request.arrived_s), queued, size)

    def remove(self, queued: Queued) -> None:
        """A blocked request leaves, to its flow or for good."""
        assert queued.blocked_by is not None
        queued.gone = True
        self.size -= 1
        self._by_band[queued.request.band, queued.blocked_by] -= 1
        self._sizes[queued.blocked_by] -= 1
        if not self._sizes[queued.blocked_by]:
            del self._sizes[queued.blocked_by], self._queues[queued.blocked_by]

    def next(self, free: Callable[[str, int], int], lowest: int | None = None) -> list[Queued]:
        """Take out the requests that may go back to their flows. `free(queue, band of its first)` says how many may.

        Each queue gives as many as have room, less those that went back before and still wait. With `lowest`, it gives
        as many again of that band and those above it, because those that went back fitted nowhere.
        """
        back: list[Queued] = []
        for name in list(self._queues):
            line, waiting = self._queues[name], 0 if lowest is not None else self._back[name]
            first = line.least()
            for _ in range(0 if first is None else free(name, first[2].request.band) - waiting):
                entry = line.least()
                if entry is None or (lowest is not None and entry[2].request.band < lowest):
                    break
                back.append(entry[2])
                self.remove(entry[2])
                self._back[name] += 1
        return back

    def first(self, limits: UsageLimits) -> Key:
        """(Negated band, arrival) of the first request whose usage limit has room; NONE_BLOCKED without one."""
        names = (name for name in self._queues if not name.startswith(OF_BACKEND) and limits.free(name))
        heads = (self._queues[name].least() for name in names)
        return min((entry[0] for entry in heads if entry is not None), default=NONE_BLOCKED)

    def at_backends(self, band: int) -> Iterator[Queued]:
        """Yield the first request of each backend's queue if it belongs to this band."""
        for name, line in self._queues.items():
            if name.startswith(OF_BACKEND) and (entry := line.least()) is not None and entry[2].request.band == band:
                yield entry[2]

    def left(self, name: str) -> None:
        """A request that went back to its flow from this queue has left the flow."""
        self._back[name] -= 1
        if not self._back[name]:
            del self._back[name]

    def counts(self) -> dict[tuple[int, str], int]:
        """(Band, usage limit or backend) -> blocked requests."""
        return {where: blocked for where, blocked in self._by_band.items() if blocked}

    def any_below(self, level: int) -> bool:
        """Whether a blocked request is of a lower band."""
        return bool(self.size) and any(band < level for (band, _), blocked in self._by_band.items() if blocked)

    def before(self, queued: Queued) -> int | None:
        """How many are before `queued` in its queue, None when there are too many to count."""
        assert queued.blocked_by is not None
        return self._queues[queued.blocked_by].before(queued)

    def check(self) -> None:
        assert self.size == sum(self._sizes.values()) == sum(self._by_band.values())
