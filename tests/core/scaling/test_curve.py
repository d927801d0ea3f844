"""A step line is learned from answers that were generated with a known line."""

from __future__ import annotations

from random import Random

import pytest

from llmproxy.core.scaling.curve import StepCurve

BASE_S, SEQUENCE_S, TOKEN_S = 0.0145, 0.00022, 0.00005


def taught(
    sequences: tuple[float, float], prompts: tuple[float, float], answers: int = 300, noise: float = 0.0
) -> StepCurve:
    rng, curve = Random(1), StepCurve()
    for i in range(answers):
        steps, n = rng.uniform(50.0, 1_500.0), rng.uniform(*sequences)
        tokens = rng.uniform(*prompts) * steps
        took_s = steps * (BASE_S + SEQUENCE_S * n) + TOKEN_S * tokens
        curve.learn(steps, took_s * rng.gauss(1.0, noise), n, tokens, i * 1.0)
    return curve


def test_nothing_is_known_before_the_first_answer() -> None:
    assert StepCurve().line is None


def test_all_three_parts_are_told_apart() -> None:
    line = taught((5.0, 60.0), (0.0, 60.0)).line
    assert line is not None
    assert line.base_s == pytest.approx(BASE_S, rel=0.02)
    assert line.sequence_s == pytest.approx(SEQUENCE_S, rel=0.05)
    assert line.token_s == pytest.approx(TOKEN_S, rel=0.05)
    assert line.at(60.0) == pytest.approx(BASE_S + 60.0 * SEQUENCE_S, rel=0.02)


def test_noise_averages_out() -> None:
    line = taught((5.0, 60.0), (0.0, 60.0), answers=2_000, noise=0.1).line
    assert line is not None
    assert line.at(60.0) == pytest.approx(BASE_S + 60.0 * SEQUENCE_S, rel=0.1)
    assert line.token_s == pytest.approx(TOKEN_S, rel=0.15)


def test_one_batch_size_teaches_the_time_at_that_size() -> None:
    line = taught((20.0, 20.0), (0.0, 0.0)).line
    assert line is not None
    assert line.at(20.0) == pytest.approx(BASE_S + 20.0 * SEQUENCE_S, rel=0.01)
    assert min(line.base_s, line.sequence_s, line.token_s) >= 0.0


def test_no_part_is_negative_whatever_was_seen() -> None:
    rng, curve = Random(2), StepCurve()
    for i in range(200):
        curve.learn(rng.uniform(1, 100), rng.uniform(0.001, 10.0), rng.uniform(1, 300), rng.uniform(0, 1e6), i * 10.0)
        line = curve.line
        assert line is not None
        assert min(line.base_s, line.sequence_s, line.token_s) >= 0.0


def test_a_step_is_never_free_even_where_answers_took_longer_with_each_prompt_alone() -> None:
    curve = StepCurve()
    for i in range(40):
        prompts = 3.0 + 0.1 * i
        curve.learn(60.0, 60.0 * 0.001 * prompts, 20.0, 60.0 * prompts, i * 0.01)
    line = curve.line
    assert line is not None
    assert line.base_s > 0.0001
    assert max(line.sequence_s, line.token_s) <= 0.25 * line.base_s


def test_an_engine_that_became_slower_is_believed_within_the_hour() -> None:
    curve = taught((5.0, 60.0), (0.0, 60.0))
    rng = Random(3)
    for i in range(300):
        steps, n, tokens = 500.0, rng.uniform(5.0, 60.0), rng.uniform(0.0, 30_000.0)
        curve.learn(steps, 2.0 * (steps * (BASE_S + SEQUENCE_S * n) + TOKEN_S * tokens), n, tokens, 300.0 + i * 12.0)
    line = curve.line
    assert line is not None
    assert line.at(30.0) == pytest.approx(2.0 * (BASE_S + 30.0 * SEQUENCE_S), rel=0.15)
