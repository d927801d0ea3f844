"""An independent audit of the queue: priority inversions, and differences between the token counters of flows.

The audit sees every call of the core and every decision, and counts in the same way for every policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

from llmproxy.core.backends.view import View
from llmproxy.core.domain import AdmissionKind, Decision, Drop, Grant, Request, Stage, Verdict
from llmproxy.core.lease_events import LeaseEvent, Progress, Returned
from llmproxy.core.placement.policy import could_serve
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.charge import charges
from llmproxy.core.settings import Settings

FLOWS_MAX = 40  # Maximum number of backlogged flows whose counters are compared in a band, to keep a comparison cheap.
COUNTERS_MAX = 10_000  # Most counters. Beyond it, the counters of flows without requests are dropped.

Flow = tuple[int, str]  # The key of a flow: (band, fairness key).


class _AuditedLease:
    __slots__ = ("charged", "request", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.charged = 0.0
        self.tokens = request.prompt_tokens + request.output_tokens


class Audit:
    """The counts of one queue.

    `inversions`: grants of a backend that a waiting request of a higher band could have used. Requests with a usage
    limit are not counted. The audit has its own list of waiting requests.

    `counter_difference`: the largest difference between the virtual token counters of two backlogged flows of one band
    (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024); None if two flows were never backlogged
    together. A counter is the flow's charges divided by its weight, raised when the flow becomes backlogged.

    `unfinished_tokens_most`: the largest number of tokens at one time in dispatched requests. An answer counts its
    estimated or its delivered tokens, whichever is more.
    """

    def __init__(self, settings: Settings) -> None:
        self.inversions = 0
        self.counter_difference: float | None = None
        self.unfinished_tokens_most = 0
        self.waiting: dict[str, tuple[Request, frozenset[str]]] = {}
        self._bands: Counter[int] = Counter()
        self._backlogged: dict[int, Counter[str]] = {}
        self._counters: dict[Flow, float] = {}
        self._floors: dict[int, float] = {}
        self._leases: dict[int, _AuditedLease] = {}
        self._unfinished_tokens = 0
        self._charge = charges.get(settings.fairness_cost)(settings)

    # --- in and out -----------------------------------------------------------------------------------------------

    def entered(self, request: Request, excluded: frozenset[str]) -> None:
        self.waiting[request.id] = request, excluded
        self._bands[request.band] += 1
        flows = self._backlogged.setdefault(request.band, Counter())
        if not flows[request.flow]:
            flow = request.band, request.flow
            others = [self._counters[request.band, name] for name, waiting in flows.items() if waiting]
            floor = min(others) if others else self._floors.get(request.band, 0.0)
            self._counters[flow] = max(self._counters.get(flow, 0.0), floor)
            if len(self._counters) > COUNTERS_MAX:
                self._forget()
        flows[request.flow] += 1

    def left(self, request: Request) -> None:
        if self.waiting.pop(request.id, None) is None:
            return
        self._bands[request.band] -= 1
        flows = self._backlogged[request.band]
        flows[request.flow] -= 1
        if not flows[request.flow]:
            del flows[request.flow]
            if not flows:
                self._floors[request.band] = self._counters[request.band, request.flow]

    def granted(self, grant: Grant, view: View) -> None:
        """Records a grant. `view` is the granted backend; for a split request, its decode backend."""
        request = grant.request
        self.left(request)
        # A decode stage got its slot with the grant of its prefill stage, so its grant cannot be an inversion.
        if not grant.why.guaranteed and request.stage is not Stage.DECODE:
            self.inversions += any(
                not other.limits and could_serve(other, excluded, view) for other, excluded in self._above(request.band)
            )
        lease = self._leases[grant.lease] = _AuditedLease(request)
        self._unfinished_tokens += lease.tokens
        self.unfinished_tokens_most = max(self.unfinished_tokens_most, self._unfinished_tokens)
        self._charge_to(lease, self._charge.estimate(request))

    def progressed(self, event: Progress) -> None:
        lease = self._leases[event.lease]
        self._grow(lease, lease.request.prompt_tokens + event.output_tokens)
        so_far = self._charge.so_far(lease.request, event.output_tokens)
        self._charge_to(lease, max(so_far, lease.charged))

    def returned(self, event: Returned) -> None:
        lease, usage = self._leases.pop(event.lease), event.usage
        if usage is not None:
            self._grow(lease, usage.prompt_tokens + usage.output_tokens)
            self._charge_to(lease, self._charge.final(lease.request, usage))
        elif event.verdict is not Verdict.SERVED:
            self._charge_to(lease, 0.0)
        self._unfinished_tokens -= lease.tokens

    def compare(self) -> None:
        """Compares the counters of the backlogged flows."""
        for band, flows in self._backlogged.items():
            if len(flows) > 1:
                counters = [self._counters[band, flow] for flow in islice(flows, FLOWS_MAX)]
                self.counter_difference = max(self.counter_difference or 0.0, max(counters) - min(counters))

    def _above(self, band: int) -> Iterator[tuple[Request, frozenset[str]]]:
        if any(waiting for level, waiting in self._bands.items() if level > band):
            yield from (entry for entry in self.waiting.values() if entry[0].band > band)

    def _forget(self) -> None:
        here = {(request.band, request.flow) for request, _ in self.waiting.values()}
        here.update((lease.request.band, lease.request.flow) for lease in self._leases.values())
        self._counters = {flow: counter for flow, counter in self._counters.items() if flow in here}

    def _grow(self, lease: _AuditedLease, tokens: int) -> None:
        more = max(0, tokens - lease.tokens)
        lease.tokens += more
        self._unfinished_tokens += more
        self.unfinished_tokens_most = max(self.unfinished_tokens_most, self._unfinished_tokens)

    def _charge_to(self, lease: _AuditedLease, cost: float) -> None:
        flow = lease.request.band, lease.request.flow
        self._counters[flow] += (cost - lease.charged) / lease.request.weight
        lease.charged = cost


class AuditedPools(Pools):
    """The production pools, with an `Audit` of every call."""

    def __init__(self, settings: Settings, *others: Any) -> None:
        super().__init__(settings, *others)
        self.audit = Audit(settings)

    def submit(
        self,
        request: Request,
        now: float,
        excluded: frozenset[str] = frozenset(),
        entry: AdmissionKind = AdmissionKind.NEW,
    ) -> None:
        super().submit(request, now, excluded, entry)
        self.audit.entered(request, excluded)

    def cancel(self, request: Request) -> None:
        super().cancel(request)
        self.audit.left(request)

    def decide(self, now: float) -> list[Decision]:
        decisions = super().decide(now)
        for decision in decisions:
            if isinstance(decision, Grant):
                placed = decision.placed
                self.audit.granted(decision, self.backends[placed.answers_on or placed.backend].view(now))
            elif isinstance(decision, Drop):
                self.audit.left(decision.request)
        if decisions:
            self.audit.compare()
        return decisions

    def apply(self, event: LeaseEvent, now: float) -> None:
        super().apply(event, now)
        if isinstance(event, Progress):
            self.audit.progressed(event)
        elif isinstance(event, Returned):
            self.audit.returned(event)
