"""How members reach and trust each other: addresses, and certificates of an authority of their own."""

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
from llmproxy.remote.cluster.strangers import HELLO_S, Strangers

ANY = frozenset({"0.0.0.0", "::", ""})


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT or [HOST]:PORT as both. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def reachable(host: str, port: int) -> str:
    """The address at which others reach a port that listens on `host`. Raises ConfigError where nobody can tell."""
    if host in ANY:
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
    """What members are connected by."""

    async def listen(self, accepted: Callable[[], asyncio.Protocol]) -> str:
        """Accept connections, each with a protocol of its own; the address of this member. Raises OSError."""

    async def connect(self, address: str, connected: Callable[[], asyncio.Protocol]) -> None:
        """Connect to another member. Raises OSError, ValueError for what is no address."""

    def trusts(self, transport: asyncio.BaseTransport) -> bool:
        """Whether who connected has the name of a member."""

    def introduced(self, transport: asyncio.BaseTransport) -> None:
        """Who connected was taken in as a member: the connection may stay."""

    def close(self) -> None:
        """Accept nobody any more."""


class TcpNetwork:
    """Connections over TCP, with TLS where the configuration has certificates. Raises ConfigError."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._tls = None if config.tls.cert is None else PeerTls(config.tls)
        self._acceptor: Acceptor | None = None
        self._strangers = Strangers(member_connections_max())
        self._watching: asyncio.Task[None] | None = None

    async def listen(self, accepted: Callable[[], asyncio.Protocol]) -> str:
        assert self._config.listen is not None
        host, port = split_address(self._config.listen)
        sockets = open_sockets(host, port)
        factory: Callable[[], asyncio.BaseProtocol] = accepted
        if (tls := self._tls) is not None:
            self._watching = supervised(tls.watch, "follow the certificate of the cluster")
            loop, nobody = asyncio.get_running_loop(), ClientLimits(ClientsConfig())

            def factory() -> asyncio.BaseProtocol:
                return TlsConnection(loop, accepted(), tls.server, nobody, lambda _: b"", HELLO_S)

        port = int(sockets[0].getsockname()[1])
        self._acceptor = Acceptor(sockets, factory, self._strangers.came)
        return self._config.advertise or reachable(host, port)

    async def connect(self, address: str, connected: Callable[[], asyncio.Protocol]) -> None:
        host, port = split_address(address)
        tls, name = (None, None) if self._tls is None else (self._tls.client(), self._tls.name)
        loop = asyncio.get_running_loop()
        await loop.create_connection(connected, host, port, ssl=tls, server_hostname=name)

    def trusts(self, transport: asyncio.BaseTransport) -> bool:
        return self._tls is None or self._tls.names(transport)

    def introduced(self, transport: asyncio.BaseTransport) -> None:
        self._strangers.introduced(transport)

    def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        if self._watching is not None:
            self._watching.cancel()


class PeerTls:
    """Certificates of both sides, signed by the authority of the cluster, with one name that every member has.

    Raises ConfigError for files that cannot be used.
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
        """For connections of other members. It follows the files."""
        return self._ours.context

    async def watch(self) -> None:
        """Follow the files until cancelled."""
        await self._ours.watch()

    def client(self) -> ssl.SSLContext:
        """For a connection to another member, by the files as they are now, or as they were when they could be used."""
        with suppress(OSError):
            self._client = self._read()
        return self._client

    def _read(self) -> ssl.SSLContext:
        """Raises OSError."""
        context = ssl.create_default_context(cafile=self._config.ca)
        assert self._config.cert is not None
        # Without a password, OpenSSL would ask the terminal for the passphrase of an encrypted key.
        context.load_cert_chain(self._config.cert, self._config.key, password="")
        return context

    def names(self, transport: asyncio.BaseTransport) -> bool:
        """Whether the certificate of the peer has the name of members. Its authority was checked."""
        tls = transport.get_extra_info("ssl_object")
        held = (tls.getpeercert() or {}).get("subjectAltName", ())
        return ("DNS", self.name) in held
