"""How long steps take that do nothing but decode the same sequences: each the same time longer than the one before."""

from __future__ import annotations

import math
from dataclasses import dataclass

# A stretch of steps that ends this much after a moment has ended at that moment: sums of floats are not exact.
_SAME_MOMENT_S = 1e-9


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """The first step takes `first_s`, each one after it `growth_s` more than the one before."""

    first_s: float
    growth_s: float

    def total_s(self, steps: int) -> float:
        """Seconds of the first `steps` steps together."""
        return steps * (self.first_s + self.growth_s * (steps - 1) / 2)

    def steps_within(self, seconds: float, most: int) -> int:
        """How many of the first `most` steps have ended after `seconds`."""
        limit_s = max(seconds, 0.0) + _SAME_MOMENT_S
        # The positive root of `total_s(n) == limit_s`, in the form that works without growth and loses no digits.
        half_s = self.first_s - self.growth_s / 2
        root = 2 * limit_s / (half_s + math.sqrt(half_s * half_s + 2 * self.growth_s * limit_s))
        steps = min(int(root) + 1, most)
        while self.total_s(steps) > limit_s:
            steps -= 1
        return steps
