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
from llmproxy.remote import messages
from llmproxy.remote.link import TO_WORKER, Link
from llmproxy.remote.server import LeaseServer, Services
from llmproxy.remote.workers.main import RemoteEstimator, RemoteExits, WorkerLeasing
from llmproxy.remote.workers.supervisor import WorkerSession, WorkerSinks
from llmproxy.scheduling.dispatcher import Dispatcher
from llmproxy.scheduling.lease import Lease, Leasing
from tests.dispatching import Client, P, dispatcher, empty, named_as, turns, virtual


class Nowhere:
    """An upstream for rules that open nothing."""


@dataclass(slots=True)
class RecordedEvents:
    """Metrics of the scheduler process that record what sessions report."""

    exits: list[RequestExit] = field(default_factory=list)
    attempts: list[tuple[str, Verdict]] = field(default_factory=list)
    learned: list[str] = field(default_factory=list)
    made: list[messages.ResponseStored] = field(default_factory=list)
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

    def services(
        self, dispatcher: Dispatcher, settle: Callable[[], None] = lambda: None, leasing: Leasing | None = None
    ) -> Services:
        async def page(page: messages.PageRequest) -> messages.PageResponse:
            return messages.PageResponse(page.call, 200, "OK", (("x-remote", page.remote),), page.request)

        def made(one: messages.ResponseStored, _: LeaseServer) -> None:
            self.made.append(one)

        return Services(dispatcher, leasing or dispatcher, page, self.record, made, update_clients=settle)

    def sinks(self, dispatcher: Dispatcher) -> WorkerSinks:
        rulebook = Rulebook(Rules.build(Config(), Nowhere()))  # type: ignore[arg-type]
        return WorkerSinks(rulebook, self, dispatcher.pools.estimator, self.learned.append)


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

    def is_closing(self) -> bool:
        return self._broken

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
        self,
        dispatcher: Dispatcher,
        events: RecordedEvents | None = None,
        settle: Callable[[], None] = lambda: None,
        leasing: Leasing | None = None,
    ) -> None:
        self.events = events or RecordedEvents()
        self.session = WorkerSession(self.events.services(dispatcher, settle, leasing), self.events.sinks(dispatcher))
        self.link: Link[messages.ToWorker] = Link(TO_WORKER, self._hear, self._lost, local=True)
        self.remote = WorkerLeasing(self.link, dispatcher.pools.backends)
        self.estimator = RemoteEstimator(self.link)
        self.metrics = RemoteExits(self.link)
        self.up, self.down = Pipe(self.session.link), Pipe(self.link)
        self.up.back, self.down.back = self.down, self.up
        self.clients: list[Client] = []
        self.link.connection_made(self.up)
        self.session.link.connection_made(self.down)

    def client(self, asked: Request | None = None, **facts: Any) -> Client:
        """A client of the worker."""
        self.clients.append(Client(self.remote, asked, **facts))
        return self.clients[-1]

    def _hear(self, message: messages.ToWorker) -> None:
        if isinstance(message, messages.Answer):
            self.remote.handle(message)
        elif isinstance(message, messages.ShutdownState):
            self.remote.draining, self.remote.granting = message.draining, message.granting

    def _lost(self) -> None:
        self.remote.lost()

    def die(self) -> None:
        """The worker's process ends in this very moment."""
        self.up.abort()

    def check(self) -> None:
        """Nothing is held for the worker."""
        server = self.session.server
        assert (server.open_requests, server.leases, server.waiting) == (0, 0, 0)
        assert (self.remote.waiting, self.remote.running) == (0, 0)
        assert not self.remote._calls
        assert not server._reported


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
