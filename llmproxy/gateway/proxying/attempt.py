"""One attempt: what is sent to a backend, the client's side, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from llmproxy.attempts import AttemptResult
from llmproxy.core.domain import Outcome, Usage, Verdict
from llmproxy.gateway.http.headers import Headers
from llmproxy.gateway.http.routes import Dialect
from llmproxy.gateway.proxying.response_writer import Source
from llmproxy.gateway.proxying.sse import StreamTap
from llmproxy.upstream.port import Body


class Client(Protocol):
    """The client's side of one request."""

    source: Source | None

    def commit(self, status: int, reason: str, headers: Headers) -> None:
        """Begin the answer with this head. From here on, no other attempt can be made."""

    def write(self, data: bytes) -> None:
        """Hand bytes on. Raises ConnectionError when the client is gone."""

    async def drained(self) -> None:
        """Wait while the client is slower."""

    async def end(self, *, whole: bool = True) -> None:
        """End the answer. One that is not whole gets no end mark, and its connection is closed."""

    async def abort(self) -> None:
        """Close the connection, so that the client sees that the answer is not complete."""


@dataclass(frozen=True, slots=True)
class Call:
    """What is sent to any backend. `usage_max` is the most that the answer may cost, None where it costs nothing."""

    method: str
    path_qs: str
    headers: Headers
    body: Body
    stream: bool
    hide_usage: bool
    dialect: Dialect
    usage_max: Usage | None


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
    tap: StreamTap | None = field(default=None, repr=False)

    def fail(self, outcome: Outcome, verdict: Verdict, message: str, *, retryable: bool) -> None:
        self.outcome, self.verdict, self.message = outcome, verdict, message
        self.retryable = retryable and not self.committed
