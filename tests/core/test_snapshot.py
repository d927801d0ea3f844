"""Snapshots of the waiting room: complete counts, bounded size, and no effect on the state."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from llmproxy.core import snapshot
from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, AdmissionKind, Grant, Request, Slo, Trouble, Verdict
from llmproxy.core.lease_events import Returned, Started
from llmproxy.core.pools import Pools
from llmproxy.core.queueing import lazy_heap, queue
from llmproxy.core.settings import UsageLimit
from llmproxy.core.snapshot import BandSnapshot, PoolSnapshot, Position
from tests.core.make import DEFAULTS, grants, listing, only_grant, pools, reading, refusal, request, submit

NO_LOOK_AHEAD = replace(DEFAULTS.capacity, look_ahead=0)
ACME = "tenant:acme"


def full(backends: int = 1, **settings: Any) -> Pools:
    """A pool whose backends have one slot each, all taken."""
    given: dict[str, Any] = {"capacity": NO_LOOK_AHEAD, "fairness": "round_robin"} | settings
    fleet = pools({f"b{i}": 1 for i in range(backends)}, replace(DEFAULTS, **given))
    submit(fleet, *(request(id=f"seat-{i}") for i in range(backends)))
    assert len(fleet.decide(0.0)) == backends
    return fleet


def enter(fleet: Pools, now: float = 0.0, **given: Any) -> Request:
    one = request(arrived_s=now, deadline_s=now + 60.0, **given)
    fleet.submit(one, now)
    return one


def only_pool(fleet: Pools, now: float) -> PoolSnapshot:
    (pool,) = fleet.snapshot(now).pools
    return pool


def band(fleet: Pools, level: int, now: float = 0.0) -> BandSnapshot:
    return next(one for one in only_pool(fleet, now).bands if one.level == level)


def place(fleet: Pools, name: str, now: float) -> Position:
    found = fleet.position(name, now)
    assert found is not None
    return found


def test_every_band_is_shown_with_its_ceiling_and_share() -> None:
    fleet = full(min_shares={SHEDDABLE: 0.1}, headroom_s=inf)
    enter(fleet, band=7)
    shown = [(one.level, one.ceiling, one.min_share, one.waiting) for one in only_pool(fleet, 0.0).bands]
    assert shown == [(CRITICAL, 1.0, 0.0, 0), (7, 0.95, 0.0, 1), (DEFAULT, 0.95, 0.0, 0), (SHEDDABLE, 0.85, 0.1, 0)]


def test_flow_shows_its_head_and_its_standing() -> None:
    fleet = full(fairness="fair_share")
    first = enter(fleet, 1.0, label="mine", prompt_tokens=70, slo=Slo(ttft_s=3.0))
    enter(fleet, 2.0)
    (flow,) = band(fleet, DEFAULT, 5.0).shown
    assert (flow.flow, flow.waiting, flow.oldest_age_s) == ("flow", 2, 4.0)
    assert (flow.head.id, flow.head.label, flow.head.age_s, flow.head.prompt_tokens) == (first.id, "mine", 4.0, 70)
    assert flow.head.left_s == pytest.approx(56.0)
    assert flow.head.slack_s == pytest.approx(-1.0)
    assert dict(flow.standing) == {"counter": 30.0}, "it was charged for the seat that it has"


def test_the_oldest_need_not_be_the_head() -> None:
    fleet = full()
    enter(fleet, 1.0, flow="blue")
    enter(fleet, 2.0, flow="blue", slo=Slo(ttft_s=30.0))
    (flow,) = band(fleet, DEFAULT, 4.0).shown
    assert (flow.head.age_s, flow.oldest_age_s) == (2.0, 3.0)


def test_slack_counts_how_long_service_takes() -> None:
    fleet = full()
    (grant,) = _granted(fleet, request(id="r", stream=True), 0.0)
    fleet.apply(Started(grant.lease), 2.0)
    enter(fleet, 3.0, slo=Slo(ttft_s=5.0), flow="blue")
    enter(fleet, 3.0, flow="green", slo=Slo(tpot_s=0.1))
    slack_s = {flow.flow: flow.head.slack_s for flow in band(fleet, DEFAULT, 4.0).shown}
    # A single observation of 2 s outweighs the initial 0 s only in part.
    assert slack_s == {"blue": pytest.approx(2.0, abs=0.4), "green": None}


def _granted(fleet: Pools, one: Request, now: float) -> list[Grant]:
    """Serves `one` in the taken slot."""
    seat = Grant(1, request(), None, 0.0, 0, None)  # type: ignore[arg-type]
    fleet.apply(Returned(seat.lease, Verdict.SERVED), now)
    fleet.submit(one, now)
    return grants(fleet, now)


def test_flows_are_shown_in_the_policys_order_and_the_rest_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "FLOWS_MAX", 3)
    fleet = full()
    for name in "abcde":
        enter(fleet, flow=name)
    one = band(fleet, DEFAULT)
    assert [flow.flow for flow in one.shown] == ["a", "b", "c"]
    assert (one.flows, one.waiting) == (5, 5)


def test_all_pools_together_show_a_bounded_number_of_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmproxy.core.pools.TOTAL_FLOWS_MAX", 5)
    fleet = pools(
        {"a": 1, "b": 1},
        replace(DEFAULTS, capacity=NO_LOOK_AHEAD),
        listings={"a": listing(), "b": listing(base="other")},
    )
    for level in (CRITICAL, DEFAULT):
        for i in range(3):
            enter(fleet, band=level, flow=f"f{i}")
            enter(fleet, band=level, flow=f"f{i}", pool="other", model="other")
    shown = {pool.pool: [len(one.shown) for one in pool.bands] for pool in fleet.snapshot(0.0).pools}
    assert shown == {"base": [3, 2, 0], "other": [0, 0, 0]}


def test_only_the_first_of_each_flow_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = full()
    for i in range(100):
        enter(fleet, float(i), flow="blue")
    looked = 0
    really = lazy_heap.LazyHeap.first

    def counted(heap: Any, most: int) -> Any:
        nonlocal looked
        for queued in really(heap, most):
            looked += 1
            yield queued

    monkeypatch.setattr(lazy_heap.LazyHeap, "first", counted)
    fleet.snapshot(100.0)
    assert 0 < looked <= queue.FLOW_LOOK_MAX


@pytest.mark.parametrize("fairness", ["fcfs", "round_robin", "fair_share", "slo"])
def test_looking_changes_nothing(fairness: str) -> None:
    def order(look: bool) -> list[str]:
        fleet = full(fairness=fairness)
        for i in range(20):
            enter(fleet, i / 10, flow=f"f{i % 4}", prompt_tokens=10 * (i % 3) + 1)
        seat, served = Grant(1, request(), None, 0.0, 0, None), []  # type: ignore[arg-type]
        for i in range(20):
            if look:
                fleet.snapshot(2.0 + i)
                fleet.check(2.0 + i)
            fleet.apply(Returned(seat.lease, Verdict.SERVED), 2.0 + i)
            (seat,) = fleet.decide(2.0 + i)  # type: ignore[assignment]
            served.append(f"{seat.request.flow} {seat.request.arrived_s}")
        return served

    assert order(look=True) == order(look=False)


def test_backends_say_for_whom_they_have_room() -> None:
    fleet = pools({"a": 10, "b": 10, "c": 10}, replace(DEFAULTS, capacity=NO_LOOK_AHEAD, headroom_s=inf))
    fleet.backends["a"].observe(reading(0.0, running=9))
    fleet.backends["a"].observe(reading(0.1, running=9))
    fleet.backends["b"].observe(reading(0.0, running=10))
    fleet.backends["b"].observe(reading(0.1, running=10))
    for _ in range(2):
        fleet.troubled("c", Trouble.TIMEOUT)
    rooms = {one.view.backend: one.room_for for one in only_pool(fleet, 0.2).backends}
    assert rooms == {"a": (CRITICAL,), "b": (), "c": ()}


def test_backend_with_a_queue_of_its_own_has_no_room_for_bands_below_default() -> None:
    fleet = pools({"a": 10}, replace(DEFAULTS, capacity=NO_LOOK_AHEAD))
    enter(fleet, band=CRITICAL, stream=True)
    only_grant(fleet, 0.0)
    (row,) = only_pool(fleet, 0.1).backends
    assert row.room_for == (CRITICAL, DEFAULT, SHEDDABLE)
    fleet.backends["a"].observe(reading(0.1, running=1, waiting=1))
    (row,) = only_pool(fleet, 0.2).backends
    assert row.room_for == (CRITICAL, DEFAULT)
    low = enter(fleet, 0.2, band=SHEDDABLE)
    assert not fleet.decide(0.2), f"{low.id} went"


def test_a_pool_without_backends_up_holds_requests_and_stops_their_clock() -> None:
    fleet = full(queue=replace(DEFAULTS.queue, no_backend_wait_s=30.0))
    one = enter(fleet, 0.0)
    for _ in range(2):
        fleet.troubled("b0", Trouble.TIMEOUT)
    fleet.decide(10.0)
    pool = only_pool(fleet, 15.0)
    assert (pool.alive, pool.held, pool.leases) == (False, True, 1)
    assert place(fleet, one.id, 15.0).left_s == pytest.approx(25.0), "of the 30 s for which it is held, 5 s are over"
    fleet.backends["b0"].answered(20.0)
    fleet.decide(20.0)
    assert place(fleet, one.id, 21.0).left_s == pytest.approx(49.0), (
        "of its own 60 s, 10 s were over before and 1 s is since"
    )


def limited() -> Pools:
    limits = {ACME: UsageLimit(in_flight=1, requests_per_min=60.0, tokens_per_min=600.0), "model:m": UsageLimit(9)}
    fleet = pools({"a": 1}, replace(DEFAULTS, capacity=NO_LOOK_AHEAD, limits=limits))
    enter(fleet, limits=(ACME,))
    fleet.decide(0.0)
    return fleet


def test_usage_limits_show_the_rest() -> None:
    fleet = limited()
    seen = {one.name: one for one in fleet.snapshot(0.0).limits}
    acme, model = seen[ACME], seen["model:m"]
    assert (acme.in_flight, acme.in_flight_max) == (1, 1)
    assert [acme.requests_left, acme.tokens_left] == pytest.approx([59.0, 580.0])
    assert (model.in_flight, model.in_flight_max, model.requests_left, model.tokens_left) == (0, 9, None, None)
    later = {one.name: one for one in fleet.snapshot(1.0).limits}[ACME]
    assert [later.requests_left, later.tokens_left] == pytest.approx([60.0, 590.0])


def test_usage_limits_in_use_are_shown_first_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmproxy.core.pools.LIMITS_MAX", 1)
    seen = limited().snapshot(0.0)
    assert ([one.name for one in seen.limits], seen.limits_more) == ([ACME], 1)


def test_blocked_requests_are_counted_by_band_and_limit() -> None:
    fleet = limited()
    blocked = [enter(fleet, band=level, limits=(ACME,)) for level in (DEFAULT, CRITICAL, DEFAULT)]
    seat = Grant(1, request(limits=(ACME,)), None, 0.0, 0, None)  # type: ignore[arg-type]
    _block(fleet)
    assert (dict(band(fleet, CRITICAL).blocked), dict(band(fleet, DEFAULT).blocked)) == ({ACME: 1}, {ACME: 2})
    assert fleet.blocked() == {ACME: 3}
    assert band(fleet, DEFAULT).waiting == 0
    positions = [fleet.position(one.id, 1.0) for one in blocked]
    assert [(one.blocked_by, one.ahead_in_flow) for one in positions if one is not None] == [
        (ACME, 1),
        (ACME, 0),
        (ACME, 2),
    ]
    fleet.apply(Returned(seat.lease, Verdict.SERVED), 1.0)
    grant = only_grant(fleet, 1.0)
    assert grant.request.band == CRITICAL
    assert fleet.blocked() == {ACME: 2}


def _block(fleet: Pools) -> None:
    """Adds two slots, one of them reserved, so that waiting requests are tried and reach their usage limit."""
    fleet.backends["a"].limit.value = 3
    fleet.backends["a"].cached_view = None
    assert not fleet.decide(0.0)


# --- one request ------------------------------------------------------------------------------------------------------


def test_a_position_counts_who_goes_first() -> None:
    fleet = full()
    enter(fleet, 0.1, flow="blue")
    enter(fleet, 0.2, flow="blue", band=CRITICAL)
    enter(fleet, 0.3, flow="green", band=CRITICAL)
    enter(fleet, 0.4, flow="green", band=SHEDDABLE)
    enter(fleet, 0.5, flow="green")
    one = enter(fleet, 0.6, flow="blue", label="mine")
    enter(fleet, 0.7, flow="blue")
    position = fleet.position("mine", 1.0)
    assert position == fleet.position(one.id, 1.0)
    assert position is not None
    assert (position.pool, position.id, position.label, position.flow) == ("base", one.id, "mine", "blue")
    assert (position.band, position.ahead_in_bands, position.ahead_in_flow) == (DEFAULT, 2, 1)
    assert position.waited_s == pytest.approx(0.4)
    assert position.blocked_by is None


def test_position_follows_the_ordering() -> None:
    fleet = full()
    any_time = enter(fleet, 0.1)
    urgent = enter(fleet, 0.2, slo=Slo(ttft_s=30.0))
    back = request(id="back")
    fleet.submit(back, 0.3, entry=AdmissionKind.PREEMPTED)
    places = {one.id: fleet.position(one.id, 1.0) for one in (any_time, urgent, back)}
    assert [place and place.ahead_in_flow for place in places.values()] == [2, 1, 0]


def test_requests_that_left_are_neither_found_nor_counted() -> None:
    fleet = full()
    _, left, last = (enter(fleet, i / 10, label=name) for i, name in enumerate(("one", "two", "three")))
    fleet.cancel(left)
    assert fleet.position("two", 1.0) is None
    assert fleet.position(left.id, 1.0) is None
    assert fleet.position("nobody", 1.0) is None
    position = place(fleet, "three", 1.0)
    assert (position.id, position.ahead_in_flow) == (last.id, 1)
    fleet.check(1.0)


def test_a_label_given_twice_means_the_newer_until_it_leaves() -> None:
    fleet = full()
    older, newer = enter(fleet, 0.1, label="same"), enter(fleet, 0.2, label="same")
    assert place(fleet, "same", 1.0).id == newer.id
    fleet.cancel(older)
    assert place(fleet, "same", 1.0).id == newer.id
    fleet.cancel(newer)
    assert fleet.position("same", 1.0) is None


def test_a_request_that_was_refused_is_not_found() -> None:
    fleet = full(queue=replace(DEFAULTS.queue, requests_max=1))
    enter(fleet, label="in")
    refusal(enter, fleet, label="out")
    assert fleet.position("out", 0.0) is None


def test_a_line_too_long_to_count_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = full()
    for i in range(12):
        enter(fleet, i / 10, label=f"l{i}")
    monkeypatch.setattr(lazy_heap, "BEFORE_LOOK_MAX", 12)
    assert place(fleet, "l7", 2.0).ahead_in_flow == 7
    monkeypatch.setattr(lazy_heap, "BEFORE_LOOK_MAX", 11)
    position = place(fleet, "l7", 2.0)
    assert position.ahead_in_flow is None
