"""The attempt loop: waits for a backend, tries it, and retries, normally on another backend, until the client has
received a byte. After that, another backend may generate the rest of a stream that broke.

The loop is independent of the transport: the gateway and the laboratory pass a function that carries out an attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec import Struct, structs

from llmproxy.core.domain import AdmissionKind, Outcome, Refused, Request, Stage, Verdict
from llmproxy.core.retry import COMPUTED_MAX, PLANNED_MAX, RETRY_WAIT_MIN_S, Again, RetryBudget
from llmproxy.scheduling.attempt import Attempt
from llmproxy.scheduling.lease import Lease, Leasing

FAILED_STAGES_MAX = 2
"""Failed stages after which a request is no longer split. Failed stages do not count against the limit of attempts or
the retry budget, because the proxy chose to split the request."""


_STAYS = frozenset({Verdict.BUSY, Verdict.TRANSFER_FAILED})


class Routing(Struct, kw_only=True, omit_defaults=True):
    """The waits and attempts of a request, on the scheduler's clock: the first part of its record."""

    tried: list[Attempt] = []  # All attempts of the request, oldest first.
    attempts: int = 0  # Attempts with a lease. Both stages of a split request are one attempt.
    preemptions: int = 0  # Attempts that ended in favour of a request of a higher band.
    failed_stages: int = 0  # Attempts of a split request in which a stage failed.
    computed: int = 0  # Attempts in which the engine may have computed the request, and then failed.
    # Seconds in the waiting room in all waits that ended with a lease; None before the first lease.
    queue_wait_s: float | None = None
    # Time at which the last wait began. None if that wait ended with a lease, or before the first wait.
    queued_s: float | None = None
    # How the stream was continued on another backend after it broke. Set by the caller with the first byte of the rest.
    continued: str | None = None
    not_continued: str | None = None  # Why a stream that broke was not continued, in words. The caller may set it.


async def run_attempts(
    request: Request,
    routing: Routing,
    serve: Callable[[Lease, Attempt], Awaitable[None]],
    dispatcher: Leasing,
    budget: RetryBudget,
    extra_attempts: int,
    rest: Callable[[Attempt], Awaitable[Request | None]] | None = None,
) -> Attempt:
    """Tries backends until an attempt succeeds or must not be retried. Returns the last attempt.

    The last attempt may have failed before its first byte although the client has the beginning of the answer from an
    earlier attempt. Cancellation gives the lease back. Raises Refused if the request is refused or dropped.

    `serve` carries out an attempt on a lease. It sets the result, and the verdict and usage of the lease.

    `rest` is called after a stream broke and its lease was given back. It returns the request for the rest of the
    answer, with the same id and with `continued` set; or None to give up, with the reason in `routing.not_continued`.
    """
    clock = asyncio.get_running_loop().time
    entry, left_s = AdmissionKind.NEW, 0.0
    # Backends that are not tried again.
    excluded: frozenset[str] = frozenset()
    # Attempts that failed only because of the choice of backend, such as a stored response on another backend.
    misdirected = 0
    # Attempts that ended because their backend ended on purpose, and the last of these backends.
    planned, left_backend = 0, frozenset[str]()
    while True:
        now = clock()
        if entry is not AdmissionKind.NEW:
            # Only time in the waiting room counts: not time on a backend, nor on hold while none is up.
            request = structs.replace(request, deadline_s=now + max(left_s, RETRY_WAIT_MIN_S))
        routing.queued_s = now
        try:
            lease = await dispatcher.admit(request, excluded | left_backend, entry)
        except Refused as refused:
            if request.continued:
                routing.not_continued = refused.message
            raise
        try:
            left_s = lease.grant.left_s
            routing.queue_wait_s = (routing.queue_wait_s or 0.0) + (lease.grant.at_s - now)
            routing.queued_s = None
            answers = lease.grant.request.stage is Stage.DECODE
            routing.attempts += not answers
            # The decode stage got no place, so the request starts again. This counts as a failed stage too.
            routing.failed_stages += entry is AdmissionKind.PREFILLED and not answers
            result = Attempt.begun(lease.grant, now)
            routing.tried.append(result)
            failures = routing.attempts - routing.preemptions - routing.failed_stages - misdirected - planned
            # The conditions of `_why_not_continued` after a hang, without a call for each attempt.
            suspected = routing.computed + 1 >= COMPUTED_MAX
            lease.movable = request.backend is None and failures <= extra_attempts and not suspected
            await serve(lease, result)
        finally:
            lease.give_back(clock())
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
        if request.continued:
            routing.not_continued = None if result.committed else result.message or None
        if result.again is Again.NO and not result.unsplit:
            if rest is not None and result.committed and result.outcome is not Outcome.COMPLETED:
                routing.not_continued = "a repetition would end the same way"
            return result
        if result.planned and planned < PLANNED_MAX and (whole or result.again is Again.REST):
            planned, left_backend = planned + 1, frozenset({lease.backend})
            failures -= 1
        if result.again is Again.REST:
            if rest is None:
                return result
            left = failures <= extra_attempts
            routing.not_continued = _why_not_continued(request, routing, dispatcher, left=left)
            if routing.not_continued is None and not budget.take(result.verdict, rest=True):
                routing.not_continued = "the retry budget is used up"
            if routing.not_continued is not None:
                return result
            continuation = await rest(result)
            if continuation is None:
                budget.give_back()
                return result
            request, entry = continuation, AdmissionKind.CONTINUED
            excluded |= {lease.backend} - left_backend
            continue
        if not dispatcher.granting:
            return result
        if routing.computed >= COMPUTED_MAX:
            return result
        if result.again is Again.ANYWHERE_ELSE and request.backend is None:
            # Each backend is tried once, which bounds these attempts.
            entry = AdmissionKind.OWNER_LOOKUP
            misdirected += 1
        elif staged:
            entry = AdmissionKind.RETRY
            routing.failed_stages += 1
            if result.unsplit or routing.failed_stages == FAILED_STAGES_MAX:
                request = structs.replace(request, splittable=False)
        elif failures <= extra_attempts and budget.take(result.verdict):
            entry = AdmissionKind.RETRY
        else:
            return result
        # A busy backend is full, not broken. It may be the only backend, so it is avoided and not excluded. A backend
        # that failed to fetch a prompt may compute the prompt itself.
        if result.verdict is Verdict.BUSY:
            request = structs.replace(request, avoid=lease.backend)
        if result.verdict not in _STAYS and not result.unsplit and request.backend is None:
            excluded |= {lease.backend} - left_backend


def _why_not_continued(request: Request, routing: Routing, dispatcher: Leasing, *, left: bool) -> str | None:
    """Returns why no other backend may generate the rest of a stream; None if another backend may.

    `left`: whether the request has attempts left.
    """
    if not dispatcher.granting:
        return "the proxy shuts down"
    if request.backend is not None:
        return f"only {request.backend} can serve it"
    if routing.computed >= COMPUTED_MAX:
        return f"{COMPUTED_MAX} engines ended while they computed it"
    return None if left else "its attempts are used up"
