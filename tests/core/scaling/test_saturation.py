"""The estimates of scaling for saturated fleets, compared with their real throughput."""

from __future__ import annotations

from statistics import fmean

import pytest

from tests.core.scaling.fleet import Fleet


@pytest.mark.slow
@pytest.mark.parametrize("output", [8, 96])
@pytest.mark.parametrize("streams", [0.0, 0.5, 1.0])
def test_more_are_needed_than_are_full_within_a_quarter_of_a_minute(streams: float, output: int) -> None:
    fleet = Fleet(8, 8, streams=streams, output=output)
    fleet.clients(48)
    for _ in range(6):
        completed_per_s = fleet.run(15.0)
        need, capacity = fleet.need, fleet.need.capacity
        assert fleet.waiting > 0
        assert need.need > 2.0
        assert need.sure
        assert capacity is not None
        assert capacity.seats == fmean(fleet.limits)
        assert 2.0 * capacity.requests_per_s == pytest.approx(completed_per_s, rel=0.15)
        assert need.waiting_s == pytest.approx(fleet.waiting * 2.0 / completed_per_s, rel=0.25)


def test_more_are_needed_than_are_full_before_a_request_is_known_to_cost_anything() -> None:
    fleet = Fleet(8, 8, output=4_000)
    fleet.clients(12)
    fleet.run(20.0)
    assert (fleet.need.desired, fleet.need.reason) == (2, "unknown")
    fleet.clients(48)
    fleet.run(15.0)
    need = fleet.need
    assert fleet.completed == 0
    assert (need.need, need.desired, need.reason, need.sure) == (2.5, 3, "queue", False)


def test_a_burst_that_is_over_in_seconds_is_not_taken_for_full_replicas() -> None:
    fleet = Fleet(8, 8, output=4_000)
    fleet.clients(48)
    fleet.run(8.0)
    assert fleet.waiting > 0
    assert fleet.need.desired == 2


@pytest.mark.slow
def test_unequal_replicas_count_by_their_own_seats() -> None:
    fleet = Fleet(4, 8, 32)
    fleet.clients(110)
    fleet.run(60.0)
    completed_per_s = fleet.run(60.0)
    need, capacity = fleet.need, fleet.need.capacity
    assert capacity is not None
    assert need.need > 3.0
    assert 3.0 * capacity.requests_per_s == pytest.approx(completed_per_s, rel=0.1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("clients", "desired"), [(3, 1), (5, 1), (8, 2), (12, 2)])
def test_replicas_that_are_never_full_are_not_too_many(clients: int, desired: int) -> None:
    fleet = Fleet(8, 8)
    fleet.clients(clients)
    fleet.run(60.0)
    assert fleet.need.desired == desired


@pytest.mark.slow
def test_fewer_are_needed_after_the_load_has_fallen() -> None:
    fleet = Fleet(8, 8)
    fleet.clients(48)
    fleet.run(60.0)
    fleet.clients(3)
    fleet.run(180.0)
    need, capacity = fleet.need, fleet.need.capacity
    assert capacity is not None
    assert (need.desired, capacity.seats) == (1, 8.0)


def test_the_seats_of_replicas_that_are_gone_are_remembered() -> None:
    fleet = Fleet(8)
    fleet.clients(16)
    fleet.run(60.0)
    scaling = fleet.pools.scaling.pools["base"]
    assert fleet.need.capacity is not None
    found = scaling.need(None, [], 1.0, fleet.now).capacity
    assert found is not None
    assert found.seats == 8.0


def test_a_model_of_embeddings_is_known_as_well() -> None:
    """Their answers have no tokens at all."""
    fleet = Fleet(8, 8, output=0, prompt=2_000)
    fleet.clients(48)
    fleet.run(30.0)
    assert fleet.need.sure
    assert fleet.need.need > 2.0
