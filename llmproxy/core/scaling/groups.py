"""Which replicas, where a pool has several kinds of them: the cheapest work first."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from msgspec import Struct


class Group(Struct, frozen=True):
    """One kind of replicas. `cost` is the price of one, in any unit, `speed` that of its work (1: the usual replica of
    the pool). There are `up` of them, and should be from `min` to `max` (None: any number)."""

    name: str
    cost: float = 1.0
    speed: float = 1.0
    up: int = 0
    min: int = 0
    max: int | None = None


class GroupNeed(Struct, frozen=True):
    """How many replicas of a group are needed (`desired` is rounded up), and how many are up."""

    desired: int
    need: float
    up: int
    cost: float


def spread(need: float, groups: Sequence[Group]) -> dict[str, GroupNeed]:
    """`need`, in usual replicas, spread over groups: each has its `min`, and the rest is taken from the group whose
    work is cheapest, up to its `max`, then from the next.

    It depends on no number of replicas that there are, so replicas that start change nothing. What exceeds every `max`
    is left out.
    """
    left = need - sum(one.min * one.speed for one in groups)
    needs = {}
    for one in sorted(groups, key=lambda one: (one.cost / one.speed, one.name)):
        room = inf if one.max is None else max(0, one.max - one.min)
        more = min(room, max(0.0, left) / one.speed)
        left -= more * one.speed
        taken = one.min + more
        needs[one.name] = GroupNeed(ceil(taken - 1e-6), taken, one.up, one.cost)
    return needs


def unchanged(groups: Sequence[Group]) -> dict[str, GroupNeed]:
    """As many as there are: where the need is not known."""
    return {one.name: GroupNeed(max(one.up, one.min), float(max(one.up, one.min)), one.up, one.cost) for one in groups}
