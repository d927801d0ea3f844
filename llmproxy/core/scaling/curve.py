"""The time of an engine step as a function of its sequences and prompt tokens:

    step_s = base_s + sequence_s * sequences + token_s * prompt tokens in the step

A least squares fit over finished answers with a half-life of a quarter of an hour. The functions for placement forget
within fifty observations, to follow a changing backend, but the number of replicas must not follow random differences
between so few answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from msgspec import Struct

HALF_LIFE_S = 900.0
FORGET_EVERY_S = 5.0  # Minimum interval between two decays, because each costs more than an observation.
STEPS_MAX = 200.0  # Largest weight of a single answer, in steps.
PRIOR = 20.0  # Weight of the guessed slopes, in steps. They divide the time into terms if all loads are equal.
GUESS_SEQUENCE = 0.005
GUESS_TOKEN = 0.003  # Guesses of both slopes, as shares of `base_s`.
SLOPE_MAX = 0.25  # Maximum of a slope as a share of `base_s`, because every step reads all weights.
ROUNDS = 3
RESTORED_STEPS = 100 * STEPS_MAX  # Largest weight, in engine steps, of sums that another process learned.


class StepLine(Struct, frozen=True):
    """Seconds of an empty step, plus seconds for each sequence and for each prompt token that the step computes."""

    base_s: float
    sequence_s: float
    token_s: float

    def at(self, sequences: float) -> float:
        """Returns the seconds of a step with `sequences` and without a prompt."""
        return self.base_s + self.sequence_s * sequences


class StepCurve:
    """Learns a `StepLine` from the times of answers and the sequences and prompt tokens computed meanwhile."""

    def __init__(self) -> None:
        self._sums = [0.0] * 9
        self._at_s = 0.0
        self._line: StepLine | None = None
        self.seen = 0

    @property
    def sums(self) -> tuple[float, ...]:
        """The sums of the fit, for `restore` in another process."""
        return tuple(self._sums)

    def restore(self, sums: Sequence[float], at_s: float) -> bool:
        """Takes over the `sums` of another process. Returns False, and changes nothing, if they are invalid."""
        if (
            len(sums) != len(self._sums)
            or not all(isfinite(one) and one >= 0.0 for one in sums)
            or sums[0] <= 0.0
            or sums[6] <= 0.0
        ):
            return False
        scale = min(1.0, RESTORED_STEPS / sums[0])
        self._sums = [scale * one for one in sums]
        self.seen, self._at_s, self._line = 1, at_s, None
        return True

    def learn(self, steps: float, took_s: float, sequences: float, prompt_tokens: float, now: float) -> None:
        """Learns the time of a step: an engine ran `steps` steps in `took_s` seconds.

        `sequences` is the mean number of running sequences, and `prompt_tokens` were computed in the same time.
        """
        sums, passed_s = self._sums, now - self._at_s
        if passed_s >= FORGET_EVERY_S:
            keep = 0.5 ** (passed_s / HALF_LIFE_S)
            sums[:] = [keep * old for old in sums]
            self._at_s = now
        weight = steps if steps < STEPS_MAX else STEPS_MAX
        y, p = took_s / steps, prompt_tokens / steps
        wn, wp = weight * sequences, weight * p
        sums[0] += weight
        sums[1] += wn
        sums[2] += wp
        sums[3] += wn * sequences
        sums[4] += wn * p
        sums[5] += wp * p
        sums[6] += weight * y
        sums[7] += wn * y
        sums[8] += wp * y
        self.seen += 1
        self._line = None

    @property
    def line(self) -> StepLine | None:
        if self._line is None and self.seen:
            self._line = self._fitted()
        return self._line

    def _fitted(self) -> StepLine:
        """Fits a line to the sums: the time of a step, by running sequences and computed prompt tokens.

        With few observations, the slopes stay near GUESS_SEQUENCE and GUESS_TOKEN.
        """
        w, n, p, nn, np, pp, y, ny, py = self._sums
        mean_n, mean_p, mean_y = n / w, p / w, y / w
        # Sums about the means eliminate the base.
        a, b, c = nn - n * mean_n, np - n * mean_p, pp - p * mean_p
        d, e = ny - n * mean_y, py - p * mean_y
        # Ridge regression towards the guesses.
        alone_s = mean_y / (1.0 + GUESS_SEQUENCE * mean_n + GUESS_TOKEN * mean_p)
        ridge_n, ridge_p = PRIOR * (0.1 * mean_n) ** 2 + 1e-12, PRIOR * (0.1 * mean_p) ** 2 + 1e-12
        guess_n, guess_p = GUESS_SEQUENCE * alone_s, GUESS_TOKEN * alone_s
        a, c = a + ridge_n, c + ridge_p
        d, e = d + ridge_n * guess_n, e + ridge_p * guess_p
        slope_n, slope_p = guess_n, guess_p
        # Both slopes and the base are at least 0: coordinate descent on three numbers.
        for _ in range(ROUNDS * 10):
            slope_n = max(0.0, (d - b * slope_p) / a)
            slope_p = max(0.0, (e - b * slope_n) / c)
        base_s = mean_y - slope_n * mean_n - slope_p * mean_p
        if max(slope_n, slope_p) > SLOPE_MAX * base_s:
            # If all answers had the same load, the terms are indistinguishable, so the slopes are bounded.
            slope_max = SLOPE_MAX * mean_y / (1.0 + SLOPE_MAX * (mean_n + mean_p))
            slope_n, slope_p = min(slope_n, slope_max), min(slope_p, slope_max)
            base_s = mean_y - slope_n * mean_n - slope_p * mean_p
        return StepLine(base_s, slope_n, slope_p)
