"""The loop over the attempts of one request: what counts as an attempt."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from llmproxy.core.domain import AdmissionKind, Grant, GrantReason, Outcome, Placed, Refused, Request, Stage, Verdict
from llmproxy.core.placement.staged import as_stage
from llmproxy.core.retry import Cause, RetryBudget
from llmproxy.scheduling.attempt import Attempt
from llmproxy.scheduling.attempts import Routing, run_attempts
from llmproxy.scheduling.lease import Lease
from tests.core.make import request

PREFILL, DECODE, WHOLE = Stage.PREFILL, Stage.DECODE, Stage.WHOLE


class Granting:
    """Grants these stages in order, and refuses further requests."""

    granting = True

    def __init__(self, *stages: Stage) -> None:
        self._stages = list(stages)
        self.excluded: frozenset[str] = frozenset()

    async def admit(self, asked: Request, excluded: frozenset[str], _: AdmissionKind) -> Lease:
        self.excluded = excluded
        if not self._stages:
            raise Refused(Outcome.EXPIRED, "Too late.")
        granted = as_stage(asked, self._stages.pop(0))
        return Lease(Grant(1, granted, Placed("b", 1.0, (), 1), 0.0, 0, GrantReason((), 1, (), 0)), Mock())


@pytest.mark.parametrize(
    ("stages", "attempts"),
    [
        ((WHOLE,), 1),
        ((PREFILL, DECODE), 1),
        # The place for the answer was gone, and the request was refused, or served from its beginning.
        ((PREFILL,), 1),
        ((PREFILL, WHOLE), 2),
        ((PREFILL, PREFILL, DECODE), 2),
    ],
)
async def test_both_stages_are_one_attempt_and_each_beginning_is_one(stages: tuple[Stage, ...], attempts: int) -> None:
    asked, routing = request(splittable=True), Routing()

    async def attempt(_: Lease, tried: Attempt) -> None:
        tried.verdict, tried.prefilled = Verdict.SERVED, tried.stage is PREFILL

    dispatcher: Any = Granting(*stages)
    try:
        await run_attempts(asked, routing, attempt, dispatcher, RetryBudget(0.0), 0)
    except Refused:
        assert stages[-1] is PREFILL
    assert (routing.attempts, len(routing.tried)) == (attempts, len(stages))
    # A failed stage does not use up the request's attempts.
    assert routing.attempts - routing.failed_stages == 1


@pytest.mark.parametrize(
    ("causes", "attempts"),
    [
        ([Cause.BROKEN] * 9, 2),
        ([Cause.ENGINE_DEAD, Cause.GONE, Cause.BROKEN], 2),
        ([Cause.ERROR, Cause.ERROR, Cause.ERROR], 2),
        ([Cause.LATE, Cause.BROKEN, Cause.ERROR], 2),
        # An attempt without computation is not a repetition, and a refusal does not count against the limit.
        ([Cause.NO_CONNECTION, Cause.BROKEN, Cause.ERROR], 3),
        ([Cause.UNAUTHORIZED] * 6 + [Cause.BUSY] * 9, 9),
        ([Cause.BUSY] * 9, 3),
        ([Cause.REJECTED] * 9, 1),
        ([Cause.OVERRAN] * 9, 1),
    ],
)
async def test_engines_compute_a_request_twice_at_most(causes: list[Cause], attempts: int) -> None:
    asked, routing, failures = request(), Routing(), iter(causes)

    async def attempt(_: Lease, tried: Attempt) -> None:
        tried.fail(Outcome.INTERNAL, next(failures), "")

    dispatcher: Any = Granting(*[WHOLE] * 20)
    await run_attempts(asked, routing, attempt, dispatcher, RetryBudget(0.0), 2)
    assert routing.attempts == attempts


async def test_a_request_avoids_the_backend_that_was_busy_last() -> None:
    asked, routing, seen = request(), Routing(), []

    async def attempt(lease: Lease, tried: Attempt) -> None:
        seen.append((lease.grant.request.avoid, set(dispatcher.excluded)))
        tried.fail(Outcome.INTERNAL, Cause.BUSY, "")

    dispatcher: Any = Granting(*[WHOLE] * 20)
    await run_attempts(asked, routing, attempt, dispatcher, RetryBudget(0.0), 1)
    assert seen == [("", set()), ("b", set())]


async def test_two_stages_that_end_their_engines_are_the_last() -> None:
    asked, routing = request(splittable=True), Routing()

    async def attempt(_: Lease, tried: Attempt) -> None:
        tried.fail(Outcome.INTERNAL, Cause.BROKEN, "")

    dispatcher: Any = Granting(*[PREFILL] * 20)
    await run_attempts(asked, routing, attempt, dispatcher, RetryBudget(0.0), 2)
    assert routing.attempts == 2
