"""The network between members: addresses, TCP connections and mutual TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, cast

import structlog

from llmproxy.config import ClientsConfig, ClusterConfig, ClusterTlsConfig, ConfigError
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.tls import ClientTls, TlsConnection
from llmproxy.lifecycle.accepting import Acceptor
from llmproxy.lifecycle.background import supervised
from llmproxy.lifecycle.descriptors import member_connections_max
from llmproxy.lifecycle.sockets import open_sockets

WILDCARDS = frozenset({"0.0.0.0", "::", ""})
HELLO_S = 2.0  # Maximum time for an accepted connection to identify itself, including the TLS handshake.
ADDRESS_MAX = 16  # Maximum number of pending connections from one address.
LOG_S = 60.0  # Closed connections are logged at most once in this time.

Peer = tuple[object, ...]
_log = structlog.get_logger()


def split_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT or [HOST]:PORT. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def reachable(host: str, port: int) -> str:
    """Returns the address at which other machines reach a port on `host`. Raises ConfigError if it is unknown."""
    if host in WILDCARDS:
        try:
            host = socket.gethostbyname(socket.gethostname())
        except OSError:
            host = "127.0.0.1"
        if host.startswith("127."):
            raise ConfigError(
                ["cluster.advertise: set the address at which other members reach this one; the host name has none"]
            )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Network(Protocol):
    """Opens and accepts the connections between the members of a cluster."""

    async def listen(self, accepted: Callable[[], asyncio.Protocol]) -> str:
        """Accepts connections, each with a new protocol object. Returns the address of this member.

        Raises OSError, and ConfigError if the address is unknown.
        """

    async def connect(self, address: str, connected: Callable[[], asyncio.Protocol]) -> None:
        """Connects to another member. Raises OSError; ValueError for an invalid address."""

    def trusts(self, transport: asyncio.BaseTransport) -> bool:
        """Returns whether the peer's certificate has the name of a member. True without TLS."""

    def identified(self, transport: asyncio.BaseTransport) -> None:
        """Keeps a connection open, because a member has identified itself on it."""

    def close(self) -> None:
        """Stops accepting connections."""


class TcpNetwork:
    """Connections over TCP, with TLS if certificates are configured. Raises ConfigError."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._tls = None if config.tls.cert is None else PeerTls(config.tls)
        self._acceptor: Acceptor | None = None
        self._pending = PendingConnections(member_connections_max())
        self._watching: asyncio.Task[None] | None = None

    async def listen(self, accepted: Callable[[], asyncio.Protocol]) -> str:
        assert self._config.listen is not None
        host, port = split_address(self._config.listen)
        sockets = open_sockets(host, port)
        factory: Callable[[], asyncio.BaseProtocol] = accepted
        if (tls := self._tls) is not None:
            self._watching = supervised(tls.watch, "follow the certificate of the cluster")
            loop, no_limits = asyncio.get_running_loop(), ClientLimits(ClientsConfig())

            def factory() -> asyncio.BaseProtocol:
                return TlsConnection(loop, accepted(), tls.server, no_limits, lambda _: b"", HELLO_S)

        port = int(sockets[0].getsockname()[1])
        self._acceptor = Acceptor(sockets, factory, self._pending.accepted)
        return self._config.advertise or reachable(host, port)

    async def connect(self, address: str, connected: Callable[[], asyncio.Protocol]) -> None:
        host, port = split_address(address)
        tls, name = (None, None) if self._tls is None else (self._tls.client(), self._tls.name)
        loop = asyncio.get_running_loop()
        await loop.create_connection(connected, host, port, ssl=tls, server_hostname=name)

    def trusts(self, transport: asyncio.BaseTransport) -> bool:
        return self._tls is None or self._tls.names(transport)

    def identified(self, transport: asyncio.BaseTransport) -> None:
        self._pending.identified(transport)

    def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        if self._watching is not None:
            self._watching.cancel()


class PeerTls:
    """Mutual TLS: both sides show a certificate that the authority `ca` signed, and that has the DNS name `name`.

    The constructor raises ConfigError if a file cannot be used.
    """

    def __init__(self, config: ClusterTlsConfig) -> None:
        assert config.cert is not None
        assert config.ca is not None
        self._config = config
        self.name = config.name
        try:
            self._ours = ClientTls(config.cert, config.key, config.ca)
            self._client = self._read()
        except ConfigError as error:
            problems = [f"cluster.{problem}".replace("tls.client_ca", "tls.ca", 1) for problem in error.problems]
            raise ConfigError(problems) from None
        except OSError as error:
            raise ConfigError([f"cluster.tls: {error.strerror or error}"]) from None

    @property
    def server(self) -> ssl.SSLContext:
        """The context for incoming connections. It is reloaded when the files change."""
        return self._ours.context

    async def watch(self) -> None:
        """Reloads changed files, until cancelled."""
        await self._ours.watch()

    def client(self) -> ssl.SSLContext:
        """Returns a context for an outgoing connection, from the current files or else the last usable files."""
        with suppress(OSError):
            self._client = self._read()
        return self._client

    def _read(self) -> ssl.SSLContext:
        """Builds a TLS context from the configured files. Raises OSError if a file cannot be used."""
        context = ssl.create_default_context(cafile=self._config.ca)
        assert self._config.cert is not None
        # Without a password, OpenSSL would ask the terminal for the passphrase of an encrypted key.
        context.load_cert_chain(self._config.cert, self._config.key, password="")
        return context

    def names(self, transport: asyncio.BaseTransport) -> bool:
        """Returns whether the peer's certificate has the name of a member. The handshake has checked its authority."""
        tls = transport.get_extra_info("ssl_object")
        names = (tls.getpeercert() or {}).get("subjectAltName", ())
        return ("DNS", self.name) in names


class PendingConnections:
    """Accepted connections that are not identified yet as connections of members.

    Anyone who reaches the port can open connections, so their number is limited, and each must send a valid Hello
    within `HELLO_S`. At a limit, the oldest pending connection is closed for the newest: a real member identifies
    itself within milliseconds.
    """

    def __init__(self, connections_max: int) -> None:
        """Creates the limits. `connections_max` is the limit for members and unknown hosts together."""
        self._connections_max = connections_max
        self._open: dict[Peer, asyncio.Transport] = {}
        self._pending: dict[Peer, asyncio.TimerHandle] = {}
        self._cut = 0
        self._logged_s = -LOG_S

    def accepted(self, transport: asyncio.Transport) -> None:
        """Adds a new connection. At a limit, closes another connection, or the new one if no other is pending."""
        loop, peer = asyncio.get_running_loop(), _peer(transport)
        for gone in [other for other, one in self._open.items() if one.is_closing()]:
            self._forget(gone)
        if transport.is_closing():
            return
        if peer in self._open:
            self._open[peer] = transport  # Under TLS, `identified` knows only the transport of its plaintext.
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
        """Keeps a member's connection open. Its Hello may be read before the call of `accepted`."""
        peer = _peer(transport)
        if (timer := self._pending.pop(peer, None)) is not None:
            timer.cancel()
        self._open.setdefault(peer, cast(asyncio.Transport, transport))

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
    """Returns address and port of the peer, which identify a connection, with and without TLS."""
    return tuple(transport.get_extra_info("peername") or ("",))
