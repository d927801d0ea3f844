"""Bands, flows, limits and deadlines: who waits, in which order, and how much of it there may be."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice

from llmproxy.core.domain import Request
from llmproxy.core.fairness import FairnessPolicy
from llmproxy.core.settings import QueueSettings

FLOW_LOOK_MAX = 8
"""Requests of one flow that are looked at when the first of them fit nowhere; bounds the time of a pass."""


@dataclass(frozen=True, slots=True)
class Queued:
    """A request in the waiting room, with the backends that already failed it."""

    request: Request
    excluded: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Usage:
    requests: int = 0
    body_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Full:
    """A limit of the waiting room that is reached, by its name in the configuration; `total` over all bands."""

    name: str
    limit: int
    total: bool


class Occupancy:
    """How full the waiting room of this process is, over all pools, held to its limits."""

    def __init__(self, limits: QueueSettings) -> None:
        self._limits = limits
        self._total = _Usage()
        self._bands: dict[int, _Usage] = {}

    def full(self, band: int, body_bytes: int) -> Full | None:
        """The limit that one more request would break, None where it fits. A band's own limit is told first."""
        usage = self._bands.setdefault(band, _Usage())
        for full, used, more in (
            (Full("queue.band_requests_max", self._limits.band_requests_max, False), usage.requests, 1),
            (Full("queue.band_bytes_max", self._limits.band_bytes_max, False), usage.body_bytes, body_bytes),
            (Full("queue.requests_max", self._limits.requests_max, True), self._total.requests, 1),
            (Full("queue.bytes_max", self._limits.bytes_max, True), self._total.body_bytes, body_bytes),
        ):
            if used + more > full.limit:
                return full
        return None

    def enter(self, band: int, body_bytes: int) -> None:
        self._add(self._bands.setdefault(band, _Usage()), 1, body_bytes)

    def leave(self, band: int, body_bytes: int) -> None:
        self._add(self._bands[band], -1, -body_bytes)

    def _add(self, usage: _Usage, requests: int, body_bytes: int) -> None:
        for counted in (usage, self._total):
            counted.requests += requests
            counted.body_bytes += body_bytes

    def queued(self) -> dict[int, tuple[int, int]]:
        """Band -> (requests, body bytes) waiting."""
        return {band: (usage.requests, usage.body_bytes) for band, usage in self._bands.items()}

    def check(self) -> None:
        assert self._total.requests == sum(u.requests for u in self._bands.values())
        assert self._total.body_bytes == sum(u.body_bytes for u in self._bands.values())
        assert all(u.requests >= 0 and u.body_bytes >= 0 for u in self._bands.values())


class Band:
    """The flows of one priority level. A flow is listed while it has a request waiting, in order of arrival.

    A retry keeps its arrival time and so comes back to where it stood. Flows are plain sorted lists: moving ten
    thousand pointers takes a few microseconds, and almost all traffic is at the two ends.
    """

    def __init__(self, fairness: FairnessPolicy) -> None:
        self.fairness = fairness
        self._flows: dict[str, list[Queued]] = {}
        self.size = 0

    def push(self, queued: Queued) -> None:
        request = queued.request
        flow = self._flows.setdefault(request.flow, [])
        insort(flow, queued, key=_arrival)
        self.size += 1
        if flow[0] is queued:
            self.fairness.backlogged(request.flow, request)

    def remove(self, request: Request) -> None:
        flow = self._flows[request.flow]
        at = bisect_left(flow, request.arrived_s, key=_arrival)
        while flow[at].request.id != request.id:
            at += 1
        del flow[at]
        self.size -= 1
        if not flow:
            del self._flows[request.flow]
            self.fairness.emptied(request.flow)
        elif at == 0:
            self.fairness.backlogged(request.flow, flow[0].request)

    def first(self, flow: str) -> Iterator[Queued]:
        """The head of `flow` and a few behind it, for when the head fits nowhere."""
        return islice(self._flows[flow], FLOW_LOOK_MAX)

    def newest(self) -> Request:
        """The request that came last, over all flows."""
        return max((flow[-1] for flow in self._flows.values()), key=_arrival).request

    def requests(self) -> list[Request]:
        return [queued.request for flow in self._flows.values() for queued in flow]

    def check(self) -> None:
        assert self.size == sum(len(flow) for flow in self._flows.values())
        assert all(self._flows.values()), "a flow without a request is still listed"
        for flow in self._flows.values():
            assert flow == sorted(flow, key=_arrival), "a flow is out of order"
        offered = list(self.fairness.candidates())
        assert len(offered) == len(set(offered)), "a flow is listed twice"
        assert set(offered) == set(self._flows), "the policy offers other flows than those that wait"


def _arrival(queued: Queued) -> float:
    return queued.request.arrived_s


@dataclass(slots=True)
class Deadlines:
    """The earliest deadline among waiting requests; entries of requests that left are dropped when they surface."""

    _heap: list[tuple[float, str]] = field(default_factory=list)

    def add(self, deadline_s: float, request_id: str, waiting: dict[str, Queued]) -> None:
        heappush(self._heap, (deadline_s, request_id))
        # Most requests leave long before their deadline; without this their entries would outnumber the queue.
        if len(self._heap) > 64 + 2 * len(waiting):
            self._heap = [entry for entry in self._heap if self._live(entry, waiting)]
            heapify(self._heap)

    def next(self, waiting: dict[str, Queued]) -> float | None:
        while self._heap and not self._live(self._heap[0], waiting):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float, waiting: dict[str, Queued], most: int) -> list[Queued]:
        """Take out those whose deadline has passed, the earliest first and at most so many."""
        due: dict[str, Queued] = {}
        # A request that waited, failed and waits again has an entry of each time; it is due once.
        while len(due) < most and (deadline_s := self.next(waiting)) is not None and deadline_s <= now:
            request_id = heappop(self._heap)[1]
            due[request_id] = waiting[request_id]
        return list(due.values())

    def _live(self, entry: tuple[float, str], waiting: dict[str, Queued]) -> bool:
        queued = waiting.get(entry[1])
        return queued is not None and queued.request.deadline_s == entry[0]


class DrainRate:
    """How fast the waiting room empties, for `Retry-After`: measured over the last grants."""

    _GRANTS = 64
    _PAUSE_S = 10.0
    _RETRY_MIN_S = 1.0
    _RETRY_MAX_S = 60.0

    def __init__(self) -> None:
        self._granted_s: deque[float] = deque(maxlen=self._GRANTS)

    def granted(self, now: float) -> None:
        # After a pause in which nothing was asked for, the old pace says nothing of the new one.
        if self._granted_s and now - self._granted_s[-1] > self._PAUSE_S:
            self._granted_s.clear()
        self._granted_s.append(now)

    def retry_after_s(self, ahead: int, now: float) -> float:
        """Seconds until a request with `ahead` others before it would be granted, within 1 s and 60 s."""
        if not self._granted_s:
            return self._RETRY_MIN_S
        per_s = len(self._granted_s) / max(now - self._granted_s[0], 0.1)
        return min(self._RETRY_MAX_S, max(self._RETRY_MIN_S, (ahead + 1) / per_s))
