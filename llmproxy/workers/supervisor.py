"""The relay workers of this process: started, kept up to date, started again when one dies, seen off at the end.

The listening sockets stay open here, whichever worker comes and goes: connections that nobody has accepted yet wait in
the socket of a worker that died for the one that is started in its place.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import structlog

from llmproxy.config import BackendConfig, ConfigError
from llmproxy.core.domain import Refused
from llmproxy.core.pools import Pools
from llmproxy.dispatcher import Dispatcher
from llmproxy.gateway.build import Gateway
from llmproxy.telemetry.metrics import Metrics
from llmproxy.workers.protocol import (
    KnownBackends,
    LearnedEstimates,
    NewConfig,
    PageRequest,
    PageResponse,
    ResponseStored,
    ShutdownState,
    StopWorker,
    WorkerStart,
)
from llmproxy.workers.session import SchedulerContext, WorkerSession

START_MAX_S = 60.0
"""How long workers may take until they listen, before the start is given up."""
STOP_MAX_S = 5.0
"""How long a worker may take to cut what is left, and again to end, before it is killed."""
LIVED_S = 10.0
"""A worker that lived for less died of its start: the next one begins after a pause, which doubles each time."""
PAUSE_S, PAUSE_MAX_S = 0.5, 30.0
ESTIMATES_S = 0.1
"""How long what was learned from answers may take to be known to every worker."""

_log = structlog.get_logger()


class WorkerSupervisor:
    """As many workers as the configuration says; `started` and `close` are for the block in which they serve.

    `held` says that the service manager keeps the sockets open too. `page` answers what is not for an engine.
    """

    def __init__(
        self,
        gateway: Gateway,
        dispatcher: Dispatcher,
        backends: Mapping[str, BackendConfig],
        metrics: Metrics,
        page: Callable[[PageRequest], Coroutine[Any, Any, PageResponse]],
        held: bool,
    ) -> None:
        self._rulebook = gateway.rulebook
        self._dispatcher = dispatcher
        self._pools: Pools = dispatcher.pools
        self._backends = backends
        self._stored = gateway.stored
        self._metrics = metrics
        self.held = held
        self.url = ""
        self._house = SchedulerContext(
            gateway.rulebook, dispatcher, metrics, gateway.decisions, self.settle, page, self._learned, self._made
        )  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._desks: dict[int, WorkerSession] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._kept: list[asyncio.Task[None]] = []
        self._sockets: Sequence[Sequence[socket.socket]] = ()
        self._serial = 0
        self._leaving = self._replaced = self._closed = self._ending = False
        self._unsettled = False
        self._standing = ShutdownState()
        self._known: tuple[list[BackendConfig], int] = [], -1
        self._fleet = self._fleet_now()
        self._unlearned: set[str] = set()
        dispatcher.on_change = self._changed

    # --- processes ----------------------------------------------------------------------------------------------------

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Start all workers on these sockets, and wait until each accepts. Raises ConfigError, OSError."""
        count = self._rulebook.current.config.workers
        self._sockets = dealt(sockets, count)
        for slot in range(count):
            await self._begin(slot)
        urls = [desk.url for desk in self._desks.values()]
        await asyncio.wait(urls, timeout=START_MAX_S, return_when=asyncio.ALL_COMPLETED)
        if not all(url.done() and not url.cancelled() for url in urls):
            raise ConfigError(["a relay worker did not start; its own lines say why"])
        self.url = urls[0].result()
        self._kept = [self._loop.create_task(self._keep(slot), name=f"worker {slot}") for slot in range(count)]

    async def _begin(self, slot: int) -> None:
        self._serial += 1
        desk = WorkerSession(self._house)
        ours, theirs = socket.socketpair()
        with theirs:
            await self._loop.create_unix_connection(lambda: desk.channel, sock=ours)
            try:
                process = _started(theirs, self._sockets[slot])
            except OSError:
                desk.channel.abort()
                raise
        self._desks[slot], self._processes[slot] = desk, process
        self.settle()
        desk.tell(WorkerStart(f"w{self._serial}", tuple(one.fileno() for one in self._sockets[slot])))
        desk.tell(self._rules())
        desk.tell(self._fleet)
        desk.tell(LearnedEstimates(dict(self._pools.estimator.models)))
        for response_id, (backend, tenant) in self._stored.made_by.items():
            desk.tell(ResponseStored(response_id, backend, tenant))
        desk.tell(self._standing)

    async def _keep(self, slot: int) -> None:
        """Start the worker of one slot again and again, until the proxy leaves."""
        began_s, pause_s = self._loop.time(), 0.0
        while True:
            desk, process = self._desks[slot], self._processes[slot]
            await desk.gone.wait()
            code = await _ended(process)
            if self._ending or self._leaving:
                return
            pause_s = 0.0 if self._loop.time() - began_s >= LIVED_S else _longer(pause_s)
            _log.error("worker_lost", pid=process.pid, exit_code=code, requests=desk.cut, again_in_s=pause_s)
            self._metrics.worker_lost()
            while True:
                await asyncio.sleep(pause_s)
                began_s = self._loop.time()
                try:
                    await self._begin(slot)
                    break
                except OSError as error:
                    pause_s = _longer(pause_s)
                    _log.error("worker_not_started", error=str(error), again_in_s=pause_s)

    async def close(self) -> None:
        """Cut what is left, and end all workers."""
        self._ending = True
        for desk in self._desks.values():
            desk.tell(StopWorker())
        try:
            async with asyncio.timeout(STOP_MAX_S):
                for desk in self._desks.values():
                    await desk.gone.wait()
        except TimeoutError:
            for desk in self._desks.values():
                desk.channel.abort()
        for task in self._kept:
            task.cancel()
        await asyncio.gather(*self._kept, return_exceptions=True)
        for process in self._processes.values():
            await _ended(process)
        self._close_ours()

    # --- what every worker knows --------------------------------------------------------------------------------------

    def _changed(self) -> None:
        if not self._unsettled:
            self._unsettled = True
            self._loop.call_soon(self.settle)

    def settle(self) -> None:
        """Tell all workers what has changed of the fleet and of the way out."""
        if not self._unsettled:
            return
        self._unsettled = False
        standing = ShutdownState(
            self._leaving, self._replaced, self._closed, self._dispatcher.draining, self._dispatcher.granting
        )  # fmt: skip
        if standing != self._standing:
            self._standing = standing
            self._tell_all(standing)
        # Backends are looked at by identity first, and revisions are numbers: most of what calls here changes nothing.
        if ([*self._backends.values()], self._pools.catalogue.revision) != self._known:
            self._fleet = self._fleet_now()
            self._tell_all(self._fleet)

    def _fleet_now(self) -> KnownBackends:
        catalogue = self._pools.catalogue
        backends = [*self._backends.values()]
        self._known = backends, catalogue.revision
        try:
            unnamed = catalogue.resolve(None)
        except Refused:
            unnamed = None
        return KnownBackends(pickle.dumps(tuple(backends)), dict(catalogue.targets), unnamed)

    def reconfigure(self) -> None:
        """The rules are others: a new configuration was taken in."""
        self._tell_all(self._rules())

    def _rules(self) -> NewConfig:
        return NewConfig(pickle.dumps(self._rulebook.current.config))

    def _learned(self, model: str) -> None:
        if not self._unlearned:
            self._loop.call_later(ESTIMATES_S, self._tell_learned)
        self._unlearned.add(model)

    def _tell_learned(self) -> None:
        models = self._pools.estimator.models
        self._tell_all(LearnedEstimates({model: models[model] for model in self._unlearned if model in models}))
        self._unlearned.clear()

    def _made(self, made: ResponseStored, by: WorkerSession) -> None:
        if not self._stored.note(made.response_id, made.backend, made.tenant):
            by.tell(ResponseStored(made.response_id, *self._stored.made_by[made.response_id]))
            return
        for desk in self._desks.values():
            if desk is not by:
                desk.tell(made)

    def _tell_all(self, message: KnownBackends | LearnedEstimates | ShutdownState | NewConfig) -> None:
        for desk in self._desks.values():
            desk.tell(message)

    # --- the way out --------------------------------------------------------------------------------------------------

    @property
    def open_requests(self) -> int:
        """Requests that are known of, and one for each worker that was told to see off its own and has not yet."""
        told = self._standing.draining or self._standing.closed
        return sum(desk.open_requests or (told and not desk.idle.is_set()) for desk in self._desks.values())

    @property
    def held_bytes(self) -> int:
        """Of request bodies, by all workers, as they last said."""
        return sum(desk.held_bytes for desk in self._desks.values())

    def begin_shutdown(self, *, replaced: bool = False) -> None:
        """See `RequestHandler.begin_shutdown`."""
        self._leaving, self._replaced = True, replaced
        self._changed()

    async def close_sockets(self) -> None:
        """Take no further connections. Those that are open stay."""
        self._closed = True
        self._changed()
        self._close_ours()

    def _close_ours(self) -> None:
        for hand in self._sockets:
            for one in hand:
                one.close()

    async def wait_idle(self) -> None:
        """Wait until every worker has seen off its requests; where it was replaced, its connections."""
        for desk in self._desks.values():
            await desk.idle.wait()


def dealt(sockets: Sequence[socket.socket], count: int) -> list[list[socket.socket]]:
    """The sockets of each of `count` workers. None is left over, and workers share those of which there are too few."""
    by_address: dict[Any, list[socket.socket]] = {}
    for one in sockets:
        by_address.setdefault(one.getsockname(), []).append(one)
    hands: list[list[socket.socket]] = [[] for _ in range(count)]
    for group in by_address.values():
        for i in range(max(count, len(group))):
            hands[i % count].append(group[i % len(group)])
    return hands


def _longer(pause_s: float) -> float:
    return min(PAUSE_MAX_S, max(PAUSE_S, 2 * pause_s))


def _started(channel: socket.socket, sockets: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    """One worker, which finds modules where this process does. It leads a session of its own: what a terminal tells its
    programs is for the process that was started there."""
    fds = [channel.fileno(), *(one.fileno() for one in sockets)]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109 - a text among texts
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "llmproxy.workers.main", str(channel.fileno())],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        pass_fds=fds,
        start_new_session=True,
    )


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a worker that ends, or is killed because it does not."""
    try:
        return await asyncio.to_thread(process.wait, STOP_MAX_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return await asyncio.to_thread(process.wait)
