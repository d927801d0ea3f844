"""The walk of one request: front door, reading desk, waiting room, corridor, exit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from math import ceil
from os import urandom

from aiohttp import web
from msgspec import structs

from llmproxy.config import BackendConfig, Config
from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Entry, Outcome, Refused, Request, Usage, Verdict
from llmproxy.core.estimates.tokens import TURNS_MAX, Estimator, usage_max
from llmproxy.core.retry import RETRY_WAIT_MIN_S, RetryBudget
from llmproxy.dispatcher import Lease, Leasing
from llmproxy.gateway.http.errors import INTERNAL_MESSAGE, Failure
from llmproxy.gateway.http.headers import check as check_fields
from llmproxy.gateway.http.routes import SALTED, BodyKind, Dialect, Route, Work
from llmproxy.gateway.proxying.answers import Answers
from llmproxy.gateway.proxying.attempt import Attempt, Call
from llmproxy.gateway.proxying.relay import end_broken, end_within
from llmproxy.gateway.proxying.request_context import RequestContext
from llmproxy.gateway.proxying.response_writer import ResponseWriter, read_body
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.gateway.proxying.stored import StoredResponses
from llmproxy.gateway.request.body_budget import BodyBudget, HeldBody
from llmproxy.gateway.request.body_reader import SEQUENCES_MAX
from llmproxy.gateway.request.identity import request_id
from llmproxy.gateway.request.json_scan import BadBody
from llmproxy.gateway.request.parsed_body import ParsedBody
from llmproxy.gateway.request.prefix_hash import BLOCK_BYTES, ID_BYTES, SALT
from llmproxy.telemetry.decisions import DecisionLog
from llmproxy.telemetry.exit import ExitSink
from llmproxy.telemetry.logs import log_exit, log_internal

_UNKNOWN_SHAPES = frozenset({BodyKind.OTHER, BodyKind.FORM})
"""Bodies not all of which are understood: how much they ask for may lie deeper, or in the length of a sound."""


class RequestHandler:
    """Takes requests of scheduled routes through the house. Every one of them ends in exactly one outcome.

    `ids` begins the scheduler's ids of its requests, to be told from those of other walkers.
    """

    def __init__(
        self,
        rulebook: Rulebook,
        backends: Mapping[str, BackendConfig],
        estimator: Estimator,
        dispatcher: Leasing,
        stored: StoredResponses,
        answers: Answers | None,
        metrics: ExitSink,
        decisions: DecisionLog | None,
        ids: str = "",
    ) -> None:
        self._rulebook = rulebook
        self._backends = backends
        self._estimator = estimator
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._decisions = decisions
        self._stored = stored
        self._answers = answers
        config = rulebook.current.config
        self.budget = RetryBudget(config.retry.budget_ratio)
        self.bodies, self._processes = BodyBudget(), config.workers
        self.reconfigure(config)
        self._ids, self._serial = ids, count(1)
        self.shutting_down = self.replaced = False
        self._cutting = False
        self.open_requests = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def reconfigure(self, config: Config) -> None:
        """Go by another configuration; what every request takes from the rulebook is not meant."""
        self.budget.ratio = config.retry.budget_ratio
        # Each worker has a part of what one process may hold.
        self.bodies.limit(ceil(config.body_bytes_total_max / self._processes), config.body_bytes_max)

    @property
    def kept_bytes(self) -> int:
        """Bytes of answers that are kept until they can be read."""
        return self._answers.kept_bytes if self._answers is not None else 0

    def begin_shutdown(self, *, replaced: bool = False) -> None:
        """The proxy is about to end: answers ask their clients to close the connection from now on.

        `replaced` says that another one serves under the same address.
        """
        self.shutting_down, self.replaced = True, replaced

    def _leaves(self) -> bool:
        return self.shutting_down

    def cut(self) -> None:
        """Whatever is still here is cut off now, and not left by its client."""
        self._cutting = True

    def begin_request(self) -> None:
        """One request more is here for which the end of the proxy has to wait."""
        self.open_requests += 1
        self.idle.clear()

    def end_request(self) -> None:
        """One of them has ended."""
        self.open_requests -= 1
        if not self.open_requests:
            self.idle.set()

    def cancellation(self, left: BaseException) -> tuple[Outcome, int, str]:
        """The outcome, the status and the story of a request whose task was cancelled, or that lost its client."""
        if self._cutting:
            return Outcome.DRAINING, 503, "cut: the proxy ended before this request did"
        story = "the client left" if isinstance(left, asyncio.CancelledError) else f"the client left: {left}"
        return Outcome.CANCELLED, 499, story

    async def serve(self, route: Route, http: web.BaseRequest) -> web.StreamResponse:
        """Serve one request of a scheduled route, and write down how it ended."""
        extra: dict[str, str] = {}
        now = asyncio.get_running_loop().time()
        rules = self._rulebook.current
        client = ResponseWriter(http, extra, self._leaves, rules.cors)
        context = RequestContext(
            rules, route, http, client, extra, now, urandom(16).hex(), HeldBody(self.bodies)
        )  # fmt: skip
        self.begin_request()
        try:
            await self._walk(context)
        except Failure as failure:
            return self._fail(context, failure)
        except Refused as refused:
            return self._fail(context, Failure.of(refused))
        except BadBody as bad:
            return self._fail(context, Failure(Outcome.BAD_REQUEST, bad.message, status=bad.status, param=bad.param))
        except (asyncio.CancelledError, ConnectionError, web.RequestPayloadError) as left:
            self._left(context, left)
            raise
        except Exception as error:  # noqa: BLE001 - the last wall: a bug becomes one 500 and a full story in the log
            log_internal(context.id, error)
            failed = self._fail(context, Failure(Outcome.INTERNAL, INTERNAL_MESSAGE))
            if context.client.response is None:
                return failed
            # An answer has begun; another one in the middle of it would pass for a part of it.
            await context.client.abort()
        finally:
            context.held.release()
            self.end_request()
            self._exit(context)
        assert context.client.response is not None
        return context.client.response

    # --- the way in --------------------------------------------------------------------------------------------------

    async def _walk(self, context: RequestContext) -> None:
        http = context.http
        context.id = request_id(http.headers) or context.id
        context.extra["x-request-id"] = context.id
        check_fields(http.headers.items())
        context.tenant = context.rules.keys.check(http.headers)
        if self._dispatcher.draining:
            raise Failure(Outcome.DRAINING, "The proxy is shutting down. Try again.", retry_after_s=1.0)
        if http.headers.get("content-encoding", "identity").lower() != "identity":
            message = "Request bodies must not be compressed: send this one without Content-Encoding."
            accepted = {"Accept-Encoding": "identity"}
            raise Failure(Outcome.BAD_REQUEST, message, status=415, param="content-encoding", headers=accepted)
        body = await read_body(http, context.rules.config.body_bytes_max, context.rules.config.clients, context.held)
        context.body_bytes = len(body)
        parsed = context.parsed = await context.rules.read(context.route, http, body)
        parsed = await self._kept_apart(context, parsed)
        target = context.target = await self._target(context, parsed.facts.model)
        self.budget.request()
        if self._answers is not None and context.route.computes:
            context.kept = self._answers.keep(parsed)
            context.client.keep = context.kept.add if context.kept is not None else None
        await self._attempts(context, parsed, self._make_request(context, parsed, target))

    async def _kept_apart(self, context: RequestContext, parsed: ParsedBody) -> ParsedBody:
        """Keep a tenant from what others left in the engines: their prefixes, and their responses. Raises Failure."""
        if context.route.dialect is Dialect.RESPONSES:
            context.previous = await self._stored.previous(parsed.kept, context.tenant, context.rules)
        if context.tenant.salt is None or context.route.path not in SALTED:
            return parsed
        context.salt = context.tenant.cache_salt(parsed.text(SALT))
        chain = None if parsed.chain is None else replace(parsed.chain, salt=context.salt)
        parsed = context.parsed = replace(parsed, chain=chain)
        return parsed

    async def _target(self, context: RequestContext, asked: str | None) -> Target:
        """What the name that was asked for means, in words that tell a tenant of no models but its own.

        While replicas start, nobody knows yet what they serve: such a request is held too.
        """
        tenant = context.tenant
        try:
            if asked is None or tenant.allows(asked):
                hold_s = min(context.rules.config.queue.hold_s, context.rules.identity.ttl_s(context.http.headers))
                target = await self._dispatcher.resolve(asked, hold_s, context.body_bytes)
                if tenant.allows(target.requested):
                    return target
        except Refused as refused:
            if tenant.models is None or refused.outcome is Outcome.DRAINING:
                raise
            if refused.outcome is Outcome.REJECTED_NO_BACKENDS:
                message = "No backend is known yet that serves this. Try again shortly."
                raise Refused(refused.outcome, message, refused.retry_after_s) from None
        if asked is None:
            own = ", ".join(sorted(tenant.models or ())[:20])
            raise Failure(Outcome.BAD_REQUEST, f"The request names no model: set `model` to one of {own}.")
        raise Failure(Outcome.UNKNOWN_MODEL, f"The model `{asked[:200]}` does not exist.")

    def _make_request(self, context: RequestContext, parsed: ParsedBody, target: Target) -> Request:
        http, facts = context.http, parsed.facts
        trusted = context.rules.identity.trusts(http.remote, context.tenant)
        standing = context.rules.identity.classify(
            http.headers, trusted, target.requested, target.model, context.tenant
        )
        context.ttl_s, context.unknown_objective = standing.ttl_s, standing.unknown_objective
        prompt_tokens, output_tokens = self._estimator.tokens(target.model, facts)
        if context.route.work is not Work.GENERATES:
            prompt_tokens, output_tokens = prompt_tokens if context.route.computes else 1, 0
        prefix, prefix_tokens = self._prefix(context, parsed, target)
        return Request(
            id=f"{self._ids}{next(self._serial)}",
            pool=target.pool,
            model=target.model,
            adapter=target.adapter,
            band=standing.band,
            flow=standing.flow,
            arrived_s=context.arrived_s,
            # The time to wait begins when the body has arrived and was read.
            deadline_s=asyncio.get_running_loop().time() + standing.ttl_s,
            body_bytes=context.body_bytes,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            max_tokens=facts.max_tokens,
            sequences=facts.sequences,
            stream=facts.stream,
            tenant=standing.tenant,
            weight=standing.weight,
            slo=standing.slo,
            limits=standing.limits,
            label=context.id,
            prefix=prefix,
            prefix_tokens=prefix_tokens,
            session=context.rules.identity.session(http, parsed.sessions, context.tenant),
            backend=context.previous.backend if context.previous is not None else None,
        )

    def _prefix(self, context: RequestContext, parsed: ParsedBody, target: Target) -> tuple[tuple[int, ...], float]:
        """The hashes of the prompt's blocks, and about how many tokens each of them has."""
        if parsed.chain is None or not context.route.computes:
            return (), 0.0
        as_ids = parsed.facts.prompt_tokens is not None
        token_bytes = ID_BYTES if as_ids else self._estimator.bytes_per_token(target.model)
        return parsed.chain.hashes_on(target.model, target.adapter), BLOCK_BYTES / token_bytes

    # --- the waiting room and the corridor, as often as it takes -----------------------------------------------------

    async def _attempts(self, context: RequestContext, parsed: ParsedBody, request: Request) -> None:
        entry, left_s = Entry.NEW, context.ttl_s
        while True:
            try:
                now = asyncio.get_running_loop().time()
                if entry is not Entry.NEW:
                    # The time to wait counts while waiting: not while a backend works, nor while the request is held
                    # because there is none.
                    request = structs.replace(request, deadline_s=now + max(left_s, RETRY_WAIT_MIN_S))
                context.request = request
                context.waits_since_s = now
                async with self._dispatcher.admit(request, frozenset(context.excluded), entry) as lease:
                    context.waited_s += lease.grant.at_s - now
                    left_s = lease.grant.left_s
                    context.waits_since_s = None
                    attempt = await self._attempt(context, parsed, lease)
            except Refused as refused:
                if context.previous is not None and refused.outcome is Outcome.BAD_REQUEST:
                    raise context.previous.unreachable(refused) from None
                # A retry that finds nobody else tells the client what went wrong first, not that nobody is left.
                if context.attempt is None or context.attempt.outcome is Outcome.INTERNAL:
                    raise
                await self._deliver_failure(context, context.attempt)
                return
            if attempt.committed:
                self._settle(context, request, attempt)
                if attempt.outcome is Outcome.BROKEN_STREAM:
                    await end_broken(attempt, context.route.dialect, context.client)
                return
            if attempt.verdict is Verdict.PREEMPTED:
                context.preemptions += 1
                entry = Entry.PREEMPTED
                continue
            if not self._retries(context, attempt):
                await self._deliver_failure(context, attempt)
                return
            entry = Entry.SEEKING if context.previous is not None and context.previous.sought(attempt) else Entry.RETRY
            # A busy backend is full, not broken: it may well be the first to have room again.
            if attempt.verdict is not Verdict.BUSY and request.backend is None:
                context.excluded.add(lease.backend)

    async def _attempt(self, context: RequestContext, parsed: ParsedBody, lease: Lease) -> Attempt:
        context.attempts += 1
        context.lease = lease
        context.granted_s = lease.grant.at_s
        backend = self._backends[lease.backend]
        if context.rules.identity.shows_backend(context.http.remote, context.tenant):
            context.extra["x-llmproxy-backend"] = backend.name
        context.extra["x-llmproxy-queue-ms"] = f"{context.waited_s * 1e3:.1f}"
        context.extra["x-llmproxy-attempts"] = str(context.attempts)
        request = lease.grant.request
        # The engine's own priority is lower first.
        priority = -request.band if backend.forward_priority else None
        trusted = context.rules.identity.trusts(context.http.remote, context.tenant)
        spliced = parsed.spliced(
            model=request.model, want_usage=True, priority=priority, salt=context.salt, trusted=trusted
        )
        headers = context.rules.identity.to_backend(context.http, context.id, backend, context.tenant)
        call = Call(
            context.route.method,
            self._path_qs(context),
            headers,
            spliced.parts,
            request.stream,
            spliced.hides_usage,
            context.route.dialect,
            _usage_max(context),
        )
        # Assigned before it runs, so that the story of a request cut off in mid-stream has its numbers.
        attempt = context.attempt = Attempt()
        if context.route.dialect is Dialect.RESPONSES:
            # The walk itself must not be named there: it has this client, and both would stay, body and all, for the
            # collector to find.
            context.client.on_commit = self._stored.noting(
                attempt, backend.name, context.tenant, context.previous, parsed
            )
        try:
            await context.rules.relay.attempt(attempt, lease, backend.url, call, context.client)
        finally:
            # Its client may have left, as many do at the sight of the end mark.
            self._metrics.attempted(lease.backend, attempt.verdict)
        if attempt.status == 401 and not context.rules.config.forward_credentials:
            attempt.detail = context.rules.identity.key_hint(backend)
        return attempt

    def _retries(self, context: RequestContext, attempt: Attempt) -> bool:
        if context.previous is not None and context.previous.sought(attempt):
            return self._dispatcher.granting
        return (
            attempt.retryable
            and context.attempts - context.preemptions <= context.rules.config.retry.extra_attempts
            and self._dispatcher.granting
            and self.budget.take(attempt.verdict)
        )

    async def _deliver_failure(self, context: RequestContext, attempt: Attempt) -> None:
        """Pass the backend's own error on as it is, or raise the Failure that says what happened."""
        answer = attempt.answer
        if answer is None:
            if attempt.verdict is Verdict.LOCAL_FAILURE:
                raise Failure(attempt.outcome, attempt.message, status=503, retry_after_s=1.0)
            status = attempt.status if attempt.outcome is Outcome.UPSTREAM_STATUS else None
            raise Failure(attempt.outcome, attempt.message, status=status)
        headers = answer.headers
        if answer.status == 503 and not any(name.lower() == "retry-after" for name, _ in headers):
            headers = [*headers, ("Retry-After", "1")]
        context.client.commit(answer.status, answer.reason, headers)
        context.client.write(answer.body)
        await end_within(context.client, context.rules.config.timeouts.stall_s)
        context.outcome, context.status, context.error = attempt.outcome, answer.status, attempt.message

    def _path_qs(self, context: RequestContext) -> str:
        query = context.http.rel_url.raw_query_string
        return f"{context.route.path}?{query}" if query else context.route.path

    def _left(self, context: RequestContext, left: BaseException) -> None:
        attempt = context.attempt
        if attempt is not None and attempt.outcome is Outcome.COMPLETED and context.request is not None:
            self._settle(context, context.request, attempt)
            return
        if context.outcome is Outcome.BROKEN_STREAM:
            # It left at the sight of its error event.
            return
        context.outcome, context.status, context.error = self.cancellation(left)
        if context.outcome is Outcome.DRAINING and context.client.status:
            context.status = context.client.status

    # --- the way out -------------------------------------------------------------------------------------------------

    def _settle(self, context: RequestContext, request: Request, attempt: Attempt) -> None:
        """An answer went to the client: what became of it is what becomes of the request."""
        context.outcome, context.status, context.error = attempt.outcome, context.client.status, attempt.message
        assert context.parsed is not None
        facts = context.parsed.facts
        if attempt.outcome is Outcome.COMPLETED and attempt.usage is not None:
            prompt_bytes = facts.prompt_bytes if facts.prompt_tokens is None else None
            known = context.route.work is Work.GENERATES and context.route.kind not in _UNKNOWN_SHAPES
            # Of how many answers a usage of the others is the sum, nobody here knows.
            sequences = context.parsed.sequences if known else None
            self._estimator.learn(request.model, prompt_bytes, sequences, attempt.usage)

    def _fail(self, context: RequestContext, failure: Failure) -> web.Response:
        context.outcome, context.status, context.error = failure.outcome, failure.status, failure.message
        return failure.response(context.route.dialect, {"x-request-id": context.id, **context.extra})

    def _exit(self, context: RequestContext) -> None:
        ended = context.told(asyncio.get_running_loop().time(), context.rules.band_names)
        if context.request is not None:
            self._dispatcher.ended(context.request, ended.met)
        # What is held is given back first: telling may fail.
        if self._answers is not None and context.kept is not None:
            lease = context.lease if context.outcome is Outcome.COMPLETED else None
            self._answers.ended(context.kept, lease.grant if lease is not None else None)
        self._metrics.record(ended)
        log_exit(ended)
        if self._decisions is not None:
            self._decisions.record(ended)


def _usage_max(context: RequestContext) -> Usage | None:
    if not context.route.computes or context.parsed is None or context.target is None:
        return None
    facts, sequences = context.parsed.facts, context.parsed.sequences
    if context.route.dialect is Dialect.RESPONSES:
        sequences = TURNS_MAX
    elif context.route.kind in _UNKNOWN_SHAPES:
        facts, sequences = structs.replace(facts, max_tokens=None), max(SEQUENCES_MAX, sequences)
    most = usage_max(facts, context.target.context_tokens, sequences)
    return most if context.route.work is Work.GENERATES else Usage(most.prompt_tokens, sequences)
