"""Makes a process a member of a cluster, as its configuration says."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from math import inf

from llmproxy import __version__
from llmproxy.backends.registry import BackendRegistry
from llmproxy.config import Config
from llmproxy.core.domain import Verdict
from llmproxy.core.shards import DEFAULT
from llmproxy.gateway.build import Gateway
from llmproxy.observe.exit import Exits, RequestExit
from llmproxy.remote.cluster import stores
from llmproxy.remote.cluster.cluster import Cluster
from llmproxy.remote.cluster.network import TcpNetwork
from llmproxy.remote.cluster.protocol import PROTOCOL, Drained, Hello, Learned
from llmproxy.remote.cluster.relays import Relays
from llmproxy.remote.cluster.session import Shared
from llmproxy.remote.workers import protocol
from llmproxy.remote.workers.session import SchedulerContext
from llmproxy.scheduling.dispatcher import Dispatcher

OF_A_MACHINE = frozenset(
    {"host", "port", "tls", "admin", "cluster", "log_format", "log_level", "decision_log", "decision_log_sample",
     "state_file", "tracing", "reload", "workers"}
)  # fmt: skip
"""Keys that may differ between members, because they decide nothing about requests."""


class _NotCounted:
    """Every member counts its own requests in its own metrics."""

    def record(self, ended: RequestExit) -> None: ...

    def attempted(self, backend: str, verdict: Verdict) -> None: ...

    def log_lines_lost(self, lines: int) -> None: ...


def member_of(
    config: Config,
    incarnation: str,
    dispatcher: Dispatcher,
    relays: Relays,
    gateway: Gateway,
    registry: BackendRegistry,
    seen: Callable[[RequestExit], None],
) -> Cluster:
    """A member that is to be started. `seen` gets the requests of other members. Raises ConfigError."""
    chosen = config.cluster
    pools = dispatcher.pools
    locks = {name: stores.opened(chosen, config.discovery.kubernetes_api, name) for name in pools.shards.names}
    me = Hello(PROTOCOL, __version__, chosen.member or socket.gethostname(), incarnation, "", hash_of(config), 0)

    def stored(response: protocol.ResponseStored) -> protocol.ResponseStored:
        gateway.stored.note(response.response_id, response.backend, response.tenant)
        return protocol.ResponseStored(response.response_id, *gateway.stored.made_by[response.response_id])

    def settle(response: protocol.ResponseStored) -> None:
        gateway.stored.note(response.response_id, response.backend, response.tenant, authoritative=True)

    def owners() -> Iterator[protocol.ResponseStored]:
        for response_id, (backend, tenant) in gateway.stored.made_by.items():
            yield protocol.ResponseStored(response_id, backend, tenant)

    def shared(shard: str) -> Shared:
        def drained() -> Drained:
            by_hand = registry.drained()
            ours = frozenset(name for name in by_hand | registry.backends.keys() if pools.shard_of(name) == shard)
            return Drained(ours & by_hand, ours - by_hand)

        def drain(told: Drained) -> None:
            others = drained().backends - told.backends if told.others is None else told.others
            for name in registry.backends:
                if name in told.backends:
                    registry.drain(name)
                elif name in others:
                    registry.undrain(name)
            registry.drain_on_join(told.backends - registry.backends.keys())

        def learned() -> Learned:
            limits = registry.known_limits(lambda name: pools.shard_of(name) == shard)
            return Learned(limits, pools.scaling.known_capacities(lambda pool: pools.shards.of(pool) == shard))

        def restore(known: Learned, told_s: float) -> None:
            registry.restore_limits(known.limits)
            pools.scaling.restore(known.capacities, told_s)

        # The leader of the default shard tells them, and no other one.
        kept: Callable[[], Iterable[protocol.ResponseStored]] = owners if shard == DEFAULT else tuple
        return Shared(stored, settle, kept, drained, drain, learned, restore)

    async def no_page(page: protocol.PageRequest) -> protocol.PageResponse:
        return protocol.PageResponse(page.call, 503, "", (), b"")

    context = SchedulerContext(
        gateway.rulebook, dispatcher, Exits(_NotCounted(), seen), lambda: None, no_page, lambda _: None,
        lambda response, by: cluster.stored(response, by),
    )  # fmt: skip
    gateway.stored.on_made = relays.response_stored
    cluster = Cluster(
        me,
        chosen.lock_s,
        locks,
        dispatcher,
        relays,
        context,
        shared,
        TcpNetwork(chosen),
        inf if chosen.alone_after_s is None else chosen.alone_after_s,
    )
    gateway.stored.catch_up = cluster.default.caught_up
    return cluster


def hash_of(config: Config) -> str:
    """What members of one cluster should have in common."""
    said = [config.model_dump_json(exclude=set(OF_A_MACHINE)), *sorted({*config.cluster.pools})]
    return sha256("\0".join(said).encode()).hexdigest()[:12]
