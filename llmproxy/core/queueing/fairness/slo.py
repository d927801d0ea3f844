"""Takes the flow that meets its latency objectives least often."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from llmproxy.core.domain import Request
from llmproxy.core.queueing.fairness.accounts import Accounts
from llmproxy.core.queueing.fairness.policy import FairnessPolicy, policies
from llmproxy.core.queueing.lazy_heap import KeyedHeap
from llmproxy.core.settings import Settings

BUCKETS = 60
"""Number of parts of the window. Records expire together with their part, so a flow needs at most 61 tallies. A record
counts for at least the window, and at most one part longer."""


@dataclass(slots=True)
class _Account:
    counted: int = 0
    missed: int = 0
    weight: float = 1.0
    due_s: float = inf
    arrived_s: float = 0.0

    @property
    def miss_share(self) -> float:
        return self.missed / self.counted if self.counted else 0.0


@dataclass(slots=True)
class _Tally:
    counted: int = 0
    missed: int = 0


@policies.register("slo")
class SloAdherence(FairnessPolicy):
    """Takes the flow with the lowest adherence to its objective in the rolling window.

    Adherence is the share of the requests counted in the last `slo_window_s` that met their objective; 1 if none was
    counted. Repeatedly serving the lowest adherence is the greedy approach to max-min fairness of adherence. No
    published scheduler uses this quantity. Its definition:

    * A request is counted once: at its end, or as missed at the first call after `ttft_s` has passed before `started`
      was called. So a starved flow does not look like an idle one. A request that ends with `met` None is not counted,
      unless it was counted as missed before.
    * Weights multiply misses: flows are ordered by weight x (1 - adherence), the largest first.
    * Ties, including flows without an objective: the flow whose first request must have its first token soonest,
      requests without that objective last; then the flow whose first request arrived first.
    * A flow whose first request is past its `ttft_s` goes behind all flows whose first request is not. Its miss is
      certain, and serving it first would make others late too. To prevent that such a request blocks the requests
      behind it, use the ordering `least_slack` or deadlines.

    An account is dropped when the last record of an idle flow has left the window. Every record enters and leaves once,
    and each time changes one sorted key, so a call costs O(log n) for n flows, amortised.
    """

    def __init__(self, settings: Settings) -> None:
        self._bucket_s = settings.slo_window_s / BUCKETS
        self._accounts = Accounts(_Account, self._erase)
        self._flows = KeyedHeap()
        self._buckets: deque[tuple[int, dict[str, _Tally]]] = deque()
        self._unstarted: dict[str, str] = {}
        self._counted_late: set[str] = set()
        self._alarms = KeyedHeap()
        self._now = -inf

    def entered(self, request: Request, now: float) -> None:
        self._advance(now)
        self._watch(request)

    def backlogged(self, flow: str, head: Request) -> None:
        account = self._accounts.set_waiting(flow)
        account.weight = head.weight
        account.due_s = _due_s(head)
        account.arrived_s = head.arrived_s
        self._rank(flow, account)
        # A started request may be back after a failed attempt, and its first token is due again.
        self._watch(head)

    def emptied(self, flow: str) -> None:
        self._flows.current.pop(flow, None)
        account = self._accounts.get(flow)
        if account is not None and account.counted:
            self._accounts.set_idle(flow)
        else:
            self._accounts.drop(flow)

    def candidates(self, now: float) -> Iterator[str]:
        self._advance(now)
        return iter(self._flows)

    def started(self, request: Request, now: float) -> None:
        self._advance(now)
        self._forget(request)

    def ended(self, request: Request, met: bool | None, now: float) -> None:
        self._advance(now)
        self._forget(request)
        if request.id in self._counted_late:
            self._counted_late.discard(request.id)
        elif met is not None:
            self._count(request.flow, met)

    def standing(self, flow: str) -> tuple[tuple[str, float], ...]:
        account = self._accounts.get(flow) or _Account()
        return (
            ("adherence", 1.0 - account.miss_share),
            ("counted", float(account.counted)),
            ("missed", float(account.missed)),
        )

    def _rank(self, flow: str, account: _Account) -> None:
        late = float(self._now > account.due_s)
        self._flows.set(flow, late, -account.weight * account.miss_share, account.due_s, account.arrived_s)

    # --- the window ----------------------------------------------------------------------------------------------

    def _count(self, flow: str, met: bool) -> None:
        index = self._bucket()
        if not self._buckets or self._buckets[-1][0] != index:
            self._buckets.append((index, {}))
        account = self._accounts.open(flow)
        for tally in (account, self._buckets[-1][1].setdefault(flow, _Tally())):
            tally.counted += 1
            tally.missed += not met
        if flow in self._flows.current:
            self._rank(flow, account)

    def _bucket(self) -> int:
        return int(self._now // self._bucket_s)

    def _advance(self, now: float) -> None:
        """Applies changes that time alone causes: expired records and late first tokens. Ignores an older `now`."""
        if now <= self._now:
            return
        self._now = now
        while self._buckets and self._buckets[0][0] < self._bucket() - BUCKETS:
            self._leave(self._buckets.popleft()[1])
        for request_id in self._alarms.take_below(now):
            self._counted_late.add(request_id)
            self._count(self._unstarted.pop(request_id), met=False)

    def _leave(self, bucket: dict[str, _Tally]) -> None:
        for flow, tally in bucket.items():
            account = self._accounts.open(flow)
            account.counted -= tally.counted
            account.missed -= tally.missed
            if flow in self._flows.current:
                self._rank(flow, account)
            elif not account.counted:
                self._accounts.drop(flow)

    def _erase(self, flow: str) -> None:
        for _, bucket in self._buckets:
            bucket.pop(flow, None)

    # --- requests that may come too late -------------------------------------------------------------------------

    def _watch(self, request: Request) -> None:
        due_s = _due_s(request)
        if due_s == inf or request.id in self._unstarted or request.id in self._counted_late:
            return
        self._unstarted[request.id] = request.flow
        self._alarms.set(request.id, due_s)

    def _forget(self, request: Request) -> None:
        self._unstarted.pop(request.id, None)
        self._alarms.current.pop(request.id, None)


def _due_s(request: Request) -> float:
    """Returns when the first token is due, on the clock of `now`; infinity without such an objective."""
    ttft_s = None if request.slo is None else request.slo.ttft_s
    return inf if ttft_s is None else request.arrived_s + ttft_s
