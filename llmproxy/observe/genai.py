"""OpenTelemetry's GenAI server metrics as Prometheus histograms, for existing dashboards.

OpenTelemetry's exporter for Prometheus writes the same names and labels. The metrics are optional, because they repeat
`llmproxy_` metrics.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from llmproxy.core.domain import Outcome
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.metrics import Capped
from llmproxy.observe.series import SeriesCollector

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Path -> `gen_ai.operation.name`. The conventions have no other operation that this proxy serves."""
PROVIDER = "vllm"
REQUEST_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")


class GenAiMetrics:
    """The histograms of request duration, time to first token and time per output token, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        series, name = SeriesCollector(), "gen_ai_server_{}_seconds".format
        self._request = series.distribution(
            name("request_duration"), "From arrival to the end.", REQUEST_BUCKETS_S, *LABELS, "error_type"
        )
        self._ttft = series.distribution(
            name("time_to_first_token"), "From arrival to the first byte, completed streams.", TTFT_BUCKETS_S, *LABELS
        )
        self._per_token = series.distribution(
            name("time_per_output_token"), "Mean after the first, completed streams.", TOKEN_BUCKETS_S, *LABELS
        )
        self._models = Capped()
        registry.register(series)

    def record(self, ended: RequestExit) -> None:
        """Counts a request whose path is in OPERATIONS."""
        operation = OPERATIONS.get(ended.path)
        if operation is None:
            return
        labels = operation, PROVIDER, self._models(ended.model), self._models(ended.target or ended.model)
        completed = ended.outcome is Outcome.COMPLETED
        self._request[(*labels, "" if completed else ended.outcome.value)].observe(ended.duration_s)
        if not completed or not ended.stream:
            return
        if ended.ttft_s is not None:
            self._ttft[labels].observe(ended.ttft_s)
        if ended.time_per_output_token_s is not None:
            self._per_token[labels].observe(ended.time_per_output_token_s)
