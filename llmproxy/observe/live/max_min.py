"""Weighted max-min fair shares, for predictions."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple


class Claim(NamedTuple):
    """The weight of a flow (> 0), and the most that it would take; infinite for a flow that waits."""

    weight: float
    demand: float


def max_min(capacity: float, claims: Mapping[str, Claim]) -> dict[str, float]:
    """The part of `capacity` that each flow gets, in the unit of `capacity`.

    No flow gets more than its demand. Flows that get less than theirs have equal parts per unit of weight, and no flow
    has more. This is progressive filling (Bertsekas and Gallager, "Data Networks", section 6.5.2).
    """
    ordered = sorted(claims, key=lambda flow: claims[flow].demand / claims[flow].weight)
    # Summed from the end: taking weights away from their sum would lose the small ones.
    weights = list(accumulate(claims[flow].weight for flow in reversed(ordered)))[::-1]
    shares: dict[str, float] = {}
    for flow, weight in zip(ordered, weights, strict=True):
        shares[flow] = min(claims[flow].demand, capacity * claims[flow].weight / weight)
        capacity -= shares[flow]
    return shares
