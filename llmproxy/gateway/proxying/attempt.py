"""One attempt: what is sent to a backend, what came of it, and whom the answer is for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

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
        """Begin the answer with this head. From here on the request cannot be repeated."""

    def write(self, data: bytes) -> None:
        """Hand bytes on. Raises ConnectionError when the client is gone."""

    async def drained(self) -> None:
        """Wait while the client is slower."""

    async def end(self, *, whole: bool = True) -> None:
        """The answer ends. One that is not whole has no mark of its end, and its connection is closed behind it."""

    async def abort(self) -> None:
        """The answer cannot be completed: let the client see that by closing its connection."""


@dataclass(frozen=True, slots=True)
class Call:
    """What is sent to a backend, whichever one it is. `usage_max` is the most that the answer may cost, None where it
    costs nothing."""

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
    """A complete answer of a backend that was held back, to be passed on where no other attempt is made."""

    status: int
    reason: str
    headers: Headers
    body: bytes


@dataclass(slots=True)
class Attempt:
    """What became of one attempt.

    Until `committed`, the client has seen nothing. `retryable` says that another backend might do better. `answer` is
    the backend's own error where it gave one. `message` is for the client, `detail` for the log alone: addresses are
    nobody else's business. While `writing`, it is the client who is waited for, and once `ended` for nothing but to
    take what it was handed.
    """

    outcome: Outcome = Outcome.INTERNAL
    verdict: Verdict = Verdict.CLIENT_GONE
    message: str = ""
    detail: str = ""
    status: int = 0
    committed: bool = False
    retryable: bool = False
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
