"""The fairness policy `fair_share`: weighted shares of tokens, by virtual counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from llmproxy.core.domain import Request
from llmproxy.core.queueing.fairness.accounts import Accounts
from llmproxy.core.queueing.fairness.policy import FairnessPolicy, policies
from llmproxy.core.queueing.lazy_heap import KeyedHeap
from llmproxy.core.settings import Settings

CREDIT_REQUESTS = 4.0  # Credit of a flow that becomes backlogged, as a multiple of the mean charge of a request.
DISCOUNT = 1.0 - 1.0 / 1_000  # Discount of earlier requests in the mean charge: about the last 1,000 count.


@dataclass(slots=True)
class _Account:
    counter: float = 0.0


@policies.register("fair_share")
class FairShare(FairnessPolicy):
    """Weighted fairness by virtual counters: the flow with the least service for its weight goes next.

    The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with two
    differences. The charge is an estimate at dispatch, corrected while the answer streams and at its end, because a
    proxy learns tokens late. And a flow that becomes backlogged has a small credit, like waking tasks in the Linux
    scheduler. Without credit, it would wait whenever the estimates of the other flows were too high, and for every
    request that it still has in flight.

    The virtual time V rises with the least counter of the backlogged flows, and never falls. When a flow becomes
    backlogged, its counter is raised to at least V minus the credit (`CREDIT_REQUESTS` mean charges), so that a flow
    cannot save up more than this while idle. A counter above V stays as it is.

    Bounds. K is the largest credit. U_f is the largest total charge of the requests that flow f has in flight at one
    time, divided by their weights; each request counts with the highest charge that it ever has. U = U_f + U_g. If
    always the first candidate is dispatched, then at any time:

    1. The counters of two backlogged flows differ by at most U + K. f is dispatched only if it has the least counter,
       which is not above V. V never falls, and counter_f then grows only by charges in flight: counter_f <= V + U_f.
       When V rises, counter_g >= V, and when g becomes backlogged, counter_g >= V - K. After either, counter_g falls at
       most by the overestimates then in flight, because a later request refunds at most its own charge: counter_g >= V
       - K - U_g.
    2. The service per unit of weight that two flows receive in any interval in which both are backlogged differs by at
       most 2 (U + K): both inequalities also hold for counters minus charges not yet delivered, and an interval has two
       ends.

    With tokens charged, U_f <= max(w_p L, w_q M) in the paper's terms, per unit of weight, for output weights w_q >=
    w_p. L is the longest prompt. M is the most tokens that f has in flight at one time; an answer counts with its
    estimated or its delivered tokens, whichever are more. The paper proves that no policy that neither idles nor
    preempts can guarantee a difference of service below w_q M, with the tokens of all flows in M.

    If no backend can take the first request of a flow, the flow is passed over, which weakens the bounds.
    """

    def __init__(self, settings: Settings) -> None:
        self._flows = KeyedHeap()
        self._accounts = Accounts(_Account)
        self._level = 0.0
        self._charged, self._requests = 0.0, 0.0

    @property
    def credit(self) -> float:
        """The credit of a flow that becomes backlogged, in units of its counter."""
        return CREDIT_REQUESTS * self._charged / self._requests if self._charged > 0.0 else 0.0

    def backlogged(self, flow: str, head: Request) -> None:
        account = self._accounts.set_waiting(flow)
        if flow not in self._flows.current:
            if self._flows.current:
                self._level = max(self._level, self._flows.least_first(-inf))
            if account.counter < self._level:
                account.counter = max(account.counter, self._level - self.credit)
            self._flows.set(flow, account.counter)

    def emptied(self, flow: str) -> None:
        self._level = max(self._level, self._flows.least_first(-inf))
        self._flows.current.pop(flow, None)
        self._accounts.set_idle(flow)

    def candidates(self, now: float) -> Iterator[str]:
        return iter(self._flows)

    def dispatched(self, flow: str) -> None:
        if self._flows.current:
            self._level = max(self._level, self._flows.least_first(-inf))
        self._charged *= DISCOUNT
        self._requests = 1.0 + self._requests * DISCOUNT

    def charge(self, flow: str, cost: float) -> None:
        self._charged += cost
        account = self._accounts[flow]
        account.counter += cost
        if flow in self._flows.current:
            self._flows.set(flow, account.counter)
        else:
            self._accounts.idle.move_to_end(flow)

    def balances(self) -> Mapping[str, float]:
        return {flow: account.counter - self._level for flow, account in self._accounts.items()}

    def restore(self, balances: Mapping[str, float]) -> None:
        for flow, balance in balances.items():
            account = self._accounts.open(flow)
            account.counter = self._level + balance
            if flow in self._flows.current:
                self._flows.set(flow, account.counter)

    def standing(self, flow: str) -> tuple[tuple[str, float], ...]:
        account = self._accounts.get(flow)
        return (("counter", self._level if account is None else account.counter),)
