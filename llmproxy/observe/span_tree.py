"""Makes the spans of one request from its exit record: spans of the request, of each wait and of each attempt.

Attributes follow the OpenTelemetry conventions (HTTP, stable; GenAI, in development). Other attributes begin with
`llmproxy.`. No attribute has a prompt or a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import getrandbits
from time import monotonic_ns, time_ns
from typing import Any

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from llmproxy import __version__
from llmproxy.core.domain import Outcome, Predicted, Stage, Verdict
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.exit_fields import why_fields
from llmproxy.observe.trace_context import TraceContext
from llmproxy.scheduling.attempt import Attempt

_NO_FAILURES = frozenset({Verdict.SERVED, Verdict.CLIENT_GONE, Verdict.PREEMPTED})
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Path -> `gen_ai.operation.name`. The conventions have no other operation that this proxy serves."""


class SpanTree:
    """Makes the spans of requests. `scheme` (http or https) is the protocol of the port for clients."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        own = {"service.name": "llmproxy", "service.version": __version__}
        self._resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})
        self._scope = InstrumentationScope("llmproxy", __version__)

    def spans(self, ended: RequestExit) -> list[ReadableSpan]:
        """Returns the spans of a request that is sampled. The first span covers the whole request."""
        trace, arrived_s, ended_s = ended.trace, ended.arrived_s, ended.ended_s
        assert trace is not None
        assert arrived_s is not None
        assert ended_s is not None
        # Computed for each request, because the wall clock may be set while a proxy runs.
        made = _Spans(trace, self._resource, self._scope, time_ns() - monotonic_ns())
        parent = made.context(trace.parent_id, is_remote=True) if trace.parent_id else None
        links = [Link(_context(*trace.linked, is_remote=True))] if trace.linked is not None else []
        failed = ended.status >= 500 or ended.outcome is Outcome.BROKEN_STREAM
        spans = [
            made.span(
                f"{ended.method} {ended.path}", SpanKind.SERVER, trace.span_id, parent, arrived_s, ended_s,
                self._request_attributes(ended), error=ended.outcome.value if failed else None, links=links,
            )
        ]  # fmt: skip
        request = made.context(trace.span_id)
        # Both stages of a split request are one attempt.
        number = ended.attempts - sum(attempt.stage is not Stage.DECODE for attempt in ended.tried) - 1
        for attempt in ended.tried:
            assert attempt.granted_s is not None
            number += attempt.stage is not Stage.DECODE
            spans.append(
                made.span(
                    "queue", SpanKind.INTERNAL, None, request, attempt.queued_s, attempt.granted_s,
                    _queue_attributes(ended, attempt),
                )
            )  # fmt: skip
            is_last = attempt is ended.last
            spans.append(
                made.span(
                    f"{_operation(ended.path)} {ended.model}", SpanKind.CLIENT, attempt.span_id, request,
                    attempt.granted_s, ended_s if attempt.ended_s is None else attempt.ended_s,
                    _attempt_attributes(ended, attempt, number, is_last=is_last), error=_attempt_error(attempt),
                    events=list(_events(attempt, retried=not is_last and attempt.verdict is not Verdict.SERVED)),
                )
            )  # fmt: skip
        if ended.queued_s is not None:
            refused = {"llmproxy.outcome": ended.outcome.value}
            attributes = _queue_attributes(ended, Attempt()) | refused
            spans.append(made.span("queue", SpanKind.INTERNAL, None, request, ended.queued_s, ended_s, attributes))
        return spans

    def _request_attributes(self, ended: RequestExit) -> dict[str, Any]:
        return {
            "http.request.method": ended.method,
            "http.route": ended.path,
            "url.path": ended.path,
            "url.scheme": self._scheme,
            "http.response.status_code": ended.status,
            "http.request.body.size": ended.body_bytes,
            "http.response.body.size": ended.response_bytes,
            "llmproxy.request_id": ended.request_id,
            "llmproxy.outcome": ended.outcome.value,
            "gen_ai.request.model": ended.model,
            "llmproxy.tenant": ended.tenant or None,
            "llmproxy.band": ended.band,
            "llmproxy.objective.ttft_s": ended.ttft_slo_s,
            "llmproxy.objective.tpot_s": ended.tpot_slo_s,
            "llmproxy.objective.met": ended.met,
            "llmproxy.ttft_s": ended.ttft_s,
            "llmproxy.attempts": ended.attempts,
            "llmproxy.preemptions": ended.preemptions,
        }


class _Spans:
    """Makes spans of one trace. `epoch_ns` is the Unix time at which the scheduler's clock was 0."""

    def __init__(self, trace: TraceContext, resource: Resource, scope: InstrumentationScope, epoch_ns: int) -> None:
        self._trace_id = trace.trace_id
        self._resource, self._scope, self._epoch_ns = resource, scope, epoch_ns

    def context(self, span_id: str, *, is_remote: bool = False) -> SpanContext:
        return _context(self._trace_id, span_id, is_remote=is_remote)

    def span(
        self,
        name: str,
        kind: SpanKind,
        span_id: str | None,
        parent: SpanContext | None,
        began_s: float | None,
        ended_s: float,
        attributes: Mapping[str, Any],
        *,
        error: str | None = None,
        events: list[tuple[str, float]] | None = None,
        links: list[Link] | None = None,
    ) -> ReadableSpan:
        """Returns a span, with a new id if `span_id` is None. Times are on the scheduler's clock.

        Attributes that are None are left out.
        """
        kept = {key: value for key, value in attributes.items() if value is not None}
        if error is not None:
            kept["error.type"] = error
        return ReadableSpan(
            name,
            self.context(span_id or f"{getrandbits(64) or 1:016x}"),
            parent,
            self._resource,
            kept,
            [Event(event, timestamp=self._ns(at_s)) for event, at_s in events or ()],
            links or (),
            kind,
            status=Status(StatusCode.UNSET if error is None else StatusCode.ERROR),
            start_time=self._ns(ended_s if began_s is None else began_s),
            end_time=self._ns(ended_s),
            instrumentation_scope=self._scope,
        )

    def _ns(self, instant_s: float) -> int:
        return self._epoch_ns + round(instant_s * 1e9)


def _context(trace_id: str, span_id: str, *, is_remote: bool) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, _SAMPLED)


def _operation(path: str) -> str:
    """Returns `gen_ai.operation.name`; for a path that the conventions do not know, the last part of the path."""
    return _OPERATIONS.get(path) or path.rpartition("/")[2]


def _queue_attributes(ended: RequestExit, attempt: Attempt) -> dict[str, Any]:
    """Returns the attributes of the span of a wait. For a wait without a grant, `attempt` is empty."""
    attributes: dict[str, Any] = {
        "llmproxy.band": ended.band,
        "llmproxy.flow": ended.flow,
        "llmproxy.max_wait_s": ended.max_wait_s,
        "llmproxy.queued_ahead": attempt.queued_ahead,
    }
    for name, value in (why_fields(attempt.why) if attempt.why is not None else {}).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        attributes |= {f"llmproxy.why.{name}{part and '.'}{part}": one for part, one in parts}
    return attributes


def _attempt_attributes(ended: RequestExit, attempt: Attempt, number: int, *, is_last: bool) -> dict[str, Any]:
    observed_s = None
    if attempt.first_byte_s is not None and attempt.granted_s is not None and ended.stream:
        observed_s = attempt.first_byte_s - attempt.granted_s
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": _operation(ended.path),
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": ended.model,
        "gen_ai.request.stream": ended.stream,
        "gen_ai.response.time_to_first_chunk": observed_s,
        "http.request.method": ended.method,
        "http.request.resend_count": number or None,
        "http.response.status_code": attempt.status,
        "llmproxy.backend": attempt.backend,
        "llmproxy.stage": None if attempt.stage is Stage.WHOLE else attempt.stage.value,
        "llmproxy.verdict": attempt.verdict.value,
        "llmproxy.candidates": attempt.candidates,
        "llmproxy.expected_cached_tokens": attempt.expected_cached_tokens,
        **{f"llmproxy.price.{term}": seconds for term, seconds in attempt.terms},
        **_predicted("ttft", attempt.predicted_ttft),
        **_predicted("tpot", attempt.predicted_tpot),
    }
    if is_last:
        attributes |= {
            "gen_ai.usage.input_tokens": attempt.prompt_tokens,
            "gen_ai.usage.output_tokens": attempt.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": attempt.cached_tokens,
            "llmproxy.tpot_s": ended.time_per_output_token_s,
        }
    return attributes


def _predicted(time: str, predicted: Predicted | None) -> dict[str, float]:
    if predicted is None:
        return {}
    return {f"llmproxy.predicted.{time}_s": predicted.expected_s, f"llmproxy.predicted.{time}_p90_s": predicted.p90_s}


def _attempt_error(attempt: Attempt) -> str | None:
    """Returns the `error.type` of a failed attempt; None for any other attempt, such as a preempted one."""
    if attempt.status is not None and attempt.status >= 400:
        return str(attempt.status)
    return None if attempt.verdict in _NO_FAILURES else attempt.verdict.value


def _events(attempt: Attempt, *, retried: bool) -> Iterator[tuple[str, float]]:
    if attempt.first_byte_s is not None:
        yield "first token", attempt.first_byte_s
    if attempt.ended_s is not None:
        if attempt.verdict is Verdict.PREEMPTED:
            yield "withdrawn", attempt.ended_s
        elif retried:
            yield "continued" if attempt.committed else "retried", attempt.ended_s
