"""Which pools are decided about together. Several processes may each decide for some shards, and never two for one."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT = ""
"""The shard of all pools that are no shard of their own, and of what belongs to no pool."""


@dataclass(frozen=True, slots=True)
class Shards:
    """`own` are the pools that are a shard each, with the name of the pool."""

    own: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """All shards, the default one first."""
        return (DEFAULT, *sorted(self.own))

    def of(self, pool: str | None) -> str:
        """The shard of a pool, or of what belongs to none."""
        return pool if pool is not None and pool in self.own else DEFAULT


ONE_SHARD = Shards()
