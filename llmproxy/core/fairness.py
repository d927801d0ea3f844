"""Who goes next: which flow of a band is offered to the backends first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Protocol

from llmproxy.core.domain import Request
from llmproxy.core.registry import Registry
from llmproxy.core.settings import Settings

IDLE_FLOWS_MAX = 10_000
"""Idle flows whose account is kept, so that a flow cannot shed its debt by pausing; the least recent is forgotten."""


class FairnessPolicy(Protocol):
    """Orders the flows of one band. It sees flows and charges, never backends."""

    def backlogged(self, flow: str, head: Request) -> None:
        """`flow` has requests waiting, and `head` is the first of them now."""

    def emptied(self, flow: str) -> None:
        """`flow` has nothing waiting any more; what it has in flight may still be charged."""

    def candidates(self) -> Iterator[str]:
        """The backlogged flows in order of preference, each once. Close the iterator before changing anything."""

    def dispatched(self, flow: str) -> None:
        """The head of `flow` was granted a backend."""

    def charge(self, flow: str, cost: float) -> None:
        """Add `cost` weighted tokens to the account of `flow`; negative where an estimate was too high."""


policies: Registry[Callable[[Settings], FairnessPolicy]] = Registry("fairness policy")


class _Sorted:
    """Flows by a key that may change at any time; a heap whose outdated entries are dropped when they surface."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], str]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, flow: str) -> bool:
        return flow in self._keys

    def set(self, flow: str, key: float) -> None:
        self._serial += 1
        self._keys[flow] = (key, self._serial)
        heappush(self._heap, (self._keys[flow], flow))
        if len(self._heap) > 64 + 4 * len(self._keys):
            self._heap = [(entry, name) for name, entry in self._keys.items()]
            heapify(self._heap)

    def discard(self, flow: str) -> None:
        self._keys.pop(flow, None)

    def least(self) -> float | None:
        while self._heap and self._keys.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0][0] if self._heap else None

    def __iter__(self) -> Iterator[str]:
        taken: list[tuple[tuple[float, int], str]] = []
        try:
            while self._heap:
                entry = heappop(self._heap)
                if self._keys.get(entry[1]) == entry[0]:
                    taken.append(entry)
                    yield entry[1]
        finally:
            for entry in taken:
                heappush(self._heap, entry)


@policies.register("fcfs")
class Fcfs:
    """First come, first served over all flows: the flow whose head arrived first."""

    def __init__(self, settings: Settings) -> None:
        del settings
        self._flows = _Sorted()

    def backlogged(self, flow: str, head: Request) -> None:
        self._flows.set(flow, head.arrived_s)

    def emptied(self, flow: str) -> None:
        self._flows.discard(flow)

    def candidates(self) -> Iterator[str]:
        return iter(self._flows)

    def dispatched(self, flow: str) -> None:
        pass

    def charge(self, flow: str, cost: float) -> None:
        pass


@policies.register("round_robin")
class RoundRobin:
    """One request of each flow in turn, whatever it costs."""

    def __init__(self, settings: Settings) -> None:
        del settings
        self._turns: OrderedDict[str, None] = OrderedDict()

    def backlogged(self, flow: str, head: Request) -> None:
        del head
        self._turns.setdefault(flow, None)

    def emptied(self, flow: str) -> None:
        self._turns.pop(flow, None)

    def candidates(self) -> Iterator[str]:
        return iter(tuple(self._turns))

    def dispatched(self, flow: str) -> None:
        if flow in self._turns:
            self._turns.move_to_end(flow)

    def charge(self, flow: str, cost: float) -> None:
        pass


@policies.register("fair_share")
class FairShare:
    """Weighted token fairness by virtual counters: the flow that got the least service per weight goes next.

    The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a flow is
    charged weighted input and output tokens; one that becomes backlogged after a pause is lifted to the least counter
    among the backlogged, so that credit does not pile up while idle. Unlike the paper's, the charge is an estimate at
    dispatch that is trued up while the answer streams and at its end, because a proxy learns tokens late.
    """

    def __init__(self, settings: Settings) -> None:
        self._weights = settings.weights
        self._flows = _Sorted()
        self._counters: OrderedDict[str, float] = OrderedDict()
        self._floor = 0.0

    def backlogged(self, flow: str, head: Request) -> None:
        del head
        if flow in self._flows:
            return
        least = self._flows.least()
        lifted = max(self._counters.get(flow, 0.0), self._floor if least is None else least)
        self._remember(flow, lifted)
        self._flows.set(flow, lifted)

    def emptied(self, flow: str) -> None:
        self._flows.discard(flow)
        # With nobody left, the next flow starts level with the last one served, and not from the beginning of time.
        self._floor = max(self._floor, self._counters.get(flow, 0.0))

    def candidates(self) -> Iterator[str]:
        return iter(self._flows)

    def dispatched(self, flow: str) -> None:
        pass

    def charge(self, flow: str, cost: float) -> None:
        counter = self._counters.get(flow, self._floor) + cost / self._weights.get(flow, 1.0)
        self._remember(flow, counter)
        if flow in self._flows:
            self._flows.set(flow, counter)

    def counter(self, flow: str) -> float:
        """Weighted tokens per unit of weight charged so far, lifts included."""
        return self._counters.get(flow, self._floor)

    def _remember(self, flow: str, counter: float) -> None:
        self._counters[flow] = counter
        self._counters.move_to_end(flow)
        while len(self._counters) > IDLE_FLOWS_MAX + len(self._flows):
            oldest, kept = self._counters.popitem(last=False)
            if oldest in self._flows:
                self._counters[oldest] = kept
