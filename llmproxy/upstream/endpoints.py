"""How to reach the backends: the addresses behind their host names, and whose certificates to trust."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import structlog

from llmproxy.config import BackendConfig
from llmproxy.upstream.resolver import Resolver
from llmproxy.upstream.tls import PeerTls, ca_error, peers_tls

LOOK_S = 2.0
"""How often files of authorities are looked at. A change is taken in by the second look that finds it."""

_log = structlog.get_logger()


class Endpoints:
    """The endpoints of all backends: `resolver` knows their hosts, `tls` says by base URL how to trust those that are
    reached by https. Any other URL is trusted by the authorities of this machine. Ended by `close`.
    """

    def __init__(self, resolver: Resolver | None = None) -> None:
        self.resolver = resolver or Resolver()
        self.tls: dict[str, PeerTls] = {}
        self._backends: Collection[BackendConfig] = ()

    def replace(self, backends: Collection[BackendConfig]) -> None:
        """Be able to reach these backends and no others. Of two at one URL, the last one says how to trust it.

        Raises ConfigError for a file of authorities that cannot be read, and has changed nothing then.
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
        """Trust those who stand in the backends' files of authorities now, until cancelled.

        A file that cannot be used is logged once, unless `quiet`, and changes nothing. Connections that are open stay,
        and are not used again once they are idle.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            for backend in self._backends:
                self._renew(backend, quiet)

    def _renew(self, backend: BackendConfig, quiet: bool) -> None:
        peer = self.tls.get(backend.url)
        if peer is None or peer.settings != backend.tls:
            # Another backend at its URL says how to trust it, while this one leaves.
            return
        if peer.authorities is None or not peer.authorities.has_changed():
            return
        try:
            # Another context: an authority can be added to one, and not be taken out again.
            self.tls[backend.url] = PeerTls.from_config(backend)
        except OSError as error:
            if not quiet:
                _log.warning("authorities_kept", backend=backend.name, why=ca_error(backend, error))
            return
        if not quiet:
            _log.info("authorities_renewed", backend=backend.name, ca=str(backend.tls.ca))

    async def close(self) -> None:
        """Look nothing up any more."""
        await self.resolver.close()
