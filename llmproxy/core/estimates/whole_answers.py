"""How the time of an answer in one piece divides into its prompt and its tokens, learned online."""

from __future__ import annotations

from llmproxy.core.estimates.line import JITTER_S, KEEP, OUTLIER, SPREAD_MIN


class WholeAnswers:
    """`prompt` and `steps`: how many times their assumed time prompts and tokens take.

    Only the end of such an answer is seen. The two factors are fitted by least squares of relative errors, with
    exponential forgetting. Answers that all have about the same ratio of prompt to tokens cannot tell the two apart:
    a small penalty (ridge regression) then draws both to their common factor.
    """

    def __init__(self) -> None:
        self.prompt = self.steps = 1.0
        self._sums: tuple[float, ...] = (0.0,) * 5

    def learn(self, prompt_s: float, steps_s: float, took_s: float) -> None:
        """An answer took `took_s`, where these parts were assumed. Their sum must be above 0."""
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
