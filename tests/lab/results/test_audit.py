"""The audit of a waiting room: priority inversions, counters of flows, unfinished tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmproxy.config import Config
from llmproxy.core.domain import Grant, GrantReason, Placed, Request, Usage, Verdict
from llmproxy.core.lease_events import Progress, Returned
from llmproxy.lab.results import audit as module
from llmproxy.lab.results.audit import Audit
from llmproxy.lab.run.replay import Run
from llmproxy.lab.run.virtual_time import run
from tests.core.make import DEFAULTS, view
from tests.lab.small import fleet, setup, traffic

NOBODY: frozenset[str] = frozenset()
X = view("x", max_model_len=None)


def asked(name: str, band: int = 0, flow: str = "a", **given: Any) -> Request:
    facts: dict[str, Any] = {"prompt_tokens": 100, "output_tokens": 50, "stream": True, **given}
    return Request(name, "base", "base", None, band, flow, 0.0, 60.0, 400, **facts)


def granted(request: Request, lease: int = 1, backend: str = "x", guaranteed: bool = False) -> Grant:
    why = GrantReason((), 1, (), 0, guaranteed)
    return Grant(lease, request, Placed(backend, 0.0, (), 1), 0.0, 0, why)


def waiting(*requests: Request) -> Audit:
    audit = Audit(DEFAULTS)
    for request in requests:
        audit.entered(request, NOBODY)
    return audit


def test_a_grant_below_one_that_could_have_had_it_is_an_inversion() -> None:
    low, high = asked("1"), asked("2", band=100)
    audit = waiting(low, high)
    audit.granted(granted(low), X)
    assert audit.inversions == 1
    audit.granted(granted(high, 2), X)
    assert audit.inversions == 1


@pytest.mark.parametrize(
    "high",
    [asked("2", band=100, limits=("tenant:a",)), asked("2", band=100, prompt_tokens=1_000), asked("2", band=0)],
    ids=["under a limit", "too long for the backend", "of the same band"],
)
def test_who_could_not_have_had_it_was_not_passed_over(high: Request) -> None:
    low = asked("1")
    audit = waiting(low, high)
    audit.granted(granted(low), view("x", max_model_len=1_000))
    assert audit.inversions == 0


def test_a_backend_that_failed_a_request_may_be_given_to_a_lower_band() -> None:
    audit = Audit(DEFAULTS)
    low, high = asked("1"), asked("2", band=100)
    audit.entered(low, NOBODY)
    audit.entered(high, frozenset({"x"}))
    audit.granted(granted(low, backend="x"), X)
    assert audit.inversions == 0
    audit.entered(low, NOBODY)
    audit.granted(granted(low, 2, backend="y"), view("y"))
    assert audit.inversions == 1


def test_a_grant_by_a_minimum_share_is_no_inversion() -> None:
    audit = waiting(asked("1"), asked("2", band=100))
    audit.granted(granted(asked("1"), guaranteed=True), X)
    assert audit.inversions == 0


def test_counters_are_charged_by_estimate_then_corrected() -> None:
    audit = waiting(*(asked(str(i), flow="ab"[i % 2]) for i in range(4)))
    audit.compare()
    assert audit.counter_difference == 0.0
    audit.granted(granted(asked("0", flow="a")), X)
    audit.compare()
    assert audit.counter_difference == 200.0
    # An answer that is shorter so far may still become as long as was estimated.
    audit.progressed(Progress(granted(asked("0", flow="a")).lease, 10))
    assert audit._counters[0, "a"] == 200.0
    audit.progressed(Progress(granted(asked("0", flow="a")).lease, 80))
    audit.compare()
    assert audit.counter_difference == 260.0
    audit.returned(Returned(granted(asked("0", flow="a")).lease, Verdict.SERVED, Usage(100, 90, 40)))
    # The maximum is kept: 60 + 2 x 90 is less than the charges in between.
    audit.compare()
    assert audit.counter_difference == 260.0
    assert audit._counters[0, "a"] == 240.0


def test_a_flow_alone_is_not_compared_and_bands_are_not_mixed() -> None:
    audit = waiting(asked("1", flow="a"), asked("2", flow="b", band=100))
    audit.granted(granted(asked("9", flow="a")), X)
    audit.compare()
    assert audit.counter_difference is None


def test_a_flow_that_comes_back_is_lifted_and_one_in_debt_stays_there() -> None:
    audit = waiting(asked("1", flow="a"), asked("2", flow="a"))
    audit.granted(granted(asked("1", flow="a")), X)
    audit.entered(asked("3", flow="b"), NOBODY)
    audit.compare()
    assert audit.counter_difference == 0.0
    audit.left(asked("2", flow="a"))
    audit.granted(granted(asked("3", flow="b"), 2), X)
    audit.entered(asked("4", flow="a"), NOBODY)
    # No flow is backlogged, so the counter is lifted to the counter of the last backlogged flow before its charge.
    assert audit._counters[0, "a"] == 200.0
    assert audit._counters[0, "b"] == 400.0


def test_weights_divide_charges() -> None:
    audit = waiting(asked("1", flow="a", weight=4.0), asked("2", flow="a", weight=4.0), asked("3", flow="b"))
    audit.granted(granted(asked("1", flow="a", weight=4.0)), X)
    audit.compare()
    assert audit.counter_difference == 50.0


def test_failed_attempt_costs_nothing_and_progress_is_counted() -> None:
    audit = waiting(asked("1"), asked("2"))
    first, second = granted(asked("1"), 1), granted(asked("2"), 2)
    audit.granted(first, X)
    audit.granted(second, X)
    assert audit.unfinished_tokens_most == 300
    audit.returned(Returned(first.lease, Verdict.FAILED))
    assert audit._counters[0, "a"] == 200.0
    audit.progressed(Progress(second.lease, 400))
    assert audit.unfinished_tokens_most == 500
    audit.returned(Returned(second.lease, Verdict.SERVED, Usage(100, 10)))
    audit.entered(asked("3"), NOBODY)
    audit.granted(granted(asked("3"), 3), X)
    assert audit.unfinished_tokens_most == 500


def test_counters_of_flows_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COUNTERS_MAX", 5)
    audit = waiting(asked("here", flow="here"))
    for number in range(20):
        request = asked(str(number), flow=f"f{number}")
        audit.entered(request, NOBODY)
        audit.left(request)
    assert len(audit._counters) <= 6
    assert (0, "here") in audit._counters


@pytest.mark.slow
@pytest.mark.parametrize("fairness", ["fair_share", "fcfs"])
def test_a_run_is_audited_with_nothing_left_and_no_inversion(fairness: str) -> None:
    bands = ("critical", "default", "sheddable")
    arrivals = [replace(one, band=bands[i % 3]) for i, one in enumerate(traffic(rate=120.0, count=400))]
    config = Config.model_validate({"scheduling": {"flow": "tenant", "fairness": fairness}})
    one = Run(setup(arrivals, "blend", fleet(2, max_num_seqs=8), config), lambda _: None)
    result = run(one.go()).result("blend", 1, 1.0, 1.0)
    (proxy,) = one.proxies
    audit = proxy.pools.audit
    assert not audit.waiting
    assert not audit._leases
    assert audit._unfinished_tokens == 0
    assert (result.inversions, result.fairness.unfinished_tokens_most) == (0, audit.unfinished_tokens_most)
    assert result.fairness.counter_difference == audit.counter_difference
    assert audit.counter_difference is not None
