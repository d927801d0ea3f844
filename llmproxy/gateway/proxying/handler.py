"""Serves one request: reads and schedules it, makes the attempts, and records the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from itertools import count
from math import ceil
from os import urandom

from aiohttp import web
from msgspec.structs import replace

from llmproxy.config import BackendConfig, Config
from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Outcome, Refused, Request, Stage, Verdict
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.core.overflow import attempt_cost
from llmproxy.core.retry import COMPUTED_MAX, Again, RetryBudget
from llmproxy.gateway.http.client_request import ClientRequest
from llmproxy.gateway.http.errors import INTERNAL_MESSAGE, Failure
from llmproxy.gateway.http.routes import Dialect
from llmproxy.gateway.proxying.answers import Answers
from llmproxy.gateway.proxying.calls import UsageQuestions, call_for, learn_usage
from llmproxy.gateway.proxying.continued.prepare import may_continue, prepare_rest
from llmproxy.gateway.proxying.failures import deliver_failure, fail
from llmproxy.gateway.proxying.relay import end_broken
from llmproxy.gateway.proxying.request_context import RequestContext, make_request
from llmproxy.gateway.proxying.response_writer import KeepAlive, ResponseWriter
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.gateway.proxying.split.handover import SplitServing
from llmproxy.gateway.proxying.stored import StoredResponses
from llmproxy.gateway.request.body import read_body
from llmproxy.gateway.request.body_budget import BodyBudget, BufferedBody
from llmproxy.gateway.request.head_facts import HeadFacts
from llmproxy.gateway.request.identity import REQUEST_ID_HEADER
from llmproxy.gateway.request.prefix_hash import SALT
from llmproxy.observe.exit import ExitSink, RequestExit
from llmproxy.observe.exit_batch import ExitBatch
from llmproxy.observe.logs import log_exit, log_internal, log_replaced_id
from llmproxy.observe.trace_context import Sampler, new_span_id
from llmproxy.scheduling.attempt import Attempt, AttemptState
from llmproxy.scheduling.attempts import run_attempts
from llmproxy.scheduling.lease import Lease, Leasing


class RequestHandler:
    """Serves requests of scheduled routes. Each request ends in exactly one outcome.

    `ids` is a prefix of the scheduler's request ids. It differs between the handlers of several processes.
    """

    def __init__(
        self,
        rulebook: Rulebook,
        backends: Mapping[str, BackendConfig],
        estimator: Estimator,
        dispatcher: Leasing,
        stored: StoredResponses,
        answers: Answers,
        exits: ExitSink,
        sampler: Sampler | None = None,
        ids: str = "",
    ) -> None:
        self._rulebook = rulebook
        self._backends = backends
        self._estimator = estimator
        self._dispatcher = dispatcher
        self._exits = exits
        self.log_lines = ExitBatch(log_exit)
        self._sampler = sampler
        self._stored = stored
        self._answers = answers
        self._split = SplitServing(backends)
        config = rulebook.current.config
        self.budget = RetryBudget(config.retry.budget_ratio)
        self.bodies, self._processes = BodyBudget(), config.workers
        self.reconfigure(config)
        self._ids, self._serial = ids, count(1)
        self.shutting_down = self.replaced = False
        self._cutting = False
        self.open_requests = 0
        self._open_ids: set[str] = set()
        self._replaced_id_logged = False
        self._usage = UsageQuestions()
        self._idle: asyncio.Event | None = None

    def reconfigure(self, config: Config) -> None:
        """Applies the settings that are not in the rulebook: the retry budget and the limits for request bodies."""
        self.budget.ratio = config.retry.budget_ratio
        # Each worker gets an equal part of the limit.
        self.bodies.limit(ceil(config.body_bytes_total_max / self._processes), config.body_bytes_max)

    @property
    def captured_bytes(self) -> int:
        """Bytes of all captured answers, of running streams and of answers that wait to be indexed."""
        return self._answers.captured_bytes

    def begin_shutdown(self, *, replaced: bool = False) -> None:
        """Asks clients in every answer from now on to close their connections, because the proxy is about to end.

        `replaced`: whether another process already serves the same address.
        """
        self.shutting_down, self.replaced = True, replaced

    def cut(self) -> None:
        """From now on, attributes cancelled requests to the proxy, and not to clients that left."""
        self._cutting = True

    def begin_request(self) -> None:
        """Counts an open request, for which a drain waits."""
        self.open_requests += 1

    def end_request(self) -> None:
        """Counts the end of an open request."""
        self.open_requests -= 1
        if not self.open_requests and self._idle is not None:
            self._idle.set()
            self._idle = None

    async def idle(self) -> None:
        """Waits until no request is open."""
        if self.open_requests:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    def cancellation(self, cause: BaseException) -> tuple[Outcome, int, str]:
        """Returns the outcome, status and error of a request whose task was cancelled or whose client left."""
        if self._cutting:
            return Outcome.DRAINING, 503, "cut: the proxy ended before this request did"
        error = "the client left" if isinstance(cause, asyncio.CancelledError) else f"the client left: {cause}"
        return Outcome.CANCELLED, 499, error

    async def serve(self, head: HeadFacts, http: web.BaseRequest) -> web.StreamResponse:
        """Serves one request of a scheduled route, and records its outcome.

        `head` must have the current rules. A failure becomes an answer. If the client leaves or the task is cancelled,
        the outcome is recorded and the exception passes on.
        """
        extra: dict[str, str] = {}
        now = asyncio.get_running_loop().time()
        rules = self._rulebook.current
        client = ResponseWriter(http, extra, self, rules.cors)
        record = RequestExit(
            request_id=urandom(16).hex(),
            method=head.method,
            path=head.route.path,
            client=head.sender.address,
            user_agent=head.user_agent,
            arrived_s=now,
        )
        context = RequestContext(rules, head.route, http, head, client, extra, BufferedBody(self.bodies), record)
        self.begin_request()
        try:
            await self._read(context)
            await self._attempt_until_answered(context)
        except Failure as failure:
            return await fail(context, failure)
        except Refused as refused:
            return await fail(context, Failure.from_refused(refused))
        except (asyncio.CancelledError, ConnectionError, web.RequestPayloadError) as cause:
            self._cancelled(context, cause)
            raise
        except Exception as error:  # noqa: BLE001 - a bug becomes one 500, and its traceback goes to the log
            log_internal(record.request_id, error)
            if client.response is None or client.only_comments:
                return await fail(context, Failure(Outcome.INTERNAL, INTERNAL_MESSAGE))
            record.end(Outcome.INTERNAL, client.status, INTERNAL_MESSAGE)
            # An answer has begun, and the client would read an error as part of it.
            await client.abort()
        finally:
            if context.keep_alive is not None:
                context.keep_alive.stop()
            context.buffered.release()
            if not context.repeated:
                self._open_ids.discard(record.request_id)
            self.end_request()
            self._record(context)
        assert client.response is not None
        return client.response

    # --- reading the request ------------------------------------------------------------------------------------------

    async def _read(self, context: RequestContext) -> None:
        """Reads the request as far as the scheduler needs it. Raises Failure and Refused."""
        http, rules, record, head = context.http, context.rules, context.record, context.head
        if (given := head.given_id) is not None:
            record.request_id, context.repeated = given, given in self._open_ids
            self._open_ids.add(given)
        elif not self._replaced_id_logged and REQUEST_ID_HEADER in http.headers:
            # Logged once: a client with invalid ids sends them with every request.
            self._replaced_id_logged = True
            log_replaced_id(record.request_id)
        context.extra["x-request-id"] = record.request_id
        if not head.kept:
            head.tenant = rules.keys.check(http.headers)
            head.trusted = rules.identity.trusts(head.sender, head.tenant)
        tenant = context.tenant = head.tenant
        record.tenant, record.key = tenant.name, tenant.key
        context.trusted = head.trusted
        if self._sampler is not None:
            context.begin_trace(self._sampler)
        if self._dispatcher.draining:
            raise Failure(Outcome.DRAINING, "The proxy is shutting down. Try again.", retry_after_s=1.0)
        if not head.kept:
            if http.headers.get("content-encoding", "identity").lower() != "identity":
                message = "Request bodies must not be compressed: send this one without Content-Encoding."
                accepted = {"Accept-Encoding": "identity"}
                raise Failure(Outcome.BAD_REQUEST, message, status=415, param="content-encoding", headers=accepted)
            if tenant.expires is None and isinstance(http, ClientRequest) and http.keep_facts(head):
                head.kept, head.forwarded = True, {}
        body = await read_body(http, rules.config.body_bytes_max, rules.config.clients, context.buffered)
        record.body_bytes = len(body)
        context.parsed = await rules.read(context.route, http, body)
        parsed = context.parsed
        if context.route.dialect is Dialect.RESPONSES:
            context.previous = await self._stored.previous(parsed.response_members, tenant, rules)
        if tenant.salt is not None and context.route.salted:
            # The tenant shares no cached prefix with other tenants.
            context.salt = tenant.cache_salt(parsed.text(SALT))
            chain = None if parsed.chain is None else replace(parsed.chain, salt=context.salt)
            parsed = context.parsed = replace(parsed, chain=chain)
        if parsed.stream and rules.config.timeouts.keep_alive_s is not None:
            context.keep_alive = KeepAlive(context.client, rules.config.timeouts.keep_alive_s)
        context.session = rules.identity.session(http, parsed.sessions, context.tenant)
        target = context.target = await self._target(context, parsed.model)
        sent = target.adapter or target.model
        record.model, record.target = target.requested, sent if sent != target.requested else None
        record.served_as = target.model if target.model != target.requested else None
        if rules.request_limits is not None:
            parsed = context.parsed = rules.request_limits.apply(
                context.route, parsed, tenant.name, target, self._estimator
            )
        self.budget.request()
        if context.route.computes:
            continues = parsed.stream and context.route.kind in rules.continues
            context.captured = self._answers.capture(parsed, continues)
            context.client.capture = context.captured.add if context.captured is not None else None
        context.request = make_request(context, parsed, target, f"{self._ids}{next(self._serial)}", self._estimator)
        record.expected_prompt_tokens = context.request.prompt_tokens

    async def _target(self, context: RequestContext, asked: str | None) -> Target:
        """Returns the target of the model name `asked`; None asks for the only model. Raises Failure and Refused.

        Errors name only models that the tenant may use. Waits for up to `no_backend_wait_s` while replicas start and
        have not listed their models yet.
        """
        tenant, rules = context.tenant, context.rules
        try:
            if asked is None or tenant.allows(asked):
                head = context.head
                if head.max_wait_s is None:
                    head.max_wait_s = rules.identity.max_wait_s(context.http.headers)
                no_backend_wait_s = min(rules.config.queue.no_backend_wait_s, head.max_wait_s)
                # A conversation stays with one model of an alias: only that model's replicas have cached the prefix.
                key, previous = context.session or context.record.request_id, context.previous
                beside = None if previous is None else previous.backend
                target = await self._dispatcher.resolve(
                    asked, no_backend_wait_s, context.record.body_bytes, key, beside
                )
                if asked is not None or tenant.allows(target.requested):
                    return target
        except Refused as refused:
            if tenant.models is None or refused.outcome is Outcome.DRAINING:
                raise
            if refused.outcome is Outcome.REJECTED_NO_BACKENDS:
                message = "No backend is known yet that serves this model. Try again shortly."
                raise Refused(refused.outcome, message, refused.retry_after_s) from None
        if asked is None:
            own = ", ".join(sorted(tenant.models or ())[:20])
            raise Failure(Outcome.BAD_REQUEST, f"The request names no model: set `model` to one of {own}.")
        raise Failure(Outcome.UNKNOWN_MODEL, f"The model `{asked[:200]}` does not exist.")

    # --- attempts -----------------------------------------------------------------------------------------------------

    async def _attempt_until_answered(self, context: RequestContext) -> None:
        config, request = context.rules.config, context.request
        assert request is not None
        try:
            attempt = await run_attempts(
                request,
                context.record,
                partial(self._attempt, context, request),
                self._dispatcher,
                self.budget,
                config.retry.extra_attempts,
                lambda attempt: prepare_rest(context, request, attempt, self._estimator),
            )
        except Refused as refused:
            if context.previous is not None and refused.outcome is Outcome.BAD_REQUEST:
                raise context.previous.unreachable(refused) from None
            # If a retry finds no backend, the client gets the error of the attempt before.
            attempt = context.record.last
            if attempt.outcome is Outcome.INTERNAL and context.continuation is None:
                raise
        finally:
            if context.handover is not None:
                await self._split.release(context)
        call, broken = context.call, context.continuation
        if not attempt.committed and broken is not None:
            # No backend began with the rest. The client gets the error of the stream that broke.
            call, attempt = broken.call, broken.attempt
        if not attempt.committed:
            if context.record.computed >= COMPUTED_MAX:
                # The request itself may be the cause. This field stops the retries of the OpenAI and Anthropic SDKs.
                context.extra["x-should-retry"] = "false"
            await deliver_failure(context, attempt)
            return
        self._finish(context, attempt)
        if attempt.state is AttemptState.FAILED and not context.client.ended:
            assert call is not None
            await end_broken(call, attempt, context.client, config.timeouts.stall_s)

    async def _attempt(self, context: RequestContext, request: Request, lease: Lease, attempt: Attempt) -> None:
        rules, tenant, record = context.rules, context.tenant, context.record
        parsed, grant = context.parsed, lease.grant
        backend, stage = self._backends[grant.placed.backend], grant.request.stage
        assert parsed is not None
        if record.trace is not None:
            attempt.span_id = new_span_id()
        if context.trusted or not tenant.name:
            context.extra["x-llmproxy-backend"] = backend.name
        context.extra["x-llmproxy-queue-ms"] = f"{(record.queue_wait_s or 0.0) * 1e3:.1f}"
        context.extra["x-llmproxy-attempts"] = str(record.attempts)
        context.lease, context.call = lease, None
        handover = await self._split.take(context, lease) if context.handover is not None else None
        engine_id, refused = context.engine_id(request), False
        try:
            if handover is not None:
                handover = self._split.usable(handover, attempt, lease, backend.url)
            asks = grant.request.stream and self._usage.should_ask(backend, grant.at_s)
            while attempt.state is not AttemptState.FAILED:
                call = context.call = call_for(context, parsed, lease, backend, engine_id, attempt, handover, asks)
                if call.dialect is Dialect.RESPONSES and call.stage is not Stage.PREFILL:
                    # The callback must not refer to the context, which refers to this client: the cycle would keep the
                    # body in memory until the garbage collector runs.
                    context.client.on_commit = self._stored.commit_callback(
                        call, attempt, backend.name, tenant, context.previous, parsed.stores
                    )
                may_move = partial(self._may_continue, context, lease)
                await rules.relay.attempt(attempt, lease, backend.url, call, context.client, may_move)
                if not (call.hide_usage and call.refuses("stream_options")):
                    break
                refused = True
                # The client did not ask for usage, so ask again without it. Not in a decode stage: the engine has freed
                # the prompt of the call that it refused, and the request is served whole.
                if handover is not None:
                    break
                attempt.restart()
                # The refusal was free. The answer to the second call may report no usage.
                lease.usage, asks = None, False
        finally:
            # Also after a cancellation: many clients leave as soon as they have read the end mark.
            if refused and (attempt.committed or handover is not None):
                # Without the option, the engine accepts the request. The prefill engine accepted it too.
                self._usage.record_refusal(backend, grant.at_s)
            self._exits.attempted(backend.name, attempt.verdict)
            attempt.ended_s = asyncio.get_running_loop().time()
            if (external := rules.externals.get(backend.name)) is not None:
                attempt.cost = attempt_cost(external, request, lease.verdict, lease.usage)
            if context.continuation is not None and attempt.committed:
                record.continued = context.continuation.rest_of.rest.how
            if context.continuation is not None and attempt.first_byte_s is not None:
                gap_s = attempt.first_byte_s - context.continuation.call.last_byte_s
                attempt.max_gap_s = max(attempt.max_gap_s or 0.0, gap_s)
            if stage is not Stage.WHOLE or grant.placed.unsplit:
                if attempt.committed:
                    self._split.note(context, attempt, grant)
                self._split.keep(context, backend, grant)
        if not attempt.committed:
            self._split.note(context, attempt, grant)
        if attempt.verdict is Verdict.UNAUTHORIZED:
            attempt.detail = rules.identity.key_hint(backend)
        if context.previous is not None and context.previous.may_be_elsewhere(attempt):
            attempt.again = Again.ANYWHERE_ELSE

    async def _may_continue(self, context: RequestContext, lease: Lease) -> bool:
        return lease.movable and self._dispatcher.granting and await may_continue(context)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _finish(self, context: RequestContext, attempt: Attempt) -> None:
        """Records the outcome of the attempt whose answer went to the client, and learns from its usage."""
        context.record.end(attempt.outcome, context.client.status, attempt.message)
        usage = context.lease.usage if context.lease is not None else None
        # An external backend has another tokenizer.
        ours = attempt.outcome is Outcome.COMPLETED and context.call is not None and not context.call.external
        if ours and attempt.prompt_tokens is not None and usage is not None:
            learn_usage(context, usage, self._estimator)

    def _cancelled(self, context: RequestContext, cause: BaseException) -> None:
        attempt = context.record.last
        if attempt.outcome is Outcome.COMPLETED:
            self._finish(context, attempt)
            return
        if context.record.outcome is Outcome.BROKEN_STREAM:
            # The client left after it had read the error event.
            return
        outcome, status, error = self.cancellation(cause)
        context.record.end(outcome, (context.client.status or status) if outcome is Outcome.DRAINING else status, error)

    def _record(self, context: RequestContext) -> None:
        if self._sampler is not None:
            # Does nothing unless the request was refused before its tenant was known.
            context.begin_trace(self._sampler)
        ended = context.finish(asyncio.get_running_loop().time())
        if context.request is not None:
            self._dispatcher.ended(context.request, ended.met)
        # Captured bytes are released first, because recording may fail.
        if context.captured is not None:
            lease = context.lease if ended.outcome is Outcome.COMPLETED else None
            self._answers.finish(context.captured, lease.grant if lease is not None else None)
        self._exits.record(ended)
        self.log_lines.record(ended)
