"""The minimum share of the granted work that a waiting band gets, even while higher bands wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CREDIT_GRANTS = 8.0  # Bound of a credit or debt, in grants of the latest size: a band that fits nowhere saves no more.


class MinShares:
    """A credit for each band: a waiting band earns its share of all granted work, and pays for work granted to it.

    A band with credit goes before all other bands until the credit is used up. Bands without a configured share have no
    credit.
    """

    def __init__(self, shares: Mapping[int, float]) -> None:
        self._credits: dict[int, float] = {}
        self.reconfigure(shares)

    def reconfigure(self, shares: Mapping[int, float]) -> None:
        """Applies new minimum shares (band -> 0..1). A band that still has a share keeps its credit."""
        self.shares = {band: share for band, share in shares.items() if share > 0.0}
        self._credits = {band: self._credits.get(band, 0.0) for band in self.shares}

    def granted(self, band: int, cost: float, waiting: Iterable[int]) -> dict[int, float]:
        """Credits `waiting` bands for work granted to `band`, which pays for it.

        Returns the change of each credit, for `undone`.
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
        """Reverts the `changes` that a grant of `cost` made to the credits, because the grant was not used."""
        for band, change in changes.items():
            if band not in self._credits:
                continue
            self._credits[band] = min(self._credits[band] - change, CREDIT_GRANTS * cost)

    def due(self, waiting: Iterable[int]) -> list[int]:
        """Returns the waiting bands with credit, which go before all others, the most credit first."""
        due = [band for band in waiting if self._credits.get(band, 0.0) > 0.0]
        return sorted(due, key=lambda band: -self._credits[band])
