"""The waiting requests of a band: the flows, and the requests of each flow in the order of the ordering policy."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Set
from contextlib import closing
from heapq import merge
from math import inf
from operator import attrgetter, itemgetter
from typing import Any

from msgspec import Struct

from llmproxy.core.domain import NoMatch, Request
from llmproxy.core.policy_registry import Faults
from llmproxy.core.queueing.claims import Claims
from llmproxy.core.queueing.fairness import FairnessPolicy
from llmproxy.core.queueing.lazy_heap import HeapEntry, LazyHeap
from llmproxy.core.queueing.ordering import Key, Rank

FLOW_LOOK_MAX = 8  # Maximum requests of one heap of a flow (see `_Line`) that a pass tries, to bound its time.
LINE_LOOK_MAX = 64  # Requests of one flow that a pass tries, divided among its heaps. Each heap gets at least 1.
HEAPS_MAX = 64  # Heaps of one flow beyond which adapters, and requests that wait for a backend, share one heap.

HeapName = tuple[str, str]
"""The adapter or model of the requests in a heap, and the backend without room that they wait for, "" for none."""
_SHARED: HeapName = ("", "")
NONE_CLOSED: frozenset[str] = frozenset()


def head_rank(request: Request) -> Rank:
    """Returns a rank before all usual ranks of a flow, for a preempted request and for the rest of a stream."""
    return Rank((-inf, request.arrived_s))


class Queued(Struct, eq=False):
    """A request in the waiting room.

    `gone`, `entry` and `due_s` decide whether a heap entry is valid. An object that is `gone` is never used again: a
    request that is blocked or unblocked gets a new object.
    """

    request: Request
    rank: Rank
    excluded: frozenset[str] = frozenset()  # Backends that must not serve the request.
    # Deadlines of the request on the two clocks of `Deadlines`, in seconds; inf for none.
    due_s: tuple[float, float] = (inf, inf)
    key: Key = (0.0, 0.0)  # The current sort key of the request in its flow.
    # The queue of `BlockedRequests` (usage limit or backend) that contains the request; None if it is in its flow.
    blocked_by: str | None = None
    on_hold: bool = False  # Whether the request arrived while none of its backends was up.
    # The queue of `BlockedRequests` from which the request went back to its flow; else None.
    back_from: str | None = None
    later: str = ""  # A backend without room that the request waits for, "" for none.
    heap: HeapName = _SHARED  # The name of its heap in its flow.
    entry: HeapEntry[Key, Any] | None = None  # Its valid entry in that heap.
    gone: bool = False


def waits(entry: HeapEntry[Any, Queued]) -> bool:
    """Returns whether a heap entry is valid, because its request still waits."""
    return not entry[2].gone


def _in_place(entry: HeapEntry[Key, Queued]) -> bool:
    return not entry[2].gone and entry[2].entry is entry


class _Line:
    """The waiting requests of one flow, or of all rests of streams, in the order of their ranks.

    Each model and each adapter has a heap, so that many requests of a full model do not hide requests of another. Its
    requests that wait for a backend have a heap for each such backend. There may be thousands of adapters, so beyond
    `HEAPS_MAX` heaps they share one.
    """

    __slots__ = ("heaps", "size")

    def __init__(self) -> None:
        self.heaps: dict[HeapName, LazyHeap[Key, Queued]] = {}
        self.size = 0

    def put(self, queued: Queued, key: Key) -> None:
        request = queued.request
        name = request.adapter or request.model, queued.later
        if name not in self.heaps:
            if (request.adapter is not None or queued.later) and len(self._filled()) >= HEAPS_MAX:
                name = _SHARED
            self.heaps.setdefault(name, LazyHeap(_in_place))
        queued.key, queued.heap = key, name
        queued.entry = self.heaps[name].push(key, queued, self.size + 1)

    def _filled(self) -> dict[HeapName, LazyHeap[Key, Queued]]:
        """Drops the heaps without a request, and returns the others."""
        self.heaps = {name: heap for name, heap in self.heaps.items() if heap.least() is not None}
        return self.heaps

    def head(self) -> Queued | None:
        if len(self.heaps) == 1:
            (heap,) = self.heaps.values()
            only = heap.least()
            return None if only is None else only[2]
        entries = [entry for heap in self.heaps.values() if (entry := heap.least()) is not None]
        return min(entries, key=itemgetter(0))[2] if entries else None

    def before(self, queued: Queued) -> int | None:
        own = self.heaps[queued.heap]
        before = own.before(queued)
        for heap in self.heaps.values():
            below = 0 if heap is own else heap.below(queued.key)
            before = None if before is None or below is None else before + below
        return before

    def waits_for(self, closed: Set[str]) -> bool:
        """Returns whether all requests are known to wait for backends in `closed`. Cheaper than opening `first`."""
        return all(backend in closed for _, backend in self.heaps)

    def first(self, closed: Set[str] = NONE_CLOSED) -> Generator[Queued, None, None]:
        if len(self.heaps) == 1 and not closed:
            (heap,) = self.heaps.values()
            return heap.first(FLOW_LOOK_MAX)
        return self._merged(closed)

    def _merged(self, closed: Set[str]) -> Generator[Queued, None, None]:
        filled = {name: heap for name, heap in self._filled().items() if name[1] not in closed}
        most = max(1, min(FLOW_LOOK_MAX, LINE_LOOK_MAX // (len(filled) or 1)))
        heaps = [heap.first(FLOW_LOOK_MAX if name == _SHARED else most) for name, heap in filled.items()]
        try:
            yield from merge(*heaps, key=attrgetter("key"))
        finally:
            for heap in heaps:
                heap.close()


class Band:
    """The flows of one priority level that have waiting requests.

    The rests of streams that broke wait in a line of their own, before all flows, because their clients wait in the
    middle of an answer. The fairness policy does not see them wait, but its accounts are charged.
    """

    def __init__(self, fairness: FairnessPolicy, faults: Faults, claims: Claims) -> None:
        self.fairness = fairness
        self._claims = claims  # The claims of all bands.
        # The optional events that the policy observes; None for the others.
        self.on_entered = fairness.entered if _overrides(fairness, "entered") else None
        self.on_started = fairness.started if _overrides(fairness, "started") else None
        self.on_ended = fairness.ended if _overrides(fairness, "ended") else None
        self._faults = faults
        self.size = 0
        # (Model, excluded backends, only backend) -> waiting requests.
        self.kinds: dict[tuple[str, frozenset[str], str | None], int] = {}
        self._only: Queued | None = None  # The only request of the band. It is put into a line when a second one comes.
        self.ranked_s = -inf  # The time at which the ranks were last applied.
        self._sorted_lines: dict[str, _Line] = {}
        self._continued = _Line()
        self.turns: LazyHeap[float, Queued] = LazyHeap(waits)

    @property
    def flows(self) -> int:
        """The number of flows with waiting requests, without rests of streams."""
        return 1 if self._only is not None else len(self._sorted_lines)

    @property
    def continued(self) -> int:
        """The number of waiting rests of broken streams."""
        return self._continued.size

    @property
    def _lines(self) -> dict[str, _Line]:
        if self._only is not None:
            only, self._only = self._only, None
            self._put(only, self.ranked_s)
        return self._sorted_lines

    def push(self, queued: Queued, now: float) -> None:
        self.size += 1
        kind = queued.request.model, queued.excluded, queued.request.backend
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if queued.request.continued:
            self._continued.put(queued, queued.rank.key)
            self._continued.size += 1
            return
        if self.size == 1:
            self._only, self.ranked_s = queued, now
        else:
            line = self._put(queued, now)
            if line.size > 1 and line.head() is not queued:
                return
        try:
            self.fairness.backlogged(queued.request.flow, queued.request)
        except Exception as fault:  # noqa: BLE001 - a policy may be a plugin
            self._faults.note(fault)

    def _put(self, queued: Queued, now: float) -> _Line:
        request, rank = queued.request, queued.rank
        line = self._lines.get(request.flow)
        if line is None:
            line = self._lines[request.flow] = _Line()
        if rank.turns_s <= now:
            line.put(queued, rank.then)
        else:
            line.put(queued, rank.key)
            if rank.turns_s < inf:
                self.turns.push(rank.turns_s, queued, self.size)
        line.size += 1
        return line

    def remove(self, queued: Queued) -> None:
        """Removes a waiting request. Tells the fairness policy if its flow is then empty or has another head."""
        flow, kind = queued.request.flow, (queued.request.model, queued.excluded, queued.request.backend)
        if queued.later:
            self._claims.drop(queued.request.id)
        self.size -= 1
        self.kinds[kind] -= 1
        if not self.kinds[kind]:
            del self.kinds[kind]
        if queued.request.continued:
            self._continued.size -= 1
            queued.gone = True
            if not self._continued.size:
                self._continued = _Line()
            return
        if self._only is not None:
            self._only = None
        else:
            line = self._sorted_lines[flow]
            line.size -= 1
            if line.size:
                was_head = line.head() is queued
                queued.gone = True
                if was_head:
                    self._report_head(flow, line)
                return
            del self._sorted_lines[flow]
        queued.gone = True
        try:
            self.fairness.emptied(flow)
        except Exception as fault:  # noqa: BLE001 - a policy may be a plugin
            self._faults.note(fault)

    def refresh(self, now: float) -> None:
        """Applies the ranks that have changed with time. Flows keep this order until the next call."""
        while (entry := self.turns.least()) is not None and entry[0] <= now:
            queued = self.turns.pop()
            line = self._lines[queued.request.flow]
            before = line.head()
            line.put(queued, queued.rank.then)
            if line.head() is not before:
                self._report_head(queued.request.flow, line)

    def wait_for(self, queued: Queued, found: NoMatch, now: float) -> None:
        """Records that a request waits for the backend `found.later`. `sort` must follow when no line is open."""
        self._claims.add(queued.request, found, now)
        queued.later = found.later

    def sort(self, queued: Queued) -> None:
        """Moves a request to the heap of the backend for which it waits, so that `lines` can omit it."""
        if queued.request.continued:
            self._continued.put(queued, queued.key)
        elif self._only is None:
            self._sorted_lines[queued.request.flow].put(queued, queued.key)

    def _report_head(self, flow: str, line: _Line) -> None:
        head = line.head()
        assert head is not None
        self._faults.notify(self.fairness.backlogged, flow, head.request)

    def lines(self, now: float, closed: Set[str] = NONE_CLOSED) -> Iterator[Iterable[Queued]]:
        """Yields line by line: the rests of broken streams, then the flows in the order of the policy.

        A line has the first requests of each heap (`_Line`), in order: `FLOW_LOOK_MAX`, fewer in a flow of many heaps.
        It omits the heaps of requests that wait for a backend in `closed`. Close a generator before any change.
        """
        if self._continued.size:
            return self._continued_first(now, closed)
        flows = self.fairness.candidates(now)
        return iter(((self._only,),)) if self._only is not None else self._lines_of(flows, closed)

    def _continued_first(self, now: float, closed: Set[str]) -> Generator[Iterable[Queued], None, None]:
        with closing(self._continued.first(closed)) as line:
            yield line
        with closing(self._lines_of(self.fairness.candidates(now), closed)) as lines:
            yield from lines

    def _lines_of(self, flows: Iterator[str], closed: Set[str]) -> Generator[Iterable[Queued], None, None]:
        try:
            for flow in flows:
                line = self._lines[flow]
                if closed and line.waits_for(closed):
                    yield ()
                    continue
                with closing(line.first(closed)) as first:
                    yield first
        finally:
            # A policy may return any iterator. An iterator over a heap puts its entries back when closed.
            if (close := getattr(flows, "close", None)) is not None:
                close()

    def first(self, flow: str) -> Generator[Queued, None, None]:
        """Yields the first requests of `flow`, as many as a line of `lines`. Close the generator before any change."""
        return self._lines[flow].first()

    def heads(self) -> Generator[Queued, None, None]:
        """Yields the first rests of broken streams, then the first requests of each flow, as `first` does.

        Close the generator before any change.
        """
        for waiting in (self._continued, *self._lines.values()):
            with closing(waiting.first()) as line:
                yield from line

    def before(self, queued: Queued) -> int | None:
        """Returns the number of requests before `queued` in its line; None if there are too many to count."""
        line = self._continued if queued.request.continued else self._lines[queued.request.flow]
        return line.before(queued)

    def waiting_in(self, flow: str) -> int:
        line = self._lines.get(flow)
        return 0 if line is None else line.size

    def requests(self) -> list[Request]:
        """Returns all requests, flow by flow, and in order within each heap of a flow. Slow, for inspection only."""
        lines = (heap for line in (self._continued, *self._lines.values()) for heap in line.heaps.values())
        return [queued.request for heap in lines for queued in list(heap)]

    def check(self, now: float) -> None:
        lines = {"the rests of streams": self._continued, **self._lines}
        assert self.size == sum(line.size for line in lines.values()) == sum(self.kinds.values())
        for flow, line in lines.items():
            heaps = [list(heap) for heap in line.heaps.values()]
            queued = [one for heap in heaps for one in heap]
            assert len(queued) == line.size, f"{flow} lists {len(queued)} requests and counts {line.size}"
            if line is self._continued:
                assert all(one.request.continued for one in queued)
            else:
                assert queued, f"{flow} is empty"
                assert all(one.request.flow == flow and not one.request.continued for one in queued)
            for heap in heaps:
                assert [one.key for one in heap] == sorted(one.key for one in heap), f"{flow} is out of order"
        offered = list(self.fairness.candidates(now))
        assert len(offered) == len(set(offered)), "a flow is listed twice"
        assert set(offered) == set(self._lines), "the policy offers other flows than the waiting ones"


def _overrides(policy: FairnessPolicy, method: str) -> bool:
    return getattr(type(policy), method) is not getattr(FairnessPolicy, method)
