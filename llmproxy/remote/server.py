"""Server side: the messages of one client process become calls of the dispatcher.

A waiting call is a task. A granted lease is held here until the client returns it. When the client is gone, its tasks
are cancelled and its leases returned, as if the clients of its requests had left.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from llmproxy.core.domain import Outcome, Refused, Request, Verdict
from llmproxy.core.lease_events import Committed, LeaseEvent, Progress, Returned, Started
from llmproxy.gateway.http.errors import INTERNAL_MESSAGE
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.logs import log_internal
from llmproxy.remote import messages
from llmproxy.remote.link import Sender
from llmproxy.remote.messages import FromMember, FromWorker, Message, PageRequest, PageResponse, relative_to
from llmproxy.scheduling.dispatcher import Dispatcher
from llmproxy.scheduling.lease import Lease, Leasing

RETURNED_MAX = 4096  # Number of returned leases that are remembered, because a `PrefixCached` may still arrive.

Page = Callable[[PageRequest], Awaitable[PageResponse]]
CallT = TypeVar("CallT", messages.Admit, messages.Resolve, PageRequest, messages.DirectRequest)


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of this process that a `LeaseServer` calls for its client."""

    dispatcher: Dispatcher  # Restores what clients report on a new link.
    leasing: Leasing  # Grants the leases: the dispatcher, or for workers of a cluster member, its link to the leader.
    page: Page  # Answers requests that are not for an engine.
    exited: Callable[[RequestExit], None]  # Gets the exit of each request of a client.
    stored: Callable[[messages.ResponseStored, LeaseServer], None]
    """Gets a stored response, and the server of the client that reported it."""
    # Waits until all announced owners of stored responses are known; None: nothing to wait for.
    catch_up: Callable[[], Awaitable[None]] | None = None
    update_clients: Callable[[], None] = lambda: None  # Sends pending changes to all clients, before an answer.


class _Lent(Struct, eq=False):
    """A lease that this process lent to the client, and the progress of the attempt under the lease."""

    lease: Lease
    # Whether the client has confirmed the lease. An unconfirmed lease ends when the connection is lost.
    acknowledged: bool = False
    started: bool = False
    committed: bool = False


class LeaseServer:
    """Serves the calls of one client process. After a lost connection, a cluster member continues on a new link."""

    def __init__(self, services: Services, other: Callable[[FromWorker | FromMember], None]) -> None:
        """Creates the server of one client. `other` gets `Resumed` and the messages that this class does not handle."""
        self._services = services
        self._dispatcher = services.dispatcher
        self._leasing = services.leasing
        self._other = other
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # Calls that are not answered yet.
        self._lent: dict[int, _Lent] = {}
        self._numbers: OrderedDict[int, int] = OrderedDict()  # Returned lease: the client's number -> the dispatcher's.
        self._reported: set[str] = set()  # Ids of the requests that the client has reported on this link.
        self._direct = 0
        self.requests: dict[str, Request] = {}  # Id -> open request of the client.
        # The current link to the client; None if it is lost. Messages of older links are dropped.
        self.link: Sender | None = None
        self._shares_clock = True
        self.resumed = False  # Whether the client has reported its requests and leases on this link.

    @property
    def open_requests(self) -> int:
        """The number of the client's open requests, including direct ones, which need no lease."""
        return len(self.requests) + self._direct

    @property
    def leases(self) -> int:
        return len(self._lent)

    @property
    def waiting(self) -> int:
        return len(self._tasks)

    def send(self, message: Message) -> None:
        """Sends a message to the client, if it is connected."""
        if self.link is not None:
            self.link.send(message)

    # --- links --------------------------------------------------------------------------------------------------------

    def attach(self, link: Sender) -> None:
        """Uses a new link, on which the client will report its requests and leases."""
        self.link, self.resumed, self._shares_clock = link, False, link.local

    def detach(self) -> None:
        """Handles a lost link: cancels all calls, and returns the leases that the client has not acknowledged.

        The other leases go on. The client repeats its `Admit`s on its next link.
        """
        self.link = None
        self._cancel_tasks()
        for call in [call for call, lent in self._lent.items() if not lent.acknowledged]:
            self._take_back(call)

    def end(self) -> None:
        """Cancels the calls of a client that is gone, and returns its leases in the next iteration of the event loop.

        Call `forget` for its requests only after that.
        """
        self.link = None
        self._cancel_tasks()
        for call in [*self._lent]:
            self._take_back(call)

    def _cancel_tasks(self) -> None:
        # On its next link, the client may repeat a call before the cancelled task of that call has ended.
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()

    def forget(self, request_id: str, met: bool | None = None) -> None:
        self._reported.discard(request_id)
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._leasing.ended(request, met)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _call(self, work: Callable[[CallT], Awaitable[None]], asked: CallT) -> None:
        task = self._tasks[asked.call] = self._loop.create_task(self._answered(work, asked))
        task.add_done_callback(partial(self._call_over, asked.call))

    def _call_over(self, call: int, task: asyncio.Task[None]) -> None:
        # A reconnecting member reuses some call numbers while the old calls are still being cancelled.
        if self._tasks.get(call) is task:
            del self._tasks[call]

    async def _answered(self, work: Callable[[CallT], Awaitable[None]], asked: CallT) -> None:
        call = asked.call
        try:
            await work(asked)
        except Refused as refused:
            self.send(messages.CallRefused(call, refused.outcome, refused.message, refused.retry_after_s))
        except Exception as bug:  # noqa: BLE001 - the client's request must end whatever the bug
            log_internal(f"call {call}", bug)
            self.send(messages.CallRefused(call, Outcome.INTERNAL, INTERNAL_MESSAGE, None))

    async def _admit(self, asked: messages.Admit) -> None:
        lease = await self._leasing.admit(asked.request, asked.excluded, asked.entry)
        lent = self._lend(asked.call, lease)
        try:
            self._services.update_clients()
        except BaseException:
            self._take_back(asked.call)
            raise
        self._grant(asked.call, lent)

    def _lend(self, call: int, lease: Lease) -> _Lent:
        lent = self._lent[call] = _Lent(lease)
        lease.on_cut = lambda: self.send(
            messages.LeaseCut(call, lease.revoked, lease.hung, lease.preempted, lease.leaving)
        )
        return lent

    def _grant(self, call: int, lent: _Lent) -> None:
        """Sends the lease to the client, or repeats it, because the grant may have been lost with an earlier link."""
        grant, lent.acknowledged = lent.lease.grant, False
        at_s = grant.at_s if self._shares_clock else grant.at_s - self._loop.time()
        self.send(
            messages.LeaseGranted(
                call, grant.request.stage, grant.placed, at_s, grant.queued_ahead, grant.why, grant.left_s
            )
        )
        self._repeat_cut(lent)

    def _repeat_cut(self, lent: _Lent) -> None:
        """Sends the `LeaseCut` of a lease that was cut before the client got it, or whose cut may have been lost."""
        lease = lent.lease
        if lease.on_cut is not None and (lease.revoked or lease.hung or lease.preempted or lease.leaving):
            lease.on_cut()

    def _take_back(self, call: int, returned: LeaseEvent | None = None) -> None:
        """Gives back the lease of a call in the next iteration of the event loop.

        `returned` is the event of the holder. None means that the client has left, the link was lost before the
        acknowledgement, the call was cancelled, or the grant failed. The verdict is then CLIENT_GONE.
        """
        lease = self._lent.pop(call).lease
        # Breaks the reference cycle of lease and callback, which only the garbage collector could free.
        lease.on_cut = None
        self._numbers[call] = lease.grant.lease
        if len(self._numbers) > RETURNED_MAX:
            self._numbers.popitem(last=False)
        event = returned or Returned(lease.grant.lease, Verdict.CLIENT_GONE)
        self._loop.call_soon(lease.apply, event, self._loop.time())

    async def _resolve(self, call: messages.Resolve) -> None:
        if call.name is None and self._services.catch_up is not None:
            # The call may be of `LeaseClient.caught_up`.
            await self._services.catch_up()
        target = await self._leasing.resolve(call.name, call.no_backend_wait_s, call.body_bytes, call.key, call.beside)
        self._services.update_clients()
        self.send(messages.NameResolved(call.call, target))

    async def _page(self, page: PageRequest) -> None:
        self.send(await self._services.page(page))

    async def _go_direct(self, asked: messages.DirectRequest) -> None:
        cut = asyncio.Event()
        with self._leasing.direct(asked.backend, cut.set):
            self._direct += 1
            try:
                await cut.wait()
            finally:
                self._direct -= 1
        raise Refused(Outcome.CONNECT_FAILED, "The backend is gone.")

    # --- messages of the client ---------------------------------------------------------------------------------------

    def handle(self, message: FromWorker | FromMember) -> None:
        """Handles a message of the client. Ignores events of leases that are not open here."""
        match message:
            case LeaseEvent(call):
                if (lent := self._lent.get(call)) is not None:
                    self._apply(lent, message)
            case messages.Admit():
                self._asked(message)
            case messages.LeaseAcknowledged(call):
                if (lent := self._lent.get(call)) is not None:
                    lent.acknowledged = True
            case messages.RequestEnded(request_id, met):
                # In the next iteration of the event loop, after its lease is returned.
                self._loop.call_soon(self.forget, request_id, met)
            case messages.PrefixCached(pool, call, backend, hashes):
                lent = self._lent.get(call)
                if (number := self._numbers.get(call) if lent is None else lent.lease.grant.lease) is not None:
                    self._loop.call_soon(self._leasing.cached, pool, number, backend, hashes)
            case messages.ExitReport(record):
                self._services.exited(record if self._shares_clock else record.later(self._loop.time()))
            # The cases are tried in this order: the rare ones come last.
            case messages.CancelCall(call):
                if call in self._lent:
                    self._take_back(call)
                elif call in self._tasks:
                    self._tasks[call].cancel()
            case messages.Resolve():
                self._call(self._resolve, message)
            case messages.PageRequest():
                self._call(self._page, message)
            case messages.DirectRequest():
                self._call(self._go_direct, message)
            case messages.ResponseStored():
                self._services.stored(message, self)
            case messages.Resume():
                self._resume(message)
            case messages.RunningLease():
                self._resume_lease(message)
            case messages.Resumed():
                self.resumed = True
                for request_id in self.requests.keys() - self._reported:
                    # The request ended while the connection was lost.
                    self._loop.call_soon(self.forget, request_id)
                self._other(message)
            case messages.RememberedPrefix(pool, backend, hashes):
                self._dispatcher.pools.cached(pool, None, backend, hashes)
            case _:
                self._other(message)

    def _apply(self, lent: _Lent, event: LeaseEvent) -> None:
        kind, call, number = type(event), event.lease, lent.lease.grant.lease
        # The client numbers its leases itself.
        event = replace(event, lease=number)
        if kind is Returned:
            self._take_back(call, event)
            return
        lent.started |= kind is Started
        lent.committed |= kind is Committed
        lent.lease.apply(event, self._loop.time())

    def _asked(self, asked: messages.Admit) -> None:
        call, request = asked.call, asked.request
        self._reported.add(request.id)
        if (lent := self._lent.get(call)) is not None:
            self._grant(call, lent)
        elif call not in self._tasks:
            if not self._shares_clock:
                request = relative_to(request, -self._loop.time())
                asked = replace(asked, request=request)
            self.requests[request.id] = request
            self._call(self._admit, asked)

    # --- resuming a client --------------------------------------------------------------------------------------------

    def _resume(self, resume: messages.Resume) -> None:
        """Cancels the calls and returns the leases that the client does not report on the new link."""
        self._reported.clear()
        for call, task in self._tasks.items():
            if call not in resume.waiting and call not in resume.running:
                task.cancel()
        for call in self._lent.keys() - resume.waiting - resume.running:
            self._take_back(call)

    def _resume_lease(self, running: messages.RunningLease) -> None:
        """Books a lease that an earlier leader granted, or records the progress of a lease of this leader."""
        call, now = running.call, self._loop.time()
        request = running.request
        self._reported.add(request.id)
        lent = self._lent.get(call)
        if lent is None:
            if not self._shares_clock:
                request = relative_to(request, -now)
            resumed = self._dispatcher.resume(request, running.placed, now - running.age_s)
            if resumed is None:
                return
            self.requests[request.id] = request
            lent = self._lend(call, resumed)
        lent.acknowledged = True
        lease, number = lent.lease, lent.lease.grant.lease
        if running.started_age_s is not None and not lent.started:
            lent.started = True
            lease.apply(Started(number), now - running.started_age_s)
        if running.committed and not lent.committed:
            lent.committed = True
            lease.apply(Committed(number), now)
        if running.output_tokens:
            lease.apply(Progress(number, running.output_tokens), now)
        self._repeat_cut(lent)
