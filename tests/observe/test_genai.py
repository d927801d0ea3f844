"""The histograms of OpenTelemetry's GenAI conventions."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from llmproxy.core.domain import Outcome
from llmproxy.observe.genai import GenAiMetrics
from llmproxy.observe.metrics import LABELS_MAX
from tests.exits import changed, exit_of

SERVED = exit_of(
    request_id="r", method="POST", path="/v1/messages", outcome=Outcome.COMPLETED, status=200, duration_s=3.0,
    model="alias", target="m", stream=True, ttft_s=1.0, output_tokens=11,
)  # fmt: skip
CHAT = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "vllm",
    "gen_ai_request_model": "alias",
    "gen_ai_response_model": "m",
}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> GenAiMetrics:
    return GenAiMetrics(registry)


def test_a_stream_is_counted_by_all_three(metrics: GenAiMetrics, registry: CollectorRegistry) -> None:
    metrics.record(SERVED)
    of = registry.get_sample_value
    assert of("gen_ai_server_request_duration_seconds_sum", {**CHAT, "error_type": ""}) == 3.0
    assert of("gen_ai_server_time_to_first_token_seconds_sum", CHAT) == 1.0
    assert of("gen_ai_server_time_per_output_token_seconds_sum", CHAT) == pytest.approx(0.2)


def test_an_error_has_its_type_and_no_times(metrics: GenAiMetrics, registry: CollectorRegistry) -> None:
    metrics.record(changed(SERVED, outcome=Outcome.BROKEN_STREAM))
    of = registry.get_sample_value
    assert of("gen_ai_server_request_duration_seconds_count", {**CHAT, "error_type": "broken_stream"}) == 1
    assert of("gen_ai_server_time_to_first_token_seconds_count", CHAT) is None


def test_operations_outside_the_conventions_are_not_counted(metrics: GenAiMetrics, registry: CollectorRegistry) -> None:
    metrics.record(changed(SERVED, path="/rerank"))
    assert not [sample for family in registry.collect() for sample in family.samples]


def test_the_number_of_models_is_limited(metrics: GenAiMetrics, registry: CollectorRegistry) -> None:
    for number in range(LABELS_MAX + 50):
        metrics.record(changed(SERVED, model=f"m{number}", target=None))
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert len({sample.labels["gen_ai_request_model"] for sample in samples}) == LABELS_MAX
