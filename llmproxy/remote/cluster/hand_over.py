"""What a leader tells all members, so that the next one of them goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmproxy.core.pools import Pools
from llmproxy.core.queueing.rates import RateName
from llmproxy.remote.cluster.protocol import Balances, Learned, RateDebts
from llmproxy.remote.cluster.session import Shared
from llmproxy.remote.workers.protocol import Message

TOLD_S = 1.0
"""How old balances of flows and debts of rates may be that a next leader begins with."""
LEARNED_S = 5.0
"""The same for what was learned of engines and pools."""
FLOWS_MAX = 4096
"""Flows of one message, so that it stays below the limit of a frame."""
FLOWS_KNOWN_MAX = 50_000
"""Flows of one band that a member remembers. Beyond, the balances of others start at the level."""
RATES_MAX = 4096
"""Rates of one message, so that it stays below the limit of a frame."""
RATES_KNOWN_MAX = 50_000
"""Rates that a member remembers. Beyond, those of which it heard first count as unused."""
SAME_S = 0.001
"""A debt that ends in the same moment, but for rounding, was told before."""


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
        self._heard_s = 0.0

    def news(self, now: float) -> Iterator[Message]:
        """What has changed since members were told, if it is time to tell it."""
        if now < self._told_s + TOLD_S:
            return
        self._told_s = now
        yield from self.balances.changes(self._pools.balances(self._shard))
        yield from self._rate_debts.changes(self._pools.rate_debts(now), now)
        if now >= self._learned_s + LEARNED_S and (learned := self._known()) != self.learned:
            self._learned_s, self._heard_s, self.learned = now, now, learned
            yield learned

    def _known(self) -> Learned:
        """What was learned here, and for pools of which too little was seen, what was told."""
        learned = self._shared.learned()
        if self.learned is None:
            return learned
        pools = self._pools.scaling.pools
        told = {name: one for name, one in self.learned.capacities.items() if name in pools}
        return Learned(learned.limits, told | learned.capacities)

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
            # A next leader first tells what this member has told itself, and that is no younger for it.
            case Learned() if told != self.learned:
                self.learned, self._heard_s = told, now

    def restore(self, now: float) -> None:
        """Decide by what was told from now on."""
        if self.learned is not None:
            self._shared.restore(self.learned, self._heard_s)
        for (pool, band), flows in self.balances.known.items():
            self._pools.restore(pool, band, flows)
        self._pools.restore_rates(self._rate_debts.left(now), now)


class KnownBalances:
    """The balances that were told, or heard of, last: `known` has them by pool and band."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], dict[str, float]] = {}

    def changes(self, now: Mapping[tuple[str, int], Mapping[str, float]]) -> Iterator[Balances]:
        """What is to be told to those who know `known`, so that they know `now`."""
        for band, balances in now.items():
            known = self.known.get(band, {})
            changed = {flow: balance for flow, balance in balances.items() if known.get(flow) != balance}
            self.known[band] = {**balances}
            yield from _balances(band, changed)
        for gone in self.known.keys() - now.keys():
            del self.known[gone]

    def all(self) -> Iterator[Balances]:
        """What is to be told to those who know nothing."""
        for band, balances in self.known.items():
            yield from _balances(band, balances)

    def take(self, told: Balances) -> None:
        """Remember what was told."""
        known = self.known.setdefault((told.pool, told.band), {})
        for flow, balance in told.flows.items():
            known.pop(flow, None)
            known[flow] = balance
        while len(known) > FLOWS_KNOWN_MAX:
            del known[next(iter(known))]


def _balances(band: tuple[str, int], flows: Mapping[str, float]) -> Iterator[Balances]:
    names = list(flows)
    for begin in range(0, len(names), FLOWS_MAX):
        yield Balances(*band, {name: flows[name] for name in names[begin : begin + FLOWS_MAX]})


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
        yield from _debts(changed)

    def all(self, now: float) -> Iterator[RateDebts]:
        """What is to be told to those who know nothing."""
        yield from _debts(self.left(now))

    def take(self, told: RateDebts, now: float) -> None:
        """Remember what was told."""
        for limit, kind, debt_s in told.debts:
            self._back_s.pop((limit, kind), None)
            if debt_s > 0.0:
                self._back_s[limit, kind] = now + debt_s
        while len(self._back_s) > RATES_KNOWN_MAX:
            del self._back_s[next(iter(self._back_s))]


def _debts(debts: Mapping[RateName, float]) -> Iterator[RateDebts]:
    rates = [(*name, debt_s) for name, debt_s in debts.items()]
    for begin in range(0, len(rates), RATES_MAX):
        yield RateDebts(tuple(rates[begin : begin + RATES_MAX]))
