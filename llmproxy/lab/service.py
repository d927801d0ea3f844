"""How far apart the service of two tenants drifts while both have something waiting: what fair sharing bounds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

LOOK_EVERY_S = 1.0
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Weights of prompt and output tokens in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024)."""
TENANTS_MAX = 40
"""Tenants whose pairs are followed, the first ones that had to wait; pairs grow with the square."""


class ServiceDifference:
    """The largest difference of weighted service between two tenants over any time in which both were backlogged.

    For each pair the difference of what both were served is followed from the moment at which both have somebody
    waiting until one has not; how far it moves, up and down, is what the paper's bound limits.
    """

    def __init__(self) -> None:
        self._ended: dict[str, float] = {}
        self._spans: dict[tuple[str, str], tuple[float, float]] = {}
        self._followed: dict[str, None] = {}
        self.largest: float | None = None

    def ended(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """A request of `tenant` is over, and this much was served of it."""
        if tenant not in self._followed:
            # Only how a difference moves while both wait counts, and nobody unknown has waited yet.
            return
        service = PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        self._ended[tenant] = self._ended.get(tenant, 0.0) + service

    def look(self, under_way: Mapping[str, float], backlogged: Mapping[str, None]) -> None:
        """`under_way` is the service of requests that are not over yet, `backlogged` who has a request without a first
        token; both by tenant.
        """
        for tenant in backlogged:
            if len(self._followed) < TENANTS_MAX:
                self._followed.setdefault(tenant)
        served = {
            tenant: self._ended.get(tenant, 0.0) + under_way.get(tenant, 0.0)
            for tenant in self._followed
            if tenant in backlogged
        }
        spans: dict[tuple[str, str], tuple[float, float]] = {}
        for a, b in combinations(served, 2):
            difference = served[a] - served[b]
            low, high = self._spans.get((a, b), (difference, difference))
            spans[a, b] = low, high = min(low, difference), max(high, difference)
            self.largest = max(self.largest or 0.0, high - low)
        # Pairs of which one had nothing waiting begin anew.
        self._spans = spans
