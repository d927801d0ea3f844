"""Objectives follow from the times of an idle replica, and from the objectives of the client."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmproxy.core.domain import DEFAULT, Outcome
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.fleet.spec import SimulatedFleet
from llmproxy.lab.results.objectives import Objectives, prefill_s, scaled_profile
from llmproxy.lab.results.record import Record
from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.profiles import PROFILES
from llmproxy.lab.simulator.engine.sequence import EngineRequest
from llmproxy.lab.traces.arrival import Arrival


def prompt(tokens: int) -> Arrival:
    return Arrival(0.0, tokens, 10)


@pytest.mark.parametrize("tokens", [1, 500, 8_192, 8_193, 100_000])
@pytest.mark.parametrize("prefill_scale", [1.0, 1.9])
def test_an_idle_engine_takes_exactly_the_unloaded_time(tokens: int, prefill_scale: float) -> None:
    fleet = fleet_named("1xllama-8b-h100")
    profile = scaled_profile(fleet.replicas[0], prefill_scale)
    engine = Engine(profile)
    engine.add(EngineRequest("a", tokens, 1))
    engine_s = 0.0
    while engine.busy:
        engine_s += engine.step().duration_s
    assert Objectives(fleet, prefill_scale).unloaded_ttft_s(tokens) == pytest.approx(profile.frontend_s + engine_s)


def test_a_step_budget_cuts_the_prompt_into_chunks() -> None:
    profile = PROFILES["llama-8b-h100"]
    in_two = profile.step_s(0, 0, [(1_000, 5_000)]) + profile.step_s(0, 0, [(5_000, 6_000)])
    assert prefill_s(profile, 4_000, 1_000, 6_000) == pytest.approx(in_two)
    assert prefill_s(profile, 4_000, 6_000, 6_000) == 0.0


def test_first_token_objective_is_a_second_or_three_times_unloaded() -> None:
    objectives = Objectives(fleet_named("1xllama-8b-h100"), 1.0)
    assert objectives.for_arrival(prompt(100))[0] == 1.0
    long_s = objectives.unloaded_ttft_s(60_000)
    assert long_s > 1.0
    assert objectives.for_arrival(prompt(60_000))[0] == 3 * long_s


def test_the_fastest_replica_counts_wherever_it_stands() -> None:
    alone = Objectives(fleet_named("1xllama-8b-h100"), 1.0).unloaded_ttft_s(60_000)
    for name in ("1xllama-8b-h100+3xllama-8b-a100", "3xllama-8b-a100+1xllama-8b-h100"):
        assert Objectives(fleet_named(name), 1.0).unloaded_ttft_s(60_000) == alone
    assert Objectives(fleet_named("1xllama-8b-a100"), 1.0).unloaded_ttft_s(60_000) > alone


@pytest.mark.parametrize(
    ("profiles", "tpot_s"),
    [
        ("llama-8b-h100 llama-8b-h100", 0.040),
        ("llama-8b-h100 llama-8b-a100", 0.040),
        ("llama-70b-h100-tp8", 0.075),
        ("qwen-32b-h100-tp2", 0.075),
        ("llama-8b-h100 llama-70b-h100-tp4", 0.075),
        ("tiny", 0.075),
        ("my-8B-l40s", 0.040),
        ("8b", 0.040),
        ("granite-3.8b", 0.075),
        ("mixtral-8x8bits", 0.075),
    ],
)
def test_small_models_by_the_names_of_their_profiles_owe_their_tokens_sooner(profiles: str, tpot_s: float) -> None:
    (spec,) = fleet_named("1xtiny").replicas
    fleet = SimulatedFleet("own", tuple(replace(spec, profile_name=name) for name in profiles.split()))
    assert Objectives(fleet, 1.0).for_arrival(prompt(10))[1] == tpot_s


def test_what_a_client_asks_for_wins() -> None:
    objectives = Objectives(fleet_named("1xllama-8b-h100"), 1.0)
    fleet_ttft_s, fleet_tpot_s = objectives.for_arrival(prompt(60_000))
    assert objectives.for_arrival(replace(prompt(60_000), ttft_slo_s=0.2)) == (0.2, fleet_tpot_s)
    assert objectives.for_arrival(replace(prompt(60_000), tpot_slo_s=0.5)) == (fleet_ttft_s, 0.5)


@pytest.mark.parametrize(
    ("ended_s", "ttft_s", "tpot_s", "met"),
    [
        (9.0, 1.0, 0.04, True),
        (9.0, 1.01, 0.01, False),
        (9.0, 0.1, 0.041, False),
        # A whole answer of ten tokens has the time of both objectives: 1 s, and 9 times 40 ms.
        (6.35, None, None, True),
        (6.37, None, None, False),
    ],
)
def test_a_stream_has_two_objectives_and_a_whole_answer_their_sum(
    ended_s: float, ttft_s: float | None, tpot_s: float | None, met: bool
) -> None:
    ended = Record(
        replace(prompt(100), whole=ttft_s is None), 5.0, DEFAULT, Outcome.COMPLETED, ended_s,
        ttft_s=ttft_s, tpot_s=tpot_s, output_tokens=10,
    )  # fmt: skip
    objectives = Objectives(fleet_named("1xllama-8b-h100"), 1.0)
    assert objectives.met(ended) is met
    assert not objectives.met(replace(ended, outcome=Outcome.BROKEN_STREAM))
