"""The state of a request from its arrival to its end, and the completion of its record."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web
from msgspec import Struct

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Outcome, Request, Slo
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.gateway.http.routes import EXTERNAL, Route, Work
from llmproxy.gateway.proxying.answers import CapturedAnswer
from llmproxy.gateway.proxying.call import Call
from llmproxy.gateway.proxying.continued.join import RestOf
from llmproxy.gateway.proxying.response_writer import KeepAlive, ResponseWriter
from llmproxy.gateway.proxying.rules import Rules
from llmproxy.gateway.proxying.split.stages import Handover
from llmproxy.gateway.proxying.stored import Previous
from llmproxy.gateway.request.auth import NO_TENANT, Tenant
from llmproxy.gateway.request.body_budget import BufferedBody
from llmproxy.gateway.request.head_facts import HeadFacts
from llmproxy.gateway.request.parsed_body import ParsedBody
from llmproxy.gateway.request.prefix_hash import BLOCK_BYTES, ID_BYTES
from llmproxy.observe.exit import ATTEMPTS_MAX, RequestExit
from llmproxy.observe.trace_context import Sampler
from llmproxy.scheduling.attempt import Attempt, shortened
from llmproxy.scheduling.lease import Lease

_MODEL_CHARS_MAX = 100
"""The maximum length of an unknown model name in logs. JSON escaping can turn a character into 12 bytes."""

_CAUSED_BY_CLIENT = frozenset({Outcome.CANCELLED, Outcome.BAD_REQUEST, Outcome.RATE_LIMITED})


@dataclass(frozen=True, slots=True)
class Continuation:
    """A stream that broke, and the request that asks another backend for its rest."""

    # The body of the client.
    asked: ParsedBody
    # The call and the attempt whose stream broke.
    call: Call
    attempt: Attempt
    # The body that asks for the rest.
    parsed: ParsedBody
    rest_of: RestOf


class RequestContext(Struct, eq=False):
    """All objects of one request. Everything that is logged about the request is in `record`.

    The fields without a default never change.
    """

    rules: Rules
    route: Route
    http: web.BaseRequest
    head: HeadFacts
    client: ResponseWriter
    # The proxy's own header fields for the answer, such as `x-request-id`.
    extra: dict[str, str]
    buffered: BufferedBody
    record: RequestExit
    # Whether another open request has the same id.
    repeated: bool = False
    tenant: Tenant = NO_TENANT
    # Whether the client's headers about bands, flows and objectives count.
    trusted: bool = False
    parsed: ParsedBody | None = None
    # The stored response that this request continues (`previous_response_id`).
    previous: Previous | None = None
    # The `cache_salt` that replaces the client's salt; None if the client's salt stays.
    salt: str | None = None
    # The hash of the session that the request names; None if it names none.
    session: str | None = None
    # The pool, model and adapter behind the requested model name; None until it is resolved.
    target: Target | None = None
    # The request as the scheduler got it at first, before any retry.
    request: Request | None = None
    # The latest lease, and the latest call under it.
    lease: Lease | None = None
    call: Call | None = None
    # A copy of the answer, for the prefix index and for a continuation; None if neither needs it.
    captured: CapturedAnswer | None = None
    # The result of the prefill stage, for the decode stage.
    handover: Handover | None = None
    keep_alive: KeepAlive | None = None
    # None unless a stream of this request broke and another backend is asked for the rest.
    continuation: Continuation | None = None

    def begin_trace(self, sampler: Sampler) -> None:
        """Begins the trace of the request; a second call changes nothing.

        Only a trusted client may choose the trace id.
        """
        if self.record.trace is None:
            self.record.trace = sampler.begin(self.http.headers.getall("traceparent", ()), self.trusted)

    def engine_id(self, request: Request) -> str:
        """Returns the request id for the engine, which differs in every attempt.

        An engine could mix up two requests with one id, and may still be aborting the previous attempt.
        """
        record = self.record
        if not self.repeated and record.attempts <= 1:
            return record.request_id
        return f"{record.request_id}-{request.id}-{record.attempts}"

    def finish(self, now: float) -> RequestExit:
        """Completes and returns the record of the request. `now`: the time of the event loop when the request ended."""
        record, last = self.record, self.record.last
        assert record.arrived_s is not None
        record.duration_s = now - record.arrived_s
        record.response_bytes = self.client.sent_bytes
        if self.target is None and self.parsed is not None and self.parsed.model is not None:
            record.unknown_model = self.parsed.model[:_MODEL_CHARS_MAX]
        if self.request is not None:
            if record.queue_wait_s is None:
                record.queue_wait_s = record.duration_s
            elif record.queued_s is not None:
                record.queue_wait_s += now - record.queued_s
        del record.tried[:-ATTEMPTS_MAX]
        if record.split is not None:
            record.time_split()
        first_byte_s = last.first_byte_s if record.continued is None else record.first_byte_s
        if first_byte_s is not None:
            record.ttft_s = first_byte_s - record.arrived_s
        if record.error or last.detail:
            record.error = shortened(" ".join(filter(None, (record.error, last.detail))))
        else:
            record.error = None
        if record.slo is not None:
            record.met = self._met(last, record.slo)
        return record

    def _met(self, last: Attempt, slo: Slo) -> bool | None:
        """Returns whether the request met its objective; None if the client caused the miss.

        A rate-limited request is no miss. Otherwise tenants that exceed their limits would get precedence.
        """
        record, call = self.record, self.call
        outcome = record.outcome
        if self.request is None or outcome in _CAUSED_BY_CLIENT or 400 <= record.status < 429:
            return None
        if outcome is not Outcome.COMPLETED or call is None:
            return False
        if not record.stream:
            # Without a stream the first token is invisible; only the time of the grant is known.
            return last.granted_s is not None and slo.met(last.granted_s - self.request.arrived_s, None)
        tpot_s = None
        if last.output_tokens is not None and last.output_tokens > 1 and record.ttft_s is not None:
            tpot_s = (call.last_byte_s - self.request.arrived_s - record.ttft_s) / (last.output_tokens - 1)
        return slo.met(record.ttft_s, tpot_s)


def make_request(
    context: RequestContext, parsed: ParsedBody, target: Target, request_id: str, estimator: Estimator
) -> Request:
    """Returns the request for the scheduler, and adds band, flow, weight and objective to the record."""
    record, identity = context.record, context.rules.identity
    assert record.arrived_s is not None
    head, names = context.head, (target.requested, target.model)
    if head.standing is not None and head.standing_for == names:
        level, flow, max_wait_s, record.weight, record.slo, record.unknown_objective = head.standing
        record.level, record.flow, record.max_wait_s = level, flow, max_wait_s
    else:
        identity.classify(record, context.http.headers, context.trusted, *names, context.tenant)
        level, flow, max_wait_s = record.level, record.flow, record.max_wait_s
        head.standing_for = names
        head.standing = level, flow, max_wait_s, record.weight, record.slo, record.unknown_objective
    assert level is not None
    assert flow is not None
    assert max_wait_s is not None
    record.band = context.rules.band_names.get(level, str(level))
    record.adapter, record.stream = target.adapter, parsed.stream
    prompt_tokens, output_tokens = estimator.tokens(target.model, parsed)
    computes = context.route.computes
    if context.route.work is not Work.GENERATES:
        prompt_tokens, output_tokens = prompt_tokens if computes else 1, 0
    prefix: tuple[int, ...] = ()
    prefix_tokens = 0.0
    if parsed.chain is not None and computes:
        as_ids = parsed.prompt_tokens is not None
        token_bytes = ID_BYTES if as_ids else estimator.bytes_per_token(target.model)
        prefix = parsed.chain.hashes_on(target.model, target.adapter)
        prefix_tokens = BLOCK_BYTES / token_bytes
    return Request(
        id=request_id,
        pool=target.pool,
        model=target.model,
        adapter=target.adapter,
        band=level,
        flow=flow,
        arrived_s=record.arrived_s,
        # The maximum wait counts from now: the body has been read, or the stream has broken.
        deadline_s=asyncio.get_running_loop().time() + max_wait_s,
        body_bytes=record.body_bytes,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=parsed.max_tokens,
        sequences=parsed.sequences,
        stream=parsed.stream,
        tenant=context.tenant.name,
        weight=record.weight,
        slo=record.slo,
        limits=identity.usage_limits(context.tenant.name, target.requested, target.model),
        label=record.request_id,
        prefix=prefix,
        prefix_tokens=prefix_tokens,
        session=context.session,
        splittable=parsed.splittable and context.previous is None,
        prepared=parsed.prepared or not computes,
        backend=context.previous.backend if context.previous is not None else None,
        # Token ids have a meaning for one model only.
        overflows=bool(context.rules.externals) and context.route.path in EXTERNAL and parsed.prompt_tokens is None,
    )
