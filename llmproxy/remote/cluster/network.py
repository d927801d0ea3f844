"""The network between members: addresses, TCP connections and mutual TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from llmproxy.config import ClientsConfig, ClusterConfig, ClusterTlsConfig, ConfigError
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.tls import ClientTls, TlsConnection
from llmproxy.lifecycle.accepting import Acceptor
from llmproxy.lifecycle.background import supervised
from llmproxy.lifecycle.descriptors import member_connections_max
from llmproxy.lifecycle.sockets import open_sockets
from llmproxy.remote.cluster.pending_connections import HELLO_S, PendingConnections

WILDCARDS = frozenset({"0.0.0.0", "::", ""})


def split_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT or [HOST]:PORT. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def reachable(host: str, port: int) -> str:
    """Returns the address at which others reach a port that listens on `host`. Raises ConfigError if it is unknown."""
    if host in WILDCARDS:
        try:
            host = socket.gethostbyname(socket.gethostname())
        except OSError:
            host = "127.0.0.1"
        if host.startswith("127."):
            raise ConfigError(
                ["cluster.advertise: the name of this machine does not tell its address; say at which others reach it"]
            )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Network(Protocol):
    """Connections between members."""

    async def listen(self, accepted: Callable[[], asyncio.Protocol]) -> str:
        """Accept connections, each with a new protocol object. Returns the address of this member. Raises OSError."""

    async def connect(self, address: str, connected: Callable[[], asyncio.Protocol]) -> None:
        """Connect to another member. Raises OSError; ValueError for an invalid address."""

    def trusts(self, transport: asyncio.BaseTransport) -> bool:
        """Whether the certificate of the peer has the name of a member. True without TLS."""

    def identified(self, transport: asyncio.BaseTransport) -> None:
        """Keep a connection open, because a member has identified itself on it."""

    def close(self) -> None:
        """Stop accepting connections."""


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
    """Mutual TLS: both sides show a certificate of the cluster's authority with the DNS name that all members share.

    Raises ConfigError for unusable files.
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
        """Reload changed files, until cancelled."""
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
        """Whether the certificate of the peer has the name of a member. The handshake has checked its authority."""
        tls = transport.get_extra_info("ssl_object")
        names = (tls.getpeercert() or {}).get("subjectAltName", ())
        return ("DNS", self.name) in names
