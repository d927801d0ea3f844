"""One client's connection below the requests on it: whatever is not HTTP/1 as it should be is refused here.

The server of aiohttp answers what it cannot parse in plain text, with the offending bytes in answer and log, and lets a
request wait whose body turns out to be broken. This is the one file that knows that server from inside; what it leans
on is held by `tests/hygiene`.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Protocol, cast

from aiohttp import HttpVersion10, HttpVersion11, StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import BadHttpMethod, BadStatusLine, HttpProcessingError, InvalidURLError, LineTooLong
from aiohttp.web_protocol import _ErrInfo

from llmproxy.config import ClientsConfig
from llmproxy.core.domain import Outcome
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.handshake import TlsConnection, address_of
from llmproxy.gateway.http.headers import SERVER
from llmproxy.gateway.http.strictness import head_too_large
from llmproxy.gateway.http.wrong_protocol import HTTP2_PREFACE, WrongProtocol, wrong_protocol

LINGER_S = 10.0
"""How long the rest of a refused body is read, so that a client that is still sending gets to read the answer."""

MISLED_S = 1.0
"""How long a client that began in another protocol may take to close."""

HTTP2_IN_PIECES = "Pause on PRI/Upgrade"
"""What the parser says of a preface of HTTP/2 that did not come whole. What clients sent stands behind its reasons."""

PLAIN_END = b"\r\n0\r\n\r\n"
"""The last chunk without extension or trailer, behind the end of the one before it."""


class Door(Protocol):
    """Who counts connections, and makes the answers to what goes no further."""

    @property
    def clients(self) -> ClientLimits:
        """What each address uses."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""

    def refuse(self, request: web.BaseRequest, failure: Failure) -> web.Response:
        """Count and log what could not be parsed as a request, and make the answer to it."""

    def turn_away(self, failure: Failure) -> bytes:
        """Count and log a connection on which no request came about, and make the bytes of the answer to it."""


class Leg(Protocol):
    """Whoever writes answers past the server library."""

    def pause_writing(self) -> None:
        """The client is slower than what is written."""

    def resume_writing(self) -> None:
        """It has caught up."""


class ClientConnection(web.RequestHandler):
    """aiohttp's connection with limits, and with answers of our own to what it cannot parse."""

    __slots__ = (
        "_address",
        "_door",
        "_head_bytes",
        "_head_timer",
        "_latest",
        "_limits",
        "_unread_timer",
        "_wire",
        "writer",
    )

    def __init__(self, server: ClientServer, door: Door, limits: ClientsConfig, **options: object) -> None:
        super().__init__(server, **options)  # type: ignore[arg-type] # as the server of aiohttp itself hands them on
        self._door = door
        self._limits = limits
        self._address: str | None = None
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._latest = b""
        self._unread_timer: asyncio.TimerHandle | None = None
        self._wire: asyncio.Transport | None = None
        self.writer: Leg | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        if transport.get_extra_info("sslcontext") is not None:
            # It was counted when its handshake began.
            super().connection_made(transport)
            return
        address = address_of(transport)
        refused = self._door.clients.opened(address)
        if refused is None:
            self._address = address
            super().connection_made(transport)
            return
        # Nothing that still arrives is looked at.
        self._force_close = True
        self._wire.write(self._door.turn_away(refused))
        self._wire.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.writer = self._wire = None
        self._head_over()
        self._read_on()
        if self._address is not None:
            self._door.clients.closed(self._address)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.writer is not None:
            # Whoever writes past the server library has limits of its own.
            self.writer.pause_writing()
        else:
            self._unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._wire is not None and not self._wire.is_closing():
            self._read_on()
        if self.writer is not None:
            self.writer.resume_writing()

    async def start(self) -> None:
        """Serve what comes. In the end the connection is closed, as soon as its client has taken what was written."""
        try:
            await super().start()
        finally:
            self._unread()

    def _unread(self) -> None:
        """From here on it is for the client to read, and nobody else waits for it."""
        if self._wire is not None and self._unread_timer is None:
            self._unread_timer = self._loop.call_later(self._limits.idle_timeout_s, self._wire.abort)

    def _read_on(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def ended_plainly(self, body: StreamReader) -> bool:
        """Whether a body in chunks has ended without a trailer, and nothing was read behind it."""
        return body.is_eof() and not self._messages and not self._upgraded and self._latest == PLAIN_END

    def data_received(self, data: bytes) -> None:
        if not self._latest and (wrong := wrong_protocol(data)) is not None:
            self._latest = data[:1]
            self._misled(wrong)
            return
        self._latest = (self._latest + data[-len(PLAIN_END) :])[-len(PLAIN_END) :]
        super().data_received(data)
        if self._waiter is not None and not self._waiter.done():
            # Some clients send an empty line behind a body; no head begins with it.
            if self._head_bytes or data.strip(b"\r\n"):
                self._head_begun(len(data))
        elif self._head_bytes:
            self._head_over()
        self._tell_of_broken_body()

    def _head_begun(self, size_bytes: int) -> None:
        """Some of a head has come, and its end has not."""
        self._head_bytes += size_bytes
        if self._head_bytes > self._limits.head_bytes_max:
            self._turn_away(head_too_large())
        elif self._head_timer is None:
            self._head_timer = self._loop.call_later(self._limits.head_timeout_s, self._head_late)

    def _head_over(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        wait_s = self._limits.head_timeout_s
        message = f"The header fields did not end within {wait_s:g} s (clients.head_timeout_s)."
        self._turn_away(Failure(Outcome.BAD_REQUEST, message, status=408))

    def _turn_away(self, failure: Failure) -> None:
        """Answer in place of a handler, which there is none yet, and close."""
        self._head_over()
        if self.transport is not None:
            self.transport.write(self._door.turn_away(failure))
        self.force_close()

    def _misled(self, wrong: WrongProtocol) -> None:
        """Answer a client that speaks another protocol, and let it finish: who cannot send on may not read either."""
        assert self._wire is not None
        # Nothing that still arrives is looked at.
        self._force_close = True
        self._wire.write(self._door.turn_away(wrong))
        if self._wire.can_write_eof():
            self._wire.write_eof()
        self._loop.call_later(MISLED_S, self._wire.close)

    def _tell_of_broken_body(self) -> None:
        request = self._current_request
        if request is None or not self._messages or request.content.is_eof():
            return
        broken = self._messages[-1][0]
        if isinstance(broken, _ErrInfo) and isinstance(broken.exc, HttpProcessingError):
            # It is the body being read that cannot be parsed, and nothing else would tell its reader.
            request.content.set_exception(web.RequestPayloadError(_told(broken.exc).message))
            # Nor is there a rest of it to be read and forgotten behind the answer.
            request.content.feed_eof()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not be parsed; anything else is a bug, whose story aiohttp tells."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        response = self._door.refuse(request, _told(exc))
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send what is left of an answer; where none of it was sent yet, aiohttp would name itself and its version, and
        speak whichever version of HTTP the request claims to be of.
        """
        resp.headers.setdefault(*SERVER)
        if request.version != HttpVersion10:
            request._cache["version"] = HttpVersion11
        return await super().finish_response(request, resp, start_time)


class _ChunkedRequest(web.BaseRequest):
    """A request in chunks. Its connection is kept only where it is certain that it had no trailer.

    The parser counts the last field of a trailer among the fields of the next request.
    """

    @property
    def keep_alive(self) -> bool:
        return super().keep_alive and cast(ClientConnection, self.protocol).ended_plainly(self.content)


class ClientServer(web.Server):
    """Makes a `ClientConnection` of every connection, by TLS where there is a context for it."""

    def __init__(self, door: Door, limits: ClientsConfig, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(
            door.handle,
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
        self._door = door
        self._limits = limits
        self._tls = tls

    def __call__(self) -> ClientConnection:
        connection = ClientConnection(self, self._door, self._limits, loop=self._loop, **self._kwargs)
        if self._tls is None:
            return connection
        door, limit_s = self._door, self._limits.head_timeout_s
        below = TlsConnection(self._loop, connection, self._tls, door.clients, door.turn_away, limit_s)
        # aiohttp hands on what it gets to the loop, which wants any protocol.
        return cast(ClientConnection, below)


def _request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: web.RequestHandler,
    writer: AbstractStreamWriter,
    task: asyncio.Task[None],
) -> web.BaseRequest:
    kind = _ChunkedRequest if message.chunked else web.BaseRequest
    return kind(message, payload, protocol, writer, task, asyncio.get_running_loop())


def _told(error: HttpProcessingError) -> Failure:
    """What a client is told of bytes that are no request. They are not repeated: they may hold a key."""
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
        # The parser's reason is one line; the bytes at which it stopped follow below it.
        why = error.message.partition("\n")[0].partition(": b'")[0].rstrip(":.")
    return Failure(Outcome.BAD_REQUEST, f"This is no HTTP/1.1 request: {why}.")
