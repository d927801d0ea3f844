"""A request in a replay: the facts that the proxy sees, its timeouts, and its charges."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from llmproxy.core.domain import Outcome, Reading, Request, Usage, Verdict
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind, SimulatedFleet
from llmproxy.lab.results.record import Record
from llmproxy.lab.run.replay import SETTLE_S, replay
from llmproxy.lab.traces.arrival import Arrival
from llmproxy.scheduling.dispatcher import Dispatcher
from tests.lab.run.conftest import SchedulerCalls, given, hung
from tests.lab.small import fleet, records_of, setup, traffic


@pytest.mark.slow
def test_predictions_are_held_against_the_time_at_the_backend() -> None:
    kept = records_of(setup(traffic(count=60, rate=60.0), "cost", fleet(1, max_num_seqs=2)))
    waited = [one for one in kept if one.backend_ttft_s is not None and (one.queue_wait_s or 0.0) > 0.5]
    assert waited
    for record in waited:
        assert record.ttft_s is not None
        assert record.queue_wait_s is not None
        assert record.backend_ttft_s == pytest.approx(record.ttft_s - record.queue_wait_s)
        assert record.predicted_ttft is not None
        assert record.predicted_tpot is not None
    found = replay(setup(traffic(count=300), "cost")).result("cost", 1, 1.0, 1.0).prediction
    assert None not in (found.ttft_mape, found.tpot_mape)
    assert 0.5 < (found.ttft_p90_coverage or 0.0) < 1.0 > (found.tpot_p90_coverage or 0.0) > 0.5
    found = replay(setup(traffic(count=20), "blend")).result("blend", 1, 1.0, 1.0).prediction
    assert (found.ttft_mape, found.tpot_p90_coverage) == (None, None)


# --- the facts that the proxy sees ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_proxy_hears_nothing_of_an_answer_before_it_has_ended(calls: SchedulerCalls) -> None:
    short = [replace(one, output_tokens=90 + i % 60) for i, one in enumerate(traffic(rate=400.0))]
    long = [replace(one, output_tokens=3 * one.output_tokens) for one in short]
    seen: list[list[Request]] = []
    for arrivals in (short, long):
        calls.requests.clear()
        ended_s = min(one.ended_s for one in records_of(setup(arrivals, on=fleet(max_num_seqs=256))))
        seen.append([one for one in calls.requests if one.arrived_s < SETTLE_S + ended_s])
    common = min(map(len, seen))
    assert common > 100
    assert seen[0][:common] == seen[1][:common]


def test_cached_blocks_are_reported_when_the_answer_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, str, tuple[int, ...]]] = []

    def cached(_: Dispatcher, pool: str, lease: int, backend: str, hashes: tuple[int, ...]) -> None:
        del pool, lease
        seen.append((asyncio.get_running_loop().time(), backend, hashes))

    monkeypatch.setattr(Dispatcher, "cached", cached)
    blocks = tuple(range(100, 160))
    lengths = [(640, 100), (800, 96), (1_000, 600), (1_700, 64)]
    arrivals = [
        Arrival(10.0 * turn, prompt, answer, blocks[: -(-(prompt + answer) // 64)], adapter="lora-0" if turn else None)
        for turn, (prompt, answer) in enumerate(lengths)
    ]
    ends = records_of(setup([*arrivals, Arrival(41.0, 100, 10)], on=fleet(2, max_loras=1)))
    assert [backend for _, backend, _ in seen] == [end.backend for end in ends]
    assert [at_s for at_s, _, _ in seen] == pytest.approx([SETTLE_S + end.ended_s for end in ends])
    # Full blocks of 64 tokens, without blocks that have no id in the trace.
    assert [len(hashes) for _, _, hashes in seen] == [11, 14, 25, 27, 0]
    for arrival, (_, _, hashes) in zip(arrivals, seen, strict=False):
        assert hashes == arrival.own_blocks()[: len(hashes)]


def test_an_answer_that_broke_off_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Dispatcher, "cached")
    (end,) = records_of(
        setup([Arrival(0.0, 640, 1_000, tuple(range(30)))], on=fleet(1, [Fault(2.0, FleetFaultKind.KILL)]))
    )
    assert end.outcome is Outcome.BROKEN_STREAM


def test_the_length_of_a_prompt_is_estimated_from_its_bytes(calls: SchedulerCalls) -> None:
    arrivals = traffic()
    records_of(setup(arrivals))
    errors = [
        one.prompt_tokens / arrival.prompt_tokens - 1.0 for one, arrival in zip(calls.requests, arrivals, strict=True)
    ]
    assert sum(abs(error) > 0.02 for error in errors) > 200
    # Bytes per token are learned from the answers' usage: the estimate is scattered, and not off.
    assert abs(sum(errors[100:]) / 200) < 0.04
    assert all(one.max_tokens is None for one in calls.requests)
    outputs = {one.output_tokens for one in calls.requests[150:]}
    assert max(outputs) < 2 * min(outputs)


def test_readings_are_what_the_gauges_published_and_no_more(calls: SchedulerCalls) -> None:
    arrivals = [replace(one, adapter=f"lora-{i % 5}") for i, one in enumerate(traffic(rate=60.0))]
    records_of(setup(arrivals, on=fleet(2, max_num_seqs=8, max_loras=2, kv_tokens=10_007)))
    expected = [
        (
            replica.spec.name,
            Reading(
                taken_at_s=at_s,
                running=gauges.running,
                waiting=gauges.waiting,
                kv_used=gauges.kv_used,
                kv_tokens=10_000,
                running_adapters=frozenset(gauges.running_adapters),
                max_adapters=2,
                deferred=gauges.deferred,
                generated=gauges.generated,
            ),
        )
        for at_s, replica, gauges in calls.published
    ]
    assert calls.readings == expected
    for field_of in ("running", "waiting", "kv_used", "running_adapters"):
        assert sum(bool(getattr(reading, field_of)) for _, reading in calls.readings) > 20, field_of


def test_a_fleet_without_adapters_publishes_none(calls: SchedulerCalls) -> None:
    records_of(setup(traffic(count=20)))
    assert {reading.max_adapters for _, reading in calls.readings} == {None}


def test_the_policy_hears_how_far_an_answer_is_while_it_streams(calls: SchedulerCalls) -> None:
    (end,) = records_of(setup([Arrival(0.0, 100, 1_000)], on=fleet(1)))
    assert calls.progress == sorted(set(calls.progress))
    assert len(calls.progress) >= int(end.ended_s / 0.3) - 1 > 10
    assert 0 < calls.progress[0] < 100
    assert 900 < calls.progress[-1] < 1_000


# --- how long it waits ------------------------------------------------------------------------------------------------


def test_request_waits_for_the_lesser_of_two_ttls() -> None:
    crowd = [Arrival(0.0, 100, 3_000) for _ in range(8)]
    short, long = Arrival(0.1, 100, 10, max_wait_s=0.5), Arrival(0.1, 100, 11, max_wait_s=100.0)
    config = given(
        queue={"max_wait_s": 2.0},
        scheduling={"initial_batch_limit": 1, "look_ahead": 0, "fairness": "fcfs"},
    )
    ends = records_of(setup([*crowd, short, long], on=fleet(1, max_num_seqs=1), config=config))
    for arrival, max_wait_s in ((short, 0.5), (long, 2.0)):
        (end,) = [one for one in ends if one.arrival is arrival]
        assert end.outcome is Outcome.EXPIRED
        assert end.ended_s - end.arrived_s == pytest.approx(max_wait_s)
        assert end.queue_wait_s == pytest.approx(max_wait_s)


def test_answer_without_a_start_is_timeout_or_failed_connection() -> None:
    on, config = hung(1, 0.0, first_byte_s=1.0)
    (late,) = records_of(setup([Arrival(0.1, 100, 10)], on=on, config=config))
    assert late.outcome is Outcome.UPSTREAM_TIMEOUT
    assert late.ended_s == pytest.approx(1.1)
    # The first token would come after the 16 ms of the front end and a step.
    (cut,) = records_of(setup([Arrival(0.1, 5_000, 10)], on=fleet(1, [Fault(0.12, FleetFaultKind.KILL)])))
    assert cut.outcome is Outcome.CONNECT_FAILED
    assert cut.ended_s == pytest.approx(0.12)
    assert late.ttft_s is cut.ttft_s is None


def test_silent_stream_is_cut_and_charged_as_far_as_seen(calls: SchedulerCalls) -> None:
    on, config = hung(1, 1.0, stall_s=3.0, first_byte_s=100.0)
    (end,) = records_of(setup([Arrival(0.0, 100, 1_000)], on=on, config=config))
    assert end.outcome is Outcome.BROKEN_STREAM
    assert 4.0 <= end.ended_s <= 4.7
    assert 100 < end.output_tokens < 300
    ((grant, verdict, usage),) = calls.ends
    assert verdict is Verdict.FAILED
    assert usage == Usage(grant.request.prompt_tokens, end.output_tokens)


def test_attempt_beyond_total_s_is_cut_although_it_streams() -> None:
    (end,) = records_of(setup([Arrival(0.0, 100, 3_000)], on=fleet(1), config=given(timeouts={"total_s": 2.5})))
    assert (end.outcome, end.attempts) == (Outcome.BROKEN_STREAM, 1)
    assert end.ended_s == pytest.approx(2.5)


def test_backend_400_is_charged_for_nothing_and_not_retried(calls: SchedulerCalls) -> None:
    long, short = fleet(1).replicas[0], fleet(1, max_model_len=1_000).replicas[0]
    mixed = SimulatedFleet("mixed", (replace(short, name="a"), replace(long, name="b")))
    ends = records_of(setup([Arrival(0.5 * i, 600, 600) for i in range(8)], "late_round_robin", mixed))
    assert Counter((one.backend, one.outcome) for one in ends) == {
        ("a", Outcome.UPSTREAM_STATUS): 4,
        ("b", Outcome.COMPLETED): 4,
    }
    assert {one.attempts for one in ends} == {1}
    seen = Counter(
        (grant.placed.backend, verdict, usage and usage.output_tokens) for grant, verdict, usage in calls.ends
    )
    assert seen == {("a", Verdict.SERVED, 0): 4, ("b", Verdict.SERVED, 600): 4}
    assert {usage and usage.prompt_tokens for grant, _, usage in calls.ends if grant.placed.backend == "a"} == {0}


# --- what counts ------------------------------------------------------------------------------------------------------


def test_an_answer_is_good_if_it_keeps_both_of_its_objectives() -> None:
    arrivals = [
        Arrival(0.0, 500, 50),
        Arrival(5.0, 500, 50, ttft_slo_s=0.001),
        Arrival(10.0, 500, 50, tpot_slo_s=0.001),
        Arrival(15.0, 500, 50, ttft_slo_s=10.0, tpot_slo_s=10.0),
        Arrival(20.0, 500, 1, tpot_slo_s=0.001),
        Arrival(25.0, 500, 500),
    ]
    on = fleet(1, [Fault(26.0, FleetFaultKind.KILL)])
    ends = records_of(setup(arrivals, on=on))
    assert [one.outcome for one in ends] == [*[Outcome.COMPLETED] * 5, Outcome.BROKEN_STREAM]
    assert [one.met for one in ends] == [True, False, False, True, True, False]


def test_a_whole_answer_has_no_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool | None] = []
    monkeypatch.setattr(Dispatcher, "ended", lambda _, __, met: told.append(met))
    arrivals = [
        Arrival(0.0, 500, 50, whole=True),
        Arrival(10.0, 500, 50, whole=True, ttft_slo_s=0.2, tpot_slo_s=0.001),
        Arrival(20.0, 500, 50, whole=True, ttft_slo_s=0.0001),
    ]
    ends = records_of(setup(arrivals, on=fleet(1)))
    assert {(one.ttft_s, one.tpot_s, one.backend_ttft_s, one.hit_tokens) for one in ends} == {(None, None, None, 0)}
    assert {one.output_tokens for one in ends} == {50}
    assert [one.met for one in ends] == [True, False, True]
    # The scheduler knows only the time of the grant, as in the gateway.
    assert told == [None, True, True]


def closed_loop(**first: Any) -> Arrival:
    third = Arrival(0.0, 100, 10)
    second = Arrival(0.0, 100, 10, then=third)
    return replace(Arrival(0.0, 100, 1_000, then=second), **first)


@pytest.mark.parametrize(
    ("first", "outcome"),
    [(closed_loop(), Outcome.BROKEN_STREAM), (closed_loop(prompt_tokens=9_000), Outcome.BAD_REQUEST)],
)
def test_turns_behind_a_failed_one_are_offered_and_missed(first: Arrival, outcome: Outcome) -> None:
    what = setup([first], on=fleet(2, [Fault(1.0, FleetFaultKind.KILL, f"gpu-{i}") for i in range(2)]))
    ends: list[Record] = records_of(what)
    assert [one.arrival for one in ends] == [first, first.then, first.then and first.then.then]
    assert [one.outcome for one in ends] == [outcome, Outcome.CANCELLED, Outcome.CANCELLED]
    assert [one.attempts for one in ends[1:]] == [0, 0]
    assert {one.arrived_s for one in ends[1:]} == {ends[0].ended_s}
    result = replay(what).result("blend", 1, 1.0, 1.0)
    assert (result.offered, result.completed, result.goodput) == (3, 0, 0.0)


def test_what_arrives_during_the_warm_up_is_served_and_not_counted(calls: SchedulerCalls) -> None:
    arrivals = traffic(count=100)
    what = replace(setup(arrivals), warmup_s=2.0)
    counted = sum(one.at_s >= 2.0 for one in arrivals)
    assert 0 < counted < 100
    assert replay(what).result("blend", 1, 1.0, 1.0).offered == counted
    assert len(calls.requests) == 100
