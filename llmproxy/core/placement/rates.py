"""How fast backends are, learned online from what the proxy sees of its own requests."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

KEEP = 0.98
"""Weight that an observation of the pool keeps with each newer one: the last fifty or so decide."""
PACE_KEEP = 0.9
"""The same for the change of one backend: ten or so, so that one that slows down is repriced within seconds."""
OUTLIER = 4.0
"""Times what was expected of a pool beyond which an observation counts no more."""
GUESS = 0.1
"""Weight of what is assumed before anything was observed."""
SURE = 4.0
"""Squared standard errors that a backend must be away from its pool to count as another kind."""
LATE_STEP = 0.01
LATE_MOST = 20.0
UNSEEN = 30.0
"""Prompts elsewhere that leave a third of the evidence about a backend; once less than one prompt of it is left, the
rest fades."""
STALE = 10
"""Prompts elsewhere after which a pace is reckoned again."""
LOAD_GUESS_S = 0.05
"""What loading an adapter is taken to take before any was loaded."""
LOAD_GAIN = 0.1
"""Weight of a newer load, once there are as many that it is less than their mean."""
TIERS = 8
"""Doublings of how many others a backend has loaded since it used an adapter last; the last is for those that it never
had, or after which it loaded more."""
JITTER_S = 0.02
"""Error of a time that does not grow with it: a scheduling turn, a step of the engine."""


class Line:
    """y = base + slope * x, fitted by least squares of relative errors with exponential forgetting.

    Neither part is ever negative. It starts from two guesses, at 0 and at `scale`, which the first few observations
    outweigh.
    """

    def __init__(self, base: float, slope: float, scale: float, jitter: float) -> None:
        self._jitter = jitter
        self._n = self._x = self._xx = self._y = self._xy = 0.0
        self.base, self.slope = base, slope
        self.seen = 0
        for x in (0.0, scale):
            self._learn(x, base + slope * x, GUESS)

    def learn(self, x: float, y: float) -> None:
        self.seen += 1
        # One that is far off says that something else went wrong; many of them move the line all the same.
        expected = self._jitter + self.at(x)
        self._learn(x, min(y, OUTLIER * expected), 1.0)

    def _learn(self, x: float, y: float, weight: float) -> None:
        weight /= (self._jitter + self.at(x)) ** 2
        self._n = KEEP * self._n + weight
        self._x = KEEP * self._x + weight * x
        self._xx = KEEP * self._xx + weight * x * x
        self._y = KEEP * self._y + weight * y
        self._xy = KEEP * self._xy + weight * x * y
        spread = self._n * self._xx - self._x * self._x
        # Observations at one x say nothing of others: then the slope stays, and the base follows.
        if spread > 1e-3 * self._n * self._xx:
            self.slope = max(0.0, (self._n * self._xy - self._x * self._y) / spread)
        self.base = (self._y - self.slope * self._x) / self._n
        if self.base < 0.0:
            self.base, self.slope = 0.0, self._xy / self._xx

    def at(self, x: float) -> float:
        """The value expected at `x`."""
        return self.base + self.slope * x


class _Ratio:
    """What a backend took over what its pool should have taken, with the variance of that ratio.

    Sums with exponential forgetting; what is remembered is priced by the line as it is now.
    """

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._count = self._x = self._took = self._weights = 0.0
        self._squares = self._squared = 0.0
        self._seen = 0

    def learn(self, line: Line, x: float, took: float) -> None:
        before = line.base * self._count + line.slope * self._x
        # Held against what was known before it, and that is the pool's pace at first: one observation proves nothing.
        error = took - line.at(x) * (self._took / before if before else 1.0)
        self._count = self._keep * self._count + 1.0
        self._x = self._keep * self._x + x
        self._took = self._keep * self._took + took
        self._weights = self._keep * self._keep * self._weights + 1.0
        # The first errors are those of knowing nothing, and are soon forgotten.
        self._squares = PACE_KEEP * self._squares + error * error
        self._squared = PACE_KEEP * self._squared + 1.0
        self._seen = line.seen

    def drawn_to(self, middle: float, line: Line) -> float:
        """The ratio, drawn to `middle` by its standard error (positive-part James-Stein) and by its age."""
        expected = line.base * self._count + line.slope * self._x
        over = self._took / expected - middle if expected > 0.0 else 0.0
        if not over:
            return middle
        variance = self._weights * self._squares / (self._squared * expected * expected)
        fresh = min(1.0, self._count * exp((self._seen - line.seen) / UNSEEN))
        return middle + over * fresh * max(0.0, 1.0 - SURE * variance / (over * over))


class Pace:
    """How many times as long as its pool one backend takes; 1 until its own observations say otherwise.

    The last fifty observations say what it is; the last ten, where they differ by more than chance, that it has
    changed. Both are drawn to what was believed without them, so that backends that are alike look alike, and chance
    does not send work to one of them. While the pool still learns, what its first backend takes is the pool's own pace
    and no backend's. Whoever seems slow gets no work and could not prove better, so what is old counts less with each
    that others do.
    """

    def __init__(self) -> None:
        self._long, self._short = _Ratio(KEEP), _Ratio(PACE_KEEP)
        self.stale_at = 0
        self.factor = 1.0

    def learn(self, line: Line, x: float, took: float) -> None:
        """It took `took` at `x`, where a backend of the pool should take what `line` says."""
        self._long.learn(line, x, took)
        self._short.learn(line, x, took)
        self.renew(line)

    def renew(self, line: Line) -> None:
        """Bring `factor` up to what the pool has learned since; worth it once `line` has seen `stale_at`."""
        self.stale_at = line.seen + STALE
        self.factor = max(0.05, self._short.drawn_to(self._long.drawn_to(1.0, line), line))


class QuantileTracker:
    """How many times its prediction a time exceeds in one case of ten: a quantile that follows what is observed.

    Stochastic approximation (Robbins and Monro, 1951) on the logarithm: up by nine steps for each that is above, down
    by one for each that is below.
    """

    def __init__(self) -> None:
        self.factor = 1.5

    def learn(self, predicted: float, observed: float) -> None:
        above = observed > predicted * self.factor
        self.factor = min(LATE_MOST, max(1.0, self.factor * (1.0 + 9.0 * LATE_STEP if above else 1.0 - LATE_STEP)))


class LoadTimes:
    """Seconds that loading an adapter takes, by how many others its backend has loaded since it used that one last.

    An engine copies what it has in host memory, and reads from disk what it has not. How much it keeps there, and what
    either takes, it does not tell. What was not seen of one tier is taken from the next that is known, the colder one
    first.
    """

    def __init__(self) -> None:
        self._seen = [0] * TIERS
        self._took_s = [LOAD_GUESS_S] * TIERS
        self._known_s = [LOAD_GUESS_S] * TIERS

    @property
    def seen(self) -> bool:
        """Whether any load was seen to its end."""
        return any(self._seen)

    @property
    def coldest_s(self) -> float:
        """What a load of an adapter is expected to take that the backend never had."""
        return self._known_s[-1]

    def at(self, tier: int) -> float:
        """What a load is expected to take."""
        return self._known_s[tier]

    def learn(self, tier: int, took_s: float) -> None:
        """A load took so long."""
        seen = self._seen[tier] = self._seen[tier] + 1
        before_s = self._took_s[tier]
        if seen > 1:
            took_s = min(took_s, OUTLIER * (JITTER_S + before_s))
        self._took_s[tier] = before_s + max(LOAD_GAIN, 1.0 / seen) * (took_s - before_s)
        taught = [other for other in range(TIERS) if self._seen[other]]
        for other in range(TIERS):
            self._known_s[other] = self._took_s[next((one for one in taught if one >= other), taught[-1])]


class Rates:
    """What a pool as a whole was seen to take; a backend takes that times its own pace.

    `prefill` is seconds over prompt tokens, with a base for each stretch of work that begins on an idle backend; `step`
    is seconds per output token over the sequences that run; `loads` the seconds more of a cold adapter.
    `late_ttft` and `late_tpot` are by how much what was predicted of whole answers is exceeded.
    """

    def __init__(self) -> None:
        self.prefill = Line(0.03, 1 / 15_000, 4_000.0, JITTER_S)
        self.step = Line(0.01, 1e-4, 64.0, 1e-3)
        self._usual = 1.0
        self.loads = LoadTimes()
        self.late_ttft = QuantileTracker()
        self.late_tpot = QuantileTracker()

    def prefilled(self, pace: Pace, tokens: float, took_s: float) -> None:
        """`tokens` more were computed in `took_s`."""
        # Whoever is slow may get other prompts than the fast: held against each other, they would tilt the line.
        self._usual += (1.0 - KEEP) * (pace.factor - self._usual)
        self.prefill.learn(tokens, took_s * self._usual / pace.factor)
        pace.learn(self.prefill, tokens, took_s)

    def loaded(self, pace: Pace, tiers: Sequence[int], tokens: float, took_s: float) -> None:
        """The same with adapters of these tiers to load, one after the other."""
        loads_s = max(0.0, took_s - self.prefill.at(tokens) * pace.factor)
        expected_s = [self.loads.at(tier) for tier in tiers]
        each = loads_s / sum(expected_s) if sum(expected_s) > 0.0 else 0.0
        for tier, one_s in zip(tiers, expected_s, strict=True):
            self.loads.learn(tier, one_s * each)

    def streamed(self, pace: Pace, running: float, per_token_s: float) -> None:
        """An answer took `per_token_s` for each token after the first, beside about `running` sequences."""
        self.step.learn(running, per_token_s)
        pace.learn(self.step, running, per_token_s)
