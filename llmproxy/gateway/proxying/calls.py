"""What is sent to the backend of a lease: the whole request, or one of the two stages of it."""

from __future__ import annotations

from msgspec import structs

from llmproxy.config import BackendConfig
from llmproxy.core.domain import Stage, Usage
from llmproxy.core.estimates.tokens import TURNS_MAX, usage_max
from llmproxy.gateway.http.routes import BodyKind, Dialect, Work
from llmproxy.gateway.proxying.attempt import Call
from llmproxy.gateway.proxying.request_context import ReceivedRequest
from llmproxy.gateway.proxying.stages import OPENING_EVENTS, Handover
from llmproxy.gateway.request.body_reader import SEQUENCES_MAX
from llmproxy.gateway.request.parsed_body import ParsedBody
from llmproxy.lease import Lease

UNKNOWN_SHAPES = frozenset({BodyKind.OTHER, BodyKind.FORM})
"""Bodies that are understood in part: how much they ask for may be deeper in them, or the length of a sound."""


def call_for(
    received: ReceivedRequest,
    parsed: ParsedBody,
    lease: Lease,
    backend: BackendConfig,
    engine_id: str,
    span_id: str,
    handover: Handover | None,
) -> Call:
    """The call to `backend`, with `engine_id` as its request id. `handover` is what the first stage left for the second
    one, None for any other."""
    http, rules, route = received.http, received.rules, received.route
    request = lease.grant.request
    prefill, decode = request.stage is Stage.PREFILL, request.stage is Stage.DECODE
    transfer = handover.parameters.value if handover is not None else None
    # In the engine's own priority, lower comes first.
    priority = -request.band if backend.forward_priority else None
    spliced = parsed.spliced(
        model=request.model,
        want_usage=True,
        priority=priority,
        salt=received.salt,
        trusted=received.trusted,
        transfer=rules.connector.asks if prefill else transfer,
        prompt_alone=prefill,
    )
    query = http.rel_url.raw_query_string
    return Call(
        route.method,
        f"{route.path}?{query}" if query else route.path,
        rules.identity.to_backend(http, engine_id, backend, received.trusted, received.trace, span_id),
        spliced.parts,
        request.stream,
        spliced.hides_usage,
        route.dialect,
        _usage_max(received),
        request.stage,
        rules.connector if prefill else None,
        OPENING_EVENTS.get(route.kind, 0) if decode else 0,
        rules.connector.frees_refused and (prefill or handover is not None),
    )


def _usage_max(received: ReceivedRequest) -> Usage | None:
    """The most that an answer may cost; None where nothing is computed."""
    if not received.route.computes or received.parsed is None or received.target is None:
        return None
    facts, sequences = received.parsed.facts, received.parsed.sequences
    if received.route.dialect is Dialect.RESPONSES:
        sequences = TURNS_MAX
    elif received.route.kind in UNKNOWN_SHAPES:
        facts, sequences = structs.replace(facts, max_tokens=None), max(SEQUENCES_MAX, sequences)
    most = usage_max(facts, received.target.context_tokens, sequences)
    return most if received.route.work is Work.GENERATES else Usage(most.prompt_tokens, sequences)
