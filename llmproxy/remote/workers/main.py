"""A relay worker: `python -m llmproxy.remote.workers.main FD`. FD is its end of the socket to the scheduler process.

A worker accepts clients, reads their requests and relays bytes; the scheduler process grants every lease. A worker
ignores signals. When the scheduler process ends, the worker cuts its requests and ends too, because no process knows
any more which requests run on which backend.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial

import structlog
import uvloop

from llmproxy.config import BackendConfig, Config, ConfigError
from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import Usage, Verdict
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.gateway.build import Gateway
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.tls import ClientTls
from llmproxy.gateway.listener import Listener, listen
from llmproxy.lifecycle import GC_THRESHOLDS
from llmproxy.lifecycle.background import background_task, spawned
from llmproxy.lifecycle.descriptors import clients_of_process, connections_max
from llmproxy.observe import logs
from llmproxy.observe.exit import RequestExit
from llmproxy.remote import messages
from llmproxy.remote.client import LeaseClient
from llmproxy.remote.link import TO_WORKER, Link, LocalLink
from llmproxy.remote.pages import RemotePages
from llmproxy.scheduling.dispatcher import shutting_down
from llmproxy.upstream.client import HttpUpstream
from llmproxy.upstream.endpoints import Endpoints
from llmproxy.upstream.port import Upstream

BODY_BYTES_REPORT_S = 1.0  # Interval of reporting the buffered bytes of request bodies for the metrics.

_log = structlog.get_logger()


class WorkerLeasing(LeaseClient):
    """A `Leasing` that calls the scheduler process. Known model names are resolved in the worker."""

    def __init__(self, link: Link[messages.ToWorker], backends: Container[str]) -> None:
        super().__init__(backends)
        self.link = link
        self._targets: Mapping[str, Target] = {}
        self._unnamed: Target | None = None

    async def resolve(
        self, name: str | None, no_backend_wait_s: float, body_bytes: int, key: str = "", beside: str | None = None
    ) -> Target:
        """Resolves a name, as `Dispatcher.resolve`. The scheduler resolves names that this worker does not know."""
        known = self._unnamed if name is None else self._targets.get(name)
        if known is not None:
            return known
        resolved = await self.answer(
            lambda call: messages.Resolve(call, name, no_backend_wait_s, body_bytes, key, beside)
        )
        assert isinstance(resolved, messages.NameResolved)
        return resolved.target

    def direct(self, backend: str, cut: Callable[[], None]) -> AbstractContextManager[None]:
        if self.draining:
            raise shutting_down()
        return self.lasting(lambda call: messages.DirectRequest(call, backend), cut)

    def set_names(self, known: messages.KnownBackends) -> None:
        """Replaces the model names that this worker resolves without asking the scheduler process."""
        self._targets, self._unnamed = known.targets, known.unnamed

    def lost(self) -> None:
        """Refuses all calls and new requests, because the scheduler is gone."""
        self.drain()
        self.detach()


class RemoteEstimator(Estimator):
    """Reports the usage of each response to the scheduler, which learns from all workers and sends estimates."""

    def __init__(self, link: Link[messages.ToWorker]) -> None:
        super().__init__()
        self._link = link

    def learn(self, model: str, prompt_bytes: int | None, sequences: int | None, usage: Usage) -> None:
        self._link.send(messages.UsageLearned(model, prompt_bytes, sequences, usage))


class RemoteExits:
    """Sends ended requests, ended attempts and counts of lost log lines to the scheduler process."""

    def __init__(self, link: Link[messages.ToWorker]) -> None:
        self._link = link

    def record(self, ended: RequestExit) -> None:
        self._link.send(messages.ExitReport(ended))
        if lost := logs.take_lines_lost():
            self.log_lines_lost(lost)

    def attempted(self, backend: str, verdict: Verdict) -> None:
        self._link.send(messages.AttemptEnded(backend, verdict))

    def log_lines_lost(self, lines: int) -> None:
        self._link.send(messages.LogLinesLost(lines))


class SchedulerConnection:
    """The connection to the scheduler. Queues messages until the worker can handle them."""

    def __init__(self) -> None:
        self.over = asyncio.Event()  # Set when the worker must end: it received `StopWorker`, or the scheduler is gone.
        self.lost = asyncio.Event()
        self.started: asyncio.Future[messages.WorkerStart] = asyncio.get_running_loop().create_future()
        self.link: Link[messages.ToWorker] = Link(TO_WORKER, self._handle_or_queue, self._lost, local=True)
        self._early: list[messages.ToWorker] = []
        self._handle: Callable[[messages.ToWorker], None] | None = None
        self._on_lost: Callable[[], None] = lambda: None

    def handle_by(self, handle: Callable[[messages.ToWorker], None], on_lost: Callable[[], None]) -> None:
        """Passes the queued and all further messages to `handle`. Calls `on_lost` when the connection ends."""
        self._handle, self._on_lost = handle, on_lost
        # As for messages that come later, an exception of `handle` is reported, and the next message is handled.
        queued = LocalLink(handle)
        for message in self._early:
            queued.send(message)
        self._early.clear()

    def _handle_or_queue(self, message: messages.ToWorker) -> None:
        if isinstance(message, messages.StopWorker):
            self.over.set()
        elif isinstance(message, messages.WorkerStart):
            self.started.set_result(message)
        elif self._handle is None:
            self._early.append(message)
        else:
            self._handle(message)

    def _lost(self) -> None:
        self.lost.set()
        self.started.cancel()
        self._on_lost()
        self.over.set()


class _Worker:
    """The gateway of a worker, controlled by the scheduler's messages."""

    def __init__(
        self, name: str, config: Config, link: Link[messages.ToWorker], upstream: Upstream, endpoints: Endpoints
    ) -> None:
        self._link = link
        self._endpoints = endpoints
        self._backends: dict[str, BackendConfig] = {}
        self._leasing = WorkerLeasing(link, self._backends)
        self._estimator = RemoteEstimator(link)
        gateway = self._gateway = Gateway.build(
            config, self._backends, upstream, self._leasing, self._estimator, RemoteExits(link),
            ids=f"{name}-",
        )  # fmt: skip
        gateway.stored.on_made = self._leasing.response_stored
        gateway.stored.catch_up = self._leasing.caught_up
        self.handler = gateway.handler
        pages = RemotePages(self._leasing, gateway.rulebook)
        self.router = gateway.router(pages, ClientLimits(clients_of_process(config)))
        self.listener: Listener | None = None
        self._waiting_idle: asyncio.Task[None] | None = None

    def handle(self, message: messages.ToWorker) -> None:
        match message:
            case messages.Answer():
                self._leasing.handle(message)
            case messages.LearnedEstimates(models):
                for model, estimate in models.items():
                    self._estimator.take(model, estimate)
            case messages.ResponseStored(response_id, backend, tenant):
                self._gateway.stored.note(response_id, backend, tenant, authoritative=True)
            case messages.KnownBackends():
                self._set_backends(message)
            case messages.NewConfig(config):
                self._gateway.reconfigure(pickle.loads(config))
            case messages.ShutdownState():
                self._shut_down(message)
            case _:
                raise NotImplementedError(type(message).__name__)

    def lost(self) -> None:
        self._leasing.lost()

    def _set_backends(self, known: messages.KnownBackends) -> None:
        self._leasing.set_names(known)
        backends: tuple[BackendConfig, ...] = pickle.loads(known.backends)
        self._backends.clear()
        self._backends.update((backend.name, backend) for backend in backends)
        try:
            self._endpoints.replace(backends)
        except ConfigError as error:
            _log.error("backend_not_trusted", problems=list(error.problems))

    def _shut_down(self, state: messages.ShutdownState) -> None:
        self._leasing.draining, self._leasing.granting = state.draining, state.granting
        if state.leaving:
            self.handler.begin_shutdown(replaced=state.replaced)
        if state.draining or state.closed:
            if self._waiting_idle is not None:
                self._waiting_idle.cancel()
            self._waiting_idle = spawned(self._wait_idle(state), "wait until idle")

    async def report_buffered_bytes(self) -> None:
        """Reports the buffered bytes of request bodies whenever they have changed, until cancelled."""
        reported = 0
        while True:
            await asyncio.sleep(BODY_BYTES_REPORT_S)
            if (buffered := self.handler.bodies.buffered_bytes) != reported:
                self._link.send(messages.BufferedBytes(buffered))
                reported = buffered

    async def _wait_idle(self, state: messages.ShutdownState) -> None:
        if self.listener is not None and state.closed:
            await self.listener.close()
        if self.listener is not None and state.replaced and not state.draining:
            await self.listener.wait_closed()
        else:
            await self.handler.idle()
        self._link.send(messages.WorkerIdle())


async def _serve(end: socket.socket) -> int:
    scheduler = SchedulerConnection()
    await asyncio.get_running_loop().create_unix_connection(lambda: scheduler.link, sock=end)
    try:
        start = await scheduler.started
    except asyncio.CancelledError:
        return 1
    config: Config = pickle.loads(start.config)
    logs.configure(config.log_format, config.log_level)
    try:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(_close_link, scheduler)
            endpoints = Endpoints()
            stack.push_async_callback(endpoints.close)
            upstream = await stack.enter_async_context(HttpUpstream(endpoints, connections_max()))
            worker = _Worker(start.name, config, scheduler.link, upstream, endpoints)
            scheduler.handle_by(worker.handle, worker.lost)
            authorities = partial(endpoints.follow_authorities, quiet=True)
            await stack.enter_async_context(background_task(authorities, "follow authorities"))
            await stack.enter_async_context(background_task(worker.report_buffered_bytes, "report buffered bytes"))
            stack.callback(worker.handler.log_lines.flush)
            stack.push_async_callback(worker.handler.idle)
            opened = [socket.socket(fileno=fd) for fd in start.fds]
            worker.listener = await listen(stack, worker.router, config, ClientTls.from_config(config.tls), opened)
            stack.callback(worker.handler.cut)
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            scheduler.link.send(messages.Listening(worker.listener.url))
            await scheduler.over.wait()
            if scheduler.lost.is_set():
                _log.error("scheduler_lost", requests=worker.handler.open_requests, hint="this worker ends")
    except ConfigError as error:
        for problem in error.problems:
            _log.error("cannot_start", problem=problem)
        return 2
    return int(scheduler.lost.is_set())


async def _close_link(scheduler: SchedulerConnection) -> None:
    """Sends the queued messages, and closes the connection."""
    if not scheduler.lost.is_set():
        scheduler.link.close()
        await scheduler.lost.wait()


def main() -> None:
    logs.write_by_thread()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[1]))
    end.setblocking(False)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_serve(end))
    sys.exit(code)


if __name__ == "__main__":
    main()
