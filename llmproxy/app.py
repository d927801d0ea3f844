"""The composition root: a configuration becomes wired objects, started and stopped in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from random import Random

import structlog

from llmproxy.config import BackendConfig, ClientsConfig, Config, ConfigError, settings_of
from llmproxy.config.reload import Reloader, Reread
from llmproxy.core.adapters import Adapters
from llmproxy.core.backends.health import Ejected, News, Spared
from llmproxy.core.domain import Listing, Reading, Trouble
from llmproxy.core.placement import make, presets
from llmproxy.core.pools import Pools
from llmproxy.dispatcher import Dispatcher
from llmproxy.fleet import discovery
from llmproxy.fleet.adapter_keeper import AdapterKeeper
from llmproxy.fleet.discovery import Discovery, addresses, services
from llmproxy.fleet.limits_file import LimitsFile
from llmproxy.fleet.registry import BackendRegistry
from llmproxy.gateway.admin.adapters import AdapterRoutes
from llmproxy.gateway.admin.backends import BackendRoutes
from llmproxy.gateway.admin.debug import AdminPages
from llmproxy.gateway.front import Front, Here, in_the_background, listen
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.listener import Listener
from llmproxy.gateway.http.tls import ClientTls
from llmproxy.gateway.pages import OwnPages
from llmproxy.gateway.proxying.answers import Answers
from llmproxy.gateway.proxying.handler import RequestHandler
from llmproxy.gateway.proxying.rules import Rulebook, Rules
from llmproxy.gateway.proxying.stored import StoredResponses
from llmproxy.gateway.server import AdminDoor, FrontDoor
from llmproxy.lifecycle.descriptors import clients_of_admin_port, clients_of_process, connections_max
from llmproxy.lifecycle.handover import unless
from llmproxy.lifecycle.sockets import Sockets
from llmproxy.telemetry import logs
from llmproxy.telemetry.decisions import DecisionLog, appended
from llmproxy.telemetry.metrics import BackendState, LiveState, Metrics, QueueState
from llmproxy.upstream.client import HttpUpstream
from llmproxy.upstream.resolver import Names
from llmproxy.upstream.tls import PeerTls, peers_tls
from llmproxy.workers.page import answer_page
from llmproxy.workers.supervisor import WorkerSupervisor

CONFIGURED = "config"
"""The source of backends that is the configuration itself."""

_log = structlog.get_logger()


@dataclass(slots=True)
class Proxy:
    """A running proxy: where it listens, and its parts for those who look in."""

    rulebook: Rulebook
    front: Front
    admin_listener: Listener | None
    pools: Pools
    dispatcher: Dispatcher
    handler: RequestHandler
    metrics: Metrics
    registry: BackendRegistry
    reloader: Reloader | None
    clients: ClientLimits

    @property
    def config(self) -> Config:
        """What it goes by now."""
        return self.rulebook.current.config

    @property
    def url(self) -> str:
        """Where clients come in."""
        return self.front.url

    @property
    def admin_url(self) -> str | None:
        """Where those who run it come in; None where they share the port of clients."""
        return None if self.admin_listener is None else self.admin_listener.url

    @property
    def open_requests(self) -> int:
        """Requests that have come in and not ended."""
        return self.front.open_requests

    def begin_shutdown(self, *, replaced: bool = False) -> None:
        """See `RequestHandler.begin_shutdown`."""
        self.handler.begin_shutdown(replaced=replaced)
        self.front.begin_shutdown(replaced=replaced)

    async def drain(self) -> bool:
        """Refuse what is new, let leases end; what waits is refused or served first, as `drain_queued` says.

        Where somebody else holds the listening socket, nothing is refused: new clients wait in the socket for whoever
        comes next, and those that are connected are served to the end. True when all of it ended within
        `drain_timeout_s`; what still waits then is refused.
        """
        self.begin_shutdown()
        if self.front.held:
            await self.front.close_sockets()
        else:
            self.dispatcher.drain(finish_waiting=self.config.drain_queued == "finish")
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.config.drain_timeout_s):
                    await self.front.wait_idle()
        finally:
            self.dispatcher.drain()
        return self.open_requests == 0

    async def hand_over(self) -> None:
        """A successor accepts new connections: serve those that are open, each for one more answer, until none is.

        A client may send on a connection that it kept until the very moment in which it is closed, and its request
        would be lost. So none is closed here while it could still be used, except by its client or for its silence.
        """
        self.begin_shutdown(replaced=True)
        await self.front.close_sockets()
        if self.admin_listener is not None:
            await self.admin_listener.close()
        await self.front.wait_idle()


@asynccontextmanager
async def running(
    config: Config,
    reread: Reread | None = None,
    sockets: Sockets | None = None,
    drained: Collection[str] = (),
    limits: LimitsFile | None = None,
) -> AsyncIterator[Proxy]:
    """Start a proxy on the current loop and stop it when the block ends. `reread` says how to read `config` again,
    `sockets` may have some that were inherited, `drained` are backends that a predecessor was told to drain, and
    `limits` keeps what is learned of backends' batch limits.

    Raises ListenError; another OSError when it cannot start workers; ConfigError when it cannot look for backends or
    use a file that it names.
    """
    discovery.check(config)
    peers_tls(config.backends)
    loop = asyncio.get_running_loop()
    sockets = sockets or Sockets()
    settings, rng = settings_of(config), Random(config.scheduling.seed)
    pools = Pools(
        settings,
        {},
        _aliases(config),
        partial(make, settings.placement, rng),
    )
    metrics = Metrics(
        lambda: _state(
            dispatcher,
            rulebook.current.band_names,
            (handler.bodies if supervisor is None else supervisor).held_bytes,
            loop.time(),
        )
    )
    dispatcher = Dispatcher(pools, on_decision=metrics.decided, on_news=_tell_news)
    async with AsyncExitStack() as stack:
        tls: dict[str, PeerTls] = {}
        names = Names()
        stack.push_async_callback(names.close)
        upstream = await stack.enter_async_context(HttpUpstream(tls, connections_max(), names))
        rulebook = Rulebook(Rules.of(config, upstream))
        decisions = _decision_log(config, metrics, loop.time())
        if decisions is not None:
            stack.push_async_callback(asyncio.to_thread, decisions.close)
        # Polls keep connections of their own. A request that opens a new one fails early where the machine is gone, and
        # goes to another backend without any risk.
        polls = await stack.enter_async_context(HttpUpstream(tls, names=names))
        watch = _Watch(pools, dispatcher, metrics)
        registry = BackendRegistry(dispatcher, polls, watch, config.poll, config.backend_api_key, tls, names)
        stack.push_async_callback(registry.close)
        stored = StoredResponses(rulebook, registry.backends, upstream, dispatcher)
        answers = Answers(dispatcher.cached) if presets.hears_answers(settings.placement) else None
        handler = RequestHandler(
            rulebook, registry.backends, pools.estimator, dispatcher, stored, answers, metrics, decisions
        )  # fmt: skip
        adapters = Adapters(pools)
        keeper = AdapterKeeper(
            adapters, pools, registry.backends, config.backend_api_key, upstream, registry.pollers, config.timeouts,
            metrics.adapter_told,
        )  # fmt: skip
        stack.push_async_callback(keeper.close)
        watch.on_listed = keeper.listed
        registry.on_gone = [watch.forget, keeper.forget, metrics.forget_backend]
        sources = Discovery(
            registry, dispatcher.expects_backends, metrics.looked, (partial(addresses, names), services)
        )
        stack.push_async_callback(sources.close)
        admin = AdminPages(config, dispatcher, adapters, loop.time)
        changes = AdapterRoutes(adapters, keeper, dispatcher, rulebook)

        def go_by(new: Config) -> None:
            discovery.check(new)
            peers_tls(new.backends)
            rules, settings = Rules.of(new, upstream), settings_of(new)
            # What can be wrong with it was found by now: from here on it is taken in whole.
            if new.log_level != rulebook.current.config.log_level:
                logs.configure(new.log_format, new.log_level)
            rulebook.current = rules
            handler.reconfigure(new)
            admin.reconfigure(new)
            keeper.reconfigure(new.backend_api_key, new.timeouts)
            pools.reconfigure(settings, _aliases(new), loop.time())
            registry.reconfigure(new.poll, new.backend_api_key)
            registry.tell(CONFIGURED, _configured(new))
            sources.reconfigure(new)
            if supervisor is not None:
                supervisor.go_by()

        supervisor: WorkerSupervisor | None = None
        reloader = Reloader(config, reread, go_by, metrics.reloaded) if reread is not None else None
        pages = OwnPages(
            rulebook, pools, handler, metrics, admin, changes, BackendRoutes(registry, reloader, loop.time)
        )  # fmt: skip
        door = FrontDoor(
            rulebook, handler, stored, metrics, pages, _clients(config), config.clients.head_bytes_max
        )  # fmt: skip
        watch.expect(backend.name for backend in _configured(config))
        registry.drain_who_joins(drained)
        if limits is not None:
            registry.recall_limits(limits.read())
            await stack.enter_async_context(in_the_background(limits.follow(registry.known_limits)))
        registry.tell(CONFIGURED, _configured(config))
        sources.reconfigure(config)
        await stack.enter_async_context(in_the_background(registry.follow_authorities()))
        if reloader is not None and config.reload == "watch":
            await stack.enter_async_context(in_the_background(reloader.watch()))
        # Requests that are cut on the way out still return their lease and tell their end; then the rest may close.
        stack.push_async_callback(handler.idle.wait)
        if sockets.ready_fd is not None:
            # A predecessor still serves, and no client need come to one that knows no backend yet. A lap of a poller
            # asks three questions.
            await unless(watch.all_heard, asyncio.sleep(3 * config.poll.timeout_s))
        client_tls = ClientTls.of(config.tls)
        # That of clients first: where the service manager opened a socket, it is theirs.
        opened, held = sockets.listening(config.host, config.port, config.workers)
        front: Front
        if config.workers > 1:
            front = supervisor = WorkerSupervisor(
                rulebook, dispatcher, registry.backends, stored, metrics, decisions,
                partial(answer_page, door), held,
            )  # fmt: skip
            stack.push_async_callback(supervisor.close)
            await supervisor.start(opened)
        else:
            listener = await listen(stack, door, config, client_tls, opened, held=held)
            front = Here(handler, listener, listener.url, held)
        admin_listener = None
        if config.admin.port is not None:
            admin_door = AdminDoor(door, ClientLimits(clients_of_admin_port(config)))
            opened, held = sockets.listening(config.admin.host, config.admin.port)
            admin_listener = await listen(stack, admin_door, config, client_tls, opened, held=held)
        stack.callback(handler.cut)
        stack.callback(dispatcher.close)
        proxy = Proxy(
            rulebook, front, admin_listener, pools, dispatcher, handler, metrics, registry, reloader, door.clients
        )  # fmt: skip
        yield proxy


def _decision_log(config: Config, metrics: Metrics, now: float) -> DecisionLog | None:
    path = config.decision_log
    if path is None:
        return None
    try:
        return DecisionLog(appended(path), config.decision_log_sample, now, metrics.decisions_lost)
    except OSError as error:
        raise ConfigError([f"decision_log: {path} cannot be written: {error.strerror or error}"]) from None


def _configured(config: Config) -> tuple[BackendConfig, ...]:
    """The backends that the configuration itself names, without those that are to be looked up."""
    return tuple(backend for backend in config.backends if not backend.looked_up)


def _aliases(config: Config) -> dict[str, str]:
    return {model.name: model.target for model in config.models if model.target is not None}


def _clients(config: Config) -> ClientLimits:
    """What addresses use of this process; where workers have the clients, they count them."""
    return ClientLimits(clients_of_process(config) if config.workers == 1 else ClientsConfig())


def _state(dispatcher: Dispatcher, names: Mapping[int, str], held_body_bytes: int, now: float) -> LiveState:
    """The gauges of this moment, read when somebody scrapes, so that they cannot drift from the truth."""
    pools: Pools = dispatcher.pools
    queued = pools.queued()
    views = pools.views(now)
    backends = tuple(
        BackendState(
            backend=name,
            in_flight=dispatcher.in_flight(name),
            saturation=views[name].saturation,
            limit=views[name].limit,
            available=views[name].available,
            drained=backend.drained,
            running=backend.reading.running if backend.reading is not None else None,
            waiting=backend.reading.waiting if backend.reading is not None else None,
            kv_used=backend.reading.kv_used if backend.reading is not None else None,
            reading_age_s=now - backend.reading.taken_at_s if backend.reading is not None else None,
            ejected=backend.health.ejected,
        )
        for name, backend in pools.backends.items()
    )
    queues = tuple(
        QueueState(names.get(band, str(band)), *queued.get(band, (0, 0)))
        for band in sorted({*names, *queued}, reverse=True)
    )
    return LiveState(queues, pools.parked(), backends, held_body_bytes)


def _tell_news(backend: str, news: News) -> None:
    if isinstance(news, Ejected):
        _log.warning("backend_ejected", backend=backend, why=news.why, pause_s=news.pause_s)
    elif isinstance(news, Spared):
        _log.warning("backend_not_ejected", backend=backend, why=news.why, hint="health.ejected_max")
    else:
        _log.info("backend_back", backend=backend, after_s=round(news.after_s, 3))


class _Watch:
    """What pollers report goes to the dispatcher; what changed for a person to know goes to the log."""

    def __init__(self, pools: Pools, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self.on_listed: Callable[[str], None] = lambda _: None
        self._pools = pools
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._up: dict[str, bool] = {}
        self._serves: dict[str, tuple[str, ...]] = {}
        self._unread: set[str] = set()
        self._unheard: set[str] = set()
        self.all_heard = asyncio.Event()
        """Every backend of `expect` has told of itself, or could not."""

    def expect(self, backends: Iterable[str]) -> None:
        """Those that are there from the start."""
        self._unheard.update(backends)
        if not self._unheard:
            self.all_heard.set()

    def answered(self, backend: str) -> None:
        self._dispatcher.answered(backend)
        self._tell(backend, "")
        self._hear(backend)

    def observe(self, backend: str, reading: Reading) -> None:
        self._unread.discard(backend)
        self._dispatcher.observe(backend, reading)

    def published(self, backend: str, limit: int) -> None:
        self._dispatcher.published(backend, limit)
        _log.info("backend_publishes_limit", backend=backend, limit=limit)

    def unread(self, backend: str, trouble: Trouble, detail: str) -> None:
        self._metrics.poll_failed(backend, trouble)
        self._pools.unread(backend)
        if backend not in self._unread:
            self._unread.add(backend)
            _log.warning("backend_unread", backend=backend, why=f"{trouble}: {detail}")

    def listed(self, backend: str, listing: Listing) -> None:
        if backend not in self._pools.backends:
            # It was removed while somebody asked it for what it has just been told to load.
            return
        self._dispatcher.listed(backend, listing)
        self.on_listed(backend)
        names = tuple(card.name for card in listing.cards)
        if self._serves.get(backend) != names:
            self._serves[backend] = names
            _log.info("backend_serves", backend=backend, models=list(names[:20]), count=len(names))

    def troubled(self, backend: str, trouble: Trouble, detail: str) -> None:
        self._metrics.poll_failed(backend, trouble)
        self._dispatcher.troubled(backend, trouble, detail)
        self._tell(backend, f"{trouble}: {detail}")
        self._hear(backend)

    def forget(self, backend: str) -> None:
        """A backend is no more."""
        self._up.pop(backend, None)
        self._serves.pop(backend, None)
        self._unread.discard(backend)
        self._hear(backend)

    def _hear(self, backend: str) -> None:
        self._unheard.discard(backend)
        if self._unheard or self.all_heard.is_set():
            return
        self.all_heard.set()
        if self._up and not any(self._up.values()):
            queue = self._pools.settings.queue
            _log.warning(
                "no_backend_up",
                backends=list(self._up)[:20],
                held_s=min(queue.hold_s, queue.first_hold_s),
                hint="backend_down says what was asked of each; until one answers, requests wait so long and get 503",
            )

    def _tell(self, backend: str, why: str) -> None:
        up = not self._pools.backends[backend].health.down
        if self._up.get(backend) is up:
            return
        self._up[backend] = up
        if up:
            _log.info("backend_up", backend=backend)
        else:
            _log.warning("backend_down", backend=backend, why=why)
