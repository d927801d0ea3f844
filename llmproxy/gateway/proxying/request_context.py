"""The state of a request from its arrival to its end, and the completion of its record."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Outcome, Request
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.gateway.http.client_address import Client
from llmproxy.gateway.http.headers import as_text
from llmproxy.gateway.http.routes import Route, Work
from llmproxy.gateway.proxying.answers import CapturedAnswer
from llmproxy.gateway.proxying.call import Call
from llmproxy.gateway.proxying.response_writer import KeepAlive, ResponseWriter
from llmproxy.gateway.proxying.rules import Rules
from llmproxy.gateway.proxying.split.stages import Handover
from llmproxy.gateway.proxying.stored import Previous
from llmproxy.gateway.request.auth import NO_TENANT, Tenant
from llmproxy.gateway.request.body_budget import BufferedBody
from llmproxy.gateway.request.parsed_body import ParsedBody
from llmproxy.gateway.request.prefix_hash import BLOCK_BYTES, ID_BYTES
from llmproxy.observe.exit import ATTEMPTS_MAX, RequestExit
from llmproxy.observe.trace_context import Sampler
from llmproxy.scheduling.attempt import Attempt, shortened
from llmproxy.scheduling.attempts import Routing

_MODEL_CHARS_MAX = 100
"""The maximum length of unknown model names in logs, where JSON escaping can turn a character into 12 bytes."""

_AGENT_CHARS_MAX = 64
_CLIENTS_DOING = frozenset({Outcome.CANCELLED, Outcome.BAD_REQUEST, Outcome.RATE_LIMITED})


@dataclass(slots=True)
class RequestContext:
    """The objects of one request. `record` has everything that is logged about it.

    The fields without a default never change.
    """

    rules: Rules
    route: Route
    http: web.BaseRequest
    sender: Client
    client: ResponseWriter
    # The proxy's own header fields for the answer.
    extra: dict[str, str]
    buffered: BufferedBody
    record: RequestExit
    # Whether another open request has the same id.
    repeated: bool = False
    tenant: Tenant = NO_TENANT
    # Whether the client's headers about bands, flows and objectives count.
    trusted: bool = False
    parsed: ParsedBody | None = None
    previous: Previous | None = None
    salt: str | None = None
    session: str | None = None
    target: Target | None = None
    routing: Routing | None = None
    # The latest attempt, and its latest call.
    attempt: Attempt | None = None
    call: Call | None = None
    # A copy of the answer, which is indexed at the end.
    captured: CapturedAnswer | None = None
    # The result of the prefill stage, for the decode stage.
    handover: Handover | None = None
    keep_alive: KeepAlive | None = None

    def begin_trace(self, sampler: Sampler) -> None:
        """Begin the trace, once. Only a trusted client may choose the trace id."""
        if self.record.trace is None:
            self.record.trace = sampler.begin(self.http.headers.getall("traceparent", ()), self.trusted)

    def engine_id(self, routing: Routing) -> str:
        """The request id for the engine, which must not see the same id twice.

        An engine could mix up two requests with one id, and may still be aborting the previous attempt.
        """
        if not self.repeated and routing.attempts <= 1:
            return self.record.request_id
        return f"{self.record.request_id}-{routing.request.id}-{routing.attempts}"

    def finish(self, now: float, band_names: Mapping[int, str]) -> RequestExit:
        """Complete the record at the end of the request, at `now`. Returns it."""
        record = self.record
        assert record.arrived_s is not None
        record.duration_s = now - record.arrived_s
        record.response_bytes = self.client.sent_bytes
        record.tenant, record.key = self.tenant.name, self.tenant.key
        agent = self.http.headers.get("user-agent", "")[:_AGENT_CHARS_MAX]
        record.user_agent = (agent if agent.isascii() else as_text(agent)) or None
        if self.target is not None:
            record.model = self.target.requested
            sent = self.target.adapter or self.target.model
            record.target = sent if sent != self.target.requested else None
        elif self.parsed is not None and self.parsed.facts.model is not None:
            record.unknown_model = self.parsed.facts.model[:_MODEL_CHARS_MAX]
        if self.routing is not None:
            self._add_routing(self.routing, now, band_names)
        if self.attempt is not None:
            self._add_attempt(self.attempt)
        elif record.error is not None:
            record.error = shortened(record.error)
        record.met = self._met()
        return record

    def _add_routing(self, routing: Routing, now: float, band_names: Mapping[int, str]) -> None:
        record, request = self.record, routing.request
        record.adapter, record.flow, record.slo, record.weight = (
            request.adapter, request.flow, request.slo, request.weight
        )  # fmt: skip
        record.level, record.band = request.band, band_names.get(request.band, str(request.band))
        record.stream, record.expected_prompt_tokens = request.stream, request.prompt_tokens
        record.tried = tuple(routing.tried[-ATTEMPTS_MAX:])
        record.attempts, record.preemptions = routing.attempts, routing.preemptions
        record.queue_wait_s, record.queued_s = routing.queue_wait_s(now), routing.waits_since_s
        if record.split is not None:
            record.time_split()

    def _add_attempt(self, attempt: Attempt) -> None:
        record, usage = self.record, attempt.usage
        record.chunks = attempt.chunks
        if attempt.first_byte_s is not None and record.arrived_s is not None:
            record.ttft_s = attempt.first_byte_s - record.arrived_s
            record.max_gap_s = attempt.max_gap_s
        if usage is not None:
            record.prompt_tokens, record.output_tokens = usage.prompt_tokens, usage.output_tokens
            record.cached_tokens = usage.cached_tokens
        record.error = shortened(" ".join(filter(None, (record.error, attempt.detail))))

    def _met(self) -> bool | None:
        """Whether the request met its objective; None without an objective, or if the client caused the miss.

        A rate-limited request is no miss. Otherwise tenants that exceed their limits would get precedence.
        """
        record, routing, attempt, call = self.record, self.routing, self.attempt, self.call
        slo, outcome = record.slo, record.outcome
        if routing is None or slo is None or outcome in _CLIENTS_DOING or 400 <= record.status < 429:
            return None
        if outcome is not Outcome.COMPLETED or attempt is None or call is None:
            return False
        if not record.stream:
            # Without a stream the first token is invisible; only the time of the grant is known.
            granted_s = None if routing.lease is None else routing.lease.grant.at_s
            return granted_s is not None and slo.met(granted_s - routing.request.arrived_s, None)
        tpot_s = None
        if record.output_tokens is not None and record.output_tokens > 1 and attempt.first_byte_s is not None:
            tpot_s = (call.last_byte_s - attempt.first_byte_s) / (record.output_tokens - 1)
        return slo.met(record.ttft_s, tpot_s)


def make_request(
    context: RequestContext, parsed: ParsedBody, target: Target, request_id: str, estimator: Estimator
) -> Request:
    """Returns the request for the scheduler, and adds its limits of time and its objective to the record."""
    http, facts, tenant, identity = context.http, parsed.facts, context.tenant, context.rules.identity
    record = context.record
    assert record.arrived_s is not None
    standing = identity.classify(http.headers, context.trusted, target.requested, target.model, tenant)
    record.max_wait_s, record.unknown_objective = standing.max_wait_s, standing.unknown_objective
    prompt_tokens, output_tokens = estimator.tokens(target.model, facts)
    computes = context.route.computes
    if context.route.work is not Work.GENERATES:
        prompt_tokens, output_tokens = prompt_tokens if computes else 1, 0
    prefix: tuple[int, ...] = ()
    prefix_tokens = 0.0
    if parsed.chain is not None and computes:
        as_ids = facts.prompt_tokens is not None
        token_bytes = ID_BYTES if as_ids else estimator.bytes_per_token(target.model)
        prefix = parsed.chain.hashes_on(target.model, target.adapter)
        prefix_tokens = BLOCK_BYTES / token_bytes
    return Request(
        id=request_id,
        pool=target.pool,
        model=target.model,
        adapter=target.adapter,
        band=standing.band,
        flow=standing.flow,
        arrived_s=record.arrived_s,
        # The maximum wait counts from the moment when the body has been read.
        deadline_s=asyncio.get_running_loop().time() + standing.max_wait_s,
        body_bytes=record.body_bytes,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=facts.max_tokens,
        sequences=facts.sequences,
        stream=facts.stream,
        tenant=standing.tenant,
        weight=standing.weight,
        slo=standing.slo,
        limits=standing.limits,
        label=record.request_id,
        prefix=prefix,
        prefix_tokens=prefix_tokens,
        session=context.session,
        splittable=parsed.splittable and context.previous is None,
        prepared=facts.prepared or not computes,
        backend=context.previous.backend if context.previous is not None else None,
    )
