"""Builds the call to the backend of a lease: the whole request, or its prefill or decode stage."""

from __future__ import annotations

import asyncio
from math import inf

import structlog
from msgspec import structs

from llmproxy.config import BackendConfig
from llmproxy.core.domain import RequestFacts, Stage, Usage
from llmproxy.core.estimates.tokens import TURNS_MAX, Estimator, usage_max
from llmproxy.gateway.http.routes import BodyKind, Dialect, Work
from llmproxy.gateway.proxying.call import Call
from llmproxy.gateway.proxying.request_context import RequestContext
from llmproxy.gateway.proxying.split.stages import OPENING_EVENTS, Handover, prefill_limit_s
from llmproxy.gateway.request.body_reader import SEQUENCES_MAX
from llmproxy.gateway.request.parsed_body import ParsedBody
from llmproxy.scheduling.attempt import Attempt
from llmproxy.scheduling.lease import Lease

UNKNOWN_SHAPES = frozenset({BodyKind.OTHER, BodyKind.FORM})
"""The kinds of bodies whose answers the proxy cannot bound.

A limit may be nested in the body, or an audio file has an unknown length.
"""

REFUSED_S = 3600.0
"""For how long a backend is not asked for usage after it refused the option.

An upgrade may make it accept the option.
"""
BACKENDS_MAX = 10_000  # The number of backends whose refusal is remembered.

_log = structlog.get_logger()


class UsageQuestions:
    """Decides whether the proxy asks a backend for the usage of a stream whose client did not ask for it."""

    def __init__(self) -> None:
        self._refused_until_s: dict[str, float] = {}

    def should_ask(self, backend: BackendConfig, now: float) -> bool:
        """Returns whether to ask for usage. `now` is the time of the event loop in seconds."""
        return backend.ask_usage and now >= self._refused_until_s.get(backend.url, 0.0)

    def record_refusal(self, backend: BackendConfig, now: float) -> None:
        """Notes that `backend` refused a request because of its `stream_options`.

        For the next REFUSED_S seconds, `should_ask` is False for this backend.
        """
        if len(self._refused_until_s) >= BACKENDS_MAX:
            self._refused_until_s.clear()
        self._refused_until_s[backend.url] = now + REFUSED_S
        _log.warning("usage_refused", backend=backend.name, again_s=REFUSED_S)


def call_for(
    context: RequestContext,
    parsed: ParsedBody,
    lease: Lease,
    backend: BackendConfig,
    engine_id: str,
    attempt: Attempt,
    handover: Handover | None,
    ask_usage: bool = True,
) -> Call:
    """Returns the call to `backend` for a lease, with `engine_id` as the request id for the engine.

    `handover` is the result of the prefill stage for a decode stage; None for any other call. `ask_usage`: whether the
    backend is asked for the usage of a stream whose client did not ask for it.
    """
    http, rules, route = context.http, context.rules, context.route
    request = lease.grant.request
    prefill, decode = request.stage is Stage.PREFILL, request.stage is Stage.DECODE
    transfer = handover.parameters.value if handover is not None else None
    external, model = bool(backend.external.models), request.adapter or request.model
    # In vLLM, a lower priority value is served first.
    priority = -request.band if backend.forward_priority else None
    spliced = parsed.spliced(
        model=backend.external.models.get(model, model),
        want_usage=ask_usage,
        priority=priority,
        # Servers other than vLLM may refuse `cache_salt`.
        salt=None if external else context.salt,
        trusted=context.trusted,
        transfer=rules.connector.asks if prefill else transfer,
        prompt_alone=prefill,
    )
    head, trace = context.head, context.record.trace
    rest_of = None if context.continuation is None else context.continuation.rest_of
    return Call(
        route.method,
        head.path_qs.partition("?")[0] if external else head.path_qs,
        rules.identity.backend_headers(
            http, engine_id, backend, context.trusted, trace, attempt.span_id or "", head.forwarded
        ),
        spliced.parts,
        spliced.hides_usage,
        route.dialect,
        _usage_max(context, external),
        request.stage,
        rules.connector if prefill else None,
        OPENING_EVENTS.get(route.kind, 0) if decode else 0,
        rules.connector.frees_refused and (prefill or handover is not None),
        rules.identity.sends_own_key(backend),
        request.adapter in (None, request.model),
        holds=not prefill and route.kind in (rules.continues if request.stream else rules.repeats),
        external=external,
        rest_of=rest_of,
        deadlines=rules.relay.deadlines,
        timeouts=rules.config.timeouts,
        now=asyncio.get_running_loop().time,
        stream=request.stream,
        first_byte_s=prefill_limit_s(lease.grant) if prefill else inf,
        end_s=inf if rest_of is None else rest_of.end_s,
    )


def _usage_max(context: RequestContext, external: bool) -> Usage | None:
    """Returns the upper bound for the usage of the answer; None for a route that computes nothing.

    The context length of the replicas does not bound an external model, which may have a longer context.
    """
    if not context.route.computes or context.parsed is None or context.target is None:
        return None
    facts: RequestFacts = context.parsed
    sequences = context.parsed.sequences_asked
    if context.route.dialect is Dialect.RESPONSES:
        sequences = TURNS_MAX
    elif context.route.kind in UNKNOWN_SHAPES:
        facts, sequences = structs.replace(facts, max_tokens=None), max(SEQUENCES_MAX, sequences)
    most = usage_max(facts, None if external else context.target.context_tokens, sequences)
    return most if context.route.work is Work.GENERATES else Usage(most.prompt_tokens, sequences)


def learn_usage(context: RequestContext, usage: Usage, estimator: Estimator) -> None:
    """Improves the token estimates by the usage that the engine reported for a complete answer."""
    assert context.request is not None
    assert context.parsed is not None
    parsed = context.parsed
    prompt_bytes = parsed.prompt_bytes if parsed.prompt_tokens is None else None
    known = context.route.work is Work.GENERATES and context.route.kind not in UNKNOWN_SHAPES
    # The number of sequences in the usage of other bodies is unknown, and the rest of a stream shows no whole answer.
    sequences = parsed.sequences_asked if known and context.record.continued is None else None
    estimator.learn(context.request.model, prompt_bytes, sequences, usage)
