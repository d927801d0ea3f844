"""A worker's dispatcher and its session in one process, connected by bytes as between two processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Concatenate

from llmproxy.config import Config
from llmproxy.core.domain import Outcome, Request, Usage, Verdict
from llmproxy.core.lease_events import LeaseEvent, Returned
from llmproxy.gateway.proxying.rules import Rulebook, Rules
from llmproxy.observe.exit import RequestExit
from llmproxy.remote.workers import protocol
from llmproxy.remote.workers.channel import TO_WORKER, Channel
from llmproxy.remote.workers.remote import CallAnswer, Calls, RemoteDispatcher, RemoteEstimator, RemoteExits
from llmproxy.remote.workers.session import SchedulerContext, WorkerSession
from llmproxy.scheduling.dispatcher import Dispatcher
from llmproxy.scheduling.lease import Lease
from tests.dispatching import Client, P, dispatcher, empty, named_as, turns, virtual


class Nowhere:
    """An upstream for rules that open nothing."""


@dataclass(slots=True)
class RecordedEvents:
    """Metrics of the scheduler process that record what sessions report."""

    exits: list[RequestExit] = field(default_factory=list)
    attempts: list[tuple[str, Verdict]] = field(default_factory=list)
    learned: list[str] = field(default_factory=list)
    made: list[protocol.ResponseStored] = field(default_factory=list)
    lost: int = 0
    log_lines: int = 0

    def record(self, ended: RequestExit) -> None:
        self.exits.append(ended)

    def attempted(self, backend: str, verdict: Verdict) -> None:
        self.attempts.append((backend, verdict))

    def log_lines_lost(self, lines: int) -> None:
        self.log_lines += lines

    def worker_lost(self) -> None:
        self.lost += 1

    def context(self, dispatcher: Dispatcher, settle: Callable[[], None]) -> SchedulerContext:
        async def page(page: protocol.PageRequest) -> protocol.PageResponse:
            return protocol.PageResponse(page.call, 200, "OK", (("x-remote", page.remote),), page.request)

        def made(one: protocol.ResponseStored, _: WorkerSession) -> None:
            self.made.append(one)

        rulebook = Rulebook(Rules.build(Config(), Nowhere()))  # type: ignore[arg-type]
        return SchedulerContext(rulebook, dispatcher, self, settle, page, self.learned.append, made)


class Pipe(asyncio.Transport):
    """A direction of a connection. Written bytes arrive at the other end in a later turn, and in order."""

    def __init__(self, to: asyncio.Protocol) -> None:
        super().__init__()
        self._to = to
        self.back: Pipe | None = None
        self.writes = 0
        self._broken = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes += 1
        asyncio.get_running_loop().call_soon(self._deliver, bytes(data))

    def _deliver(self, data: bytes) -> None:
        if not self._broken:
            self._to.data_received(data)

    def close(self) -> None:
        asyncio.get_running_loop().call_soon(self._end)

    def abort(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self._broken:
            self._broken = True
            self._to.connection_lost(None)
            if self.back is not None:
                self.back._end()


class WorkerLink:
    """A worker and its session. `remote` is the dispatcher that its requests use."""

    def __init__(
        self, dispatcher: Dispatcher, events: RecordedEvents | None = None, settle: Callable[[], None] = lambda: None
    ) -> None:
        self.events = events or RecordedEvents()
        self.session = WorkerSession(self.events.context(dispatcher, settle))
        self.channel: Channel[protocol.ToWorker] = Channel(TO_WORKER, self._hear, self._lost)
        self.calls = Calls(self.channel)
        self.remote = RemoteDispatcher(self.channel, self.calls)
        self.estimator = RemoteEstimator(self.channel)
        self.metrics = RemoteExits(self.channel)
        self.up, self.down = Pipe(self.session.channel), Pipe(self.channel)
        self.up.back, self.down.back = self.down, self.up
        self.clients: list[Client] = []
        self.channel.connection_made(self.up)
        self.session.channel.connection_made(self.down)

    def client(self, asked: Request | None = None, **facts: Any) -> Client:
        """A client of the worker."""
        self.clients.append(Client(self.remote, asked, **facts))
        return self.clients[-1]

    def _hear(self, message: protocol.ToWorker) -> None:
        if isinstance(message, CallAnswer | protocol.CallRefused):
            self.calls.answered(message)
        elif isinstance(message, protocol.LeaseCut):
            self.remote.cut(message)
        elif isinstance(message, protocol.ShutdownState):
            self.remote.shutdown = message

    def _lost(self) -> None:
        self.remote.lost()

    def die(self) -> None:
        """The worker's process ends in this very moment."""
        self.up.abort()

    def check(self) -> None:
        """Nothing is held for the worker."""
        assert (self.session.open_requests, len(self.session._leases), len(self.session._calls)) == (0, 0, 0)
        assert len(self.remote._leases) == 0
        assert not self.calls._open


ENOUGH = 20
"""Turns in which whatever was said is heard, decided and answered."""


async def nothing_left(one: Dispatcher, *lines: WorkerLink) -> None:
    """Let all clients leave; nothing of them may stay behind."""
    for line in lines:
        await asyncio.gather(*(client.done() for client in line.clients))
        for client in line.clients:
            line.remote.ended(client.request, None)
    await turns(ENOUGH)
    for line in lines:
        line.check()
    empty(one)


def finished(one: Dispatcher) -> list[tuple[Verdict, Usage | None]]:
    """Returns a list that gets the verdict and usage of each lease that ends from now on."""
    seen: list[tuple[Verdict, Usage | None]] = []
    apply = one.pools.apply

    def spy(event: LeaseEvent, now: float) -> None:
        if isinstance(event, Returned):
            seen.append((event.verdict, event.usage))
        apply(event, now)

    one.pools.apply = spy  # type: ignore[method-assign]
    return seen


async def leased(client: Client) -> Lease:
    await turns(ENOUGH)
    assert client.lease is not None
    return client.lease


async def refused(client: Client) -> Outcome:
    await turns(ENOUGH)
    assert client.refused is not None
    return client.refused.outcome


def linked(
    test: Callable[Concatenate[Dispatcher, WorkerLink, P], Awaitable[None]],
) -> Callable[P, None]:
    """Runs a test on a virtual clock with a backend of one seat and a worker, which must leave nothing behind."""

    async def body(*given: P.args, **named: P.kwargs) -> None:
        one = dispatcher(a=1)
        line = WorkerLink(one)
        await test(one, line, *given, **named)
        await nothing_left(one, line)

    return virtual(named_as(test, body, 2))
