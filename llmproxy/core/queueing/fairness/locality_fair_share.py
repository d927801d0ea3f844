"""Weighted fairness by quanta: a flow keeps its turn, and its cached prefix, until its quantum is used up."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from math import inf, isfinite

from llmproxy.core.domain import Request
from llmproxy.core.queueing.fairness.accounts import Accounts
from llmproxy.core.queueing.fairness.policy import FairnessPolicy, policies
from llmproxy.core.queueing.lazy_heap import KeyedHeap
from llmproxy.core.settings import Settings


@dataclass(slots=True)
class _Account:
    counter: float = -inf
    turn: int = -1


@policies.register("locality_fair_share")
class LocalityFairShare(FairnessPolicy):
    """Fair share in which a flow keeps its turn while it has deficit left, so that its cached prefix stays warm.

    After the deficit longest prefix match of Cao et al., "Locality-aware Fair Scheduling in LLM Serving" (2025, arXiv
    2501.14312). The deficit of a flow is the amount that it may still be charged in this round. Among backlogged flows
    with a positive deficit, the most recently served goes first, because its prefix is most likely cached. If no
    deficit is positive, all backlogged flows are refilled by `quantum_tokens` times their weight, by several rounds at
    once if it takes several until a deficit is positive. Flows without deficit follow in the order of their charges, so
    that a flow alone is never stopped.

    A flow that becomes backlogged has at most the quantum of the current round, so credit does not grow while idle.
    Debt stays, and each round reduces it, as if the flow had waited.

    Refilling thousands of flows costs nothing, because counters are stored instead of deficits: `level` is the sum of
    the quanta so far, and a flow's counter the sum of its charges, both per unit of weight. deficit = level - counter,
    and the counter of a flow that becomes backlogged is raised to level - quantum.

    Bounds. Q is the quantum. U_f and U = U_f + U_g are defined as in `FairShare`. If always the first candidate is
    dispatched, then at any time:

    1. The counters of two backlogged flows differ by at most U + Q. f is dispatched only below the level. The level
       never falls, and counter_f then grows only by charges in flight: counter_f <= level + U_f. At each refill, and
       when g becomes backlogged, counter_g >= level - Q. After that, counter_g falls at most by the overestimates in
       flight: counter_g >= level - Q - U_g.
    2. The service per unit of weight that two flows receive in any interval in which both are backlogged differs by at
       most 2 (U + Q): both inequalities also hold for counters minus charges not yet delivered.

    With tokens charged, U_f has the same bound as in `FairShare`. A large quantum keeps prefixes warm, a small quantum
    approaches `fair_share`.
    """

    def __init__(self, settings: Settings) -> None:
        self._quantum = settings.quantum_tokens
        self._level = settings.quantum_tokens
        self._turns = 0
        self._accounts = Accounts(_Account)
        self._positive = KeyedHeap()
        self._spent = KeyedHeap()

    def backlogged(self, flow: str, head: Request) -> None:
        account = self._accounts.set_waiting(flow)
        if flow not in self._positive and flow not in self._spent:
            account.counter = max(account.counter, self._level - self._quantum)
            self._list(flow, account)

    def emptied(self, flow: str) -> None:
        self._positive.discard(flow)
        self._spent.discard(flow)
        self._accounts.set_idle(flow)

    def candidates(self, now: float) -> Generator[str, None, None]:
        self._refill()
        yield from self._positive
        yield from self._spent

    def dispatched(self, flow: str) -> None:
        account = self._accounts.open(flow)
        if account.turn == self._turns:
            return
        self._turns += 1
        account.turn = self._turns
        if flow in self._positive:
            self._list(flow, account)

    def charge(self, flow: str, cost: float) -> None:
        account = self._accounts.open(flow)
        account.counter += cost
        was_positive = flow in self._positive
        if flow in self._spent or (was_positive and account.counter >= self._level):
            self._positive.discard(flow)
            self._spent.discard(flow)
            self._list(flow, account)

    def balances(self) -> Mapping[str, float]:
        found = ((flow, account.counter - self._level) for flow, account in self._accounts.all())
        return {flow: balance for flow, balance in found if isfinite(balance)}

    def restore(self, balances: Mapping[str, float]) -> None:
        for flow, balance in balances.items():
            account = self._accounts.open(flow)
            account.counter = self._level + balance
            if flow in self._positive or flow in self._spent:
                self._positive.discard(flow)
                self._spent.discard(flow)
                self._list(flow, account)

    def standing(self, flow: str) -> tuple[tuple[str, float], ...]:
        """Returns the deficit, in units of the charged resource per unit of weight, and the number of rounds so far."""
        account = self._accounts.find(flow)
        deficit = self._quantum if account is None else self._level - account.counter
        if flow not in self._positive and flow not in self._spent:
            deficit = min(deficit, self._quantum)
        return (("deficit", deficit), ("rounds", self._level / self._quantum))

    def _list(self, flow: str, account: _Account) -> None:
        if account.counter < self._level:
            self._positive.set(flow, -account.turn)
        else:
            self._spent.set(flow, account.counter)

    def _refill(self) -> None:
        if self._positive or (least := self._spent.least()) is None:
            return
        rounds = (least[0] - self._level) // self._quantum + 1
        self._level += rounds * self._quantum
        for flow in self._spent.take_below(self._level):
            self._positive.set(flow, -self._accounts.open(flow).turn)
