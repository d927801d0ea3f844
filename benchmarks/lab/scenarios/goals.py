"""Parts of goals: figures over seeds, ratios of paired runs, and the bound of a critical request's wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from benchmarks.lab.scenarios.scenario import Place
from llmproxy.lab.results.objectives import scaled_profile
from llmproxy.lab.results.result import GroupResult, RunResult

Figure = Callable[[RunResult], float | None]


def mean(runs: Sequence[RunResult], figure: Figure) -> float | None:
    """The mean over seeds with the figure; None without any."""
    known = [value for run in runs if (value := figure(run)) is not None]
    return fmean(known) if known else None


def worst(runs: Sequence[RunResult], figure: Figure) -> float | None:
    """The largest value over seeds."""
    return max((value for run in runs if (value := figure(run)) is not None), default=None)


def least(runs: Sequence[RunResult], figure: Figure) -> float | None:
    """The smallest value over seeds."""
    return min((value for run in runs if (value := figure(run)) is not None), default=None)


def versus(runs: Sequence[RunResult], others: Sequence[RunResult], figure: Figure) -> float | None:
    """The mean figure of `runs` over the mean figure of `others`, for the same seeds."""
    seeds = {run.seed for run in runs} & {run.seed for run in others}
    ours = mean([run for run in runs if run.seed in seeds], figure)
    theirs = mean([run for run in others if run.seed in seeds], figure)
    return None if ours is None or not theirs else ours / theirs


def in_band(name: str, figure: Callable[[GroupResult], float | None]) -> Figure:
    """A figure of the requests of a band."""
    return lambda run: figure(run.by_band[name]) if name in run.by_band else None


def of_tenant(name: str, figure: Callable[[GroupResult], float | None]) -> Figure:
    """A figure of the requests of a tenant."""
    return lambda run: figure(run.by_tenant[name]) if name in run.by_tenant else None


def full_step_s(place: Place, prompt_tokens: int, new_tokens: int, context_tokens: int) -> float:
    """Seconds of the longest step of a full engine of the fleet.

    All sequences decode, each over `context_tokens`, and the budget of the step is full of prompts. `new_tokens` of
    each prompt are not cached.
    """
    return max(
        scaled_profile(spec, place.prefill_scale).step_s(
            spec.max_num_seqs,
            spec.max_num_seqs * context_tokens,
            [(prompt_tokens - new_tokens, prompt_tokens)] * (spec.step_tokens // new_tokens),
        )
        for spec in place.fleet.replicas
    )
