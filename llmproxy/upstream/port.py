"""The upstream port: the interface to send a request to a backend and read the response as it arrives.

The relay uses `Upstream` and `Exchange`; `client` implements them. The port enforces the connect timeout, and callers
enforce all others: they cancel, or call `Exchange.close`. Both cut the connection at once, because nothing else stops
an engine from generating.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

Headers = Iterable[tuple[str, str]] | Mapping[str, str]
Body = Sequence[bytes | memoryview]  # In pieces, so that a change in a body of 50 MB does not copy all of it.


class ConnectFailed(Exception):  # noqa: N818 - a fact about one attempt, not an error of this code
    """There was no connection, so no byte was sent. The request can safely be retried on another backend."""


class LocalFailure(ConnectFailed):
    """The backend is not the cause: no descriptor or local port is free, or its name does not resolve."""

    def __init__(self, lack: str, detail: str) -> None:
        super().__init__(detail)
        self.message = f"The proxy cannot open a connection to a backend now: {lack}. Try again."


class UpstreamBroken(Exception):  # noqa: N818 - a fact about one attempt, not an error of this code
    """The connection failed after the request was sent, or may have been."""


class InvalidResponse(UpstreamBroken):
    """The backend's bytes are not a valid HTTP/1.1 response."""


class Exchange(Protocol):
    """A response whose head has arrived. Read its body by `chunk` or `flow`."""

    @property
    def status(self) -> int:
        """The status code, never 1xx except 101."""

    @property
    def reason(self) -> str:
        """The reason phrase, possibly empty."""

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Names and values in their original order and case, with repetitions. Decoded as surrogate-escaped UTF-8."""

    async def chunk(self) -> bytes:
        """Waits for at least one byte of the body, and returns the bytes that have arrived; b"" after the end.

        Must not be called by two tasks at once. Safe to cancel. Raises UpstreamBroken if the body is cut short.
        """

    async def flow(self, sink: Callable[[bytes], None]) -> None:
        """Passes each further piece of the body to `sink`, in the callback in which it arrives, until the end.

        Raises UpstreamBroken if the body is cut short. An exception of `sink` cuts the connection and is raised here.
        """

    def halt(self) -> None:
        """Ends `flow` from within its sink. The rest of the body is read by `chunk`."""

    @property
    def ended(self) -> bool:
        """Whether all of the body has arrived."""

    def pause(self) -> None:
        """Stops reading from the backend, which then has to wait (backpressure)."""

    def resume(self) -> None:
        """Reads from the backend again."""

    def close(self) -> None:
        """Cuts the connection, unless the whole body has arrived and the connection is free again. Idempotent."""


async def read_response_body(exchange: Exchange, bytes_max: int) -> bytes:
    """Returns the body, cut with its connection somewhere after `bytes_max` bytes. Raises UpstreamBroken."""
    body = bytearray()
    try:
        while len(body) <= bytes_max and (piece := await exchange.chunk()):
            body += piece
    finally:
        exchange.close()
    return bytes(body)


class Upstream(Protocol):
    async def open(
        self, base_url: str, method: str, path_qs: str, headers: Headers, body: Body, connect_timeout_s: float
    ) -> Exchange:
        """Sends a request and waits for the head of the response. Redirects are not followed.

        If the backend closes an idle connection just then, the request is sent again on a new connection. A GET is sent
        again whenever a reused connection breaks before a byte of the response. Cancellation cuts the connection.

        `path_qs` and `headers` are sent as given. `host` is added if absent, and `content-length` is set from `body`.
        The headers must not contain hop-by-hop headers or `expect`. Raises ConnectFailed (LocalFailure if the backend
        is not the cause) or UpstreamBroken.
        """
