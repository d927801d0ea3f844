from __future__ import annotations

from dataclasses import replace

import pytest

from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, AdmissionKind, Request, Verdict
from llmproxy.core.lease_events import Returned
from llmproxy.core.policy_registry import Faults
from llmproxy.core.queueing.claims import Claims
from llmproxy.core.queueing.deadlines import Deadlines
from llmproxy.core.queueing.fairness.fcfs import FcfsFairness
from llmproxy.core.queueing.occupancy import DrainRate, Full, Occupancy
from llmproxy.core.queueing.ordering import Rank
from llmproxy.core.queueing.queue import FLOW_LOOK_MAX, HEAPS_MAX, Band, Queued, head_rank
from tests.core.make import DEFAULTS, grants, listing, names, only_grant, pools, refusal, request, tight

# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["flow_", "band_", ""])
@pytest.mark.parametrize(("unit", "limit"), [("requests", 2), ("bytes", 250), ("tokens", 50)])
def test_each_limit_is_given_by_its_name(kind: str, unit: str, limit: int) -> None:
    name = f"{kind}{unit}_max"
    occupancy = Occupancy(replace(DEFAULTS.queue, **{name: limit}))
    one, two, three = request(), request(), request()
    for waiting in (one, two):
        assert occupancy.full(waiting) is None
        occupancy.enter(waiting, 0.0)
    assert occupancy.full(three) == Full(f"queue.{name}", limit, total=not kind)
    assert occupancy.queued() == {0: (2, 200)}
    occupancy.leave(one)
    assert occupancy.full(three) is None
    occupancy.check()


def test_a_full_flow_or_band_does_not_limit_the_others() -> None:
    occupancy = Occupancy(replace(DEFAULTS.queue, flow_requests_max=1, band_requests_max=2, requests_max=3))
    occupancy.enter(request(flow="f"), 0.0)
    assert occupancy.full(request(flow="g")) is None
    assert occupancy.full(request(flow="f", band=CRITICAL)) is None
    occupancy.enter(request(flow="g"), 0.0)
    assert occupancy.full(request(flow="h")) == Full("queue.band_requests_max", 2, total=False)
    occupancy.enter(request(flow="f", band=CRITICAL), 0.0)
    assert occupancy.full(request(flow="g", band=CRITICAL)) == Full("queue.requests_max", 3, total=True)


def test_request_that_fits_exactly_is_admitted() -> None:
    occupancy = Occupancy(replace(DEFAULTS.queue, bytes_max=100, band_bytes_max=100, tokens_max=20))
    assert occupancy.full(request(body_bytes=100)) is None
    occupancy.enter(request(body_bytes=100), 0.0)
    assert occupancy.full(request(body_bytes=1)) is not None


def test_a_request_above_the_token_limit_may_wait_alone() -> None:
    occupancy = Occupancy(replace(DEFAULTS.queue, flow_tokens_max=50, band_tokens_max=50, tokens_max=50))
    assert occupancy.full(request(prompt_tokens=1000)) is None
    occupancy.enter(request(), 0.0)
    assert occupancy.full(request(prompt_tokens=1000)) is not None


# --- flows ------------------------------------------------------------------------------------------------------------


def queued(one: Request) -> Queued:
    return Queued(one, Rank((0.0, one.arrived_s)))


def waiting(band: Band, flow: str = "flow") -> list[str]:
    return [queued.request.id for queued in band.first(flow)]


def test_a_retry_comes_back_to_where_it_stood() -> None:
    band = Band(FcfsFairness(DEFAULTS), Faults(), Claims())
    asked = {name: request(id=name, arrived_s=at) for name, at in [("r1", 1.0), ("r2", 2.0), ("r3", 3.0), ("r9", 9.0)]}
    lines = {name: queued(asked[name]) for name in ("r9", "r1", "r3", "r2")}
    for one in lines.values():
        band.push(one, 9.0)
        band.check(9.0)
    assert waiting(band) == ["r1", "r2", "r3", "r9"]
    band.remove(lines["r1"])
    band.remove(lines["r3"])
    band.check(9.0)
    assert waiting(band) == ["r2", "r9"]


def test_preempted_requests_come_first_in_the_order_of_arrival() -> None:
    band = Band(FcfsFairness(DEFAULTS), Faults(), Claims())
    first, second, third = (request(id=f"r{at}", arrived_s=float(at)) for at in (1, 2, 3))
    band.push(queued(first), 3.0)
    for one in (third, second):
        band.push(Queued(one, head_rank(one)), 3.0)
    assert waiting(band) == ["r2", "r3", "r1"]


def test_requests_of_one_instant_keep_their_order_and_each_can_leave() -> None:
    band = Band(FcfsFairness(DEFAULTS), Faults(), Claims())
    lines = [queued(request(arrived_s=1.0)) for _ in range(5)]
    for one in lines:
        band.push(one, 1.0)
    assert waiting(band) == [one.request.id for one in lines]
    for one in (lines[2], lines[0], lines[4]):
        band.remove(one)
        band.check(1.0)
    assert waiting(band) == [lines[1].request.id, lines[3].request.id]


def test_requests_of_an_adapter_on_a_full_backend_hide_no_other_adapter() -> None:
    of = pools({"a": 2, "b": 2}, listings={"a": listing("x"), "b": listing("y")})
    for number in range(3 * FLOW_LOOK_MAX):
        of.submit(request(adapter="x", arrived_s=number * 0.1), 3.0)
    assert {grant.placed.backend for grant in grants(of, 3.0)} == {"a"}
    of.submit(request(id="other", adapter="y", arrived_s=3.0), 3.0)
    assert names(grants(of, 3.0)) == ["other"]


def test_a_flow_has_a_bounded_number_of_heaps_and_of_looks() -> None:
    """The adapters beyond share a heap, and an adapter without a request needs none."""
    band = Band(FcfsFairness(DEFAULTS), Faults(), Claims())
    lines = [
        queued(request(adapter=f"a{number % (2 * HEAPS_MAX)}", arrived_s=number)) for number in range(6 * HEAPS_MAX)
    ]
    for one in lines:
        band.push(one, 0.0)
    band.check(0.0)
    looked = list(band.first("flow"))
    assert looked == lines[: HEAPS_MAX + FLOW_LOOK_MAX], "the first of each heap, and 8 of the shared one"
    assert len({one.heap for one in lines}) == HEAPS_MAX + 1
    assert [band.before(one) for one in lines] == [*range(6 * HEAPS_MAX)]
    for one in lines[:-1]:
        band.remove(one)
    band.push(again := queued(request(adapter="new", arrived_s=1e3)), 0.0)
    assert again.heap == ("new", "")
    assert waiting(band) == [lines[-1].request.id, again.request.id]
    band.check(0.0)


def test_the_policy_hears_of_new_heads_and_of_the_last_one_leaving() -> None:
    band = Band(FcfsFairness(DEFAULTS), Faults(), Claims())
    slow, quick = queued(request(flow="slow", arrived_s=1.0)), queued(request(flow="quick", arrived_s=2.0))
    behind = queued(request(flow="slow", arrived_s=3.0))
    for one in (slow, quick, behind):
        band.push(one, 3.0)
    assert list(band.fairness.candidates(3.0)) == ["slow", "quick"]
    band.remove(slow)
    assert list(band.fairness.candidates(3.0)) == ["quick", "slow"]
    band.remove(quick)
    band.remove(behind)
    assert list(band.fairness.candidates(3.0)) == []
    assert band.size == band.flows == 0
    band.check(3.0)


def test_a_rank_that_changes_with_time_tells_the_policy_the_new_head() -> None:
    band = Band(FcfsFairness(DEFAULTS), Faults(), Claims())
    old = Queued(request(id="old", flow="f", arrived_s=5.0), Rank((9.0, 0.0), 10.0, (-1.0, 0.0)))
    young = Queued(request(id="young", flow="f", arrived_s=7.0), Rank((1.0, 0.0)))
    other = queued(request(flow="g", arrived_s=6.0))
    for one in (old, young, other):
        band.push(one, 7.0)
    band.refresh(9.999)
    assert waiting(band, "f") == ["young", "old"]
    assert list(band.fairness.candidates(9.999)) == ["g", "f"], "the head of f came last"
    band.refresh(10.0)
    assert waiting(band, "f") == ["old", "young"]
    assert list(band.fairness.candidates(10.0)) == ["f", "g"], "the new head of f came first"
    band.check(10.0)
    band.remove(old)
    band.check(10.0)


# --- time to wait -----------------------------------------------------------------------------------------------------


def deadlines(no_backend_wait_s: float = 30.0, **deadlines: float) -> Deadlines:
    waiting: dict[str, Queued] = {}
    made = Deadlines(no_backend_wait_s, waiting)
    made.set_pool_up(True, 0.0)
    for name, deadline_s in deadlines.items():
        waiting[name] = queued(request(id=name, deadline_s=deadline_s))
        made.enter(waiting[name], 0.0, deadline_s)
    return made


def due(of: Deadlines, now: float) -> list[str]:
    return [one.request.id for one in of.due(now, 10)]


def test_deadlines_fall_due_in_their_order_at_their_very_instant() -> None:
    of = deadlines(late=9.0, soon=2.0, mid=5.0)
    assert of.next(0.0) == 2.0
    assert due(of, 1.999) == []
    assert due(of, 5.0) == ["soon", "mid"]
    assert of.next(5.0) == 9.0


def test_requests_of_an_empty_pool_keep_their_time_and_use_up_the_hold() -> None:
    of = deadlines(no_backend_wait_s=30.0, long=20.0, short=12.0)
    of.set_pool_up(False, 10.0)
    assert of.next(10.0) == 22.0, "nobody is held for longer than it would have waited"
    assert due(of, 21.0) == []
    of.set_pool_up(True, 21.0)
    assert of.next(21.0) == 23.0
    assert due(of, 23.0) == ["short"]
    assert of.next(23.0) == 31.0


def test_holds_add_up_to_no_more_than_the_hold() -> None:
    of = deadlines(no_backend_wait_s=3.0, one=100.0)
    for up_s in (10.0, 20.0):
        of.set_pool_up(False, up_s - 2.0)
        assert due(of, up_s - 1.5) == []
        assert of.next(up_s - 1.5) == up_s + (1.0 if up_s == 10.0 else -1.0)
        if up_s == 10.0:
            of.set_pool_up(True, up_s)
    assert due(of, 19.0) == ["one"]


def test_deadline_is_over_at_its_wakeup() -> None:
    """Rounding: without a tolerance, the clock would read slightly less and request the same wake-up for ever."""
    for deadline_s, down_s, up_s in ((2.9, 0.3, 1.0), (7.7, 0.5, 2.5), (2.0, 0.4, 2.6), (5.7, 0.8, 3.4)):
        of = deadlines(no_backend_wait_s=30.0, one=deadline_s)
        of.set_pool_up(False, down_s)
        of.set_pool_up(True, up_s)
        wakeup_s = of.next(up_s)
        assert wakeup_s is not None
        assert due(of, wakeup_s) == ["one"]


def test_without_holding_the_time_runs_on() -> None:
    of = deadlines(no_backend_wait_s=0.0, one=5.0)
    of.set_pool_up(False, 1.0)
    assert of.next(1.0) == 5.0
    assert due(of, 5.0) == ["one"]


# --- drain rate -------------------------------------------------------------------------------------------------------


def test_retry_after_follows_the_measured_rate_within_its_bounds() -> None:
    drain = DrainRate()
    assert drain.retry_after_s(1000, 0.0) == 1.0, "nothing was measured yet"
    for tenth in range(100):
        drain.granted(request(id=str(tenth)), tenth / 10)
    now = 9.9
    assert drain.retry_after_s(99, now) == pytest.approx(10.0, rel=0.05)
    assert drain.retry_after_s(0, now) == 1.0
    assert drain.retry_after_s(100_000, now) == 60.0


def test_grants_of_one_instant_are_a_finite_rate() -> None:
    drain = DrainRate()
    for number in range(64):
        drain.granted(request(id=str(number)), 5.0)
    assert drain.retry_after_s(6400, 5.0) == pytest.approx(10.0, rel=0.01)


def test_the_pace_of_before_a_pause_says_nothing_of_the_one_after() -> None:
    drain = DrainRate()
    drain.granted(request(id="old"), 0.0)
    for at in (1000.0, 1000.5, 1001.0):
        drain.granted(request(id=str(at)), at)
    assert drain.interval_s(1001.0) == pytest.approx(1.0 / 3)


def test_returned_request_has_not_left_the_queue() -> None:
    drain = DrainRate()
    for second in range(10):
        drain.granted(request(id=str(second)), float(second))
    assert drain.interval_s(10.0) == 1.0
    for second in range(1, 10, 2):
        drain.forget(str(second))
    drain.forget("somebody granted long ago")
    assert drain.interval_s(10.0) == 2.0


@pytest.mark.parametrize(
    ("verdict", "entry"), [(Verdict.FAILED, AdmissionKind.RETRY), (Verdict.PREEMPTED, AdmissionKind.PREEMPTED)]
)
def test_retry_after_does_not_count_on_grants_that_came_to_nothing(verdict: Verdict, entry: AdmissionKind) -> None:
    of = pools({"a": 1}, tight(queue=replace(DEFAULTS.queue, band_requests_max=1)))
    of.submit(request(band=CRITICAL), 0.0)
    served = only_grant(of, 0.0)
    of.apply(Returned(served.lease, Verdict.SERVED), 10.0)
    of.submit(request(id="again"), 10.0)
    again = only_grant(of, 10.0)
    of.apply(Returned(again.lease, verdict), 20.0)
    of.submit(again.request, 20.0, entry=entry)
    assert refusal(of.submit, request(), 20.0).retry_after_s == 40.0, "one left in 20 s, and one is ahead"


# --- displacement -----------------------------------------------------------------------------------------------------


def test_limits_see_the_room_that_would_be_made() -> None:
    occupancy = Occupancy(replace(DEFAULTS.queue, requests_max=2, bytes_max=200))
    low, lower = request(band=SHEDDABLE), request(band=SHEDDABLE)
    occupancy.enter(low, 0.0)
    occupancy.enter(lower, 0.0)
    big = request(band=DEFAULT, body_bytes=150)
    assert occupancy.full(big) is not None
    assert occupancy.full(big, [low]) is not None, "150 of 200 bytes, and 100 are still there"
    assert occupancy.full(big, [low, lower]) is None
    assert occupancy.queued() == {SHEDDABLE: (2, 200)}
