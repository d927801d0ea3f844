"""The workloads: traffic, figures, goals and tables."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.lab.scenarios.goals import full_step_s, versus
from benchmarks.lab.scenarios.run import FULL_SEEDS, PREFILL_SCALES
from benchmarks.lab.scenarios.scenario import (
    TRACES,
    Beside,
    Case,
    Found,
    Goal,
    Place,
    Scenario,
    config_of,
    critical_goodput,
    placed,
    places,
    victims_goodput,
)
from benchmarks.lab.scenarios.tables import found_at, goal_rows, print_place, print_verdicts, write_pages
from benchmarks.lab.scenarios.workloads import SCENARIOS
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.policies.by_name import plan_named
from llmproxy.lab.results.result import Bound, Loaded, Point, RunResult, Trail
from llmproxy.lab.run.runs import Finished
from llmproxy.lab.traces.mix import Mix
from tests.lab.invented import invented_run

NO_TRAIL = Trail(load_at_s=[])
CASES = [(scenario, case) for scenario in SCENARIOS for case in scenario.cases]
NAMED = pytest.mark.parametrize(("scenario", "case"), CASES, ids=[f"{s.key} {c.name}" for s, c in CASES])


def made(point: Point) -> Finished:
    return Finished(invented_run(point.policy, point.rate_scale, seed=point.seed, count=30), NO_TRAIL)


def place_of(scenario: Scenario, case: Case, load: float | None = None) -> Place:
    return Place(scenario, case, load, 1.0, 1.0, fleet_named(case.fleet), {})


# --- figures that decide ----------------------------------------------------------------------------------------------


def test_figure_of_a_band_or_of_victims_counts_their_requests_alone() -> None:
    run: RunResult = invented_run("cost", 1.0)
    assert critical_goodput(run) == run.by_band["critical"].goodput
    loudest = max(run.by_tenant, key=lambda name: run.by_tenant[name].asked_share or 0.0)
    others = [group.goodput or 0.0 for name, group in run.by_tenant.items() if name != loudest]
    assert victims_goodput(run) == pytest.approx(sum(others) / len(others))
    assert critical_goodput(run.model_copy(update={"by_band": {}})) is None
    assert victims_goodput(run.model_copy(update={"by_tenant": {}})) is None


# --- traffic ----------------------------------------------------------------------------------------------------------


SLICED = [(scenario, case) for scenario, case in CASES if case.requests is not None]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("scenario", "case"), SLICED, ids=[f"{s.key} {c.name}" for s, c in SLICED])
def test_every_seed_has_a_stretch_of_the_file_of_its_own(scenario: Scenario, case: Case) -> None:
    assert case.requests is not None
    stretches = []
    for seed in FULL_SEEDS:
        simulation = place_of(scenario, case).simulation(seed)
        assert simulation.requests == case.requests
        stretches.append((simulation.skip, simulation.skip + case.requests))
    stretches.sort()
    assert stretches[0][0] == 0
    assert all(end <= start for (_, end), (start, _) in pairwise(stretches))
    with gzip.open(TRACES / case.trace, "rt") as file:
        lines = sum(1 for _ in file) - case.trace.endswith(".csv.gz")
    assert stretches[-1][1] <= lines


# --- all of them ------------------------------------------------------------------------------------------------------


def test_every_workload_has_a_quick_case_and_labels_are_unique() -> None:
    labels = [place_of(scenario, case, load).label for scenario, case in CASES for load in case.loads]
    assert len(set(labels)) == len(labels)
    assert all(any(case.quick for case in scenario.cases) for scenario in SCENARIOS)


@NAMED
def test_every_policy_of_a_case_is_known(scenario: Scenario, case: Case) -> None:
    config = config_of(case)
    assert config.scheduling.flow == "header:x-tenant"
    assert len(set(case.policies)) == len(case.policies)
    assert len(case.policies) > 1 or case.beside
    for policy in (*case.policies, *(one.policy for one in case.beside)):
        plan_named(policy, config)
    assert set(case.quick_loads or case.loads) <= set(case.loads), scenario.key


@pytest.mark.sampled(8)
@NAMED
def test_every_case_finds_its_rate_its_fleet_and_its_bounds(scenario: Scenario, case: Case) -> None:
    short, load = replace(case, requests=40), case.loads[0]
    place = placed(scenario, short, load, 1.0, 1)
    assert place.bounds.keys() >= {"rate_balance", "hit_pooled_lru"}
    if load is None:
        assert place.rate_scale == 1.0
    else:
        assert place.rate_scale == pytest.approx(2.0 * placed(scenario, short, load / 2.0, 1.0, 1).rate_scale, rel=0.01)
    simulation = place.simulation(2)
    assert (simulation.fleet, simulation.skip) == (place.fleet, 40)
    known = {spec.name for spec in place.fleet.replicas}
    assert {fault.replica for fault in place.fleet.faults} <= known
    assert len(known) == len(fleet_named(case.fleet).replicas)
    point = place.point("cost", 2)
    assert (point.rate_scale, point.prefill_scale) == (place.rate_scale, 1.0)


def test_quick_set_has_the_quick_cases_at_their_quick_loads() -> None:
    w1, w5 = (next(scenario for scenario in SCENARIOS if scenario.key == key) for key in ("W1", "W5"))
    short = [replace(one, cases=tuple(replace(case, requests=40) for case in one.cases)) for one in (w1, w5)]
    found = [(place.scenario.key, place.load, place.prefill_scale) for place in places(short, True, PREFILL_SCALES, 1)]
    assert found == [
        (key, load, scale) for key, load in (("W1", 0.7), ("W5", 2.0), ("W5", 2.0)) for scale in PREFILL_SCALES
    ]


# --- goals ------------------------------------------------------------------------------------------------------------


def test_goal_is_met_at_its_value_and_never_by_a_missing_figure() -> None:
    assert Goal("x", 0.95, 0.95).met
    assert not Goal("x", 0.949, 0.95).met
    assert Goal("x", 0.95, 0.95, at_least=False).met
    assert not Goal("x", 0.951, 0.95, at_least=False).met
    assert not Goal("x", None, 0.0).met
    assert not Goal("x", None, 1.0, at_least=False).met


def test_goals_are_printed_with_what_was_measured_and_what_was_wanted() -> None:
    scenario = SCENARIOS[0]
    goals = [Goal("up", 0.5, 0.9), Goal("down", 0.5, 0.9, at_least=False, about="why"), Goal("none", None, 1.0)]
    place = place_of(scenario, replace(scenario.cases[0], goals=lambda _: goals))
    run = invented_run("cost", 1.0, count=30)
    assert goal_rows(Found(place, {"cost": [run]}, {})) == [
        ["up", "0.5", ">= 0.9", "MISSED"],
        ["down", "0.5", "<= 0.9 (why)", "met"],
        ["none", "none", ">= 1", ""],
    ]
    assert goal_rows(Found(place, {"cost": []}, {})) == []
    # The goal needs a run that is missing.
    assert goal_rows(Found(place, {"cost": [run], "epp_blend": []}, {})) == []
    assert goal_rows(Found(place, {"cost": [run]}, {"alone": []})) == []
    assert goal_rows(Found(place_of(scenario, scenario.cases[0]), {"cost": [run]}, {})) == []


@pytest.mark.slow
def test_set_prints_its_places_and_verdicts_and_writes_pages(tmp_path: Path) -> None:
    case = replace(SCENARIOS[0].cases[0], policies=("cost", "epp_blend", "oracle"))
    place = place_of(SCENARIOS[0], case, 0.7)

    def runs(place: Place, policy: str, seeds: Sequence[int]) -> list[Finished]:
        del place
        return [made(Point(policy, seed)) for seed in seeds]

    console = Console(width=200, file=StringIO())
    print_place(console, place, {policy: runs(place, policy, (1,)) for policy in case.policies})
    print_verdicts(console, [place], runs, (1,))
    assert isinstance(console.file, StringIO)
    printed = console.file.getvalue()
    assert all(text in printed for text in (place.label, "epp_blend", "Where cost ranks", "(one seed)"))
    write_pages(tmp_path, [place], runs, (1,))
    assert [path.parent.name for path in tmp_path.rglob("result.json")] == ["8-x-8b"]


def test_run_beside_has_another_part_of_the_same_arrivals() -> None:
    beside = Beside("alone", "random", Mix(band="critical"))
    case = replace(SCENARIOS[0].cases[0], mix=Mix(loud="x"), beside=(beside,), policies=("cost",))
    place = place_of(SCENARIOS[0], case)
    other = place.beside(beside)
    assert (other.rate_scale, other.fleet, other.bounds) == (place.rate_scale, place.fleet, place.bounds)
    assert other.simulation(3) == replace(place.simulation(3), mix=beside.mix)
    assert other.label != place.label
    asked: list[tuple[str, str]] = []

    def runs(where: Place, policy: str, seeds: Sequence[int]) -> list[Finished]:
        asked.append((where.label, policy))
        return [Finished(invented_run(policy, 1.0, seed=seed, count=30), NO_TRAIL) for seed in seeds]

    found = found_at(place, runs, (1, 2))
    assert asked == [(place.label, "cost"), (other.label, "random")]
    assert [run.seed for run in found.beside["alone"]] == [1, 2]


def test_a_proxy_that_is_given_the_limits_knows_those_of_its_fleet() -> None:
    w5 = next(scenario for scenario in SCENARIOS if scenario.key == "W5")
    case = next(case for case in w5.cases if case.known_limits)
    place = placed(w5, replace(case, requests=40), 2.0, 1.0, 1)
    backends = place.simulation(1).config.backends
    assert {one.name: one.max_in_flight for one in backends} == {
        spec.name: spec.max_num_seqs for spec in place.fleet.replicas
    }


def test_ratios_are_of_the_same_seeds() -> None:
    runs = [invented_run("cost", 1.0, seed=seed, count=30) for seed in (1, 2, 3)]
    figures = {1: 1.0, 2: 4.0, 3: 100.0}
    assert versus(runs[:2], runs[1:], lambda run: figures[run.seed]) == 1.0
    assert versus(runs[:1], runs[1:], lambda run: figures[run.seed]) is None


def test_a_full_step_has_a_full_batch_and_a_full_budget_of_prompts() -> None:
    case = replace(SCENARIOS[0].cases[0], fleet="2xllama-8b-h100")
    place = place_of(SCENARIOS[0], case)
    spec = place.fleet.replicas[0]
    chunks = [(500, 1_000)] * 16
    step_s = spec.profile.step_s(spec.max_num_seqs, spec.max_num_seqs * 1_200, chunks)
    assert full_step_s(place, 1_000, 500, 1_200) == pytest.approx(step_s)
    assert full_step_s(replace(place, prefill_scale=1.9), 1_000, 500, 1_200) > 1.3 * step_s


JUDGED = [(scenario, case) for scenario, case in CASES if case.goals is not None]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("scenario", "case"), JUDGED, ids=[f"{s.key} {c.name}" for s, c in JUDGED])
def test_goals_are_judged_with_and_without_runs(scenario: Scenario, case: Case) -> None:
    assert case.goals is not None
    bounds = {"rate_balance": Bound(value=10.0, unit="", about="")}
    place = replace(place_of(scenario, case, case.loads[0]), bounds=bounds)
    loaded = Loaded(duration_s=100.0, output_tokens={"critical": 1_000, "default": 4_000, "sheddable": 100})
    empty = Found(place, {policy: [] for policy in case.policies}, {one.name: [] for one in case.beside})
    assert not any(goal.met for goal in case.goals(empty))
    # A load at which nothing is completed has no latency either.
    for skill in (0.5, 0.0):
        runs = [invented_run("cost", 1.0, seed=seed, skill=skill, count=200) for seed in (1, 2)]
        runs = [run.model_copy(update={"loaded": loaded}) for run in runs]
        full = Found(place, dict.fromkeys(case.policies, runs), dict.fromkeys((one.name for one in case.beside), runs))
        goals = case.goals(full)
        assert len({goal.name for goal in goals}) == len(goals) > 0
