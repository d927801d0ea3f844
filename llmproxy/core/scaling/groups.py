"""Divides the needed replicas among groups of different cost and speed, beginning with the most work for the cost."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from msgspec import Struct


class Group(Struct, frozen=True):
    name: str
    cost: float = 1.0  # Price of a replica, in any unit.
    speed: float = 1.0  # Relative to the usual replica of the pool.
    up: int = 0  # Replicas that are up.
    min: int = 0
    max: int | None = None  # Most replicas of the group; None: no upper bound.


class GroupNeed(Struct, frozen=True):
    """The needed replicas of a group (`desired` is `need` rounded up), and the replicas that are up."""

    desired: int
    need: float
    up: int
    cost: float


def spread(need: float, groups: Sequence[Group]) -> dict[str, GroupNeed]:
    """Divides `need` among groups. The unit of `need` is a replica of the usual speed.

    Each group first gets its `min`. The rest goes to the group with the lowest cost for its speed up to its `max`, then
    to the next group. Need above every `max` is dropped. Replicas that are up are not considered, so starting replicas
    change nothing.
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
    """Returns the current number of replicas (at least `min`) of each group. Used while the need is unknown."""
    return {one.name: GroupNeed(max(one.up, one.min), float(max(one.up, one.min)), one.up, one.cost) for one in groups}
