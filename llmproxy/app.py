"""Creates and connects the objects of a configuration, and starts and stops them in order. Contains no policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from socket import gethostname
from uuid import uuid4
from zoneinfo import ZoneInfo

from llmproxy.backends import discovery
from llmproxy.backends.adapter_keeper import AdapterKeeper
from llmproxy.backends.discovery import Discovery, addresses, services
from llmproxy.backends.events import BackendEvents, BackendLog, PollCounter
from llmproxy.backends.registry import BackendRegistry
from llmproxy.backends.start_times import StartTimes
from llmproxy.backends.state_file import State, StateFile
from llmproxy.config import BackendConfig, ClientsConfig, Config, ConfigError, settings_of
from llmproxy.config.reload import Combined, Reloader, Reread
from llmproxy.core.adapters import Adapters
from llmproxy.core.backends.catalogue import Aliases
from llmproxy.core.placement.policy import make
from llmproxy.core.pools import Pools
from llmproxy.gateway.admin.adapters import AdapterRoutes
from llmproxy.gateway.admin.backends import BackendRoutes
from llmproxy.gateway.admin.debug import AdminPages
from llmproxy.gateway.admin.live import LivePages
from llmproxy.gateway.admin.scale import ScalePages
from llmproxy.gateway.admin.usage import UsagePage
from llmproxy.gateway.build import Gateway
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.tls import ClientTls
from llmproxy.gateway.listener import Frontend, Listener, LocalFrontend, listen
from llmproxy.gateway.pages import OwnPages
from llmproxy.gateway.proxying.handler import RequestHandler
from llmproxy.gateway.router import Router
from llmproxy.lifecycle.background import background_task
from llmproxy.lifecycle.descriptors import clients_of_admin_port, clients_of_process, connections_max
from llmproxy.lifecycle.handover import ended_before
from llmproxy.lifecycle.sockets import Sockets
from llmproxy.observe import logs, spans
from llmproxy.observe.decisions import DecisionLog, open_to_append
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.exit_batch import Exits
from llmproxy.observe.live.recorder import Recorder
from llmproxy.observe.live.snapshot import LiveSnapshot
from llmproxy.observe.metrics import BackendState, LiveState, Metrics, QueueState
from llmproxy.observe.trace_context import Sampler
from llmproxy.observe.usage import Usage, process_name
from llmproxy.remote.cluster.build import build_member, config_hash
from llmproxy.remote.cluster.cluster import Cluster
from llmproxy.remote.cluster.leasing import ClusterLeasing
from llmproxy.remote.cluster.pages import MemberPages, bounded, cluster_status
from llmproxy.remote.pages import answer_page
from llmproxy.remote.workers.supervisor import WorkerSupervisor
from llmproxy.scheduling.dispatcher import Dispatcher
from llmproxy.upstream.client import HttpUpstream
from llmproxy.upstream.endpoints import Endpoints
from llmproxy.upstream.tls import peers_tls

CONFIGURED = "config"  # The name of the configuration in its role as a source of backends.
OBJECTS_S = 2.0  # The seconds for which the start waits for objects of the inference extension in Kubernetes.


@dataclass(slots=True)
class Proxy:
    """A running proxy: its parts, and the methods that act on all of them."""

    gateway: Gateway
    pools: Pools
    dispatcher: Dispatcher
    leasing: Dispatcher | ClusterLeasing  # Grants leases to requests of clients; in a cluster, through the leader.
    metrics: Metrics
    exits: Exits
    registry: BackendRegistry
    keeper: AdapterKeeper
    discovery: Discovery
    admin_pages: AdminPages
    clients: ClientLimits  # Connections and requests of each client address.
    recorder: Recorder  # The history that the pages show.
    scale: ScalePages = field(init=False)
    pages: OwnPages | MemberPages = field(init=False)
    front: Frontend = field(init=False)  # Accepts clients, in this process or in relay workers.
    admin_listener: Listener | None = None  # The admin port. If None, pages for operators are on the port of clients.
    reloader: Reloader | None = None
    supervisor: WorkerSupervisor | None = None
    cluster: Cluster | None = None

    @property
    def config(self) -> Config:
        return self.gateway.rulebook.current.config

    @property
    def handler(self) -> RequestHandler:
        return self.gateway.handler

    @property
    def url(self) -> str:
        return self.front.url

    @property
    def admin_url(self) -> str | None:
        """The URL of the admin port; None if no admin port is configured."""
        return None if self.admin_listener is None else self.admin_listener.url

    @property
    def open_requests(self) -> int:
        """The number of requests that have begun and not ended; with workers, only if their body has arrived."""
        return self.front.open_requests

    def reconfigure(self, config: Config) -> None:
        """Applies another configuration to all parts. If it raises ConfigError, nothing has changed."""
        _check(config)
        settings = settings_of(config)
        self.gateway.reconfigure(config)
        # Nothing below raises.
        self.admin_pages.reconfigure(config)
        self.keeper.reconfigure(config.backend_api_key, config.timeouts)
        self.pools.reconfigure(settings, _aliases(config), asyncio.get_running_loop().time())
        self.registry.reconfigure(config.poll, config.backend_api_key)
        self.look_for_backends()
        if self.supervisor is not None:
            self.supervisor.reconfigure()
        if self.cluster is not None:
            self.cluster.reconfigured(config_hash(config))

    def look_for_backends(self) -> None:
        """Updates the backends of the configuration, and starts discovery in all other sources."""
        self.registry.update(CONFIGURED, _configured(self.config))
        self.discovery.reconfigure(self.config)

    def flush_records(self) -> None:
        """Passes the records of all ended requests to the log, the metrics and the other readers now."""
        self.exits.flush()
        self.handler.log_lines.flush()

    def begin_shutdown(self, *, replaced: bool = False) -> None:
        """Asks clients to close their connections. `replaced`: whether a successor has taken over the sockets."""
        self.gateway.handler.begin_shutdown(replaced=replaced)
        self.front.begin_shutdown(replaced=replaced)
        if self.cluster is not None:
            self.cluster.begin_shutdown()

    async def drain(self) -> bool:
        """Refuses new requests, and waits until running requests have ended. Returns whether all ended in time.

        `drain_queued` decides whether waiting requests are refused at once or finished. The limit is `drain_timeout_s`;
        requests that still wait then are refused. If the service manager keeps the listening socket open, no request is
        refused: new connections wait in the socket for the next process, and connected clients are served to the end.
        """
        self.begin_shutdown()
        if self.front.socket_activated:
            await self.front.close_sockets()
        else:
            self.leasing.drain(finish_waiting=self.config.drain_queued == "finish")
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self.front.wait_idle()
        except TimeoutError:
            return False
        finally:
            self.leasing.drain()
        return True

    async def hand_over(self) -> None:
        """Serves the open connections to their end, while a successor accepts new connections.

        Each connection ends after one more response, after its idle timeout, or when its client closes it. Closing idle
        connections at once could lose a request that a client is sending at that moment.
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
    state: StateFile | None = None,
    usage_folder: Path | None = None,
) -> AsyncIterator[Proxy]:
    """Runs a proxy on the current event loop until the block ends.

    `reread` reads the configuration files again for a reload; None allows no reload. `drained` are backends that were
    drained in the previous process. `state` keeps learned values over a restart, and `usage_folder` the use of tenants.
    Raises ListenError for a port, OSError for workers that cannot be started, and ConfigError for discovery and files.
    """
    _check(config)
    sockets = sockets or Sockets()
    async with AsyncExitStack() as stack:
        settings, rng = settings_of(config), Random(config.scheduling.seed)
        pools = Pools(settings, {}, _aliases(config), partial(make, settings.placement, rng))
        backend_log = BackendLog(pools)
        endpoints = Endpoints()
        stack.push_async_callback(endpoints.close)
        proxy = await _build(stack, config, reread, pools, backend_log, endpoints, usage_folder)
        backend_log.expect(backend.name for backend in _configured(config) if not backend.is_external)
        proxy.registry.drain_on_join(drained)
        if state is not None:
            restored = state.read()
            proxy.registry.restore_limits(restored.limits)
            pools.scaling.restore(restored.capacities, asyncio.get_running_loop().time())
            known = partial(
                state.follow, lambda: State(proxy.registry.known_limits(), pools.scaling.known_capacities())
            )
            await stack.enter_async_context(background_task(known, "state file"))
        proxy.look_for_backends()
        await stack.enter_async_context(background_task(endpoints.follow_authorities, "follow authorities"))
        if proxy.reloader is not None and config.reload == "watch":
            await stack.enter_async_context(background_task(proxy.reloader.watch, "watch the configuration"))
        if proxy.cluster is not None:
            stack.push_async_callback(proxy.cluster.close)
        # Requests that are cut during shutdown still return their leases and report their exits before the rest closes.
        stack.callback(proxy.flush_records)
        stack.push_async_callback(proxy.gateway.handler.idle)
        # A poll makes three requests.
        polled = partial(ended_before, backend_log.all_polled, limit_s=3 * config.poll.timeout_s)
        if sockets.ready_fd is not None:
            # A predecessor still serves: take over its clients only when the backends are known.
            await polled(asyncio.Event().wait())
        # Clients may use objectives and model names that only these objects define.
        await ended_before(proxy.discovery.objects.answered, asyncio.sleep(OBJECTS_S))
        router = proxy.gateway.router(proxy.pages, proxy.clients)
        if proxy.cluster is not None:
            admin_router = router if config.admin.port is None else router.for_admin_port(proxy.clients)
            await proxy.cluster.start(bounded(partial(answer_page, admin_router)), polled(asyncio.Event().wait()))
        await _listen(stack, proxy, sockets, router)
        stack.callback(proxy.gateway.handler.cut)
        stack.callback(proxy.dispatcher.close)
        yield proxy


async def _build(
    stack: AsyncExitStack,
    config: Config,
    reread: Reread | None,
    pools: Pools,
    backend_log: BackendLog,
    endpoints: Endpoints,
    usage_folder: Path | None,
) -> Proxy:
    """Creates and connects all parts of a proxy that does not listen yet. The parts stop when `stack` is closed.

    Some parts need a part that is created later. For example, the metrics need the finished proxy. Such a part gets a
    lambda, which finds the later part when it is called.
    """
    now = asyncio.get_running_loop().time
    metrics = Metrics(lambda: _live_state(proxy, now()))
    dispatcher = Dispatcher(pools, on_decision=metrics.decided, on_ejection=backend_log.health_changed)
    upstream = await stack.enter_async_context(HttpUpstream(endpoints, connections_max()))
    # Polls use separate connections, so that a request to a dead machine has to open one. Opening fails before any byte
    # is sent, and the request can go to another backend without risk.
    polls = await stack.enter_async_context(HttpUpstream(endpoints))
    starts = StartTimes(pools, now, metrics.replica_started)
    events = BackendEvents(dispatcher, [backend_log, PollCounter(metrics), starts])
    registry = BackendRegistry(dispatcher, polls, events, config.poll, config.backend_api_key, endpoints)
    stack.push_async_callback(registry.close)
    recorder = Recorder(dispatcher, registry.statuses, lambda: gateway.rulebook.current.band_names)
    dispatcher.on_left = recorder.left
    stack.enter_context(logs.heard_by(recorder.heard))
    await stack.enter_async_context(background_task(recorder.run, "record the past"))
    incarnation = uuid4().hex[:8]
    cluster_leasing = None if config.cluster.listen is None else ClusterLeasing(dispatcher, registry.backends)

    shown = [recorder.record] if cluster_leasing is None else [cluster_leasing.exited, recorder.record]
    usage = await _usage(stack, config, pools, usage_folder)
    further = _exit_readers(stack, config, metrics, now())
    readers = [*shown, usage.record, *further]
    exits = Exits(metrics, *readers)
    # Request ids must differ between members.
    ids = "" if cluster_leasing is None else f"{incarnation}-"
    leasing = cluster_leasing or dispatcher
    gateway = Gateway.build(config, registry.backends, upstream, leasing, pools.estimator, exits, ids)
    adapters = Adapters(pools)
    keeper = AdapterKeeper(
        adapters, pools, registry.backends, config.backend_api_key, upstream, registry.pollers, config.timeouts,
        metrics.adapter_changed,
    )  # fmt: skip
    stack.push_async_callback(keeper.close)
    events.observers.append(keeper)
    combined = Combined(config, lambda config: proxy.reconfigure(config))
    backend_discovery = Discovery(
        registry, dispatcher.expects_backends, metrics.source_queried,
        (partial(addresses, endpoints.resolver), services),
        combined.take_entries,
    )  # fmt: skip
    stack.push_async_callback(backend_discovery.close)
    # Workers apply the configured limits themselves.
    clients = ClientLimits(clients_of_process(config) if config.workers == 1 else ClientsConfig())
    admin_pages = AdminPages(config, dispatcher, adapters, now)
    proxy = Proxy(
        gateway, pools, dispatcher, leasing, metrics, exits, registry, keeper, backend_discovery, admin_pages,
        clients, recorder,
    )  # fmt: skip
    if reread is not None:
        proxy.reloader = Reloader(config, reread, combined.take, metrics.reloaded)
    proxy.scale = ScalePages(pools, registry.statuses, now)
    pages = proxy.pages = OwnPages(
        gateway.rulebook, pools, gateway.handler, metrics, exits, admin_pages,
        AdapterRoutes(adapters, keeper, dispatcher, gateway.rulebook), BackendRoutes(registry, proxy.reloader, now),
        _live_pages(proxy, now), proxy.scale,
        UsagePage(
            usage, pools, lambda: {tenant.name: tenant for tenant in proxy.config.tenants}, now,
            lambda: cluster_leasing is None or not cluster_leasing.is_remote,
        ),
    )  # fmt: skip
    if cluster_leasing is not None:
        cluster = proxy.cluster = build_member(
            config, incarnation, dispatcher, cluster_leasing, gateway, registry, recorder.record
        )
        proxy.pages = MemberPages(pages, cluster, gateway.rulebook)
    return proxy


async def _listen(stack: AsyncExitStack, proxy: Proxy, sockets: Sockets, router: Router) -> None:
    """Opens the ports for clients, in this process or in relay workers, and for operators. Raises ListenError."""
    config = proxy.config
    client_tls = ClientTls.from_config(config.tls)
    # The port of clients first: a socket of the service manager is for clients.
    opened, activated = sockets.listening(config.host, config.port, config.workers)
    if config.workers > 1:
        supervisor = proxy.front = proxy.supervisor = WorkerSupervisor(
            proxy.gateway,
            proxy.dispatcher,
            proxy.registry.backends,
            proxy.metrics,
            partial(answer_page, router),
            activated,
        )
        stack.push_async_callback(supervisor.close)
        await supervisor.start(opened)
    else:
        listener = await listen(stack, router, config, client_tls, opened, socket_activated=activated)
        proxy.front = LocalFrontend(proxy.gateway.handler, listener, listener.url, activated)
    if config.admin.port is not None:
        admin_router = router.for_admin_port(ClientLimits(clients_of_admin_port(config)))
        opened, activated = sockets.listening(config.admin.host, config.admin.port)
        proxy.admin_listener = await listen(stack, admin_router, config, client_tls, opened, socket_activated=activated)


def _live_pages(proxy: Proxy, now: Callable[[], float]) -> LivePages:
    def cluster() -> dict[str, object] | None:
        return None if proxy.cluster is None else cluster_status(proxy.cluster)

    # People read the time of day; everything else uses the clock of the loop.
    snapshot = LiveSnapshot(proxy.recorder, uuid4().hex[:12], now, time.time, cluster)  # noqa: TID251
    return LivePages(proxy.recorder, snapshot, proxy.admin_pages, lambda: proxy.config, now)


def _check(config: Config) -> None:
    """Raises ConfigError if a library is missing or a file of certificate authorities is unreadable."""
    discovery.check(config)
    spans.check(config)
    peers_tls(config.backends)


def _exit_readers(
    stack: AsyncExitStack, config: Config, metrics: Metrics, now: float
) -> Iterator[Callable[[RequestExit], None]]:
    """Yields the readers of exit records that the configuration turns on: the decision log and the export of traces.

    They stop when `stack` is closed. `now` is the current time of the event loop.
    """
    path = config.decision_log
    if path is not None:
        try:
            decisions = DecisionLog(open_to_append(path), config.decision_log_sample, now, metrics.decisions_lost)
        except OSError as error:
            raise ConfigError([f"decision_log: {path} cannot be written: {error.strerror or error}"]) from None
        stack.push_async_callback(asyncio.to_thread, decisions.close)
        yield decisions.record
    if Sampler.of(config) is not None:
        export = spans.started("https" if config.tls.cert else "http", metrics.spans_lost)
        stack.push_async_callback(asyncio.to_thread, export.close)
        yield export.record


async def _usage(stack: AsyncExitStack, config: Config, pools: Pools, folder: Path | None) -> Usage:
    """Returns the use of tenants, and tells today's budgets how much is used.

    Writes the use until `stack` is closed.
    """
    name = process_name(config.cluster.member or gethostname(), time.time())  # noqa: TID251 - days are of the calendar
    usage = Usage(folder, name, ZoneInfo(config.usage.time_zone), time.time)  # noqa: TID251
    await stack.enter_async_context(background_task(usage.run, "write the use of tenants"))
    await usage.begin_day(pools.days)
    await stack.enter_async_context(background_task(partial(usage.follow_days, pools.days), "begin days"))
    return usage


def _configured(config: Config) -> tuple[BackendConfig, ...]:
    """Returns the backends that the configuration lists, without entries for discovery."""
    return tuple(backend for backend in config.backends if not backend.looked_up)


def _aliases(config: Config) -> Aliases:
    # A model with its own entry keeps its name even if `*` maps all other names.
    return {model.name: model.stands_for or model.name for model in config.models if model.base is None}


def _live_state(proxy: Proxy, now: float) -> LiveState:
    """Returns the values of all gauges at `now`. Called at each scrape, so that the gauges agree with the state."""
    pools, dispatcher, names = proxy.pools, proxy.dispatcher, proxy.gateway.rulebook.current.band_names
    queued, longest_s = pools.queued(), pools.longest_s(now)
    views = pools.views(now)
    backends = tuple(
        BackendState(
            backend=name,
            in_flight=dispatcher.in_flight(name),
            saturation=views[name].saturation,
            limit=views[name].limit,
            available=views[name].available,
            drained=backend.drained,
            running=reading.running if reading is not None else None,
            waiting=reading.waiting if reading is not None else None,
            kv_used=reading.kv_used if reading is not None else None,
            reading_age_s=now - backend.reading.taken_at_s if backend.reading is not None else None,
            ejected=backend.health.ejected,
            down=backend.health.down,
            pool=pools.pool_of(name) or "",
            day_left=pools.money_left(name, now),
        )
        for name, backend in pools.backends.items()
        # The reading is None if it is stale.
        for reading in (views[name].reading,)
    )
    queues = tuple(
        QueueState(names.get(band, str(band)), *queued.get(band, (0, 0)), longest_s.get(band, 0.0))
        for band in sorted({*names, *queued}, reverse=True)
    )
    cluster = proxy.cluster
    needs = proxy.scale.needs()
    if cluster is not None and not cluster.is_leader:
        # The pools of a follower get no requests, so a follower would report the current number of replicas as needed.
        needs = {}
    body_bytes = (proxy.supervisor or proxy.gateway.handler.bodies).buffered_bytes
    return LiveState(
        queues, pools.blocked(), backends, body_bytes, pools.work_s(now), dispatcher.inversions, needs,
        None if cluster is None else cluster.state(),
    )  # fmt: skip
