"""The learners that estimates and placements share."""

from __future__ import annotations

from random import Random

import pytest

from llmproxy.core.estimates.learning import QuantileTracker


def test_one_time_of_ten_exceeds_the_tracked_quantile() -> None:
    late, rng = QuantileTracker(), Random(5)
    factors, above = [], 0
    for number in range(6_000):
        predicted = rng.choice((0.1, 1.0, 7.0))
        observed = predicted * rng.uniform(0.0, 4.0)
        if number >= 2_000:
            factors.append(late.factor)
            above += observed > predicted * late.factor
        late.learn(predicted, observed)
    assert above / len(factors) == pytest.approx(0.1, abs=0.01)
    assert sum(factors) / len(factors) == pytest.approx(3.6, rel=0.1)


def test_tracked_quantile_has_bounds() -> None:
    late = QuantileTracker()
    for _ in range(1_000):
        late.learn(1.0, 0.5)
    assert late.factor == 1.0
    for _ in range(1_000):
        late.learn(1.0, 1e9)
    assert late.factor == QuantileTracker.MOST
