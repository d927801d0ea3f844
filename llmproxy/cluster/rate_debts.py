"""Which rates are used up until when, as far as the members of a cluster know it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmproxy.cluster.protocol import RateDebts
from llmproxy.core.queueing.rates import RateName

RATES_MAX = 4096
"""Rates of one message, so that it stays below the limit of a frame."""
KNOWN_MAX = 50_000
"""Rates that a member remembers. Beyond, those of which it heard first count as unused."""
SAME_S = 0.001
"""A debt that ends in the same moment, but for rounding, was told before."""


class KnownRateDebts:
    """The debts that were told, or heard of, last. Times are those of the loop of this process, in seconds."""

    def __init__(self) -> None:
        self._back_s: dict[RateName, float] = {}

    def left(self, now: float) -> dict[RateName, float]:
        """In how many seconds all that was taken is back."""
        return {name: back_s - now for name, back_s in self._back_s.items() if back_s > now}

    def changes(self, debts: Mapping[RateName, float], now: float) -> Iterator[RateDebts]:
        """What is to be told to those who know what was told, so that they know `debts`."""
        before, self._back_s = self._back_s, {name: now + debt_s for name, debt_s in debts.items()}
        changed = {name: debt_s for name, debt_s in debts.items() if abs(before.get(name, now) - now - debt_s) > SAME_S}
        # What was given back may have left no debt.
        changed |= {name: 0.0 for name, back_s in before.items() if back_s > now + SAME_S and name not in debts}
        yield from _told(changed)

    def all(self, now: float) -> Iterator[RateDebts]:
        """What is to be told to those who know nothing."""
        yield from _told(self.left(now))

    def take(self, told: RateDebts, now: float) -> None:
        """Remember what was told."""
        for limit, kind, debt_s in told.debts:
            self._back_s.pop((limit, kind), None)
            if debt_s > 0.0:
                self._back_s[limit, kind] = now + debt_s
        while len(self._back_s) > KNOWN_MAX:
            del self._back_s[next(iter(self._back_s))]


def _told(debts: Mapping[RateName, float]) -> Iterator[RateDebts]:
    rates = [(*name, debt_s) for name, debt_s in debts.items()]
    for begin in range(0, len(rates), RATES_MAX):
        yield RateDebts(tuple(rates[begin : begin + RATES_MAX]))
