"""Linear functions, learned while the proxy runs, that predict a time from an amount of work, such as prompt tokens."""

from __future__ import annotations

KEEP = 0.98  # Factor by which each observation discounts the earlier ones: about the last fifty count.
OUTLIER = 4.0  # An observation is clipped to this multiple of the expected value.
GUESS_WEIGHT = 0.1  # Weight of each point of the initial guess. An observation has weight 1.
SPREAD_MIN = 1e-3  # Least variance of x, as a share of the mean square of x. Nearly equal x do not determine a slope.

USUAL_TOKENS = 4_000.0  # The `scale` of a line whose x is prompt tokens.
JITTER_S = 0.02  # The part of a prediction error that does not grow with the time, such as the time of an engine step.
WAIT_S = 1.0  # Value of `JITTER_S` for times that include waits inside the engine, which vary by about a second.


class LearnedLine:
    """Learns y = base + slope * x: a least squares fit of relative errors with exponential forgetting.

    `base` and `slope` are never negative. Their initial guess counts as two points, at x = 0 and x = `scale`, which a
    few observations outweigh.
    """

    def __init__(self, base: float, slope: float, scale: float, jitter: float, steep: float = 0.0) -> None:
        self._jitter = jitter  # The part of an error that does not grow with y.
        self._steep = steep  # Lower bound of slope / base, in case that the observed times do not grow with x.
        self._n = self._x = self._xx = self._y = self._xy = 0.0
        self.base, self.slope = base, slope
        self.seen = -2  # The two points of the guess do not count.
        for x in (0.0, scale):
            self.learn(x, base + slope * x, GUESS_WEIGHT)

    def learn(self, x: float, y: float, weight: float = 1.0) -> None:
        self.seen += 1
        expected = self._jitter + (self.base + self.slope * x)
        # A single outlier has another cause than speed. Many of them still move the line.
        y = min(y, OUTLIER * expected)
        weight /= expected**2
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
            # The best line with the smallest allowed ratio of slope to base, or with base 0.
            shift = 0.0 if self.base < 0.0 else 1.0 / self._steep
            self.slope = (xy + shift * y_sum) / (xx + shift * (2.0 * x_sum + shift * n))
            self.base = shift * self.slope

    def at(self, x: float) -> float:
        return self.base + self.slope * x


class FirstToken(LearnedLine):
    """Predicts, for one pool, the seconds from the grant to the first token of an answer to x prompt tokens.

    The time includes the wait inside the engine and the effect of the prefix cache at the current load.
    (`PoolRates.prefill` is only the computing time of uncached tokens.) The initial guess is 0, so that no request is
    refused because of a guess.
    """

    def __init__(self) -> None:
        super().__init__(0.0, 0.0, USUAL_TOKENS, WAIT_S)
