"""The state of one request while it is served, and its record at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Grant, Outcome, Stage
from llmproxy.gateway.http.client_address import Client
from llmproxy.gateway.http.headers import as_text
from llmproxy.gateway.http.routes import Route
from llmproxy.gateway.proxying.answers import CapturedAnswer
from llmproxy.gateway.proxying.attempt import Attempt
from llmproxy.gateway.proxying.response_writer import KeepAlive, ResponseWriter
from llmproxy.gateway.proxying.rules import Rules
from llmproxy.gateway.proxying.stages import Handover
from llmproxy.gateway.proxying.stored import Previous
from llmproxy.gateway.request.auth import NO_TENANT, Tenant
from llmproxy.gateway.request.body_budget import BufferedBody
from llmproxy.gateway.request.parsed_body import ParsedBody
from llmproxy.observe.exit import (
    ATTEMPTS_MAX,
    RequestExit,
    RequestInput,
    RequestResult,
    RequestRouting,
    Split,
    shortened,
)
from llmproxy.observe.trace_context import Sampler, TraceContext
from llmproxy.scheduling.attempts import Routing

_MODEL_CHARS_MAX = 100
"""The maximum length of unknown model names in logs, where JSON escaping can turn a character into 12 bytes."""

_AGENT_CHARS_MAX = 64
_CLIENTS_DOING = frozenset({Outcome.CANCELLED, Outcome.BAD_REQUEST, Outcome.RATE_LIMITED})


@dataclass(slots=True)
class ReceivedRequest:
    """The request as received, and the facts that were read from it so far."""

    rules: Rules
    route: Route
    http: web.BaseRequest
    client: Client
    arrived_s: float
    # The request id in logs and headers.
    id: str
    buffered: BufferedBody
    # Whether another open request has the same id.
    repeated: bool = False
    tenant: Tenant = NO_TENANT
    # Whether the client's headers about bands, flows and objectives count.
    trusted: bool = False
    body_bytes: int = 0
    parsed: ParsedBody | None = None
    previous: Previous | None = None
    salt: str | None = None
    session: str | None = None
    target: Target | None = None
    max_wait_s: float = 0.0
    unknown_objective: str | None = None
    trace: TraceContext | None = None

    def begin_trace(self, sampler: Sampler) -> None:
        """Begin the trace, once. Only a trusted client may choose the trace id."""
        if self.trace is None:
            self.trace = sampler.begin(self.http.headers.getall("traceparent", ()), self.trusted)

    def engine_id(self, routing: Routing) -> str:
        """The request id for the engine, which must not see the same id twice.

        An engine could mix up two requests with one id, and may still be aborting the previous attempt.
        """
        if not self.repeated and routing.attempts <= 1:
            return self.id
        return f"{self.id}-{routing.request.id}-{routing.attempts}"

    def record(self, routing: Routing | None, band_names: Mapping[int, str]) -> RequestInput:
        agent = self.http.headers.get("user-agent", "")[:_AGENT_CHARS_MAX]
        record = RequestInput(
            request_id=self.id,
            method=self.http.method,
            path=self.route.path,
            tenant=self.tenant.name,
            key=self.tenant.key,
            client=self.client.address,
            user_agent=(agent if agent.isascii() else as_text(agent)) or None,
            unknown_objective=self.unknown_objective,
            arrived_s=self.arrived_s,
            body_bytes=self.body_bytes,
        )
        if self.target is not None:
            record.model = self.target.requested
            sent = self.target.adapter or self.target.model
            record.target = sent if sent != self.target.requested else None
        elif self.parsed is not None and self.parsed.facts.model is not None:
            record.unknown_model = self.parsed.facts.model[:_MODEL_CHARS_MAX]
        if routing is not None:
            request = routing.request
            record.adapter, record.flow, record.slo = request.adapter, request.flow, request.slo
            record.level, record.band = request.band, band_names.get(request.band, str(request.band))
            record.max_wait_s, record.stream, record.weight = self.max_wait_s, request.stream, request.weight
            record.expected_prompt_tokens = request.prompt_tokens
        return record


@dataclass(slots=True)
class RequestContext:
    """The whole state of one request: input, routing, attempts and outcome."""

    input: ReceivedRequest
    client: ResponseWriter
    # The proxy's own header fields for the answer.
    extra: dict[str, str]
    routing: Routing | None = None
    # The latest attempt.
    attempt: Attempt | None = None
    # A copy of the answer, which is indexed at the end.
    captured: CapturedAnswer | None = None
    # The result of the prefill stage, for the decode stage.
    handover: Handover | None = None
    keep_alive: KeepAlive | None = None
    split: Split | None = None
    outcome: Outcome = Outcome.INTERNAL
    status: int = 0
    error: str = ""

    def note_split(self, attempt: Attempt, grant: Grant) -> None:
        """Note after an attempt whether the request was served split, or why not."""
        if attempt.split is not None:
            self.split = attempt.split
        elif self.split is None and grant.request.stage is Stage.DECODE:
            self.split = Split.SPLIT
        elif self.split is None and grant.placed.unsplit:
            self.split = Split.WHOLE

    def end(self, outcome: Outcome, status: int, error: str) -> None:
        self.outcome, self.status, self.error = outcome, status, error

    def record(self, now: float, band_names: Mapping[int, str]) -> RequestExit:
        """The record of the request, which ends at `now`."""
        routing = _routing_record(self.routing, now) if self.routing is not None else RequestRouting()
        if self.split is not None:
            routing.note_split(self.split)
        return RequestExit(self.input.record(self.routing, band_names), self._result(now), routing, self.input.trace)

    def _result(self, now: float) -> RequestResult:
        attempt = self.attempt
        result = RequestResult(
            outcome=self.outcome,
            status=self.status,
            duration_s=now - self.input.arrived_s,
            response_bytes=self.client.sent_bytes,
        )
        if attempt is not None:
            result.chunks = attempt.chunks
            if attempt.first_token_s is not None:
                result.ttft_s = attempt.first_token_s - self.input.arrived_s
                result.max_gap_s = attempt.max_gap_s
            if attempt.usage is not None:
                usage = attempt.usage
                result.prompt_tokens, result.output_tokens = usage.prompt_tokens, usage.output_tokens
                result.cached_tokens = usage.cached_tokens
        result.error = shortened(" ".join(filter(None, (self.error, attempt.detail if attempt is not None else ""))))
        result.met = self._met(result)
        return result

    def _met(self, result: RequestResult) -> bool | None:
        """Whether the request met its objective; None without an objective, or if the client caused the miss.

        A rate-limited request is no miss. Otherwise tenants that exceed their limits would get precedence.
        """
        slo = self.routing.request.slo if self.routing is not None else None
        if self.routing is None or slo is None or self.outcome in _CLIENTS_DOING or 400 <= self.status < 429:
            return None
        if self.outcome is not Outcome.COMPLETED or self.attempt is None:
            return False
        lease, attempt = self.routing.lease, self.attempt
        if not self.routing.request.stream:
            # Without a stream the first token is invisible; only the time of the grant is known.
            return lease is not None and slo.met(lease.grant.at_s - self.input.arrived_s, None)
        tpot_s = None
        if result.output_tokens is not None and result.output_tokens > 1 and attempt.first_token_s is not None:
            tpot_s = (attempt.last_byte_s - attempt.first_token_s) / (result.output_tokens - 1)
        return slo.met(result.ttft_s, tpot_s)


def _routing_record(routing: Routing, now: float) -> RequestRouting:
    return RequestRouting(
        tried=tuple(routing.tried[-ATTEMPTS_MAX:]),
        attempts=routing.attempts,
        preemptions=routing.preemptions,
        queue_wait_s=routing.queue_wait_s(now),
        queued_s=routing.waits_since_s,
    )
