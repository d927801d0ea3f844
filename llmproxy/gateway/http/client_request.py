"""Subclasses of aiohttp's requests and answers that need fewer Python calls in the usual cases.

`ChunkedRequest` adds one call instead, so that a trailer cannot get into the next request.
"""

from __future__ import annotations

from typing import Protocol, cast

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD


class Connection(Protocol):
    """The methods of `ClientConnection` that a request uses."""

    def keep_head(self, message: RawRequestMessage, facts: object) -> bool:
        """Keeps `facts` about the head `message` for later requests with an equal head.

        Returns whether they are kept.
        """

    def ended_without_trailer(self, body: StreamReader) -> bool:
        """Returns whether a chunked body has ended without a trailer and nothing was read after the body."""


class ClientRequest(web.BaseRequest):
    """A request of aiohttp. `facts` is the object that `keep_facts` kept for an equal head; None if there is none."""

    facts: object = None

    def keep_facts(self, facts: object) -> bool:
        """Keeps `facts` for later requests with an equal head on the same connection. Returns whether they are kept."""
        return cast(Connection, self._protocol).keep_head(self._message, facts)


class ChunkedRequest(ClientRequest):
    """A chunked request. Its connection is reused only if the request certainly had no trailer.

    The parser would add the last field of a trailer to the next request.
    """

    @property
    def keep_alive(self) -> bool:
        return super().keep_alive and cast(Connection, self._protocol).ended_without_trailer(self.content)


def arrived_body(request: web.BaseRequest) -> bytes | None:
    """Takes the body of a request out of aiohttp's buffer, if the whole body has arrived.

    Returns None if it has not arrived or is broken, or if a part was read. Most bodies arrive with their head, and
    aiohttp's reader would take ten calls for them.
    """
    content = request._payload
    if content is EMPTY_PAYLOAD:
        return b""
    if not content._eof or content._exception is not None or content._buffer_offset:
        return None
    pieces = list(content._buffer)
    content._buffer.clear()
    content._size = 0
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class SentResponse(web.StreamResponse):
    """Given to aiohttp in place of an answer that the proxy has already written to the transport itself."""

    prepared = True
    keep_alive: bool | None = True  # Whether the connection may serve another request.

    def force_close(self) -> None:
        self.keep_alive = False

    async def prepare(self, _request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, _data: bytes = b"") -> None:
        return None
