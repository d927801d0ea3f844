"""TLS to a client: a connection from the moment on in which it is accepted, while HTTP knows nothing of it yet."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.wrong_protocol import plain_http

if TYPE_CHECKING:
    # Of the same making, and the one of the two that type checkers know.
    from asyncio.sslproto import SSLProtocol
else:
    from uvloop.loop import SSLProtocol

PLAIN_HTTP = ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST")
"""What OpenSSL calls a first record that is the line of a request."""


def address_of(transport: asyncio.BaseTransport) -> str:
    """The address of the peer, "" where it has none."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


class _Handshake:
    """What uvloop takes for a context and for the TLS object that one makes, so that who speaks plain http is told so.

    It would otherwise cut that connection without a word. `wire` is the connection, while there is one.
    """

    def __init__(self, context: ssl.SSLContext, turn_away: Callable[[Failure], bytes]) -> None:
        self._context = context
        self._turn_away = turn_away
        self._tls: Any = None
        self.wire: asyncio.Transport | None = None

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, **options: Any) -> _Handshake:
        self._tls = self._context.wrap_bio(incoming, outgoing, **options)
        return self

    def do_handshake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLError as error:
            if error.reason not in PLAIN_HTTP or self.wire is None:
                raise
            self.wire.write(self._turn_away(plain_http()))
            self.wire.close()
            # Any other error would cut the connection before the answer is out.
            raise ssl.SSLWantReadError from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tls, name)


class TlsConnection(SSLProtocol):
    """uvloop's TLS below `connection`, counted from the moment in which it was accepted.

    With `create_server(ssl=...)`, nobody is told of a connection before its handshake is over, so that no limit held
    for those that never end theirs. Whoever has too many is cut off before a handshake that costs far more than an
    answer; `turn_away` counts and logs that. A handshake may take `timeout_s` seconds, after which the connection is
    closed without a word.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: asyncio.Protocol,
        context: ssl.SSLContext,
        clients: ClientLimits,
        turn_away: Callable[[Failure], bytes],
        timeout_s: float,
    ) -> None:
        options: dict[str, Any] = {"server_side": True, "ssl_handshake_timeout": timeout_s}
        # Nobody waits for the end of its handshake: that is when `connection` hears of it.
        self._handshake = _Handshake(context, turn_away)
        super().__init__(loop, connection, cast(ssl.SSLContext, self._handshake), None, **options)  # type: ignore[arg-type]
        self._clients = clients
        self._turn_away = turn_away
        self._address: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        address = address_of(transport)
        refused = self._clients.opened(address)
        if refused is not None:
            self._turn_away(refused)
            transport.abort()  # type: ignore[attr-defined] # a connection can be written to
            return
        self._address = address
        self._handshake.wire = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._address is not None:
            self._clients.closed(self._address)
            self._handshake.wire = None
            super().connection_lost(exc)
