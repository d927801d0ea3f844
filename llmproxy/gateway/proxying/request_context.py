"""What is known of one request on its way through the house, and what is told of it at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Outcome, Request, Usage
from llmproxy.dispatcher import Lease
from llmproxy.gateway.http.routes import Route
from llmproxy.gateway.proxying.answers import KeptAnswer
from llmproxy.gateway.proxying.attempt import Attempt
from llmproxy.gateway.proxying.response_writer import ResponseWriter
from llmproxy.gateway.proxying.rules import Rules
from llmproxy.gateway.proxying.stored import Previous
from llmproxy.gateway.request.auth import NO_TENANT, Tenant
from llmproxy.gateway.request.body_budget import HeldBody
from llmproxy.gateway.request.parsed_body import ParsedBody
from llmproxy.telemetry.exit import UNKNOWN_MODEL, RequestExit

ERROR_CHARS_MAX = 2_000
"""Of what a record tells of an error, which may quote a client: a line that is longer than a pipe takes at once (4 KB)
may be torn by those of other processes, and its rest could pass for a line."""
_BEGINNING_CHARS = 160

_CLIENTS_DOING = frozenset({Outcome.CANCELLED, Outcome.BAD_REQUEST, Outcome.RATE_LIMITED})


@dataclass(slots=True)
class RequestContext:
    """What is known of one request so far; its last state is what the log and the metrics tell."""

    rules: Rules
    route: Route
    http: web.BaseRequest
    client: ResponseWriter
    extra: dict[str, str]
    arrived_s: float
    id: str
    held: HeldBody
    outcome: Outcome = Outcome.INTERNAL
    status: int = 0
    error: str = ""
    tenant: Tenant = NO_TENANT
    unknown_objective: str | None = None
    target: Target | None = None
    request: Request | None = None
    parsed: ParsedBody | None = None
    salt: str | None = None
    body_bytes: int = 0
    ttl_s: float = 0.0
    waited_s: float = 0.0
    waits_since_s: float | None = None
    attempts: int = 0
    preemptions: int = 0
    granted_s: float | None = None
    lease: Lease | None = None
    attempt: Attempt | None = None
    kept: KeptAnswer | None = None
    excluded: set[str] = field(default_factory=set)
    previous: Previous | None = None

    def told(self, now: float, band_names: Mapping[int, str]) -> RequestExit:
        """What the log, the metrics and the decision log are told of a walk that ends at `now`."""
        request, attempt, lease = self.request, self.attempt, self.lease
        usage = attempt.usage if attempt is not None else None
        placed = lease.grant.placed if lease is not None else None
        expected_cached_tokens = None
        if placed is not None and request is not None and (request.prefix or placed.ttft is not None):
            expected_cached_tokens = placed.cached_tokens
        predicted_tpot = placed.tpot if placed is not None else None
        if request is not None and request.sequences > 1:
            # Their tokens come mixed: nobody sees the pace of one.
            predicted_tpot = None
        waited_s = now - self.arrived_s
        if self.granted_s is not None:
            waited_s = self.waited_s + (0.0 if self.waits_since_s is None else now - self.waits_since_s)
        ttft_s = None
        if attempt is not None and attempt.first_token_s is not None:
            ttft_s = attempt.first_token_s - self.arrived_s
        return RequestExit(
            request_id=self.id,
            method=self.http.method,
            path=self.route.path,
            outcome=self.outcome,
            status=self.status,
            duration_s=now - self.arrived_s,
            model=self.target.requested if self.target is not None else UNKNOWN_MODEL,
            target=self.target.model if self.target is not None else None,
            adapter=request.adapter if request is not None else None,
            tenant=self.tenant.name,
            band=band_names.get(request.band, str(request.band)) if request is not None else None,
            level=request.band if request is not None else None,
            flow=request.flow if request is not None else None,
            ttl_s=self.ttl_s if request is not None else None,
            slo=request.slo if request is not None else None,
            met=self._met(ttft_s, usage),
            unknown_objective=self.unknown_objective,
            stream=request.stream if request is not None else False,
            backend=lease.backend if lease is not None else None,
            attempts=self.attempts,
            preemptions=self.preemptions,
            why=lease.grant.why if lease is not None else None,
            candidates=placed.candidates if placed is not None else None,
            terms=placed.terms if placed is not None else (),
            predicted_ttft=placed.ttft if placed is not None else None,
            predicted_tpot=predicted_tpot,
            arrived_s=self.arrived_s,
            granted_s=self.granted_s,
            queued_ahead=lease.grant.queued_ahead if lease is not None else None,
            queue_wait_s=waited_s if request is not None else None,
            ttft_s=ttft_s,
            max_gap_s=attempt.max_gap_s if attempt is not None and ttft_s is not None else None,
            expected_prompt_tokens=request.prompt_tokens if request is not None else None,
            expected_cached_tokens=expected_cached_tokens,
            prompt_tokens=usage.prompt_tokens if usage is not None else None,
            cached_tokens=usage.cached_tokens if usage is not None else None,
            output_tokens=usage.output_tokens if usage is not None else None,
            body_bytes=self.body_bytes,
            response_bytes=self.client.sent_bytes,
            chunks=attempt.chunks if attempt is not None else 0,
            error=_told(" ".join(filter(None, (self.error, attempt.detail if attempt is not None else "")))),
        )

    def _met(self, ttft_s: float | None, usage: Usage | None) -> bool | None:
        """Whether the request kept its objective; None where it has none, or where its client is why it did not.

        A used-up rate is its tenant's doing: as a miss it would put those first who send more than they may.
        """
        request, attempt = self.request, self.attempt
        if request is None or request.slo is None or self.outcome in _CLIENTS_DOING or 400 <= self.status < 429:
            return None
        slo = request.slo
        if self.outcome is not Outcome.COMPLETED or attempt is None:
            return False
        if not request.stream:
            # Nobody saw its first token. That it was granted in time is all that can be known.
            return self.granted_s is not None and slo.met(self.granted_s - self.arrived_s, None)
        tpot_s = None
        if usage is not None and usage.output_tokens > 1 and attempt.first_token_s is not None:
            tpot_s = (attempt.last_byte_s - attempt.first_token_s) / (usage.output_tokens - 1)
        return slo.met(ttft_s, tpot_s)


def _told(error: str) -> str | None:
    # As JSON, which makes up to twelve characters of one.
    if len(error) > _BEGINNING_CHARS and len(json.dumps(error)) > ERROR_CHARS_MAX:
        return f"{error[:_BEGINNING_CHARS]}... ({len(error)} characters)"
    return error or None
