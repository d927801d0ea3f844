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
from llmproxy.core.catalogue import Target
from llmproxy.core.domain import Entry, Outcome, Refused, Request, Usage, Verdict
from llmproxy.core.estimate import TURNS_MAX, Estimator, usage_max
from llmproxy.core.retry import RETRY_WAIT_MIN_S, RetryBudget
from llmproxy.dispatcher import Lease, Leasing
from llmproxy.gateway.answers import Answers
from llmproxy.gateway.attempt import Attempt, Call
from llmproxy.gateway.body import Bodies, BodyKind, HeldBody
from llmproxy.gateway.client_leg import ClientLeg, read_body
from llmproxy.gateway.desk import SEQUENCES_MAX, Sheet
from llmproxy.gateway.errors import INTERNAL_MESSAGE, Failure
from llmproxy.gateway.headers import check as check_fields
from llmproxy.gateway.identity import request_id
from llmproxy.gateway.prompt import BLOCK_BYTES, ID_BYTES, SALT
from llmproxy.gateway.relay import end_broken, end_within
from llmproxy.gateway.routes import SALTED, Dialect, Route, Work
from llmproxy.gateway.rules import Rulebook
from llmproxy.gateway.scan import BadBody
from llmproxy.gateway.stored import StoredResponses
from llmproxy.gateway.story import Walk
from llmproxy.telemetry.decisions import DecisionLog
from llmproxy.telemetry.exit import ExitSink
from llmproxy.telemetry.logs import log_exit, log_internal

_UNKNOWN_SHAPES = frozenset({BodyKind.OTHER, BodyKind.FORM})
"""Bodies not all of which are understood: how much they ask for may lie deeper, or in the length of a sound."""


class Walker:
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
        self.bodies, self._processes = Bodies(), config.workers
        self.reconfigure(config)
        self._ids, self._serial = ids, count(1)
        self.leaving = self.replaced = False
        self._cutting = False
        self.walking = 0
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

    def leave(self, *, replaced: bool = False) -> None:
        """The proxy is about to end: answers ask their clients to close the connection from now on.

        `replaced` says that another one serves under the same address.
        """
        self.leaving, self.replaced = True, replaced

    def _leaves(self) -> bool:
        return self.leaving

    def cut(self) -> None:
        """Whatever is still here is cut off now, and not left by its client."""
        self._cutting = True

    def came(self) -> None:
        """One request more is here for which the end of the proxy has to wait."""
        self.walking += 1
        self.idle.clear()

    def went(self) -> None:
        """One of them has ended."""
        self.walking -= 1
        if not self.walking:
            self.idle.set()

    def why_left(self, left: BaseException) -> tuple[Outcome, int, str]:
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
        client = ClientLeg(http, extra, self._leaves, rules.cors)
        walk = Walk(
            rules, route, http, client, extra, now, urandom(16).hex(), HeldBody(self.bodies)
        )  # fmt: skip
        self.came()
        try:
            await self._walk(walk)
        except Failure as failure:
            return self._fail(walk, failure)
        except Refused as refused:
            return self._fail(walk, Failure.of(refused))
        except BadBody as bad:
            return self._fail(walk, Failure(Outcome.BAD_REQUEST, bad.message, status=bad.status, param=bad.param))
        except (asyncio.CancelledError, ConnectionError, web.RequestPayloadError) as left:
            self._left(walk, left)
            raise
        except Exception as error:  # noqa: BLE001 - the last wall: a bug becomes one 500 and a full story in the log
            log_internal(walk.id, error)
            failed = self._fail(walk, Failure(Outcome.INTERNAL, INTERNAL_MESSAGE))
            if walk.client.response is None:
                return failed
            # An answer has begun; another one in the middle of it would pass for a part of it.
            await walk.client.abort()
        finally:
            walk.held.release()
            self.went()
            self._exit(walk)
        assert walk.client.response is not None
        return walk.client.response

    # --- the way in --------------------------------------------------------------------------------------------------

    async def _walk(self, walk: Walk) -> None:
        http = walk.http
        walk.id = request_id(http.headers) or walk.id
        walk.extra["x-request-id"] = walk.id
        check_fields(http.headers.items())
        walk.tenant = walk.rules.keys.check(http.headers)
        if self._dispatcher.draining:
            raise Failure(Outcome.DRAINING, "The proxy is shutting down. Try again.", retry_after_s=1.0)
        if http.headers.get("content-encoding", "identity").lower() != "identity":
            message = "Request bodies must not be compressed: send this one without Content-Encoding."
            accepted = {"Accept-Encoding": "identity"}
            raise Failure(Outcome.BAD_REQUEST, message, status=415, param="content-encoding", headers=accepted)
        body = await read_body(http, walk.rules.config.body_bytes_max, walk.rules.config.clients, walk.held)
        walk.body_bytes = len(body)
        sheet = walk.sheet = await walk.rules.read(walk.route, http, body)
        sheet = await self._kept_apart(walk, sheet)
        target = walk.target = await self._target(walk, sheet.ask.model)
        self.budget.request()
        if self._answers is not None and walk.route.computes:
            walk.kept = self._answers.keep(sheet)
            walk.client.keep = walk.kept.add if walk.kept is not None else None
        await self._attempts(walk, sheet, self._make_request(walk, sheet, target))

    async def _kept_apart(self, walk: Walk, sheet: Sheet) -> Sheet:
        """Keep a tenant from what others left in the engines: their prefixes, and their responses. Raises Failure."""
        if walk.route.dialect is Dialect.RESPONSES:
            walk.previous = await self._stored.previous(sheet.kept, walk.tenant, walk.rules)
        if walk.tenant.salt is None or walk.route.path not in SALTED:
            return sheet
        walk.salt = walk.tenant.cache_salt(sheet.text(SALT))
        chain = None if sheet.chain is None else replace(sheet.chain, salt=walk.salt)
        sheet = walk.sheet = replace(sheet, chain=chain)
        return sheet

    async def _target(self, walk: Walk, asked: str | None) -> Target:
        """What the name that was asked for means, in words that tell a tenant of no models but its own.

        While replicas start, nobody knows yet what they serve: such a request is held too.
        """
        tenant = walk.tenant
        try:
            if asked is None or tenant.allows(asked):
                hold_s = min(walk.rules.config.queue.hold_s, walk.rules.identity.ttl_s(walk.http.headers))
                target = await self._dispatcher.resolve(asked, hold_s, walk.body_bytes)
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

    def _make_request(self, walk: Walk, sheet: Sheet, target: Target) -> Request:
        http, ask = walk.http, sheet.ask
        trusted = walk.rules.identity.trusts(http.remote, walk.tenant)
        standing = walk.rules.identity.standing(http.headers, trusted, target.requested, target.model, walk.tenant)
        walk.ttl_s, walk.unknown_objective = standing.ttl_s, standing.unknown_objective
        prompt_tokens, output_tokens = self._estimator.tokens(target.model, ask)
        if walk.route.work is not Work.GENERATES:
            prompt_tokens, output_tokens = prompt_tokens if walk.route.computes else 1, 0
        prefix, prefix_tokens = self._prefix(walk, sheet, target)
        return Request(
            id=f"{self._ids}{next(self._serial)}",
            pool=target.pool,
            model=target.model,
            adapter=target.adapter,
            band=standing.band,
            flow=standing.flow,
            arrived_s=walk.arrived_s,
            # The time to wait begins when the body has arrived and was read.
            deadline_s=asyncio.get_running_loop().time() + standing.ttl_s,
            body_bytes=walk.body_bytes,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            max_tokens=ask.max_tokens,
            sequences=ask.sequences,
            stream=ask.stream,
            tenant=standing.tenant,
            weight=standing.weight,
            slo=standing.slo,
            limits=standing.limits,
            label=walk.id,
            prefix=prefix,
            prefix_tokens=prefix_tokens,
            session=walk.rules.identity.session(http, sheet.sessions, walk.tenant),
            backend=walk.previous.backend if walk.previous is not None else None,
        )

    def _prefix(self, walk: Walk, sheet: Sheet, target: Target) -> tuple[tuple[int, ...], float]:
        """The hashes of the prompt's blocks, and about how many tokens each of them has."""
        if sheet.chain is None or not walk.route.computes:
            return (), 0.0
        as_ids = sheet.ask.prompt_tokens is not None
        token_bytes = ID_BYTES if as_ids else self._estimator.bytes_per_token(target.model)
        return sheet.chain.hashes_on(target.model, target.adapter), BLOCK_BYTES / token_bytes

    # --- the waiting room and the corridor, as often as it takes -----------------------------------------------------

    async def _attempts(self, walk: Walk, sheet: Sheet, request: Request) -> None:
        entry, left_s = Entry.NEW, walk.ttl_s
        while True:
            try:
                now = asyncio.get_running_loop().time()
                if entry is not Entry.NEW:
                    # The time to wait counts while waiting: not while a backend works, nor while the request is held
                    # because there is none.
                    request = structs.replace(request, deadline_s=now + max(left_s, RETRY_WAIT_MIN_S))
                walk.request = request
                walk.waits_since_s = now
                async with self._dispatcher.admit(request, frozenset(walk.excluded), entry) as lease:
                    walk.waited_s += lease.grant.at_s - now
                    left_s = lease.grant.left_s
                    walk.waits_since_s = None
                    attempt = await self._attempt(walk, sheet, lease)
            except Refused as refused:
                if walk.previous is not None and refused.outcome is Outcome.BAD_REQUEST:
                    raise walk.previous.unreachable(refused) from None
                # A retry that finds nobody else tells the client what went wrong first, not that nobody is left.
                if walk.attempt is None or walk.attempt.outcome is Outcome.INTERNAL:
                    raise
                await self._deliver_failure(walk, walk.attempt)
                return
            if attempt.committed:
                self._settle(walk, request, attempt)
                if attempt.outcome is Outcome.BROKEN_STREAM:
                    await end_broken(attempt, walk.route.dialect, walk.client)
                return
            if attempt.verdict is Verdict.WITHDRAWN:
                walk.withdrawals += 1
                entry = Entry.WITHDRAWN
                continue
            if not self._retries(walk, attempt):
                await self._deliver_failure(walk, attempt)
                return
            entry = Entry.SEEKING if walk.previous is not None and walk.previous.sought(attempt) else Entry.RETRY
            # A busy backend is full, not broken: it may well be the first to have room again.
            if attempt.verdict is not Verdict.BUSY and request.backend is None:
                walk.excluded.add(lease.backend)

    async def _attempt(self, walk: Walk, sheet: Sheet, lease: Lease) -> Attempt:
        walk.attempts += 1
        walk.lease = lease
        walk.granted_s = lease.grant.at_s
        backend = self._backends[lease.backend]
        if walk.rules.identity.shows_backend(walk.http.remote, walk.tenant):
            walk.extra["x-llmproxy-backend"] = backend.name
        walk.extra["x-llmproxy-queue-ms"] = f"{walk.waited_s * 1e3:.1f}"
        walk.extra["x-llmproxy-attempts"] = str(walk.attempts)
        request = lease.grant.request
        # The engine's own priority is lower first.
        priority = -request.band if backend.forward_priority else None
        trusted = walk.rules.identity.trusts(walk.http.remote, walk.tenant)
        spliced = sheet.spliced(
            model=request.model, want_usage=True, priority=priority, salt=walk.salt, trusted=trusted
        )
        headers = walk.rules.identity.to_backend(walk.http, walk.id, backend, walk.tenant)
        call = Call(
            walk.route.method,
            self._path_qs(walk),
            headers,
            spliced.parts,
            request.stream,
            spliced.hides_usage,
            walk.route.dialect,
            _usage_max(walk),
        )
        # Assigned before it runs, so that the story of a request cut off in mid-stream has its numbers.
        attempt = walk.attempt = Attempt()
        if walk.route.dialect is Dialect.RESPONSES:
            # The walk itself must not be named there: it has this client, and both would stay, body and all, for the
            # collector to find.
            walk.client.on_commit = self._stored.noting(attempt, backend.name, walk.tenant, walk.previous, sheet)
        try:
            await walk.rules.relay.attempt(attempt, lease, backend.url, call, walk.client)
        finally:
            # Its client may have left, as many do at the sight of the end mark.
            self._metrics.attempted(lease.backend, attempt.verdict)
        if attempt.status == 401 and not walk.rules.config.forward_credentials:
            attempt.detail = walk.rules.identity.key_hint(backend)
        return attempt

    def _retries(self, walk: Walk, attempt: Attempt) -> bool:
        if walk.previous is not None and walk.previous.sought(attempt):
            return self._dispatcher.granting
        return (
            attempt.retryable
            and walk.attempts - walk.withdrawals <= walk.rules.config.retry.extra_attempts
            and self._dispatcher.granting
            and self.budget.take(attempt.verdict)
        )

    async def _deliver_failure(self, walk: Walk, attempt: Attempt) -> None:
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
        walk.client.commit(answer.status, answer.reason, headers)
        walk.client.write(answer.body)
        await end_within(walk.client, walk.rules.config.timeouts.stall_s)
        walk.outcome, walk.status, walk.error = attempt.outcome, answer.status, attempt.message

    def _path_qs(self, walk: Walk) -> str:
        query = walk.http.rel_url.raw_query_string
        return f"{walk.route.path}?{query}" if query else walk.route.path

    def _left(self, walk: Walk, left: BaseException) -> None:
        attempt = walk.attempt
        if attempt is not None and attempt.outcome is Outcome.COMPLETED and walk.request is not None:
            self._settle(walk, walk.request, attempt)
            return
        if walk.outcome is Outcome.BROKEN_STREAM:
            # It left at the sight of its error event.
            return
        walk.outcome, walk.status, walk.error = self.why_left(left)
        if walk.outcome is Outcome.DRAINING and walk.client.status:
            walk.status = walk.client.status

    # --- the way out -------------------------------------------------------------------------------------------------

    def _settle(self, walk: Walk, request: Request, attempt: Attempt) -> None:
        """An answer went to the client: what became of it is what becomes of the request."""
        walk.outcome, walk.status, walk.error = attempt.outcome, walk.client.status, attempt.message
        assert walk.sheet is not None
        ask = walk.sheet.ask
        if attempt.outcome is Outcome.COMPLETED and attempt.usage is not None:
            prompt_bytes = ask.prompt_bytes if ask.prompt_tokens is None else None
            known = walk.route.work is Work.GENERATES and walk.route.kind not in _UNKNOWN_SHAPES
            # Of how many answers a usage of the others is the sum, nobody here knows.
            sequences = walk.sheet.sequences if known else None
            self._estimator.learn(request.model, prompt_bytes, sequences, attempt.usage)

    def _fail(self, walk: Walk, failure: Failure) -> web.Response:
        walk.outcome, walk.status, walk.error = failure.outcome, failure.status, failure.message
        return failure.response(walk.route.dialect, {"x-request-id": walk.id, **walk.extra})

    def _exit(self, walk: Walk) -> None:
        ended = walk.told(asyncio.get_running_loop().time(), walk.rules.band_names)
        if walk.request is not None:
            self._dispatcher.ended(walk.request, ended.met)
        # What is held is given back first: telling may fail.
        if self._answers is not None and walk.kept is not None:
            lease = walk.lease if walk.outcome is Outcome.COMPLETED else None
            self._answers.ended(walk.kept, lease.grant if lease is not None else None)
        self._metrics.record(ended)
        log_exit(ended)
        if self._decisions is not None:
            self._decisions.record(ended)


def _usage_max(walk: Walk) -> Usage | None:
    if not walk.route.computes or walk.sheet is None or walk.target is None:
        return None
    ask, sequences = walk.sheet.ask, walk.sheet.sequences
    if walk.route.dialect is Dialect.RESPONSES:
        sequences = TURNS_MAX
    elif walk.route.kind in _UNKNOWN_SHAPES:
        ask, sequences = structs.replace(ask, max_tokens=None), max(SEQUENCES_MAX, sequences)
    most = usage_max(ask, walk.target.context_tokens, sequences)
    return most if walk.route.work is Work.GENERATES else Usage(most.prompt_tokens, sequences)
