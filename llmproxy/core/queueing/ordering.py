"""The order of the requests within a flow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf

from msgspec import Struct

from llmproxy.core.domain import Request
from llmproxy.core.policy_registry import Registry
from llmproxy.core.settings import Settings

AGED_S = 60.0  # `least_slack`: a late request is due this long after its objective has passed.

Key = tuple[float, float]


class Rank(Struct, frozen=True):
    """The sort key of a request in its flow, least first. From the time `turns_s` on, the key is `then`."""

    key: Key
    turns_s: float = inf
    then: Key = (0.0, 0.0)


class Ordering(ABC):
    """Ranks the requests of a flow. The key of a waiting request changes at most once (`Rank.turns_s`)."""

    def __init__(self, settings: Settings) -> None:
        """Reads the settings that the policy needs. Overridden by policies with settings."""

    @abstractmethod
    def rank(self, request: Request, service_s: float) -> Rank:
        """Returns the rank of `request`. `service_s`: the expected time from its grant to its first token."""


orderings: Registry[Callable[[Settings], Ordering]] = Registry("ordering policy")


@orderings.register("fcfs")
class FcfsOrdering(Ordering):
    """Takes the request of a flow that arrived first."""

    def rank(self, request: Request, service_s: float) -> Rank:
        return Rank((0.0, request.arrived_s))


@orderings.register("least_slack")
class LeastSlack(Ordering):
    """Takes the request with the least slack: the objective minus the time waited minus the expected service time.

    A request that can no longer meet its objective goes behind others, because serving it first would make others late
    too. From then on it is due `AGED_S` after its first token should have come. A request without an objective for the
    first token is due `AGED_S` after its arrival.
    """

    def rank(self, request: Request, service_s: float) -> Rank:
        ttft_s = None if request.slo is None else request.slo.ttft_s
        last = request.arrived_s + (ttft_s or 0.0) + AGED_S, request.arrived_s
        if ttft_s is None:
            return Rank(last)
        # All slacks shrink equally, so ordering by the latest start time is ordering by slack at any time.
        start_by_s = request.arrived_s + ttft_s - service_s
        return Rank((start_by_s, request.arrived_s), start_by_s, last)
