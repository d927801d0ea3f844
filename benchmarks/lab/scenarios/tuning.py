"""The three strongest baselines get a chance to be tuned, on seeds of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.lab.scenarios.scenario import Place
from llmproxy.lab.baselines import variants, variants_of
from llmproxy.lab.run.runs import Finished

TUNING_SEEDS = (101, 102)

Runs = Callable[[Place, str, Sequence[int]], list[Finished]]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was tried of one baseline for one workload, how it did, and what was taken."""

    workload: str
    baseline: str
    figures: Mapping[str, float | None]
    best: str


def contenders(place: Place) -> dict[str, tuple[str, ...]]:
    """Baseline -> its variants, of those that run at this place."""
    return {name: variants_of(name) for name in variants if name in place.case.policies}


def pick(place: Place, name: str, tried: Sequence[str], runs: Runs) -> Tuned:
    """The variant with the best mean of the figure that decides; the documented one where nothing was run."""
    metric = place.scenario.decides
    figures: dict[str, float | None] = {}
    for variant in tried:
        known = [figure for one in runs(place, variant, TUNING_SEEDS) if (figure := metric.of(one.run)) is not None]
        figures[variant] = fmean(known) if known else None
    known_figures = {variant: figure for variant, figure in figures.items() if figure is not None}
    sign = 1.0 if metric.higher else -1.0
    best = max(known_figures, key=lambda variant: sign * known_figures[variant], default=name)
    return Tuned(place.scenario.key, name, figures, best)
