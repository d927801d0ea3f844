"""TLS with clients: certificates that are renewed while the proxy runs, and the handshakes of connections."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import structlog

from llmproxy.config import ConfigError, TlsConfig, WatchedFile
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.wrong_protocol import plain_http

if TYPE_CHECKING:
    # uvloop's class is a copy of asyncio's class, which type checkers know.
    from asyncio.sslproto import SSLProtocol
else:
    from uvloop.loop import SSLProtocol

CHECK_S = 1.0  # The interval of checking the files by a stat. A change takes effect at the second check that sees it.
PLAIN_HTTP = ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST")
"""OpenSSL's names for its errors when a client begins with plain HTTP."""

_log = structlog.get_logger()


class _Unusable(Exception):  # noqa: N818 - the message describes a file
    """A file of the section `tls` cannot be used. `key` is the setting that names the file."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(why)
        self.key = key


class _Renewed(ssl.SSLContext):
    """A TLS context that passes each new connection to the context `now`.

    A renewal of the files replaces `now`, because OpenSSL cannot remove authorities from a context.
    """

    now: ssl.SSLContext

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self.now.wrap_bio(*args, **options)


class ClientTls:
    """The TLS context of the listening sockets. `context` stays the same object when its files are renewed.

    Raises ConfigError if the files cannot be used.
    """

    def __init__(self, cert: Path, key: Path | None, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._files = [WatchedFile(path, missing_counts=True) for path in (cert, key, client_ca) if path is not None]
        for file in self._files:
            file.take()
        self.context = _Renewed(ssl.PROTOCOL_TLS_SERVER)
        try:
            self.context.now = self._read()
        except _Unusable as error:
            raise ConfigError([f"tls.{error.key}: {error}"]) from None

    @classmethod
    def from_config(cls, config: TlsConfig) -> ClientTls | None:
        """Returns the configured context; None if clients use plain HTTP.

        Raises ConfigError, also for `key` or `client_ca` without `cert`.
        """
        if config.cert is not None:
            return cls(config.cert, config.key, config.client_ca)
        if config.key is not None or config.client_ca is not None:
            raise ConfigError(["tls.cert: is missing; without it clients would come by plain http"])
        return None

    def renew(self) -> bool:
        """Uses changed certificate files for the next handshakes. Returns True if changed files are now used.

        Files that cannot be used are logged once and change nothing.
        """
        changed = [file.has_changed() for file in self._files]
        if True not in changed:
            return False
        try:
            self.context.now = self._read()
        except _Unusable as error:
            _log.warning("certificate_reload_failed", why=str(error))
            return False
        _log.info("certificate_reloaded", cert=str(self._cert))
        return True

    async def watch(self) -> None:
        """Calls `renew` every CHECK_S seconds until the task is cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.renew()

    def _read(self) -> ssl.SSLContext:
        """Returns a context from the current files. Raises _Unusable."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Without a password, OpenSSL would ask the terminal for the passphrase of an encrypted key.
            context.load_cert_chain(self._cert, self._key, password="")
        except OSError as error:
            in_one = "its key in the same file, as tls.key names none,"
            key = in_one if self._key is None else f"the key {self._key}"
            raise _Unusable("cert", f"{self._cert} with {key} cannot be used: {_reason(error)}") from None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except OSError as error:
                raise _Unusable("client_ca", f"{self._client_ca} holds no certificate: {_reason(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _reason(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    # OpenSSL has a name for most problems, such as KEY_VALUES_MISMATCH.
    return error.reason.lower().replace("_", " ") if error.reason else "it cannot be read as PEM without a passphrase"


def peer_address(transport: asyncio.BaseTransport) -> str:
    """Returns the IP address of the peer; "" for a Unix socket and for a connection that is already closed."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


class _Handshake:
    """Replaces uvloop's SSL context and its TLS object, to answer clients that begin with plain HTTP.

    uvloop itself closes such a connection without an answer. `wire` is the transport while the connection is open.
    """

    def __init__(self, context: ssl.SSLContext, reject: Callable[[Failure], bytes]) -> None:
        self._context = context
        self._reject = reject
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
            self.wire.write(self._reject(plain_http()))
            self.wire.close()
            # Any other error would cut the connection before the answer is sent.
            raise ssl.SSLWantReadError from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tls, name)


class TlsConnection(SSLProtocol):
    """Runs uvloop's TLS below the protocol `connection`. Limits count the connection as soon as it is accepted.

    With `create_server(ssl=...)`, limits would not count connections whose handshake never ends. A connection beyond
    the limits is closed without an answer, because a handshake costs far more than an answer; `reject` counts and logs
    this. A connection is also closed without an answer if its handshake takes more than `timeout_s` seconds.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: asyncio.Protocol,
        context: ssl.SSLContext,
        clients: ClientLimits,
        reject: Callable[[Failure], bytes],
        timeout_s: float,
    ) -> None:
        options: dict[str, Any] = {"server_side": True, "ssl_handshake_timeout": timeout_s}
        # No waiter: `connection` gets a call when the handshake has ended.
        self._handshake = _Handshake(context, reject)
        super().__init__(loop, connection, cast(ssl.SSLContext, self._handshake), None, **options)  # type: ignore[arg-type]
        self._clients = clients
        self._reject = reject
        self._address: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        address = peer_address(transport)
        refused = self._clients.opened(address)
        if refused is not None:
            self._reject(refused)
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
