"""Figures of a fleet that scales."""

from __future__ import annotations

from itertools import pairwise
from math import inf


def changes_of(trail: list[tuple[float, int, int]], within_s: float) -> int:
    """Returns how often the wanted number changed its direction within `within_s`: flapping."""
    turns, last, last_s = 0, 0, -inf
    for (_, before, _), (at_s, after, _) in pairwise(trail):
        direction = (after > before) - (after < before)
        if direction:
            turns += direction == -last and at_s - last_s <= within_s
            last, last_s = direction, at_s
    return turns
