"""Pending connections: accepted at the port of a member, but not yet identified as connections of other members.

Anyone who reaches the port can open connections. So their number is limited, and each must send a valid Hello in time.
At the limit, the oldest is closed to admit the newest: a real member identifies itself within milliseconds.
"""

from __future__ import annotations

import asyncio

import structlog

HELLO_S = 2.0
"""How long a connection may take to identify itself after it was accepted, including the TLS handshake."""
ADDRESS_MAX = 16
"""Pending connections of one address."""
LOG_S = 60.0
"""Closed connections are logged at most this often."""

Peer = tuple[object, ...]
_log = structlog.get_logger()


class PendingConnections:
    """Closes connections that are not identified within `HELLO_S`. At a limit, closes the oldest of them."""

    def __init__(self, connections_max: int) -> None:
        """`connections_max` includes the identified connections of members."""
        self._connections_max = connections_max
        self._open: dict[Peer, asyncio.Transport] = {}
        self._pending: dict[Peer, asyncio.TimerHandle] = {}
        self._cut = 0
        self._logged_s = -LOG_S

    def accepted(self, transport: asyncio.Transport) -> None:
        """Note a new connection, and close others to stay within the limits."""
        loop, peer = asyncio.get_running_loop(), _peer(transport)
        for gone in [peer for peer, one in self._open.items() if one.is_closing()]:
            self._forget(gone)
        if transport.is_closing():
            return
        same_address = [other for other in self._pending if other[0] == peer[0]]
        if len(same_address) >= ADDRESS_MAX:
            self._end(same_address[0], f"more than {ADDRESS_MAX} of one address are no member yet")
        elif len(self._open) >= self._connections_max:
            why = f"more than {self._connections_max} are open"
            if not self._pending:
                self._log(peer, why)
                transport.abort()
                return
            self._end(next(iter(self._pending)), why)
        self._open[peer] = transport
        self._pending[peer] = loop.call_later(HELLO_S, self._end, peer, f"no member within {HELLO_S:g} s")

    def identified(self, transport: asyncio.BaseTransport) -> None:
        """Keep a connection open, because it belongs to a member."""
        if (timer := self._pending.pop(_peer(transport), None)) is not None:
            timer.cancel()

    def _forget(self, peer: Peer) -> asyncio.Transport:
        if (timer := self._pending.pop(peer, None)) is not None:
            timer.cancel()
        return self._open.pop(peer)

    def _end(self, peer: Peer, why: str) -> None:
        transport = self._forget(peer)
        if not transport.is_closing():
            transport.abort()
            self._log(peer, why)

    def _log(self, peer: Peer, why: str) -> None:
        self._cut += 1
        now = asyncio.get_running_loop().time()
        if now >= self._logged_s + LOG_S:
            _log.warning("cluster_connections_cut", peer=str(peer[0]), why=why, connections=self._cut)
            self._cut, self._logged_s = 0, now


def _peer(transport: asyncio.BaseTransport) -> Peer:
    """Returns address and port of the peer. They identify a connection, with TLS as without."""
    return tuple(transport.get_extra_info("peername") or ("",))
