"""Paired comparisons over seeds: the ratio of two policies on the same arrivals, and its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from random import Random
from statistics import fmean

RESAMPLES = 4_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """The geometric mean of paired ratios, and its 95 % bootstrap interval; no interval for a single pair."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def above_one(self) -> bool | None:
        """Returns whether the ratio is above 1; None if the interval contains 1."""
        if self.low is None or self.high is None or self.low <= 1.0 <= self.high:
            return None
        return self.low > 1.0

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio | None:
    """Returns the ratio of `ours` to `theirs`, pair by pair; None without pairs, or if a figure is zero.

    The interval is a percentile bootstrap (Efron, 1979) over pairs, with a fixed seed: equal figures give equal
    intervals. Raises ValueError for unequal lengths.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} figures cannot be paired with {len(theirs)}")
    if not ours or min(*ours, *theirs) <= 0.0:
        return None
    logs = [log(a / b) for a, b in zip(ours, theirs, strict=True)]
    if len(logs) == 1:
        return Ratio(exp(logs[0]))
    rng = Random(0)
    means = sorted(fmean(rng.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    cut = round(0.025 * RESAMPLES)
    return Ratio(exp(fmean(logs)), exp(means[cut]), exp(means[-cut - 1]))
