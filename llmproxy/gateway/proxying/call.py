"""A call to a backend, its answer, and its time limits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf

from llmproxy.config import TimeoutsConfig
from llmproxy.core.domain import Stage, Usage
from llmproxy.core.kv_connectors import KvConnector, Parameters
from llmproxy.core.retry import Cause
from llmproxy.gateway.http.headers import Headers
from llmproxy.gateway.http.routes import Dialect
from llmproxy.gateway.proxying.sse import StreamTap
from llmproxy.upstream.port import Body


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete error answer of a backend. The client gets it if no other attempt is made."""

    status: int
    reason: str
    headers: Headers
    body: bytes


@dataclass(slots=True)
class Call:
    """The request as it is sent to a backend, how to treat the answer, and the bytes of the answer that are kept.

    The fields up to `listed` never change.
    """

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

    # The backend's own error answer.
    answer: Answer | None = None
    head: bytes = b""
    tail: bytes = b""
    answer_bytes: int = 0
    last_byte_s: float = 0.0
    # The KV transfer parameters of a prefill.
    parameters: Parameters | None = None
    tap: StreamTap | None = None

    def refuses(self, member: bytes) -> bool:
        """Whether the backend refused the request because of this member of its body."""
        return self.answer is not None and self.answer.status in (400, 422) and member in self.answer.body


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
