"""Builds the cluster member that the configuration describes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from hashlib import sha256

from llmproxy import __version__
from llmproxy.backends.registry import BackendRegistry
from llmproxy.config import Config
from llmproxy.gateway.build import Gateway
from llmproxy.observe.exit import RequestExit
from llmproxy.remote.cluster.cluster import Cluster
from llmproxy.remote.cluster.hand_over import MemberCallbacks
from llmproxy.remote.cluster.leasing import ClusterLeasing
from llmproxy.remote.cluster.locks import open_lock_store
from llmproxy.remote.cluster.network import TcpNetwork
from llmproxy.remote.messages import PROTOCOL, Drained, Hello, Learned, PageRequest, PageResponse, ResponseStored
from llmproxy.remote.server import Services
from llmproxy.scheduling.dispatcher import Dispatcher

PER_MEMBER_KEYS = frozenset(
    {"host", "port", "tls", "admin", "cluster", "log_format", "log_level", "decision_log", "decision_log_sample",
     "state_file", "tracing", "reload", "workers"}
)  # fmt: skip
"""Keys that may differ between members. They do not affect scheduling."""


def build_member(
    config: Config,
    incarnation: str,
    dispatcher: Dispatcher,
    leasing: ClusterLeasing,
    gateway: Gateway,
    registry: BackendRegistry,
    show: Callable[[RequestExit], None],
) -> Cluster:
    """Returns a member that is not started yet. `show` gets the ended requests of other members. Raises ConfigError."""
    chosen = config.cluster
    pools = dispatcher.pools
    me = Hello(PROTOCOL, __version__, chosen.member or socket.gethostname(), incarnation, "", config_hash(config), 0)

    def record_stored(response: ResponseStored) -> ResponseStored:
        gateway.stored.note(response.response_id, response.backend, response.tenant)
        return ResponseStored(response.response_id, *gateway.stored.made_by[response.response_id])

    def record_owner(response: ResponseStored) -> None:
        gateway.stored.note(response.response_id, response.backend, response.tenant, authoritative=True)

    def stored_responses() -> Iterator[ResponseStored]:
        for response_id, (backend, tenant) in gateway.stored.made_by.items():
            yield ResponseStored(response_id, backend, tenant)

    def drained() -> Drained:
        return Drained(frozenset(registry.drained()), registry.moves_s())

    def apply_drained(state: Drained) -> None:
        for name in registry.backends:
            if name in state.backends:
                registry.drain(name, state.moves_s.get(name))
            else:
                registry.undrain(name)
        registry.drain_on_join(state.backends - registry.backends.keys())

    def learned() -> Learned:
        return Learned(registry.known_limits(), pools.scaling.known_capacities())

    def restore_learned(state: Learned, received_s: float) -> None:
        registry.restore_limits(state.limits)
        pools.scaling.restore(state.capacities, received_s)

    callbacks = MemberCallbacks(
        record_stored, record_owner, stored_responses, drained, apply_drained, learned, restore_learned
    )

    async def no_page(page: PageRequest) -> PageResponse:
        return PageResponse(page.call, 503, "", (), b"")

    services = Services(dispatcher, dispatcher, no_page, show, lambda response, by: cluster.stored(response, by))
    gateway.stored.on_made = leasing.response_stored
    cluster = Cluster(
        me,
        chosen.lock_s,
        open_lock_store(chosen, config.discovery.kubernetes_api),
        dispatcher,
        leasing,
        services,
        callbacks,
        TcpNetwork(chosen),
    )
    gateway.stored.catch_up = leasing.caught_up
    return cluster


def config_hash(config: Config) -> str:
    """Returns a hash of the settings that all members should share."""
    return sha256(config.model_dump_json(exclude=set(PER_MEMBER_KEYS)).encode()).hexdigest()[:12]
