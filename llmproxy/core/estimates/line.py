"""Times over an amount of work, such as seconds over the tokens of a prompt, learned online."""

from __future__ import annotations

KEEP = 0.98
"""Weight that an observation keeps with each newer one: about the last fifty decide."""
OUTLIER = 4.0
"""An observation counts as at most so many times the expected value."""
GUESS_WEIGHT = 0.1
"""Weight of the initial guess beside one observation."""
SPREAD_MIN = 1e-3
"""Least variance of x, as a share of the mean of x squared. Where all x are nearly equal they say nothing of others."""

USUAL_TOKENS = 4_000.0
"""The guessed point of a line over prompt tokens."""
JITTER_S = 0.02
"""The part of an error that does not grow with the time: a turn of the scheduler, a step of the engine."""
WAIT_S = 1.0
"""The same where waits inside the engine count: they differ by about so much, whatever the prompt."""


class LearnedLine:
    """y = base + slope * x, a least squares fit of relative errors with exponential forgetting.

    `base` and `slope` are never negative. The line starts from two guessed points, at 0 and at `scale`, which the first
    few observations outweigh. `jitter` is the part of an error that does not grow with y. `slope` is at least `steep`
    times `base`: where that is given, times that do not grow with x do not say that none will.
    """

    def __init__(self, base: float, slope: float, scale: float, jitter: float, steep: float = 0.0) -> None:
        self._jitter, self._steep = jitter, steep
        self._n = self._x = self._xx = self._y = self._xy = 0.0
        self.base, self.slope = base, slope
        self.seen = 0
        for x in (0.0, scale):
            self._learn(x, base + slope * x, GUESS_WEIGHT)

    def learn(self, x: float, y: float) -> None:
        self.seen += 1
        # One outlier has another cause than speed. Many of them still move the line.
        self._learn(x, min(y, OUTLIER * (self._jitter + self.at(x))), 1.0)

    def _learn(self, x: float, y: float, weight: float) -> None:
        weight /= (self._jitter + self.at(x)) ** 2
        self._n = n = KEEP * self._n + weight
        self._x = x_sum = KEEP * self._x + weight * x
        self._xx = xx = KEEP * self._xx + weight * x * x
        self._y = y_sum = KEEP * self._y + weight * y
        self._xy = xy = KEEP * self._xy + weight * x * y
        spread = n * xx - x_sum * x_sum
        if spread > SPREAD_MIN * n * xx:
            self.slope = max(0.0, (n * xy - x_sum * y_sum) / spread)
        self.base = (y_sum - self.slope * x_sum) / n
        if self.base < 0.0 or self.slope < self._steep * self.base:
            # The best of the lines whose base is as many times the slope as is allowed.
            shift = 0.0 if self.base < 0.0 else 1.0 / self._steep
            self.slope = (xy + shift * y_sum) / (xx + shift * (2.0 * x_sum + shift * n))
            self.base = shift * self.slope

    def at(self, x: float) -> float:
        """The expected value at `x`."""
        return self.base + self.slope * x


class FirstToken(LearnedLine):
    """Seconds from the grant to the first byte over all tokens of the prompt, for a pool.

    It contains the wait inside the engine and the effect of the prefix cache at the present load. So it answers "how
    long from now" for a request of which only the length is known. `PoolRates.prefill` is another quantity: the time
    that an engine computes uncached tokens. The guess is nothing, so that no request is refused for it.
    """

    def __init__(self) -> None:
        super().__init__(0.0, 0.0, USUAL_TOKENS, WAIT_S)
