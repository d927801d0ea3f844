"""What is learned of a backend's speed: a line with a short memory, and the time between two releases."""

from __future__ import annotations

import pytest

from llmproxy.core.placement.rates import Rates, Trend


def test_before_any_observation_the_default_line_holds() -> None:
    trend = Trend(0.5, 0.01, 100.0)
    assert trend.slope == pytest.approx(0.01)
    assert [trend.at(x) for x in (0.0, 50.0, 1_000.0)] == pytest.approx([0.5, 1.0, 10.5])


def test_a_line_is_found_whatever_the_default_was() -> None:
    trend = Trend(0.5, 0.01, 100.0)
    for i in range(300):
        x = float(i % 10) * 100.0
        trend.learn(x, 2.0 + 0.003 * x)
    assert trend.slope == pytest.approx(0.003, rel=0.01)
    assert trend.at(0.0) == pytest.approx(2.0, rel=0.01)
    assert trend.at(5_000.0) == pytest.approx(17.0, rel=0.01)


def test_what_was_long_ago_is_forgotten() -> None:
    trend = Trend(0.0, 0.01, 100.0)
    for slope, times in ((0.02, 1_000), (0.2, 100)):
        for i in range(times):
            trend.learn(float(i % 10), slope * (i % 10))
    assert trend.slope == pytest.approx(0.2, rel=0.1)


def test_a_falling_line_has_no_slope_and_no_value_is_negative() -> None:
    trend = Trend(0.0, 0.01, 100.0)
    for i in range(100):
        trend.learn(float(i % 10), 10.0 - i % 10)
    assert trend.slope == 0.0
    assert trend.at(1_000.0) == pytest.approx(5.5, rel=0.05)
    below = Trend(0.0, 0.0, 1.0)
    for i in range(500):
        below.learn(10.0 + 10.0 * (i % 2), float(i % 2))
    assert below.slope == pytest.approx(0.1, rel=0.01)
    assert below.at(0.0) == 0.0


def test_observations_at_one_place_move_the_level_and_keep_the_default_slope() -> None:
    trend = Trend(0.0, 0.01, 100.0)
    for _ in range(2_000):
        trend.learn(500.0, 40.0)
    assert trend.slope == 0.01
    assert trend.at(500.0) == pytest.approx(40.0)
    assert trend.at(600.0) == pytest.approx(41.0)


def test_observations_at_zero_alone_keep_the_default_slope() -> None:
    trend = Trend(0.0, 0.01, 0.0)
    trend.learn(0.0, 3.0)
    assert trend.slope == 0.01


def test_a_cold_adapter_teaches_its_own_time_and_nothing_of_prompts() -> None:
    rates = Rates()
    expected_s = rates.first.at(1_000.0)
    for _ in range(50):
        rates.started(1_000.0, expected_s + 2.0, cold_adapter=True)
    assert rates.adapter_s == pytest.approx(2.0, rel=0.01)
    assert rates.first.at(1_000.0) == expected_s
    assert rates.seen == 0.0
    for _ in range(50):
        rates.started(1_000.0, expected_s / 2.0, cold_adapter=True)
    assert 0.0 <= rates.adapter_s < 0.01


def test_first_bytes_and_streams_are_learned_apart() -> None:
    rates = Rates()
    step_s = rates.step.at(10.0)
    for i in range(100):
        rates.started(float(i % 10) * 100.0, 1.0, cold_adapter=False)
    assert rates.first.at(500.0) == pytest.approx(1.0, rel=0.05)
    assert rates.step.at(10.0) == step_s
    for i in range(100):
        rates.streamed(float(i % 10), 0.05)
    assert rates.step.at(5.0) == pytest.approx(0.05, rel=0.05)
    assert rates.seen == pytest.approx(32.0, rel=0.05)


def test_the_time_between_releases_is_a_mean_of_the_last_ones() -> None:
    rates = Rates()
    assert rates.next_release_s(0.0) is None
    rates.released(10.0, idle=False)
    assert rates.release_s is None
    for i in range(1, 60):
        rates.released(10.0 + 0.5 * i, idle=False)
    assert rates.release_s == pytest.approx(0.5)
    for i in range(60):
        rates.released(100.0 + 2.0 * i, idle=False)
    assert rates.release_s == pytest.approx(2.0, rel=0.1)


def test_an_idle_night_is_no_time_between_releases() -> None:
    rates = Rates()
    rates.released(0.0, idle=False)
    rates.released(1.0, idle=True)
    rates.released(40_000.0, idle=False)
    assert rates.release_s == 1.0
    rates.released(40_001.0, idle=False)
    assert rates.release_s == 1.0


def test_a_release_that_is_overdue_is_expected_ever_later() -> None:
    rates = Rates()
    rates.released(0.0, idle=False)
    rates.released(1.0, idle=False)
    assert rates.next_release_s(2.5) == 1.0
    assert rates.next_release_s(13.0) == pytest.approx(11.0)
    rates.released(14.0, idle=True)
    assert rates.next_release_s(99.0) == rates.release_s
