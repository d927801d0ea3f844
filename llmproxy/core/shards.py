"""Shards: the parts of the scheduling state that cluster members lead independently.

A pool listed in `cluster.pools` is a separate shard with the name of the pool. All other pools form the default shard.
Each shard has its own lock, leader and waiting room, and at most one process decides for it at a time. Only the code
says "shard": pages, logs and the metric label `pool` show the pool's name, which is empty for the default shard.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT = ""
"""The name of the default shard. It also has everything that belongs to no pool."""


@dataclass(frozen=True, slots=True)
class Shards:
    separate: frozenset[str] = frozenset()
    """Pools that are a shard of their own."""

    @property
    def names(self) -> tuple[str, ...]:
        return (DEFAULT, *sorted(self.separate))

    def for_pool(self, pool: str | None) -> str:
        return pool if pool is not None and pool in self.separate else DEFAULT


ONE_SHARD = Shards()
