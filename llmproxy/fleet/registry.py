"""Who the backends are: the one place where they come, change, drain and go.

Sources (the configuration, a watched file, DNS) each tell the set that they want; the union of these is what there
should be. What is missing joins. What is wanted by nobody any more leaves: it is given nothing new, what is in flight
there ends in its own time (`timeouts.total_s` at the most), and then it is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

import structlog

from llmproxy.config import BackendConfig, PollConfig
from llmproxy.core.domain import KnownLimit
from llmproxy.core.pools import Pools
from llmproxy.core.snapshot import BackendStatus
from llmproxy.dispatcher import Dispatcher
from llmproxy.fleet.events import BackendObserver
from llmproxy.fleet.poller import Poller
from llmproxy.upstream.peers import Peers
from llmproxy.upstream.port import Upstream
from llmproxy.upstream.tls import peers_tls

_log = structlog.get_logger()


class State(StrEnum):
    """How a backend stands with those who run the proxy."""

    UP = "up"
    RESTING = "resting"
    DOWN = "down"
    DRAINED = "drained"
    LEAVING = "leaving"


@dataclass(slots=True)
class _Member:
    config: BackendConfig
    source: str
    since_s: float
    poller: Poller
    polling: asyncio.Task[None]
    drained: bool = False
    leaving: asyncio.Task[None] | None = None


class BackendRegistry:
    """The members of the fleet, with the poller of each, which runs until the member is gone or `close` is called.

    `peers` is kept up to date for those who send requests. `events` is told what polls find out, and of every backend
    that is removed.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        upstream: Upstream,
        events: BackendObserver,
        poll: PollConfig,
        api_key: str | None,
        peers: Peers,
    ) -> None:
        self._peers = peers
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
        self._recalled: Mapping[str, KnownLimit] = {}

    @property
    def backends(self) -> Mapping[str, BackendConfig]:
        """Every member by its name, those that leave included, and before those that are wanted again; one mapping that
        follows all changes."""
        return MappingProxyType(self._backends)

    @property
    def pollers(self) -> Mapping[str, Poller]:
        """The poller of every member, in the same way."""
        return MappingProxyType(self._pollers)

    # --- what sources and those who run it want -------------------------------------------------------------------

    def tell(self, source: str, backends: Sequence[BackendConfig]) -> None:
        """`source` wants these backends and no others; of two of one name or URL, the one told of first has its way.

        Raises ConfigError for authorities of one that cannot be read, and has changed nothing then.
        """
        if self._wanted.get(source) == tuple(backends):
            # As with most looks at DNS; to read the authorities of all again takes 34 ms for each.
            return
        peers_tls(backends)
        self._wanted[source] = tuple(backends)
        self._settle()

    def withdraw(self, source: str) -> None:
        """`source` is no more, and wants nothing."""
        if self._wanted.pop(source, None) is not None:
            self._settle()

    def reconfigure(self, poll: PollConfig, api_key: str | None) -> None:
        """Poll at another pace, or with another key where a backend has none of its own."""
        if (poll, api_key) == (self._poll, self._api_key):
            return
        self._poll, self._api_key = poll, api_key
        for member in self._members.values():
            self._poll_anew(member)

    def drain(self, name: str) -> None:
        """Grant nothing new on a backend until `undrain`, whatever its source says. Raises KeyError."""
        self._set_drained(self._members[name], drained=True)

    def undrain(self, name: str) -> None:
        """Let a backend be given work again. Raises KeyError; one that leaves leaves all the same."""
        self._set_drained(self._members[name], drained=False)

    def drain_who_joins(self, names: Iterable[str]) -> None:
        """Drain these as soon as they are members: a predecessor of this process was told to."""
        self._drained_before.update(names)

    def recall_limits(self, known: Mapping[str, KnownLimit]) -> None:
        """Let those who join start from the batch limits that an earlier process learned, by URL."""
        self._recalled = known

    def known_limits(self) -> dict[str, KnownLimit]:
        """What was learned of the batch limits of members, by URL."""
        known = self._pools.known_limits()
        return {self._backends[name].url: limit for name, limit in known.items() if name in self._backends}

    def drained(self) -> set[str]:
        """The backends that somebody drained, those that are still to join included."""
        return {name for name, member in self._members.items() if member.drained} | self._drained_before

    def _set_drained(self, member: _Member, *, drained: bool) -> None:
        if member.drained is drained:
            return
        member.drained, member.since_s = drained, _now()
        self._apply_drain(member)
        _log.info("backend_drained" if drained else "backend_undrained", backend=member.config.name)

    def _apply_drain(self, member: _Member) -> None:
        drained = member.drained or member.leaving is not None
        self._pools.drain_backend(member.config.name, drained=drained)
        self._dispatcher.reconsider()

    # --- the one way in, and the one way out ----------------------------------------------------------------------

    def _settle(self) -> None:
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
        # Those that are wanted come last: a URL is theirs, and not that of one that leaves it.
        staying = (backend for backend, _ in wanted.values())
        self._peers.replace([*(one for name, one in self._backends.items() if name not in wanted), *staying])
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
        self._pools.add_backend(backend.name, backend.max_in_flight, backend.prompt_tokens)
        if (known := self._recalled.get(backend.url)) is not None:
            self._pools.recall_limit(backend.name, known)
        self._backends[backend.name] = backend
        poller = self._poller(backend)
        self._members[backend.name] = _Member(backend, source, _now(), poller, self._start(poller, backend.name))
        _log.info("backend_added", backend=backend.name, url=backend.url, source=source)
        if backend.name in self._drained_before:
            self._drained_before.remove(backend.name)
            self.drain(backend.name)

    def _change(self, member: _Member, backend: BackendConfig, source: str) -> None:
        member.source = source
        if member.leaving is not None:
            member.leaving.cancel()
            member.leaving, member.since_s = None, _now()
            self._backends[backend.name] = self._backends.pop(backend.name)
            self._apply_drain(member)
            _log.info("backend_added", backend=backend.name, url=backend.url, source=source, again=True)
        before = member.config
        if before == backend:
            return
        member.config = self._backends[backend.name] = backend
        self._pools.change_backend(backend.name, backend.max_in_flight, backend.prompt_tokens)
        if before.url != backend.url:
            self._pools.replace_process(backend.name)
            _log.info("backend_moved", backend=backend.name, url=backend.url)
        if (before.url, before.api_key, before.tls) != (backend.url, backend.api_key, backend.tls):
            self._poll_anew(member)

    def _leave(self, member: _Member) -> None:
        name = member.config.name
        member.leaving, member.since_s = asyncio.create_task(self._gone(member), name=f"leave {name}"), _now()
        self._apply_drain(member)
        _log.info("backend_leaves", backend=name, in_flight=self._dispatcher.in_flight(name))

    async def _gone(self, member: _Member) -> None:
        name = member.config.name
        await self._dispatcher.emptied(name)
        # From here on nothing waits: a backend that was just found empty cannot be granted to anybody meanwhile.
        member.polling.cancel()
        del self._members[name], self._backends[name], self._pollers[name]
        self._peers.replace(self._backends.values())
        self._pools.remove_backend(name)
        self._events.removed(name)
        self._dispatcher.reconsider()
        _log.info("backend_removed", backend=name)

    # --- polling --------------------------------------------------------------------------------------------------

    def _poller(self, backend: BackendConfig) -> Poller:
        key = backend.api_key or self._api_key
        poller = Poller(
            backend.name, backend.url, key, self._upstream, self._events, self._poll,
            works=lambda: self._dispatcher.in_flight(backend.name) > 0,
        )  # fmt: skip
        self._pollers[backend.name] = poller
        return poller

    def _start(self, poller: Poller, name: str) -> asyncio.Task[None]:
        return asyncio.create_task(poller.run(), name=f"poll {name}")

    def _poll_anew(self, member: _Member) -> None:
        member.polling.cancel()
        member.poller = self._poller(member.config)
        member.polling = self._start(member.poller, member.config.name)

    async def close(self) -> None:
        """Stop all pollers, and let nobody leave any more."""
        tasks = [task for m in self._members.values() for task in (m.polling, m.leaving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- looking in -----------------------------------------------------------------------------------------------

    def statuses(self) -> list[BackendStatus]:
        """Every member, by name."""
        return [self._status(member) for _, member in sorted(self._members.items())]

    def status(self, name: str) -> BackendStatus:
        """One member. Raises KeyError."""
        return self._status(self._members[name])

    def _status(self, member: _Member) -> BackendStatus:
        backend = self._pools.backends[member.config.name]
        if member.leaving is not None:
            state = State.LEAVING
        elif member.drained:
            state = State.DRAINED
        elif backend.health.down:
            state = State.DOWN
        else:
            state = State.UP if backend.health.available(_now()) else State.RESTING
        config = member.config
        in_flight = self._dispatcher.in_flight(config.name)
        return BackendStatus(config.name, config.url, member.source, state, in_flight, member.since_s)


def _now() -> float:
    return asyncio.get_running_loop().time()
