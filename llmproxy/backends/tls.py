"""TLS to backends: whom to believe, and under which name."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from ssl import SSLContext
from typing import TypedDict

from llmproxy.config import BackendConfig, ConfigError


@dataclass(frozen=True, slots=True)
class PeerTls:
    """How to meet one backend: `server_name` is asked for (SNI) and must be in its certificate; None is its host."""

    context: ssl.SSLContext
    server_name: str | None


class Trust(TypedDict, total=False):
    """Arguments of a request of aiohttp's client."""

    ssl: SSLContext
    server_hostname: str | None


def trust_of(peer: PeerTls | None) -> Trust:
    """What aiohttp's client is to be told of a backend; of others nothing."""
    return {} if peer is None else {"ssl": peer.context, "server_hostname": peer.server_name}


def peers_tls(backends: Iterable[BackendConfig]) -> dict[str, PeerTls]:
    """By base URL, for every backend that is reached by https, or stands for some that are.

    Raises ConfigError for a file of authorities that cannot be read.
    """
    return {
        backend.url: PeerTls(_context(i, backend), backend.tls.server_name)
        for i, backend in enumerate(backends)
        if backend.by_https
    }


def _context(i: int, backend: BackendConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=backend.tls.ca)
    except OSError as error:
        why = f"{backend.tls.ca} holds no certificate: {error.strerror or error}"
        raise ConfigError([f"backends[{i}].tls.ca: {why}"]) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # What is asked for is what this proxy speaks, so that a front before an engine cannot choose HTTP/2.
    context.set_alpn_protocols(["http/1.1"])
    if backend.tls.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
