"""The attempt loop: wait for a backend, try it, and retry on another backend until the client has received a byte.

The loop is independent of the transport: the gateway and the laboratory pass a function that carries out an attempt.
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
"""Failed stages after which a request is no longer split. Failed stages do not count against the limit of attempts or
the retry budget, because the proxy chose to split the request."""


class AttemptRecord(Struct, kw_only=True, omit_defaults=True):
    """An attempt, from its wait to its end. Times are on the scheduler's clock, so that their order can be audited."""

    backend: str | None = None
    stage: Stage = Stage.WHOLE
    # The attempt waited from `queued_s` to `granted_s`. At its grant, `queued_ahead` requests of its pool still waited.
    queued_s: float | None = None
    granted_s: float | None = None
    queued_ahead: int | None = None
    # The reason of the grant.
    why: GrantReason | None = None
    # The number of backends compared, and the named parts of the chosen backend's score.
    candidates: int | None = None
    terms: tuple[tuple[str, float], ...] = ()
    # Predictions of the placement, None if it predicts nothing. The time to first token starts at the grant.
    expected_cached_tokens: int | None = None
    predicted_ttft: Predicted | None = None
    predicted_tpot: Predicted | None = None
    # First body byte of an answer that was passed to the client.
    first_byte_s: float | None = None
    # The end, or the preemption.
    ended_s: float | None = None
    verdict: Verdict | None = None
    # HTTP status of the backend, None if it sent none.
    status: int | None = None
    # The failure, in words.
    error: str | None = None
    # The span that was sent to the backend as the parent, None without tracing.
    span_id: str | None = None

    @classmethod
    def begun(cls, grant: Grant, queued_s: float) -> AttemptRecord:
        """Returns the record of a request that was granted a backend after waiting since `queued_s`."""
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
            # Several sequences stream interleaved, so the time per token of a single sequence cannot be observed.
            predicted_tpot=placed.tpot if request.sequences <= 1 else None,
        )

    @property
    def predicted(self) -> dict[str, float]:
        """The predictions of the placement by name. Missing predictions are left out."""
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
    """The result of an attempt: whether and how the attempt loop may retry."""

    verdict: Verdict = Verdict.CLIENT_GONE
    # Whether another backend may be tried; NO once the client has received a byte.
    again: Again = Again.NO
    # Whether the request may have crashed the engine.
    deadly: bool = False
    # Whether a prefill stage succeeded, so that the decode stage follows on another backend.
    prefilled: bool = False
    # Whether the request should be retried without a split.
    unsplit: bool = False


Result = TypeVar("Result", bound=AttemptResult)

_STAYS = frozenset({Verdict.BUSY, Verdict.TRANSFER_FAILED})


@dataclass(slots=True)
class Routing:
    """The state of a request over all of its attempts."""

    request: Request
    # Attempts with a lease. Both stages of a split request are one attempt.
    attempts: int = 0
    # Attempts that ended in favour of a request of a higher band.
    preemptions: int = 0
    # Attempts of a split request in which a stage failed.
    failed_stages: int = 0
    # Engines that may have computed the request and gave no answer.
    computed: int = 0
    # Attempts that failed only because of the choice of backend, such as a stored response on another backend.
    misdirected: int = 0
    # The latest lease.
    lease: Lease | None = None
    # Seconds in the waiting room in earlier waits, and the begin of the current wait.
    waited_s: float = 0.0
    waits_since_s: float | None = None
    # Backends that are not tried again.
    excluded: frozenset[str] = frozenset()
    tried: list[AttemptRecord] = field(default_factory=list)

    def queue_wait_s(self, now: float) -> float:
        """Returns the seconds that the request has waited for a backend until `now`, over all attempts. Before the
        first lease, returns the seconds since the arrival.
        """
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
    """Try backends until an attempt succeeds or must not be retried. Returns the result of the last attempt.

    Cancellation gives the lease back.

    Args:
        attempt: Carries out an attempt on a lease, and sets the lease's verdict and usage.

    Raises:
        Refused: The request was refused, or dropped while it waited, at the first or a further attempt.
    """
    clock = asyncio.get_running_loop().time
    entry, left_s = AdmissionKind.NEW, 0.0
    while True:
        now = clock()
        if entry is not AdmissionKind.NEW:
            # Only time in the waiting room counts as waiting: not time on a backend, nor on hold while no backend is
            # up.
            deadline_s = now + max(left_s, RETRY_WAIT_MIN_S)
            routing.request = structs.replace(routing.request, deadline_s=deadline_s)
        routing.waits_since_s = now
        async with dispatcher.admit(routing.request, routing.excluded, entry) as lease:
            left_s = lease.grant.left_s
            routing.waited_s += lease.grant.at_s - now
            routing.waits_since_s = None
            answers = lease.grant.request.stage is Stage.DECODE
            routing.attempts += not answers
            # The decode stage got no place, so the request starts again. This counts as a failed stage too.
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
            # Each backend is tried once, which bounds these attempts.
            entry = AdmissionKind.OWNER_LOOKUP
            routing.misdirected += 1
        elif staged:
            entry = AdmissionKind.RETRY
            routing.failed_stages += 1
            if result.unsplit or routing.failed_stages == FAILED_STAGES_MAX:
                routing.request = structs.replace(routing.request, splittable=False)
        elif (
            routing.attempts - routing.preemptions - routing.failed_stages - routing.misdirected <= extra_attempts
            and budget.take(result.verdict)
        ):
            entry = AdmissionKind.RETRY
        else:
            return result
        # A busy backend is full, not broken. It may be the only backend, so it is avoided and not excluded. A backend
        # that failed to fetch a prompt may compute the prompt itself.
        if result.verdict is Verdict.BUSY:
            routing.request = structs.replace(routing.request, avoid=lease.backend)
        if result.verdict not in _STAYS and not result.unsplit and routing.request.backend is None:
            routing.excluded |= {lease.backend}
