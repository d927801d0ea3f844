"""The view of a backend: cached while valid, and independent of earlier calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.health import Hang
from llmproxy.core.domain import Request, Stage, Trouble, Verdict
from tests.core.make import DEFAULTS, listing, pools, reading, request

Event = Callable[[Backend, float], object]

REQUESTS = st.builds(
    request,
    id=st.just("r"),
    adapter=st.sampled_from([None, None, "x", "y"]),
    stage=st.sampled_from([Stage.WHOLE, Stage.DECODE]),
    stream=st.booleans(),
    sequences=st.integers(1, 3),
    prompt_tokens=st.integers(1, 500),
)
READINGS = st.fixed_dictionaries(
    {
        "running": st.integers(0, 6),
        "waiting": st.integers(0, 3),
        "deferred": st.integers(0, 2),
        "kv_used": st.none() | st.floats(0.0, 1.0),
        "kv_tokens": st.none() | st.just(1_000),
        "max_adapters": st.none() | st.integers(1, 2),
    }
)


def _book(request: Request) -> Event:
    def book(one: Backend, now: float) -> None:
        one.book(max(one.bookings, default=0) + 1, request, now)

    return book


def _of_lease(act: Callable[[Backend, int, float], object], at: int) -> Event:
    def event(one: Backend, now: float) -> None:
        if one.bookings:
            act(one, list(one.bookings)[at % len(one.bookings)], now)

    return event


# No sum of these times is the end of a slow-start step, where rounding would decide.
PASSED_S = st.sampled_from([0.0, 0.1 * 2**0.5, 0.5 * 3**0.5, 3.0 * 5**0.5])
LEASES = st.integers(0, 5)
LEASE_EVENTS = st.one_of(
    st.builds(_book, REQUESTS),
    st.builds(_of_lease, st.just(lambda one, lease, now: one.started(lease, now)), LEASES),
    st.builds(
        lambda verdict, at: _of_lease(lambda one, lease, now: one.release(lease, verdict, now), at),
        st.just(Verdict.SERVED) | st.sampled_from(Verdict),
        LEASES,
    ),
)
OTHER_EVENTS = st.one_of(
    st.builds(_of_lease, st.just(lambda one, lease, now: one.measured(lease, True, now)), LEASES),
    st.builds(lambda facts: lambda one, now: one.observe(reading(now, **facts)), READINGS),
    st.just(lambda one, now: one.answered(now)),
    st.just(lambda one, _: one.troubled(Trouble.UNHEALTHY)),
    st.just(lambda one, now: one.eject_hung(Hang(now - 3.0, 1, 0), now)),
    st.just(lambda one, now: one.eject_slow("slow", now)),
    st.just(lambda one, _: one.reserve_slots(1)),
    st.just(lambda one, _: setattr(one, "drained", not one.drained)),
)
EVENTS = st.sampled_from([LEASE_EVENTS, LEASE_EVENTS, LEASE_EVENTS, OTHER_EVENTS]).flatmap(lambda events: events)


@given(st.lists(st.tuples(EVENTS, PASSED_S), max_size=30), st.none() | st.integers(1, 8))
def test_earlier_views_do_not_change_a_later_one(events: list[tuple[Event, float]], max_in_flight: int | None) -> None:
    seen, unseen = (Backend("a", DEFAULTS.capacity, DEFAULTS.health, max_in_flight) for _ in range(2))
    for one in (seen, unseen):
        one.answered(0.0)
        one.listed(listing("x", "y"))
    now = 0.0
    for event, passed_s in events:
        now += passed_s
        seen.view(now)
        for one in (seen, unseen):
            event(one, now)
    assert seen.view(now) == unseen.view(now)
    assert seen.changes_at(now) == unseen.changes_at(now)


def test_a_view_is_kept_until_something_happens() -> None:
    one = Backend("a", DEFAULTS.capacity, replace(DEFAULTS.health, slow_start_s=0.0), 8)
    one.answered(0.0)
    one.listed(listing())
    kept = one.view(1.0)
    assert one.view(2.0) is kept
    one.book(1, request(), 2.0)
    assert (one.view(2.0).load, kept.load) == (1, 0)


@pytest.mark.parametrize(
    "event",
    [
        lambda one: one.book(2, request(), 0.2),
        lambda one: one.started(1, 0.2),
        lambda one: one.release(1, Verdict.SERVED, 0.2),
    ],
    ids=["booked", "started", "ended"],
)
def test_view_shows_the_load_of_another_engine_with_the_next_lease_event(event: Callable[[Backend], object]) -> None:
    of = pools(dict.fromkeys("ab"), replace(DEFAULTS, capacity=replace(DEFAULTS.capacity, initial_batch_limit=4)))
    a, b = of.backends["a"], of.backends["b"]
    for one in (a, b):
        one.limit.forget()
        one.observe(reading(0.0))
    a.limit.value = 64
    a.book(1, request(), 0.0)
    before = a.view(0.0).proven_load
    b.limit.begin_at(32, converged=False)
    b.observe(reading(0.1))
    event(a)
    assert (before, a.view(0.2).proven_load) == (4, 32)


def test_an_answer_that_fetches_its_prompt_waits_for_no_place_until_it_has_begun() -> None:
    one = Backend("a", DEFAULTS.capacity, DEFAULTS.health, 8)
    one.answered(0.0)
    one.listed(listing())
    one.observe(reading(0.0, waiting=1, deferred=1))
    assert one.view(0.0).waiting == 1
    one.book(1, request(stage=Stage.DECODE), 0.0)
    assert one.view(0.0).waiting == 0
    one.started(1, 0.0)
    assert one.view(0.0).waiting == 1
