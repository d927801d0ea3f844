"""Sends the answer of one request to its client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from http.client import responses
from typing import Any, Protocol

from aiohttp import HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time

from llmproxy.gateway.http.client_request import SentResponse
from llmproxy.gateway.http.connection import ClientConnection
from llmproxy.gateway.http.cors import Cors
from llmproxy.gateway.http.headers import SERVER, Headers, reason_to_client
from llmproxy.upstream import http1

_BODILESS = frozenset({204, 304})
EVENT_STREAM: Headers = [("Content-Type", "text/event-stream; charset=utf-8"), ("Cache-Control", "no-cache")]
KEEP_ALIVE = b": keep-alive\n\n"


class Server(Protocol):
    """The process that serves the request."""

    @property
    def shutting_down(self) -> bool:
        """Whether the process is about to end."""


class Source(Protocol):
    """The source of the bytes of an answer: the backend's side of a relay."""

    def pause(self) -> None:
        """Stops reading from the backend, because the client reads more slowly than the answer arrives."""

    def resume(self) -> None:
        """Reads from the backend again."""


async def within(step: Coroutine[Any, Any, None], client: ResponseWriter, limit_s: float) -> None:
    """Awaits `step`, which sends to `client`.

    If `step` takes longer than `limit_s`, aborts the connection and raises ConnectionAbortedError.
    """
    try:
        async with asyncio.timeout(limit_s):
            await step
    except TimeoutError:
        await client.abort()
        raise ConnectionAbortedError("it stopped reading") from None


class ResponseWriter:
    """Sends the answer of one request straight to the transport, the head and the first bytes in one write.

    `extra` contains the proxy's own header fields, which every answer gets. An answer that begins while `server` shuts
    down asks the client to close its connection. `cors` adds the CORS fields for web pages; None adds none.
    """

    __slots__ = (
        "_chunked", "_committed", "_connection", "_cors", "_drained", "_extra", "_head", "_request", "_server",
        "_silent", "_transport", "capture", "ended", "on_commit", "response", "sent_bytes", "source", "status",
    )  # fmt: skip

    def __init__(
        self, request: web.BaseRequest, extra: dict[str, str], server: Server, cors: Cors | None = None
    ) -> None:
        self._cors = cors
        self._request = request
        self._extra = extra
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._connection: ClientConnection | None = None
        self._head = b""
        self._chunked = self._committed = self._silent = False
        self._drained: asyncio.Future[None] | None = None
        # The response for aiohttp; None until the head of the answer is made.
        self.response: SentResponse | None = None
        # Called when the answer begins, before the client gets a byte of it.
        self.on_commit: Callable[[], None] | None = None
        # Called with each piece of the body, unless the body is encoded.
        self.capture: Callable[[bytes], None] | None = None
        # The backend's side of the relay, which is paused while the client reads too slowly; None without a relay.
        self.source: Source | None = None
        # The HTTP status of the answer; 0 until the head is made.
        self.status = 0
        # The bytes of the body so far, without the framing of chunks and the comments of `comment`.
        self.sent_bytes = 0
        # Whether the answer has ended. The client would read further bytes as the answer to its next request.
        self.ended = False

    @property
    def only_comments(self) -> bool:
        """Whether the client has got the head of a stream and comments, but no event and no end."""
        return self.response is not None and not self._committed and not self.ended

    @property
    def paused(self) -> bool:
        """Whether the client reads more slowly than the answer arrives."""
        return self._drained is not None

    def comment(self, comment: bytes) -> bool:
        """Sends an SSE comment to a client that waits for its stream. The first comment sends the head too.

        Other attempts can still be made after it. Returns False, and sends nothing, after `end_comments`, if the answer
        has begun or ended, or if the client is gone.
        """
        if self._committed or self._silent or self.ended or self._request.transport is None:
            return False
        if self.response is None:
            self._make_head(200, "", [*EVENT_STREAM, SERVER])
        try:
            self._send(b"%x\r\n%b\r\n" % (len(comment), comment) if self._chunked else comment)
        except ConnectionError:
            return False
        return True

    def end_comments(self) -> bool:
        """Stops the comments. Returns True if none was sent, so that the answer need not be a stream."""
        self._silent = True
        return self.response is None

    def commit(self, status: int, reason: str, headers: Headers) -> None:
        """Begins the answer. From now on, another attempt can only send the rest of it.

        The head is sent together with the first bytes of the body. If comments were sent before, the client already has
        the head of an event stream with status 200, and the answer must be such a stream.
        """
        self._committed = True
        if self.on_commit is not None:
            self.on_commit()
        if self.response is None:
            self._make_head(status, reason, headers)

    def _make_head(self, status: int, reason: str, headers: Headers) -> None:
        request = self._request
        fields = [*headers, *self._extra.items()]
        if self._cors is not None:
            fields = self._cors.passed_on(request.headers.get("origin"), fields)
        known = dict[str, str]()
        for name, value in fields:
            known[name.lower()] = value
        self.response, self.status = SentResponse(status=status), status
        if known.get("content-encoding", "identity").lower() != "identity":
            self.capture = None
        modern = request.version >= HttpVersion11
        delimited = "content-length" in known or status in _BODILESS
        if not delimited and modern:
            self._chunked = True
            fields.append(("Transfer-Encoding", "chunked"))
        keep_alive = request.keep_alive and (delimited or modern) and not self._server.shutting_down
        if not keep_alive:
            self.response.force_close()
        if keep_alive is not modern:
            fields.append(("Connection", "keep-alive" if keep_alive else "close"))
        if "date" not in known:
            fields.append(("Date", rfc822_formatted_time()))
        version = "1.1" if modern else "1.0"
        phrase = reason_to_client(reason) or responses.get(status, "")
        self._head = http1.head(f"HTTP/{version} {status} {phrase}", fields)
        self._transport = request.transport
        connection = request.protocol
        assert isinstance(connection, ClientConnection)
        self._connection = connection
        connection.writer = self
        if connection.writing_paused:
            self.pause_writing()

    def write(self, data: bytes) -> None:
        """Sends a piece of the body.

        If the client has left, drops the piece, because the handler is cancelled soon. Raises ConnectionError if the
        connection was closed otherwise, and RuntimeError after the end of the answer.
        """
        self.sent_bytes += len(data)
        if self.capture is not None:
            self.capture(data)
        if self._chunked and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._send(data)

    async def drained(self) -> None:
        """Waits until the client has read enough of the written bytes (the transport resumes writing)."""
        if self._drained is not None:
            await self._drained

    async def end(self, *, whole: bool = True) -> None:
        """Ends the answer and waits until the client has read enough of it.

        An answer that is not `whole` gets no end mark, and its connection is closed. Raises ConnectionError if the
        client is gone.
        """
        if not whole and self.response is not None:
            self.response.force_close()
        if self._connection is not None and self._connection.left:
            raise ConnectionResetError("its connection is closed")
        if self._head or self._chunked:
            self._send(b"0\r\n\r\n" if self._chunked and whole else b"")
        self.ended = True
        if self._drained is not None:
            await self._drained
        if self._connection is not None:
            self._connection.writer = None

    async def abort(self) -> None:
        """Closes the connection at once and without an end mark. So the client sees that the answer is incomplete."""
        if self.response is not None:
            self.response.force_close()
        if self._transport is not None:
            self._transport.abort()

    def _send(self, data: bytes) -> None:
        if self.ended:
            raise RuntimeError("the answer has ended")
        if self._head:
            data, self._head = self._head + data, b""
            # The server library takes a number above 0 as a sign that an answer has begun.
            self._request.writer.output_size = len(data)
        if self._transport is None or self._transport.is_closing():
            if self._connection is None or not self._connection.left:
                raise ConnectionResetError("its connection is closed")
            # The handler is cancelled soon, in turn with the handlers of other clients that have left.
            if self.source is not None:
                self.source.pause()
            return
        if data:
            self._transport.write(data)

    # --- called by its connection -------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()
        if self.source is not None:
            self.source.pause()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)
        if self.source is not None:
            self.source.resume()


class KeepAlive:
    """Sends an SSE comment every `every_s` seconds until the answer begins, the client leaves, or `stop` is called."""

    def __init__(self, client: ResponseWriter, every_s: float) -> None:
        self._client = client
        self._every_s = every_s
        self._timer = asyncio.get_running_loop().call_later(every_s, self._send)

    def _send(self) -> None:
        if self._client.comment(KEEP_ALIVE):
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._send)

    def stop(self) -> None:
        self._timer.cancel()
