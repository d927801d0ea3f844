"""Opens a connection to the router for each connection of a client, and copies the bytes in both directions.

Nothing is parsed on the way. Client and router see each other as they would without a shadow: framing, upgrades,
half-closed connections (not with TLS), resets and slow readers included. But the router sees the shadow's address, and
an unreachable router becomes a 502. A watcher gets a copy of the bytes after they were written.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from fcntl import ioctl
from ssl import SSLCertVerificationError, SSLContext
from termios import TIOCOUTQ
from typing import NamedTuple, Protocol, cast

from llmproxy.core.domain import Outcome
from llmproxy.gateway.http.errors import Failure
from llmproxy.lifecycle.descriptors import errno_reason

IDLE_S = 10.0  # A connection that no watcher reads counts as idle after this many seconds without a byte.
LINGER_S = 5.0
"""Seconds from an error of the shadow to the end of the client's connection.

Until then the client may send the rest of its request. An earlier end would be a reset, which can destroy the error
before the client reads it.
"""


class Router(NamedTuple):
    url: str
    host: str
    port: int
    # None for plain HTTP.
    tls: SSLContext | None = None


class Watcher(Protocol):
    """Reads copies of the bytes of one connection.

    After an exception the watcher gets no more bytes. The connection goes on.
    """

    @property
    def busy(self) -> bool:
        """Whether a request is open: its answer is not complete."""

    def asked(self, data: bytes) -> None:
        """Reads bytes that the client sent."""

    def answered(self, data: bytes) -> None:
        """Reads bytes that the router sent."""

    def closed(self, by_client: bool) -> None:
        """Handles the end of the connection, at most once."""

    def forget(self) -> None:
        """Frees the memory of open requests, after an exception in the watcher."""


class Pipe:
    """A client's connection and its connection to the router.

    Args:
        watch: Makes the watcher of a connection from the address of the client.
        on_watch_failed: Is called with an exception of the watcher.
        on_unreachable: Is called if the router cannot be reached, so that the client gets an error.
        on_end: Is called once, when both connections have ended.
    """

    def __init__(
        self,
        router: Router,
        watch: Callable[[str], Watcher],
        on_watch_failed: Callable[[Exception], None],
        on_unreachable: Callable[[], None],
        on_end: Callable[[Pipe], None],
    ) -> None:
        self._router = router
        self._watch = watch
        self._watcher: Watcher | None = None
        self._on_watch_failed = on_watch_failed
        self._on_unreachable = on_unreachable
        self._on_end = on_end
        self.client = _End(self)
        self.server = _End(self)
        self.client.peer, self.server.peer = self.server, self.client
        self._connecting: asyncio.Task[None] | None = None
        self._refused = b""
        self._watched_end = self._over = self._ends = False
        self._last_byte_s = 0.0

    @property
    def busy(self) -> bool:
        if self._watcher is not None:
            return self._watcher.busy
        return self.quiet_s < IDLE_S

    @property
    def quiet_s(self) -> float:
        """Seconds since the last byte in either direction, or since the connection began."""
        return asyncio.get_running_loop().time() - self._last_byte_s

    def begin(self, address: str) -> None:
        """Connects to the router for a client with this address."""
        self._last_byte_s = asyncio.get_running_loop().time()
        try:
            self._watcher = self._watch(address)
        except Exception as error:  # noqa: BLE001 - as below
            self._stop_watching(error)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        router, loop = self._router, asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self.server, router.host, router.port, ssl=router.tls)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            lack = errno_reason(error) if isinstance(error, OSError) else None
            advice = "Start it, or correct --to"
            if lack:
                advice = f"llmproxy shadow lacks a resource: {lack}"
            elif isinstance(error, SSLCertVerificationError):
                advice = "Name its CA with --to-ca FILE, or accept any certificate with --to-insecure"
            message = f"llmproxy shadow cannot reach your router at {router.url}: {why}. {advice}."
            self._refused = Failure(Outcome.CONNECT_FAILED, message).raw()
            self._on_unreachable()
            self._refuse()
        else:
            # Before the write, which may pause it again.
            self.client.resume()
            if early := b"".join(self.client.early):
                self.client.early.clear()
                self.received(self.client, early)
            if self.client.ended:
                self.server.finish()

    def _refuse(self) -> None:
        """Answers with the error if the router could not be reached and the client has sent bytes.

        Until the client has sent bytes it gets no answer.
        """
        transport = self.client.transport
        if not self._refused or not self.client.early or transport is None or transport.is_closing():
            return
        transport.write(self._refused)
        self._refused = b""
        self.client.early.clear()
        self.client.finish()
        self.client.resume()
        if self.client.ended:
            transport.close()
        asyncio.get_running_loop().call_later(LINGER_S, transport.abort)

    def received(self, end: _End, data: bytes) -> None:
        peer = end.peer
        if peer.transport is None:
            if self._connecting is not None and self._connecting.done() and not self._refused:
                return  # The client got the error. Its further bytes are dropped.
            end.early.append(data)
            end.pause()
            self._refuse()
            return
        if not peer.transport.is_closing():
            peer.transport.write(data)
        self._last_byte_s = asyncio.get_running_loop().time()
        if self._watcher is not None:
            try:
                (self._watcher.asked if end is self.client else self._watcher.answered)(data)
            except Exception as error:  # noqa: BLE001 - the bytes are on their way, whatever the watcher does
                self._stop_watching(error)
        if self._ends and end is self.server and not self.busy:
            self.close()

    def ended(self, end: _End) -> None:
        """Tells the other side that `end` sends no more. With TLS this closes both connections."""
        if end is self.server:
            self._watch_end()
        if end.peer.transport is not None:
            end.peer.finish()
        elif self._connecting is not None and self._connecting.done():
            self.close()
        if end.peer.ended or self._router.tls is not None:
            self.close()

    def lost(self, end: _End, error: Exception | None) -> None:
        self._watch_end()
        if self._connecting is not None:
            self._connecting.cancel()
        if error is not None:
            end.peer.reset()
        elif end.peer.transport is not None:
            end.peer.transport.close()
        if not self._over and (self.client.gone and (self.server.gone or self.server.transport is None)):
            self._over = True
            self._on_end(self)

    def end(self) -> None:
        """Closes both connections at the end of the next answer, as soon as no further request is open."""
        self._ends = True

    def close(self) -> None:
        for end in (self.client, self.server):
            if end.transport is not None:
                end.transport.close()

    def _watch_end(self) -> None:
        if self._watcher is None or self._watched_end:
            return
        self._watched_end = True
        try:
            self._watcher.closed(by_client=self.client.ended or self.client.gone)
        except Exception as error:  # noqa: BLE001 - as above
            self._stop_watching(error)

    def _stop_watching(self, error: Exception) -> None:
        if self._watcher is not None:
            self._watcher.forget()
        self._watcher = None
        self._on_watch_failed(error)


class _End(asyncio.Protocol):
    """A connection of a pipe, to the client or to the router."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self.peer = self
        self.transport: asyncio.Transport | None = None
        # Bytes that came before the router was connected.
        self.early: list[bytes] = []
        # `ended`: the client or router at this connection sends no more. `gone`: the connection is lost.
        self.ended = self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self is self._pipe.client:
            self._pipe.begin((transport.get_extra_info("peername") or ("",))[0])
        elif self.peer.gone:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._pipe.received(self, data)

    def eof_received(self) -> bool:
        self.ended = True
        self._pipe.ended(self)
        return self.transport is not None and self.transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self._pipe.lost(self, exc)

    def pause_writing(self) -> None:
        self.peer.pause()

    def resume_writing(self) -> None:
        self.peer.resume()

    def pause(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def finish(self) -> None:
        """Tells this side, after all bytes that are still to be written, that no more will come."""
        if self.transport is not None and not self.transport.is_closing():
            if self.transport.can_write_eof():
                self.transport.write_eof()
            else:
                self.transport.close()

    def reset(self) -> None:
        """Resets the connection as the other one was reset.

        While bytes are still on their way, it is closed regularly, because a reset would destroy them.
        """
        if self.transport is None or self.transport.is_closing():
            return
        sock = self.transport.get_extra_info("socket")
        unsent = struct.unpack("i", ioctl(sock.fileno(), TIOCOUTQ, bytes(4)))[0]
        if unsent or self.transport.get_write_buffer_size():
            self.transport.close()
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
