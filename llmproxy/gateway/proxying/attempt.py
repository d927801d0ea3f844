"""An attempt to serve a request on one backend: the call, its result, and its time limits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import IntEnum
from math import inf

from llmproxy.config import TimeoutsConfig
from llmproxy.core.domain import Outcome, Stage, Usage, Verdict
from llmproxy.core.kv_connectors import KvConnector, Parameters
from llmproxy.core.retry import MEANINGS, Again, Cause
from llmproxy.gateway.http.headers import Headers
from llmproxy.gateway.http.routes import Dialect
from llmproxy.gateway.proxying.sse import StreamTap
from llmproxy.observe.exit import Split, shortened
from llmproxy.scheduling.attempts import AttemptRecord, AttemptResult
from llmproxy.upstream.port import Body


@dataclass(frozen=True, slots=True)
class Call:
    """The request as it is sent to a backend, and how to treat the answer."""

    method: str
    path_qs: str
    headers: Headers
    body: Body
    stream: bool
    hide_usage: bool
    dialect: Dialect
    # The upper bound for the usage of the answer; None if the answer is free.
    usage_max: Usage | None
    stage: Stage = Stage.WHOLE
    # Reads the answer to a prefill, which does not go to the client. None for any other call.
    connector: KvConnector | None = None
    # The number of events that only announce the stream. It is buffered until more events have come.
    opening_events: int = 0
    # Whether the call goes on for a moment after the client has left, so that the engines free the prompt.
    released: bool = False
    # Whether the client's key is replaced by the proxy's own key, or by none.
    own_key: bool = True
    # Whether the backend lists the model, so that "unknown model" is the backend's error and not the client's.
    listed: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete error answer of a backend. The client gets it if no other attempt is made."""

    status: int
    reason: str
    headers: Headers
    body: bytes


class AttemptState(IntEnum):
    """How far an attempt has come."""

    CONNECTING = 0
    HEAD = 1  # The backend has sent the head of an answer.
    HELD = 2  # Bytes of the body are held back: the first event of a stream, an error, or the result of a prefill.
    STREAMING = 3  # The client gets the answer. No other attempt can be made.
    DELIVERING = 4  # The whole answer is written, and the client still has to read the rest.
    DONE = 5
    FAILED = 6


@dataclass(slots=True, repr=False)
class Attempt(AttemptResult):
    """An attempt: its state, and its result so far."""

    state: AttemptState = AttemptState.CONNECTING
    # Whether the attempt has been in STREAMING: the answer to the client has begun.
    committed: bool = False
    outcome: Outcome = Outcome.INTERNAL
    # The error message for the client.
    message: str = ""
    # More about the error, for the log only, because it may contain addresses.
    detail: str = ""
    status: int = 0
    # The backend's own error answer.
    answer: Answer | None = None
    first_token_s: float | None = None
    last_byte_s: float = 0.0
    max_gap_s: float = 0.0
    chunks: int = 0
    body_bytes: int = 0
    head: bytes = b""
    tail: bytes = b""
    usage: Usage | None = None
    # The KV transfer parameters of a prefill.
    parameters: Parameters | None = None
    # Why a stage of a split request failed.
    split: Split | None = None
    tap: StreamTap | None = None

    def __repr__(self) -> str:
        return (
            f"<Attempt {self.state.name} outcome={self.outcome} verdict={self.verdict} status={self.status}"
            f" chunks={self.chunks} again={self.again.name}>"
        )

    def enter(self, state: AttemptState) -> None:
        """Change the state. Raises ValueError for a step back, and for any step after DONE.

        A failed attempt may enter DELIVERING, because the client gets the error event that ended its stream, and may
        fail again meanwhile.
        """
        was = self.state
        if was is AttemptState.DONE or (
            state <= was and (was is not AttemptState.FAILED or state < AttemptState.DELIVERING)
        ):
            raise ValueError(f"an attempt cannot go from {was.name} to {state.name}")
        self.state = state
        if state is AttemptState.STREAMING:
            self.committed = True

    def fail(self, outcome: Outcome, cause: Cause, message: str) -> None:
        """Record a failure. `cause` decides the verdict and whether the request may be retried."""
        meaning = MEANINGS[cause]
        self.enter(AttemptState.FAILED)
        self.outcome, self.verdict, self.message = outcome, meaning.verdict, message
        self.again = Again.NO if self.committed else meaning.again
        self.deadly = meaning.deadly

    def complete(self) -> None:
        """Record that the answer is complete. The client may not have got all of it yet."""
        self.outcome, self.verdict = Outcome.COMPLETED, Verdict.SERVED

    def refuses(self, member: bytes) -> bool:
        """Whether the backend refused the request because of this member of its body."""
        return self.status in (400, 422) and self.answer is not None and member in self.answer.body

    def note(self, record: AttemptRecord) -> None:
        """Complete the record of this attempt at its end."""
        record.ended_s, record.first_byte_s = asyncio.get_running_loop().time(), self.first_token_s
        record.verdict, record.status = self.verdict, self.status or None
        if self.message or self.detail:
            record.error = shortened(f"{self.message} {self.detail}".strip())


class AttemptTimer:
    """The time limits of one attempt, on one timer that is moved while the answer arrives.

    A stream has a limit for its first token and a limit for silence after it. Every attempt has a total limit.
    """

    def __init__(self, timeouts: TimeoutsConfig, streams: bool, first_byte_s: float = inf) -> None:
        """`first_byte_s` limits the time to the first byte of this attempt, in addition to the configured limit."""
        loop = asyncio.get_running_loop()
        self.now = loop.time
        self.streams = streams
        self.scope: asyncio.Timeout | None = None
        began_s = loop.time()
        self._end_s = began_s + timeouts.total_s
        self._stall_s = timeouts.stall_s
        self._moved_s = 0.0
        self._phase = f"sent no first byte within {timeouts.first_byte_s:g} s (timeouts.first_byte_s)"
        if first_byte_s < timeouts.first_byte_s:
            self._phase = f"did not compute the prompt within {first_byte_s:.0f} s, long after it should have"
        first_byte_s = min(first_byte_s, timeouts.first_byte_s)
        self._total = f"did not finish within {timeouts.total_s:g} s (timeouts.total_s)"
        self.deadline_s = min(self._end_s, began_s + first_byte_s) if streams else self._end_s
        self._streaming = False

    def streaming(self, now: float) -> None:
        """Limit silence from now on: the first token has come."""
        self._streaming = True
        self._phase = f"was silent for {self._stall_s:g} s in mid-stream (timeouts.stall_s)"
        self._move(now)

    def alive(self, now: float) -> None:
        """Restart the limit for silence: bytes have come."""
        # Moving the timer for every chunk would cost more than relaying it; an eighth of the limit is exact enough.
        if self._streaming and now - self._moved_s > self._stall_s / 8:
            self._move(now)

    def cut(self) -> None:
        """End the attempt now."""
        if self.scope is not None and not self.scope.expired():
            self.scope.reschedule(self.now())

    @property
    def cause(self) -> Cause:
        """The limit that was exceeded."""
        # The clock cannot tell: timers of the loop go off up to a millisecond early.
        if self.deadline_s >= self._end_s:
            return Cause.OVERRAN
        return Cause.STALLED if self._streaming else Cause.LATE

    def reason(self) -> str:
        """The exceeded limit as a sentence for the client."""
        return "The backend " + (self._total if self.cause is Cause.OVERRAN else self._phase) + "."

    def _move(self, now: float) -> None:
        self._moved_s = now
        self.deadline_s = min(self._end_s, now + self._stall_s * 1.125)
        if self.scope is not None and not self.scope.expired():
            self.scope.reschedule(self.deadline_s)
