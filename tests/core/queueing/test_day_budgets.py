"""Budgets per calendar day: no overrun by requests in flight, and an exact midnight."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.core.domain import Outcome, Refused, Request
from llmproxy.core.queueing.day_budgets import DAY_S, DayBudgets
from llmproxy.core.queueing.rate_limits import REQUESTS, TOKENS, expected
from llmproxy.core.settings import UsageLimit
from tests.core.make import request

TENANT, MODEL = "tenant:acme", "model:m"
MIDNIGHT_S = 1_000.0


def budgets(day: str = "2026-11-28", **limits: Any) -> DayBudgets:
    days = DayBudgets({TENANT: UsageLimit(**limits)})
    days.begin(day, MIDNIGHT_S, 0.0)
    return days


def theirs(**fields: Any) -> Request:
    return request(**{"limits": (TENANT, MODEL), "prompt_tokens": 60, "output_tokens": 40} | fields)


def refused(days: DayBudgets, one: Request, now: float) -> Refused:
    with pytest.raises(Refused) as found:
        days.admit(one, now)
    assert found.value.outcome is Outcome.RATE_LIMITED
    return found.value


def test_requests_in_flight_reserve_their_expected_tokens() -> None:
    days = budgets(tokens_per_day=250)
    days.admit(theirs(id="a"), 0.0)
    days.admit(theirs(id="b"), 0.0)
    assert days.left(TENANT, 0.0) == (None, 50.0)
    assert "has 50 left, and this request may need 100" in refused(days, theirs(id="c"), 0.0).message
    days.used(theirs(id="a"), 30.0, 1.0)
    days.ended(theirs(id="a"), 1.0)
    days.admit(theirs(id="c"), 1.0)
    assert days.left(TENANT, 1.0) == (None, 20.0)


def test_a_request_that_an_engine_refused_keeps_its_reservation() -> None:
    days = budgets(tokens_per_day=100)
    days.admit(theirs(id="a"), 0.0)
    days.booked(theirs(id="a"))
    days.used(theirs(id="a"), 0.0, 1.0)
    refused(days, theirs(id="b"), 1.0)
    days.used(theirs(id="a"), 30.0, 2.0)
    assert days.left(TENANT, 2.0) == (None, 0.0)
    days.ended(theirs(id="a"), 2.0)
    assert days.left(TENANT, 2.0) == (None, 70.0)


def test_a_request_that_used_nothing_gives_its_tokens_back() -> None:
    days = budgets(tokens_per_day=100)
    days.admit(theirs(id="a"), 0.0)
    days.admit(theirs(id="a"), 0.0)
    days.ended(theirs(id="a"), 1.0)
    days.ended(theirs(id="a"), 1.0)
    assert days.left(TENANT, 0.0) == (None, 100.0)


@pytest.mark.parametrize("booked", [0, 1, 2])
def test_a_request_counts_if_it_reached_a_backend(booked: int) -> None:
    days = budgets(requests_per_day=2)
    days.admit(theirs(id="a"), 0.0)
    for _ in range(booked):
        days.booked(theirs(id="a"))
    assert days.left(TENANT, 0.0) == (1.0, None)
    days.ended(theirs(id="a"), 0.0)
    assert days.left(TENANT, 0.0) == (1.0 if booked else 2.0, None)


def test_a_request_that_another_process_admitted_counts() -> None:
    days = budgets(requests_per_day=2)
    days.booked(theirs(id="a"))
    days.ended(theirs(id="a"), 0.0)
    assert days.left(TENANT, 0.0) == (1.0, None)


def test_the_refusal_says_when_the_day_ends() -> None:
    days = budgets(requests_per_day=1)
    days.admit(theirs(id="a"), 0.0)
    early, late = refused(days, theirs(id="b"), 100.0), refused(days, theirs(id="b"), MIDNIGHT_S - 0.25)
    assert (early.retry_after_s, late.retry_after_s) == (900.0, 1.0)
    assert early.message == (
        "The limit of 1 requests per day of the tenant `acme` is used up. A new day begins in 15 min."
    )


def test_the_budget_is_whole_at_midnight_and_not_before() -> None:
    days = budgets(requests_per_day=1, tokens_per_day=100)
    days.admit(theirs(id="a"), MIDNIGHT_S - 2.0)
    refused(days, theirs(id="b"), MIDNIGHT_S - 0.001)
    # Its expected tokens are reserved over midnight, and its real ones count on the day of its end.
    refused(days, theirs(id="b"), MIDNIGHT_S)
    days.booked(theirs(id="a"))
    days.used(theirs(id="a"), 90.0, MIDNIGHT_S + 1.0)
    days.ended(theirs(id="a"), MIDNIGHT_S + 1.0)
    assert days.left(TENANT, MIDNIGHT_S + 1.0) == (0.0, 10.0)


def test_a_day_is_named_late_or_twice() -> None:
    days = budgets(tokens_per_day=100)
    days.used(theirs(id="a"), 10.0, MIDNIGHT_S + 1.0)
    days.begin("2026-11-29", MIDNIGHT_S + DAY_S, MIDNIGHT_S + 2.0)
    assert days.left(TENANT, MIDNIGHT_S + 2.0) == (None, 90.0)
    days.begin("2026-11-29", MIDNIGHT_S + DAY_S, MIDNIGHT_S + 3.0)
    assert days.left(TENANT, MIDNIGHT_S + 3.0) == (None, 90.0)


def test_a_clock_that_is_set_forward_begins_a_day() -> None:
    days = budgets(tokens_per_day=100)
    days.used(theirs(id="a"), 60.0, 1.0)
    days.begin("2026-12-03", 5_000.0, 2.0)
    assert days.left(TENANT, 2.0) == (None, 100.0)


def test_the_use_of_earlier_processes_counts_once() -> None:
    days = budgets(tokens_per_day=100, requests_per_day=5)
    for _ in range(2):
        days.restore({(TENANT, TOKENS): 70.0, (TENANT, REQUESTS): 3.0, ("tenant:gone", TOKENS): 9.0})
    assert days.left(TENANT, 0.0) == (2.0, 30.0)


def test_other_limits_after_a_reload_keep_the_use() -> None:
    days = budgets(tokens_per_day=100)
    days.used(theirs(id="a"), 60.0, 1.0)
    days.reconfigure({TENANT: UsageLimit(tokens_per_day=80), MODEL: UsageLimit(in_flight=1)})
    assert (days.left(TENANT, 1.0), days.left(MODEL, 1.0)) == ((None, 20.0), (None, None))


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 60), st.booleans()), max_size=40))
def test_admitted_requests_never_expect_more_than_the_budget(walk: list[tuple[int, int, bool]]) -> None:
    days, in_flight, used = budgets(tokens_per_day=200), list[Request](), 0
    for number, (tokens, real, ends) in enumerate(walk):
        one = theirs(id=f"r{number}", prompt_tokens=tokens, output_tokens=0)
        held = sum(expected(other) for other in in_flight)
        try:
            days.admit(one, 0.0)
            in_flight.append(one)
            assert used + held + tokens <= 200
        except Refused:
            assert used + held + tokens > 200
        if ends and in_flight:
            gone = in_flight.pop(0)
            days.used(gone, real, 0.0)
            days.ended(gone, 0.0)
            used += real
    assert days.left(TENANT, 0.0) == (None, max(0.0, 200.0 - used - sum(map(expected, in_flight))))


def test_a_request_above_the_whole_budget_needs_a_day_of_its_own() -> None:
    days = budgets(tokens_per_day=50)
    days.admit(theirs(id="a"), 0.0)
    refused(days, theirs(id="b", prompt_tokens=1, output_tokens=0), 0.0)
