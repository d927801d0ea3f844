"""An answer that has begun, on its way from its backend to its client."""

from __future__ import annotations

from llmproxy.core.domain import Outcome, Verdict
from llmproxy.dispatcher import Lease
from llmproxy.gateway.attempt import Attempt, Client
from llmproxy.gateway.attempt_timer import AttemptTimer
from llmproxy.gateway.sse import StreamTap
from llmproxy.upstream import Exchange

TAIL_BYTES = 64 << 10
"""The end of an answer without a stream, where its `usage` stands."""
PROGRESS_EVENTS = 32
"""How many stream events pass between two reports to the scheduler."""
PROGRESS_S = 0.5
"""How much time passes between them at most, as long as there are events: an engine that has become slow shows so."""


class Passing:
    """An answer on its way from a backend to a client, byte by byte, in the callback in which the bytes arrive."""

    __slots__ = ("_attempt", "_client", "_exchange", "_timer")

    def __init__(self, attempt: Attempt, timer: AttemptTimer, exchange: Exchange, client: Client) -> None:
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
        """All of it was handed on: the rest is for the client to take."""
        self._attempt.writing = True
        await self._client.end()

    def pause(self) -> None:
        self._attempt.writing = True
        self._exchange.pause()

    def resume(self) -> None:
        self._attempt.writing = False
        # While nothing was read, the backend could not be heard.
        self._timer.alive(self._timer.now())
        self._exchange.resume()


class PassingEvents(Passing):
    """The events of a stream on their way. What they tell is noted as they pass."""

    __slots__ = ("_lease", "_reported", "_reported_s", "_tap")

    def __init__(
        self, attempt: Attempt, timer: AttemptTimer, exchange: Exchange, client: Client, tap: StreamTap, lease: Lease
    ) -> None:
        super().__init__(attempt, timer, exchange, client)
        self._tap = tap
        self._lease = lease
        self._reported = 0
        self._reported_s = attempt.last_byte_s = timer.now()

    def take(self, data: bytes) -> None:
        attempt, timer = self._attempt, self._timer
        now = timer.now()
        gap_s = now - attempt.last_byte_s
        if gap_s > attempt.max_gap_s:
            attempt.max_gap_s = gap_s
        attempt.last_byte_s = now
        timer.alive(now)
        self.pass_on(self._tap.feed(data), now)

    def pass_on(self, data: bytes, now: float) -> None:
        """Hand on what the tap lets through, which may be nothing."""
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
            # Many clients leave as soon as they have read the end mark; nothing is missing from what they got.
            attempt.outcome, attempt.verdict = Outcome.COMPLETED, Verdict.SERVED
        events = tap.data_events
        if events - self._reported >= PROGRESS_EVENTS or now - self._reported_s >= PROGRESS_S:
            self._reported, self._reported_s = events, now
            self._lease.progress(events)

    def flush(self) -> None:
        """The stream has ended, perhaps in the middle of an event."""
        held = self._tap.flush()
        if held:
            self._client.write(held)
