"""A connection of a client: its limits, and the refusal of anything but well-formed HTTP/1.

The server of aiohttp answers unparsable bytes in plain text, repeats them in answer and log, and never ends a request
with a broken body. Only this file and `client_request` use internals of that server, and `tests/strictness` checks
their behaviour.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

from aiohttp import HttpVersion10, HttpVersion11, StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import BadHttpMethod, BadStatusLine, HttpProcessingError, InvalidURLError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _ErrInfo

from llmproxy.config import ClientsConfig
from llmproxy.core.domain import Outcome
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.client_request import ChunkedRequest, ClientRequest, SentResponse
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.headers import SERVER
from llmproxy.gateway.http.kept_head import KeptHead
from llmproxy.gateway.http.strictness import head_too_large
from llmproxy.gateway.http.tls import TlsConnection, peer_address
from llmproxy.gateway.http.wrong_protocol import HTTP2_PREFACE, WrongProtocol, wrong_protocol
from llmproxy.lifecycle.paced import PacedCalls

LINGER_S = 10.0
"""How long the rest of a refused body is read, so that a client can read the answer while it still sends."""

WRONG_PROTOCOL_CLOSE_S = 1.0  # How long a client that speaks another protocol gets to close the connection.

HTTP2_IN_PIECES = "Pause on PRI/Upgrade"
"""The beginning of the parser's message about an HTTP/2 preface in several pieces. The client's bytes follow it."""

LAST_CHUNK = b"\r\n0\r\n\r\n"  # The last chunk without extension or trailer, with the line end of the chunk before it.


class ConnectionHandler(Protocol):
    """Handles the requests of connections, and makes the answers to refused connections and requests."""

    @property
    def clients(self) -> ClientLimits:
        """The connection and request limits of each client address."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Returns the answer to a request. An error becomes an answer too; only a cancellation is raised."""

    def refuse(self, request: web.BaseRequest, failure: Failure) -> web.Response:
        """Counts and logs a request that the parser refused, and returns the answer for `failure`."""

    def reject(self, failure: Failure) -> bytes:
        """Counts and logs a connection that is refused without a whole request, and returns the bytes of its answer."""


class PausableWriter(Protocol):
    """Writes an answer to the transport without aiohttp's writer. `ClientConnection` calls both methods."""

    def pause_writing(self) -> None:
        """Called when the client reads more slowly than the proxy writes."""

    def resume_writing(self) -> None:
        """Called when the client has read enough of the buffered bytes."""


class ClientConnection(web.RequestHandler):
    """aiohttp's connection, with the proxy's limits and the proxy's answers to unparsable bytes."""

    __slots__ = (
        "_address",
        "_conn_handler",
        "_head_bytes",
        "_head_came",
        "_head_timer",
        "_latest",
        "_limits",
        "_unread_timer",
        "_wire",
        "kept_head",
        "left",
        "writer",
    )

    def __init__(
        self, server: ClientServer, handler: ConnectionHandler, limits: ClientsConfig, **options: object
    ) -> None:
        super().__init__(server, **options)  # type: ignore[arg-type] # as aiohttp's server passes them
        self._conn_handler = handler
        self._limits = limits
        self._address: str | None = None
        self._head_bytes = 0
        self._head_came = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._latest = b""
        self._unread_timer: asyncio.TimerHandle | None = None
        self._wire: asyncio.Transport | None = None
        # The last head that `keep_head` kept, with the facts about it; None if it kept none.
        self.kept_head: KeptHead | None = None
        # Whether the client has closed the connection, or it is lost. The handler's task is cancelled soon after.
        self.left = False
        # The writer of the current answer; None between answers and while aiohttp writes the answer.
        self.writer: PausableWriter | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        if transport.get_extra_info("sslcontext") is not None:
            # The connection was counted before its handshake.
            super().connection_made(transport)
            return
        address = peer_address(transport)
        refused = self._conn_handler.clients.opened(address)
        if refused is None:
            self._address = address
            super().connection_made(transport)
            return
        # Bytes that still arrive are ignored.
        self._force_close = True
        self._wire.write(self._conn_handler.reject(refused))
        self._wire.close()

    def eof_received(self) -> bool | None:  # type: ignore[override] # as asyncio's protocols do
        """Schedules the close of this connection; see `ClientServer.lose_soon`.

        Returns True, so that asyncio keeps the connection open until then. Returns None, so that asyncio closes the
        connection at once, if the connection uses TLS or is refused or already lost.
        """
        server = cast("ClientServer | None", self._manager)
        if server is None or self._wire is None or self._address is None:
            return None
        self.left = self._force_close = True
        server.lose_soon(self._wire.close)
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        # No other request begins.
        self.left = self._force_close = True
        server = cast("ClientServer | None", self._manager)
        if server is None:
            self._lose(exc)
        else:
            server.lose_soon(partial(self._lose, exc))

    def _lose(self, exc: BaseException | None) -> None:
        """Cancels the handler of a client that has left."""
        super().connection_lost(exc)
        self.writer = self._wire = self.kept_head = None
        self._end_head()
        self._cancel_unread_timer()
        if self._address is not None:
            self._conn_handler.clients.closed(self._address)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.writer is not None:
            # The writer has its own time limits.
            self.writer.pause_writing()
        else:
            self._start_unread_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._wire is not None and not self._wire.is_closing():
            self._cancel_unread_timer()
        if self.writer is not None:
            self.writer.resume_writing()

    async def start(self) -> None:
        """Serves the requests of the connection until it ends.

        After the last request, limits how long the client may take to read the rest of the answer.
        """
        try:
            if not self._messages:
                await self._first_message()
            if self._messages and self._messages[0][1] is not EMPTY_PAYLOAD:
                # Many clients may connect at once, so they take turns. Requests without a body (probes) do not wait.
                await cast(ClientServer, self._manager).turn()
            if self._manager is not None:
                await super().start()
        finally:
            self._start_unread_timer()

    async def _first_message(self) -> None:
        """Waits for the first request of the connection. Before each later request, aiohttp itself waits."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _start_unread_timer(self) -> None:
        """Aborts the connection if the client does not read the written bytes within `idle_timeout_s`.

        Does nothing while a timer runs. While there is a `writer`, the writer has its own limits.
        """
        if self._wire is not None and self._unread_timer is None:
            self._unread_timer = self._loop.call_later(self._limits.idle_timeout_s, self._wire.abort)

    def _cancel_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resumes reading from the socket if reading was paused.

        aiohttp calls this method for every body, also if nothing was paused.
        """
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def keep_head(self, message: RawRequestMessage, facts: object) -> bool:
        """Keeps `facts` about the head `message` for later requests with an equal head.

        Keeps nothing at the first request of a connection, because many clients send only one request, and nothing for
        a head that `KeptHead.of` refuses. Returns whether the facts are kept.
        """
        if self._request_count > 1:
            self.kept_head = KeptHead.of(message, self._limits.head_bytes_max, facts)
        return self.kept_head is not None

    def ended_without_trailer(self, body: StreamReader) -> bool:
        """Returns whether a chunked body has ended without a trailer, and nothing was read after it."""
        return body.is_eof() and not self._messages and not self._upgraded and self._latest == LAST_CHUNK

    def data_received(self, data: bytes) -> None:
        if not self._latest and (wrong := wrong_protocol(data)) is not None:
            self._latest = data[:1]
            self._reject_protocol(wrong)
            return
        self._latest = (self._latest + data[-len(LAST_CHUNK) :])[-len(LAST_CHUNK) :]
        super().data_received(data)
        self._head_came = self._head_came or bool(self._messages)
        # The first bytes may come before the task that serves this connection waits for them.
        if not self._head_came or (self._waiter is not None and not self._waiter.done()):
            # Some clients send an empty line after a body, which is no beginning of a head.
            if self._head_bytes or data.strip(b"\r\n"):
                self._add_head(len(data))
        elif self._head_bytes:
            self._end_head()
        if self._messages and self._current_request is not None:
            self._fail_broken_body(self._current_request)

    def _add_head(self, size_bytes: int) -> None:
        """Counts `size_bytes` of a request head whose end has not arrived."""
        self._head_bytes += size_bytes
        if self._head_bytes > self._limits.head_bytes_max:
            self._end_with(head_too_large())
        elif self._head_timer is None:
            self._head_timer = self._loop.call_later(self._limits.head_timeout_s, self._head_late)

    def _end_head(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        wait_s = self._limits.head_timeout_s
        message = f"The header fields did not end within {wait_s:g} s (clients.head_timeout_s)."
        self._end_with(Failure(Outcome.BAD_REQUEST, message, status=408))

    def _end_with(self, failure: Failure) -> None:
        """Sends an answer and closes the connection. Used while no handler runs."""
        self._end_head()
        if self.transport is not None:
            self.transport.write(self._conn_handler.reject(failure))
        self.force_close()

    def _reject_protocol(self, wrong: WrongProtocol) -> None:
        """Answers a client that speaks another protocol.

        Closes the connection a moment later: some clients read no answer from a connection that is closed while they
        send.
        """
        assert self._wire is not None
        # Bytes that still arrive are ignored.
        self._force_close = True
        self._wire.write(self._conn_handler.reject(wrong))
        if self._wire.can_write_eof():
            self._wire.write_eof()
        self._loop.call_later(WRONG_PROTOCOL_CLOSE_S, self._wire.close)

    def _fail_broken_body(self, request: web.BaseRequest) -> None:
        if request.content.is_eof():
            return
        broken = self._messages[-1][0]
        if isinstance(broken, _ErrInfo) and isinstance(broken.exc, HttpProcessingError):
            # The rest of the body cannot be parsed. Without an exception, its reader would wait forever.
            request.content.set_exception(web.RequestPayloadError(_parse_failure(broken.exc).message))
            # Nothing is left to be read and dropped after the answer.
            request.content.feed_eof()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answers bytes that cannot be parsed. Any other error is a bug, which aiohttp logs."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        response = self._conn_handler.refuse(request, _parse_failure(exc))
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends the rest of an answer.

        Closes the connection after a refusal that came before `100 Continue`: the client may send another request in
        place of the body. Replaces two values that aiohttp would send in the head: the server's name and version, and
        the request's HTTP version.
        """
        if type(resp) is SentResponse and not self._upgraded:
            return resp, False
        if "expect" in request.headers and not request.content.is_eof():
            resp.force_close()
        resp.headers.setdefault(*SERVER)
        if request.version != HttpVersion10:
            request._cache["version"] = HttpVersion11
        return await super().finish_response(request, resp, start_time)


class ClientServer(web.Server):
    """Makes a `ClientConnection` for every connection, with TLS if `tls` is given."""

    def __init__(self, handler: ConnectionHandler, limits: ClientsConfig, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(
            handler.handle,
            request_factory=_request,
            handler_cancellation=True,
            auto_decompress=False,
            lingering_time=LINGER_S,
            keepalive_timeout=limits.idle_timeout_s,
            max_line_size=limits.head_bytes_max,
            max_field_size=limits.head_bytes_max,
            max_headers=limits.head_fields_max,
            access_log=None,
        )
        self._conn_handler = handler
        self._limits = limits
        self._tls = tls
        self._begins, self._losses = PacedCalls(), PacedCalls()

    def lose_soon(self, lose: Callable[[], object]) -> None:
        """Calls `lose` in a later iteration of the event loop.

        If many clients leave at once, each iteration ends only a few of their connections, so that running streams
        continue.
        """
        self._losses.add(lose)

    async def turn(self) -> None:
        """Waits until a new connection may begin its first request.

        Only a few connections begin in each iteration of the event loop, so that a burst of new clients does not delay
        running streams.
        """
        if not self._begins.take():
            begins = asyncio.Event()
            self._begins.add(begins.set)
            await begins.wait()

    def __call__(self) -> ClientConnection:
        connection = ClientConnection(self, self._conn_handler, self._limits, loop=self._loop, **self._kwargs)
        if self._tls is None:
            return connection
        handler, limit_s = self._conn_handler, self._limits.head_timeout_s
        tls = TlsConnection(self._loop, connection, self._tls, handler.clients, handler.reject, limit_s)
        # aiohttp passes this to the loop, which accepts any protocol.
        return cast(ClientConnection, tls)


def _request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: web.RequestHandler,
    writer: AbstractStreamWriter,
    task: asyncio.Task[None],
) -> web.BaseRequest:
    kind = ChunkedRequest if message.chunked else ClientRequest
    request = kind(message, payload, protocol, writer, task, protocol._loop)
    # aiohttp would find headers and version in calls of their own.
    request._cache.update(headers=message.headers, version=message.version)
    kept = protocol.kept_head if isinstance(protocol, ClientConnection) else None
    if kept is not None and kept.is_head_of(message):
        request.facts = kept.facts
    return request


def _parse_failure(error: HttpProcessingError) -> Failure:
    """Returns the answer to unparsable bytes. It does not repeat the bytes, because they may contain a key."""
    if isinstance(error, LineTooLong):
        return Failure(Outcome.BAD_REQUEST, "The request line or a header field is too long.", status=431)
    if error.message == "Too many headers received":
        return Failure(Outcome.BAD_REQUEST, "The request has too many header fields.", status=431)
    if error.message.startswith(HTTP2_IN_PIECES) and (wrong := wrong_protocol(HTTP2_PREFACE)) is not None:
        return wrong
    if isinstance(error, InvalidURLError):
        why = "its target is no path"
    elif isinstance(error, BadHttpMethod):
        why = "its method is unknown"
    elif isinstance(error, BadStatusLine):
        why = "its request line is broken"
    else:
        # The parser's reason is one line. The bytes at which it stopped follow on the next.
        why = error.message.partition("\n")[0].partition(": b'")[0].rstrip(":.")
    return Failure(Outcome.BAD_REQUEST, f"This is no HTTP/1.1 request: {why}.")
