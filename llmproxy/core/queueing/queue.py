"""Bands and flows: the waiting requests in order."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from heapq import merge
from math import inf
from typing import Any

from msgspec import Struct

from llmproxy.core.domain import Request
from llmproxy.core.policy_registry import Faults
from llmproxy.core.queueing.fairness import FairnessPolicy
from llmproxy.core.queueing.lazy_heap import HeapEntry, LazyHeap
from llmproxy.core.queueing.ordering import Key, Rank

FLOW_LOOK_MAX = 8
"""Requests of one flow and base model that a scheduling pass tries if the first of them fit on no backend. Bounds the
time of a pass."""


def head_rank(request: Request) -> Rank:
    """Returns the rank of a preempted request. It goes before all others of its flow, because it had already been
    granted.
    """
    return Rank((-inf, request.arrived_s))


class Queued(Struct, eq=False):
    """A request in the waiting room.

    `gone` and `key` invalidate heap entries. An object that is `gone` is never used again: a request that is blocked or
    unblocked gets a new object.
    """

    request: Request
    rank: Rank
    # Backends that already failed the request.
    excluded: frozenset[str] = frozenset()
    # Its deadlines on the two clocks of `Deadlines`.
    due_s: tuple[float, float] = (inf, inf)
    # Its current sort key in the flow.
    key: Key = (0.0, 0.0)
    # The queue of `BlockedRequests` (usage limit or backend) in which it waits.
    blocked_by: str | None = None
    # It is on hold: it arrived while no backend that it may use was up.
    on_hold: bool = False
    # The queue of `BlockedRequests` from which it went back to its flow.
    back_from: str | None = None
    # A full backend that it waits for, "" for none.
    later: str = ""
    gone: bool = False


def waits(entry: HeapEntry[Any, Queued]) -> bool:
    """Returns whether a heap entry is valid, because its request still waits."""
    return not entry[2].gone


def _in_place(entry: HeapEntry[Key, Queued]) -> bool:
    return not entry[2].gone and entry[2].key == entry[0]


class _Line:
    """The waiting requests of one flow, in the order of their ranks.

    Each base model has a heap, so that many requests of a full model do not hide requests of another model. All
    adapters share one heap, because there may be thousands of them.
    """

    __slots__ = ("heaps", "size")

    def __init__(self) -> None:
        self.heaps: dict[str, LazyHeap[Key, Queued]] = {}
        self.size = 0

    def put(self, queued: Queued, key: Key) -> None:
        queued.key = key
        model = _heap_of(queued)
        heap = self.heaps.get(model)
        if heap is None:
            heap = self.heaps[model] = LazyHeap(_in_place)
        heap.push(key, queued, self.size + 1)

    def head(self) -> Queued | None:
        if len(self.heaps) == 1:
            (heap,) = self.heaps.values()
            only = heap.least()
            return None if only is None else only[2]
        entries = [entry for heap in self.heaps.values() if (entry := heap.least()) is not None]
        return min(entries, key=_key)[2] if entries else None

    def before(self, queued: Queued) -> int | None:
        """Returns the number of requests before `queued`, None if there are too many to count."""
        own = self.heaps[_heap_of(queued)]
        before = own.before(queued)
        for heap in self.heaps.values():
            below = 0 if heap is own else heap.below(queued.key)
            before = None if before is None or below is None else before + below
        return before

    def first(self) -> Generator[Queued, None, None]:
        """Yields the first `FLOW_LOOK_MAX` requests of each heap in order. Close the iterator before any change."""
        if len(self.heaps) == 1:
            (heap,) = self.heaps.values()
            return heap.first(FLOW_LOOK_MAX)
        return self._merged()

    def _merged(self) -> Generator[Queued, None, None]:
        heaps = [heap.first(FLOW_LOOK_MAX) for heap in self.heaps.values()]
        try:
            yield from merge(*heaps, key=_place)
        finally:
            for heap in heaps:
                heap.close()


def _heap_of(queued: Queued) -> str:
    return queued.request.model if queued.request.adapter is None else ""


def _key(entry: HeapEntry[Key, Queued]) -> Key:
    return entry[0]


def _place(queued: Queued) -> Key:
    return queued.key


class Band:
    """The flows of one priority level that have waiting requests."""

    def __init__(self, fairness: FairnessPolicy, faults: Faults) -> None:
        self.fairness = fairness
        self._notify = faults.notify
        self.size = 0
        self._lines: dict[str, _Line] = {}
        self._turns: LazyHeap[float, Queued] = LazyHeap(waits)

    @property
    def flows(self) -> int:
        return len(self._lines)

    def entered(self, request: Request, now: float) -> None:
        """A request entered the waiting room for the first time."""
        self._notify(self.fairness.entered, request, now)

    def ended(self, request: Request, met: bool | None, now: float) -> None:
        """Records the end of a request of this band. `met`: whether its objective was met; None without an objective or
        if the client left.
        """
        self._notify(self.fairness.ended, request, met, now)

    def push(self, queued: Queued, now: float) -> None:
        request, rank = queued.request, queued.rank
        line = self._lines.get(request.flow)
        if line is None:
            line = self._lines[request.flow] = _Line()
        if rank.turns_s <= now:
            line.put(queued, rank.then)
        else:
            line.put(queued, rank.key)
            if rank.turns_s < inf:
                self._turns.push(rank.turns_s, queued, self.size + 1)
        line.size += 1
        self.size += 1
        if line.size == 1 or line.head() is queued:
            self._notify(self.fairness.backlogged, request.flow, request)

    def remove(self, queued: Queued) -> None:
        request = queued.request
        line = self._lines[request.flow]
        line.size -= 1
        self.size -= 1
        if not line.size:
            queued.gone = True
            del self._lines[request.flow]
            self._notify(self.fairness.emptied, request.flow)
            return
        was_head = line.head() is queued
        queued.gone = True
        if was_head:
            self._tell_head(request.flow, line)

    def refresh(self, now: float) -> None:
        """Applies the ranks that have changed by time. Flows keep this order until the next call."""
        while (entry := self._turns.least()) is not None and entry[0] <= now:
            queued = self._turns.pop()
            line = self._lines[queued.request.flow]
            before = line.head()
            line.put(queued, queued.rank.then)
            if line.head() is not before:
                self._tell_head(queued.request.flow, line)

    def _tell_head(self, flow: str, line: _Line) -> None:
        head = line.head()
        assert head is not None
        self._notify(self.fairness.backlogged, flow, head.request)

    def first(self, flow: str) -> Generator[Queued, None, None]:
        """Yields the first `FLOW_LOOK_MAX` requests of `flow` for each base model, in order.

        Close the iterator before any change.
        """
        return self._lines[flow].first()

    def heads(self) -> Generator[Queued, None, None]:
        """Yields `first` of each flow. Close the iterator before any change."""
        for flow in self._lines:
            with closing(self.first(flow)) as line:
                yield from line

    def before(self, queued: Queued) -> int | None:
        """Returns the number of requests before `queued` in its flow, None if there are too many to count."""
        return self._lines[queued.request.flow].before(queued)

    def waiting_in(self, flow: str) -> int:
        line = self._lines.get(flow)
        return 0 if line is None else line.size

    def requests(self) -> list[Request]:
        """Returns all requests in order, flow by flow. Slow, for inspection only."""
        lines = (heap for line in self._lines.values() for heap in line.heaps.values())
        return [queued.request for heap in lines for queued in list(heap)]

    def check(self, now: float) -> None:
        assert self.size == sum(line.size for line in self._lines.values())
        for flow, line in self._lines.items():
            heaps = [list(heap) for heap in line.heaps.values()]
            queued = [one for heap in heaps for one in heap]
            assert len(queued) == line.size > 0, f"{flow} lists {len(queued)} requests and counts {line.size}"
            assert all(one.request.flow == flow for one in queued)
            for heap in heaps:
                assert [one.key for one in heap] == sorted(one.key for one in heap), f"{flow} is out of order"
        offered = list(self.fairness.candidates(now))
        assert len(offered) == len(set(offered)), "a flow is listed twice"
        assert set(offered) == set(self._lines), "the policy offers other flows than the waiting ones"
