"""What the gateway of a member uses in place of the scheduler: the relay of the shard that a request belongs to."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import AdmissionKind, Grant, Request
from llmproxy.core.shards import DEFAULT
from llmproxy.observe.exit import RequestExit
from llmproxy.remote.cluster.relay import RelayDispatcher
from llmproxy.scheduling.dispatcher import Dispatcher
from llmproxy.scheduling.lease import Admitted


class Relays:
    """`Leasing` over all shards. `local` and `backends` are those of `RelayDispatcher`."""

    def __init__(self, local: Dispatcher, backends: Container[str]) -> None:
        self._local = local
        self._pools = local.pools
        self._shards = local.pools.shards
        self.by_shard = {name: RelayDispatcher(local, backends) for name in self._shards.names}
        self._default = self.by_shard[DEFAULT]

    # --- for requests -------------------------------------------------------------------------------------------------

    def admit(
        self, request: Request, excluded: frozenset[str] = frozenset(), entry: AdmissionKind = AdmissionKind.NEW
    ) -> Admitted:
        """See `Dispatcher.admit`."""
        return self._of(request).admit(request, excluded, entry)

    async def resolve(
        self, name: str | None, hold_s: float, body_bytes: int, key: str = "", beside: str | None = None
    ) -> Target:
        """See `RelayDispatcher.resolve`."""
        shard = self._shards.of(self._pools.catalogue.resolve_alias(name, key, beside)) if self._shards.own else DEFAULT
        return await self.by_shard[shard].resolve(name, hold_s, body_bytes, key, beside)

    def direct(self, backend: str, cut: Callable[[], None]) -> AbstractContextManager[None]:
        """See `Dispatcher.direct`."""
        return self._local.direct(backend, cut)

    def ended(self, request: Request, met: bool | None) -> None:
        """See `Dispatcher.ended`."""
        self._of(request).ended(request, met)

    def cached(self, grant: Grant, hashes: Sequence[int]) -> None:
        """See `Dispatcher.cached`."""
        self._of(grant.request).cached(grant, hashes)

    def response_stored(self, response_id: str, backend: str, tenant: str) -> None:
        """See `RelayDispatcher.response_stored`. All members hear of it by the default shard."""
        self._default.response_stored(response_id, backend, tenant)

    def exited(self, ended: RequestExit) -> None:
        """See `RelayDispatcher.exited`."""
        self._of_exit(ended).exited(ended)

    def shown_here(self, ended: RequestExit) -> bool:
        """Whether the page of this process is about a request of its own: where leaders are several, one shows it."""
        return not self._shards.own or self._of_exit(ended).leads

    def _of_exit(self, ended: RequestExit) -> RelayDispatcher:
        backend = ended.routing.last.backend
        return self.by_shard[DEFAULT if backend is None else self._pools.shard_of(backend)]

    def _of(self, request: Request) -> RelayDispatcher:
        return self.by_shard[self._shards.of(request.pool)]

    # --- drain --------------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self._default.draining

    @property
    def granting(self) -> bool:
        return self._default.granting

    def drain(self, *, finish_waiting: bool = False) -> None:
        """See `Dispatcher.drain`, for the requests of this member."""
        for relay in self.by_shard.values():
            relay.drain(finish_waiting=finish_waiting)

    # --- inspection ---------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests of this member that wait for a lease."""
        return sum(relay.waiting for relay in self.by_shard.values())

    @property
    def running(self) -> int:
        """Leases of this member."""
        return sum(relay.running for relay in self.by_shard.values())
