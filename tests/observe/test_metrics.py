"""The metrics page: what one request adds to it, and its gauges. `tests/docs` tests the tables of the manual."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmproxy import __version__
from llmproxy.core.domain import Outcome, Predicted, Trouble, Verdict
from llmproxy.observe import logs
from llmproxy.observe.exit import UNKNOWN_MODEL
from llmproxy.observe.metrics import LABELS_MAX, BackendState, LiveState, Metrics, QueueState
from llmproxy.scheduling.attempt import Attempt
from tests.exits import changed, exit_of

SERVED = exit_of(
    request_id="r1", method="POST", path="/v1/chat/completions", outcome=Outcome.COMPLETED, status=200, duration_s=3.0,
    model="m", band="default", stream=True, attempts=2, queue_wait_s=0.25, ttft_s=1.0, max_gap_s=0.75, prompt_tokens=10,
    cached_tokens=4, output_tokens=11, chunks=5,
)  # fmt: skip
REFUSED = exit_of(
    request_id="r2", method="POST", path="/v1/completions", outcome=Outcome.UNKNOWN_MODEL, status=404, duration_s=0.001
)
PREDICTED = changed(
    SERVED, backend="gpu-0", arrived_s=100.0, granted_s=100.5, predicted_ttft=Predicted(0.4, 0.6),
    predicted_tpot=Predicted(0.25, 0.26),
)  # fmt: skip
"""0.5 s from the grant to the first byte, and 0.2 s for each token after it."""
STATE = LiveState(
    queues=(QueueState("critical", 1, 10), QueueState("default", 2, 20, 3.5)),
    blocked={"tenant:acme": 4},
    backends=(
        BackendState("gpu-0", 3, 32, 0.1, True, running=2, waiting=1, kv_used=0.4, reading_age_s=0.2, pool="m"),
        BackendState("gpu-1", 0, 32, 0.0, False, ejected=True),
    ),
    work_s={"m": 7.5},
    inversions=2,
)


def value(metrics: Metrics, name: str, /, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"llmproxy_{name}", labels)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(lambda: STATE)


def test_expected_and_cached_tokens_are_counted_beside_each_other(metrics: Metrics) -> None:
    for expected, cached in ((100, 60), (30, 80), (None, 50), (50, None)):
        metrics.record(changed(SERVED, backend="gpu-0", expected_cached_tokens=expected, cached_tokens=cached))
    counted = [
        value(metrics, "prefix_tokens_total", backend="gpu-0", kind=kind) for kind in ("expected", "cached", "both")
    ]
    assert counted == [130, 140, 90]


def test_a_served_stream_is_counted_everywhere_once(metrics: Metrics) -> None:
    metrics.record(SERVED)
    band, model = {"band": "default"}, {"model": "m"}
    assert value(metrics, "requests_total", outcome="completed", code="2xx", **band, **model) == 1
    assert value(metrics, "retries_total") == 1
    assert value(metrics, "queue_wait_seconds_sum", **band) == 0.25
    assert value(metrics, "time_to_first_token_seconds_sum", **band, **model) == 1.0
    assert value(metrics, "time_per_output_token_seconds_sum", **band, **model) == pytest.approx(0.2)
    assert value(metrics, "inter_chunk_seconds_sum", gap="mean", **band) == 0.5
    assert value(metrics, "inter_chunk_seconds_sum", gap="max", **band) == 0.75
    assert value(metrics, "request_seconds_sum", **band, **model) == 3.0
    for direction, tokens in (("input", 10), ("cached", 4), ("output", 11)):
        assert value(metrics, "tokens_total", direction=direction, **model) == tokens


def test_negative_token_counts_turn_no_counter_back(metrics: Metrics) -> None:
    negative: dict[str, Any] = {"prompt_tokens": -1, "cached_tokens": -1, "output_tokens": -1}
    for change in ({}, negative):
        metrics.record(changed(SERVED, backend="gpu-0", tenant="acme", expected_cached_tokens=5, **change))
    for direction, tokens in (("input", 10), ("cached", 4), ("output", 11)):
        assert value(metrics, "tokens_total", direction=direction, model="m") == tokens
        assert value(metrics, "tenant_tokens_total", tenant="acme", direction=direction) == tokens
    assert value(metrics, "prefix_tokens_total", backend="gpu-0", kind="cached") == 4


@pytest.mark.parametrize(("attempts", "preemptions", "retries"), [(3, 1, 1), (2, 2, 0), (1, 1, 0)])
def test_attempt_after_a_preemption_is_no_retry(
    metrics: Metrics, attempts: int, preemptions: int, retries: int
) -> None:
    metrics.record(changed(SERVED, attempts=attempts, preemptions=preemptions))
    assert value(metrics, "retries_total") == retries
    assert value(metrics, "preemptions_total", band="default") == preemptions


def test_a_continued_stream_is_counted_once_and_as_a_retry(metrics: Metrics) -> None:
    metrics.record(changed(SERVED, attempts=2, committed=True, continued="text"))
    # Its rest failed before its first byte.
    metrics.record(changed(SERVED, attempts=2, committed=False, continued="ids", not_continued="busy."))
    metrics.record(changed(SERVED, attempts=1, committed=True, not_continued="its attempts are used up"))
    assert value(metrics, "continued_streams_total", how="text") == 1
    assert value(metrics, "continued_streams_total", how="ids") is None
    assert value(metrics, "retries_total") == 2


def test_the_rest_of_a_stream_has_its_own_times() -> None:
    parts = [
        Attempt(granted_s=100.1, first_byte_s=100.5, chunks=4, committed=True),
        Attempt(granted_s=102.0, first_byte_s=102.25, chunks=5, committed=True),
    ]
    whole = changed(SERVED, arrived_s=100.0, ttft_s=0.5, duration_s=4.5, continued="text")
    whole.tried = parts
    assert whole.first_byte_s == 100.5
    assert whole.backend_ttft_s == 0.25
    assert whole.mean_gap_s == 4.0 / 8


def test_a_refused_request_leaves_only_its_outcome(metrics: Metrics) -> None:
    metrics.record(REFUSED)
    refused = {"outcome": "unknown_model", "code": "4xx", "band": "none", "model": UNKNOWN_MODEL}
    assert value(metrics, "requests_total", **refused) == 1
    assert value(metrics, "retries_total") == 0
    for line in metrics.page().decode().splitlines():
        assert not re.match(r"llmproxy_(queue_wait|ttft|time_per|inter_chunk|request_sec|tokens)\w+[{ ]", line)


@pytest.mark.parametrize(
    ("change", "ttft", "per_token", "gaps", "seconds"),
    [
        ({"stream": False}, None, None, None, 1),
        ({"outcome": Outcome.BROKEN_STREAM}, 1, None, 1, None),
        ({"outcome": Outcome.CANCELLED, "ttft_s": None}, None, None, None, None),
        ({"output_tokens": 1}, 1, None, 1, 1),
        ({"output_tokens": None}, 1, None, 1, 1),
        ({"chunks": 1, "max_gap_s": None}, 1, 1, None, 1),
    ],
)
def test_times_are_counted_only_where_they_mean_something(
    metrics: Metrics,
    change: dict[str, Any],
    ttft: int | None,
    per_token: int | None,
    gaps: int | None,
    seconds: int | None,
) -> None:
    metrics.record(changed(SERVED, **change))
    assert value(metrics, "time_to_first_token_seconds_count", band="default", model="m") == ttft
    assert value(metrics, "time_per_output_token_seconds_count", band="default", model="m") == per_token
    assert value(metrics, "inter_chunk_seconds_count", band="default", gap="max") == gaps
    assert value(metrics, "request_seconds_count", band="default", model="m") == seconds


def test_the_number_of_model_labels_is_limited(metrics: Metrics) -> None:
    for index in range(LABELS_MAX + 50):
        metrics.record(changed(SERVED, model=f"m{index}"))
    metrics.record(REFUSED)
    metrics.record(changed(SERVED, model="m0"))
    families = {family.name: family for family in metrics.registry.collect()}
    models = {sample.labels["model"] for sample in families["llmproxy_requests"].samples}
    assert len(models) == LABELS_MAX
    completed = {"outcome": "completed", "code": "2xx", "band": "default"}
    assert value(metrics, "requests_total", **completed, model="other") == 52
    assert value(metrics, "requests_total", **completed, model="m0") == 2
    assert value(metrics, "requests_total", outcome="unknown_model", code="4xx", band="none", model="unknown") == 1


def test_decisions_are_counted(metrics: Metrics) -> None:
    metrics.record(changed(SERVED, band="sheddable", preemptions=2, met=True, unknown_objective="gold"))
    metrics.record(changed(SERVED, met=False))
    metrics.record(SERVED)
    assert value(metrics, "preemptions_total", band="sheddable") == 2
    assert value(metrics, "preemptions_total", band="default") is None
    assert value(metrics, "unknown_objectives_total") == 1
    assert value(metrics, "objectives_total", band="sheddable", result="met") == 1
    assert value(metrics, "objectives_total", band="default", result="missed") == 1
    assert value(metrics, "objectives_total", band="default", result="met") is None, "it had no objective to keep"


def predictions(metrics: Metrics, time: str) -> list[float | None]:
    """Predicted and observed seconds, errors and their count, and how many were covered."""
    of = {"backend": "gpu-0", "time": time}
    return [
        value(metrics, "prediction_seconds_total", kind="predicted", **of),
        value(metrics, "prediction_seconds_total", kind="observed", **of),
        value(metrics, "prediction_error_ratio_sum", **of),
        value(metrics, "prediction_error_ratio_count", **of),
        value(metrics, "predictions_covered_total", **of),
    ]


def test_predictions_are_compared_with_observed_times(metrics: Metrics) -> None:
    metrics.record(PREDICTED)
    assert predictions(metrics, "ttft") == pytest.approx([0.4, 0.5, 0.2, 1, 1])
    assert predictions(metrics, "tpot") == pytest.approx([0.25, 0.2, 0.25, 1, 1])
    metrics.record(changed(PREDICTED, predicted_ttft=Predicted(0.25, 0.49), predicted_tpot=Predicted(0.1, 0.19)))
    assert predictions(metrics, "ttft") == pytest.approx([0.65, 1.0, 0.7, 2, 1])
    assert predictions(metrics, "tpot") == pytest.approx([0.35, 0.4, 0.75, 2, 1])


def test_a_p90_that_never_held_counts_zero(metrics: Metrics) -> None:
    metrics.record(changed(PREDICTED, predicted_ttft=Predicted(0.1, 0.2)))
    assert predictions(metrics, "ttft")[3:] == [1, 0]


@pytest.mark.parametrize(
    ("change", "ttft", "tpot"),
    [
        ({"stream": False}, None, None),
        ({"outcome": Outcome.BROKEN_STREAM}, 1, None),
        ({"outcome": Outcome.CANCELLED, "ttft_s": None}, None, None),
        ({"output_tokens": None}, 1, None),
        ({"chunks": 1}, 1, None),
        ({"predicted_ttft": None}, None, 1),
        ({"predicted_tpot": None}, 1, None),
        ({"ttft_s": 0.5}, None, 1),
        ({"duration_s": 1.0}, 1, None),
    ],
)
def test_predictions_are_compared_only_with_observed_times(
    metrics: Metrics, change: dict[str, Any], ttft: int | None, tpot: int | None
) -> None:
    metrics.record(changed(PREDICTED, **change))
    assert predictions(metrics, "ttft")[3] == ttft
    assert predictions(metrics, "tpot")[3] == tpot


def test_a_placement_that_predicts_nothing_has_no_series(metrics: Metrics) -> None:
    metrics.record(changed(PREDICTED, predicted_ttft=None, predicted_tpot=None))
    assert b"llmproxy_prediction_seconds_total{" not in metrics.page()
    assert b"llmproxy_prediction_error_ratio_count{" not in metrics.page()


def test_tenants_are_counted_where_there_are_any(metrics: Metrics) -> None:
    metrics.record(SERVED)
    metrics.record(changed(SERVED, tenant="acme"))
    metrics.record(changed(REFUSED, tenant="acme"))
    assert value(metrics, "tenant_requests_total", tenant="acme", outcome="completed") == 1
    assert value(metrics, "tenant_requests_total", tenant="acme", outcome="unknown_model") == 1
    assert value(metrics, "tenant_queue_wait_seconds_sum", tenant="acme") == 0.25
    for direction, tokens in (("input", 10), ("cached", 4), ("output", 11)):
        assert value(metrics, "tenant_tokens_total", tenant="acme", direction=direction) == tokens
    assert 'tenant=""' not in metrics.page().decode()


def test_the_number_of_tenant_labels_is_limited(metrics: Metrics) -> None:
    for index in range(LABELS_MAX + 50):
        metrics.record(changed(SERVED, tenant=f"t{index}"))
    families = {family.name: family for family in metrics.registry.collect()}
    tenants = {sample.labels["tenant"] for sample in families["llmproxy_tenant_requests"].samples}
    assert len(tenants) == LABELS_MAX
    assert value(metrics, "tenant_requests_total", tenant="other", outcome="completed") == 51
    assert value(metrics, "tenant_tokens_total", tenant="other", direction="input") == 510


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        (Outcome.UPSTREAM_STATUS, 400, "4xx"),
        (Outcome.UPSTREAM_STATUS, 503, "5xx"),
        (Outcome.CANCELLED, 499, "none"),
        (Outcome.COMPLETED, 204, "2xx"),
    ],
)
def test_the_class_of_the_status_tells_a_clients_error_from_the_engines(
    metrics: Metrics, outcome: Outcome, status: int, code: str
) -> None:
    metrics.record(changed(SERVED, outcome=outcome, status=status))
    assert value(metrics, "requests_total", outcome=outcome, code=code, band="default", model="m") == 1


def test_flows_without_end_make_no_series(metrics: Metrics) -> None:
    metrics.record(changed(SERVED, flow="f", request_id="i"))
    before = metrics.page().count(b"\n")
    for index in range(100):
        metrics.record(changed(SERVED, flow=f"f{index}", request_id=f"i{index}", unknown_objective=f"o{index}"))
    assert metrics.page().count(b"\n") == before


def test_the_longest_lines_of_blocked_requests_have_names() -> None:
    few = Metrics(lambda: LiveState(blocked={"tenant:a": 2, "model:m": 1}))
    assert value(few, "blocked_requests", limit="tenant:a") == 2
    assert value(few, "blocked_requests", limit="model:m") == 1
    many = Metrics(lambda: LiveState(blocked={f"tenant:{i:03}": i + 1 for i in range(LABELS_MAX + 1)}))
    families = {family.name: family for family in many.registry.collect()}
    counted = {sample.labels["limit"]: sample.value for sample in families["llmproxy_blocked_requests"].samples}
    assert len(counted) == LABELS_MAX
    assert (counted["tenant:200"], counted["other"]) == (201, 1 + 2)


def test_lines_that_a_log_could_not_take_are_counted(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics.decisions_lost(3)
    assert value(metrics, "decision_log_lines_lost_total") == 3
    metrics.log_lines_lost(4)
    monkeypatch.setattr(logs, "take_lines_lost", lambda: 5)
    metrics.page()
    assert value(metrics, "log_lines_lost_total") == 9, "those of workers, and those of this process at a scrape"


def test_gauges_are_read_at_the_scrape() -> None:
    states = [LiveState(), STATE]
    metrics = Metrics(lambda: states[-1])
    assert value(metrics, "queued_requests", band="default") == 2
    assert value(metrics, "queued_bytes", band="critical") == 10
    assert value(metrics, "oldest_waiting_seconds", band="default") == 3.5
    assert value(metrics, "oldest_waiting_seconds", band="critical") == 0.0
    assert value(metrics, "queue_backlog_seconds", pool="m") == 7.5
    assert value(metrics, "priority_inversions_total") == 2
    assert value(metrics, "in_flight_requests", backend="gpu-0") == 3
    assert value(metrics, "backend_info", backend="gpu-0", pool="m") == 1
    assert value(metrics, "backend_info", backend="gpu-1", pool="") == 1
    assert value(metrics, "backend_saturation", backend="gpu-0") == 0.1
    assert value(metrics, "backend_limit", backend="gpu-0") == 32
    assert value(metrics, "backend_running", backend="gpu-0") == 2
    assert value(metrics, "backend_waiting", backend="gpu-0") == 1
    assert value(metrics, "backend_kv_used_ratio", backend="gpu-0") == 0.4
    assert value(metrics, "backend_reading_age_seconds", backend="gpu-0") == 0.2
    assert [value(metrics, "backend_available", backend=name) for name in ("gpu-0", "gpu-1")] == [1, 0]
    assert [value(metrics, "backend_ejected", backend=name) for name in ("gpu-0", "gpu-1")] == [0, 1]
    states.pop()
    assert value(metrics, "in_flight_requests", backend="gpu-0") is None


def test_a_backend_without_a_reading_has_no_reading(metrics: Metrics) -> None:
    for name in ("running", "waiting", "kv_used", "reading_age_seconds"):
        assert value(metrics, f"backend_{name}", backend="gpu-1") is None
    assert value(metrics, "in_flight_requests", backend="gpu-1") == 0


def test_the_series_of_a_removed_backend_end_although_records_come_later() -> None:
    states = [LiveState(), STATE]
    metrics = Metrics(lambda: states[-1])
    metrics.record(PREDICTED)
    assert b'llmproxy_prediction_seconds_total{backend="gpu-0"' in metrics.page()
    states.pop()
    metrics.page()
    metrics.attempted("gpu-0", Verdict.SERVED)
    metrics.poll_failed("gpu-0", Trouble.REFUSED)
    metrics.record(PREDICTED)
    assert b"gpu-0" not in metrics.page()
    assert b"llmproxy_requests_total{" in metrics.page()


def test_attempts_polls_and_decisions_are_counted(metrics: Metrics) -> None:
    metrics.attempted("gpu-0", Verdict.BUSY)
    metrics.poll_failed("gpu-1", Trouble.REFUSED)
    metrics.decided(0.001)
    assert value(metrics, "attempts_total", backend="gpu-0", verdict="busy") == 1
    assert value(metrics, "poll_failures_total", backend="gpu-1", reason="refused") == 1
    assert value(metrics, "decision_seconds_count") == 1
    assert value(metrics, "build_info", version=__version__) == 1


def test_a_real_scraper_reads_the_page(metrics: Metrics) -> None:
    metrics.record(changed(SERVED, model='odd "name"\nwith\\all'))
    page = metrics.page().decode()
    labels = [
        s.labels for f in text_string_to_metric_families(page) for s in f.samples if s.name == "llmproxy_requests_total"
    ]
    assert labels == [{"outcome": "completed", "code": "2xx", "band": "default", "model": 'odd "name"\nwith\\all'}]
    assert "_created" not in page
