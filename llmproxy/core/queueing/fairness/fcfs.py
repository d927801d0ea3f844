"""The fairness policy `fcfs`: the request that arrived first goes next, whatever its flow."""

from __future__ import annotations

from collections.abc import Iterator

from llmproxy.core.domain import Request
from llmproxy.core.queueing.fairness.policy import FairnessPolicy, policies
from llmproxy.core.queueing.lazy_heap import KeyedHeap
from llmproxy.core.settings import Settings


@policies.register("fcfs")
class FcfsFairness(FairnessPolicy):
    """Takes the flow whose first request arrived first."""

    def __init__(self, settings: Settings) -> None:
        self._flows = KeyedHeap()

    def backlogged(self, flow: str, head: Request) -> None:
        self._flows.set(flow, head.arrived_s)

    def emptied(self, flow: str) -> None:
        self._flows.current.pop(flow, None)

    def candidates(self, now: float) -> Iterator[str]:
        return iter(self._flows)
