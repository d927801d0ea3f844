"""The time from a grant to the first token, by the length of the prompt."""

from __future__ import annotations

import pytest

from llmproxy.core.estimates.first_token import FirstToken


def learned(*observed: tuple[int, float], times: int = 1) -> FirstToken:
    estimate = FirstToken()
    for _ in range(times):
        for prompt_tokens, took_s in observed:
            estimate.learn(prompt_tokens, took_s)
    return estimate


def test_nothing_is_expected_before_the_first_observation() -> None:
    assert FirstToken().expected_s(10_000) == 0.0


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
    assert learned(*observed, times=200).expected_s(10_000) == pytest.approx(expected_s, rel=0.02)


def test_newest_hundred_observations_decide() -> None:
    estimate = learned((100, 0.1), (200, 0.2), times=500)
    for _ in range(250):
        estimate.learn(100, 0.3)
        estimate.learn(200, 0.6)
    assert estimate.expected_s(1_000) == pytest.approx(3.0, rel=0.1)
