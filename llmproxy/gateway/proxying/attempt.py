"""One attempt: what is sent to a backend, what became of it, and how long it may take."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
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
    """What is sent to any backend. `usage_max` is the most that the answer may cost, None where it costs nothing.

    The answer to a prefill is for the proxy, and `connector` reads it. A stream is held back until more than its
    `opening_events` have come. A stage that is `released` is not cut before both engines know that its client left.
    `own_key`: the key that goes with it is the proxy's, not that of the client. `listed`: a backend that has no such
    model breaks the promise of its list.
    """

    method: str
    path_qs: str
    headers: Headers
    body: Body
    stream: bool
    hide_usage: bool
    dialect: Dialect
    usage_max: Usage | None
    stage: Stage = Stage.WHOLE
    connector: KvConnector | None = None
    opening_events: int = 0
    released: bool = False
    own_key: bool = True
    listed: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete error answer of a backend. It is sent to the client where no other attempt is made."""

    status: int
    reason: str
    headers: Headers
    body: bytes


@dataclass(slots=True)
class Attempt(AttemptResult):
    """One attempt and what became of it.

    Until it is `committed`, the client has seen nothing. `answer` is the backend's own error, where it sent one.
    `message` is for the client; `detail` is for the log alone, because it may have addresses. While `writing`, the
    client is slower than the backend; once `ended`, all of the answer was handed to the client, which has to take it.
    `parameters` are what a prefill handed over, and `split` is why a stage failed.
    """

    outcome: Outcome = Outcome.INTERNAL
    message: str = ""
    detail: str = ""
    status: int = 0
    committed: bool = False
    answer: Answer | None = None
    first_token_s: float | None = None
    last_byte_s: float = 0.0
    max_gap_s: float = 0.0
    chunks: int = 0
    body_bytes: int = 0
    writing: bool = False
    ended: bool = False
    head: bytes = b""
    tail: bytes = b""
    usage: Usage | None = None
    parameters: Parameters | None = None
    split: Split | None = None
    tap: StreamTap | None = field(default=None, repr=False)

    def fail(self, outcome: Outcome, cause: Cause, message: str) -> None:
        """The attempt failed for this cause, which says what may become of its request."""
        meaning = MEANINGS[cause]
        self.outcome, self.verdict, self.message = outcome, meaning.verdict, message
        self.again = Again.NO if self.committed else meaning.again
        self.deadly = meaning.deadly

    def complete(self) -> None:
        self.outcome, self.verdict = Outcome.COMPLETED, Verdict.SERVED

    def refuses(self, member: bytes) -> bool:
        """Whether the backend refused the request for this member of its body."""
        return self.status in (400, 422) and self.answer is not None and member in self.answer.body

    def note(self, record: AttemptRecord) -> None:
        """Complete the record of this attempt, which has ended."""
        record.ended_s, record.first_byte_s = asyncio.get_running_loop().time(), self.first_token_s
        record.verdict, record.status = self.verdict, self.status or None
        if self.message or self.detail:
            record.error = shortened(f"{self.message} {self.detail}".strip())


class AttemptTimer:
    """The time limits of one attempt, on one timer that is moved as the answer comes.

    Streams have a limit for their first token and one for silence after it; every attempt has one in total.
    """

    def __init__(self, timeouts: TimeoutsConfig, streams: bool, first_byte_s: float = inf) -> None:
        """`first_byte_s` is a limit for the first byte of this attempt alone, beside the configured one."""
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
        """The first token came: from here on, silence is limited."""
        self._streaming = True
        self._phase = f"was silent for {self._stall_s:g} s in mid-stream (timeouts.stall_s)"
        self._move(now)

    def alive(self, now: float) -> None:
        # To move the timer for every chunk would cost more than to relay it; an eighth of the limit is exact enough.
        if self._streaming and now - self._moved_s > self._stall_s / 8:
            self._move(now)

    def cut(self) -> None:
        """End the attempt now."""
        if self.scope is not None and not self.scope.expired():
            self.scope.reschedule(self.now())

    @property
    def cause(self) -> Cause:
        """Which limit was exceeded."""
        # Not by the clock: timers of the loop go off up to a millisecond early.
        if self.deadline_s >= self._end_s:
            return Cause.OVERRAN
        return Cause.STALLED if self._streaming else Cause.LATE

    def reason(self) -> str:
        """The limit that was exceeded, in words."""
        return "The backend " + (self._total if self.cause is Cause.OVERRAN else self._phase) + "."

    def _move(self, now: float) -> None:
        self._moved_s = now
        self.deadline_s = min(self._end_s, now + self._stall_s * 1.125)
        if self.scope is not None and not self.scope.expired():
            self.scope.reschedule(self.deadline_s)
