"""The corridor: one attempt on one backend, from opening the connection to the last byte handed to the client.

The head of the answer is held back until the first byte of its body: an engine sends its head when it *accepts* a
request, so until then nothing was promised to the client and the attempt may be repeated elsewhere.
"""

from __future__ import annotations

import asyncio

from llmproxy.config import TimeoutsConfig
from llmproxy.core.domain import Outcome, Request, Usage, Verdict
from llmproxy.core.estimates.tokens import believable
from llmproxy.gateway.http.errors import error_event
from llmproxy.gateway.http.headers import to_client
from llmproxy.gateway.http.routes import Dialect
from llmproxy.gateway.proxying.attempt import Answer, Attempt, Call, Client
from llmproxy.gateway.proxying.attempt_timer import AttemptTimer
from llmproxy.gateway.proxying.sse import EncodedTap, StreamTap, usage_of_tail
from llmproxy.gateway.proxying.stream_relay import (
    HELD_BYTES_MAX,
    TAIL_BYTES,
    ResponseRelay,
    StreamRelay,
    check_kept,
    event_fields,
)
from llmproxy.lease import Lease
from llmproxy.upstream.port import ConnectFailed, Exchange, LocalFailure, Upstream, UpstreamBroken

GOODBYE_S = 5.0
"""How long a client may take to accept the error event that ends its broken stream."""

LAST_WORDS_S = 0.05
"""How long after that event the connection is closed."""

ANSWER_BYTES_PER_TOKEN = 4
"""How many bytes of a JSON answer count as a token where its end does not tell its usage."""

DRAINING_MARK = b"cannot schedule new futures"
"""What a vLLM that is shutting down says in a 500, while its /health is still 200."""


class Relay:
    """Carries requests out. Holds no state between attempts."""

    def __init__(self, upstream: Upstream, timeouts: TimeoutsConfig) -> None:
        self._upstream = upstream
        self._timeouts = timeouts

    async def attempt(self, attempt: Attempt, lease: Lease, base_url: str, call: Call, client: Client) -> None:
        """Try one backend and write down in `attempt` what came of it.

        Never raises for what a backend does; OSError means that the client is gone.
        """
        timer = AttemptTimer(self._timeouts, call.stream)
        try:
            await self._supervised(attempt, timer, lease, base_url, call, client)
        except LocalFailure as error:
            attempt.detail = str(error)
            attempt.fail(Outcome.REJECTED_CAPACITY, Verdict.LOCAL_FAILURE, error.message, retryable=True)
        except ConnectFailed as error:
            attempt.detail = str(error)
            message = "No connection to the backend came about."
            attempt.fail(Outcome.CONNECT_FAILED, Verdict.CONNECT_FAILED, message, retryable=True)
        except UpstreamBroken as error:
            attempt.detail = str(error)
            if not await self._was_complete(attempt, client):
                self._broke(attempt)
        except TimeoutError:
            if attempt.writing and (attempt.ended or not lease.revoked):
                await client.abort()
                raise ConnectionAbortedError("it stopped reading") from None
            if not await self._was_complete(attempt, client):
                self._timed_out(attempt, timer, lease)
        finally:
            self._account(attempt, lease, call.usage_max)

    async def _supervised(
        self, attempt: Attempt, timer: AttemptTimer, lease: Lease, base_url: str, call: Call, client: Client
    ) -> None:
        exchange: Exchange | None = None

        def cut() -> None:
            # What has begun to answer is not preempted any more. A dead backend is left, unless all of it came: what is
            # left then is for the client to take.
            came = exchange is not None and exchange.ended
            if not attempt.committed or (lease.revoked and not came):
                timer.cut()

        try:
            async with asyncio.timeout_at(timer.deadline_s) as scope:
                timer.scope = scope
                lease.on_cut = cut
                if lease.revoked or lease.preempted:
                    timer.cut()
                exchange = await self._upstream.open(
                    base_url, call.method, call.path_qs, call.headers, call.body, self._timeouts.connect_s
                )
                attempt.status = exchange.status
                if exchange.status < 200:
                    message = f"The backend switched to another protocol ({exchange.status}), which nobody asked for."
                    attempt.fail(Outcome.UPSTREAM_STATUS, Verdict.FAILED, message, retryable=True)
                    attempt.status = 502
                elif exchange.status >= 300:
                    await self._hold_error(attempt, exchange)
                elif is_event_stream(exchange):
                    await self._relay_stream(attempt, timer, lease, exchange, call, client)
                else:
                    await self._relay_plain(attempt, timer, lease, exchange, client)
        finally:
            lease.on_cut = None
            # It holds the client in turn, and a circle would be left to the garbage collector.
            client.source = None
            if exchange is not None:
                exchange.close()

    # --- an error answer ---------------------------------------------------------------------------------------------

    async def _hold_error(self, attempt: Attempt, exchange: Exchange) -> None:
        body = await _read_held(exchange)
        status = exchange.status
        if status < 400:
            message = f"The backend answered with a redirect ({status}), which is not passed on."
            attempt.fail(Outcome.UPSTREAM_STATUS, Verdict.FAILED, message, retryable=False)
            attempt.status = 502
            return
        message = f"The backend answered {status}."
        if len(body) <= HELD_BYTES_MAX:
            attempt.answer = Answer(status, exchange.reason, to_client(exchange.headers), body)
        else:
            message += f" What it said is not passed on: it is longer than {HELD_BYTES_MAX} bytes."
        if status == 503:
            attempt.fail(Outcome.UPSTREAM_STATUS, Verdict.BUSY, message, retryable=True)
        elif status == 502:
            attempt.fail(Outcome.UPSTREAM_STATUS, Verdict.FAILED, message, retryable=True)
        elif status == 500 and DRAINING_MARK in body:
            attempt.fail(Outcome.UPSTREAM_STATUS, Verdict.DRAINING, message, retryable=True)
        elif status >= 500 and status != 501:
            attempt.fail(Outcome.UPSTREAM_STATUS, Verdict.FAILED, message, retryable=False)
        else:
            # A 4xx is the client's doing, and 501 says that this engine has no such thing: neither is a failure.
            attempt.fail(Outcome.UPSTREAM_STATUS, Verdict.SERVED, message, retryable=False)

    # --- an answer without a stream ----------------------------------------------------------------------------------

    async def _relay_plain(
        self, attempt: Attempt, timer: AttemptTimer, lease: Lease, exchange: Exchange, client: Client
    ) -> None:
        first = await exchange.chunk()
        attempt.head = first[:4096]
        check_kept(lease)
        lease.started()
        attempt.committed = True
        client.commit(exchange.status, exchange.reason, to_client(exchange.headers))
        passing = ResponseRelay(attempt, timer, exchange, client)
        passing.take(first)
        if not exchange.ended:
            timer.streaming(timer.now())
            await exchange.flow(passing.take)
        await passing.end()
        attempt.outcome, attempt.verdict = Outcome.COMPLETED, Verdict.SERVED

    # --- a stream ----------------------------------------------------------------------------------------------------

    async def _relay_stream(
        self,
        attempt: Attempt,
        timer: AttemptTimer,
        lease: Lease,
        exchange: Exchange,
        call: Call,
        client: Client,
    ) -> None:
        tap: StreamTap
        if is_encoded(exchange):
            # No event can be taken out of it, nor one be added, nor is it seen how far it got.
            tap = EncodedTap()
        else:
            tap = attempt.tap = StreamTap(hide_usage=call.hide_usage)
        passing = StreamRelay(attempt, timer, exchange, client, tap, lease)
        await exchange.flow(passing.take)
        if tap.error_first and not attempt.committed:
            # Through the tap as all of a stream: it may be holding the beginning of the next event.
            events = passing.first + tap.feed(await _read_held(exchange)) + tap.flush()
            message = "The backend answered with an error event and no token."
            if len(events) <= HELD_BYTES_MAX:
                attempt.answer = Answer(exchange.status, exchange.reason, event_fields(exchange), events)
            else:
                message += f" What it said is not passed on: it is longer than {HELD_BYTES_MAX} bytes."
                attempt.status = 502
            if tap.error_blames_client:
                attempt.fail(Outcome.UPSTREAM_STATUS, Verdict.SERVED, message, retryable=False)
            else:
                attempt.fail(Outcome.UPSTREAM_STATUS, Verdict.FAILED, message, retryable=True)
            return
        passing.flush()
        if tap.error_seen:
            message = "The backend ended the stream with an error event."
            verdict = Verdict.SERVED if tap.error_blames_client else Verdict.FAILED
            attempt.outcome, attempt.verdict, attempt.message = Outcome.UPSTREAM_STATUS, verdict, message
        else:
            attempt.outcome, attempt.verdict = Outcome.COMPLETED, Verdict.SERVED
        await passing.end()

    # --- ends --------------------------------------------------------------------------------------------------------

    async def _was_complete(self, attempt: Attempt, client: Client) -> bool:
        """True when a stream had already told its end, so that nothing is missing from what its client has."""
        if attempt.outcome is not Outcome.COMPLETED:
            return False
        await end_within(client, self._timeouts.stall_s)
        return True

    def _broke(self, attempt: Attempt) -> None:
        outcome = Outcome.BROKEN_STREAM if attempt.committed else Outcome.CONNECT_FAILED
        attempt.fail(outcome, Verdict.FAILED, "The connection to the backend failed.", retryable=True)

    def _timed_out(self, attempt: Attempt, timer: AttemptTimer, lease: Lease) -> None:
        outcome = Outcome.BROKEN_STREAM if attempt.committed else Outcome.UPSTREAM_TIMEOUT
        if lease.revoked:
            # What has begun is only given up with its process.
            hangs = "The backend is gone or hangs: nothing is expected of it any more."
            gone = "The backend is gone: it refuses connections, and its open streams will never speak again."
            message = gone if attempt.committed else hangs
            lost = Outcome.BROKEN_STREAM if attempt.committed else Outcome.CONNECT_FAILED
            attempt.fail(lost, Verdict.LOST, message, retryable=True)
        elif lease.preempted and not attempt.committed:
            attempt.fail(Outcome.INTERNAL, Verdict.PREEMPTED, "", retryable=True)
        else:
            attempt.fail(outcome, Verdict.FAILED, timer.reason(), retryable=timer.streams)

    def _account(self, attempt: Attempt, lease: Lease, most: Usage | None) -> None:
        """Tell the lease what the attempt proved and what it cost, however it ended: at `most` so much."""
        lease.verdict = attempt.verdict
        if most is None:
            lease.usage = Usage(0, 0)
            return
        if attempt.tap is not None:
            told = attempt.tap.usage
            seen = attempt.tap.data_events
        else:
            told = usage_of_tail(attempt.tail) if attempt.tail else None
            # Without a stream nobody saw how far it got; the estimate stands, or leaving early would be free.
            seen = lease.grant.request.output_tokens
            if told is None and len(attempt.tail) == TAIL_BYTES and attempt.head.startswith(b"{"):
                # What stands behind its usage is too long, as the client has asked for, or there is none.
                seen = max(seen, min(most.output_tokens, attempt.body_bytes // ANSWER_BYTES_PER_TOKEN))
        attempt.usage = believable(told, most) if told is not None else None
        if told is not None and attempt.usage is None:
            attempt.detail += (
                f"the backend's usage is not believed: {told.prompt_tokens} prompt, {told.output_tokens} output tokens"
                f" where {most.prompt_tokens} and {most.output_tokens} are the most"
            )
        if attempt.usage is not None:
            lease.usage = attempt.usage
            if attempt.tap is not None and attempt.outcome is not Outcome.COMPLETED:
                lease.usage = _so_far(attempt.usage, lease.grant.request, seen)
        elif attempt.answer is not None:
            # Refused by the engine: no work was done, whatever the request looked like from here.
            lease.usage = Usage(0, 0)
        elif attempt.verdict is Verdict.CLIENT_GONE or (attempt.committed and attempt.outcome is not Outcome.COMPLETED):
            # Cut short: what was computed so far was work, and the flow that asked for it pays.
            lease.usage = Usage(lease.grant.request.prompt_tokens, seen)
        elif attempt.committed and seen > lease.grant.request.output_tokens:
            # Its client may not want to be told of usage: what was seen of it is more than was expected, and counts.
            lease.usage = Usage(lease.grant.request.prompt_tokens, seen)


def _so_far(told: Usage, request: Request, seen: int) -> Usage:
    """What a stream has cost that was cut short: it may have told of its prompt alone, or of one of its choices."""
    prompt_tokens = max(told.prompt_tokens, request.prompt_tokens) if request.sequences > 1 else told.prompt_tokens
    return Usage(prompt_tokens, max(told.output_tokens, seen), told.cached_tokens)


async def end_broken(attempt: Attempt, dialect: Dialect, client: Client) -> None:
    """Tell the client of a stream that it broke, in one event of its own dialect; of anything else, by cutting it."""
    if attempt.tap is None or attempt.writing:
        await client.abort()
        return
    # An event that was only begun is closed by a blank line, or the client would read the next one as part of it.
    boundary = b"" if attempt.tap.at_boundary else b"\n\n"
    said = boundary + error_event(dialect, f"The stream broke: {attempt.message}")
    # An engine that dies says so itself, if it can.
    await end_saying(b"" if attempt.tap.error_seen else said, client)


async def end_saying(last_words: bytes, client: Client) -> None:
    """End a stream that broke with these bytes, and its connection.

    The last chunk is withheld, so that a client that knows no error events does not take what it has for the whole.
    Some libraries forget what they have read when they meet that end: the event is given time to reach its reader.
    """
    try:
        async with asyncio.timeout(GOODBYE_S):
            client.write(last_words)
            await client.end(whole=False)
            await asyncio.sleep(LAST_WORDS_S)
    except TimeoutError:
        await client.abort()


async def end_within(client: Client, limit_s: float) -> None:
    """End an answer of which nothing is missing. Raises ConnectionAbortedError for a client that does not take it."""
    try:
        async with asyncio.timeout(limit_s):
            await client.end()
    except TimeoutError:
        await client.abort()
        raise ConnectionAbortedError("it stopped reading") from None


async def _read_held(exchange: Exchange) -> bytes:
    body = bytearray()
    while len(body) <= HELD_BYTES_MAX:
        data = await exchange.chunk()
        if not data:
            break
        body += data
    return bytes(body)


def is_encoded(exchange: Exchange) -> bool:
    """Whether an answer is compressed, although that was not asked for."""
    said = [value.strip().lower() for name, value in exchange.headers if name.lower() == "content-encoding"]
    return any(value not in ("", "identity") for value in said)


def is_event_stream(exchange: Exchange) -> bool:
    """Whether the body of an answer is server-sent events."""
    return any(
        name.lower() == "content-type" and value.lower().startswith("text/event-stream")
        for name, value in exchange.headers
    )
