"""Ratios of paired figures, and their intervals."""

from __future__ import annotations

from math import exp, log, sqrt

import pytest

from benchmarks.lab.scenarios.statistics import Ratio, paired_ratio


def test_a_ratio_is_the_geometric_mean_of_pairs() -> None:
    ratio = paired_ratio([2.0, 8.0], [1.0, 1.0])
    assert ratio is not None
    assert ratio.mean == pytest.approx(4.0)
    # Of the four samples of two pairs, one is all 2 and one is all 8.
    assert [ratio.low, ratio.high] == pytest.approx([2.0, 8.0])
    assert ratio.above_one is True


def test_equal_pairs_have_an_interval_without_width() -> None:
    ratio = paired_ratio([0.4, 0.2, 0.1], [0.8, 0.4, 0.2])
    assert ratio is not None
    assert [ratio.mean, ratio.low, ratio.high] == pytest.approx([0.5] * 3)
    assert ratio.above_one is False
    assert str(ratio) == "0.500 [0.500, 0.500]"


def test_interval_contains_the_mean() -> None:
    logs = [0.3, -0.1, 0.2, -0.2, 0.1, 0.15, -0.05, 0.25]
    ratio = paired_ratio([exp(one) for one in logs], [1.0] * 8)
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.high is not None
    mean = sum(logs) / 8
    sigma = sqrt(sum((one - mean) ** 2 for one in logs) / 8)
    assert log(ratio.mean) == pytest.approx(mean)
    assert log(ratio.low) == pytest.approx(mean - 1.96 * sigma / sqrt(8), abs=0.02)
    assert log(ratio.high) == pytest.approx(mean + 1.96 * sigma / sqrt(8), abs=0.02)
    assert ratio.above_one is None


def test_swapped_pairs_give_the_inverse_ratio() -> None:
    ours, theirs = [0.9, 0.7, 0.8, 0.95], [0.6, 0.75, 0.5, 0.9]
    one, other = paired_ratio(ours, theirs), paired_ratio(theirs, ours)
    assert one is not None
    assert other is not None
    assert one.mean == pytest.approx(1.0 / other.mean)
    assert one == paired_ratio(ours, theirs)


def test_ratio_or_interval_may_not_exist() -> None:
    assert paired_ratio([1.0, 0.0], [1.0, 1.0]) is None
    assert paired_ratio([1.0, 1.0], [0.0, 1.0]) is None
    assert paired_ratio([], []) is None
    assert str(paired_ratio([3.0], [2.0])) == "1.500"
    assert Ratio(1.5).above_one is None
    with pytest.raises(ValueError, match="2 figures cannot be paired with 1"):
        paired_ratio([1.0, 2.0], [1.0])
