"""The workloads W1 to W9: their traffic, their figures and their goals."""

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
from benchmarks.lab.scenarios.run import FULL_SEEDS, PREFILL_SCALES, QUICK_SEEDS
from benchmarks.lab.scenarios.scenario import (
    POLICIES,
    TELLING,
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
from benchmarks.lab.scenarios.tuning import TUNING_SEEDS
from benchmarks.lab.scenarios.workloads import SCENARIOS
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.policies.by_name import plan_named
from llmproxy.lab.results.result import Bound, Loaded, Point, RunResult
from llmproxy.lab.run.runs import Finished
from llmproxy.lab.traces.mix import Mix
from tests.lab.invented import invented_run

CASES = [(scenario, case) for scenario in SCENARIOS for case in scenario.cases]
NAMED = pytest.mark.parametrize(("scenario", "case"), CASES, ids=[f"{s.key} {c.name}" for s, c in CASES])


def made(point: Point) -> Finished:
    return Finished(*invented_run(point.policy, point.rate_scale, seed=point.seed, count=30))


def place_of(scenario: Scenario, case: Case, load: float | None = None) -> Place:
    return Place(scenario, case, load, 1.0, 1.0, fleet_named(case.fleet), {})


# --- figures that decide ----------------------------------------------------------------------------------------------


def test_the_figures_of_a_part_of_the_requests_are_those_of_that_part() -> None:
    run: RunResult = invented_run("cost", 1.0)[0]
    assert critical_goodput(run) == run.by_band["critical"].goodput
    loudest = max(run.by_tenant, key=lambda name: run.by_tenant[name].asked_share or 0.0)
    others = [group.goodput or 0.0 for name, group in run.by_tenant.items() if name != loudest]
    assert victims_goodput(run) == pytest.approx(sum(others) / len(others))
    assert critical_goodput(run.model_copy(update={"by_band": {}})) is None
    assert victims_goodput(run.model_copy(update={"by_tenant": {}})) is None


# --- traffic ----------------------------------------------------------------------------------------------------------


def test_no_seed_tunes_and_tests() -> None:
    assert set(QUICK_SEEDS) <= set(FULL_SEEDS)
    assert not set(FULL_SEEDS) & set(TUNING_SEEDS)


SLICED = [(scenario, case) for scenario, case in CASES if case.requests is not None]


@pytest.mark.parametrize(("scenario", "case"), SLICED, ids=[f"{s.key} {c.name}" for s, c in SLICED])
def test_every_seed_has_a_stretch_of_the_file_to_itself(scenario: Scenario, case: Case) -> None:
    assert case.requests is not None
    stretches = []
    for seed in (*FULL_SEEDS, *TUNING_SEEDS):
        simulation = place_of(scenario, case).simulation(seed)
        assert simulation.requests == case.requests
        stretches.append((simulation.skip, simulation.skip + case.requests))
    stretches.sort()
    assert stretches[0][0] == 0
    assert all(end <= start for (_, end), (start, _) in pairwise(stretches))
    with gzip.open(TRACES / case.trace, "rt") as file:
        lines = sum(1 for _ in file) - case.trace.endswith(".csv.gz")
    assert stretches[-1][1] <= lines


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.key)
def test_the_case_that_is_tuned_on_has_other_traffic_for_every_seed(scenario: Scenario) -> None:
    case = scenario.cases[0]
    assert case.trace.startswith("gen:") or case.requests is not None


# --- all of them ------------------------------------------------------------------------------------------------------


def test_workloads_are_those_with_a_case_for_make_lab_and_unique_labels() -> None:
    workloads = ["W1", "W2", "W3", "W4", "W4b", "W5", "W5b", *(f"W{i}" for i in range(6, 10)), "W11"]
    assert [scenario.key for scenario in SCENARIOS] == [*workloads, "A"]
    labels = [place_of(scenario, case, load).label for scenario, case in CASES for load in case.loads]
    assert len(set(labels)) == len(labels)
    assert all(any(case.quick for case in scenario.cases) for scenario in SCENARIOS if scenario.key != "A")
    assert PREFILL_SCALES == (1.0, 1.9)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.key)
def test_who_is_left_out_of_a_further_case_runs_in_a_quick_one(scenario: Scenario) -> None:
    assert set(TELLING) < set(POLICIES)
    if any(case.policies == TELLING for case in scenario.cases):
        assert any(case.quick and case.policies == POLICIES for case in scenario.cases)


@NAMED
def test_every_policy_of_a_case_is_known(scenario: Scenario, case: Case) -> None:
    config = config_of(case)
    assert config.scheduling.flow == "header:x-tenant"
    assert len(set(case.policies)) == len(case.policies)
    assert len(case.policies) > 1 or case.beside
    for policy in (*case.policies, *(one.policy for one in case.beside)):
        plan_named(policy, config)
    assert set(case.quick_loads or case.loads) <= set(case.loads), scenario.key


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


def test_the_quick_set_is_the_quick_cases_at_their_quick_loads() -> None:
    w5 = next(scenario for scenario in SCENARIOS if scenario.key == "W5")
    w1 = next(scenario for scenario in SCENARIOS if scenario.key == "W1")
    short = [replace(one, cases=tuple(replace(case, requests=40) for case in one.cases)) for one in (w1, w5)]
    quick = places(short, True, PREFILL_SCALES, 1)
    every = places(short, False, (1.0,), 1)
    assert [place.label for place in every if place.quick] == [p.label for p in quick if p.prefill_scale == 1.0]
    assert [(place.scenario.key, place.load, place.prefill_scale) for place in quick] == [
        *(("W1", 0.7, scale) for scale in PREFILL_SCALES),
        *(("W5", 2.0, scale) for scale in PREFILL_SCALES),
        *(("W5", 2.0, scale) for scale in PREFILL_SCALES),
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
    run = invented_run("cost", 1.0, count=30)[0]
    assert goal_rows(Found(place, {"cost": [run]}, {})) == [
        ["up", "0.5", ">= 0.9", "MISSED"],
        ["down", "0.5", "<= 0.9 (why)", "met"],
        ["none", "none", ">= 1", ""],
    ]
    assert goal_rows(Found(place, {"cost": []}, {})) == []
    # What it would be compared with was not run: no figure stands in for it.
    assert goal_rows(Found(place, {"cost": [run], "epp_blend": []}, {})) == []
    assert goal_rows(Found(place, {"cost": [run]}, {"alone": []})) == []
    assert goal_rows(Found(place_of(scenario, scenario.cases[0]), {"cost": [run]}, {})) == []


def test_of_a_set_that_was_cut_short_only_what_was_run_is_printed(tmp_path: Path) -> None:
    scenario = SCENARIOS[0]
    case = replace(scenario.cases[0], policies=("cost", "epp_blend", "oracle"))
    some, none = place_of(scenario, case, 0.7), place_of(scenario, replace(case, name="other"), 0.7)
    policies = dict.fromkeys((some.label, none.label), case.policies)

    def runs(place: Place, policy: str, seeds: Sequence[int]) -> list[Finished]:
        ran = place is some and policy == "cost"
        return [made(Point(policy, seed)) for seed in seeds] if ran else []

    output = StringIO()
    console = Console(width=200, file=output)
    print_place(console, some, {policy: runs(some, policy, (1,)) for policy in case.policies})
    print_place(console, none, {policy: [] for policy in case.policies})
    print_verdicts(console, [some, none], policies, runs, (1,))
    printed = output.getvalue()
    assert "not run: epp_blend, oracle" in printed
    assert f"{none.label}: not run" in printed
    assert "Where cost stands" not in printed
    write_pages(tmp_path, [some, none], policies, runs, (1,), {})
    assert [path.parent.name for path in tmp_path.rglob("result.json")] == ["8-x-8b"]


def test_what_is_run_beside_is_another_part_of_the_same_arrivals() -> None:
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
        return [Finished(*invented_run(policy, 1.0, seed=seed, count=30)) for seed in seeds]

    found = found_at(place, {place.label: ["cost"]}, runs, (1, 2))
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
    runs = [invented_run("cost", 1.0, seed=seed, count=30)[0] for seed in (1, 2, 3)]
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


@pytest.mark.parametrize(("scenario", "case"), JUDGED, ids=[f"{s.key} {c.name}" for s, c in JUDGED])
def test_goals_can_be_judged_on_runs_of_any_kind_and_on_none(scenario: Scenario, case: Case) -> None:
    assert case.goals is not None
    bounds = {"rate_balance": Bound(value=10.0, unit="", about="")}
    place = replace(place_of(scenario, case, case.loads[0]), bounds=bounds)
    loaded = Loaded(duration_s=100.0, output_tokens={"critical": 1_000, "default": 4_000, "sheddable": 100})
    empty = Found(place, {policy: [] for policy in case.policies}, {one.name: [] for one in case.beside})
    assert not any(goal.met for goal in case.goals(empty))
    # A load at which nothing is completed has no latency either.
    for skill in (0.5, 0.0):
        runs = [invented_run("cost", 1.0, seed=seed, skill=skill, count=200)[0] for seed in (1, 2)]
        runs = [run.model_copy(update={"loaded": loaded}) for run in runs]
        full = Found(place, dict.fromkeys(case.policies, runs), dict.fromkeys((one.name for one in case.beside), runs))
        goals = case.goals(full)
        assert len({goal.name for goal in goals}) == len(goals) > 0


def test_frontier_is_drawn_for_every_prefill_cost() -> None:
    pytest.importorskip("matplotlib")
    w5 = next(scenario for scenario in SCENARIOS if scenario.key == "W5")
    case = next(case for case in w5.cases if case.plots is not None)
    assert case.plots is not None
    run = invented_run("cost", 1.0, count=100)[0]
    run = run.model_copy(update={"loaded": Loaded(duration_s=10.0, output_tokens={"default": 100})})
    for runs in ([run], []):
        found = [
            Found(
                replace(place_of(w5, case, 1.5), prefill_scale=scale),
                dict.fromkeys(case.policies, runs),
                dict.fromkeys((one.name for one in case.beside), runs),
            )
            for scale in PREFILL_SCALES
        ]
        (plot,) = case.plots(found)
        assert plot.figure is not None
        assert len(plot.figure.axes) == 4
