"""Requests that wait outside their flows, because a usage limit is reached or their only backend has no free slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import inf

from llmproxy.core.queueing.lazy_heap import LazyHeap
from llmproxy.core.queueing.queue import Queued, waits
from llmproxy.core.queueing.usage_limits import UsageLimits

Key = tuple[float, float]
NONE_BLOCKED: Key = (inf, inf)
OF_BACKEND = "backend:"  # Prefix of names of backend queues. Usage limits begin with `tenant:` or `model:`.


class BlockedRequests:
    """Requests that wait outside their flows.

    A request is blocked if an in-flight limit of its tenant or model is reached, or if the only backend that may serve
    it has no free slot. Each such limit and backend has a queue: highest band first, then rests of broken streams
    (`Request.continued`), then earliest arrival. A blocked request does not delay its flow, and returns to its position
    in the flow when it may be granted.
    """

    def __init__(self) -> None:
        self._queues: dict[str, LazyHeap[Key, Queued]] = {}
        self._sizes: dict[str, int] = {}
        self.size = 0
        self._by_band: Counter[tuple[int, str]] = Counter()
        # Queue -> number of requests that went from it back to their flows and are still there.
        self._back: Counter[str] = Counter()

    def block(self, name: str, queued: Queued) -> None:
        queued.blocked_by = name
        self._by_band[queued.request.band, name] += 1
        size = self._sizes[name] = self._sizes.get(name, 0) + 1
        self.size += 1
        line = self._queues.get(name)
        if line is None:
            line = self._queues[name] = LazyHeap(waits)
        request = queued.request
        line.push((-request.band, -inf if request.continued else request.arrived_s), queued, size)

    def remove(self, queued: Queued) -> None:
        """Removes a blocked request, which goes back to its flow or leaves the waiting room."""
        assert queued.blocked_by is not None
        queued.gone = True
        self.size -= 1
        self._by_band[queued.request.band, queued.blocked_by] -= 1
        self._sizes[queued.blocked_by] -= 1
        if not self._sizes[queued.blocked_by]:
            del self._sizes[queued.blocked_by], self._queues[queued.blocked_by]

    def next(self, free: Callable[[str, int], int], lowest: int | None = None) -> list[Queued]:
        """Removes and returns the requests that may go back to their flows.

        `free`: (queue, band of its first request) -> how many requests of the queue could be granted. `lowest`: the
        lowest band to take. Before the bands are tried, `lowest` is None, and slots are left for requests that went
        back earlier and still wait. After that, no backend has taken those requests, so no slots are left for them.
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
        """Returns (-band, arrival) of the first request whose usage limit is not reached; NONE_BLOCKED without one."""
        names = (name for name in self._queues if not name.startswith(OF_BACKEND) and limits.free(name))
        heads = (self._queues[name].least() for name in names)
        return min((entry[0] for entry in heads if entry is not None), default=NONE_BLOCKED)

    def at_backends(self, band: int) -> Iterator[Queued]:
        """Yields the first request of each backend queue whose first request belongs to `band`."""
        for name, line in self._queues.items():
            if name.startswith(OF_BACKEND) and (entry := line.least()) is not None and entry[2].request.band == band:
                yield entry[2]

    def left(self, name: str) -> None:
        """Records that a request left its flow, to which it had returned from the queue `name`."""
        self._back[name] -= 1
        if not self._back[name]:
            del self._back[name]

    def counts(self) -> dict[tuple[int, str], int]:
        """Maps (band, queue name) to the number of blocked requests."""
        return {where: blocked for where, blocked in self._by_band.items() if blocked}

    def any_below(self, level: int) -> bool:
        """Returns whether a request of a band below `level` is blocked."""
        return any(band < level for (band, _), blocked in self._by_band.items() if blocked)

    def before(self, queued: Queued) -> int | None:
        """Returns the number of requests before `queued` in its queue, None if there are too many to count."""
        assert queued.blocked_by is not None
        return self._queues[queued.blocked_by].before(queued)

    def check(self) -> None:
        assert self.size == sum(self._sizes.values()) == sum(self._by_band.values())
