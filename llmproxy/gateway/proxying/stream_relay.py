"""Relays the body of an answer from the backend to the client."""

from __future__ import annotations

import asyncio
from functools import partial

from llmproxy.core.lease_events import Committed, Progress, Started
from llmproxy.gateway.http.headers import Headers, to_client
from llmproxy.gateway.proxying.call import Call
from llmproxy.gateway.proxying.response_writer import ResponseWriter
from llmproxy.gateway.proxying.sse import StreamTap
from llmproxy.lifecycle.paced import PacedCalls
from llmproxy.scheduling.attempt import Attempt, AttemptState
from llmproxy.scheduling.lease import Lease
from llmproxy.upstream.port import Exchange, UpstreamBroken

BUFFERED_BYTES_MAX = 1 << 20
"""The maximum size of an error answer, and of the first event of a stream, that is buffered before it is sent."""
TAIL_BYTES = 64 << 10  # How many of the last bytes of an answer without a stream are kept, to read its `usage`.
PROGRESS_S = 0.5
"""The seconds between two progress reports of a stream to the scheduler, which notices slow engines by them."""


class ResponseRelay:
    """Relays the body of an answer. `take` sends each piece in the callback in which it arrives.

    If the client reads too slowly, reading from the backend is paused.
    """

    __slots__ = ("_attempt", "_call", "_client", "_exchange")

    def __init__(self, attempt: Attempt, call: Call, exchange: Exchange, client: ResponseWriter) -> None:
        self._attempt = attempt
        self._call = call
        self._exchange = exchange
        self._client = client
        client.source = self

    def take(self, data: bytes) -> None:
        call = self._call
        self._attempt.chunks += 1
        call.answer_bytes += len(data)
        call.tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (call.tail + data)[-TAIL_BYTES:]
        self._client.write(data)
        call.heard_s = call.now()

    async def end(self) -> None:
        """Ends the answer, and waits until the client has read enough of it.

        Raises ConnectionError if the client is gone.
        """
        self._attempt.enter(AttemptState.DELIVERING)
        # An answer without a stream that came in one piece had only the total time limit so far.
        self._call.streaming(self._call.now())
        await self._client.end()

    def pause(self) -> None:
        self._exchange.pause()

    def resume(self) -> None:
        # The backend was not silent: the proxy did not read.
        self._call.heard_s = self._call.now()
        self._exchange.resume()


class StreamRelay(ResponseRelay):
    """Relays the events of a stream. The lease gets reports of progress while the relay is registered in `reports`.

    The answer to the client begins with the first complete event; with `opening_events`, only after one event more than
    this number. The events before that are buffered (`first`), and comments are sent at once. An error among the
    buffered events is not sent, so that another backend may be tried.
    """

    __slots__ = ("_lease", "_opening_events", "_reported_s", "_reports", "_tap", "first")

    def __init__(
        self,
        attempt: Attempt,
        call: Call,
        exchange: Exchange,
        client: ResponseWriter,
        tap: StreamTap,
        lease: Lease,
        reports: ProgressReports,
        opening_events: int = 0,
    ) -> None:
        super().__init__(attempt, call, exchange, client)
        self._opening_events = opening_events
        self._tap = tap
        self._lease = lease
        self._reports = reports
        self._reported_s = 0.0
        self.first = b""

    def take(self, data: bytes) -> None:
        attempt, call = self._attempt, self._call
        if not attempt.committed:
            self._buffer(data)
            return
        now = call.now()
        gap_s = now - call.last_byte_s
        if attempt.first_byte_s is not None and gap_s > (attempt.max_gap_s or 0.0):
            attempt.max_gap_s = gap_s
        call.last_byte_s = now
        call.heard_s = now
        self._forward(self._tap.feed(data), now)

    def _buffer(self, data: bytes) -> None:
        attempt, call, tap = self._attempt, self._call, self._tap
        if attempt.state is AttemptState.HEAD:
            attempt.enter(AttemptState.HELD)
        call.head = (call.head + data)[:4096]
        self.first += tap.feed(data)
        if tap.error_first or (self._opening_events and tap.error_seen):
            self._exchange.halt()
        elif len(self.first) > BUFFERED_BYTES_MAX or (
            tap.data_events > self._opening_events
            if self._opening_events
            else tap.first_token_seen or tap.data_events or tap.done_seen
        ):
            self._begin()
        elif tap.first_event_complete and not tap.data_events and tap.at_boundary and self._client.comment(self.first):
            self.first = b""

    def _begin(self) -> None:
        check_cut(self._call)
        attempt, exchange, now = self._attempt, self._exchange, self._call.now()
        self._lease.apply(Committed(self._lease.grant.lease), now)
        attempt.enter(AttemptState.STREAMING)
        self._client.commit(exchange.status, exchange.reason, event_fields(exchange))
        if self._call.rest_of is not None and self._client.paused:
            exchange.pause()
        self._reported_s = self._call.last_byte_s = now
        self._reports.add(self)
        first, self.first = self.first, b""
        self._forward(first, now)

    def _forward(self, data: bytes, now: float) -> None:
        """Sends the bytes that the tap returned, which may be none. Notes the first token and the end of the answer."""
        attempt, tap = self._attempt, self._tap
        if attempt.first_byte_s is None and tap.first_token_seen:
            attempt.first_byte_s = now
            attempt.max_gap_s = 0.0
            self._lease.apply(Started(self._lease.grant.lease), now)
            self._call.streaming(now)
        if data:
            attempt.chunks += 1
            self._client.write(data)
        if tap.error_seen:
            if tap.refused:
                # The client need not wait for the error until the engine has finished, and the engine's work is lost.
                self._exchange.halt()
        elif tap.done_seen:
            # Many clients leave as soon as they have read the end mark. Their answer is complete.
            attempt.complete()

    def report(self) -> None:
        """Reports the progress to the lease if bytes have come since the last report."""
        if self._call.last_byte_s > self._reported_s:
            now = self._reported_s = self._call.now()
            self._lease.apply(Progress(self._lease.grant.lease, self._tap.data_events), now)

    def flush(self) -> None:
        """Sends the buffered rest of a stream that has ended.

        Raises UpstreamBroken if the end of the answer is missing.
        """
        rest = self._tap.flush()
        if self._tap.cut_short:
            raise UpstreamBroken("the stream ended before the answer")
        if not self._attempt.committed:
            self.first += rest
            self._begin()
        elif rest:
            self._client.write(rest)


class ProgressReports:
    """Calls `report` of all open streams, in one sweep every PROGRESS_S.

    A report costs half as much in a sweep as between two chunks, because the code is in the caches of the processor.
    """

    def __init__(self) -> None:
        self._open: dict[StreamRelay, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        # Thousands of streams may be open.
        self._reporting = PacedCalls()

    def add(self, stream: StreamRelay) -> None:
        """Begins the reports of a stream."""
        self._open[stream] = None
        if self._timer is None:
            self._plan()

    def remove(self, stream: StreamRelay) -> None:
        """Ends the reports of a stream. The stream need not have been added."""
        self._open.pop(stream, None)

    def _plan(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PROGRESS_S, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        # A busy loop may take longer for a sweep than the time between two.
        if not self._reporting:
            for stream in self._open:
                self._reporting.add(partial(self._report, stream))
        if self._open:
            self._plan()

    def _report(self, stream: StreamRelay) -> None:
        if stream in self._open:
            stream.report()


def event_fields(exchange: Exchange) -> Headers:
    """Returns the header fields of a stream for the client.

    Content-Length is left out, because the proxy removes and adds events.
    """
    return [(name, value) for name, value in to_client(exchange.headers) if name.lower() != "content-length"]


def is_encoded(exchange: Exchange) -> bool:
    """Returns whether an answer is compressed, although the proxy asked for no compression."""
    encodings = [value.strip().lower() for name, value in exchange.headers if name.lower() == "content-encoding"]
    return any(value not in ("", "identity") for value in encodings)


def is_event_stream(exchange: Exchange) -> bool:
    """Returns whether the body of an answer consists of server-sent events."""
    for name, value in exchange.headers:
        if name.lower() == "content-type" and value.lower().startswith("text/event-stream"):
            return True
    return False


def check_cut(call: Call) -> None:
    """Raises TimeoutError if the call was cut in the iteration of the event loop in which the first byte came.

    The attempt is then about to be cancelled, so its answer to the client must not begin.
    """
    if call.was_cut:
        raise TimeoutError


async def read_answer(exchange: Exchange, bytes_max: int = BUFFERED_BYTES_MAX) -> bytes:
    """Returns the body of an answer. Stops reading after more than `bytes_max` bytes, so a longer body is cut."""
    body = bytearray()
    while len(body) <= bytes_max:
        data = await exchange.chunk()
        if not data:
            break
        body += data
    return bytes(body)
