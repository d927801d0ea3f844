"""How fast a backend is, learned online from what the proxy sees of its own requests."""

from __future__ import annotations

KEEP = 0.97
"""Weight that an observation keeps with each newer one: the last thirty or so decide, so that a backend that slows down
is repriced within seconds under load."""
TRUSTED_FROM = 12.0
"""Weight of own observations from which on a backend is no longer judged by its pool."""


class Trend:
    """A straight line through (x, y), fitted by least squares with exponential forgetting; its slope is never negative.

    Starts as the line `at_zero` + `slope` x, which the first few observations outweigh.
    """

    def __init__(self, at_zero: float, slope: float, scale: float) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._default = slope
        for x in (0.0, scale):
            self._add(x, at_zero + slope * x, 0.5)

    def learn(self, x: float, y: float) -> None:
        self._n *= KEEP
        self._x *= KEEP
        self._y *= KEEP
        self._xx *= KEEP
        self._xy *= KEEP
        self._add(x, y, 1.0)

    def _add(self, x: float, y: float, weight: float) -> None:
        self._n += weight
        self._x += weight * x
        self._y += weight * y
        self._xx += weight * x * x
        self._xy += weight * x * y

    @property
    def slope(self) -> float:
        spread = self._xx - self._x * self._x / self._n
        # Observations at one x say nothing of others.
        if spread <= 1e-3 * self._xx:
            return self._default
        return max(0.0, (self._xy - self._x * self._y / self._n) / spread)

    def at(self, x: float) -> float:
        """The value expected at `x`, not below 0."""
        return max(0.0, self._y / self._n + self.slope * (x - self._x / self._n))


class Rates:
    """What one backend, or a pool as a whole, was seen to take.

    `first` is seconds to a first byte over the prompt tokens computed before it, those ahead of it included; `step` is
    seconds per output token over the sequences that run; `adapter_s` the seconds more of a cold adapter; `release_s`
    those between two releases.
    """

    def __init__(self) -> None:
        self.first = Trend(0.03, 1 / 15_000, 4_000.0)
        self.step = Trend(0.01, 1e-4, 64.0)
        self.adapter_s = 0.05
        self.release_s: float | None = None
        self._released_at_s: float | None = None
        self.seen = 0.0

    def started(self, tokens: float, took_s: float, cold_adapter: bool) -> None:
        """A first byte came `took_s` after dispatch."""
        if cold_adapter:
            over_s = max(0.0, took_s - self.first.at(tokens))
            self.adapter_s += 0.2 * (over_s - self.adapter_s)
            return
        self.seen = KEEP * self.seen + 1.0
        self.first.learn(tokens, took_s)

    def streamed(self, running: float, per_token_s: float) -> None:
        """An answer took `per_token_s` for each token after the first, beside about `running` sequences."""
        self.step.learn(running, per_token_s)

    def released(self, now: float, idle: bool) -> None:
        """A lease ended, and with it all work where `idle`: how long none comes then says nothing of a full backend."""
        if self._released_at_s is not None:
            since_s = now - self._released_at_s
            self.release_s = since_s if self.release_s is None else self.release_s + 0.1 * (since_s - self.release_s)
        self._released_at_s = None if idle else now

    def next_release_s(self, now: float) -> float | None:
        """The time to a release, more where one is overdue; None where none was ever timed."""
        if self.release_s is None or self._released_at_s is None:
            return self.release_s
        return self.release_s + max(0.0, now - self._released_at_s - 2.0 * self.release_s)
