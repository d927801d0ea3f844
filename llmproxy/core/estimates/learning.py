"""Means, rates and quantiles that the core learns while it runs. Each weights newer observations more than older."""

from __future__ import annotations

from math import exp


def gain(least: float, seen: int) -> float:
    """Returns the weight of the newest of `seen` observations: 1 / `seen` (a plain mean) at first, later `least`."""
    return max(least, 1.0 / seen)


def follow(mean: float, observed: float, weight: float) -> float:
    """Returns the exponentially weighted mean after one more observation of this weight (0..1)."""
    return mean + weight * (observed - mean)


def follow_ratio(mean: float, observed: float, weight: float, least: float, most: float) -> float:
    """Returns a geometric mean after another observation of this weight, clipped to `least`..`most` times the mean."""
    ratio: float = min(most, max(least, observed / mean)) ** weight
    return mean * ratio


class QuantileTracker:
    """Learns `factor`, the 90th percentile of observed times divided by their predictions.

    Stochastic approximation of a quantile (Robbins and Monro, 1951) on the logarithm: nine steps up for each
    observation above the factor, one step down for each other observation.
    """

    STEP = 0.01
    MOST = 20.0

    def __init__(self) -> None:
        self.factor = 1.5

    def learn(self, predicted: float, observed: float) -> None:
        above = observed > predicted * self.factor
        self.factor = min(self.MOST, max(1.0, self.factor * (1.0 + 9.0 * self.STEP if above else 1.0 - self.STEP)))


class DecayingRate:
    """Amounts per second, with exponential decay: after `window_s` seconds an amount counts 1/e."""

    __slots__ = ("_window_s", "at_s", "per_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self.per_s = self.at_s = 0.0  # The rate, and the time of the last amount.

    def add(self, amount: float, now: float) -> None:
        self.per_s = self.per_s * exp((self.at_s - now) / self._window_s) + amount / self._window_s
        self.at_s = now

    def at(self, now: float) -> float:
        return self.per_s * exp((self.at_s - now) / self._window_s)
