"""TLS to backends: whom to believe, and under which name."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass

from llmproxy.config import BackendConfig, BackendTlsConfig, ConfigError, WatchedFile


@dataclass(frozen=True, slots=True, eq=False)
class PeerTls:
    """How to meet one backend, as its `settings` say; their `server_name` is None where it is the host of its URL.

    `authorities` is the file in which those are whose certificates are believed, None where they are this machine's.
    Two are equal only if they are one: a connection that was opened by another is never used in its place.
    """

    context: ssl.SSLContext
    settings: BackendTlsConfig
    authorities: WatchedFile | None

    @property
    def server_name(self) -> str | None:
        """What is asked for (SNI) and must be in its certificate."""
        return self.settings.server_name

    @classmethod
    def of(cls, backend: BackendConfig) -> PeerTls:
        """As the configuration and the file of authorities say now. Raises OSError for a file of no use."""
        authorities = None
        if backend.tls.ca is not None:
            authorities = WatchedFile(backend.tls.ca)
            authorities.take()
        return cls(_context(backend), backend.tls, authorities)


def peers_tls(backends: Iterable[BackendConfig]) -> dict[str, PeerTls]:
    """By base URL, for every backend that is reached by https, or stands for some that are.

    Raises ConfigError for a file of authorities that cannot be read.
    """
    peers = {}
    for i, backend in enumerate(backends):
        if backend.by_https:
            try:
                peers[backend.url] = PeerTls.of(backend)
            except OSError as error:
                raise ConfigError([f"backends[{i}].tls.ca: {unfit(backend, error)}"]) from None
    return peers


def unfit(backend: BackendConfig, error: OSError) -> str:
    """What is wrong with its file of authorities, for people."""
    return f"{backend.tls.ca} holds no certificate: {error.strerror or error}"


def _context(backend: BackendConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=backend.tls.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # What is asked for is what this proxy speaks, so that a front before an engine cannot choose HTTP/2.
    context.set_alpn_protocols(["http/1.1"])
    if backend.tls.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
