"""Starts, updates, replaces and ends the relay workers.

The listening sockets stay open in this process. When a worker dies, connections that it has not accepted wait in its
socket for its replacement.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from llmproxy.config import BackendConfig, ConfigError
from llmproxy.core.domain import Outcome, Refused, Request
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.core.pools import Pools
from llmproxy.gateway.build import Gateway
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.lifecycle.background import supervised
from llmproxy.observe.exit import ExitSink, RequestExit
from llmproxy.observe.logs import log_exit
from llmproxy.observe.metrics import Metrics
from llmproxy.remote import messages
from llmproxy.remote.link import FROM_WORKER, Link
from llmproxy.remote.server import LeaseServer, Services
from llmproxy.scheduling.dispatcher import Dispatcher

START_MAX_S = 60.0  # Maximum time for workers to start listening. After it, the start of the proxy fails.
STOP_MAX_S = 5.0  # Maximum time for workers to cut their requests, and then for each to exit before it is killed.
LIVED_S = 10.0  # A worker that ends sooner is replaced after a pause, which doubles each time.
PAUSE_S, PAUSE_MAX_S = 0.5, 30.0
ESTIMATES_S = 0.1  # Interval of sending changed estimates to the workers.

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WorkerSinks:
    """The parts of the scheduler process that process the reports of workers."""

    rulebook: Rulebook
    exits: ExitSink
    estimator: Estimator
    learned: Callable[[str], None]  # Gets the model whose estimate has changed.


class WorkerSession:
    """Serves one worker over `link` until the worker is gone."""

    def __init__(self, services: Services, sinks: WorkerSinks) -> None:
        self._sinks = sinks
        self._loop = asyncio.get_running_loop()
        self.server = LeaseServer(services, self._handle)
        self.url: asyncio.Future[str] = self._loop.create_future()  # The URL at which the worker accepts connections.
        self.idle = asyncio.Event()  # Set by `WorkerIdle`, and when the worker is gone.
        self.gone = asyncio.Event()  # Set when the connection has ended and all requests of the worker are recorded.
        self.cut = 0  # Number of requests that were open when the connection to the worker ended.
        self.buffered_bytes = 0  # Buffered bytes of request bodies, as last reported.
        self.link: Link[messages.FromWorker] = Link(FROM_WORKER, self.server.handle, self._lost, local=True)
        self.server.attach(self.link)

    def _handle(self, message: messages.FromWorker | messages.FromMember) -> None:
        """Handles a message that `LeaseServer` does not handle."""
        match message:
            case messages.AttemptEnded(backend, verdict):
                self._sinks.exits.attempted(backend, verdict)
            case messages.UsageLearned(model, prompt_bytes, sequences, answered):
                self._sinks.estimator.learn(model, prompt_bytes, sequences, answered)
                self._sinks.learned(model)
            case messages.WorkerIdle():
                self.idle.set()
            case messages.LogLinesLost(lines):
                self._sinks.exits.log_lines_lost(lines)
            case messages.BufferedBytes(body_bytes):
                self.buffered_bytes = body_bytes
            case messages.Listening(url):
                self.url.set_result(url)

    def _lost(self) -> None:
        self.server.end()
        self._loop.call_soon(self._end_requests)

    def _end_requests(self) -> None:
        """Records the exit of each of the worker's open requests. Their leases are already returned."""
        self.cut = len(self.server.requests)
        for request in list(self.server.requests.values()):
            ended = self._lost_exit(request)
            self._sinks.exits.record(ended)
            log_exit(ended)
            self.server.forget(request.id)
        self.url.cancel()
        self.buffered_bytes = 0
        self.idle.set()
        self.gone.set()

    def _lost_exit(self, request: Request) -> RequestExit:
        return RequestExit(
            request_id=request.label,
            method="POST",
            path="",
            model=request.model,
            adapter=request.adapter,
            tenant=request.tenant,
            band=self._sinks.rulebook.current.band_names.get(request.band, str(request.band)),
            level=request.band,
            flow=request.flow,
            stream=request.stream,
            arrived_s=request.arrived_s,
            outcome=Outcome.INTERNAL,
            status=500,
            duration_s=self._loop.time() - request.arrived_s,
            error="its relay worker ended before it did",
        )


class WorkerSupervisor:
    """Runs the configured number of relay workers, from `start` to `close`."""

    def __init__(
        self,
        gateway: Gateway,
        dispatcher: Dispatcher,
        backends: Mapping[str, BackendConfig],
        metrics: Metrics,
        page: Callable[[messages.PageRequest], Coroutine[Any, Any, messages.PageResponse]],
        socket_activated: bool,
    ) -> None:
        self._rulebook = gateway.rulebook
        self._leasing = gateway.leasing
        self._ids = gateway.ids
        self._pools: Pools = dispatcher.pools
        self._backends = backends
        self._stored = gateway.stored
        self._metrics = metrics
        self.socket_activated = socket_activated  # Whether the service manager keeps the sockets open too.
        self.url = ""
        self._stored.on_owner = lambda *owner: self._send_all(messages.ResponseStored(*owner))
        self._services = Services(
            dispatcher, gateway.leasing, page, gateway.exits.record, self._response_stored, self._stored.catch_up,
            self.update_workers,
        )  # fmt: skip
        self._sinks = WorkerSinks(gateway.rulebook, gateway.exits, self._pools.estimator, self._learned)
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[int, WorkerSession] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._restarters: list[asyncio.Task[None]] = []
        self._sockets: Sequence[Sequence[socket.socket]] = ()
        self._serial = 0
        self._leaving = self._replaced = self._closed = self._ending = False
        self._changes = False
        self._shutdown = messages.ShutdownState()
        self._known: tuple[list[BackendConfig], int] = [], -1
        self._sent_backends = self._backends_now()
        self._learned_models: set[str] = set()
        dispatcher.on_change.append(self._changed)

    # --- processes ----------------------------------------------------------------------------------------------------

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Starts all workers on these sockets, and waits until each listens. Raises ConfigError, OSError."""
        count = self._rulebook.current.config.workers
        self._sockets = dealt_sockets(sockets, count)
        for slot in range(count):
            await self._begin(slot)
        urls = [session.url for session in self._sessions.values()]
        await asyncio.wait(urls, timeout=START_MAX_S, return_when=asyncio.ALL_COMPLETED)
        if not all(url.done() and not url.cancelled() for url in urls):
            raise ConfigError(["a relay worker did not start; its own lines say why"])
        self.url = urls[0].result()
        self._restarters = [supervised(partial(self._restart, slot), f"worker {slot}") for slot in range(count)]

    async def _begin(self, slot: int) -> None:
        self._serial += 1
        session = WorkerSession(self._services, self._sinks)
        ours, theirs = socket.socketpair()
        with theirs:
            await self._loop.create_unix_connection(lambda: session.link, sock=ours)
            try:
                process = _started(theirs, self._sockets[slot])
            except OSError:
                session.link.abort()
                raise
        self._sessions[slot], self._processes[slot] = session, process
        self.update_workers()
        fds = tuple(one.fileno() for one in self._sockets[slot])
        session.link.send(messages.WorkerStart(f"{self._ids}w{self._serial}", fds, self._config_now()))
        session.link.send(self._sent_backends)
        session.link.send(messages.LearnedEstimates(dict(self._pools.estimator.models)))
        for response_id, (backend, tenant) in self._stored.made_by.items():
            session.link.send(messages.ResponseStored(response_id, backend, tenant))
        session.link.send(self._shutdown)

    async def _restart(self, slot: int) -> None:
        """Restarts the worker of one slot whenever it ends, until the sockets are closed. Also during a drain, because
        connections would wait in the socket of a dead worker.
        """
        began_s, pause_s = self._loop.time(), 0.0
        while True:
            session, process = self._sessions[slot], self._processes[slot]
            await session.gone.wait()
            code = await _ended(process)
            if self._ending:
                return
            pause_s = 0.0 if self._loop.time() - began_s >= LIVED_S else _longer(pause_s)
            again_in_s = None if self._closed else pause_s
            _log.error("worker_lost", pid=process.pid, exit_code=code, requests=session.cut, again_in_s=again_in_s)
            self._metrics.worker_lost()
            while True:
                await asyncio.sleep(pause_s)
                if self._ending or self._closed:
                    return
                began_s = self._loop.time()
                try:
                    await self._begin(slot)
                    break
                except OSError as error:
                    pause_s = _longer(pause_s)
                    _log.error("worker_not_started", error=str(error), again_in_s=pause_s)

    async def close(self) -> None:
        """Cuts all remaining requests, and ends all workers."""
        self._ending = True
        for session in self._sessions.values():
            session.link.send(messages.StopWorker())
        try:
            async with asyncio.timeout(STOP_MAX_S):
                for session in self._sessions.values():
                    await session.gone.wait()
        except TimeoutError:
            for session in self._sessions.values():
                session.link.abort()
        for task in self._restarters:
            task.cancel()
        await asyncio.gather(*self._restarters, return_exceptions=True)
        for process in self._processes.values():
            await _ended(process)
        self._close_ours()

    # --- updates of all workers ---------------------------------------------------------------------------------------

    def _changed(self) -> None:
        if not self._changes:
            self._changes = True
            self._loop.call_soon(self.update_workers)

    def update_workers(self) -> None:
        """Sends changed backends and a changed shutdown state to all workers."""
        if not self._changes:
            return
        self._changes = False
        state = messages.ShutdownState(
            self._leaving, self._replaced, self._closed, self._leasing.draining, self._leasing.granting
        )  # fmt: skip
        if state != self._shutdown:
            self._shutdown = state
            self._send_all(state)
        # Mostly nothing has changed. The comparison is cheap, because equal backends are the same objects.
        if ([*self._backends.values()], self._pools.catalogue.revision) != self._known:
            self._sent_backends = self._backends_now()
            self._send_all(self._sent_backends)

    def _backends_now(self) -> messages.KnownBackends:
        catalogue = self._pools.catalogue
        backends = [*self._backends.values()]
        self._known = backends, catalogue.revision
        try:
            unnamed = catalogue.resolve(None)
        except Refused:
            unnamed = None
        return messages.KnownBackends(pickle.dumps(tuple(backends)), dict(catalogue.targets), unnamed)

    def reconfigure(self) -> None:
        """Sends the current configuration to all workers."""
        self._send_all(messages.NewConfig(self._config_now()))

    def _config_now(self) -> bytes:
        return pickle.dumps(self._rulebook.current.config)

    def _learned(self, model: str) -> None:
        if not self._learned_models:
            self._loop.call_later(ESTIMATES_S, self._send_estimates)
        self._learned_models.add(model)

    def _send_estimates(self) -> None:
        models = self._pools.estimator.models
        self._send_all(
            messages.LearnedEstimates({model: models[model] for model in self._learned_models if model in models})
        )
        self._learned_models.clear()

    def _response_stored(self, stored: messages.ResponseStored, by: LeaseServer) -> None:
        if not self._stored.note(stored.response_id, stored.backend, stored.tenant):
            by.send(messages.ResponseStored(stored.response_id, *self._stored.made_by[stored.response_id]))
            return
        self._stored.on_made(stored.response_id, stored.backend, stored.tenant)
        for session in self._sessions.values():
            if session.server is not by:
                session.link.send(stored)

    def _send_all(self, message: messages.Message) -> None:
        for session in self._sessions.values():
            session.link.send(message)

    # --- shutdown -----------------------------------------------------------------------------------------------------

    @property
    def open_requests(self) -> int:
        """The number of open requests that workers have reported. They report a request once they have its body."""
        return sum(session.server.open_requests for session in self._sessions.values())

    @property
    def buffered_bytes(self) -> int:
        """The buffered bytes of request bodies in all workers, as last reported."""
        return sum(session.buffered_bytes for session in self._sessions.values())

    def begin_shutdown(self, *, replaced: bool = False) -> None:
        """Begins the shutdown of all workers; see `RequestHandler.begin_shutdown`."""
        self._leaving, self._replaced = True, replaced
        self._changed()

    async def close_sockets(self) -> None:
        """Makes all workers stop accepting connections. Open connections stay."""
        self._closed = True
        self._changed()
        self._close_ours()

    def _close_ours(self) -> None:
        for sockets in self._sockets:
            for one in sockets:
                one.close()

    async def wait_idle(self) -> None:
        """Waits until no worker has an open request.

        After a replacement without a drain, waits until no worker has an open connection.
        """
        for session in self._sessions.values():
            await session.idle.wait()


def dealt_sockets(sockets: Sequence[socket.socket], count: int) -> list[list[socket.socket]]:
    """Divides the sockets among `count` workers. Every socket is used. Workers share sockets if needed."""
    by_address: dict[Any, list[socket.socket]] = {}
    for one in sockets:
        by_address.setdefault(one.getsockname(), []).append(one)
    dealt: list[list[socket.socket]] = [[] for _ in range(count)]
    for group in by_address.values():
        for i in range(max(count, len(group))):
            dealt[i % count].append(group[i % len(group)])
    return dealt


def _longer(pause_s: float) -> float:
    return min(PAUSE_MAX_S, max(PAUSE_S, 2 * pause_s))


def _started(channel: socket.socket, sockets: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    """Starts a worker in a separate session (setsid), so that signals of a terminal reach only this process."""
    fds = [channel.fileno(), *(one.fileno() for one in sockets)]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109 - a string is needed
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "llmproxy.remote.workers.main", str(channel.fileno())],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        pass_fds=fds,
        start_new_session=True,
    )


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """Waits for a worker to exit, kills it after STOP_MAX_S, and returns its exit code."""
    try:
        return await asyncio.to_thread(process.wait, STOP_MAX_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return await asyncio.to_thread(process.wait)
