"""What a leader tells all members, so that the next one of them goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator

from llmproxy.cluster.balances import KnownBalances
from llmproxy.cluster.protocol import Balances, Learned, RateDebts
from llmproxy.cluster.rate_debts import KnownRateDebts
from llmproxy.cluster.session import Shared
from llmproxy.core.pools import Pools
from llmproxy.workers.protocol import Message

TOLD_S = 1.0
"""How old balances of flows and debts of rates may be that a next leader begins with."""
LEARNED_S = 5.0
"""The same for what was learned of engines and pools."""


class HandOver:
    """What was told, by this member while it led or by the one that does. `now` is the clock of the loop."""

    def __init__(self, pools: Pools, shared: Shared, shard: str) -> None:
        self._pools = pools
        self._shard = shard
        self._shared = shared
        self._told_s = self._learned_s = 0.0
        self._rate_debts = KnownRateDebts()
        self.balances = KnownBalances()
        self.learned: Learned | None = None

    def news(self, now: float) -> Iterator[Message]:
        """What has changed since members were told, if it is time to tell it."""
        if now < self._told_s + TOLD_S:
            return
        self._told_s = now
        yield from self.balances.changes(self._pools.balances(self._shard))
        yield from self._rate_debts.changes(self._pools.rate_debts(now), now)
        if now >= self._learned_s + LEARNED_S and (learned := self._shared.learned()) != self.learned:
            self._learned_s, self.learned = now, learned
            yield learned

    def all(self, now: float) -> Iterator[Message]:
        """What a member is told that joins."""
        yield from self.balances.all()
        yield from self._rate_debts.all(now)
        if self.learned is not None:
            yield self.learned

    def take(self, told: Balances | RateDebts | Learned, now: float) -> None:
        """Remember what the leader tells."""
        match told:
            case Balances():
                self.balances.take(told)
            case RateDebts():
                self._rate_debts.take(told, now)
            case Learned():
                self.learned = told

    def recall(self, now: float) -> None:
        """Decide by what was told from now on."""
        if self.learned is not None:
            self._shared.recall(self.learned)
        for (pool, band), flows in self.balances.known.items():
            self._pools.recall(pool, band, flows)
        self._pools.recall_rates(self._rate_debts.left(now), now)
