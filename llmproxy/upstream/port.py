"""The upstream port: one request to one backend, and its answer piece by piece as it arrives.

`Upstream` and `Exchange` are the interface that the relay uses; `client` implements it. All time limits but the one
for connecting are the caller's: it cancels, or calls `Exchange.close`. Both cut the connection at once, because nothing
else makes an engine stop generating.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

Headers = Iterable[tuple[str, str]] | Mapping[str, str]
Body = Sequence[bytes | memoryview]
"""A request body in pieces, in order: a change in a body of 50 MB must not copy all of it."""


class ConnectFailed(Exception):  # noqa: N818 - a fact about one attempt, not an error of this code
    """There was no connection, so that no byte was sent: the request may go to another backend without any risk."""


class LocalFailure(ConnectFailed):
    """The cause is not the backend: a descriptor, a local port or the address of its name is lacking.

    `message` is for the client, and names no backend.
    """

    def __init__(self, lack: str, detail: str) -> None:
        super().__init__(detail)
        self.message = f"The proxy cannot open a connection to a backend now: {lack}. Try again."


class UpstreamBroken(Exception):  # noqa: N818 - a fact about one attempt, not an error of this code
    """The connection failed after the request was sent, or may have been."""


class InvalidResponse(UpstreamBroken):
    """What the backend sent is not an HTTP/1.1 response."""


class Exchange(Protocol):
    """One response. Its head has arrived; its body is read by `chunk` or `flow`."""

    @property
    def status(self) -> int:
        """The status code, never 1xx except 101."""

    @property
    def reason(self) -> str:
        """The reason phrase, possibly empty."""

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Names and values as they came: order, case and repetitions kept; bytes beyond ASCII are surrogate-escaped
        UTF-8."""

    async def chunk(self) -> bytes:
        """The bytes of the body that have arrived, waiting for the first of them; b"" at its end, then and ever after.

        Raises UpstreamBroken when the body is cut short. Never called by two tasks at once.
        """

    async def flow(self, sink: Callable[[bytes], None]) -> None:
        """Hand each further piece of the body to `sink` in the very callback in which it arrives, until its end.

        Raises UpstreamBroken when the body is cut short, and whatever `sink` raises, which cuts the connection.
        """

    def halt(self) -> None:
        """Called by the sink: `flow` ends, and the rest is left to `chunk`."""

    @property
    def ended(self) -> bool:
        """Whether all of the body has arrived."""

    def pause(self) -> None:
        """Read no more of the body for now, so that the backend has to wait."""

    def resume(self) -> None:
        """Read on."""

    def close(self) -> None:
        """Cut the connection, unless the body has arrived to its end and the connection is already free again.

        May be called at any time and any number of times.
        """


async def read_response_body(exchange: Exchange, bytes_max: int) -> bytes:
    """The whole body, or its beginning with more than `bytes_max` bytes. The connection is cut in the second case.

    Raises UpstreamBroken when the body is cut short.
    """
    body = bytearray()
    try:
        while len(body) <= bytes_max and (piece := await exchange.chunk()):
            body += piece
    finally:
        exchange.close()
    return bytes(body)


class Upstream(Protocol):
    """The way to the backends."""

    async def open(
        self,
        base_url: str,
        method: str,
        path_qs: str,
        headers: Headers,
        body: Body,
        connect_timeout_s: float,
    ) -> Exchange:
        """Send one request and wait for the head of its answer; redirects are answers like any other.

        The path and query go out as they are. Headers are sent as given, in their order; only `host` is added when
        absent, and `content-length` is always that of `body`. They hold no hop-by-hop header and no `expect`. A
        request on a kept connection that the backend dropped at the same moment, without seeing the request, is sent
        again on a new one. So is a GET whenever a kept connection ends before a byte of the answer. Raises
        ConnectFailed (LocalFailure is one of them) or UpstreamBroken; cancelling it cuts the connection.
        """
