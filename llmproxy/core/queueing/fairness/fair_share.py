"""Weighted token fairness by virtual counters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmproxy.core.domain import Request
from llmproxy.core.queueing.fairness.accounts import Accounts
from llmproxy.core.queueing.fairness.policy import FairnessPolicy, policies
from llmproxy.core.queueing.lazy_heap import KeyedHeap
from llmproxy.core.settings import Settings


@dataclass(slots=True)
class _Account:
    counter: float = 0.0


@policies.register("fair_share")
class FairShare(FairnessPolicy):
    """Weighted fairness by virtual counters: the flow that got the least service for its weight goes next.

    The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). A flow that
    becomes backlogged is lifted to the least counter among the backlogged, or where there are none to that of the flow
    that emptied last, so that credit does not pile up while idle; a flow in debt keeps its debt. Unlike the paper's,
    the charge is an estimate at dispatch that is trued up while the answer streams and at its end, because a proxy
    learns tokens late.

    Bounds. Let U be the most that requests dispatched and unfinished at one time are charged per unit of weight, each
    with the highest charge of its life, over all flows. While the first candidate is the one dispatched, at any time:

    1. The counters of two backlogged flows differ by at most U. Let f be ahead of g, and t0 when f was last dispatched
       or lifted. f's counter was the least then, and gains since only what f has in flight at t0. g's counter has lost
       since only what estimates in flight at t0 were too high by (its own, or through a lift another flow's): a later
       request takes back no more than it brought. Both are parts of what is in flight at t0, and no request is in both.
    2. The service per unit of weight that two flows receive in any interval in which both are backlogged differs by at
       most 2 U: counters less what is charged and not yet delivered differ by at most U for the same reason, and an
       interval has two ends.

    With tokens charged, U <= max(w_p L, w_q M) in the paper's words, per unit of weight: L the longest prompt, M the
    tokens (of prompts, and of answers as estimated or as delivered, whichever is more) dispatched and unfinished, for
    output weights w_q >= w_p. The paper proves that no policy that neither idles nor preempts can promise less than
    w_q M for the service.

    What weakens them are heads that fit nowhere, as their flows are passed over.
    """

    def __init__(self, settings: Settings) -> None:
        self._flows = KeyedHeap()
        self._accounts = Accounts(_Account)
        self._floor = 0.0

    def backlogged(self, flow: str, head: Request) -> None:
        account = self._accounts.wait(flow)
        if flow not in self._flows:
            least = self._flows.least()
            account.counter = max(account.counter, self._floor if least is None else least[0])
            self._flows.set(flow, account.counter)

    def emptied(self, flow: str) -> None:
        self._flows.discard(flow)
        account = self._accounts.rest(flow)
        # With nobody left, the next flow starts level with the last one served, and not from the beginning of time.
        self._floor = self.counter(flow) if account is None else account.counter

    def candidates(self, now: float) -> Iterator[str]:
        return iter(self._flows)

    def charge(self, flow: str, cost: float) -> None:
        account = self._accounts.of(flow)
        account.counter += cost
        if flow in self._flows:
            self._flows.set(flow, account.counter)

    def standing(self, flow: str) -> tuple[tuple[str, float], ...]:
        return (("counter", self.counter(flow)),)

    def counter(self, flow: str) -> float:
        """The charges so far per unit of weight, lifts included."""
        account = self._accounts.find(flow)
        return self._floor if account is None else account.counter
