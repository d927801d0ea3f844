"""Connections to the port of a member, of which nobody knows yet whether another member opened them.

Anybody who reaches the port can open them. So they are few, and each is cut unless a member introduces itself in time.
Where there are too many, the oldest is cut for the newest: a member needs milliseconds.
"""

from __future__ import annotations

import asyncio

import structlog

HELLO_S = 2.0
"""How long a connection may take until it belongs to a member, from its acceptance, the TLS handshake included."""
ADDRESS_MAX = 16
"""How many of one address may not belong to a member yet."""
LOG_S = 60.0
"""How often connections that were cut are logged."""

Peer = tuple[object, ...]
_log = structlog.get_logger()


class Strangers:
    """Cuts connections that no member introduces within `HELLO_S`, and the oldest of them beyond a number.

    `most` is the number of connections that may be open here, those of members included.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[Peer, asyncio.Transport] = {}
        self._unknown: dict[Peer, asyncio.TimerHandle] = {}
        self._cut = 0
        self._logged_s = -LOG_S

    def came(self, transport: asyncio.Transport) -> None:
        """A connection was accepted."""
        loop, peer = asyncio.get_running_loop(), _peer(transport)
        for gone in [peer for peer, one in self._open.items() if one.is_closing()]:
            self._forget(gone)
        if transport.is_closing():
            return
        of_address = [one for one in self._unknown if one[0] == peer[0]]
        if len(of_address) >= ADDRESS_MAX:
            self._end(of_address[0], f"more than {ADDRESS_MAX} of one address are no member yet")
        elif len(self._open) >= self._most:
            why = f"more than {self._most} are open"
            if not self._unknown:
                self._log(peer, why)
                transport.abort()
                return
            self._end(next(iter(self._unknown)), why)
        self._open[peer] = transport
        self._unknown[peer] = loop.call_later(HELLO_S, self._end, peer, f"no member within {HELLO_S:g} s")

    def introduced(self, transport: asyncio.BaseTransport) -> None:
        """The connection belongs to a member."""
        if (timer := self._unknown.pop(_peer(transport), None)) is not None:
            timer.cancel()

    def _forget(self, peer: Peer) -> asyncio.Transport:
        if (timer := self._unknown.pop(peer, None)) is not None:
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
    """Address and port of the other end, which name an open connection, below TLS and above it."""
    return tuple(transport.get_extra_info("peername") or ("",))
