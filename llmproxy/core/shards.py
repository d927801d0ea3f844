"""Shards: groups of pools that one process schedules. Different processes may schedule different shards."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT = ""
"""The shard of all pools without an own shard, and of backends without a pool."""


@dataclass(frozen=True, slots=True)
class Shards:
    """The mapping of pools to shards."""

    own: frozenset[str] = frozenset()
    """The pools that are a shard each; the shard has the name of the pool."""

    @property
    def names(self) -> tuple[str, ...]:
        """All shards, the default shard first."""
        return (DEFAULT, *sorted(self.own))

    def of(self, pool: str | None) -> str:
        """Returns the shard of a pool; None is for backends without a pool."""
        return pool if pool is not None and pool in self.own else DEFAULT


ONE_SHARD = Shards()
