"""The largest difference of service between two backlogged tenants."""

from __future__ import annotations

from dataclasses import replace

from llmproxy.config import Config
from llmproxy.lab.replay import replay
from llmproxy.lab.service import TENANTS_MAX, ServiceDifference
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


def test_the_pairs_that_are_followed_are_bounded() -> None:
    service = ServiceDifference()
    for number in range(1_000):
        service.look({f"t{number}": 1.0}, both(*(f"t{i}" for i in range(number + 1))))
    assert len(service._spans) == TENANTS_MAX * (TENANTS_MAX - 1) // 2


def test_fair_share_keeps_backlogged_tenants_closer_than_first_come_first_served() -> None:
    arrivals = [
        replace(one, tenant="loud" if i % 10 else "quiet") for i, one in enumerate(traffic(rate=150.0, count=900))
    ]
    config = Config.model_validate({"scheduling": {"flow": "header:x-tenant"}})
    found = {}
    for fairness in ("fcfs", "fair_share"):
        account = replay(setup(arrivals, f"blend(fairness={fairness})", fleet(1, max_num_seqs=8), config))
        found[fairness] = account.result("blend", 1, 1.0, 1.0).service_difference_tokens
    assert found["fcfs"] is not None
    assert found["fair_share"] is not None
    assert found["fair_share"] < found["fcfs"] / 2
