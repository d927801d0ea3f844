"""The IP addresses and TLS settings of the backends."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import structlog

from llmproxy.config import BackendConfig
from llmproxy.upstream.resolver import Resolver
from llmproxy.upstream.tls import PeerTls, ca_error, peers_tls

CHECK_S = 2.0  # The seconds between two checks of the CA files. A change takes effect at the second check that sees it.

_log = structlog.get_logger()


class Endpoints:
    """The IP addresses and TLS settings of all backends. Call `close` at the end."""

    def __init__(self, resolver: Resolver | None = None) -> None:
        self.resolver = resolver or Resolver()
        # Base URL of an https backend -> TLS settings. For any other https URL, the machine's CAs are trusted.
        self.tls: dict[str, PeerTls] = {}
        self._backends: Collection[BackendConfig] = ()

    def replace(self, backends: Collection[BackendConfig]) -> None:
        """Replaces the set of backends.

        If two backends have the same URL, the TLS settings of the last one count. Raises ConfigError, and changes
        nothing, for an unreadable CA file.
        """
        wanted = {backend.url: backend for backend in backends if backend.by_https}
        made = peers_tls(
            one for url, one in wanted.items() if url not in self.tls or self.tls[url].settings != one.tls
        )  # fmt: skip
        for url in self.tls.keys() - wanted.keys():
            del self.tls[url]
        self.tls.update(made)
        self._backends = tuple(backends)
        self.resolver.follow(backend.url for backend in backends)

    async def follow_authorities(self, *, quiet: bool = False) -> None:
        """Checks the backends' CA files every CHECK_S and uses changed files, until the task is cancelled.

        A file that cannot be used is logged once, unless `quiet`, and changes nothing. After a change, open connections
        finish their request and are not reused.
        """
        while True:
            await asyncio.sleep(CHECK_S)
            for backend in self._backends:
                self._renew(backend, quiet)

    def _renew(self, backend: BackendConfig, quiet: bool) -> None:
        peer = self.tls.get(backend.url)
        if peer is None or peer.settings != backend.tls:
            # Another backend at this URL set the TLS settings, while this backend leaves.
            return
        if peer.authorities is None or not peer.authorities.has_changed():
            return
        try:
            # A new context, because CAs can be added to a context but not removed.
            self.tls[backend.url] = PeerTls.from_config(backend)
        except OSError as error:
            if not quiet:
                _log.warning("backend_ca_reload_failed", backend=backend.name, why=ca_error(backend.tls, error))
            return
        if not quiet:
            _log.info("backend_ca_reloaded", backend=backend.name, ca=str(backend.tls.ca))

    async def close(self) -> None:
        await self.resolver.close()
