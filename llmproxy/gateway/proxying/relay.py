"""Makes an attempt on one backend, from opening the connection to the last byte handed to the client.

The head of the answer is buffered until a part of the body can be relayed. An engine sends the head when it accepts a
request, long before the first token. Until the client has got more than comments, another backend may be tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import orjson

from llmproxy.config import TimeoutsConfig
from llmproxy.core.domain import Outcome, Request, Stage, Usage, Verdict
from llmproxy.core.estimates.tokens import believable
from llmproxy.core.lease_events import Started
from llmproxy.core.queueing.rate_limits import charged_usage
from llmproxy.core.retry import Cause
from llmproxy.gateway.http.errors import error_body, error_event
from llmproxy.gateway.http.headers import to_client
from llmproxy.gateway.http.routes import Dialect
from llmproxy.gateway.proxying.call import Answer, Call
from llmproxy.gateway.proxying.continued.join import JoinedTap
from llmproxy.gateway.proxying.deadlines import Deadlines
from llmproxy.gateway.proxying.error_words import ABORT, ABORTED, answer_cause, event_cause
from llmproxy.gateway.proxying.response_writer import ResponseWriter, within
from llmproxy.gateway.proxying.split.prefill import take_prefill
from llmproxy.gateway.proxying.split.release import DECODE_GRACE_S, PREFILL_GRACE_S, shield_for
from llmproxy.gateway.proxying.split.stages import decide_stage_retry
from llmproxy.gateway.proxying.sse import EncodedTap, StreamTap, usage_in_tail
from llmproxy.gateway.proxying.stream_relay import (
    BUFFERED_BYTES_MAX,
    TAIL_BYTES,
    ProgressReports,
    ResponseRelay,
    StreamRelay,
    check_cut,
    event_fields,
    is_encoded,
    is_event_stream,
    read_answer,
)
from llmproxy.lifecycle.background import spawned
from llmproxy.scheduling.attempt import Attempt, AttemptState
from llmproxy.scheduling.lease import Lease
from llmproxy.upstream.port import ConnectFailed, Exchange, LocalFailure, Upstream, UpstreamBroken

HELD_BYTES_MAX = 64 << 10
"""How many bytes of an answer without a stream are held back.

Until the client gets its first byte, another backend can repeat the answer.
"""

BEGINNING_BYTES = 2_000  # How much of an error answer is passed on if it exceeds BUFFERED_BYTES_MAX.

GOODBYE_S = 5.0  # How long a client may take to read the error event that ends its broken stream.

LINGER_S = 0.05  # How long the connection stays open after the error event of a broken stream.

ANSWER_BYTES_PER_TOKEN = 4  # If a JSON answer exceeds TAIL_BYTES and ends without usage, so many bytes are one token.


JSON = ("Content-Type", "application/json")
_KEY_REFUSED = (
    "No backend accepts the key that this proxy sends. The configuration of the proxy is wrong, not the key of the"
    " client."
)


class Relay:
    """Sends requests to backends and relays their answers. Its only state is the timers of running attempts."""

    def __init__(self, upstream: Upstream, timeouts: TimeoutsConfig) -> None:
        self._upstream = upstream
        self._timeouts = timeouts
        self.deadlines, self._reports = Deadlines(), ProgressReports()

    async def attempt(
        self,
        attempt: Attempt,
        lease: Lease,
        base_url: str,
        call: Call,
        client: ResponseWriter,
        may_continue: Callable[[], Awaitable[bool]],
    ) -> None:
        """Sends `call` to one backend and relays the answer to `client`.

        Sets the result in `attempt`, and the verdict and the usage in `lease`. If the backend hangs or must be left,
        `may_continue` is awaited: whether another backend may continue the stream. A failure of the backend raises
        nothing. Raises OSError if the client is gone.
        """
        exchanging = self._exchange(attempt, lease, base_url, call, client, may_continue)
        try:
            if call.released and call.connector is not None:
                await shield_for(exchanging, lambda: PREFILL_GRACE_S)
            else:
                await exchanging
        except asyncio.CancelledError:
            if attempt.prefilled:
                # The prompt was computed. It is charged, because leaving early would be free otherwise.
                attempt.verdict = Verdict.CLIENT_GONE
            raise
        except LocalFailure as error:
            attempt.detail = str(error)
            attempt.fail(Outcome.REJECTED_CAPACITY, Cause.LACK, error.message)
        except ConnectFailed as error:
            attempt.detail = str(error)
            attempt.fail(Outcome.CONNECT_FAILED, Cause.NO_CONNECTION, "No connection to the backend could be opened.")
        except UpstreamBroken as error:
            attempt.detail = str(error)
            if not await self._was_complete(attempt, client):
                outcome = Outcome.BROKEN_STREAM if attempt.committed else Outcome.CONNECT_FAILED
                cause = Cause.GONE if lease.leaving else Cause.BROKEN
                attempt.fail(outcome, cause, "The connection to the backend failed.")
        except TimeoutError:
            waits_for_client = attempt.committed and client.paused and not call.was_cut
            if (waits_for_client and call.cause is not Cause.OVERRAN) or attempt.state is AttemptState.DELIVERING:
                await client.abort()
                raise ConnectionAbortedError("it stopped reading") from None
            if not await self._was_complete(attempt, client):
                self._ended_early(attempt, call, lease)
        finally:
            if call.stage is not Stage.WHOLE:
                decide_stage_retry(attempt, call.stage)
            self._account(attempt, lease, call)

    async def _exchange(
        self,
        attempt: Attempt,
        lease: Lease,
        base_url: str,
        call: Call,
        client: ResponseWriter,
        may_continue: Callable[[], Awaitable[bool]],
    ) -> None:
        exchange: Exchange | None = None
        moving: asyncio.Task[None] | None = None

        def arrived() -> bool:
            return exchange is not None and exchange.ended

        async def move() -> None:
            heard_s = call.heard_s
            if await may_continue() and (not arrived() if lease.leaving else call.heard_s == heard_s):
                call.cut()

        def cut() -> None:
            # The loss of the backend ends the attempt, unless the whole answer has arrived and only the client is slow.
            # A preemption or a hang ends an attempt without an answer. A hang also ends a stream that another backend
            # can continue.
            nonlocal moving
            if lease.revoked and not (attempt.committed and arrived()):
                call.cut()
            elif not attempt.committed:
                # The last attempt at the rest of a stream waits, because the stream would break.
                waits = call.rest_of is not None or lease.leaving
                if lease.preempted or (lease.hung and (lease.movable or not waits)):
                    call.cut()
            elif lease.hung and call.holds and not arrived() and (moving is None or moving.done()):
                moving = spawned(move(), "move a stream")

        connect_s = self._timeouts.connect_s
        connect = partial(self._upstream.open, base_url, call.method, call.path_qs, call.headers, call.body, connect_s)

        async def connected() -> None:
            nonlocal exchange
            exchange = await connect()

        try:
            with call:
                lease.on_cut = cut
                if lease.revoked or lease.hung or lease.preempted:
                    cut()
                if call.released and call.connector is None:
                    until_s = call.now() + DECODE_GRACE_S
                    await shield_for(connected(), lambda: 0.0 if call.expired else until_s - call.now())
                else:
                    exchange = await connect()
                assert exchange is not None
                attempt.enter(AttemptState.HEAD)
                attempt.status = exchange.status
                if exchange.status < 200:
                    message = f"The backend switched to another protocol ({exchange.status}), which was not asked for."
                    attempt.fail(Outcome.UPSTREAM_STATUS, Cause.NOT_SERVED, message)
                    attempt.status = 502
                elif exchange.status >= 300:
                    await self._read_error(attempt, exchange, call)
                elif call.connector is not None:
                    await take_prefill(attempt, lease, exchange, call, call.connector)
                elif is_event_stream(exchange):
                    await self._relay_stream(attempt, lease, exchange, call, client)
                else:
                    await self._relay_plain(attempt, lease, exchange, call, client)
        finally:
            lease.on_cut = None
            if moving is not None:
                moving.cancel()
            # The source refers to the client. Without the cycle, both are freed at once.
            client.source = None
            if exchange is not None and not exchange.ended:
                exchange.close()

    # --- an error answer ---------------------------------------------------------------------------------------------

    async def _read_error(self, attempt: Attempt, exchange: Exchange, call: Call) -> None:
        attempt.enter(AttemptState.HELD)
        body = await read_answer(exchange)
        status = exchange.status
        cause = answer_cause(status, body, own_key=call.own_key)
        if status == 404:
            cause = _rejected_if_unlisted(cause, call)
        if status < 400:
            attempt.status, message = 502, f"The backend answered with a redirect ({status}), which is not passed on."
        elif cause is Cause.UNAUTHORIZED:
            # The client does not know the proxy's key, and would relate a 401 or 403 to its own key.
            attempt.status, message = 502, _KEY_REFUSED
        else:
            message = f"The backend answered {status}."
            headers = to_client(exchange.headers)
            if len(body) > BUFFERED_BYTES_MAX:
                message += (
                    f" Its answer is longer than {BUFFERED_BYTES_MAX} bytes, and only its beginning is passed on."
                )
                begins = "" if is_encoded(exchange) else body[:BEGINNING_BYTES].decode(errors="replace")
                body = error_body(call.dialect, status, f"{message} {begins}")
                headers = [*(one for one in headers if not one[0].lower().startswith("content-")), JSON]
            call.answer = Answer(status, exchange.reason, headers, body)
        attempt.fail(Outcome.UPSTREAM_STATUS, cause, message)

    # --- an answer without a stream ----------------------------------------------------------------------------------

    async def _relay_plain(
        self, attempt: Attempt, lease: Lease, exchange: Exchange, call: Call, client: ResponseWriter
    ) -> None:
        if not client.end_comments():
            fail_without_stream(attempt)
            return
        first = await exchange.chunk()
        call.head = first[:4096]
        check_cut(call)
        lease.apply(Started(lease.grant.lease), call.now())
        more = not exchange.ended
        if more:
            call.streaming(call.now())
            if call.holds:
                first = await _held(first, call, exchange)
                check_cut(call)
                more = not exchange.ended
        if call.holds and ABORT in first and not more and ABORTED.search(first):
            # The client gets this part of an answer if no other attempt is made.
            call.answer = Answer(exchange.status, exchange.reason, to_client(exchange.headers), first)
            attempt.fail(Outcome.UPSTREAM_STATUS, Cause.DRAINING, "The backend shut down and aborted its answer.")
            return
        attempt.enter(AttemptState.STREAMING)
        client.commit(exchange.status, exchange.reason, to_client(exchange.headers))
        relay = ResponseRelay(attempt, call, exchange, client)
        relay.take(first)
        if more:
            call.streaming(call.now())
            await exchange.flow(relay.take)
        await relay.end()
        attempt.complete()
        attempt.enter(AttemptState.DONE)

    # --- a stream ----------------------------------------------------------------------------------------------------

    async def _relay_stream(
        self, attempt: Attempt, lease: Lease, exchange: Exchange, call: Call, client: ResponseWriter
    ) -> None:
        tap: StreamTap
        opening_events = call.opening_events
        if is_encoded(exchange):
            if not client.end_comments():
                fail_without_stream(attempt)
                return
            # In compressed bytes the proxy cannot hide or add events, count tokens or see where the opening events end.
            tap, opening_events = EncodedTap(), 0
        else:
            tap = call.tap = stream_tap(call)
        relay = StreamRelay(attempt, call, exchange, client, tap, lease, self._reports, opening_events)
        try:
            await self._relay_events(attempt, exchange, call, tap, relay)
        finally:
            self._reports.remove(relay)

    async def _relay_events(
        self, attempt: Attempt, exchange: Exchange, call: Call, tap: StreamTap, relay: StreamRelay
    ) -> None:
        await exchange.flow(relay.take)
        if tap.error_seen and not attempt.committed:
            # The rest goes through the tap too, which may buffer the beginning of the next event.
            more = b"" if tap.refused else tap.feed(await read_answer(exchange))
            events = relay.first + more + tap.flush() + tap.held_back
            message = "The backend answered with an error event and no token."
            if len(events) <= BUFFERED_BYTES_MAX:
                call.answer = Answer(exchange.status, exchange.reason, event_fields(exchange), events)
            else:
                message += f" Its answer is longer than {BUFFERED_BYTES_MAX} bytes and is not passed on."
                attempt.status = 502
            attempt.fail(
                Outcome.UPSTREAM_STATUS,
                _rejected_if_unlisted(event_cause(tap.error, own_key=call.own_key), call),
                message,
            )
            return
        relay.flush()
        if tap.error_seen:
            cause = _rejected_if_unlisted(event_cause(tap.error, own_key=call.own_key), call)
            attempt.fail(Outcome.UPSTREAM_STATUS, cause, "The backend ended the stream with an error event.")
            if call.holds:
                # Another backend may go on. Otherwise `end_broken` sends the held-back bytes.
                return
        else:
            attempt.complete()
        await relay.end()
        attempt.enter(AttemptState.FAILED if tap.error_seen else AttemptState.DONE)

    # --- how it ended -------------------------------------------------------------------------------------------------

    async def _was_complete(self, attempt: Attempt, client: ResponseWriter) -> bool:
        """Ends the client's answer and returns True if the stream had sent its end mark before the connection broke."""
        if attempt.outcome is not Outcome.COMPLETED:
            return False
        await within(client.end(), client, self._timeouts.stall_s)
        attempt.enter(AttemptState.DONE)
        return True

    def _ended_early(self, attempt: Attempt, call: Call, lease: Lease) -> None:
        lost = Outcome.BROKEN_STREAM if attempt.committed else Outcome.CONNECT_FAILED
        if lease.revoked:
            message = "The backend is gone: it refuses connections, and its open streams get no more data."
            attempt.fail(lost, Cause.GONE, message)
        elif lease.hung and call.was_cut:
            if lease.leaving:
                attempt.fail(lost, Cause.GONE, "The backend was drained, and the deadline of the drain is over.")
            else:
                attempt.fail(lost, Cause.HUNG, "The backend hangs: the proxy gave up waiting.")
        elif lease.preempted and not attempt.committed:
            attempt.enter(AttemptState.FAILED)
            attempt.outcome, attempt.verdict = Outcome.INTERNAL, Verdict.PREEMPTED
        else:
            attempt.fail(lost if attempt.committed else Outcome.UPSTREAM_TIMEOUT, call.cause, call.reason())

    def _account(self, attempt: Attempt, lease: Lease, call: Call) -> None:
        """Sets the verdict and the usage of the lease at the end of an attempt."""
        lease.verdict, most = attempt.verdict, call.usage_max
        if most is None or attempt.verdict is Verdict.TRANSFER_FAILED:
            # A prompt that cannot be transferred is computed twice, and charged once.
            lease.usage = Usage(0, 0)
            return
        if call.tap is not None:
            reported = call.tap.usage
            seen = call.tap.data_events
        else:
            reported = usage_in_tail(call.tail) if call.tail else None
            # Without a stream the progress is unknown. If the estimate were not charged, leaving early would be free.
            seen = lease.grant.request.output_tokens
            if reported is None and len(call.tail) == TAIL_BYTES and call.head.startswith(b"{"):
                # The answer has no usage, or so much data follows the usage that the tail does not contain it.
                seen = max(seen, min(most.output_tokens, call.answer_bytes // ANSWER_BYTES_PER_TOKEN))
        usage = believable(reported, most) if reported is not None else None
        if usage is not None:
            attempt.prompt_tokens, attempt.output_tokens = usage.prompt_tokens, usage.output_tokens
            if call.rest_of is not None:
                # As in the usage for the client.
                rest = call.rest_of.rest
                attempt.prompt_tokens = max(1, usage.prompt_tokens - rest.tokens)
                attempt.output_tokens = rest.tokens + (0 if rest.text_ended else usage.output_tokens)
            attempt.cached_tokens = usage.cached_tokens
            lease.usage = usage
            if call.tap is not None and attempt.outcome is not Outcome.COMPLETED:
                lease.usage = _so_far(usage, lease.grant.request, seen)
                _estimate(attempt, lease, usage)
            return
        if reported is not None:
            attempt.detail += "; " if attempt.detail else ""
            attempt.detail += (
                f"the backend's usage is impossible: {reported.prompt_tokens} prompt, {reported.output_tokens} output"
                f" tokens, but {most.prompt_tokens} and {most.output_tokens} are the maximum"
            )
        if attempt.outcome is Outcome.UPSTREAM_STATUS and not attempt.committed:
            # The engine refused the request and did no work.
            lease.usage = Usage(0, 0)
        elif attempt.verdict is Verdict.CLIENT_GONE or (attempt.committed and attempt.outcome is not Outcome.COMPLETED):
            # The answer was cut short: the tokens so far are charged to the flow.
            lease.usage = Usage(lease.grant.request.prompt_tokens, seen)
        elif attempt.committed and seen > lease.grant.request.output_tokens:
            # The answer has no usage, and more tokens came than estimated.
            lease.usage = Usage(lease.grant.request.prompt_tokens, seen)
        _estimate(attempt, lease, Usage(0, 0))


def fail_without_stream(attempt: Attempt) -> None:
    """Fails an attempt whose answer is no stream, after the proxy has sent the head of a stream and comments."""
    message = "The backend did not answer with an uncompressed event stream, and the client has begun to read a stream."
    attempt.fail(Outcome.UPSTREAM_STATUS, Cause.ERROR, message)
    attempt.status = 502


async def _held(first: bytes, call: Call, exchange: Exchange) -> bytes:
    """Reads on until the answer is complete or has HELD_BYTES_MAX bytes. Returns the bytes with `first` before them."""
    held = bytearray(first)
    while not exchange.ended and len(held) < HELD_BYTES_MAX:
        held += await exchange.chunk()
        call.heard_s = call.now()
    return bytes(held)


def stream_tap(call: Call) -> StreamTap:
    """Returns the tap for the uncompressed event stream of a call."""
    if call.rest_of is not None:
        return JoinedTap(call.hide_usage, call.rest_of)
    return StreamTap(call.hide_usage, call.holds)


def _so_far(reported: Usage, request: Request, seen: int) -> Usage:
    """Returns the usage of a stream that was cut short.

    The last report of usage may cover only the prompt, or one choice of several. `seen`: the number of events with
    tokens.
    """
    prompt_tokens = reported.prompt_tokens
    if request.sequences > 1:
        prompt_tokens = max(prompt_tokens, request.prompt_tokens)
    return Usage(prompt_tokens, max(reported.output_tokens, seen), reported.cached_tokens)


def _estimate(attempt: Attempt, lease: Lease, counted: Usage) -> None:
    """Sets the estimated tokens, which usage limits charge in addition to the tokens that the engine counted."""
    request = lease.grant.request
    charged = charged_usage(request, lease.verdict, lease.usage)
    if charged is not None:
        if not request.continued:
            attempt.estimated_prompt_tokens = max(0, charged.prompt_tokens - counted.prompt_tokens)
        attempt.estimated_output_tokens = max(0, charged.output_tokens - counted.output_tokens)


async def end_broken(call: Call, attempt: Attempt, client: ResponseWriter, stall_s: float) -> None:
    """Ends a failed event stream with one error event: the engine's, or the proxy's in the client's dialect.

    Aborts the connection instead if the answer is no event stream. Also aborts it instead of sending the proxy's event
    if the client reads more slowly than the proxy writes.
    """
    tap = call.tap
    if tap is not None and attempt.outcome is Outcome.UPSTREAM_STATUS:
        # The engine itself ended the stream.
        client.write(bytes(tap.held_back))
        await within(client.end(), client, stall_s)
        return
    if tap is None or client.paused:
        await client.abort()
        return
    event = bytes(tap.held_back)
    if not tap.error_seen:
        # A blank line ends an incomplete event, which would swallow the error event.
        boundary = b"" if tap.at_boundary else b"\n\n"
        event = boundary + error_event(call.dialect, f"The stream broke: {attempt.message}")
    await end_with_error(event, client)


def error_events(answer: Answer, dialect: Dialect, message: str) -> bytes:
    """Returns a backend's own error answer as SSE events, for a client that has got only comments of its stream."""
    if answer.status < 300:
        return answer.body
    try:
        body = b"data: " + orjson.dumps(orjson.loads(answer.body)) + b"\n\n"
    except orjson.JSONDecodeError:
        return error_event(dialect, message, answer.status)
    if dialect is Dialect.RESPONSES:
        return error_event(dialect, message, answer.status)
    return body if dialect is Dialect.OPENAI else b"event: error\n" + body


async def end_with_error(event: bytes, client: ResponseWriter) -> None:
    """Ends a broken stream with `event`, and closes the connection.

    No end mark follows, so that a client that ignores error events does not take the answer for complete. Some client
    libraries discard buffered data when the connection ends early, so the connection stays open for LINGER_S.
    """
    try:
        async with asyncio.timeout(GOODBYE_S):
            client.write(event)
            await client.end(whole=False)
            await asyncio.sleep(LINGER_S)
    except TimeoutError:
        await client.abort()


def _rejected_if_unlisted(cause: Cause, call: Call) -> Cause:
    """Returns `cause`, or REJECTED (the client's error) if the backend neither serves nor lists the model."""
    return Cause.REJECTED if cause is Cause.NOT_SERVED and not call.listed else cause
