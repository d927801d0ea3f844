"""A connection to a backend, which carries one exchange at a time.

llhttp, the parser of Node.js, parses HTTP/1.1 in strict mode, and refuses responses that programs could parse
differently (response splitting). Body bytes are passed on in the callback in which they arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from select import POLLIN, poll
from typing import cast

import httptools

from llmproxy.lifecycle.paced import PacedCalls
from llmproxy.upstream.port import Body, InvalidResponse, UpstreamBroken

READ_BUFFER_BYTES = 128 << 10  # If more bytes of a response body are unread, reading from the backend pauses.
HEAD_BYTES_MAX = 256 << 10  # The maximum length of a response head, together with interim responses (1xx).
WHOLE_BODY_BYTES_MAX = 1 << 20  # A larger request body is written in slices, each when the transport has room.
SLICE_BYTES = 256 << 10

_SWITCHING_PROTOCOLS = 101


class ConnectionDropped(UpstreamBroken):
    """A reused connection broke before any byte of the response. The backend may be healthy.

    `at_s` is the time of the event loop at which it broke.
    """

    def __init__(self, why: str, at_s: float) -> None:
        super().__init__(why)
        self.at_s = at_s


class BackendConnection(asyncio.Protocol):
    """An open connection to a backend. Sends one request at a time and parses the response."""

    __slots__ = (
        "_complete", "_drained", "_exchange", "_failures", "_head_bytes", "_heard", "_on_free", "_on_lost", "_parser",
        "_paused", "_persistent", "_pieces", "_sent", "_surplus", "_transport", "_unread", "free_since_s", "name",
        "peer", "used",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        on_free: Callable[[BackendConnection], None],
        on_lost: Callable[[BackendConnection], None],
        failures: PacedCalls,
    ) -> None:
        self.name = name  # The base URL, for messages.
        self._on_free = on_free  # Called when the connection may carry another exchange.
        self._on_lost = on_lost  # Called when the connection has ended.
        self._failures = failures  # Reports lost connections to their exchanges, a few in each turn of the loop.
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: HttpExchange | None = None
        self._pieces: list[bytes] = []  # Body bytes of the current `data_received` call.
        self._drained: asyncio.Future[None] | None = None  # Set while the transport's write buffer is full.
        self._paused = False
        # State of the exchange, in this order: the whole request was sent; bytes of the response arrived; the response
        # is complete; bytes followed the response; the connection may be reused.
        self._sent = self._heard = self._complete = self._surplus = self._persistent = False
        self._head_bytes = 0
        self._unread = poll()  # Polls the socket for bytes that the loop has not read yet.
        self.peer = ""  # The IP address of the backend.
        self.used = False  # Whether the connection has carried an exchange.
        self.free_since_s = 0.0  # When the last exchange ended, on the event loop's clock.

    @property
    def usable(self) -> bool:
        """Whether the connection is idle, open, and has no unread bytes, so that it can carry another request."""
        if self._exchange is not None or self._transport is None or self._transport.is_closing():
            return False
        # Unread bytes, or an unread end of the connection, precede the next request and are no response to it.
        return not self._unread.poll(0)

    async def send(self, head: bytes, body: Body, size_bytes: int) -> HttpExchange:
        """Sends a request, and returns the exchange when the head of the response has arrived.

        `size_bytes` is the length of `body`. Raises ConnectionDropped if a reused connection breaks before any byte of
        the response, and UpstreamBroken after any other failure. A cancellation cuts the connection.
        """
        exchange = self._exchange = HttpExchange(self, self.used)
        self.used = True
        self._sent = self._heard = self._complete = self._surplus = self._persistent = False
        self._head_bytes = 0
        try:
            if size_bytes <= WHOLE_BODY_BYTES_MAX:
                self._write(b"".join((head, *body)))
                self._sent = True
            else:
                await self._write_slices(head, body)
            while not exchange.status:
                await exchange.event()
        except BaseException:
            exchange.close()
            raise
        return exchange

    async def _write_slices(self, head: bytes, body: Body) -> None:
        """Writes a large body in slices. Stops when the backend has answered. Raises UpstreamBroken."""
        self._write(head)
        for piece in body:
            for start in range(0, len(piece), SLICE_BYTES):
                if self._drained is not None:
                    await self._drained
                exchange = self._exchange
                if exchange is None or exchange.status:
                    return
                self._write(piece[start : start + SLICE_BYTES])
                # With a fast backend, writing never waits, so other tasks need this turn.
                await asyncio.sleep(0)
        self._sent = True

    def _write(self, data: bytes | memoryview) -> None:
        if self._transport is None or self._transport.is_closing():
            dropped = self._exchange is not None and self._exchange.reused and not self._heard
            raise _broken(dropped)(f"{self.name}: the connection was lost")
        self._transport.write(data)

    def pause(self) -> None:
        if self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._paused:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Cuts the connection at once, and fails its exchange.

        The `close` of a transport would wait for a peer that hangs, without limit.
        """
        exchange, self._exchange = self._exchange, None
        if self._transport is not None:
            self._transport.abort()
        if exchange is not None:
            exchange.failed(UpstreamBroken, "the proxy closed the connection")

    # --- callbacks of the transport -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._unread.register(transport.get_extra_info("socket"), POLLIN)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        # The parser refers to this connection, so this avoids a reference cycle.
        del self._parser
        self.resume_writing()
        exchange, self._exchange = self._exchange, None
        self._on_lost(self)
        if exchange is None:
            return
        if exc is None and exchange.ends_with_connection:
            exchange.end()
        else:
            dropped = exchange.reused and not self._heard
            kind, why = _broken(dropped), str(exc or "the connection was closed")
            # The end of a backend breaks many exchanges at once.
            self._failures.add(partial(exchange.failed, kind, why))

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            # Without an exchange, these bytes would be parsed as the response to the next request.
            self.abort()
            return
        self._heard = True
        broken = ""
        in_head = not exchange.status
        if in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._complete = self._surplus = True
        except httptools.HttpParserCallbackError as error:
            broken = str(error.__context__)
        except httptools.HttpParserError as error:
            broken = str(error) or type(error).__name__
        if not exchange.status and self._head_bytes > HEAD_BYTES_MAX:
            broken = f"the head of its answer is longer than {HEAD_BYTES_MAX} bytes"
        if pieces := self._pieces:
            self._pieces = []
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if exchange.sink is None:
                exchange.hold(data)
            else:
                try:
                    exchange.sink(data)
                except Exception as error:  # noqa: BLE001 - `flow` raises it
                    exchange.close()
                    exchange.sink_error = error
        if self._complete:
            self._end(exchange, keep=not broken)
        elif broken and self._exchange is exchange:
            exchange.failed(InvalidResponse, broken)
            self.abort()
        elif exchange.buffered or (in_head and exchange.status):
            exchange.wake()

    def _end(self, exchange: HttpExchange, *, keep: bool) -> None:
        if self._exchange is not exchange:
            # The sink has cut the connection at the last bytes.
            return
        self._exchange = None
        exchange.end()
        if keep and self._sent and not self._surplus and self._persistent:
            if self._paused:
                self.resume()
            self._on_free(self)
        elif self._transport is not None:
            self._transport.abort()

    # --- callbacks of the parser --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._surplus = self._complete

    def on_status(self, reason: bytes) -> None:
        if self._exchange is not None and not self._exchange.status:
            self._exchange.reason += reason.decode("utf-8", "surrogateescape")

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers (fields after the body) are dropped.
        if self._exchange is not None and not self._exchange.status:
            self._exchange.headers.append(
                (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
            )

    def on_headers_complete(self) -> None:
        status, exchange = self._parser.get_status_code(), self._exchange
        if exchange is None or self._complete:
            return
        if status < 100:
            raise ValueError(f"{status:03} is no status")
        if status < 200 and status != _SWITCHING_PROTOCOLS:
            exchange.reason = ""
            exchange.headers.clear()
        else:
            chunked = False
            for name, value in exchange.headers:
                if name.lower() == "transfer-encoding":
                    if chunked or value.strip(" ").lower() != "chunked":
                        # The parser only decodes chunks, so another coding would be passed on as the body.
                        raise ValueError("its transfer-encoding is not chunked")
                    chunked = True
            exchange.status = status

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        # Interim responses end here too, without a status.
        if self._exchange is not None and self._exchange.status:
            self._complete = True
            # The parser forgets this after the end of the message.
            self._persistent = self._parser.should_keep_alive()


class HttpExchange:
    """A request on a connection and its response: the head, the body and the end. Implements `Exchange`."""

    __slots__ = (
        "_broken", "_buffered_bytes", "_connection", "_woken", "buffered", "ended", "headers", "reason", "reused",
        "sink", "sink_error", "status",
    )  # fmt: skip

    def __init__(self, connection: BackendConnection, reused: bool) -> None:
        self._connection: BackendConnection | None = connection  # None after the end of the body or a failure.
        self.buffered: list[bytes] = []  # Body bytes that were not read yet.
        self._buffered_bytes = 0
        self.sink: Callable[[bytes], None] | None = None  # Gets each piece of the body while `flow` runs.
        self._woken: asyncio.Future[None] | None = None  # Wakes the reader.
        # The exception class and message for the reader.
        self._broken: tuple[Callable[[str], UpstreamBroken], str] | None = None
        self.sink_error: Exception | None = None
        self.ended = False
        self.status = 0
        self.reason = ""
        self.headers: list[tuple[str, str]] = []
        self.reused = reused

    async def chunk(self) -> bytes:
        while not self.buffered:
            if self.ended:
                return b""
            await self.event()
        buffered, self.buffered, self._buffered_bytes = self.buffered, [], 0
        if self._connection is not None:
            self._connection.resume()
        return buffered[0] if len(buffered) == 1 else b"".join(buffered)

    async def flow(self, sink: Callable[[bytes], None]) -> None:
        buffered = await self.chunk() if self.buffered else b""
        self.sink = sink
        try:
            if buffered:
                sink(buffered)
            while self.sink is not None and not self.ended:
                await self.event()
        finally:
            self.sink = self.sink_error = None

    def halt(self) -> None:
        self.sink = None
        self.wake()

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.abort()
            self.failed(UpstreamBroken, "the proxy closed the connection")

    def event(self) -> asyncio.Future[None]:
        """Returns a future that ends at the next event: bytes of the response, its end, or a failure.

        Raises the failure of the exchange, or the exception of the sink, if there is one already.
        """
        if self.sink_error is not None:
            error, self.sink_error = self.sink_error, None
            try:
                raise error
            finally:
                # Its traceback refers to this frame.
                del error
        if self._broken is not None:
            # Made only now: a stored exception refers to frames that refer to this exchange, which would be a cycle.
            kind, why = self._broken
            raise kind(why)
        self._woken = asyncio.get_running_loop().create_future()
        return self._woken

    def wake(self) -> None:
        """Ends the future of `event`, so that the waiting reader looks again."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    # --- events of the connection -------------------------------------------------------------------------------------

    @property
    def ends_with_connection(self) -> bool:
        """Whether only the end of the connection ends the body."""
        if not self.status:
            return False
        fields = {name.lower(): value.lower() for name, value in self.headers}
        return "content-length" not in fields and "chunked" not in fields.get("transfer-encoding", "")

    def hold(self, data: bytes) -> None:
        """Buffers a piece of the body until `chunk` returns it. Pauses reading above READ_BUFFER_BYTES."""
        self.buffered.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > READ_BUFFER_BYTES:
            self.pause()

    def end(self) -> None:
        """Marks the body as complete. The exchange then no longer uses the connection."""
        self.ended = True
        self._connection = None
        self.wake()

    def failed(self, kind: Callable[[str], UpstreamBroken], why: str) -> None:
        """Ends a response that was cut short.

        Its reader gets an exception that `kind` makes from a message with `why`.
        """
        if self._broken is not None:
            return
        name = self._connection.name if self._connection is not None else ""
        self._broken = kind, f"{name}: {why}"
        self._connection = None
        self.wake()


def _broken(dropped: bool) -> Callable[[str], UpstreamBroken]:
    return partial(ConnectionDropped, at_s=asyncio.get_running_loop().time()) if dropped else UpstreamBroken
