"""Which request of a flow goes first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf

from msgspec import Struct

from llmproxy.core.domain import Request
from llmproxy.core.policy_registry import Registry
from llmproxy.core.settings import Settings

AGED_S = 60.0
"""`least_slack` gives everybody a turn within this time, where there are turns: about as long as clients wait."""

Key = tuple[float, float]


class Rank(Struct, frozen=True):
    """Where a request stands in its flow, least key first; from `turns_s` on, `then` is its key."""

    key: Key
    turns_s: float = inf
    then: Key = (0.0, 0.0)


class Ordering(ABC):
    """Ranks the requests of a flow. A request keeps one key while it waits, or changes it once (`Rank.turns_s`)."""

    def __init__(self, settings: Settings) -> None:
        """An ordering reads what it needs from `settings` once."""

    @abstractmethod
    def rank(self, request: Request, service_s: float) -> Rank:
        """The rank of `request`, whose first token is expected `service_s` after it is granted a backend."""


orderings: Registry[Callable[[Settings], Ordering]] = Registry("ordering policy")


@orderings.register("fcfs")
class FcfsOrdering(Ordering):
    """First come, first served."""

    def rank(self, request: Request, service_s: float) -> Rank:
        return Rank((0.0, request.arrived_s))


@orderings.register("edf")
class EarliestDeadline(Ordering):
    """Earliest deadline first: when the first token is due by its objective, else when its time to wait is over."""

    def rank(self, request: Request, service_s: float) -> Rank:
        slo = request.slo
        due_s = request.deadline_s if slo is None or slo.ttft_s is None else request.arrived_s + slo.ttft_s
        return Rank((due_s, request.arrived_s))


@orderings.register("least_slack")
class LeastSlack(Ordering):
    """The least time to spare first: objective less time waited less time that serving will take.

    A request that can no longer make it steps back, because serving it first would only make others late as well.
    From then on it is due `AGED_S` after its arrival, like one without an objective for its first token.
    """

    def rank(self, request: Request, service_s: float) -> Rank:
        last = request.arrived_s + AGED_S, request.arrived_s
        if request.slo is None or request.slo.ttft_s is None:
            return Rank(last)
        # All slacks shrink alike, so the order of the latest moments to start is the order of slacks at any time.
        start_by_s = request.arrived_s + request.slo.ttft_s - service_s
        return Rank((start_by_s, request.arrived_s), start_by_s, last)


@orderings.register("shortest")
class Shortest(Ordering):
    """The least estimated work first; a request that has waited for `ageing_s` goes before all that have not."""

    def __init__(self, settings: Settings) -> None:
        self._input_weight = settings.input_weight
        self._output_weight = settings.output_weight
        self._ageing_s = settings.ageing_s

    def rank(self, request: Request, service_s: float) -> Rank:
        work = self._input_weight * request.prompt_tokens + self._output_weight * request.output_tokens
        return Rank((work, request.arrived_s), request.arrived_s + self._ageing_s, (-inf, request.arrived_s))
