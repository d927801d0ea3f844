"""Hand-over: a leader announces its scheduling state to all members, so that the next leader can continue from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from llmproxy.core.pools import Pools
from llmproxy.core.queueing.rate_limits import RateName
from llmproxy.remote.messages import Balances, Drained, Learned, Message, RateDebts, ResponseStored

ANNOUNCE_S = 1.0  # Interval of announcing balances of flows and debts of rate limits.
LEARNED_S = 5.0  # Interval of announcing learned limits and capacities.
FLOWS_MAX = 4096  # The maximum number of flows in a message, so that the message fits into a frame.
FLOWS_KNOWN_MAX = 50_000  # Flows of one band that a member remembers. Others start anew under the next leader.
RATES_MAX = 4096  # The maximum number of rate limits in a message, so that the message fits into a frame.
RATES_KNOWN_MAX = 50_000  # Rate limits that a member remembers. Others count as unused.
SAME_S = 0.001  # Debts whose ends differ by less are equal: the difference is rounding.


@dataclass(frozen=True, slots=True)
class MemberCallbacks:
    """Callbacks for the state that members share, except for leases."""

    record_stored: Callable[[ResponseStored], ResponseStored]
    """Called in the leader: records the owner of a stored response. Returns the valid owner: the first tenant wins."""
    # Called in each member: records the owner of a stored response that the leader announced.
    record_owner: Callable[[ResponseStored], object]
    stored_responses: Callable[[], Iterable[ResponseStored]]  # Returns all known stored responses, oldest first.
    drained: Callable[[], Drained]  # Returns the backends that an operator has drained.
    apply_drained: Callable[[Drained], None]  # Drains and undrains backends as the leader announces.
    learned: Callable[[], Learned]  # Returns the learned limits and capacities.
    restore_learned: Callable[[Learned, float], None]
    """Loads announced limits and capacities, with the loop time at which they were received."""


class HandOver:
    """The last state that this member announced or received. `now` is the event loop's clock."""

    def __init__(self, pools: Pools, callbacks: MemberCallbacks) -> None:
        self._pools = pools
        self._callbacks = callbacks
        self._announced_s = self._learned_announced_s = 0.0
        self._rate_debts = AnnouncedRateDebts()
        self.balances = AnnouncedBalances()
        self.learned: Learned | None = None
        self._learned_received_s = 0.0  # When `learned` was measured or received. Too old values are not used.

    def deltas(self, now: float) -> Iterator[Message]:
        """Yields the changes since the last announcement, if the next announcement is due."""
        if now < self._announced_s + ANNOUNCE_S:
            return
        self._announced_s = now
        yield from self.balances.deltas(self._pools.balances())
        yield from self._rate_debts.deltas(self._pools.limits.rates.debts(now), now)
        if now >= self._learned_announced_s + LEARNED_S and (learned := self._merged_learned()) != self.learned:
            self._learned_announced_s, self._learned_received_s, self.learned = now, now, learned
            yield learned

    def _merged_learned(self) -> Learned:
        """Returns the measurements of this process, and announced capacities of pools that it has not measured."""
        learned = self._callbacks.learned()
        if self.learned is None:
            return learned
        pools = self._pools.scaling.pools
        announced = {name: capacity for name, capacity in self.learned.capacities.items() if name in pools}
        return Learned(learned.limits, announced | learned.capacities)

    def full_state(self, now: float) -> Iterator[Message]:
        """Yields all state that a leader announces, for a member that joins."""
        yield from self.balances.full_state()
        yield from self._rate_debts.full_state(now)
        if self.learned is not None:
            yield self.learned

    def record(self, message: Balances | RateDebts | Learned, now: float) -> None:
        """Stores an announcement of the leader, which `restore` uses if this member becomes the leader."""
        match message:
            case Balances():
                self.balances.record(message)
            case RateDebts():
                self._rate_debts.record(message, now)
            # A new leader first repeats the state of its predecessor. The repetition does not make that state younger.
            case Learned() if message != self.learned:
                self.learned, self._learned_received_s = message, now

    def restore(self, now: float) -> None:
        """Loads the announced state into the scheduler of this process, which becomes the leader."""
        if self.learned is not None:
            self._callbacks.restore_learned(self.learned, self._learned_received_s)
        for (pool, band), flows in self.balances.latest.items():
            self._pools.restore(pool, band, flows)
        self._pools.limits.rates.restore(self._rate_debts.remaining(now), now)


class AnnouncedBalances:
    """The last balances of flows that this member announced as leader, or received as follower."""

    def __init__(self) -> None:
        self.latest: dict[tuple[str, int], dict[str, float]] = {}  # (Pool, band) -> flow -> balance.

    def deltas(self, current: Mapping[tuple[str, int], Mapping[str, float]]) -> Iterator[Balances]:
        """Yields the changes from the last announced balances to `current`."""
        for band, balances in current.items():
            announced = self.latest.get(band, {})
            changed = {flow: balance for flow, balance in balances.items() if announced.get(flow) != balance}
            self.latest[band] = {**balances}
            yield from _balances(band, changed)
        for gone in self.latest.keys() - current.keys():
            del self.latest[gone]

    def full_state(self) -> Iterator[Balances]:
        """Yields all balances, for a member that just joined."""
        for band, balances in self.latest.items():
            yield from _balances(band, balances)

    def record(self, message: Balances) -> None:
        """Stores changed balances that the leader announced."""
        balances = self.latest.setdefault((message.pool, message.band), {})
        for flow, balance in message.flows.items():
            balances.pop(flow, None)
            balances[flow] = balance
        while len(balances) > FLOWS_KNOWN_MAX:
            del balances[next(iter(balances))]


def _balances(band: tuple[str, int], flows: Mapping[str, float]) -> Iterator[Balances]:
    names = list(flows)
    for begin in range(0, len(names), FLOWS_MAX):
        yield Balances(*band, {name: flows[name] for name in names[begin : begin + FLOWS_MAX]})


class AnnouncedRateDebts:
    """The last announced debts of rate limits: the seconds until a limit has refilled."""

    def __init__(self) -> None:
        self._refilled_s: dict[RateName, float] = {}  # Limit -> when it will have refilled, on the loop's clock.

    def remaining(self, now: float) -> dict[RateName, float]:
        """Returns the debts that are left at `now`."""
        return {name: end_s - now for name, end_s in self._refilled_s.items() if end_s > now}

    def deltas(self, debts: Mapping[RateName, float], now: float) -> Iterator[RateDebts]:
        """Yields the changes from the last announced debts to `debts`."""
        before, self._refilled_s = self._refilled_s, {name: now + debt_s for name, debt_s in debts.items()}
        changed = {name: debt_s for name, debt_s in debts.items() if abs(before.get(name, now) - now - debt_s) > SAME_S}
        # A limit without a debt is missing in `debts`: tokens may have been refunded.
        changed |= {name: 0.0 for name, end_s in before.items() if end_s > now + SAME_S and name not in debts}
        yield from _debts(changed)

    def full_state(self, now: float) -> Iterator[RateDebts]:
        """Yields all debts, for a member that just joined."""
        yield from _debts(self.remaining(now))

    def record(self, message: RateDebts, now: float) -> None:
        """Stores changed debts that the leader announced. A debt of 0 removes the limit."""
        for limit, kind, debt_s in message.debts:
            self._refilled_s.pop((limit, kind), None)
            if debt_s > 0.0:
                self._refilled_s[limit, kind] = now + debt_s
        while len(self._refilled_s) > RATES_KNOWN_MAX:
            del self._refilled_s[next(iter(self._refilled_s))]


def _debts(debts: Mapping[RateName, float]) -> Iterator[RateDebts]:
    rates = [(*name, debt_s) for name, debt_s in debts.items()]
    for begin in range(0, len(rates), RATES_MAX):
        yield RateDebts(tuple(rates[begin : begin + RATES_MAX]))
