"""Tuning of baselines: what is tried, and what is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from benchmarks.lab.scenarios.run import policies_of
from benchmarks.lab.scenarios.scenario import (
    GOODPUT,
    TTFT_P99,
    Metric,
    Place,
)
from benchmarks.lab.scenarios.test_scenarios import place_of
from benchmarks.lab.scenarios.tuning import TUNING_SEEDS, Tuned, contenders, pick
from benchmarks.lab.scenarios.workloads import SCENARIOS
from llmproxy.lab.results.result import Quantiles
from llmproxy.lab.run.runs import Finished
from tests.lab.invented import invented_run


def runs_with(
    figures: Mapping[str, Sequence[float | None]], asked: list[Sequence[int]]
) -> Callable[..., list[Finished]]:
    run, trail = invented_run("epp_sticky", 1.0, count=30)

    def runs(place: Place, policy: str, seeds: Sequence[int]) -> list[Finished]:
        del place
        asked.append(seeds)
        return [
            Finished(run.model_copy(update={"seed": seed, "goodput": figure, "ttft_s": Quantiles(p99=figure)}), trail)
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


def test_tuned_variants_run_in_quick_cases_of_their_workload() -> None:
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
