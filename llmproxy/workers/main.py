"""One relay worker: `python -m llmproxy.workers.main FD`; FD is its end of the socket to the scheduler process.

It accepts clients, reads their requests and carries bytes; every lease comes from the other end. It follows the process
that started it: signals for the proxy are not for the worker, and when the other end is gone it cuts what it has and
ends, because nobody would know any more what runs where.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog
import uvloop

from llmproxy.config import BackendConfig, Config, ConfigError
from llmproxy.gateway.build import Gateway
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.tls import ClientTls
from llmproxy.gateway.listener import Listener, background_task, listen
from llmproxy.lifecycle import GC_THRESHOLDS
from llmproxy.lifecycle.descriptors import clients_of_process, connections_max
from llmproxy.telemetry import logs
from llmproxy.upstream.client import HttpUpstream
from llmproxy.upstream.peers import Peers
from llmproxy.upstream.port import Upstream
from llmproxy.workers import protocol
from llmproxy.workers.channel import TO_WORKER, Channel
from llmproxy.workers.remote import Calls, RemoteDispatcher, RemoteEstimator, RemoteMetrics, RemotePages

HELD_S = 1.0
"""How old the number of held bytes in the metrics may be."""

_log = structlog.get_logger()


class _Line:
    """The line to the scheduler. Messages wait until there is somebody to hear them, and are heard in their order."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        """There is nothing more to do: the worker was told to stop, or the scheduler is gone."""
        self.lost = asyncio.Event()
        self.begun: asyncio.Future[tuple[protocol.WorkerStart, Config]] = asyncio.get_running_loop().create_future()
        self.channel: Channel[protocol.ToWorker] = Channel(TO_WORKER, self._take, self._lost)
        self._early: list[protocol.ToWorker] = []
        self._begin: protocol.WorkerStart | None = None
        self._hear: Callable[[protocol.ToWorker], None] | None = None
        self._on_lost: Callable[[], None] = lambda: None

    def hear(self, hear: Callable[[protocol.ToWorker], None], on_lost: Callable[[], None]) -> None:
        """From now on `hear` is told everything, first what came already, and `on_lost` of the end."""
        self._hear, self._on_lost = hear, on_lost
        for message in self._early:
            hear(message)
        self._early.clear()

    def _take(self, message: protocol.ToWorker) -> None:
        if isinstance(message, protocol.StopWorker):
            self.over.set()
        elif isinstance(message, protocol.WorkerStart):
            self._begin = message
        elif isinstance(message, protocol.NewConfig) and self._begin is not None and not self.begun.done():
            self.begun.set_result((self._begin, pickle.loads(message.config)))
        elif self._hear is None:
            self._early.append(message)
        else:
            self._hear(message)

    def _lost(self) -> None:
        self.lost.set()
        self.begun.cancel()
        self._on_lost()
        self.over.set()


class _Worker:
    """The parts of a worker, and what each message does to them."""

    def __init__(
        self, name: str, config: Config, channel: Channel[protocol.ToWorker], upstream: Upstream, peers: Peers
    ) -> None:
        self._channel = channel
        self._calls = Calls(channel)
        self._dispatcher = RemoteDispatcher(channel, self._calls)
        self._estimator = RemoteEstimator(channel)
        self._peers = peers
        self._backends: dict[str, BackendConfig] = {}
        gateway = self._gateway = Gateway.build(
            config, self._backends, upstream, self._dispatcher, self._estimator, RemoteMetrics(channel),
            ids=f"{name}-",
        )  # fmt: skip
        gateway.stored.on_made = lambda *made: channel.send(protocol.ResponseStored(*made))
        gateway.stored.catch_up = self._dispatcher.caught_up
        self.handler = gateway.handler
        pages = RemotePages(self._calls, gateway.rulebook)
        self.router = gateway.router(pages, ClientLimits(clients_of_process(config)))
        self.listener: Listener | None = None
        self._seeing_off: asyncio.Task[None] | None = None

    def hear(self, message: protocol.ToWorker) -> None:
        match message:
            case protocol.LeaseGranted() | protocol.CallRefused() | protocol.NameResolved() | protocol.PageResponse():
                self._calls.answered(message)
            case protocol.LeaseCut():
                self._dispatcher.cut(message)
            case protocol.LearnedEstimates(models):
                for model, estimate in models.items():
                    self._estimator.take(model, estimate)
            case protocol.ResponseStored(response_id, backend, tenant):
                self._gateway.stored.note(response_id, backend, tenant, settled=True)
            case protocol.KnownBackends():
                self._know(message)
            case protocol.NewConfig(config):
                self._gateway.reconfigure(pickle.loads(config))
            case protocol.ShutdownState():
                self._stand(message)
            case _:
                raise NotImplementedError(type(message).__name__)

    def lost(self) -> None:
        """There is no scheduler any more."""
        self._dispatcher.lost()

    def _know(self, fleet: protocol.KnownBackends) -> None:
        """Use these backends and no others."""
        self._dispatcher.names(fleet)
        backends: tuple[BackendConfig, ...] = pickle.loads(fleet.backends)
        self._backends.clear()
        self._backends.update((backend.name, backend) for backend in backends)
        try:
            self._peers.replace(backends)
        except ConfigError as error:
            _log.error("backend_not_trusted", problems=list(error.problems))

    def _stand(self, standing: protocol.ShutdownState) -> None:
        self._dispatcher.standing = standing
        if standing.leaving:
            self.handler.begin_shutdown(replaced=standing.replaced)
        if standing.draining or standing.closed:
            if self._seeing_off is not None:
                self._seeing_off.cancel()
            self._seeing_off = asyncio.create_task(self._see_off(standing))

    async def tell_held(self) -> None:
        """Say what this worker holds of request bodies whenever that has changed, once in a while."""
        told = 0
        while True:
            await asyncio.sleep(HELD_S)
            if (held := self.handler.bodies.held_bytes) != told:
                self._channel.send(protocol.HeldBytes(held))
                told = held

    async def _see_off(self, standing: protocol.ShutdownState) -> None:
        if self.listener is not None and standing.closed:
            await self.listener.close()
        if self.listener is not None and standing.replaced and not standing.draining:
            await self.listener.wait_closed()
        else:
            await self.handler.idle.wait()
        self._channel.send(protocol.WorkerIdle())


async def _serve(end: socket.socket) -> int:
    line = _Line()
    await asyncio.get_running_loop().create_unix_connection(lambda: line.channel, sock=end)
    try:
        begin, config = await line.begun
    except asyncio.CancelledError:
        return 1
    logs.configure(config.log_format, config.log_level)
    try:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(_hung_up, line)
            peers = Peers()
            stack.push_async_callback(peers.close)
            upstream = await stack.enter_async_context(HttpUpstream(peers, connections_max()))
            worker = _Worker(begin.name, config, line.channel, upstream, peers)
            line.hear(worker.hear, worker.lost)
            await stack.enter_async_context(background_task(peers.follow_authorities(quiet=True)))
            await stack.enter_async_context(background_task(worker.tell_held()))
            stack.push_async_callback(worker.handler.idle.wait)
            opened = [socket.socket(fileno=fd) for fd in begin.fds]
            worker.listener = await listen(stack, worker.router, config, ClientTls.of(config.tls), opened)
            stack.callback(worker.handler.cut)
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            line.channel.send(protocol.Listening(worker.listener.url))
            await line.over.wait()
            if line.lost.is_set():
                _log.error("scheduler_lost", requests=worker.handler.open_requests, hint="this worker ends")
    except ConfigError as error:
        for problem in error.problems:
            _log.error("cannot_start", problem=problem)
        return 2
    return int(line.lost.is_set())


async def _hung_up(line: _Line) -> None:
    """All that there is to tell is on its way, and then nothing more will be."""
    if not line.lost.is_set():
        line.channel.close()
        await line.lost.wait()


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
