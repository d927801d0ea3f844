"""Changes of the fleet and its settings while requests wait and run: no request is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from llmproxy.core.domain import CRITICAL, DEFAULT, Drop, Grant, Outcome, Request, Revoke, Trouble, Usage, Verdict
from llmproxy.core.lease_events import Returned, Started
from llmproxy.core.pools import Pools
from llmproxy.core.settings import Settings, UsageLimit
from tests.core.make import DEFAULTS, cached, grants, listing, only_drop, pools, reading, refusal, request, tight

TIGHT = tight(ceilings={DEFAULT: 1.0})


def submit(of: Pools, now: float = 0.0, times: int = 1, **given: Any) -> Request:
    for _ in range(times):
        asked = request(arrived_s=now, deadline_s=now + 60.0, **given)
        of.submit(asked, now)
    return asked


def backends(granted: Sequence[Grant]) -> list[str]:
    return sorted(grant.placed.backend for grant in granted)


# --- drain and undrain ------------------------------------------------------------------------------------------------


def test_drained_backend_ends_its_requests_and_gets_no_new_ones() -> None:
    one = pools({"a": 2, "b": 2}, TIGHT)
    submit(one, times=2)
    before = grants(one)
    assert backends(before) == ["a", "b"]
    one.backends["a"].drained = True
    submit(one, times=3)
    assert backends(grants(one)) == ["b"]
    mine = next(grant for grant in before if grant.placed.backend == "a")
    one.apply(Started(mine.lease), 1.0)
    one.apply(Returned(mine.lease, Verdict.SERVED, Usage(10, 10)), 1.0)
    assert grants(one, 1.0) == []
    one.backends["a"].drained = False
    assert backends(grants(one, 1.0)) == ["a", "a"]


def test_a_drained_backend_does_not_count_as_ready() -> None:
    one = pools({"a": 1}, replace(TIGHT, queue=replace(DEFAULTS.queue, no_backend_wait_s=0.0)))
    assert one.ready(0.0)
    one.backends["a"].drained = True
    assert not one.ready(0.0)
    assert refusal(submit, one).outcome is Outcome.REJECTED_NO_BACKENDS


# --- models that move ------------------------------------------------------------------------------------------------


def test_requests_for_an_adapter_move_with_it_to_another_base_model() -> None:
    one = pools({"a": 1, "b": 1}, TIGHT, listings={"a": listing("x"), "b": listing(base="other")})
    submit(one)
    assert backends(grants(one)) == ["a"]
    moved, ended = submit(one, adapter="x"), submit(one, adapter="x")
    assert grants(one) == []
    one.listed("b", listing("x", base="other"))
    one.listed("a", listing())
    (grant,) = grants(one, 1.0)
    assert (grant.request.id, grant.placed.backend) == (moved.id, "b")
    assert {pool: need.waiting for pool, need in one.needs(1.0).items()} == {"base": 0, "other": 1}
    one.cancel(ended)
    one.ended(ended, None, 2.0)
    assert {pool: need.waiting for pool, need in one.needs(2.0).items()} == {"base": 0, "other": 0}


def test_a_request_that_ends_after_its_adapter_moved_waits_no_more() -> None:
    one = pools({"a": 1, "b": 1}, TIGHT, listings={"a": listing("x"), "b": listing(base="other")})
    submit(one)
    assert backends(grants(one)) == ["a"]
    gone = submit(one, adapter="x")
    one.listed("b", listing("x", base="other"))
    one.listed("a", listing())
    one.cancel(gone)
    one.ended(gone, None, 1.0)
    assert {pool: need.waiting for pool, need in one.needs(1.0).items()} == {"base": 0, "other": 0}


# --- add and remove ---------------------------------------------------------------------------------------------------


def test_added_backend_takes_waiting_requests_once_it_was_read() -> None:
    one = pools({"a": 1}, TIGHT)
    submit(one, times=2)
    assert backends(grants(one)) == ["a"]
    one.add_backend("late", 1)
    assert grants(one) == []
    one.backends["late"].answered(1.0)
    one.listed("late", listing())
    assert backends(grants(one, 1.0)) == ["late"]


def test_waiting_requests_outlive_the_only_backend() -> None:
    one = pools({"old": 1}, TIGHT)
    submit(one)
    (running,) = grants(one)
    waiting = submit(one)
    one.backends["old"].drained = True
    one.add_backend("new", 1)
    one.apply(Returned(running.lease, Verdict.SERVED), 1.0)
    one.remove_backend("old")
    assert grants(one, 1.0) == []
    assert refusal(one.catalogue.resolve, "base").outcome is Outcome.REJECTED_NO_BACKENDS
    one.backends["new"].answered(2.0)
    one.listed("new", listing())
    assert [(grant.request.id, grant.placed.backend) for grant in grants(one, 2.0)] == [(waiting.id, "new")]


def test_requests_of_a_removed_backend_are_held_and_then_refused() -> None:
    one = pools({"a": 1}, TIGHT)
    one.backends["a"].drained = True
    submit(one)
    one.remove_backend("a")
    assert one.decide(29.0) == []
    assert only_drop(one, 31.0).outcome is Outcome.EXPIRED_NO_BACKENDS


def test_a_removed_backend_takes_its_names_along() -> None:
    one = pools({"a": 1, "b": 1}, TIGHT, listings={"a": listing("x"), "b": listing()})
    assert one.catalogue.resolve("x").adapter == "x"
    one.remove_backend("a")
    assert refusal(one.catalogue.resolve, "x").outcome is Outcome.UNKNOWN_MODEL
    assert one.catalogue.resolve("base").pool == "base"


def cached_tokens(of: Pools, prefix: tuple[int, ...], now: float) -> int:
    """Returns how many tokens of a prompt with these blocks are expected in the cache of its backend."""
    submit(of, now, prefix=prefix, prefix_tokens=16.0, prompt_tokens=64)
    (granted,) = grants(of, now)
    return granted.placed.cached_tokens


def test_a_removed_backend_is_forgotten_and_the_others_are_not() -> None:
    one = pools({"a": 4, "b": 4}, DEFAULTS)
    prompts = {"a": (1, 2, 3), "b": (7, 8, 9)}
    given: dict[str, Grant] = {}
    for name, prefix in prompts.items():
        one.backends["b" if name == "a" else "a"].drained = True
        submit(one, prefix=prefix, prefix_tokens=16.0, prompt_tokens=48)
        (granted,) = grants(one)
        one.backends["b" if name == "a" else "a"].drained = False
        given[granted.placed.backend] = granted
        one.apply(Started(granted.lease), 0.5)
        one.apply(Returned(granted.lease, Verdict.SERVED, Usage(48, 10)), 1.0)
        cached(one, granted, (*prefix, 40))
    one.remove_backend("a")
    # The blocks of a late answer are not noted for a backend that is gone.
    cached(one, given["a"], (1, 2, 3))
    assert cached_tokens(one, prompts["b"], 2.0) == 48
    one.add_backend("a", 4)
    one.backends["a"].answered(2.0)
    one.listed("a", listing())
    one.backends["b"].drained = True
    assert cached_tokens(one, prompts["a"], 3.0) == 0


def test_a_late_answer_of_a_removed_backend_teaches_its_successor_nothing() -> None:
    one = pools({"a": 4, "b": 4}, DEFAULTS)
    one.backends["b"].drained = True
    submit(one, prefix=(1, 2), prefix_tokens=16.0)
    (granted,) = grants(one)
    one.apply(Returned(granted.lease, Verdict.SERVED, Usage(10, 10)), 1.0)
    one.remove_backend("a")
    one.add_backend("a", 4)
    one.backends["a"].answered(2.0)
    one.listed("a", listing())
    cached(one, granted, (1, 2, 3))
    assert cached_tokens(one, (1, 2, 3), 2.0) == 0


def test_a_new_process_behind_a_name_is_down_until_read_and_starts_empty() -> None:
    one = pools({"a": 4}, DEFAULTS)
    one.backends["a"].observe(reading(0.5, running=1))
    submit(one, prefix=(1, 2), prefix_tokens=16.0)
    (granted,) = grants(one)
    one.replace_process("a")
    assert not one.ready(1.0)
    assert one.backends["a"].reading is None
    # Requests on the old process continue, even if the new process does not respond.
    for _ in range(3):
        one.troubled("a", Trouble.REFUSED)
    assert one.decide(1.0) == []
    one.apply(Returned(granted.lease, Verdict.SERVED, Usage(10, 10)), 1.0)
    cached(one, granted, (1, 2, 3))
    one.backends["a"].answered(2.0)
    assert one.ready(2.0)
    assert cached_tokens(one, (1, 2, 3), 2.0) == 0


@pytest.mark.parametrize(
    ("generated", "engines", "known"),
    [(0, 1, False), (899, 1, False), (900, 1, True), (950, 1, True), (None, 1, True), (450, 2, True)],
)
def test_a_counter_that_fell_shows_a_new_process_without_a_refused_poll(
    generated: int | None, engines: int, known: bool
) -> None:
    """A counter that is missing, or of fewer or more engines than before, shows nothing."""
    one = pools({"a": 4}, DEFAULTS)
    one.observe("a", reading(0.5, generated=900))
    submit(one, prefix=(1, 2), prefix_tokens=16.0)
    (running,) = grants(one)
    one.troubled("a", Trouble.TIMEOUT)
    one.backends["a"].answered(2.0)
    one.observe("a", reading(2.0, generated=generated, engines=engines))
    assert (cached_tokens(one, (1, 2), 2.0) > 0) is known
    assert one.backends["a"].processes == (1 if known else 2)
    assert [one for one in one.decide(2.0) if isinstance(one, Revoke)] == []
    one.apply(Returned(running.lease, Verdict.FAILED), 2.5)
    one.check(2.5)


# --- other settings ---------------------------------------------------------------------------------------------------


def reconfigure(of: Pools, settings: Settings, now: float = 0.0, aliases: dict[str, str] | None = None) -> None:
    of.reconfigure(settings, aliases or {}, now)
    of.check(now)


def test_waiting_requests_survive_a_change_of_all_settings() -> None:
    one = pools({"a": 1}, TIGHT)
    submit(one, times=5)
    (running,) = grants(one)
    reconfigure(
        one,
        replace(
            TIGHT,
            ceilings={CRITICAL: 1.0, DEFAULT: 0.9},
            min_shares={DEFAULT: 0.1},
            headroom_s=1.0,
            queue=replace(DEFAULTS.queue, requests_max=1, no_backend_wait_s=5.0),
            health=replace(DEFAULTS.health, failures_before_ejection=1),
        ),
        1.0,
    )
    one.apply(Returned(running.lease, Verdict.SERVED), 1.0)
    served = 1
    while granted := grants(one, 1.0):
        served += len(granted)
        one.apply(Returned(granted[0].lease, Verdict.SERVED), 1.0)
    assert served == 5
    submit(one, 2.0)
    assert "requests_max" in refusal(submit, one, 2.0).message


def test_a_smaller_batch_limit_holds_for_the_next_request() -> None:
    one = pools({"a": 4}, TIGHT)
    submit(one, times=4)
    first = grants(one)
    assert len(first) == 4
    one.backends["a"].set_limits_and_role(2, None)
    submit(one)
    for count, granted in enumerate(first[:3], 1):
        one.apply(Returned(granted.lease, Verdict.SERVED), 1.0)
        assert len(grants(one, 1.0)) == (1 if count == 3 else 0)


def test_shorter_hold_counts_for_held_requests() -> None:
    one = pools({"a": 1}, TIGHT)
    one.backends["a"].drained = True
    submit(one)
    assert one.decide(1.0) == []
    reconfigure(one, replace(TIGHT, queue=replace(DEFAULTS.queue, no_backend_wait_s=2.0)), 1.0)
    assert one.decide(2.9) == []
    assert [type(decision) for decision in one.decide(3.1)] == [Drop]


def test_longer_hold_counts_for_held_requests() -> None:
    one = pools({"a": 1}, replace(TIGHT, queue=replace(DEFAULTS.queue, no_backend_wait_s=2.0)))
    one.backends["a"].drained = True
    one.submit(request(deadline_s=60.0), 0.0)
    assert one.decide(1.0) == []
    reconfigure(one, replace(TIGHT, queue=replace(DEFAULTS.queue, no_backend_wait_s=20.0)), 1.0)
    assert one.decide(20.9) == []
    assert [type(decision) for decision in one.decide(21.1)] == [Drop]


def test_longer_hold_counts_for_requests_from_before() -> None:
    one = pools({"a": 1}, replace(TIGHT, queue=replace(DEFAULTS.queue, no_backend_wait_s=0.0)))
    submit(one, times=2)
    assert len(grants(one)) == 1
    reconfigure(one, TIGHT, 1.0)
    one.backends["a"].drained = True
    assert one.decide(20.0) == []


def test_aliases_change_for_the_next_request() -> None:
    one = pools({"a": 1}, TIGHT, {"old": "base"})
    reconfigure(one, TIGHT, aliases={"new": "base"})
    assert one.catalogue.resolve("new").model == "base"
    refusal(one.catalogue.resolve, "old")


# --- usage limits -----------------------------------------------------------------------------------------------------


def limited(**limit: Any) -> Settings:
    return replace(TIGHT, limits={"tenant:t": UsageLimit(**limit)})


def test_used_rate_counts_under_the_new_limit() -> None:
    one = pools({"a": 9}, limited(requests_per_min=2))
    submit(one, times=2, limits=("tenant:t",))
    reconfigure(one, limited(requests_per_min=3))
    submit(one, limits=("tenant:t",))
    assert refusal(submit, one, limits=("tenant:t",)).outcome is Outcome.RATE_LIMITED


def test_requests_in_flight_count_under_the_new_limit() -> None:
    one = pools({"a": 9}, limited(in_flight=3))
    submit(one, times=3, limits=("tenant:t",))
    first = grants(one)
    reconfigure(one, limited(in_flight=1))
    submit(one, limits=("tenant:t",))
    for count, granted in enumerate(first, 1):
        one.apply(Returned(granted.lease, Verdict.SERVED), 1.0)
        assert len(grants(one, 1.0)) == (1 if count == 3 else 0)


def test_blocked_requests_go_when_their_limit_is_lifted() -> None:
    one = pools({"a": 200}, limited(in_flight=1))
    submit(one, times=150, limits=("tenant:t",))
    running = grants(one)
    assert len(running) == 1
    reconfigure(one, TIGHT)
    for _ in range(20):
        running += grants(one)
    assert len(running) == 150
    for granted in running:
        one.apply(Returned(granted.lease, Verdict.SERVED), 1.0)
    one.check(1.0)


def test_restored_limit_counts_requests_begun_without_it() -> None:
    one = pools({"a": 9}, limited(in_flight=1))
    submit(one, limits=("tenant:t",))
    reconfigure(one, TIGHT)
    (running,) = grants(one)
    reconfigure(one, limited(in_flight=1))
    submit(one, limits=("tenant:t",))
    assert grants(one) == []
    one.apply(Returned(running.lease, Verdict.SERVED), 1.0)
    assert len(grants(one, 1.0)) == 1
