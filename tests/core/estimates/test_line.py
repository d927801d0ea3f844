"""A line learned online, and the time from a grant to the first token by the length of the prompt."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.core.estimates.line import FirstToken, LearnedLine

# --- a line -----------------------------------------------------------------------------------------------------------


def test_before_any_observation_the_guessed_line_holds() -> None:
    line = LearnedLine(0.5, 0.01, 100.0, 0.01)
    assert [line.at(x) for x in (0.0, 50.0, 1_000.0)] == pytest.approx([0.5, 1.0, 10.5])


@pytest.mark.parametrize(("base", "slope"), [(2.0, 0.003), (0.0, 0.02), (0.1, 0.0)])
def test_a_line_is_found_whatever_was_guessed(base: float, slope: float) -> None:
    line = LearnedLine(0.5, 0.01, 100.0, 0.01)
    for i in range(600):
        x = float(i % 10) * 100.0
        line.learn(x, base + slope * x)
    assert (line.base, line.slope) == pytest.approx((base, slope), rel=0.01, abs=1e-3)
    assert line.at(5_000.0) == pytest.approx(base + 5_000.0 * slope, rel=0.02)


def test_a_few_observations_outweigh_a_bad_guess() -> None:
    line = LearnedLine(0.03, 1 / 15_000, 4_000.0, 0.02)
    for x in 3 * (200.0, 3_000.0, 800.0, 2_000.0, 400.0, 1_000.0, 3_000.0, 100.0, 1_500.0, 600.0):
        line.learn(x, 0.03 + x / 5_000)
    assert line.at(1_000.0) == pytest.approx(0.23, rel=0.1)


def test_old_observations_are_forgotten() -> None:
    line = LearnedLine(0.0, 0.01, 100.0, 0.01)
    for slope, times in ((0.04, 1_000), (0.08, 400), (0.02, 400)):
        for i in range(times):
            line.learn(float(i % 10), slope * (i % 10))
        assert line.slope == pytest.approx(slope, rel=0.1)


def test_errors_count_relative_to_the_expected_value() -> None:
    """Long prompts are off by more than short ones take, and must not say what those take."""
    line, rng = LearnedLine(0.1, 0.001, 1_000.0, 0.01), Random(1)
    bases = []
    for _ in range(2_000):
        x = rng.choice((200.0, 10_000.0, 12_000.0, 15_000.0, 18_000.0, 20_000.0, 22_000.0, 25_000.0))
        line.learn(x, (0.1 + 0.001 * x) * rng.choice((0.7, 1.3)))
        bases.append(line.base)
    assert all(0.02 < base < 0.2 for base in bases[300:])


def test_a_falling_line_has_no_slope() -> None:
    line = LearnedLine(0.0, 0.01, 100.0, 0.01)
    for i in range(1_000):
        line.learn(float(i % 10), 10.0 - i % 10)
    assert line.slope == 0.0
    assert line.at(1_000.0) == pytest.approx(5.5, rel=0.15)


def test_a_line_that_would_begin_below_nothing_begins_at_nothing() -> None:
    line = LearnedLine(0.0, 0.0, 1.0, 0.01)
    for i in range(1_000):
        line.learn(10.0 + 10.0 * (i % 2), float(i % 2))
    assert line.at(0.0) == 0.0
    assert 0.0 < line.at(10.0) < line.at(20.0) < 1.0


def test_observations_at_one_place_move_the_level_and_keep_the_slope() -> None:
    line = LearnedLine(1.0, 0.01, 100.0, 0.01)
    for _ in range(2_000):
        line.learn(500.0, 7.0)
    slope = line.slope
    assert slope == pytest.approx(0.012, rel=0.1)
    for _ in range(1_000):
        line.learn(500.0, 14.0)
    assert line.slope == slope
    assert line.at(500.0) == pytest.approx(14.0, rel=0.01)


def test_a_line_is_as_steep_as_told_where_times_do_not_grow() -> None:
    line = LearnedLine(0.02, 1 / 15_000, 4_000.0, 0.02, 1 / 300)
    for i in range(600):
        line.learn(100.0 + 40.0 * (i % 7), 0.05)
    assert line.base == pytest.approx(300 * line.slope)
    assert line.at(220.0) == pytest.approx(0.05, rel=0.03)
    for i in range(600):
        line.learn(100.0 + 40.0 * (i % 7), 0.001 * (100.0 + 40.0 * (i % 7)))
    assert (line.base, line.slope) == pytest.approx((0.0, 0.001), abs=1e-3), "it may be steeper"


@given(st.lists(st.tuples(st.floats(0.0, 1e5), st.floats(0.0, 1e3)), max_size=60))
def test_a_line_never_falls_nor_expects_less_than_nothing(seen: list[tuple[float, float]]) -> None:
    for steep in (0.0, 1 / 300):
        line = LearnedLine(0.03, 1 / 15_000, 4_000.0, 0.02, steep)
        for x, y in seen:
            line.learn(x, y)
            assert line.base >= 0.0
            assert line.slope >= steep * line.base * (1.0 - 1e-9)


def test_one_outlier_moves_the_line_little() -> None:
    usual, disturbed = LearnedLine(0.03, 1e-4, 4_000.0, 0.02), LearnedLine(0.03, 1e-4, 4_000.0, 0.02)
    for number in range(20):
        for line in (usual, disturbed):
            line.learn(100.0 * number, 0.03 + 0.01 * number)
    disturbed.learn(300.0, 30.0)
    assert disturbed.at(300.0) < 1.6 * usual.at(300.0)


def test_many_outliers_move_the_line() -> None:
    line = LearnedLine(0.03, 1e-4, 4_000.0, 0.02)
    for number in range(200):
        line.learn(100.0 * (number % 20), 3.0)
    assert line.at(1_000.0) == pytest.approx(3.0, rel=0.2)


# --- the first token ------------------------------------------------------------------------------------------------


def learned(*observed: tuple[int, float], times: int = 1) -> FirstToken:
    estimate = FirstToken()
    for _ in range(times):
        for prompt_tokens, took_s in observed:
            estimate.learn(prompt_tokens, took_s)
    return estimate


def test_nothing_is_expected_before_the_first_observation() -> None:
    assert FirstToken().at(10_000) == 0.0


@pytest.mark.parametrize(
    ("observed", "expected_s"),
    [
        (((100, 0.3), (1_100, 1.3), (2_100, 2.3)), 10.2),
        (((1_000, 0.8), (1_000, 1.2)), 1.0),  # Prompts of one length teach nothing about longer ones.
        (((100, 2.0), (1_900, 1.0)), 1.5),  # A falling line has no slope.
    ],
)
def test_longer_prompts_take_longer_as_far_as_observed(
    observed: tuple[tuple[int, float], ...], expected_s: float
) -> None:
    assert learned(*observed, times=200).at(10_000) == pytest.approx(expected_s, rel=0.02)


def test_newest_fifty_observations_decide() -> None:
    estimate = learned((100, 0.1), (200, 0.2), times=500)
    for _ in range(125):
        estimate.learn(100, 0.3)
        estimate.learn(200, 0.6)
    assert estimate.at(1_000) == pytest.approx(3.0, rel=0.02)


def test_one_slow_first_token_among_fast_ones_is_bounded() -> None:
    estimate = learned((1_000, 0.1), (2_000, 0.2), times=100)
    estimate.learn(1_000, 60.0)
    assert estimate.at(1_000) < 0.25


def test_first_tokens_of_an_overload_are_soon_expected() -> None:
    """Also after many of an idle pool, whose times say nothing any more."""
    estimate = learned((1_000, 0.1), (2_000, 0.15), times=200)
    for _ in range(50):
        estimate.learn(1_000, 5.0)
        estimate.learn(2_000, 5.0)
    assert estimate.at(1_500) > 2.5
