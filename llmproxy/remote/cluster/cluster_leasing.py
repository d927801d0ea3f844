"""The `Leasing` of a cluster member: it passes each call to the leader client of the request's shard."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import AdmissionKind, Grant, Request
from llmproxy.core.shards import DEFAULT
from llmproxy.observe.exit import RequestExit
from llmproxy.remote.cluster.leader_client import LeaderClient
from llmproxy.scheduling.dispatcher import Dispatcher
from llmproxy.scheduling.lease import Admitted


class ClusterLeasing:
    """The `Leasing` for requests of all shards."""

    def __init__(self, local: Dispatcher, backends: Container[str]) -> None:
        """See `LeaderClient`."""
        self._local = local
        self._pools = local.pools
        self._shards = local.pools.shards
        self.by_shard = {name: LeaderClient(local, backends) for name in self._shards.names}
        self._default = self.by_shard[DEFAULT]

    # --- for requests -------------------------------------------------------------------------------------------------

    def admit(
        self, request: Request, excluded: frozenset[str] = frozenset(), entry: AdmissionKind = AdmissionKind.NEW
    ) -> Admitted:
        """See `Dispatcher.admit`."""
        return self._client_for(request).admit(request, excluded, entry)

    async def resolve(
        self, name: str | None, no_backend_wait_s: float, body_bytes: int, key: str = "", beside: str | None = None
    ) -> Target:
        """See `LeaderClient.resolve`."""
        shard = (
            self._shards.for_pool(self._pools.catalogue.resolve_alias(name, key, beside))
            if self._shards.separate
            else DEFAULT
        )
        return await self.by_shard[shard].resolve(name, no_backend_wait_s, body_bytes, key, beside)

    def direct(self, backend: str, cut: Callable[[], None]) -> AbstractContextManager[None]:
        """See `Dispatcher.direct`."""
        return self._local.direct(backend, cut)

    def ended(self, request: Request, met: bool | None) -> None:
        """See `Dispatcher.ended`."""
        self._client_for(request).ended(request, met)

    def cached(self, grant: Grant, hashes: Sequence[int]) -> None:
        """See `Dispatcher.cached`."""
        self._client_for(grant.request).cached(grant, hashes)

    def response_stored(self, response_id: str, backend: str, tenant: str) -> None:
        """See `LeaderClient.response_stored`. The default shard announces stored responses to all members."""
        self._default.response_stored(response_id, backend, tenant)

    def exited(self, ended: RequestExit) -> None:
        """See `LeaderClient.exited`."""
        self._client_for_exit(ended).exited(ended)

    def shown_here(self, ended: RequestExit) -> bool:
        """Whether the page of this process shows a request. With several shards, only the leader of its shard does."""
        return not self._shards.separate or self._client_for_exit(ended).is_leader

    def _client_for_exit(self, ended: RequestExit) -> LeaderClient:
        backend = ended.routing.last.backend
        return self.by_shard[DEFAULT if backend is None else self._pools.shard_for_backend(backend)]

    def _client_for(self, request: Request) -> LeaderClient:
        return self.by_shard[self._shards.for_pool(request.pool)]

    # --- drain --------------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self._default.draining

    @property
    def granting(self) -> bool:
        return self._default.granting

    def drain(self, *, finish_waiting: bool = False) -> None:
        """See `Dispatcher.drain`, for the requests of this member."""
        for client in self.by_shard.values():
            client.drain(finish_waiting=finish_waiting)

    # --- inspection ---------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests of this member that wait for a lease."""
        return sum(client.waiting for client in self.by_shard.values())

    @property
    def running(self) -> int:
        """Leases that this member has."""
        return sum(client.running for client in self.by_shard.values())
