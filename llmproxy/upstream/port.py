"""The upstream port: the interface to send a request to a backend and read the response as it arrives.

The relay uses `Upstream` and `Exchange`; the modules `client` and `connection` implement them. The port enforces only
the connect timeout. Callers enforce all other time limits: they cancel `open`, or call `Exchange.close`. Both cut the
connection at once, because nothing else stops an engine from generating.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

Headers = Iterable[tuple[str, str]] | Mapping[str, str]
Body = Sequence[bytes | memoryview]  # In pieces, so that a change in a body of 50 MB does not copy all of it.


class ConnectFailed(Exception):  # noqa: N818 - a fact about one attempt, not an error of this code
    """No connection could be opened, so no byte was sent. The request can safely be retried on another backend."""


class LocalFailure(ConnectFailed):
    """The proxy could not open a connection, and the backend is not the cause.

    A resource such as file descriptors or local ports is used up, or the backend's name does not resolve. `lack` is the
    cause as a phrase for clients, `detail` a text for the log.
    """

    def __init__(self, lack: str, detail: str) -> None:
        super().__init__(detail)
        self.message = f"The proxy cannot open a connection to a backend now: {lack}. Try again."


class UpstreamBroken(Exception):  # noqa: N818 - a fact about one attempt, not an error of this code
    """The connection failed after the request was sent at least partly. The backend may have worked on the request."""


class InvalidResponse(UpstreamBroken):
    """The backend's bytes are not a valid HTTP/1.1 response."""


class Exchange(Protocol):
    """A response whose head has arrived. The body is read by `chunk` or by `flow`."""

    @property
    def status(self) -> int:
        """The HTTP status code, never 1xx except 101."""

    @property
    def reason(self) -> str:
        """The reason phrase; "" if the backend sent none."""

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The names and values of the fields in their original order and case, with repetitions.

        Bytes that are not UTF-8 are surrogate escapes.
        """

    async def chunk(self) -> bytes:
        """Waits for at least one byte of the body, and returns the bytes that have arrived; b"" after the end.

        Must not be called by two tasks at once. A cancellation loses no bytes. Raises UpstreamBroken if the body is cut
        short.
        """

    async def flow(self, sink: Callable[[bytes], None]) -> None:
        """Passes each further piece of the body to `sink`, in the callback in which it arrives, until the end.

        Returns at the end of the body, or after `halt`. Raises UpstreamBroken if the body is cut short, and any
        exception of `sink`.
        """

    def halt(self) -> None:
        """Ends `flow`; called by its sink. The rest of the body is then read by `chunk`."""

    @property
    def ended(self) -> bool:
        """Whether the whole body has arrived."""

    def pause(self) -> None:
        """Stops reading from the backend, which then has to wait (backpressure)."""

    def resume(self) -> None:
        """Reads from the backend again after `pause`."""

    def close(self) -> None:
        """Cuts the connection.

        Does nothing if the whole body has arrived, because the connection is then free for other requests.
        """


async def read_response_body(exchange: Exchange, bytes_max: int) -> bytes:
    """Returns the body of a response.

    A longer body than `bytes_max` is cut somewhere after this number of bytes, and its connection is closed. Raises
    UpstreamBroken.
    """
    body = bytearray()
    try:
        while len(body) <= bytes_max and (piece := await exchange.chunk()):
            body += piece
    finally:
        exchange.close()
    return bytes(body)


class Upstream(Protocol):
    """Sends requests to backends. `client.HttpUpstream` implements it."""

    async def open(
        self, base_url: str, method: str, path_qs: str, headers: Headers, body: Body, connect_timeout_s: float
    ) -> Exchange:
        """Sends a request, and returns when the head of the response has arrived. Redirects are not followed.

        If the backend has closed an idle connection just before, the request is sent again on a new connection. A GET
        is sent again whenever a reused connection breaks before a byte of the response. Cancellation cuts the
        connection.

        `path_qs` and `headers` are sent as given. `host` is added if absent, and `content-length` is set from `body`.
        The headers must not contain hop-by-hop headers or `expect`. Raises ConnectFailed (LocalFailure if the backend
        is not the cause), UpstreamBroken, or ValueError for an invalid path or header.
        """
