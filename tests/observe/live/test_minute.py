"""Requests that ended in the last minute are counted once, and forgotten when they are a minute old."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.core.domain import Outcome, Predicted, Verdict
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.live.minute import FLOWS_MAX, LEAST_S, OTHER, SPAN_S, Minute, bucket_of, kind_of, quantile
from llmproxy.scheduling.attempt import Attempt

TOKENS = {"prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 5}


def ended(
    flow: str = "f", wait_s: float = 0.1, *, backend: str | None = "b0", weight: float = 1.0, stream: bool = True,
    outcome: Outcome = Outcome.COMPLETED, status: int = 200, **result: Any,
) -> RequestExit:  # fmt: skip
    result = {"ttft_s": wait_s + 0.2, "met": True} | result
    tokens = {name: result.pop(name, usual) for name, usual in TOKENS.items()}
    attempt = Attempt(
        backend=backend, granted_s=wait_s, verdict=Verdict.SERVED, expected_cached_tokens=3,
        predicted_ttft=Predicted(0.1, 0.3), **tokens,
    )  # fmt: skip
    tried = [attempt] if backend is not None else []
    return RequestExit(
        request_id="r", method="POST", path="/", band="default", flow=flow, weight=weight, arrived_s=0.0, stream=stream,
        tried=tried, attempts=len(tried), queue_wait_s=wait_s, outcome=outcome, status=status, duration_s=1.0, **result,
    )  # fmt: skip


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_is_of_one_kind(outcome: Outcome) -> None:
    kind = kind_of(ended(outcome=outcome, status=500))
    assert kind in ("completed", "refused", "failed", "cancelled", "client_error")
    assert (kind == "completed") is (outcome is Outcome.COMPLETED)
    wrong = {Outcome.CONNECT_FAILED, Outcome.UPSTREAM_TIMEOUT, Outcome.UPSTREAM_STATUS, Outcome.BROKEN_STREAM}
    assert (kind == "failed") is (outcome in wrong | {Outcome.INTERNAL})


def test_refusal_of_a_client_error_is_no_failure() -> None:
    assert kind_of(ended(outcome=Outcome.UPSTREAM_STATUS, status=400)) == "client_error"


@given(st.lists(st.floats(0.0, 1e5), min_size=1, max_size=200), st.floats(0.0, 1.0))
def test_a_quantile_is_within_one_percent(values: list[float], share: float) -> None:
    found = quantile(Counter(bucket_of(value) for value in values), share)
    exact = sorted(values)[max(1, ceil(share * len(values) - 1e-9)) - 1]
    assert found is not None
    assert found == pytest.approx(exact, rel=0.0101) or (exact <= LEAST_S and found == 0.0)


def test_without_values_there_is_no_quantile() -> None:
    assert quantile(Counter(), 0.5) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.floats(0.0, 5.0)), max_size=300))
def test_the_minute_is_the_sum_of_its_seconds(ends: list[tuple[int, str, float]]) -> None:
    minute, second, kept = Minute(), 0, []
    for gap, flow, wait_s in ends:
        for _ in range(gap * 7):
            minute.roll(second)
            second += 1
        minute.record(ended(flow, wait_s))
        kept.append((second, flow, wait_s))
    minute.roll(second)
    last = [(flow, wait_s) for at, flow, wait_s in kept if at > second - SPAN_S]
    total = minute.total
    assert total.kind("completed") == len(last)
    assert {flow: sums.ends for (_, flow), sums in total.flows.items()} == Counter(flow for flow, _ in last)
    assert total.band("default").wait_s == Counter(bucket_of(wait_s) for _, wait_s in last)
    assert total.backend("b0").prompt == 10 * len(last)
    assert total.errors == len(last)
    assert total.error_ratio == pytest.approx(0.5 * len(last))
    tokens_s = [max(0.0, 0.8 - wait_s) / 4 for _, wait_s in last]
    assert total.backend("b0").ttft_s == (pytest.approx(0.2, abs=1e-6) if last else None)
    assert total.backend("b0").tpot_s == (pytest.approx(sum(tokens_s) / len(last), abs=1e-6) if last else None)
    assert minute.span_s == min(SPAN_S, second + 1)


def test_nothing_is_left_after_a_minute() -> None:
    minute = Minute()
    minute.record(ended(backend=None, outcome=Outcome.EXPIRED, status=429, met=False))
    minute.record(ended(stream=False))
    for second in range(SPAN_S):
        minute.roll(second)
        assert minute.total.kind("refused") == 1
    minute.roll(SPAN_S)
    total = minute.total
    assert (total.flows, total.backends, total.errors, total.error_ratio) == ({}, {}, 0, 0.0)
    assert not total.band("default").kinds
    assert not total.band("default").wait_s


def test_a_request_without_an_attempt_is_of_no_backend_and_one_without_a_stream_has_no_first_token() -> None:
    minute = Minute()
    minute.record(ended(backend=None))
    minute.record(ended(stream=False))
    minute.roll(0)
    assert minute.total.backend("b0").ends == 1
    assert minute.total.band("default").ttft_s.total() == 1
    assert minute.total.errors == 0


def test_an_attempt_that_failed_is_its_backends_although_another_one_served() -> None:
    minute, served = Minute(), ended()
    failed = (Attempt(backend="bad", verdict=verdict) for verdict in (Verdict.FAILED, Verdict.PREEMPTED))
    served.tried, served.attempts, served.preemptions, served.queue_wait_s = [*failed, *served.tried], 3, 1, None
    minute.record(served)
    minute.roll(0)
    bad, good = minute.total.backend("bad"), minute.total.backend("b0")
    assert (bad.ends, bad.failures, bad.prompt) == (2, 1, 0)
    assert (good.ends, good.failures, good.prompt) == (1, 0, 10)
    minute.roll(SPAN_S)
    assert minute.total.backends == {}


def test_flows_are_bounded_and_have_the_newest_weight() -> None:
    minute = Minute()
    for i in range(FLOWS_MAX + 50):
        minute.record(ended(f"f{i}"))
    minute.record(ended("f0", weight=3.0))
    minute.roll(0)
    flows = minute.total.flows
    assert len(flows) == FLOWS_MAX
    assert flows["default", OTHER].ends == 51
    assert flows["default", "f0"].weight == 3.0


def test_mean_wait_of_a_flow_includes_refused_requests() -> None:
    minute = Minute()
    minute.record(ended("starved", 60.0, backend=None, outcome=Outcome.EXPIRED, status=503))
    minute.record(ended("starved", 20.0))
    minute.roll(0)
    assert minute.total.flows["default", "starved"].wait_s == pytest.approx(40.0)
    minute.roll(SPAN_S)
    assert minute.total.flows == {}


def test_tokens_of_before_a_replica_went_away_are_none_of_it_now() -> None:
    minute = Minute()
    for second in range(20):
        if second < 10:
            minute.record(ended(prompt_tokens=100, output_tokens=50))
        if second == 15:
            minute.record(ended(prompt_tokens=20, output_tokens=30))
        minute.roll(second)
    assert minute.tokens_per_s("b0", None) == (1_020 / 20, 530 / 20)
    assert minute.tokens_per_s("b0", 10.0) == (2.0, 3.0)
    assert minute.tokens_per_s("b0", 16.0) == minute.tokens_per_s("b1", None) == (0.0, 0.0)
    assert Minute().tokens_per_s("b0", 5.0) == (0.0, 0.0)
