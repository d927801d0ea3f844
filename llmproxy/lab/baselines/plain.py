"""Policies that use no metrics: random, round robin, and the router's own requests in flight."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Placed, Request
from llmproxy.lab.baselines.common import Counting, ImmediatePlacement, best
from llmproxy.lab.baselines.policy import Baseline, baselines


class AtRandom(ImmediatePlacement):
    """Takes a random healthy backend."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: Request, views: Sequence[View]) -> Placed:
        return Placed(self._rng.choice(views).backend, 0.0, (), len(views))


class RoundRobinRouter(ImmediatePlacement):
    """Takes the healthy backends in turn, in the order of their names, like production-stack's router."""

    def __init__(self) -> None:
        self._asked = 0

    def choose(self, request: Request, views: Sequence[View]) -> Placed:
        names = sorted(view.backend for view in views)
        chosen = names[self._asked % len(names)]
        self._asked += 1
        return Placed(chosen, 0.0, (), len(views))


class LeastRequest(Counting):
    """Takes the backend with the fewest requests in flight from this router. Ties are drawn at random."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng

    def choose(self, request: Request, views: Sequence[View]) -> Placed:
        loads = self.in_flight.each(views)
        return best(views, [-load for load in loads], {"in_flight": loads}, self._rng)


class PowerOfTwo(LeastRequest):
    """Takes the less loaded of two random backends (Mitzenmacher, "The power of two choices", 2001)."""

    def choose(self, request: Request, views: Sequence[View]) -> Placed:
        return super().choose(request, views if len(views) < 2 else self._rng.sample(views, 2))


@baselines.register("random")
def at_random() -> Baseline:
    return Baseline("random", "any healthy replica", lambda around: AtRandom(around.rng))


@baselines.register("round_robin")
def round_robin() -> Baseline:
    return Baseline("round_robin", "healthy replicas in turn (production-stack)", lambda _: RoundRobinRouter())


@baselines.register("least_request")
def least_request() -> Baseline:
    return Baseline("least_request", "fewest own requests in flight", lambda around: LeastRequest(around.rng))


@baselines.register("power_of_two")
def power_of_two() -> Baseline:
    about = "of two drawn at random, the one with fewer own requests in flight (Mitzenmacher)"
    return Baseline("power_of_two", about, lambda around: PowerOfTwo(around.rng))
