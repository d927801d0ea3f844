"""The scheduler's side of one relay worker: what the worker asks for is done here, by the one dispatcher there is.

Every call of a worker is a task, and a lease is held by the task that was granted it. When the worker is gone, its
tasks are cancelled, and each gives back what it holds as it would where its client had left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from llmproxy.core.domain import Outcome, Refused, Request, Usage, Verdict
from llmproxy.core.pools import Pools
from llmproxy.dispatcher import Dispatcher, Lease
from llmproxy.gateway.http.errors import INTERNAL_MESSAGE
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.telemetry.decisions import DecisionLog
from llmproxy.telemetry.exit import ExitSink, RequestExit
from llmproxy.telemetry.logs import log_exit, log_internal
from llmproxy.workers import protocol
from llmproxy.workers.channel import FROM_WORKER, Channel

CallT = TypeVar("CallT", protocol.Admit, protocol.Resolve, protocol.PageRequest, protocol.DirectRequest)


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """What a desk needs of the process that schedules.

    `settle` brings every worker up to date, before it is told of anything that follows from a change. `page` answers
    what is not for an engine; `learned` hears of which model something was learned, and `made` of a stored response and
    the desk that it was made behind.
    """

    rulebook: Rulebook
    dispatcher: Dispatcher
    metrics: ExitSink
    decisions: DecisionLog | None
    settle: Callable[[], None]
    page: Callable[[protocol.PageRequest], Awaitable[protocol.PageResponse]]
    learned: Callable[[str], None]
    made: Callable[[protocol.ResponseStored, WorkerSession], None]


class WorkerSession:
    """Serves one worker through `channel` until it is gone."""

    def __init__(self, house: SchedulerContext) -> None:
        self._house = house
        self._dispatcher = house.dispatcher
        self._pools: Pools = house.dispatcher.pools
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._leases: dict[int, tuple[Lease, asyncio.Future[tuple[Verdict, Usage | None]]]] = {}
        self._walks: dict[str, Request] = {}
        self._direct = 0
        self.url: asyncio.Future[str] = self._loop.create_future()
        """Where the worker accepts connections."""
        self.idle, self.gone = asyncio.Event(), asyncio.Event()
        """The worker has seen everybody off; there is no worker any more."""
        self.cut = 0
        """Requests that ended because the worker did."""
        self.held_bytes = 0
        """Of request bodies, as the worker last said."""
        self.channel: Channel[protocol.FromWorker] = Channel(FROM_WORKER, self._take, self._lost)

    @property
    def open_requests(self) -> int:
        """Requests of the worker that came to the waiting room, or went past it, and have not ended."""
        return len(self._walks) + self._direct

    @property
    def leases(self) -> int:
        """Leases that the worker holds."""
        return len(self._leases)

    def tell(self, message: protocol.Message) -> None:
        """Send one message to the worker."""
        self.channel.send(message)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _call(self, work: Callable[[CallT], Awaitable[None]], asked: CallT) -> None:
        task = self._calls[asked.call] = self._loop.create_task(self._answered(work, asked))
        task.add_done_callback(lambda _: self._calls.pop(asked.call))

    async def _answered(self, work: Callable[[CallT], Awaitable[None]], asked: CallT) -> None:
        call = asked.call
        try:
            await work(asked)
        except Refused as refused:
            self.tell(protocol.CallRefused(call, refused.outcome, refused.message, refused.retry_after_s))
        except Exception as bug:  # noqa: BLE001 - the last wall: the worker's request must hear of it, and end
            log_internal(f"call {call}", bug)
            self.tell(protocol.CallRefused(call, Outcome.INTERNAL, INTERNAL_MESSAGE, None))

    async def _admit(self, ask: protocol.Admit) -> None:
        async with self._dispatcher.admit(ask.request, ask.excluded, ask.entry) as lease:
            grant = lease.grant
            returned: asyncio.Future[tuple[Verdict, Usage | None]] = self._loop.create_future()
            self._leases[grant.lease] = lease, returned
            self._house.settle()
            self.tell(
                protocol.LeaseGranted(
                    ask.call, grant.lease, grant.placed, grant.at_s, grant.queued_ahead, grant.why, grant.left_s
                )
            )  # fmt: skip
            lease.on_cut = lambda: self.tell(protocol.LeaseCut(grant.lease, lease.revoked))
            if lease.revoked or lease.preempted:
                lease.on_cut()
            try:
                lease.verdict, lease.usage = await returned
            finally:
                del self._leases[grant.lease]
                # It names the lease that it belongs to: both would stay until cycles are looked for.
                lease.on_cut = None

    async def _resolve(self, asked: protocol.Resolve) -> None:
        target = await self._dispatcher.resolve(asked.name, asked.hold_s, asked.body_bytes)
        self._house.settle()
        self.tell(protocol.NameResolved(asked.call, target))

    async def _page(self, page: protocol.PageRequest) -> None:
        self.tell(await self._house.page(page))

    async def _go_direct(self, asked: protocol.DirectRequest) -> None:
        cut = asyncio.Event()
        with self._dispatcher.direct(asked.backend, cut.set):
            self._direct += 1
            try:
                await cut.wait()
            finally:
                self._direct -= 1
        raise Refused(Outcome.CONNECT_FAILED, "The backend is gone.")

    # --- what the worker says -----------------------------------------------------------------------------------------

    def _take(self, message: protocol.FromWorker) -> None:
        match message:
            case protocol.LeaseProgress(lease, output_tokens):
                self._leases[lease][0].progress(output_tokens)
            case protocol.Admit(_, request):
                self._walks[request.id] = request
                self._call(self._admit, message)
            case protocol.LeaseCommitted(lease):
                self._leases[lease][0].committed()
            case protocol.LeaseStarted(lease):
                self._leases[lease][0].started()
            case protocol.LeaseReturned(lease, verdict, usage):
                self._leases[lease][1].set_result((verdict, usage))
            case protocol.RequestEnded(request_id, met):
                # Not before the task that holds its lease has given it back, which is the first thing of the next turn.
                self._loop.call_soon(self._ended, request_id, met)
            case protocol.PrefixCached(pool, lease, backend, hashes):
                self._loop.call_soon(self._pools.cached_on, pool, lease, backend, hashes)
            case protocol.AttemptEnded(backend, verdict):
                self._house.metrics.attempted(backend, verdict)
            case protocol.ExitReport(record):
                self._house.metrics.record(record)
                if self._house.decisions is not None:
                    self._house.decisions.record(record)
            case protocol.UsageLearned(model, prompt_bytes, sequences, answered):
                self._pools.estimator.learn(model, prompt_bytes, sequences, answered)
                self._house.learned(model)
            case _:
                self._take_rare(message)

    def _take_rare(
        self,
        message: protocol.DirectRequest
        | protocol.CancelCall
        | protocol.Resolve
        | protocol.PageRequest
        | protocol.ResponseStored
        | protocol.WorkerIdle
        | protocol.Listening
        | protocol.LogLinesLost
        | protocol.HeldBytes,
    ) -> None:
        match message:
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
                self._house.made(message, self)
            case protocol.WorkerIdle():
                self.idle.set()
            case protocol.LogLinesLost(lines):
                self._house.metrics.log_lines_lost(lines)
            case protocol.HeldBytes(body_bytes):
                self.held_bytes = body_bytes
            case protocol.Listening(url):
                self.url.set_result(url)

    def _ended(self, request_id: str, met: bool | None) -> None:
        request = self._walks.pop(request_id, None)
        if request is not None:
            self._dispatcher.ended(request, met)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _lost(self) -> None:
        for task in self._calls.values():
            task.cancel()
        self._loop.call_soon(self._forget)

    def _forget(self) -> None:
        """The leases are given back by now; no request that the worker had will be told of by anybody else."""
        self.cut = len(self._walks)
        for request in list(self._walks.values()):
            ended = self._lost_with_it(request)
            self._house.metrics.record(ended)
            log_exit(ended)
            self._ended(request.id, None)
        self.url.cancel()
        self.held_bytes = 0
        self.idle.set()
        self.gone.set()

    def _lost_with_it(self, request: Request) -> RequestExit:
        return RequestExit(
            request_id=request.label,
            method="POST",
            path="",
            outcome=Outcome.INTERNAL,
            status=500,
            duration_s=self._loop.time() - request.arrived_s,
            model=request.model,
            adapter=request.adapter,
            tenant=request.tenant,
            band=self._house.rulebook.current.band_names.get(request.band, str(request.band)),
            level=request.band,
            flow=request.flow,
            stream=request.stream,
            arrived_s=request.arrived_s,
            error="its relay worker ended before it did",
        )
