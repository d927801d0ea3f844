"""A whole run: the production scheduler in front of simulated engines, in virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from llmproxy.config import Config
from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, Outcome
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind, SimulatedFleet
from llmproxy.lab.policies.by_name import names
from llmproxy.lab.results.record import Record
from llmproxy.lab.run.replay import replay
from llmproxy.lab.traces.arrival import Arrival
from tests.lab.small import fleet, printed_with_hash_seeds, records_of, setup, traffic


@pytest.mark.slow
@pytest.mark.parametrize("policy", names())
def test_every_policy_answers_every_request_of_a_calm_trace(policy: str) -> None:
    ends = records_of(setup(traffic(), policy))
    assert Counter(one.outcome for one in ends) == {Outcome.COMPLETED: 300}
    assert {one.backend for one in ends} == {"gpu-0", "gpu-1", "gpu-2"}
    assert all(one.output_tokens == one.arrival.output_tokens for one in ends)
    assert all(one.ttft_s is not None and one.ttft_s > 0.016 for one in ends)
    assert all(one.met for one in ends if one.ttft_s is not None and one.ttft_s < 0.5)


def test_equal_setups_give_equal_ends_and_another_seed_gives_others() -> None:
    arrivals = traffic(100)
    one, same, other = (
        [(r.arrival.at_s, r.backend, r.ended_s) for r in records_of(setup(arrivals, seed=seed))] for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["blend", "late_round_robin", "epp_sticky", "session", "oracle"])
def test_bytes_do_not_depend_on_the_hash_seed(policy: str) -> None:
    one, other = printed_with_hash_seeds(
        "from tests.lab.small import setup, traffic\n"
        "from llmproxy.lab.run.replay import replay\n"
        "from llmproxy.lab.results.result import SimulationResult, to_bytes\n"
        f"recorder = replay(setup(traffic(), {policy!r}))\n"
        f"run = recorder.result({policy!r}, 1, 1.0, 1.0)\n"
        "print(to_bytes(SimulationResult(runs=[run])).decode())\n"
    )
    assert one == other
    assert len(one) > 1_000


def choices(policy: str, arrivals: list[Arrival], on: SimulatedFleet | None = None) -> list[str | None]:
    ends = records_of(setup(arrivals, policy, on))
    return [one.backend for one in sorted(ends, key=lambda one: one.arrival.at_s)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("policy", [name for name in names() if name != "oracle"])
def test_no_policy_sees_how_long_an_answer_will_be(policy: str) -> None:
    arrivals = traffic(150)
    longer = [*arrivals[:-1], replace(arrivals[-1], output_tokens=2_000)]
    assert choices(policy, arrivals) == choices(policy, longer)


def test_the_oracle_does_see_it() -> None:
    arrivals = [Arrival(0.01 * i, 500, 20) for i in range(40)]
    longer = [replace(one, output_tokens=1_500) if i % 2 else one for i, one in enumerate(arrivals)]
    assert choices("oracle", arrivals, fleet(2)) != choices("oracle", longer, fleet(2))


def test_request_longer_than_every_context_is_always_refused() -> None:
    arrivals = [Arrival(0.0, 7_900, 200), Arrival(0.1, 100, 10)]
    for policy in ("blend", "random", "oracle"):
        ends = records_of(setup(arrivals, policy))
        assert Counter(one.outcome for one in ends) == {Outcome.BAD_REQUEST: 1, Outcome.COMPLETED: 1}


def test_request_too_long_for_one_backend_goes_to_another() -> None:
    long, short = fleet(1, max_model_len=8_000).replicas[0], fleet(1, max_model_len=1_000).replicas[0]
    mixed = SimulatedFleet("mixed", (replace(short, name="a"), replace(long, name="b")))
    ends = records_of(setup([Arrival(0.1 * i, 3_000, 10) for i in range(20)], "blend", mixed))
    assert {one.backend for one in ends} == {"b"}


def test_tokens_found_cached_are_those_of_the_shared_prefix() -> None:
    arrivals = [
        Arrival(0.0, 640, 5, tuple(range(10))),
        Arrival(5.0, 640, 5, tuple(range(10))),
        Arrival(10.0, 640, 5, (*range(5), 90, 91, 92, 93, 94)),
        Arrival(15.0, 640, 5, tuple(range(10)), adapter="lora"),
    ]
    ends = records_of(setup(arrivals, "blend", fleet(1)))
    # A fully cached prompt still computes its last block; another adapter shares nothing.
    assert [one.hit_tokens for one in ends] == [0, 624, 320, 0]


def test_the_next_turn_finds_the_answer_cached() -> None:
    first = Arrival(0.0, 640, 128, tuple(range(12)))
    second = Arrival(10.0, 832, 5, tuple(range(13)))
    ends = records_of(setup([first, second], "blend", fleet(1)))
    # 768 tokens were computed, but the last one was only emitted.
    assert [one.hit_tokens for one in ends] == [0, 752]


def test_a_closed_loop_waits_for_its_answers() -> None:
    third = Arrival(0.0, 100, 10)
    second = Arrival(0.0, 100, 10, think_s=2.0, then=third)
    first = Arrival(1.0, 100, 100, think_s=5.0, then=second)
    ends = records_of(setup([first]))
    assert [one.arrival for one in ends] == [first, second, third]
    assert ends[1].arrived_s == pytest.approx(ends[0].ended_s + 5.0)
    assert ends[2].arrived_s == pytest.approx(ends[1].ended_s + 2.0)


def test_critical_requests_pass_the_others_in_the_waiting_room() -> None:
    bands = ("critical", "default", "sheddable")
    arrivals = [replace(one, band=bands[i % 3]) for i, one in enumerate(traffic(rate=60.0))]
    ends = records_of(setup(arrivals, "blend", fleet(1, max_num_seqs=16)))
    waits: dict[int, list[float]] = {CRITICAL: [], DEFAULT: [], SHEDDABLE: []}
    for one in ends:
        if one.queue_wait_s is not None:
            waits[one.band].append(one.queue_wait_s)
    means = {band: sum(some) / len(some) for band, some in waits.items()}
    assert 4 * means[CRITICAL] < means[DEFAULT]
    assert 1.5 * means[DEFAULT] < means[SHEDDABLE]


@pytest.mark.slow
def test_several_proxies_share_a_fleet_and_know_only_their_own() -> None:
    ends = records_of(setup(traffic(), "blend", fleet(proxies=3)))
    assert Counter(one.outcome for one in ends) == {Outcome.COMPLETED: 300}


# --- faults -----------------------------------------------------------------------------------------------------------


def ended(faults: list[Fault], policy: str = "blend", config: Config | None = None) -> list[Record]:
    return records_of(setup(traffic(rate=60.0), policy, fleet(faults=faults), config))


def test_a_killed_replica_loses_only_what_had_begun() -> None:
    ends = ended([Fault(2.0, FleetFaultKind.KILL, "gpu-1")])
    outcomes = Counter(one.outcome for one in ends)
    assert set(outcomes) == {Outcome.COMPLETED, Outcome.BROKEN_STREAM}
    assert 0 < outcomes[Outcome.BROKEN_STREAM] < 48
    assert all(one.backend != "gpu-1" for one in ends if one.arrived_s > 2.0)
    assert max(one.attempts for one in ends) == 2


@pytest.mark.slow
def test_a_restarted_replica_serves_again() -> None:
    ends = ended([Fault(1.0, FleetFaultKind.RESTART, "gpu-1", value=0.5)])
    assert any(one.backend == "gpu-1" and one.arrived_s > 2.0 for one in ends)
    meanwhile = [one for one in ends if 1.0 < one.arrived_s + (one.queue_wait_s or 0.0) < 1.4 and one.attempts == 1]
    assert meanwhile
    assert all(one.backend != "gpu-1" for one in meanwhile)


def test_a_hung_replica_is_left_alone_once_its_polls_fail() -> None:
    config = Config.model_validate({"timeouts": {"first_byte_s": 20.0}})
    ends = records_of(
        setup(traffic(rate=10.0), "blend", fleet(faults=[Fault(1.0, FleetFaultKind.HANG, "gpu-1")]), config)
    )
    # Two polls of two seconds without an answer mark it down.
    assert not [one for one in ends if one.backend == "gpu-1" and one.arrived_s > 7.0]
    assert Counter(one.outcome for one in ends)[Outcome.COMPLETED] > 250


def test_a_replica_that_joins_late_serves_only_then() -> None:
    small = fleet(2)
    late = SimulatedFleet("late", (small.replicas[0], replace(small.replicas[1], joins_s=3.0)))
    ends = records_of(setup(traffic(rate=40.0), "blend", late))
    first_s = min(one.arrived_s + (one.queue_wait_s or 0.0) for one in ends if one.backend == "gpu-1")
    assert 3.0 <= first_s < 3.5


@pytest.mark.slow
def test_readings_that_are_lost_or_old_lose_no_request() -> None:
    faults = [
        Fault(0.0, FleetFaultKind.LOST_READINGS, None, value=0.5),
        Fault(0.0, FleetFaultKind.METRIC_AGE, None, value=3.0),
    ]
    for policy in ("blend", "epp_blend"):
        assert Counter(one.outcome for one in ended(faults, policy)) == {Outcome.COMPLETED: 300}


@pytest.mark.slow
def test_dearer_prompt_tokens_make_first_tokens_later() -> None:
    def mean_ttft_s(scale: float) -> float:
        ends = records_of(setup(traffic(), prefill_scale=scale))
        return sum(one.ttft_s or 0.0 for one in ends) / len(ends)

    assert mean_ttft_s(1.9) > 1.05 * mean_ttft_s(1.0)


@pytest.mark.slow
def test_progress_is_reported_to_the_end() -> None:
    outputs: list[int] = []
    replay(setup(traffic(count=600)), outputs.append)
    assert outputs == [256, 512, 600]
