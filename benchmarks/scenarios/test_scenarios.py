"""The standing workloads: fair pairs, runs that are believed only if they are the same, and traffic that suffices."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from math import exp, log, sqrt
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.scenarios import SCENARIOS, store
from benchmarks.scenarios.goals import full_step_s, versus
from benchmarks.scenarios.run import FULL_SEEDS, PREFILL_SCALES, QUICK_SEEDS, policies_of
from benchmarks.scenarios.scenario import (
    GOODPUT,
    POLICIES,
    TELLING,
    TRACES,
    TTFT_P99,
    Beside,
    Case,
    Found,
    Goal,
    Metric,
    Place,
    Scenario,
    config_of,
    critical_goodput,
    placed,
    places,
    victims_goodput,
)
from benchmarks.scenarios.statistics import Ratio, paired_ratio
from benchmarks.scenarios.store import Store, code_digest
from benchmarks.scenarios.tables import goal_rows, print_place, print_verdicts, told, write_pages
from benchmarks.scenarios.tuning import TUNING_SEEDS, Tuned, contenders, pick
from llmproxy.config import Config
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.policies.by_name import plan_named
from llmproxy.lab.results.result import Bound, Loaded, Quantiles, RunResult
from llmproxy.lab.run.runs import Finished, Point, Simulation
from llmproxy.lab.traces.mix import Mix
from tests.lab.invented import invented_run

CASES = [(scenario, case) for scenario in SCENARIOS for case in scenario.cases]
NAMED = pytest.mark.parametrize(("scenario", "case"), CASES, ids=[f"{s.key} {c.name}" for s, c in CASES])


# --- ratios -----------------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_geometric_mean_of_pairs() -> None:
    ratio = paired_ratio([2.0, 8.0], [1.0, 1.0])
    assert ratio is not None
    assert ratio.mean == pytest.approx(4.0)
    # Of the four samples of two pairs, one is all 2 and one is all 8.
    assert [ratio.low, ratio.high] == pytest.approx([2.0, 8.0])
    assert ratio.above_one is True


def test_pairs_that_agree_leave_no_doubt() -> None:
    ratio = paired_ratio([0.4, 0.2, 0.1], [0.8, 0.4, 0.2])
    assert ratio is not None
    assert [ratio.mean, ratio.low, ratio.high] == pytest.approx([0.5] * 3)
    assert ratio.above_one is False
    assert str(ratio) == "0.500 [0.500, 0.500]"


def test_the_interval_is_that_of_the_mean_and_holds_it() -> None:
    logs = [0.3, -0.1, 0.2, -0.2, 0.1, 0.15, -0.05, 0.25]
    ratio = paired_ratio([exp(one) for one in logs], [1.0] * 8)
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.high is not None
    mean = sum(logs) / 8
    sigma = sqrt(sum((one - mean) ** 2 for one in logs) / 8)
    assert log(ratio.mean) == pytest.approx(mean)
    assert log(ratio.low) == pytest.approx(mean - 1.96 * sigma / sqrt(8), abs=0.02)
    assert log(ratio.high) == pytest.approx(mean + 1.96 * sigma / sqrt(8), abs=0.02)
    assert ratio.above_one is None


def test_turned_round_it_is_the_inverse_and_equal_figures_give_equal_intervals() -> None:
    ours, theirs = [0.9, 0.7, 0.8, 0.95], [0.6, 0.75, 0.5, 0.9]
    one, other = paired_ratio(ours, theirs), paired_ratio(theirs, ours)
    assert one is not None
    assert other is not None
    assert one.mean == pytest.approx(1.0 / other.mean)
    assert one == paired_ratio(ours, theirs)


def test_what_has_no_ratio_or_no_interval() -> None:
    assert paired_ratio([1.0, 0.0], [1.0, 1.0]) is None
    assert paired_ratio([1.0, 1.0], [0.0, 1.0]) is None
    assert paired_ratio([], []) is None
    assert str(paired_ratio([3.0], [2.0])) == "1.500"
    assert Ratio(1.5).above_one is None
    with pytest.raises(ValueError, match="2 figures cannot be paired with 1"):
        paired_ratio([1.0, 2.0], [1.0])


# --- runs that were made before ---------------------------------------------------------------------------------------

GENERATED = Simulation("gen:step_bursts,rate=10", fleet_named("2xllama-8b-h100"), Config())


def made(point: Point) -> Finished:
    return Finished(point, *invented_run(point.policy, point.rate_scale, seed=point.seed, count=30))


def test_a_run_is_found_again_as_it_was(tmp_path: Path) -> None:
    kept, one = Store(tmp_path / "runs"), made(Point("cost", 1))
    assert kept.get(GENERATED, one.point) is None
    kept.put(GENERATED, one)
    assert kept.get(GENERATED, one.point) == one
    assert Store(tmp_path / "runs").get(GENERATED, one.point) == one


def other_config(**given: object) -> Simulation:
    return replace(GENERATED, config=Config.model_validate({"scheduling": given}))


@pytest.mark.parametrize(
    "other",
    [
        replace(GENERATED, fleet=fleet_named("3xllama-8b-h100")),
        replace(GENERATED, fleet=replace(GENERATED.fleet, proxies=2)),
        other_config(look_ahead=0),
        other_config(flow="header:x-tenant"),
        replace(GENERATED, trace="gen:step_bursts,rate=11"),
        replace(GENERATED, skip=1),
        replace(GENERATED, requests=10),
        replace(GENERATED, replicate=2),
        replace(GENERATED, warmup=0.1),
        replace(GENERATED, mix=Mix(band="critical")),
    ],
)
def test_a_run_of_anything_else_is_not_found(tmp_path: Path, other: Simulation) -> None:
    kept, one = Store(tmp_path), made(Point("cost", 1))
    kept.put(GENERATED, one)
    assert kept.get(other, one.point) is None


@pytest.mark.parametrize(
    "other",
    [Point("random", 1), Point("cost", 2), Point("cost", 1, 2.0), Point("cost", 1, 1.0, 1.9)],
)
def test_a_run_of_another_point_is_not_found(tmp_path: Path, other: Point) -> None:
    kept = Store(tmp_path)
    kept.put(GENERATED, made(Point("cost", 1)))
    assert kept.get(GENERATED, other) is None


def test_a_run_of_another_file_or_another_code_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"]
    for path, text in zip(files, ("same", "same", "other"), strict=True):
        path.write_text(text)
    kept, one = Store(tmp_path / "runs"), made(Point("cost", 1))
    kept.put(replace(GENERATED, trace=str(files[0])), one)
    found = [kept.get(replace(GENERATED, trace=str(path)), one.point) for path in files]
    assert found == [one, one, None]
    monkeypatch.setattr(store, "code_digest", lambda rivals: f"changed {rivals}")
    assert kept.get(replace(GENERATED, trace=str(files[0])), one.point) is None


def test_code_that_a_run_passes_through_counts_and_what_only_shows_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llmproxy"
    names = ("core/queue.py", "config/load.py", "simulator/engine/engine.py", "lab/run/replay.py", "dispatcher.py")
    rival, shown = "lab/baselines/epp.py", "lab/results/plots.py"
    for name in (*names, rival, shown):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("before")
    monkeypatch.setattr(store, "PACKAGE", package)

    def digests_with(changed: str) -> tuple[str, str]:
        (package / changed).write_text("after")
        code_digest.cache_clear()
        told = code_digest(False), code_digest(True)
        (package / changed).write_text("before")
        return told

    try:
        before = digests_with(shown)
        for name in names:
            assert all(a != b for a, b in zip(digests_with(name), before, strict=True)), name
        ours, theirs = digests_with(rival)
        assert (ours == before[0], theirs == before[1]) == (True, False)
    finally:
        code_digest.cache_clear()


def test_a_run_that_was_half_written_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, one = Store(tmp_path), made(Point("cost", 1))

    def half(path: Path, data: bytes) -> int:
        path.open("wb").close()
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(Path, "write_bytes", half)
        with pytest.raises(KeyboardInterrupt):
            kept.put(GENERATED, one)
    assert len(list(tmp_path.iterdir())) == 1
    assert kept.get(GENERATED, one.point) is None
    kept.put(GENERATED, one)
    assert kept.get(GENERATED, one.point) == one


# --- tuning -----------------------------------------------------------------------------------------------------------


def place_of(scenario: Scenario, case: Case, load: float | None = None) -> Place:
    return Place(scenario, case, load, 1.0, 1.0, fleet_named(case.fleet), {})


def runs_with(
    figures: Mapping[str, Sequence[float | None]], asked: list[Sequence[int]]
) -> Callable[..., list[Finished]]:
    run, trail = invented_run("epp_sticky", 1.0, count=30)

    def runs(place: Place, policy: str, seeds: Sequence[int]) -> list[Finished]:
        del place
        asked.append(seeds)
        return [
            Finished(
                Point(policy, seed),
                run.model_copy(update={"goodput": figure, "ttft_s": Quantiles(p99=figure)}),
                trail,
            )
            for seed, figure in zip(seeds, figures[policy], strict=False)
        ]

    return runs


@pytest.mark.parametrize(("metric", "best"), [(GOODPUT, "b"), (TTFT_P99, "c")])
def test_the_variant_with_the_best_mean_is_taken(metric: Metric, best: str) -> None:
    asked: list[Sequence[int]] = []
    figures = {"a": (0.9, 0.1), "b": (0.6, 0.7), "c": (0.3, None), "d": (None, None)}
    scenario = replace(SCENARIOS[0], decides=metric)
    place = place_of(scenario, scenario.cases[0])
    tuned = pick(place, "a", tuple(figures), runs_with(figures, asked))
    assert (tuned.best, tuned.baseline, tuned.workload) == (best, "a", scenario.key)
    assert tuned.figures == {"a": 0.5, "b": pytest.approx(0.65), "c": 0.3, "d": None}
    assert asked == [TUNING_SEEDS] * 4


def test_what_was_never_run_stays_as_documented() -> None:
    place = place_of(SCENARIOS[0], SCENARIOS[0].cases[0])
    assert pick(place, "epp_blend", ("x", "y"), runs_with({"x": (), "y": ()}, [])).best == "epp_blend"


def test_only_baselines_that_run_somewhere_are_tuned_there() -> None:
    scenario = SCENARIOS[0]
    everywhere = contenders(place_of(scenario, scenario.cases[0]))
    assert set(everywhere) == {"epp_sticky", "epp_blend", "dynamo_cost"}
    # The documented parameters are among those tried.
    assert all(len(tried) >= 4 and sum("(" not in one for one in tried) <= 1 for tried in everywhere.values())
    few = replace(scenario.cases[0], policies=("cost", "epp_sticky"))
    assert set(contenders(place_of(scenario, few))) == {"epp_sticky"}


def test_what_tuning_found_runs_in_the_quick_cases_of_its_workload_alone() -> None:
    scenario = SCENARIOS[0]
    quick = replace(scenario.cases[0], policies=("cost", "epp_sticky"), quick=True)
    tuned = {
        "a": Tuned(scenario.key, "epp_sticky", {}, "epp_sticky(match=0.5)"),
        "b": Tuned(scenario.key, "epp_blend", {}, "epp_blend(gate=0)"),
        "c": Tuned("W9", "epp_sticky", {}, "epp_sticky(penalty_s=2)"),
    }
    assert policies_of(place_of(scenario, quick), tuned) == ["cost", "epp_sticky", "epp_sticky(match=0.5)"]
    assert policies_of(place_of(scenario, replace(quick, quick=False)), tuned) == ["cost", "epp_sticky"]
    tuned["a"] = replace(tuned["a"], best="epp_sticky")
    assert policies_of(place_of(scenario, quick), tuned) == ["cost", "epp_sticky"]


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


def test_the_workloads_are_w1_to_w9_and_no_two_places_are_called_the_same() -> None:
    workloads = ["W1", "W2", "W3", "W4", "W4b", "W5", "W5b", *(f"W{i}" for i in range(6, 10))]
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


def test_a_goal_is_met_at_its_value_and_a_figure_that_does_not_exist_meets_none() -> None:
    assert Goal("x", 0.95, 0.95).met
    assert not Goal("x", 0.949, 0.95).met
    assert Goal("x", 0.95, 0.95, at_least=False).met
    assert not Goal("x", 0.951, 0.95, at_least=False).met
    assert not Goal("x", None, 0.0).met
    assert not Goal("x", None, 1.0, at_least=False).met


def test_goals_are_told_with_what_was_measured_and_what_was_wanted() -> None:
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


def test_of_a_set_that_was_cut_short_only_what_was_run_is_told(tmp_path: Path) -> None:
    scenario = SCENARIOS[0]
    case = replace(scenario.cases[0], policies=("cost", "epp_blend", "oracle"))
    some, none = place_of(scenario, case, 0.7), place_of(scenario, replace(case, name="other"), 0.7)
    policies = dict.fromkeys((some.label, none.label), case.policies)

    def runs(place: Place, policy: str, seeds: Sequence[int]) -> list[Finished]:
        ran = place is some and policy == "cost"
        return [made(Point(policy, seed)) for seed in seeds] if ran else []

    told_file = StringIO()
    console = Console(width=200, file=told_file)
    print_place(console, some, {policy: runs(some, policy, (1,)) for policy in case.policies})
    print_place(console, none, {policy: [] for policy in case.policies})
    print_verdicts(console, [some, none], policies, runs, (1,))
    printed = told_file.getvalue()
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
        return [Finished(Point(policy, seed), *invented_run(policy, 1.0, seed=seed, count=30)) for seed in seeds]

    found = told(place, {place.label: ["cost"]}, runs, (1, 2))
    assert asked == [(place.label, "cost"), (other.label, "random")]
    assert [run.seed for run in found.beside["alone"]] == [1, 2]


def test_a_proxy_that_is_told_the_limits_knows_those_of_its_fleet() -> None:
    w5 = next(scenario for scenario in SCENARIOS if scenario.key == "W5")
    case = next(case for case in w5.cases if case.told)
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


def test_the_frontier_is_drawn_for_every_cost_of_a_prompt_and_without_runs() -> None:
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
