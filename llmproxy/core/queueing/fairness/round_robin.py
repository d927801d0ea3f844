"""Round-robin fairness: each flow of a band gets one request per turn, whatever the cost of the request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from llmproxy.core.domain import Request
from llmproxy.core.queueing.fairness.policy import FairnessPolicy, policies
from llmproxy.core.settings import Settings


@policies.register("round_robin")
class RoundRobin(FairnessPolicy):
    """Takes the flow that became backlogged, or was last served, longest ago."""

    def __init__(self, settings: Settings) -> None:
        self._turns: OrderedDict[str, None] = OrderedDict()

    def backlogged(self, flow: str, head: Request) -> None:
        self._turns.setdefault(flow, None)

    def emptied(self, flow: str) -> None:
        self._turns.pop(flow, None)

    def candidates(self, now: float) -> Iterator[str]:
        return iter(self._turns)

    def dispatched(self, flow: str) -> None:
        if flow in self._turns:
            self._turns.move_to_end(flow)
