"""The attempt loop: wait for a backend, try it, and try another one as long as the client has seen nothing.

It knows no transport. The gateway and the laboratory each say how one attempt is carried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec import structs

from llmproxy.core.domain import Entry, Request, Verdict
from llmproxy.core.retry import RETRY_WAIT_MIN_S, RetryBudget
from llmproxy.lease import Lease, Leasing
from llmproxy.telemetry.exit import AttemptRecord


@dataclass(slots=True)
class AttemptResult:
    """What the loop needs to know of an attempt that has ended.

    `retryable` says that another backend might do better, and that the client has seen nothing yet. `elsewhere` says
    that another backend has what the request refers to; such attempts are bounded by neither limit nor budget.
    """

    verdict: Verdict = Verdict.CLIENT_GONE
    retryable: bool = False
    elsewhere: bool = False


Result = TypeVar("Result", bound=AttemptResult)


@dataclass(slots=True)
class Routing:
    """Where one request waited and which backends it tried.

    `attempts` counts leases, `preemptions` those given back for a request of a higher band. `lease` is the latest one,
    and `tried` has a record for each. Backends in `excluded` are not tried again.
    """

    request: Request
    attempts: int = 0
    preemptions: int = 0
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
    entry, left_s = Entry.NEW, 0.0
    while True:
        now = clock()
        if entry is not Entry.NEW:
            # The time to wait counts in the waiting room alone: not while a backend works, nor while the request is
            # held because no backend is up.
            deadline_s = now + max(left_s, RETRY_WAIT_MIN_S)
            routing.request = structs.replace(routing.request, deadline_s=deadline_s)
        routing.waits_since_s = now
        async with dispatcher.admit(routing.request, frozenset(routing.excluded), entry) as lease:
            left_s = lease.grant.left_s
            routing.waited_s += lease.grant.at_s - now
            routing.waits_since_s = None
            routing.attempts += 1
            routing.lease = lease
            routing.tried.append(AttemptRecord.begun(lease.grant, now))
            result = await attempt(lease)
        if result.verdict is Verdict.PREEMPTED:
            routing.preemptions += 1
            entry = Entry.PREEMPTED
            continue
        if result.elsewhere and dispatcher.granting:
            entry = Entry.SEEKING
        elif (
            result.retryable
            and routing.attempts - routing.preemptions <= extra_attempts
            and dispatcher.granting
            and budget.take(result.verdict)
        ):
            entry = Entry.RETRY
        else:
            return result
        # A busy backend is full, not broken, and may be the first to have room again.
        if result.verdict is not Verdict.BUSY and routing.request.backend is None:
            routing.excluded.add(lease.backend)
