"""Autoscaling in virtual time: starts, ends and costs of replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from llmproxy.config import Config
from llmproxy.lab.fleet.fleet_file import FleetError, fleet_named
from llmproxy.lab.fleet.spec import Autoscale
from llmproxy.lab.results.recorder import changes_of
from llmproxy.lab.results.result import RunResult
from llmproxy.lab.run.replay import Run
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.traces.arrival import Arrival
from tests.lab.small import setup


def simulated(signal: str, rates: list[tuple[float, float]], least: int = 1) -> tuple[RunResult, Run]:
    """A run at these (seconds, requests per second), on `least` to four replicas that take 30 s to start."""
    rng, begin_s, came = Random(1), 0.0, list[Arrival]()
    for lasts_s, rate in rates:
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(rate)) < lasts_s:
            came.append(Arrival(begin_s + at_s, 3_000, 100))
        begin_s += lasts_s
    scaling = {"start_s": 30.0, "pools": ["base"], "min": least}
    config = Config.model_validate(
        {
            "backends": [{"url": "http://a:1"}],
            "scaling": scaling,
            "queue": {"no_backend_wait_s": 120.0, "max_wait_s": 120.0},
        }
    )
    fleet = replace(fleet_named("4xllama-8b-h100"), autoscale=Autoscale(signal, least, 30.0))
    one = Run(setup(came, "cost", fleet, config))
    return run(one.go()).result(signal, 1, 1.0, 1.0), one


@pytest.mark.slow
def test_our_number_follows_the_load_up_and_down_and_loses_nothing() -> None:
    result, one = simulated("ours", [(90.0, 2.0), (180.0, 12.0), (500.0, 1.0)])
    assert one.scaled is not None
    wanted = {round(at_s): count for at_s, count, _ in one.scaled.trail}
    assert min(wanted.values()) == 1
    assert result.replicas is not None
    assert result.replicas.peak in (2, 3, 4)
    assert result.replicas.turns == 0
    assert list(wanted.values())[-1] == 1
    assert (result.refused, result.failed) == (0, 0)
    # A replica serves only when it has started.
    first = next(at_s for at_s, count, _ in one.scaled.trail if count > 1)
    assert all(serving == 1 for at_s, _, serving in one.scaled.trail if at_s < first + 30.0)
    assert result.replicas.mean < 4.0


def test_a_fleet_without_replicas_starts_with_its_first_request_and_answers_all() -> None:
    result, one = simulated("ours", [(60.0, 2.0)], least=0)
    assert one.scaled is not None
    assert (result.refused, result.failed) == (0, 0)
    # Asked within five seconds of the first request, and served as soon as a replica was there.
    asked_s, served_s = (next(trail[0] for trail in one.scaled.trail if trail[column] > 0) for column in (1, 2))
    assert asked_s <= 2.0 + 5.0 + 1.0
    assert served_s <= asked_s + 30.0 + 15.0
    assert result.ttft_s.p99 is not None
    assert 30.0 < result.ttft_s.p99 < 45.0
    # Replicas that never served are in no mean.
    served = [one for one in result.by_backend.values() if one.requests]
    assert (len(served), len(result.by_backend)) == (1, 4)
    assert [one.mean_running is not None for one in result.by_backend.values()] == [True, False, False, False]
    assert (result.prefill_imbalance, result.utilisation.mean_running) == (1.0, served[0].mean_running)


@pytest.mark.slow
def test_a_static_fleet_costs_all_of_its_replicas() -> None:
    result, _ = simulated("static", [(120.0, 2.0)])
    assert result.replicas is not None
    assert result.replicas.peak == 4
    assert result.replicas.mean == pytest.approx(4.0, rel=0.05)


def test_turns_within_two_starts_are_flapping() -> None:
    trail = [(0.0, 1, 1), (15.0, 3, 1), (30.0, 2, 1), (45.0, 2, 2), (400.0, 4, 2)]
    assert changes_of(trail, 60.0) == 1
    assert changes_of(trail, 10.0) == 0
    assert changes_of(trail, 1_000.0) == 2


def test_the_file_says_how_a_fleet_scales(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "replicas: [{count: 3, profile: llama-8b-h100}]\nautoscale: {policy: hpa_queue, min: 2, start_s: 60}\n"
    )
    assert fleet_named(str(path)).autoscale == Autoscale("hpa_queue", 2, 60.0)
    path.write_text("replicas: [{count: 3, profile: llama-8b-h100}]\nautoscale: {min: 4}\n")
    with pytest.raises(FleetError, match="at most the 3 replicas"):
        fleet_named(str(path))
    path.write_text("replicas: [{count: 3, profile: llama-8b-h100}]\nautoscale: {policy: hpa_que}\n")
    with pytest.raises(FleetError, match="hpa_queue"):
        fleet_named(str(path))
