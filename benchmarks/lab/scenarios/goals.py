"""Helpers for goals: figures over all seeds, ratios of paired runs, and a bound for the wait of critical requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.lab.scenarios.scenario import Place
from llmproxy.lab.results.objectives import scaled_profile
from llmproxy.lab.results.result import GroupResult, RunResult, mean_of

Figure = Callable[[RunResult], float | None]


def mean(runs: Sequence[RunResult], figure: Figure) -> float | None:
    """Returns the mean of a figure over the seeds that have it; None if no seed has it."""
    return mean_of(map(figure, runs))


def worst(runs: Sequence[RunResult], figure: Figure) -> float | None:
    """Returns the largest value of a figure over the seeds; None if no seed has it."""
    return max((value for run in runs if (value := figure(run)) is not None), default=None)


def least(runs: Sequence[RunResult], figure: Figure) -> float | None:
    """Returns the smallest value of a figure over the seeds; None if no seed has it."""
    return min((value for run in runs if (value := figure(run)) is not None), default=None)


def versus(runs: Sequence[RunResult], others: Sequence[RunResult], figure: Figure) -> float | None:
    """Returns the mean of a figure of `runs`, divided by its mean of `others`, for the same seeds.

    None if a mean is missing, or if the divisor is 0.
    """
    seeds = {run.seed for run in runs} & {run.seed for run in others}
    ours = mean([run for run in runs if run.seed in seeds], figure)
    theirs = mean([run for run in others if run.seed in seeds], figure)
    return None if ours is None or not theirs else ours / theirs


def in_band(name: str, figure: Callable[[GroupResult], float | None]) -> Figure:
    """Returns a figure of a run: `figure` of the requests in the band `name`."""
    return lambda run: figure(run.by_band[name]) if name in run.by_band else None


def of_tenant(name: str, figure: Callable[[GroupResult], float | None]) -> Figure:
    """Returns a figure of a run: `figure` of the requests of the tenant `name`."""
    return lambda run: figure(run.by_tenant[name]) if name in run.by_tenant else None


def full_step_s(place: Place, prompt_tokens: int, new_tokens: int, context_tokens: int) -> float:
    """Returns the seconds of the longest step of a full engine of the fleet.

    All sequences decode, each with a context of `context_tokens`, and the token budget of the step is full of prompts.
    `new_tokens` of each prompt are not cached.
    """
    return max(
        scaled_profile(spec, place.prefill_scale).step_s(
            spec.max_num_seqs,
            spec.max_num_seqs * context_tokens,
            [(prompt_tokens - new_tokens, prompt_tokens)] * (spec.step_tokens // new_tokens),
        )
        for spec in place.fleet.replicas
    )
