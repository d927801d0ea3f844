"""TLS with backends: trusted CAs and expected server names."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from os import devnull
from pathlib import Path

from llmproxy.config import BackendConfig, BackendTlsConfig, ConfigError, WatchedFile
from llmproxy.config.watched import Stamp

CONTEXTS_MAX = 64  # Largest number of shared contexts. A context with the CAs of the system takes 34 ms.


@dataclass(frozen=True, slots=True, eq=False)
class PeerTls:
    """The TLS settings of a backend. Two objects are never equal, so a connection with older settings is not reused."""

    context: ssl.SSLContext
    settings: BackendTlsConfig
    authorities: WatchedFile | None  # The CA file, None for the CAs of this machine.

    @property
    def server_name(self) -> str | None:
        """The name that is sent (SNI) and must be in the certificate; None for the host of the URL."""
        return self.settings.server_name

    @classmethod
    def from_config(cls, backend: BackendConfig) -> PeerTls:
        """Reads the CA file of a backend. Raises OSError if the file cannot be used."""
        tls = backend.tls
        authorities = WatchedFile(tls.ca or Path(ssl.get_default_verify_paths().cafile or devnull))
        return cls(context_for(tls, authorities.take()), tls, authorities if tls.ca else None)


def peers_tls(backends: Iterable[BackendConfig]) -> dict[str, PeerTls]:
    """Maps the base URL of each https backend to its TLS settings. Raises ConfigError for an unreadable CA file."""
    peers = {}
    for i, backend in enumerate(backends):
        if backend.by_https:
            try:
                peers[backend.url] = PeerTls.from_config(backend)
            except OSError as error:
                raise ConfigError([f"backends[{i}].tls.ca: {ca_error(backend.tls, error)}"]) from None
    return peers


def ca_error(tls: BackendTlsConfig, error: OSError) -> str:
    """Returns a message for people about a CA file that cannot be used."""
    return f"{tls.ca} holds no certificate: {error.strerror or error}"


@lru_cache(CONTEXTS_MAX)
def context_for(tls: BackendTlsConfig, _: Stamp | None = None) -> ssl.SSLContext:
    """Returns the context of a client, the same one for equal settings and an equal state of the CA file.

    Raises OSError if the CA file cannot be used.
    """
    context = ssl.create_default_context(cafile=tls.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # This proxy only speaks HTTP/1.1, so a proxy in front of an engine must not choose HTTP/2.
    context.set_alpn_protocols(["http/1.1"])
    if tls.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
