from __future__ import annotations

import pytest

from llmproxy.core.domain import Request
from llmproxy.core.fairness import Fcfs
from llmproxy.core.queue import FLOW_LOOK_MAX, Band, Deadlines, DrainRate, Occupancy, Queued
from llmproxy.core.settings import QueueSettings, Settings
from tests.core.make import request

# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (QueueSettings(band_requests_max=2), "queue.band_requests_max (2)"),
        (QueueSettings(band_bytes_max=250), "queue.band_bytes_max (250)"),
        (QueueSettings(requests_max=2), "queue.requests_max (2)"),
        (QueueSettings(bytes_max=250), "queue.bytes_max (250)"),
    ],
)
def test_each_limit_is_told_by_its_name(limits: QueueSettings, named: str) -> None:
    occupancy = Occupancy(limits)
    occupancy.enter(0, 100)
    occupancy.enter(0, 100)
    full = occupancy.full(0, 100)
    assert full is not None
    assert f"{full.name} ({full.limit})" == named
    assert full.total is ("band_" not in named)
    assert occupancy.queued() == {0: (2, 200)}
    occupancy.leave(0, 100)
    assert occupancy.full(0, 100) is None
    occupancy.check()


def test_a_full_band_leaves_the_others_alone_and_the_total_counts_all() -> None:
    occupancy = Occupancy(QueueSettings(band_requests_max=2, requests_max=3))
    occupancy.enter(0, 1)
    occupancy.enter(0, 1)
    assert occupancy.full(100, 1) is None
    occupancy.enter(100, 1)
    full = occupancy.full(100, 1)
    assert full is not None
    assert full.name == "queue.requests_max"


def test_what_fits_exactly_is_let_in() -> None:
    occupancy = Occupancy(QueueSettings(bytes_max=100, band_bytes_max=100))
    assert occupancy.full(0, 100) is None
    occupancy.enter(0, 100)
    assert occupancy.full(0, 1) is not None


# --- flows ------------------------------------------------------------------------------------------------------------


def waiting(band: Band, flow: str = "flow") -> list[str]:
    return [queued.request.id for queued in band.first(flow)]


def test_a_retry_comes_back_to_where_it_stood() -> None:
    band = Band(Fcfs(Settings()))
    asked = {name: request(id=name, arrived_s=at) for name, at in [("r1", 1.0), ("r2", 2.0), ("r3", 3.0), ("r9", 9.0)]}
    band.push(Queued(asked["r9"]))
    for retried in ("r1", "r3", "r2"):
        band.push(Queued(asked[retried], frozenset({"dead"})))
        band.check()
    assert waiting(band) == ["r1", "r2", "r3", "r9"]
    band.remove(asked["r1"])
    band.remove(asked["r3"])
    band.check()
    assert waiting(band) == ["r2", "r9"]


def test_requests_of_one_instant_keep_their_order_and_each_can_leave() -> None:
    band = Band(Fcfs(Settings()))
    asked = [request(arrived_s=1.0) for _ in range(5)]
    for one in asked:
        band.push(Queued(one))
    assert waiting(band) == [one.id for one in asked]
    for one in (asked[2], asked[0], asked[4]):
        band.remove(one)
        band.check()
    assert waiting(band) == [asked[1].id, asked[3].id]


def test_the_policy_hears_of_new_heads_and_of_the_last_one_leaving() -> None:
    band = Band(Fcfs(Settings()))
    slow, quick = request(flow="slow", arrived_s=1.0), request(flow="quick", arrived_s=2.0)
    behind = request(flow="slow", arrived_s=3.0)
    for one in (slow, quick, behind):
        band.push(Queued(one))
    assert list(band.fairness.candidates()) == ["slow", "quick"]
    band.remove(slow)
    assert list(band.fairness.candidates()) == ["quick", "slow"]
    band.remove(quick)
    band.remove(behind)
    assert list(band.fairness.candidates()) == []
    assert band.size == 0
    band.check()


def test_only_so_many_of_a_flow_are_looked_at() -> None:
    band = Band(Fcfs(Settings()))
    for at in range(FLOW_LOOK_MAX + 5):
        band.push(Queued(request(arrived_s=float(at))))
    assert len(waiting(band)) == FLOW_LOOK_MAX


# --- deadlines --------------------------------------------------------------------------------------------------------


class Room:
    """What the scheduler keeps beside the deadlines."""

    def __init__(self) -> None:
        self.waiting: dict[str, Queued] = {}
        self.deadlines = Deadlines()

    def add(self, one: Request) -> None:
        self.waiting[one.id] = Queued(one)
        self.deadlines.add(one.deadline_s, one.id, self.waiting)

    def due(self, now: float) -> list[str]:
        return [queued.request.id for queued in self.deadlines.due(now, self.waiting, 10)]


def test_deadlines_fall_due_in_their_order_at_their_very_instant() -> None:
    room = Room()
    for name, deadline_s in [("late", 9.0), ("soon", 2.0), ("mid", 5.0)]:
        room.add(request(id=name, deadline_s=deadline_s))
    assert room.deadlines.next(room.waiting) == 2.0
    assert room.due(1.999) == []
    assert room.due(5.0) == ["soon", "mid"]
    assert room.deadlines.next(room.waiting) == 9.0


def test_one_that_left_has_no_deadline_any_more() -> None:
    room = Room()
    room.add(request(id="gone", deadline_s=1.0))
    room.add(request(id="here", deadline_s=2.0))
    del room.waiting["gone"]
    assert room.deadlines.next(room.waiting) == 2.0
    assert room.due(3.0) == ["here"]


def test_a_request_that_waits_again_is_due_once() -> None:
    room = Room()
    retried = request(id="retried", deadline_s=1.0)
    room.add(retried)
    del room.waiting["retried"]
    room.add(retried)
    assert room.due(1.0) == ["retried"]


def test_entries_of_those_that_left_do_not_pile_up() -> None:
    room = Room()
    for _ in range(10_000):
        one = request()
        room.add(one)
        del room.waiting[one.id]
    assert len(room.deadlines._heap) <= 70


# --- drain rate -------------------------------------------------------------------------------------------------------


def test_retry_after_follows_the_measured_rate_within_its_bounds() -> None:
    drain = DrainRate()
    assert drain.retry_after_s(1000, 0.0) == 1.0, "nothing was measured yet"
    for tenth in range(100):
        drain.granted(tenth / 10)
    now = 9.9
    assert drain.retry_after_s(99, now) == pytest.approx(10.0, rel=0.05)
    assert drain.retry_after_s(0, now) == 1.0
    assert drain.retry_after_s(100_000, now) == 60.0


def test_grants_of_one_instant_are_a_finite_rate() -> None:
    drain = DrainRate()
    for _ in range(64):
        drain.granted(5.0)
    assert drain.retry_after_s(6400, 5.0) == pytest.approx(10.0, rel=0.01)
