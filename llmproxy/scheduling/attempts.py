"""The attempt loop: wait for a backend, try it, and try another one as long as the client has seen nothing.

It knows no transport. The gateway and the laboratory each say how one attempt is carried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec import Struct, structs

from llmproxy.core.domain import AdmissionKind, Grant, GrantReason, Predicted, Request, Stage, Verdict
from llmproxy.core.retry import COMPUTED_MAX, RETRY_WAIT_MIN_S, Again, RetryBudget
from llmproxy.scheduling.lease import Lease, Leasing

FAILED_STAGES_MAX = 2
"""After so many failed stages a request is not split any more. They count against neither limit nor budget: one replica
would have served the request, and it is not to pay for being split."""


class AttemptRecord(Struct, kw_only=True, omit_defaults=True):
    """One attempt, from its wait to its end. Instants are of the scheduler's clock, so that orders can be audited.

    It waited from `queued_s` to `granted_s`, when `queued_ahead` requests of its pool waited. `why` says why it was its
    turn, `terms` are the named parts of the placement's score among `candidates` backends. `expected_cached_tokens`,
    `predicted_ttft` (from the grant) and `predicted_tpot` are what the placement expected; None where it predicts
    nothing. `first_byte_s` is the first body byte of an answer that the client got, `status` that of the backend, None
    where it sent none, and `error` what was wrong, in words. A preempted attempt was withdrawn at `ended_s`. `span_id`
    is what the backend got as its parent in the trace of the request, None without tracing. `stage` is the part of the
    request that the backend was given.
    """

    backend: str | None = None
    stage: Stage = Stage.WHOLE
    queued_s: float | None = None
    granted_s: float | None = None
    queued_ahead: int | None = None
    why: GrantReason | None = None
    candidates: int | None = None
    terms: tuple[tuple[str, float], ...] = ()
    expected_cached_tokens: int | None = None
    predicted_ttft: Predicted | None = None
    predicted_tpot: Predicted | None = None
    first_byte_s: float | None = None
    ended_s: float | None = None
    verdict: Verdict | None = None
    status: int | None = None
    error: str | None = None
    span_id: str | None = None

    @classmethod
    def begun(cls, grant: Grant, queued_s: float) -> AttemptRecord:
        """The attempt of a request that waited since `queued_s` for this grant."""
        placed, request = grant.placed, grant.request
        return cls(
            backend=placed.backend,
            stage=request.stage,
            queued_s=queued_s,
            granted_s=grant.at_s,
            queued_ahead=grant.queued_ahead,
            why=grant.why,
            candidates=placed.candidates,
            terms=placed.terms,
            expected_cached_tokens=placed.cached_tokens if request.prefix or placed.ttft is not None else None,
            predicted_ttft=placed.ttft,
            # The tokens of several sequences come mixed, so that the pace of one is not seen.
            predicted_tpot=placed.tpot if request.sequences <= 1 else None,
        )

    @property
    def predicted(self) -> dict[str, float]:
        """What the placement expected, by name, without what it does not predict."""
        ttft, tpot = self.predicted_ttft, self.predicted_tpot
        predicted: dict[str, float] = (
            {} if self.expected_cached_tokens is None else {"cached_tokens": self.expected_cached_tokens}
        )
        if ttft is not None:
            predicted |= {"ttft_s": ttft.expected_s, "ttft_p90_s": ttft.p90_s}
        if tpot is not None:
            predicted |= {"tpot_s": tpot.expected_s, "tpot_p90_s": tpot.p90_s}
        return predicted


@dataclass(slots=True)
class AttemptResult:
    """What the loop needs to know of an attempt that has ended.

    `again` says whether another backend may be tried; NO where the client has seen something. `deadly`: the request
    may have ended the engine.
    `prefilled`: the prompt is computed, and the answer comes next, from another backend. `unsplit`: the request would
    do better as a whole.
    """

    verdict: Verdict = Verdict.CLIENT_GONE
    again: Again = Again.NO
    deadly: bool = False
    prefilled: bool = False
    unsplit: bool = False


Result = TypeVar("Result", bound=AttemptResult)

_STAYS = frozenset({Verdict.BUSY, Verdict.TRANSFER_FAILED})


@dataclass(slots=True)
class Routing:
    """Where one request waited and which backends it tried.

    `attempts` counts leases, `preemptions` those given back for a request of a higher band. Both stages of a request
    that is split are one attempt, and `failed_stages` counts attempts of which one failed. `computed` counts engines
    that took the request and gave no answer, `sought` the attempts for which only the backend was to blame. `lease` is
    the latest one, and `tried` has a record for each. Backends in `excluded` are not tried again.
    """

    request: Request
    attempts: int = 0
    preemptions: int = 0
    failed_stages: int = 0
    computed: int = 0
    sought: int = 0
    lease: Lease | None = None
    waited_s: float = 0.0
    waits_since_s: float | None = None
    excluded: set[str] = field(default_factory=set)
    tried: list[AttemptRecord] = field(default_factory=list)

    def queue_wait_s(self, now: float) -> float:
        """Seconds in the waiting room until `now`, over all attempts; since its arrival where it had no lease."""
        if self.lease is None:
            return now - self.request.arrived_s
        return self.waited_s + (0.0 if self.waits_since_s is None else now - self.waits_since_s)


async def run_attempts(
    routing: Routing,
    attempt: Callable[[Lease], Awaitable[Result]],
    dispatcher: Leasing,
    budget: RetryBudget,
    extra_attempts: int,
) -> Result:
    """Try backends until an attempt succeeds, or fails for good; the result of the last attempt.

    `attempt` carries out one attempt on a lease, whose verdict and usage it sets. Raises Refused where a request is
    refused while it waits, also for a further attempt.
    """
    clock = asyncio.get_running_loop().time
    entry, left_s = AdmissionKind.NEW, 0.0
    while True:
        now = clock()
        if entry is not AdmissionKind.NEW:
            # The time to wait counts in the waiting room alone: not while a backend works, nor while the request is
            # held because no backend is up.
            deadline_s = now + max(left_s, RETRY_WAIT_MIN_S)
            routing.request = structs.replace(routing.request, deadline_s=deadline_s)
        routing.waits_since_s = now
        async with dispatcher.admit(routing.request, frozenset(routing.excluded), entry) as lease:
            left_s = lease.grant.left_s
            routing.waited_s += lease.grant.at_s - now
            routing.waits_since_s = None
            answers = lease.grant.request.stage is Stage.DECODE
            routing.attempts += not answers
            # The place for its answer was gone: it begins anew, and is not to pay for that either.
            routing.failed_stages += entry is AdmissionKind.PREFILLED and not answers
            routing.lease = lease
            routing.tried.append(AttemptRecord.begun(lease.grant, now))
            result = await attempt(lease)
        if result.verdict is Verdict.PREEMPTED:
            routing.preemptions += 1
            entry = AdmissionKind.PREEMPTED
            continue
        if result.prefilled:
            entry = AdmissionKind.PREFILLED
            continue
        whole = lease.grant.request.stage is Stage.WHOLE
        routing.computed += result.deadly or (whole and result.again is Again.ONCE)
        staged = not whole and routing.failed_stages < FAILED_STAGES_MAX
        if (result.again is Again.NO and not result.unsplit) or not dispatcher.granting:
            return result
        if routing.computed >= COMPUTED_MAX:
            return result
        if result.again is Again.ANYWHERE_ELSE and routing.request.backend is None:
            # Bounded by the number of backends, because each is tried once.
            entry = AdmissionKind.OWNER_LOOKUP
            routing.sought += 1
        elif staged:
            entry = AdmissionKind.RETRY
            routing.failed_stages += 1
            if result.unsplit or routing.failed_stages == FAILED_STAGES_MAX:
                routing.request = structs.replace(routing.request, splittable=False)
        elif (
            routing.attempts - routing.preemptions - routing.failed_stages - routing.sought <= extra_attempts
            and budget.take(result.verdict)
        ):
            entry = AdmissionKind.RETRY
        else:
            return result
        # A busy backend is full, not broken. It may be the only one, so it is avoided and not excluded. A backend that
        # could not fetch a prompt from another may compute it.
        if result.verdict is Verdict.BUSY:
            routing.request = structs.replace(routing.request, avoid=lease.backend)
        if result.verdict not in _STAYS and not result.unsplit and routing.request.backend is None:
            routing.excluded.add(lease.backend)
