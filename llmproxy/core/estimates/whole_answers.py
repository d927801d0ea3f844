"""Divides the time of non-streamed answers into prompt and output tokens."""

from __future__ import annotations

from llmproxy.core.estimates.line import JITTER_S, KEEP, OUTLIER, SPREAD_MIN


class WholeAnswers:
    """Learns `prompt` and `steps`: the real times of prompts and of output tokens, divided by their assumed times.

    Only the end of a non-streamed answer is observed. The two factors are fitted by least squares of relative errors,
    with exponential forgetting. If all answers have about the same ratio of prompt to output, the factors cannot be
    told apart, and a small penalty (ridge regression) draws both to a common factor.
    """

    def __init__(self) -> None:
        self.prompt = self.steps = 1.0
        self._sums: tuple[float, ...] = (0.0,) * 5

    def learn(self, prompt_s: float, steps_s: float, took_s: float) -> None:
        """Learns from an answer that took `took_s`. The sum of the assumed times must be above 0."""
        expected_s = JITTER_S + self.prompt * prompt_s + self.steps * steps_s
        if any(self._sums):
            took_s = min(took_s, OUTLIER * expected_s)
        weight = expected_s**-2
        x, z, y = weight * prompt_s, weight * steps_s, took_s
        newest = (x * prompt_s, x * steps_s, z * steps_s, x * y, z * y)
        sums = self._sums = tuple([KEEP * old + new for old, new in zip(self._sums, newest, strict=True)])
        xx, xz, zz, xy, zy = sums
        both = xx + 2.0 * xz + zz
        penalty = SPREAD_MIN * both
        common = (xy + zy) / both
        xx, zz = xx + penalty, zz + penalty
        xy, zy = xy + penalty * common, zy + penalty * common
        spread = xx * zz - xz * xz
        self.prompt = max(0.0, (xy * zz - zy * xz) / spread)
        self.steps = max(0.0, (zy * xx - xy * xz) / spread)
