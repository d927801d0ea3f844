"""The largest difference of service between two backlogged tenants."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmproxy.config import Config
from llmproxy.lab.results.fairness import ADHERENCE_LEAST, TENANTS_MAX, Adherence, EvenWindows, ServiceDifference, jain
from llmproxy.lab.run.replay import replay
from tests.lab.small import fleet, setup, traffic


def both(*names: str) -> dict[str, None]:
    return dict.fromkeys(names)


def test_the_difference_counts_only_while_both_wait() -> None:
    service = ServiceDifference()
    service.ended("a", 1_000, 0)
    service.look({}, both("a", "b"))
    assert service.largest == 0.0
    service.look({"a": 30.0}, both("a", "b"))
    assert service.largest == 30.0
    service.look({"a": 30.0, "b": 50.0}, both("a", "b"))
    # It moved up by 30 and then down by 50: what two looks in between saw apart.
    assert service.largest == 50.0
    service.look({"a": 500.0}, both("a"))
    service.look({"a": 900.0}, both("a", "b"))
    assert service.largest == 50.0


def test_what_has_ended_counts_with_the_weights_of_prompt_and_output() -> None:
    service = ServiceDifference()
    service.look({}, both("a", "b"))
    service.ended("a", 100, 10)
    service.look({}, both("a", "b"))
    assert service.largest == 120.0


def test_one_tenant_differs_from_nobody() -> None:
    service = ServiceDifference()
    service.look({"a": 5.0}, both("a"))
    assert service.largest is None


@pytest.mark.slow
def test_the_pairs_that_are_followed_are_bounded() -> None:
    service = ServiceDifference()
    for number in range(1_000):
        service.look({f"t{number}": 1.0}, both(*(f"t{i}" for i in range(number + 1))))
    assert len(service._spans) == TENANTS_MAX * (TENANTS_MAX - 1) // 2


@pytest.mark.slow
def test_fair_share_keeps_tenants_closer_than_fcfs() -> None:
    arrivals = [
        replace(one, tenant="loud" if i % 10 else "quiet") for i, one in enumerate(traffic(rate=150.0, count=900))
    ]
    config = Config.model_validate({"scheduling": {"flow": "header:x-tenant"}})
    found = {}
    for fairness in ("fcfs", "fair_share"):
        recorder = replay(setup(arrivals, f"blend(fairness={fairness})", fleet(1, max_num_seqs=8), config))
        run = recorder.result("blend", 1, 1.0, 1.0)
        found[fairness] = run.service_difference_tokens or 0.0, run.fairness.counter_difference or 0.0
    for ours, other in zip(found["fair_share"], found["fcfs"], strict=True):
        assert 0.0 < ours < other / 2


# --- windows ----------------------------------------------------------------------------------------------------------


def test_jain_index_runs_from_one_over_n_to_one() -> None:
    assert jain([5.0] * 4) == 1.0
    assert jain([8.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([1.0, 3.0]) == 0.8
    assert jain([0.0, 0.0]) == 1.0


def test_only_those_backlogged_all_through_a_window_are_compared() -> None:
    windows = EvenWindows()
    indexes = []
    for second in range(200):
        served = {"a": float(second), "b": 3.0 * second if second < 62 else 200.0, "c": 0.0}
        if second > 60:
            del served["c"]
        elif second == 50:
            # It has nothing to wait for at one look, and begins anew.
            del served["c"]
        windows.look(served)
        indexes.append(windows.least)
    assert indexes[:60] == [None] * 60
    # a had 60 and b 180; c was not there all the time.
    assert indexes[60] == pytest.approx(0.8)
    # In the later window b has no service; its earlier service no longer counts.
    assert indexes[-1] == pytest.approx(0.5)
    assert indexes == sorted(indexes, key=lambda index: -(index or 2.0))


def test_adherence_is_the_least_of_any_tenant_over_any_five_minutes() -> None:
    adherence = Adherence(until_s=1_000.0)
    for second in range(1_000):
        adherence.ended("good", True, float(second))
        adherence.ended("fair", second % 4 != 0 or second >= 600, float(second))
    assert adherence.least == 0.75
    assert adherence.most == 600


def test_adherence_ignores_start_rare_tenants_and_tail() -> None:
    adherence = Adherence(until_s=700.0)
    for second in range(290):
        adherence.ended("a", True, float(second))
    assert adherence.least is None
    for second in range(290, 1_000):
        adherence.ended("a", second < 700, float(second))
        if second % 20 == 0:
            adherence.ended("rare", False, float(second))
    assert ADHERENCE_LEAST > 300 / 20
    assert adherence.least == 1.0
