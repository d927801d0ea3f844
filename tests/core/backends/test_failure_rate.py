from __future__ import annotations

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
        (FAILURES_MIN, 32, [(0, 32)], True),
        (FAILURES_MIN, 32, [(0, 3)], False),
        (10, 30, [], False),
    ],
)
def test_a_share_of_failures_beside_the_others(
    failed: int, answers: int, others: list[tuple[int, int]], outlier: bool
) -> None:
    why = rate(failed, answers).outlier(rate(*other) for other in others)
    assert (why is not None) is outlier


def test_only_the_last_answers_count_and_forgiven_failures_do_not() -> None:
    one = rate(FAILURES_MIN, ANSWERS)
    assert not one.settled
    one.forgive()
    assert (one.failures, one.settled) == (FAILURES_MIN - 1, False)
    for _ in range(ANSWERS):
        one.add(False)
    assert (one.failures, one.settled) == (0, True)
