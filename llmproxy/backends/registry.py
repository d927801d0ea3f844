"""The registry of backends. Only the registry adds, changes, drains and removes backends.

Each source (the configuration, a file, DNS, Kubernetes) lists its backends, and the registry has the backends of all
sources. A backend that no source lists any more gets no new requests. It is removed when its requests in flight have
ended, and no other backend can still fetch a prompt from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import structlog

from llmproxy.backends.events import BackendObserver
from llmproxy.backends.poller import Poller
from llmproxy.config import BackendConfig, PollConfig
from llmproxy.config.schema.backends import EXTERNAL_IN_FLIGHT
from llmproxy.core.domain import KnownLimit, Role
from llmproxy.core.pools import Pools
from llmproxy.core.snapshot import EXTERNAL, BackendStatus
from llmproxy.lifecycle.background import spawned, supervised
from llmproxy.scheduling.dispatcher import Dispatcher
from llmproxy.upstream.endpoints import Endpoints
from llmproxy.upstream.port import Upstream
from llmproxy.upstream.tls import peers_tls

_log = structlog.get_logger()


class Instance(BackendConfig):
    """A backend whose source also reports its process (`uid`) and whether it is ready for requests."""

    uid: str
    ready: bool


@dataclass(slots=True)
class _Member:
    config: BackendConfig
    source: str
    since_s: float
    polling: asyncio.Task[None] | None
    drained: bool = False
    leaving: asyncio.Task[None] | None = None
    # The task that moves the streams of a drained backend after the deadline of the drain, and the deadline on the
    # loop's clock.
    moving: asyncio.Task[None] | None = None
    moves_s: float | None = None


class BackendRegistry:
    """The backends. Each one except external backends has a poller until the backend is removed or `close` is called.

    `endpoints` gets all backends, so that the HTTP client knows their TLS settings and resolves their names. `events`
    gets the results of polls, and removals.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        upstream: Upstream,
        events: BackendObserver,
        poll: PollConfig,
        api_key: str | None,
        endpoints: Endpoints,
    ) -> None:
        self._endpoints = endpoints
        self._dispatcher = dispatcher
        self._pools: Pools = dispatcher.pools
        self._upstream = upstream
        self._events = events
        self._poll = poll
        self._api_key = api_key
        self._wanted: dict[str, tuple[BackendConfig, ...]] = {}
        self._members: dict[str, _Member] = {}
        self._backends: dict[str, BackendConfig] = {}
        self._pollers: dict[str, Poller] = {}
        self._clashes: set[tuple[str, str]] = set()
        self._drained_before: set[str] = set()
        self._restored: Mapping[str, KnownLimit] = {}
        self._now = asyncio.get_running_loop().time

    @property
    def backends(self) -> Mapping[str, BackendConfig]:
        """Maps backend names to configurations, including backends that are being removed.

        The mapping changes with the registry.
        """
        return MappingProxyType(self._backends)

    @property
    def pollers(self) -> Mapping[str, Poller]:
        """Maps backend names to pollers. The mapping changes with the registry."""
        return MappingProxyType(self._pollers)

    # --- what sources and operators want --------------------------------------------------------------------------

    def update(self, source: str, backends: Sequence[BackendConfig]) -> None:
        """Sets the backends that `source` lists, and adds, changes and removes backends accordingly.

        If two backends have the same name or URL, the first counts. Raises ConfigError if a CA file is unreadable, and
        then changes nothing.
        """
        if self._wanted.get(source) == tuple(backends):
            # Most answers of DNS repeat the last one.
            return
        peers_tls(backends)
        self._wanted[source] = tuple(backends)
        self._reconcile()

    def remove_source(self, source: str) -> None:
        """Removes a source, and with it the backends that no other source lists."""
        if self._wanted.pop(source, None) is not None:
            self._reconcile()

    def reconfigure(self, poll: PollConfig, api_key: str | None) -> None:
        """Sets the poll intervals, and the key for backends without a configured key."""
        if (poll, api_key) == (self._poll, self._api_key):
            return
        self._poll, self._api_key = poll, api_key
        for member in self._members.values():
            self._poll_anew(member)

    def drain(self, name: str, deadline_s: float | None = None) -> None:
        """Sends no new requests to a backend until `undrain`. Raises KeyError for an unknown name.

        After `deadline_s`, the streams of the backend move to other backends; None leaves them where they are. Replaces
        the deadline of an earlier drain.
        """
        member = self._members[name]
        self._set_drained(member, drained=True)
        _cancel_move(member)
        if deadline_s is not None:
            member.moves_s = self._now() + deadline_s
            member.moving = spawned(self._move_streams(member, deadline_s), f"move the streams of {name}")
        # Other members of a cluster get the new deadline, or none.
        self._dispatcher.reconsider()

    def undrain(self, name: str) -> None:
        """Ends the drain of a backend. A backend that is being removed or is not ready gets no requests all the same.

        Raises KeyError for an unknown name.
        """
        member = self._members[name]
        self._set_drained(member, drained=False)
        _cancel_move(member)

    def drain_on_join(self, names: Iterable[str]) -> None:
        """Sets the backends that are drained when they are added. Earlier names that are not in `names` are forgotten.

        They were drained in the previous process, or the leader of the cluster announces them as drained.
        """
        self._drained_before = set(names)

    def restore_limits(self, known: Mapping[str, KnownLimit]) -> None:
        """Sets batch limits that an earlier process learned, also for backends that are added later.

        `known` maps the URL of a backend to its limit.
        """
        self._restored = known
        for name, backend in self._backends.items():
            if backend.url in known:
                self._pools.backends[name].restore(known[backend.url])

    def known_limits(self) -> dict[str, KnownLimit]:
        """Maps the URLs of backends to their learned batch limits."""
        known = self._pools.known_limits().items()
        return {self._backends[name].url: limit for name, limit in known if name in self._backends}

    def drained(self) -> set[str]:
        """Returns the names of backends that an operator drained, also of backends that have not joined yet."""
        return {name for name, member in self._members.items() if member.drained} | self._drained_before

    def moves_s(self) -> dict[str, float]:
        """Maps the drained backends with a deadline to the deadline on the loop's clock."""
        return {name: member.moves_s for name, member in self._members.items() if member.moves_s is not None}

    def _set_drained(self, member: _Member, *, drained: bool) -> None:
        if member.drained is drained:
            return
        member.drained, member.since_s = drained, self._now()
        self._apply_drain(member)
        _log.info("backend_drained" if drained else "backend_undrained", backend=member.config.name)

    async def _move_streams(self, member: _Member, deadline_s: float) -> None:
        """Moves the streams of a drained backend after `deadline_s`, as soon as other backends can serve its models.

        In a cluster, only the leader moves them, even if it becomes the leader after the deadline.
        """
        health = self._pools.backends[member.config.name].health

        def may_move() -> bool:
            return self._dispatcher.decides and health.peers is not None and health.peers.others_up(health)

        await asyncio.sleep(deadline_s)
        while not may_move():  # noqa: ASYNC110 - the core has no events
            await asyncio.sleep(1.0)
        self._dispatcher.leaves(member.config.name, moves=True)

    def _apply_drain(self, member: _Member) -> None:
        drained = member.drained or member.leaving is not None or not _is_ready(member.config)
        self._pools.backends[member.config.name].drained = drained
        if drained:
            self._dispatcher.leaves(member.config.name)
        self._dispatcher.reconsider()

    # --- joining, changing and leaving ----------------------------------------------------------------------------

    def _reconcile(self) -> None:
        wanted: dict[str, tuple[BackendConfig, str]] = {}
        urls: set[str] = set()
        clashes: set[tuple[str, str]] = set()
        for source, backends in self._wanted.items():
            for backend in backends:
                if backend.name in wanted or backend.url in urls:
                    clashes.add((source, backend.name))
                    continue
                wanted[backend.name] = backend, source
                urls.add(backend.url)
        # Wanted backends come last, so that a URL belongs to them and not to a backend that leaves.
        staying = (backend for backend, _ in wanted.values())
        self._endpoints.replace([*(one for name, one in self._backends.items() if name not in wanted), *staying])
        for source, name in sorted(clashes - self._clashes):
            _log.warning("backend_listed_twice", backend=name, ignored_from=source)
        self._clashes = clashes
        for name, (backend, source) in wanted.items():
            member = self._members.get(name)
            if member is None:
                self._join(backend, source)
            else:
                self._change(member, backend, source)
        for name, member in self._members.items():
            if name not in wanted and member.leaving is None:
                self._leave(member)
        self._dispatcher.reconsider()

    def _join(self, backend: BackendConfig, source: str) -> None:
        self._pools.add_backend(backend.name, _in_flight_max(backend), backend.prompt_tokens, Role(backend.role))
        if (known := self._restored.get(backend.url)) is not None:
            self._pools.backends[backend.name].restore(known)
        self._backends[backend.name] = backend
        self._members[backend.name] = _Member(backend, source, self._now(), self._polling(backend))
        _log.info("backend_added", backend=backend.name, url=backend.url, source=source)
        if not _is_ready(backend):
            self._apply_drain(self._members[backend.name])
        if backend.name in self._drained_before:
            self._drained_before.remove(backend.name)
            self.drain(backend.name)

    def _change(self, member: _Member, backend: BackendConfig, source: str) -> None:
        if member.config.is_external is not backend.is_external:
            # An engine became external, or the reverse. The new one joins when the requests on the old one have ended.
            if member.leaving is None:
                self._leave(member)
            return
        member.source = source
        if member.leaving is not None:
            member.leaving.cancel()
            member.leaving, member.since_s = None, self._now()
            self._backends[backend.name] = self._backends.pop(backend.name)
            self._apply_drain(member)
            _log.info("backend_added", backend=backend.name, url=backend.url, source=source, again=True)
        before = member.config
        if before == backend:
            return
        member.config = self._backends[backend.name] = backend
        held = self._pools.backends[backend.name]
        held.set_limits_and_role(_in_flight_max(backend), backend.prompt_tokens, Role(backend.role))
        replaced = (before.url, _uid(before)) != (backend.url, _uid(backend))
        if replaced:
            self._pools.replace_process(backend.name)
            _log.info("backend_moved", backend=backend.name, url=backend.url)
        if replaced or (before.api_key, before.tls) != (backend.api_key, backend.tls):
            self._poll_anew(member)
        if _is_ready(before) != _is_ready(backend):
            member.since_s = self._now()
            self._apply_drain(member)

    def _leave(self, member: _Member) -> None:
        name = member.config.name
        member.leaving = spawned(self._remove_when_empty(member), f"leave {name}")
        member.since_s = self._now()
        self._apply_drain(member)
        _log.info("backend_leaves", backend=name, in_flight=self._dispatcher.in_flight(name))

    async def _remove_when_empty(self, member: _Member) -> None:
        name = member.config.name
        await self._dispatcher.emptied(name)
        # No await from here on, so that no request can be sent to the empty backend meanwhile.
        if member.polling is not None:
            member.polling.cancel()
        _cancel_move(member)
        self._pollers.pop(name, None)
        del self._members[name], self._backends[name]
        self._endpoints.replace(self._backends.values())
        self._pools.remove_backend(name)
        self._events.removed(name)
        self._dispatcher.reconsider()
        _log.info("backend_removed", backend=name)
        self._reconcile()

    # --- polling --------------------------------------------------------------------------------------------------

    def _polling(self, backend: BackendConfig) -> asyncio.Task[None] | None:
        """Starts the poller of a backend, and returns its task. Returns None for an external backend."""
        if backend.is_external:
            return None
        key = backend.api_key or self._api_key
        poller = self._pollers[backend.name] = Poller(
            backend.name, backend.url, key, self._upstream, self._events, self._poll,
            has_work=lambda: self._dispatcher.in_flight(backend.name) > 0,
        )  # fmt: skip
        return supervised(poller.run, f"poll {backend.name}")

    def _poll_anew(self, member: _Member) -> None:
        if member.polling is not None:
            member.polling.cancel()
        member.polling = self._polling(member.config)

    async def close(self) -> None:
        tasks = [task for m in self._members.values() for task in (m.polling, m.leaving, m.moving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- the status for the admin API -----------------------------------------------------------------------------

    def statuses(self) -> list[BackendStatus]:
        """Returns the status of every backend, sorted by name."""
        return [self._status(member) for _, member in sorted(self._members.items())]

    def status(self, name: str) -> BackendStatus:
        """Returns the status of a backend. Raises KeyError for an unknown name."""
        return self._status(self._members[name])

    def _status(self, member: _Member) -> BackendStatus:
        backend = self._pools.backends[member.config.name]
        if member.leaving is not None:
            state = "leaving"
        elif member.drained:
            state = "drained"
        elif not _is_ready(member.config):
            state = "starting"
        elif backend.health.down:
            state = "down"
        else:
            state = "up" if backend.health.available(self._now()) else "ejected"
        config = member.config
        in_flight = self._dispatcher.in_flight(config.name)
        role = EXTERNAL if config.is_external else config.role
        return BackendStatus(config.name, config.url, role, member.source, state, in_flight, member.since_s)


def _cancel_move(member: _Member) -> None:
    if member.moving is not None:
        member.moving.cancel()
    member.moving = member.moves_s = None


def _in_flight_max(backend: BackendConfig) -> int | None:
    return backend.max_in_flight or (EXTERNAL_IN_FLIGHT if backend.is_external else None)


def _uid(backend: BackendConfig) -> str:
    return backend.uid if isinstance(backend, Instance) else ""


def _is_ready(backend: BackendConfig) -> bool:
    return not isinstance(backend, Instance) or backend.ready
