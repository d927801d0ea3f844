"""The learned speed of backends: the line of a pool, and the factor of each backend."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.core.estimates.line import LearnedLine
from llmproxy.core.placement.rates import (
    ATTENTION,
    ATTENTION_MAX,
    TIERS,
    Attention,
    PoolRates,
    SpeedFactor,
)

# --- attention --------------------------------------------------------------------------------------------------------


def prompts(rng: Random, times: int, longest: float) -> Iterator[tuple[float, float]]:
    """Prompt tokens to compute, and how many they attend to in all; half of the prompts begin with cached tokens."""
    for _ in range(times):
        tokens, cached = rng.uniform(100.0, longest), rng.choice((0.0, rng.uniform(0.0, longest)))
        yield tokens, tokens * (cached + 0.5 * tokens)


def taught(share: float, token_s: float, times: int, longest: float, noise: float = 0.3) -> PoolRates:
    """The rates of a pool with this share of attention and this time per token."""
    rates, speed, rng = PoolRates(), SpeedFactor(), Random(5)
    for tokens, attended in prompts(rng, times, longest):
        took_s = 0.03 + token_s * (tokens + share * attended)
        rates.prefilled(speed, tokens, attended, took_s * max(0.1, rng.gauss(1.0, noise)))
    return rates


@pytest.mark.parametrize("share", [0.0, 1e-5, 6e-5, 1.2e-4])
@pytest.mark.parametrize("token_s", [1 / 30_000, 1 / 3_000])
def test_attention_is_found_from_long_prompts_whatever_the_speed(share: float, token_s: float) -> None:
    rates = taught(share, token_s, 1_000, 60_000.0)
    assert rates.attention.share == pytest.approx(share, rel=0.15, abs=4e-6)
    assert rates.prefill.slope == pytest.approx(token_s, rel=0.15)


def test_short_prompts_leave_attention_as_assumed() -> None:
    assert taught(3e-4, 1 / 15_000, 200, 500.0).attention.share == pytest.approx(ATTENTION, rel=0.5)


def test_attention_is_learned_beside_a_slow_backend() -> None:
    rates, usual, slow, rng = PoolRates(), SpeedFactor(), SpeedFactor(), Random(3)
    for number, (tokens, attended) in enumerate(prompts(rng, 1_000, 40_000.0)):
        took_s = (0.03 + (tokens + 5e-5 * attended) / 15_000) * rng.gauss(1.0, 0.1)
        if number % 2:
            rates.prefilled(slow, tokens, attended, 3.0 * took_s)
        else:
            rates.prefilled(usual, tokens, attended, took_s)
    assert rates.attention.share == pytest.approx(5e-5, rel=0.2)
    assert slow.factor / usual.factor == pytest.approx(3.0, rel=0.15)


@given(st.lists(st.tuples(st.floats(0.0, 1e5), st.floats(0.0, 1e5), st.floats(0.0, 1e3)), max_size=60))
def test_attention_stays_within_its_bounds_whatever_is_seen(seen: list[tuple[float, float, float]]) -> None:
    rates, speed = PoolRates(), SpeedFactor()
    for tokens, cached, took_s in seen:
        rates.prefilled(speed, tokens, tokens * (cached + 0.5 * tokens), took_s)
        assert 0.0 <= rates.attention.share <= ATTENTION_MAX
        assert rates.prefill.at(1_000.0) >= 0.0


def test_attention_before_any_prompt_is_as_assumed() -> None:
    assert Attention().share == ATTENTION


# --- a pace -----------------------------------------------------------------------------------------------------------


def takes(rng: Random, slower: float = 1.0, noise: float = 0.3) -> Iterator[tuple[float, float]]:
    """Returns the expected times of prompts of many lengths, and their times on a backend slower by this factor."""
    while True:
        expected_s = rng.choice((0.1, 0.2, 0.5, 1.0))
        yield expected_s, slower * expected_s * max(0.1, rng.gauss(1.0, noise))


UNIT = LearnedLine(0.0, 1.0, 1.0, 1e-3)
"""The line of a pool in which x takes x seconds."""


def paces(times: int, slower: float = 1.0, noise: float = 0.3, before: int = 0) -> list[list[float]]:
    """Returns the factors of a hundred backends after each observation. The first `before` are as expected."""
    found = []
    for seed in range(100):
        pace, rng = SpeedFactor(), Random(seed)
        alike, other = takes(rng, 1.0, noise), takes(rng, slower, noise)
        for _ in range(before):
            pace.learn(UNIT, *next(alike))
        factors = []
        for _ in range(times):
            pace.learn(UNIT, *next(other))
            factors.append(pace.factor)
        found.append(factors)
    return found


def test_a_backend_keeps_the_pace_of_its_pool_until_it_was_seen() -> None:
    assert SpeedFactor().factor == 1.0


@pytest.mark.parametrize("took_s", [0.0, 0.01, 0.5, 2.0, 300.0])
def test_one_observation_alone_proves_nothing(took_s: float) -> None:
    pace = SpeedFactor()
    pace.learn(UNIT, 1.0, took_s)
    assert pace.factor == 1.0


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_equal_backends_get_equal_factors_despite_noise(noise: float) -> None:
    """Two standard errors are passed by chance once in twenty times, from the first observations on."""
    found = paces(100, noise=noise)
    for some in (slice(0, 10), slice(10, 100)):
        factors = [factor for one in found for factor in one[some]]
        assert sum(factor == 1.0 for factor in factors) > 0.91 * len(factors)
        assert sum(abs(factor - 1.0) for factor in factors) / len(factors) < 0.1 * noise


@pytest.mark.parametrize("slower", [0.5, 2.0, 2.9])
def test_a_backend_of_another_kind_is_known_after_ten_prompts(slower: float) -> None:
    factors = [one[-1] for one in paces(10, slower, noise=0.1)]
    assert sum(factors) / 100 == pytest.approx(slower, rel=0.06)
    assert all(abs(factor / slower - 1.0) < 0.45 for factor in factors)


@pytest.mark.parametrize("slower", [0.5, 2.0, 2.9])
def test_a_backend_that_changes_its_pace_is_known_after_some_more(slower: float) -> None:
    for times, near in ((15, 0.65), (30, 0.3)):
        factors = [one[-1] for one in paces(times, slower, noise=0.1, before=100)]
        assert all(abs(factor - slower) < near * abs(1.0 - slower) for factor in factors)


def test_the_more_is_seen_of_a_backend_the_better_its_pace_is_known() -> None:
    errors = [[abs(factor / 2.0 - 1.0) for factor in one] for one in paces(200, 2.0, noise=0.6)]
    early, late = (sum(sum(one[part]) for one in errors) for part in (slice(10, 60), slice(150, 200)))
    assert late < 0.5 * early


def test_a_backend_that_recovers_keeps_the_pace_of_its_pool_again() -> None:
    pace = SpeedFactor()
    for _ in range(20):
        pace.learn(UNIT, 1.0, 3.0)
    assert pace.factor == pytest.approx(3.0, rel=0.01)
    for _ in range(60):
        pace.learn(UNIT, 1.0, 1.0)
    assert pace.factor == pytest.approx(1.0, abs=0.02)


def test_long_prompts_say_more_of_a_pace_than_short_ones() -> None:
    pace = SpeedFactor()
    for _ in range(100):
        pace.learn(UNIT, 2.0, 4.0)
        pace.learn(UNIT, 0.01, 0.01)
    assert pace.factor == pytest.approx(2.0, rel=0.02)


def test_no_backend_is_believed_to_take_no_time() -> None:
    pace = SpeedFactor()
    for _ in range(50):
        pace.learn(UNIT, 1.0, 0.0)
    assert pace.factor == pytest.approx(0.05)


# --- a pool -----------------------------------------------------------------------------------------------------------


def test_prompt_teaches_the_pools_line_and_its_backends_factor() -> None:
    rates, usual, slow = PoolRates(), SpeedFactor(), SpeedFactor()
    for i in range(300):
        tokens = 200.0 * (1 + i % 20)
        for pace, slower in ((usual, 1.0), (usual, 1.0), (usual, 1.0), (slow, 2.9)):
            rates.prefilled(pace, tokens, 0.0, slower * (0.02 + tokens / 8_000))
    assert slow.factor / usual.factor == pytest.approx(2.9, rel=0.05)
    for pace, slower in ((usual, 1.0), (slow, 2.9)):
        assert rates.prefill.at(2_000.0) * pace.factor == pytest.approx(slower * 0.27, rel=0.05)


def test_slow_backend_with_the_long_prompts_does_not_tilt_the_line() -> None:
    rates, usual, slow, rng = PoolRates(), SpeedFactor(), SpeedFactor(), Random(2)
    for _ in range(400):
        for pace, slower, most in ((usual, 1.0, 1_200), (usual, 1.0, 1_200), (slow, 3.0, 6_000)):
            tokens = float(rng.randrange(100, most))
            rates.prefilled(pace, tokens, 0.0, slower * (0.02 + tokens / 8_000))
    assert rates.prefill.at(5_000.0) * usual.factor == pytest.approx(0.02 + 5_000 / 8_000, rel=0.1)


def test_a_cold_adapter_teaches_its_own_time_and_nothing_of_prompts() -> None:
    rates, pace = PoolRates(), SpeedFactor()
    expected_s = rates.prefill.at(1_000.0)
    for _ in range(50):
        rates.loaded(pace, [TIERS - 1], 1_000.0, expected_s + 2.0)
    assert rates.loads.coldest_s == pytest.approx(2.0, rel=0.01)
    assert (rates.prefill.at(1_000.0), pace.factor) == (expected_s, 1.0)
    for _ in range(60):
        rates.loaded(pace, [TIERS - 1], 1_000.0, expected_s / 2.0)
    assert 0.0 <= rates.loads.coldest_s < 0.01


def test_a_slow_backend_does_not_make_adapters_slow() -> None:
    rates, pace = PoolRates(), SpeedFactor()
    for _ in range(60):
        rates.prefilled(pace, 1_000.0, 0.0, 3.0 * rates.prefill.at(1_000.0))
        rates.prefilled(SpeedFactor(), 1_000.0, 0.0, rates.prefill.at(1_000.0))
    for _ in range(50):
        rates.loaded(pace, [TIERS - 1], 1_000.0, rates.prefill.at(1_000.0) * pace.factor + 0.4)
    assert rates.loads.coldest_s == pytest.approx(0.4, rel=0.05)


def test_prompts_and_streams_are_learned_apart() -> None:
    rates, prefill, step = PoolRates(), SpeedFactor(), SpeedFactor()
    step_s, prefill_s = rates.step.at(10.0), rates.prefill.at(500.0)
    for i in range(30):
        rates.prefilled(prefill, float(i % 10) * 100.0, 0.0, 1.0)
    assert rates.step.at(10.0) == step_s
    rates = PoolRates()
    for i in range(300):
        running = float(i * 7 % 40)
        rates.streamed(step, running, 0.02 + 0.0005 * running, 0.01 + 0.0004 * running)
    assert (rates.step.base, rates.step.slope) == pytest.approx((0.02, 0.0005), rel=0.05)
    assert (rates.decode.base, rates.decode.slope) == pytest.approx((0.01, 0.0004), rel=0.05)
    assert rates.prefill.at(500.0) == prefill_s


def test_decoding_of_a_slow_backend_counts_as_its_pools() -> None:
    rates, slow = PoolRates(), SpeedFactor()
    slow.factor = 2.0
    before = rates.decode.at(8.0)
    rates.streamed(slow, 8.0, 2.0 * rates.step.at(8.0), 2.0 * before)
    assert rates.decode.at(8.0) == pytest.approx(before)


def test_first_backend_of_a_learning_pool_has_factor_one() -> None:
    rates, first = PoolRates(), SpeedFactor()
    for number in range(30):
        rates.prefilled(first, 50.0 + number, 0.0, 0.002 + number * 1e-5)
    assert first.factor == pytest.approx(1.0, abs=0.15), "the first backend defines the speed of the pool"


def test_backend_that_seemed_slow_is_tried_again_after_much_work() -> None:
    rates, usual, slow = PoolRates(), SpeedFactor(), SpeedFactor()
    for number in range(40):
        rates.prefilled(usual, 500.0 + number, 0.0, 0.1)
        rates.prefilled(slow, 500.0 + number, 0.0, 1.0 if number > 20 else 0.1)
    assert slow.factor > 1.5
    seemed = slow.factor
    for number in range(200):
        rates.prefilled(usual, 500.0 + number % 40, 0.0, 0.1)
        slow.renew(rates.prefill)
        if number == 30:
            assert slow.factor > 0.8 * seemed, "the evidence is not forgotten yet"
    assert slow.factor == pytest.approx(1.0, abs=0.4)


def test_work_is_shared_by_backends_so_that_all_end_together() -> None:
    rates = PoolRates(attention=0.0)
    rates.prefill.slope, rates.decode.base, rates.decode.slope = 1e-4, 0.01, 1e-4
    assert rates.work_s(0, 0, 0, [(1.0, 1.0, 8)]) == 0.0
    assert rates.work_s(4, 10_000, 0, [(1.0, 1.0, 8)]) == pytest.approx(1.0)
    assert rates.work_s(4, 0, 800, [(1.0, 1.0, 8)]) == pytest.approx(100 * 0.0108)
    assert rates.work_s(4, 10_000, 800, [(1.0, 1.0, 8)]) == pytest.approx(1.0 + 1.08)
    assert rates.work_s(4, 10_000, 0, [(1.0, 1.0, 8)] * 4) == pytest.approx(0.25)
    assert rates.work_s(4, 10_000, 0, [(1.0, 1.0, 8), (3.0, 1.0, 8)]) == pytest.approx(0.75), "one is slower"


def test_work_counts_attention() -> None:
    rates = PoolRates(attention=1e-4)
    rates.prefill.slope = 1e-4
    assert rates.work_s(1, 10_000, 0, [(1.0, 1.0, 8)]) == pytest.approx(1.5)
    assert rates.work_s(10, 10_000, 0, [(1.0, 1.0, 8)]) == pytest.approx(1.05), "ten short prompts"
