"""TLS to a client: a connection from the moment on in which it is accepted, while HTTP knows nothing of it yet."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmproxy.gateway.clients import Clients
from llmproxy.gateway.errors import Failure

if TYPE_CHECKING:
    # Of the same making, and the one of the two that type checkers know.
    from asyncio.sslproto import SSLProtocol
else:
    from uvloop.loop import SSLProtocol


def address_of(transport: asyncio.BaseTransport) -> str:
    """The address of the peer, "" where it has none."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


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
        clients: Clients,
        turn_away: Callable[[Failure], object],
        timeout_s: float,
    ) -> None:
        options: dict[str, Any] = {"server_side": True, "ssl_handshake_timeout": timeout_s}
        # Nobody waits for the end of its handshake: that is when `connection` hears of it.
        super().__init__(loop, connection, context, None, **options)  # type: ignore[arg-type]
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
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._address is not None:
            self._clients.closed(self._address)
            super().connection_lost(exc)
