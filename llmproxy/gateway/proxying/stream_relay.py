"""Relays an answer that has begun from its backend to its client."""

from __future__ import annotations

from llmproxy.gateway.http.headers import Headers, to_client
from llmproxy.gateway.proxying.attempt import Attempt, AttemptTimer
from llmproxy.gateway.proxying.response_writer import ResponseWriter
from llmproxy.gateway.proxying.sse import StreamTap
from llmproxy.scheduling.lease import Lease
from llmproxy.upstream.port import Exchange

BUFFERED_BYTES_MAX = 1 << 20
"""Of an error answer, or of the first event of a stream: both are read before they are sent."""
TAIL_BYTES = 64 << 10
"""The end of an answer without a stream, which has its `usage`."""
PROGRESS_EVENTS = 32
"""How many stream events come between two reports to the scheduler."""
PROGRESS_S = 0.5
"""The longest time between two reports while events come, so that an engine that has become slow is seen."""


class ResponseRelay:
    """Relays the bytes of an answer, in the callback in which they arrive."""

    __slots__ = ("_attempt", "_client", "_exchange", "_timer")

    def __init__(self, attempt: Attempt, timer: AttemptTimer, exchange: Exchange, client: ResponseWriter) -> None:
        self._attempt = attempt
        self._timer = timer
        self._exchange = exchange
        self._client = client
        client.source = self

    def take(self, data: bytes) -> None:
        attempt = self._attempt
        attempt.chunks += 1
        attempt.body_bytes += len(data)
        attempt.tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (attempt.tail + data)[-TAIL_BYTES:]
        self._client.write(data)
        self._timer.alive(self._timer.now())

    async def end(self) -> None:
        """All of it was handed to the client, which has to take it."""
        self._attempt.writing = self._attempt.ended = True
        # An answer that came in one piece had no limit yet but the one in total.
        self._timer.streaming(self._timer.now())
        await self._client.end()

    def pause(self) -> None:
        self._attempt.writing = True
        self._exchange.pause()

    def resume(self) -> None:
        self._attempt.writing = False
        # While nothing was read, the backend was not silent.
        self._timer.alive(self._timer.now())
        self._exchange.resume()


class StreamRelay(ResponseRelay):
    """Relays the events of a stream, and notes what they say.

    The answer begins with the first whole event or comment, or with the first event behind the `opening_events`. If an
    error comes before, nothing is sent, because another backend may be tried: the flow halts, and `first` has what
    came.
    """

    __slots__ = ("_lease", "_opening_events", "_reported", "_reported_s", "_tap", "first")

    def __init__(
        self,
        attempt: Attempt,
        timer: AttemptTimer,
        exchange: Exchange,
        client: ResponseWriter,
        tap: StreamTap,
        lease: Lease,
        opening_events: int = 0,
    ) -> None:
        super().__init__(attempt, timer, exchange, client)
        self._opening_events = opening_events
        self._tap = tap
        self._lease = lease
        self._reported = 0
        self._reported_s = 0.0
        self.first = b""

    def take(self, data: bytes) -> None:
        attempt, timer = self._attempt, self._timer
        if not attempt.committed:
            self._hold(data)
            return
        now = timer.now()
        gap_s = now - attempt.last_byte_s
        if gap_s > attempt.max_gap_s:
            attempt.max_gap_s = gap_s
        attempt.last_byte_s = now
        timer.alive(now)
        self._forward(self._tap.feed(data), now)

    def _hold(self, data: bytes) -> None:
        attempt, tap = self._attempt, self._tap
        attempt.head = (attempt.head + data)[:4096]
        self.first += tap.feed(data)
        if tap.error_first or (self._opening_events and tap.error_seen):
            self._exchange.halt()
        elif len(self.first) > BUFFERED_BYTES_MAX or (
            tap.data_events > self._opening_events if self._opening_events else tap.first_event_complete
        ):
            self._begin()

    def _begin(self) -> None:
        check_lease(self._lease)
        attempt, exchange, now = self._attempt, self._exchange, self._timer.now()
        self._lease.committed()
        attempt.committed = True
        self._client.commit(exchange.status, exchange.reason, event_fields(exchange))
        self._reported_s = attempt.last_byte_s = now
        first, self.first = self.first, b""
        self._forward(first, now)

    def _forward(self, data: bytes, now: float) -> None:
        """Send what the tap returned, which may be nothing."""
        attempt, tap = self._attempt, self._tap
        if attempt.first_token_s is None and tap.first_token_seen:
            attempt.first_token_s = now
            attempt.max_gap_s = 0.0
            self._lease.started()
            self._timer.streaming(now)
        if data:
            attempt.chunks += 1
            attempt.body_bytes += len(data)
            self._client.write(data)
        if tap.done_seen and not tap.error_seen:
            # Many clients leave as soon as they have read the end mark, and they have all of the answer.
            attempt.complete()
        events = tap.data_events
        if events - self._reported >= PROGRESS_EVENTS or now - self._reported_s >= PROGRESS_S:
            self._reported, self._reported_s = events, now
            self._lease.progress(events)

    def flush(self) -> None:
        """Send the rest of a stream that has ended, perhaps in the middle of an event."""
        held = self._tap.flush()
        if not self._attempt.committed:
            self.first += held
            self._begin()
        elif held:
            self._client.write(held)


def event_fields(exchange: Exchange) -> Headers:
    """The header fields of a stream for its client.

    They have no content length, because events are taken out and added.
    """
    return [(name, value) for name, value in to_client(exchange.headers) if name.lower() != "content-length"]


def check_lease(lease: Lease) -> None:
    """Raise TimeoutError for a lease that was taken back in the turn in which the first byte came.

    The timer that ends the attempt has been set already, and must not expire between two bytes of an answer.
    """
    if lease.preempted or lease.revoked:
        raise TimeoutError
