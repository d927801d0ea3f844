"""Durations of consecutive pure decode steps. They grow linearly, because each step adds a token per sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Tolerance for comparing end times, because sums of floats are not exact.
_SAME_MOMENT_S = 1e-9


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """The first step takes `first_s`; each further step takes `growth_s` longer than its predecessor."""

    first_s: float
    growth_s: float

    def total_s(self, steps: int) -> float:
        """Returns the total seconds of the first `steps` steps."""
        return steps * (self.first_s + self.growth_s * (steps - 1) / 2)

    def steps_within(self, seconds: float, most: int) -> int:
        """Returns the number of steps that end within `seconds`, at most `most`."""
        limit_s = max(seconds, 0.0) + _SAME_MOMENT_S
        # The positive root of `total_s(n) == limit_s`, in the numerically stable form that allows a growth of 0.
        half_s = self.first_s - self.growth_s / 2
        root = 2 * limit_s / (half_s + math.sqrt(half_s * half_s + 2 * self.growth_s * limit_s))
        steps = min(int(root) + 1, most)
        while self.total_s(steps) > limit_s:
            steps -= 1
        return steps
