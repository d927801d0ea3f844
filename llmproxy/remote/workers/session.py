"""Scheduler side of one relay worker: its messages become calls of the dispatcher.

Each call of a worker is a task, which also owns the granted lease. When the worker is gone, its tasks are cancelled,
and each returns its lease as if the client had left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from llmproxy.core.domain import Outcome, Refused, Request
from llmproxy.core.lease_events import LeaseEvent, Returned
from llmproxy.core.pools import Pools
from llmproxy.gateway.http.errors import INTERNAL_MESSAGE
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.observe.exit import ExitSink, RequestExit, RequestInput, RequestResult
from llmproxy.observe.logs import log_exit, log_internal
from llmproxy.remote.workers import protocol
from llmproxy.remote.workers.channel import FROM_WORKER, Channel
from llmproxy.scheduling.dispatcher import Dispatcher
from llmproxy.scheduling.lease import Lease

CallT = TypeVar("CallT", protocol.Admit, protocol.Resolve, protocol.PageRequest, protocol.DirectRequest)


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """The parts of the scheduler process that sessions use."""

    rulebook: Rulebook
    dispatcher: Dispatcher
    exits: ExitSink
    update_workers: Callable[[], None]
    """Sends pending changes to all workers. A session calls it before it sends an answer that depends on a change."""
    page: Callable[[protocol.PageRequest], Awaitable[protocol.PageResponse]]
    """Answers requests that are not for an engine."""
    learned: Callable[[str], None]
    """Gets the model whose estimate has changed."""
    stored: Callable[[protocol.ResponseStored, WorkerSession], None]
    """Gets a stored response and the session that reported it."""


class WorkerSession:
    """Serves one worker over `channel` until the worker is gone."""

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context
        self._dispatcher = context.dispatcher
        self._pools: Pools = context.dispatcher.pools
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._leases: dict[int, tuple[Lease, asyncio.Future[Returned]]] = {}
        self._requests: dict[str, Request] = {}
        self._direct = 0
        self.url: asyncio.Future[str] = self._loop.create_future()
        """The URL at which the worker accepts connections."""
        self.idle = asyncio.Event()
        """Set when the worker is shutting down and has no request left."""
        self.gone = asyncio.Event()
        """Set when the connection has ended and all requests of the worker are recorded."""
        self.cut = 0
        """Number of requests that were open when the connection to the worker ended."""
        self.buffered_bytes = 0
        """Buffered bytes of request bodies, as last reported."""
        self.channel: Channel[protocol.FromWorker] = Channel(FROM_WORKER, self._handle, self._lost)

    @property
    def open_requests(self) -> int:
        """Requests of the worker that have not ended, including direct ones, which need no lease."""
        return len(self._requests) + self._direct

    def send(self, message: protocol.Message) -> None:
        """Send one message to the worker."""
        self.channel.send(message)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _call(self, work: Callable[[CallT], Awaitable[None]], asked: CallT) -> None:
        self._note_call(asked.call, self._loop.create_task(self._answered(work, asked)))

    def _note_call(self, call: int, answer: asyncio.Future[Any]) -> None:
        """Remember a call until it is answered or cancelled."""
        self._calls[call] = answer
        answer.add_done_callback(partial(self._call_over, call))

    def _call_over(self, call: int, answer: asyncio.Future[Any]) -> None:
        # A reconnecting member reuses some call numbers while the old calls are still being cancelled.
        if self._calls.get(call) is answer:
            del self._calls[call]

    async def _answered(self, work: Callable[[CallT], Awaitable[None]], asked: CallT) -> None:
        call = asked.call
        try:
            await work(asked)
        except Refused as refused:
            self.send(protocol.CallRefused(call, refused.outcome, refused.message, refused.retry_after_s))
        except Exception as bug:  # noqa: BLE001 - the worker's request must end whatever the bug
            log_internal(f"call {call}", bug)
            self.send(protocol.CallRefused(call, Outcome.INTERNAL, INTERNAL_MESSAGE, None))

    async def _admit(self, ask: protocol.Admit) -> None:
        async with self._dispatcher.admit(ask.request, ask.excluded, ask.entry) as lease:
            self._context.update_workers()
            await self._lend(ask.call, lease)

    async def _lend(self, call: int, lease: Lease) -> None:
        """Send the lease to the worker, and wait for its return."""
        message = self._grant_message(call, lease)
        returned = self._book(message.lease, lease)
        self.send(message)
        if lease.on_cut is not None and (lease.revoked or lease.preempted):
            lease.on_cut()
        try:
            event = await returned
            lease.verdict, lease.usage = event.verdict, event.usage
        finally:
            self._forget(message.lease)

    def _book(self, key: int, lease: Lease) -> asyncio.Future[Returned]:
        """Record a lease of the worker under its number `key`. The future resolves when the worker returns it."""
        returned: asyncio.Future[Returned] = self._loop.create_future()
        self._leases[key] = lease, returned
        lease.on_cut = lambda: self.send(protocol.LeaseCut(key, lease.revoked))
        return returned

    def _forget(self, key: int) -> None:
        lease, _ = self._leases.pop(key)
        # Breaks the reference cycle of lease and callback, which only the garbage collector could free.
        lease.on_cut = None

    def _grant_message(self, call: int, lease: Lease) -> protocol.LeaseGranted:
        grant = lease.grant
        return protocol.LeaseGranted(
            call, grant.lease, grant.request.stage, grant.placed, grant.at_s, grant.queued_ahead, grant.why,
            grant.left_s,
        )  # fmt: skip

    async def _resolve(self, call: protocol.Resolve) -> None:
        target = await self._dispatcher.resolve(
            call.name, call.no_backend_wait_s, call.body_bytes, call.key, call.beside
        )
        self._context.update_workers()
        self.send(protocol.NameResolved(call.call, target))

    async def _page(self, page: protocol.PageRequest) -> None:
        self.send(await self._context.page(page))

    async def _go_direct(self, asked: protocol.DirectRequest) -> None:
        cut = asyncio.Event()
        with self._dispatcher.direct(asked.backend, cut.set):
            self._direct += 1
            try:
                await cut.wait()
            finally:
                self._direct -= 1
        raise Refused(Outcome.CONNECT_FAILED, "The backend is gone.")

    # --- messages of the worker ---------------------------------------------------------------------------------------

    def _handle(self, message: protocol.FromWorker) -> None:
        match message:
            case LeaseEvent():
                self._apply(message)
            case protocol.Admit(_, request):
                self._requests[request.id] = request
                self._call(self._admit, message)
            case protocol.RequestEnded(request_id, met):
                # In the next turn of the loop, after the task of the lease has returned it.
                self._loop.call_soon(self._ended, request_id, met)
            case protocol.PrefixCached(pool, lease, backend, hashes):
                self._loop.call_soon(self._pools.cached, pool, lease, backend, hashes)
            case protocol.AttemptEnded(backend, verdict):
                self._context.exits.attempted(backend, verdict)
            case protocol.ExitReport(record):
                self._context.exits.record(record)
            case protocol.UsageLearned(model, prompt_bytes, sequences, answered):
                self._pools.estimator.learn(model, prompt_bytes, sequences, answered)
                self._context.learned(model)
            # The cases are tried in this order: the rare ones come last.
            case protocol.CancelCall(call):
                if call in self._calls:
                    self._calls[call].cancel()
            case protocol.Resolve():
                self._call(self._resolve, message)
            case protocol.PageRequest():
                self._call(self._page, message)
            case protocol.DirectRequest():
                self._call(self._go_direct, message)
            case protocol.ResponseStored():
                self._context.stored(message, self)
            case protocol.WorkerIdle():
                self.idle.set()
            case protocol.LogLinesLost(lines):
                self._context.exits.log_lines_lost(lines)
            case protocol.BufferedBytes(body_bytes):
                self.buffered_bytes = body_bytes
            case protocol.Listening(url):
                self.url.set_result(url)

    def _apply(self, event: LeaseEvent) -> None:
        lease, returned = self._leases[event.lease]
        if isinstance(event, Returned):
            returned.set_result(event)
        else:
            # A cluster member numbers its leases itself.
            number = lease.grant.lease
            lease.apply(event if event.lease == number else replace(event, lease=number), self._loop.time())

    def _ended(self, request_id: str, met: bool | None) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._dispatcher.ended(request, met)

    # --- the end of the worker ----------------------------------------------------------------------------------------

    def _lost(self) -> None:
        for task in self._calls.values():
            task.cancel()
        self._loop.call_soon(self._end_requests)

    def _end_requests(self) -> None:
        """Record the exit of each open request of the worker. Their leases have been returned by now."""
        self.cut = len(self._requests)
        for request in list(self._requests.values()):
            ended = self._lost_exit(request)
            self._context.exits.record(ended)
            log_exit(ended)
            self._ended(request.id, None)
        self.url.cancel()
        self.buffered_bytes = 0
        self.idle.set()
        self.gone.set()

    def _lost_exit(self, request: Request) -> RequestExit:
        lost = RequestInput(
            request_id=request.label,
            method="POST",
            path="",
            model=request.model,
            adapter=request.adapter,
            tenant=request.tenant,
            band=self._context.rulebook.current.band_names.get(request.band, str(request.band)),
            level=request.band,
            flow=request.flow,
            stream=request.stream,
            arrived_s=request.arrived_s,
        )
        result = RequestResult(
            outcome=Outcome.INTERNAL,
            status=500,
            duration_s=self._loop.time() - request.arrived_s,
            error="its relay worker ended before it did",
        )
        return RequestExit(lost, result)
