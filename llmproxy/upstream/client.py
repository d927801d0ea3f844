"""The HTTP/1.1 client that implements the upstream port, with a pool of idle connections to the backends."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Self

import aiohappyeyeballs
from yarl import URL

from llmproxy.lifecycle.descriptors import errno_reason
from llmproxy.lifecycle.paced import PacedCalls
from llmproxy.upstream import http1
from llmproxy.upstream.connection import BackendConnection, ConnectionDropped, HttpExchange
from llmproxy.upstream.endpoints import Endpoints
from llmproxy.upstream.port import Body, ConnectFailed, Headers, LocalFailure
from llmproxy.upstream.tls import PeerTls

IDLE_MAX_S = 4.0
"""How long a connection may be idle and still be reused. vLLM closes idle connections after exactly 5 s."""

IDLE_DROP_S = 0.1
"""About a round trip, in seconds.

If a reused connection breaks within this time after a request was sent, the backend had closed the connection before
the request came.
"""

OTHER_ADDRESS_AFTER_S = 0.25
"""How long one address of a name is tried before the next address is tried too (RFC 8305, section 5)."""


_url = lru_cache(maxsize=1024)(URL)  # Parses the base URL of a backend. The last 1,024 results are cached.

_Destination = tuple[str, PeerTls | None]  # The key of a connection: its base URL and its TLS settings.


class HttpUpstream:
    """Implements `Upstream` over HTTP/1.1. Call `close` at the end, or use it as an async context manager.

    `endpoints` has the addresses and TLS settings of the backends. If there are `connections_max` connections already,
    a new connection closes the connection that has been idle for longest. If none is idle, the number may be exceeded.
    """

    def __init__(self, endpoints: Endpoints | None = None, connections_max: int = sys.maxsize) -> None:
        self._endpoints = endpoints or Endpoints()
        self._connections_max = connections_max
        self._connections: set[BackendConnection] = set()
        self._connecting = 0  # How many connections are being opened.
        self._replaced: set[BackendConnection] = set()  # Connections closed to make room, not counted, not ended yet.
        # The last connection of a list is the most recently used and is used first, so the others time out when they
        # are not needed. The TLS settings are in the key, so a connection with outdated settings is not reused.
        self._idle: dict[_Destination, list[BackendConnection]] = {}
        self._failures = PacedCalls()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cuts all connections, and waits until they have ended. Open exchanges raise UpstreamBroken."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._connections):
            connection.abort()
        if self._connections or self._replaced:
            # Transports report their end in a later turn of the loop.
            self._closed = asyncio.get_running_loop().create_future()
            await self._closed

    async def open(
        self, base_url: str, method: str, path_qs: str, headers: Headers, body: Body, connect_timeout_s: float
    ) -> HttpExchange:
        url = _url(base_url)
        size_bytes = sum(map(len, body))
        head = _head(url, method, path_qs, headers, size_bytes)
        to = base_url, self._endpoints.tls.get(base_url)
        reused = self._take_idle(to, url.raw_host)
        if reused is not None:
            sent_s = asyncio.get_running_loop().time()
            try:
                return await reused.send(head, body, size_bytes)
            except ConnectionDropped as dropped:
                # If the connection broke later, the backend may have worked on the request. Only a GET may be repeated
                # then (RFC 9110, section 9.2.2); a new connection shows whether the backend is gone.
                if method != "GET" and dropped.at_s - sent_s > IDLE_DROP_S:
                    raise
        connection = await self._connect(to, url, connect_timeout_s)
        return await connection.send(head, body, size_bytes)

    async def _connect(self, to: _Destination, url: URL, timeout_s: float) -> BackendConnection:
        loop = asyncio.get_running_loop()
        base_url, peer = to
        context = None
        if url.scheme == "https":
            context = peer.context if peer is not None else ssl.create_default_context()
        if len(self._connections) + self._connecting >= self._connections_max:
            self._make_room()
        name = (peer.server_name if peer is not None else None) or url.host
        found, address = list[aiohappyeyeballs.AddrInfoType](), ""
        self._connecting += 1
        try:
            async with asyncio.timeout(timeout_s):
                found = await self._endpoints.resolver.connectable(url.raw_host or "", url.port or 80)
                sock = await aiohappyeyeballs.start_connection(
                    found, happy_eyeballs_delay=OTHER_ADDRESS_AFTER_S, loop=loop
                )
                with suppress(OSError):  # A peer that has gone already has no address.
                    address = sock.getpeername()[0]
                _, connection = await loop.create_connection(
                    lambda: BackendConnection(
                        base_url, partial(self._freed, to), partial(self._lost, to), self._failures
                    ),
                    sock=sock,
                    ssl=context,
                    server_hostname=name if context is not None else None,
                )
        except OSError as error:
            # TimeoutError is an OSError without a text.
            detail = f"{base_url}: {_in_words(error) or f'no connection within {timeout_s:g} s'}"
            lack = errno_reason(error) if found else "the name of the backend does not resolve"
            raise LocalFailure(lack, detail) if lack is not None else ConnectFailed(detail) from error
        finally:
            self._connecting -= 1
        connection.peer = address
        self._connections.add(connection)
        return connection

    # --- idle connections ---------------------------------------------------------------------------------------------

    def _take_idle(self, to: _Destination, host: str | None) -> BackendConnection | None:
        idle = self._idle.get(to)
        now = asyncio.get_running_loop().time()
        current = self._endpoints.resolver.current.get(host)
        while idle:
            connection = idle.pop()
            # The name may have moved to other addresses while the old machine still answers.
            left = current is not None and connection.peer not in current
            if not left and connection.usable and now - connection.free_since_s < IDLE_MAX_S:
                return connection
            connection.abort()
        return None

    def _make_room(self) -> None:
        """Closes the connection that has been idle for longest. It no longer counts, although it ends a turn later."""
        every = [idle for idle in self._idle.values() if idle]
        if every:
            oldest = min(every, key=lambda idle: idle[0].free_since_s).pop(0)
            self._connections.discard(oldest)
            self._replaced.add(oldest)
            oldest.abort()

    def _freed(self, to: _Destination, connection: BackendConnection) -> None:
        loop = asyncio.get_running_loop()
        connection.free_since_s = loop.time()
        self._idle.setdefault(to, []).append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(IDLE_MAX_S, self._drop_old)

    def _lost(self, to: _Destination, connection: BackendConnection) -> None:
        self._connections.discard(connection)
        self._replaced.discard(connection)
        if self._closed is not None and not (self._connections or self._replaced or self._closed.done()):
            self._closed.set_result(None)
        idle = self._idle.get(to)
        if idle and connection in idle:
            idle.remove(connection)

    def _drop_old(self) -> None:
        self._sweep = None
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - IDLE_MAX_S
        for to, idle in list(self._idle.items()):
            recent = [connection for connection in idle if connection.free_since_s > oldest_s]
            for connection in idle[: len(idle) - len(recent)]:
                connection.abort()
            if recent:
                self._idle[to] = recent
            else:
                del self._idle[to]
        if self._idle:
            self._sweep = loop.call_later(IDLE_MAX_S, self._drop_old)


def _in_words(error: OSError) -> str:
    """Returns the text of an error without its error number."""
    if error.errno is None or isinstance(error, ssl.SSLError | socket.gaierror):
        return str(error)
    return os.strerror(error.errno)


def _head(url: URL, method: str, path_qs: str, headers: Headers, size_bytes: int) -> bytes:
    """Returns the head of a request.

    Raises ValueError for a space in the path and for a line break, which a server would parse as the end of a field.
    """
    fields, named_host = list[tuple[str, str]](), False
    if not isinstance(headers, list):
        headers = list(headers.items() if isinstance(headers, Mapping) else headers)
    for field in headers:
        lower = field[0].lower()
        if lower != "content-length":
            fields.append(field)
            named_host = named_host or lower == "host"
    if not named_host:
        fields.insert(0, ("Host", url.host_port_subcomponent or ""))
    fields.append(("Content-Length", str(size_bytes)))
    target = url.raw_path.rstrip("/") + path_qs
    if " " in target:
        raise ValueError("a space in a path")
    return http1.head(f"{method} {target} HTTP/1.1", fields)
