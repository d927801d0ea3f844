"""Weighted max-min fair shares, for predictions."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple


class Claim(NamedTuple):
    """The weight of a flow, and its demand."""

    weight: float  # > 0
    demand: float  # The most that the flow can use; infinite for a flow with waiting requests.


def max_min(capacity: float, claims: Mapping[str, Claim]) -> dict[str, float]:
    """Return the share of `capacity` of each flow, in the unit of `capacity`.

    No flow gets more than its demand. Flows that get less than their demand get equal shares per unit of weight, and no
    other flow gets more per unit. This is progressive filling (Bertsekas and Gallager, "Data Networks", section 6.5.2).
    """
    ordered = sorted(claims, key=lambda flow: claims[flow].demand / claims[flow].weight)
    # Summed from the end: subtracting weights from their sum would lose small weights to rounding.
    weights = list(accumulate(claims[flow].weight for flow in reversed(ordered)))[::-1]
    shares: dict[str, float] = {}
    for flow, weight in zip(ordered, weights, strict=True):
        shares[flow] = min(claims[flow].demand, capacity * claims[flow].weight / weight)
        capacity -= shares[flow]
    return shares
