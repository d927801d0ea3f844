"""The timeline of faults: each begins and ends in its time, and shows where a real one would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from llmproxy.core.domain import Outcome, Reading
from llmproxy.lab.fleet.fault_schedule import schedule
from llmproxy.lab.fleet.server import SimulatedServer
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind
from llmproxy.lab.run.replay import SETTLE_S
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.traces.arrival import Arrival
from llmproxy.scheduling.dispatcher import Dispatcher
from tests.lab.small import fleet, records_of, setup, started, traffic

START_S = 1.5
Look = Callable[[SimulatedServer], float]


def seen(count: int, faults: Sequence[Fault], of: Look, looks_s: Sequence[float]) -> list[list[float]]:
    """Returns `of` for each of `count` replicas, at each time of `looks_s` from the start of the trace."""

    async def body() -> list[list[float]]:
        loop = asyncio.get_running_loop()
        replicas = started(fleet(count))
        schedule(faults, replicas, START_S)
        observed = []
        for look_s in looks_s:
            await asyncio.sleep(START_S + look_s - loop.time())
            observed.append([of(replica) for replica in replicas.values()])
        return observed

    return run(body())


ILLS: dict[FleetFaultKind, tuple[float, Look]] = {
    FleetFaultKind.HANG: (0.0, lambda replica: replica.faults.frozen),
    FleetFaultKind.SLOW: (1.0, lambda replica: replica.faults.slow),
    FleetFaultKind.RESET: (0.0, lambda replica: replica.faults.reset),
    FleetFaultKind.METRIC_AGE: (0.0, lambda replica: replica.faults.metric_age_s),
    FleetFaultKind.LOST_READINGS: (0.0, lambda replica: replica.faults.lost_readings),
    FleetFaultKind.LOST_KV_EVENTS: (0.0, lambda replica: replica.faults.lost_kv_events),
}


@pytest.mark.parametrize("kind", ILLS)
def test_a_fault_befalls_its_replica_from_its_beginning_to_its_end(kind: FleetFaultKind) -> None:
    well, of = ILLS[kind]
    value = 1.0 if kind is FleetFaultKind.HANG else 0.75
    observed = seen(3, [Fault(1.0, kind, "gpu-1", 2.0, value)], of, [0.9, 1.1, 1.9, 2.1])
    ill = [well, value, well]
    assert observed == [[well] * 3, ill, ill, [well] * 3]


@pytest.mark.parametrize("kind", ILLS)
def test_a_fault_of_nobody_by_name_befalls_all_and_may_last_for_ever(kind: FleetFaultKind) -> None:
    well, of = ILLS[kind]
    value = 1.0 if kind is FleetFaultKind.HANG else 0.75
    assert seen(3, [Fault(1.0, kind, None, None, value)], of, [0.9, 1_000.0]) == [[well] * 3, [value] * 3]


@pytest.mark.parametrize("count", [1, 3, 4, 8])
def test_a_fault_that_begins_when_another_ends_goes_on(count: int) -> None:
    faults = [Fault(1.0, FleetFaultKind.SLOW, None, 2.0, 3.0), Fault(2.0, FleetFaultKind.SLOW, None, None, 5.0)]
    observed = seen(count, faults, ILLS[FleetFaultKind.SLOW][1], [1.5, 2.5, 100.0])
    assert observed == [[3.0] * count, [5.0] * count, [5.0] * count]


@pytest.mark.parametrize("kind", [FleetFaultKind.RESTART, FleetFaultKind.ROLL])
def test_an_idle_replica_restarts_or_is_rolled_at_once_and_takes_its_time(kind: FleetFaultKind) -> None:
    looks = seen(2, [Fault(1.0, kind, "gpu-0", None, 3.0)], lambda replica: replica.alive, [0.9, 1.1, 3.9, 4.1])
    assert looks == [[True, True], [False, True], [False, True], [True, True]]


# --- what clients and pollers see of it -------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 3, 4, 8])
def test_answers_are_slow_for_as_long_as_their_replica_is(replicas: int) -> None:
    faults = [Fault(2.0, FleetFaultKind.SLOW, None, 4.0, 6.0), Fault(8.0, FleetFaultKind.SLOW, None, 10.0, 2.0)]
    faults.append(Fault(10.0, FleetFaultKind.SLOW, None, None, 4.0))
    moments_s = {0.5: 1.0, 2.5: 6.0, 6.0: 1.0, 8.5: 2.0, 12.0: 4.0}
    ends = records_of(setup([Arrival(at_s, 100, 30) for at_s in moments_s], on=fleet(replicas, faults)))
    plain_s = ends[0].tpot_s
    assert plain_s is not None
    factors = {one.arrival.at_s: (one.tpot_s or 0.0) / plain_s for one in ends}
    assert factors == pytest.approx(moments_s, rel=0.15)


def test_a_hung_replica_goes_on_with_its_answers_when_it_wakes() -> None:
    on = fleet(1, [Fault(1.0, FleetFaultKind.HANG, None, 3.5)])
    (end,) = records_of(setup([Arrival(0.5, 100, 200)], on=on))
    (free,) = records_of(setup([Arrival(0.5, 100, 200)], on=fleet(1)))
    assert end.outcome is Outcome.COMPLETED
    assert end.ended_s - free.ended_s == pytest.approx(2.5, abs=0.05)


def test_no_answer_is_cut_after_the_end_of_resets() -> None:
    on = fleet(2, [Fault(2.0, FleetFaultKind.RESET, None, 4.0, 1.0)])
    ends = records_of(setup(traffic(rate=30.0), on=on))
    sent_s = {id(one): one.arrived_s + (one.queue_wait_s or 0.0) for one in ends}
    broken = [sent_s[id(one)] for one in ends if one.outcome is Outcome.BROKEN_STREAM]
    whole = [sent_s[id(one)] for one in ends if one.outcome is Outcome.COMPLETED]
    assert len(broken) > 20
    assert all(2.0 <= at_s < 4.0 for at_s in broken)
    assert not [at_s for at_s in whole if 2.0 <= at_s < 4.0]
    assert max(whole) > 8.0


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Reading]]:
    """Every reading that the proxy gets, by the time of the trace at which it got it."""
    readings: list[tuple[float, Reading]] = []
    observe = Dispatcher.observe

    def observed(dispatcher: Dispatcher, backend: str, reading: Reading) -> None:
        readings.append((asyncio.get_running_loop().time() - SETTLE_S, reading))
        observe(dispatcher, backend, reading)

    monkeypatch.setattr(Dispatcher, "observe", observed)
    return readings


@pytest.mark.parametrize(("chance", "least", "most"), [(1.0, 0, 0), (0.5, 25, 75)])
def test_readings_are_lost_as_often_as_asked_for(
    readings: list[tuple[float, Reading]], chance: float, least: int, most: int
) -> None:
    on = fleet(4, [Fault(2.0, FleetFaultKind.LOST_READINGS, None, 6.0, chance)])
    ends = records_of(setup([Arrival(0.0, 100, 1_500)], on=on))
    assert ends[0].outcome is Outcome.COMPLETED
    # Four replicas are read every 0.16 to 0.2 s.
    assert sum(at_s < 2.0 for at_s, _ in readings) > 80
    assert least <= sum(2.0 <= at_s < 6.0 for at_s, _ in readings) <= most
    assert sum(at_s > 6.0 for at_s, _ in readings) > 40


def test_readings_are_as_old_as_asked_for_and_do_not_say_so(readings: list[tuple[float, Reading]]) -> None:
    (alone,) = records_of(setup([Arrival(1.0, 100, 200)], on=fleet(1)))
    readings.clear()
    on = fleet(1, [Fault(0.5, FleetFaultKind.METRIC_AGE, None, 6.0, 2.0)])
    records_of(setup([Arrival(1.0, 100, 200), Arrival(7.0, 100, 500)], on=on))
    shown = [at_s for at_s, reading in readings if reading.running and at_s < 6.0]
    assert 3.0 < min(shown) < 3.3
    assert alone.ended_s + 1.7 < max(shown) < alone.ended_s + 2.1
    assert any(reading.running for at_s, reading in readings if 7.0 < at_s < 7.5)
    assert all(reading.taken_at_s - SETTLE_S == at_s for at_s, reading in readings)


def test_rolled_server_ends_its_answers_and_takes_nothing_new() -> None:
    arrivals = [Arrival(0.0, 100, 300), Arrival(1.1, 100, 10), Arrival(1.2, 100, 10)]
    ends = records_of(
        setup(arrivals, on=fleet(2, [Fault(1.0, FleetFaultKind.ROLL, f"gpu-{i}", None, 3.0) for i in range(1)]))
    )
    assert {one.outcome for one in ends} == {Outcome.COMPLETED}
    assert all(one.backend == "gpu-1" for one in ends if one.arrived_s > 1.0)


def test_rolled_fleet_of_one_is_back_after_its_last_answer() -> None:
    arrivals = [Arrival(0.0, 100, 300), Arrival(1.5, 100, 10)]
    first, held = sorted(
        records_of(setup(arrivals, on=fleet(1, [Fault(1.0, FleetFaultKind.ROLL, "gpu-0", None, 4.0)]))),
        key=lambda one: one.arrived_s,
    )
    assert first.outcome is held.outcome is Outcome.COMPLETED
    assert held.ttft_s is not None
    # Its polls have to find it, which takes a moment.
    assert first.ended_s + 4.0 < held.arrived_s + held.ttft_s < first.ended_s + 5.5


def test_request_to_a_leaving_server_is_held_for_its_return() -> None:
    arrivals = [Arrival(0.0, 100, 300), Arrival(1.0005, 100, 10)]
    on = fleet(1, [Fault(1.0, FleetFaultKind.ROLL, "gpu-0", None, 4.0)])
    held, first = sorted(records_of(setup(arrivals, on=on)), key=lambda one: -one.arrived_s)
    assert first.outcome is held.outcome is Outcome.COMPLETED
    assert (first.attempts, held.attempts) == (1, 2)
    assert held.ended_s > first.ended_s + 4.0
