"""What is known of one request while it is served, and the record of it at its end."""

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
"""Of the name of an unknown model in a record. A character may become twelve in its line, which is bounded too."""

_AGENT_CHARS_MAX = 64
_CLIENTS_DOING = frozenset({Outcome.CANCELLED, Outcome.BAD_REQUEST, Outcome.RATE_LIMITED})


@dataclass(slots=True)
class ReceivedRequest:
    """What came in: the request itself, and what was read from it so far. `id` is in the log and in headers.

    `repeated` says that the client has another open request of this id. `trusted`: its headers about bands, flows and
    objectives count.
    """

    rules: Rules
    route: Route
    http: web.BaseRequest
    client: Client
    arrived_s: float
    id: str
    buffered: BufferedBody
    repeated: bool = False
    tenant: Tenant = NO_TENANT
    trusted: bool = False
    body_bytes: int = 0
    parsed: ParsedBody | None = None
    previous: Previous | None = None
    salt: str | None = None
    session: str | None = None
    target: Target | None = None
    ttl_s: float = 0.0
    unknown_objective: str | None = None
    trace: TraceContext | None = None

    def begin_trace(self, sampler: Sampler) -> None:
        """Begin the trace, once. Only clients whose headers count may say which one it is."""
        if self.trace is None:
            self.trace = sampler.begin(self.http.headers.getall("traceparent", ()), self.trusted)

    def engine_id(self, routing: Routing) -> str:
        """The id for the engine, which may abort or mix up two requests of one id.

        An engine may also still abort the attempt before this one.
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
            record.ttl_s, record.stream, record.weight = self.ttl_s, request.stream, request.weight
            record.expected_prompt_tokens = request.prompt_tokens
        return record


@dataclass(slots=True)
class RequestContext:
    """One request: what came in, how it was routed, and what became of it.

    `extra` are the proxy's own header fields for the answer. `attempt` is the latest one, `kept` the copy of the answer
    that is read at the end. `handover` is what the first stage of a split request left for the second one.
    """

    input: ReceivedRequest
    client: ResponseWriter
    extra: dict[str, str]
    routing: Routing | None = None
    attempt: Attempt | None = None
    captured: CapturedAnswer | None = None
    handover: Handover | None = None
    keep_alive: KeepAlive | None = None
    split: Split | None = None
    outcome: Outcome = Outcome.INTERNAL
    status: int = 0
    error: str = ""

    def note_split(self, attempt: Attempt, grant: Grant) -> None:
        """An attempt has ended: say how the request was served, or what kept it from being split."""
        if attempt.split is not None:
            self.split = attempt.split
        elif self.split is None and grant.request.stage is Stage.DECODE:
            self.split = Split.SPLIT
        elif self.split is None and grant.placed.unsplit:
            self.split = Split.WHOLE

    def end(self, outcome: Outcome, status: int, error: str) -> None:
        self.outcome, self.status, self.error = outcome, status, error

    def record(self, now: float, band_names: Mapping[int, str]) -> RequestExit:
        """The record of a request that ends at `now`."""
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
        """Whether the request kept its objective; None where it has none, or where its client is why it did not.

        A request beyond a rate limit is no miss: else tenants that send more than they may would come first.
        """
        slo = self.routing.request.slo if self.routing is not None else None
        if self.routing is None or slo is None or self.outcome in _CLIENTS_DOING or 400 <= self.status < 429:
            return None
        if self.outcome is not Outcome.COMPLETED or self.attempt is None:
            return False
        lease, attempt = self.routing.lease, self.attempt
        if not self.routing.request.stream:
            # Its first token cannot be seen, only whether it was granted in time.
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
