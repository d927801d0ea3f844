"""Requests are on hold while no backend of their pool is up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmproxy.core.domain import CRITICAL, SHEDDABLE, AdmissionKind, Outcome, Verdict
from llmproxy.core.lease_events import Returned
from llmproxy.core.pools import Pools
from tests.core.make import (
    DEFAULTS,
    granted,
    kill,
    listing,
    names,
    only_drop,
    only_grant,
    pools,
    refusal,
    request,
    submit,
    tight,
)


def fleet(no_backend_wait_s: float = 10.0, **backends: int) -> Pools:
    settings = tight(queue=replace(DEFAULTS.queue, no_backend_wait_s=no_backend_wait_s))
    return pools(backends or {"a": 1}, settings)


def down(of: Pools, *names: str) -> None:
    for name in names:
        kill(of, name)


def up(of: Pools, name: str, now: float) -> None:
    of.backends[name].answered(now)
    of.listed(name, listing())


def test_requests_held_for_a_pool_are_served_in_order_when_it_returns() -> None:
    of = fleet(a=9)
    down(of, "a")
    for name, band, at in (("low", SHEDDABLE, 1.0), ("second", CRITICAL, 2.0), ("first", CRITICAL, 1.5)):
        of.submit(request(id=name, band=band, arrived_s=at), 2.0)
    assert granted(of, 5.0) == []
    up(of, "a", 6.0)
    assert names(granted(of, 6.0)) == ["first", "second", "low"]


def test_a_request_is_held_for_hold_s_and_then_answered_that_none_came_up() -> None:
    of = fleet(no_backend_wait_s=10.0)
    down(of, "a")
    of.submit(request(deadline_s=60.0), 2.0)
    of.decide(2.0)
    assert of.next_wakeup(2.0) == 12.0
    assert only_drop(of, 12.0).outcome is Outcome.EXPIRED_NO_BACKENDS


def test_a_request_that_may_wait_less_is_held_less() -> None:
    of = fleet(no_backend_wait_s=10.0)
    down(of, "a")
    of.submit(request(deadline_s=3.0), 2.0)
    only_drop(of, 3.0)


def test_deadline_is_paused_while_a_request_is_held() -> None:
    of = fleet(no_backend_wait_s=30.0)
    submit(of, request(id="runs"), request(id="waits", deadline_s=5.0))
    runs = only_grant(of, 0.0)
    down(of, "a")
    of.decide(4.0)
    of.apply(Returned(runs.lease, Verdict.LOST), 4.0)
    assert granted(of, 8.5) == []
    up(of, "a", 8.6)
    of.submit(request(id="urgent", band=CRITICAL, arrived_s=8.6), 8.6)
    assert names(granted(of, 8.6)) == ["urgent"]
    assert of.next_wakeup(8.6) == pytest.approx(9.6), "it had one second left"
    assert only_drop(of, 9.6).outcome is Outcome.EXPIRED


def test_a_grant_has_the_time_that_was_left_of_the_requests_own() -> None:
    of = fleet(no_backend_wait_s=30.0)
    down(of, "a")
    submit(of, request(deadline_s=5.0))
    of.decide(0.0)
    up(of, "a", 9.0)
    assert only_grant(of, 9.0).left_s == pytest.approx(5.0), "nothing of it went by while no backend was up"


def test_a_retry_of_the_only_backend_is_held_and_may_return_to_it() -> None:
    of = fleet()
    of.submit(request(id="retried"), 0.0)
    grant = only_grant(of, 0.0)
    of.apply(Returned(grant.lease, Verdict.CONNECT_FAILED), 0.1)
    of.submit(grant.request, 0.1, frozenset({"a"}), AdmissionKind.RETRY)
    assert granted(of, 0.2) == []
    down(of, "a")
    assert granted(of, 0.5) == []
    up(of, "a", 4.0)
    assert names(granted(of, 4.0)) == ["retried"]


def test_a_retry_goes_to_another_backend_or_is_refused_without_one() -> None:
    of = fleet(a=1, b=1)
    of.submit(request(), 0.0, frozenset({"a"}), AdmissionKind.RETRY)
    grant = only_grant(of, 0.0)
    assert grant.placed.backend == "b"
    assert (
        "has failed this request"
        in refusal(of.submit, request(), 0.0, frozenset({"a", "b"}), AdmissionKind.RETRY).message
    )


def test_a_name_whose_backends_are_down_is_held_beside_others_up() -> None:
    settings = replace(DEFAULTS, queue=replace(DEFAULTS.queue, no_backend_wait_s=10.0))
    of = pools({"a": 1, "b": 1}, settings, listings={"a": listing("lora"), "b": listing()})
    down(of, "a")
    submit(of, request(id="lora", adapter="lora", deadline_s=60.0), request(id="base", deadline_s=60.0))
    assert names(granted(of, 0.0)) == ["base"]
    (drop,) = of.decide(10.0)
    assert drop.request.id == "lora"


def test_the_limits_of_the_waiting_room_hold_while_requests_are_held() -> None:
    of = pools({"a": 1}, replace(DEFAULTS, queue=replace(DEFAULTS.queue, requests_max=2)))
    down(of, "a")
    submit(of, request(), request())
    assert "requests_max" in refusal(of.submit, request(), 0.0).message
