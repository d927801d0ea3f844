"""The loop over the attempts of one request: what counts as an attempt."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import structs

from llmproxy.core.domain import AdmissionKind, Grant, GrantReason, Outcome, Placed, Refused, Request, Stage, Verdict
from llmproxy.core.placement.staged import as_stage
from llmproxy.core.retry import PLANNED_MAX, Cause, RetryBudget
from llmproxy.scheduling.attempt import Attempt, AttemptState
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
        self.asked: list[tuple[AdmissionKind, Request]] = []

    async def admit(self, asked: Request, excluded: frozenset[str], entry: AdmissionKind) -> Lease:
        self.excluded = excluded
        self.asked.append((entry, asked))
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
        ([Cause.ENGINE_DEAD, Cause.HUNG, Cause.BROKEN], 2),
        # Backends that end on purpose are no failures.
        ([Cause.GONE, Cause.DRAINING, Cause.GONE, Cause.BROKEN, Cause.GONE, Cause.BROKEN], 6),
        ([Cause.GONE] * 19, PLANNED_MAX + 3),
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


async def test_a_stream_outlives_more_backends_that_end_on_purpose_than_it_has_attempts() -> None:
    one = Breaking((Cause.GONE, True), (Cause.DRAINING, True), (Cause.GONE, True), STALLED, (Cause.DRAINING, True))
    assert (await one.run(1)).outcome is Outcome.COMPLETED
    assert len(one.broken) == 5


async def test_a_lease_knows_whether_its_stream_may_go_on_elsewhere() -> None:
    one = Breaking((Cause.HUNG, True), (Cause.GONE, True))
    assert (await one.run()).outcome is Outcome.COMPLETED
    assert one.movable == [True, False, False], "a request that may have hung an engine is tried on one more"
    one = Breaking()
    await one.run(0)
    assert one.movable == [False]


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


class Breaking:
    """A request whose attempts fail by these (cause, whether after the first byte). The attempt after them succeeds."""

    def __init__(self, *causes: tuple[Cause, bool], backend: str | None = None, budget: RetryBudget | None = None):
        self.request = request(stream=True, backend=backend)
        self.routing = Routing()
        self.dispatcher: Any = Granting(*[WHOLE] * 20)
        self.budget = RetryBudget(0.0) if budget is None else budget
        self.broken: list[Attempt] = []
        self.movable: list[bool] = []
        self._causes = list(causes)

    async def _serve(self, lease: Lease, attempt: Attempt) -> None:
        self.movable.append(lease.movable)
        cause, began = self._causes.pop(0) if self._causes else (None, True)
        if began:
            attempt.enter(AttemptState.STREAMING)
        if cause is None:
            attempt.complete()
            attempt.enter(AttemptState.DONE)
        else:
            attempt.fail(Outcome.BROKEN_STREAM, cause, f"{cause.value}.")

    async def _rest(self, broken: Attempt) -> Request | None:
        self.broken.append(broken)
        return structs.replace(self.request, prompt_tokens=11, continued=True)

    async def run(self, extra_attempts: int = 2, rest: Any = None) -> Attempt:
        return await run_attempts(
            self.request, self.routing, self._serve, self.dispatcher, self.budget, extra_attempts, rest or self._rest
        )


BROKEN, STALLED = (Cause.BROKEN, True), (Cause.STALLED, True)


async def test_the_rest_of_a_stream_is_a_request_for_another_backend() -> None:
    one = Breaking(STALLED)
    last = await one.run()
    assert last.outcome is Outcome.COMPLETED
    assert one.broken == [one.routing.tried[0]]
    entries = [(entry, asked.continued, asked.prompt_tokens) for entry, asked in one.dispatcher.asked]
    assert entries == [(AdmissionKind.NEW, False, 10), (AdmissionKind.CONTINUED, True, 11)]
    assert one.dispatcher.excluded == {"b"}
    assert one.routing.not_continued is None


async def test_the_rest_is_retried_like_any_request() -> None:
    one = Breaking(STALLED, (Cause.BUSY, False), (Cause.LATE, False))
    assert (await one.run(3)).outcome is Outcome.COMPLETED
    entries = [(entry, asked.continued) for entry, asked in one.dispatcher.asked]
    assert entries[2:] == [(AdmissionKind.RETRY, True), (AdmissionKind.RETRY, True)]
    assert one.routing.not_continued is None


@pytest.mark.parametrize(
    ("causes", "extra_attempts", "why"),
    [
        ([BROKEN, BROKEN], 9, "2 engines ended while they computed it"),
        # An attempt that failed before the first byte counts too.
        ([(Cause.BROKEN, False), BROKEN], 9, "2 engines ended while they computed it"),
        ([STALLED] * 9, 2, "its attempts are used up"),
        ([BROKEN], 0, "its attempts are used up"),
        ([(Cause.OVERRAN, True)], 9, "a repetition would end the same way"),
        ([STALLED, (Cause.REJECTED, False)], 9, "rejected."),
    ],
)
async def test_why_a_stream_is_not_continued(causes: list[tuple[Cause, bool]], extra_attempts: int, why: str) -> None:
    one = Breaking(*causes)
    assert (await one.run(extra_attempts)).outcome is Outcome.BROKEN_STREAM
    assert one.routing.not_continued == why


async def test_each_continued_stream_costs_budget_even_if_its_backend_is_gone() -> None:
    budget = RetryBudget(0.0)
    while budget.take(Verdict.FAILED):
        pass
    budget.give_back()
    one, two = (Breaking((Cause.GONE, True), budget=budget) for _ in range(2))
    assert (await one.run()).outcome is Outcome.COMPLETED
    assert (await two.run()).outcome is Outcome.BROKEN_STREAM
    assert two.routing.not_continued == "the retry budget is used up"


async def test_a_stream_that_cannot_be_continued_costs_no_budget() -> None:
    budget = RetryBudget(0.0)
    while budget.take(Verdict.FAILED):
        pass
    budget.give_back()
    one = Breaking(STALLED, budget=budget)

    async def rest(_: Attempt) -> None:
        one.routing.not_continued = "guided decoding"

    assert (await one.run(rest=rest)).outcome is Outcome.BROKEN_STREAM
    assert one.routing.not_continued == "guided decoding"
    assert (await Breaking(STALLED, budget=budget).run()).outcome is Outcome.COMPLETED


async def test_a_proxy_that_shuts_down_continues_nothing() -> None:
    one = Breaking(STALLED)
    one.dispatcher.granting = False
    assert (await one.run()).outcome is Outcome.BROKEN_STREAM
    assert one.routing.not_continued == "the proxy shuts down"


async def test_an_answer_that_only_one_backend_can_give_is_not_continued() -> None:
    one = Breaking(STALLED, backend="b")
    assert (await one.run()).outcome is Outcome.BROKEN_STREAM
    assert one.routing.not_continued == "only b can serve it"


async def test_the_refusal_of_the_rest_is_the_reason() -> None:
    one = Breaking(STALLED)
    one.dispatcher = Granting(WHOLE)
    with pytest.raises(Refused):
        await one.run()
    assert one.routing.not_continued == "Too late."
