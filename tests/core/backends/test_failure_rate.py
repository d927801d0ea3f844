from __future__ import annotations

from random import Random

import pytest

from llmproxy.core.backends.failure_rate import ANSWERS, FAILURES_MIN, FailureRate


def rate(failed: int, answers: int) -> FailureRate:
    made = FailureRate()
    for number in range(answers):
        made.add(number < failed)
    return made


@pytest.mark.parametrize(
    ("failed", "answers", "others", "outlier"),
    [
        (10, 30, [(0, 32)], True),
        (10, 30, [(10, 30)], False),
        (10, 30, [(3, 32), (4, 32)], False),
        (FAILURES_MIN - 1, FAILURES_MIN - 1, [(0, 32)], False),
        (FAILURES_MIN, 32, [(0, 32)] * 7, True),
        (FAILURES_MIN, 32, [(0, 32)], False),
        (FAILURES_MIN, 8, [(0, 3)], False),
        (7, 32, [(2, 32)] * 7, False),
        (10, 30, [], False),
    ],
)
def test_a_share_of_failures_beside_the_others(
    failed: int, answers: int, others: list[tuple[int, int]], outlier: bool
) -> None:
    why = rate(failed, answers).outlier(rate(*other) for other in others)
    assert (why is not None) is outlier


@pytest.mark.parametrize("share", [0.02, 0.05, 0.2])
def test_a_pool_that_fails_the_same_share_of_its_answers_everywhere_has_no_outlier(share: float) -> None:
    rng, rates = Random(1), [FailureRate() for _ in range(8)]
    for _ in range(8_000):
        one = rng.choice(rates)
        failed = rng.random() < share
        one.add(failed)
        if failed:
            assert one.outlier([other for other in rates if other is not one]) is None


def test_only_the_last_answers_count_and_forgiven_failures_do_not() -> None:
    one = rate(FAILURES_MIN, ANSWERS)
    assert not one.low
    one.forgive()
    assert (one.failures, one.low) == (FAILURES_MIN - 1, False)
    for _ in range(ANSWERS):
        one.add(False)
    assert (one.failures, one.low) == (0, True)
