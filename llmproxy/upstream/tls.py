"""TLS to backends: which certificates to trust, and under which name."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass

from llmproxy.config import BackendConfig, BackendTlsConfig, ConfigError, WatchedFile


@dataclass(frozen=True, slots=True, eq=False)
class PeerTls:
    """How to trust one backend, by its `settings`; their `server_name` is None where it is the host of its URL.

    `authorities` is the file of certificate authorities that are trusted, None for those of this machine. Two objects
    are never equal: a connection that was opened with one is not used where another one holds.
    """

    context: ssl.SSLContext
    settings: BackendTlsConfig
    authorities: WatchedFile | None

    @property
    def server_name(self) -> str | None:
        """The name that is sent (SNI) and must be in the certificate."""
        return self.settings.server_name

    @classmethod
    def from_config(cls, backend: BackendConfig) -> PeerTls:
        """By the configuration and the file of authorities as they are now. Raises OSError for a useless file."""
        authorities = None
        if backend.tls.ca is not None:
            authorities = WatchedFile(backend.tls.ca)
            authorities.take()
        return cls(_context(backend), backend.tls, authorities)


def peers_tls(backends: Iterable[BackendConfig]) -> dict[str, PeerTls]:
    """By base URL, for every backend that is reached by https, templates of DNS names included.

    Raises ConfigError for a file of authorities that cannot be read.
    """
    peers = {}
    for i, backend in enumerate(backends):
        if backend.by_https:
            try:
                peers[backend.url] = PeerTls.from_config(backend)
            except OSError as error:
                raise ConfigError([f"backends[{i}].tls.ca: {ca_error(backend, error)}"]) from None
    return peers


def ca_error(backend: BackendConfig, error: OSError) -> str:
    """What is wrong with its file of authorities, for people."""
    return f"{backend.tls.ca} holds no certificate: {error.strerror or error}"


def _context(backend: BackendConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=backend.tls.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # This proxy speaks HTTP/1.1 alone, so that a proxy in front of an engine must not choose HTTP/2.
    context.set_alpn_protocols(["http/1.1"])
    if backend.tls.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
