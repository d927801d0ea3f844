"""The minimum share of the work that a band gets while it waits, whatever waits above it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CREDIT_GRANTS = 8.0
"""Most credit of a band, in grants of the latest size: a band whose requests fit nowhere would collect ever more."""


class MinShares:
    """Credits by band: work granted to others earns a waiting band its share, its own grants use it up.

    A band that is owed its share goes before all others, until it has been granted that share. Without configured
    shares nothing happens here.
    """

    def __init__(self, shares: Mapping[int, float]) -> None:
        self._credits: dict[int, float] = {}
        self.reconfigure(shares)

    def reconfigure(self, shares: Mapping[int, float]) -> None:
        """Apply other shares; the credit of a band that still has a share stays."""
        self.shares = {band: share for band, share in shares.items() if share > 0.0}
        self._credits = {band: self._credits.get(band, 0.0) for band in self.shares}

    def granted(self, band: int, cost: float, waiting: Iterable[int]) -> dict[int, float]:
        """`cost` was granted to `band`; `waiting` are the bands that have something to wait for.

        Returns by how much that changed the credit of each band.
        """
        before = dict(self._credits)
        if band in self._credits:
            self._credits[band] = max(-CREDIT_GRANTS * cost, self._credits[band] - cost)
        for other in waiting:
            if other in self.shares:
                earned = self._credits[other] + self.shares[other] * cost
                self._credits[other] = min(earned, CREDIT_GRANTS * cost)
        return {changed: self._credits[changed] - was for changed, was in before.items()}

    def undone(self, changes: Mapping[int, float], cost: float) -> None:
        """A grant of `cost`, which had changed credits by so much, came to nothing: none is used up, none earned."""
        for band, change in changes.items():
            if band not in self._credits:
                continue
            self._credits[band] = min(self._credits[band] - change, CREDIT_GRANTS * cost)

    def due(self, waiting: Iterable[int]) -> list[int]:
        """Bands that have earned a grant before all others, the most credit first."""
        due = [band for band in waiting if self._credits.get(band, 0.0) > 0.0]
        return sorted(due, key=lambda band: -self._credits[band])
