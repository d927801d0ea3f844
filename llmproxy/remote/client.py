"""The client side of leases: asks the scheduling process for leases, over a link that may change.

The client keeps its waiting requests and running leases, and reports them on each new link. So no request loses its
place in the queue, and no response is cut.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count

from msgspec import Struct

from llmproxy.core.domain import AdmissionKind, Drop, Grant, Outcome, Refused, Request
from llmproxy.core.lease_events import Committed, LeaseEvent, Progress, Returned, Started
from llmproxy.core.placement.staged import as_stage
from llmproxy.core.queueing.admission import refusal
from llmproxy.remote import messages
from llmproxy.remote.link import Sender
from llmproxy.remote.messages import Answer, Message, Sendable, relative_to
from llmproxy.scheduling.dispatcher import loop_time, shutting_down
from llmproxy.scheduling.lease import Lease

UNSENT_MAX = 10_000  # Maximum number of reports kept without a link. Beyond it, the oldest are lost.
NO_LEADER_RETRY_S = 1.0
DISCOVERY_LAG_S = 10.0  # Maximum time between the discovery of a backend by this process and by the scheduling process.
DISCOVERY_RETRY_S = 0.2
CallAnswer = messages.NameResolved | messages.PageResponse


class _Waiting(Struct, eq=False):
    """A call of `LeaseClient.admit`: a request that waits for a lease."""

    call: int
    request: Request
    excluded: frozenset[str]
    entry: AdmissionKind
    since_s: float
    granted: asyncio.Future[Lease]
    sent: bool = False  # Whether its `Admit` was ever sent.
    unknown: frozenset[str] = frozenset()  # Granted backends that this process does not know yet; a part of `excluded`.


class _Run(Struct, eq=False):
    """A running lease, and the progress of its response, which a new leader needs."""

    lease: Lease
    started_s: float | None = None
    committed: bool = False
    output_tokens: int = 0


class LeaseClient:
    """Implements the lease calls of `Leasing` by messages to the scheduling process."""

    def __init__(self, backends: Container[str]) -> None:
        """Creates a client. `backends` has the names of the backends that this process knows."""
        self._backends = backends
        self._serial = count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._runs: dict[int, _Run] = {}
        self._calls: dict[int, asyncio.Future[CallAnswer]] = {}
        self._unsent: deque[Sendable] = deque(maxlen=UNSENT_MAX)
        # The link to the scheduling process, set by `attach`; None while there is none.
        self.link: Sender | None = None
        self.draining = False
        self.granting = True

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._runs)

    def grant(self, lease: int) -> Grant:
        return self._runs[lease].lease.grant

    # --- for requests -------------------------------------------------------------------------------------------------

    async def admit(
        self, request: Request, excluded: frozenset[str] = frozenset(), entry: AdmissionKind = AdmissionKind.NEW
    ) -> Lease:
        """Waits for a lease, as `Dispatcher.admit`. If cancelled, the other side ends a lease granted meanwhile."""
        if not self.granting or (self.draining and entry is AdmissionKind.NEW):
            raise shutting_down()
        loop = asyncio.get_running_loop()
        asked = _Waiting(next(self._serial), request, excluded, entry, loop.time(), loop.create_future())
        self._waiting[asked.call] = asked
        self._ask(asked)
        try:
            return await asked.granted
        except asyncio.CancelledError:
            # The lease may have been granted in this iteration of the event loop.
            self._runs.pop(asked.call, None)
            self.report(messages.CancelCall(asked.call))
            raise
        finally:
            del self._waiting[asked.call]
            # Avoids a reference cycle through the exception, which only the garbage collector could free.
            del asked

    def _ask(self, asked: _Waiting) -> None:
        if (link := self.link) is not None:
            asked.sent = True
            request = asked.request if link.local else relative_to(asked.request, loop_time())
            link.send(messages.Admit(asked.call, request, asked.excluded, asked.entry))

    def ended(self, request: Request, met: bool | None) -> None:
        self.report(messages.RequestEnded(request.id, met))

    def cached(self, pool: str, lease: int, backend: str, hashes: Sequence[int]) -> None:
        self.report(messages.PrefixCached(pool, lease, backend, tuple(hashes)))

    def response_stored(self, response_id: str, backend: str, tenant: str) -> None:
        """Reports a stored response at once: its client may use the response at another process."""
        self.report(messages.ResponseStored(response_id, backend, tenant))
        if self.link is not None:
            self.link.flush()

    def report(self, message: Sendable) -> None:
        """Sends a message now, or on the next link."""
        if self.link is None:
            self._unsent.append(message)
        else:
            self.link.send(message)

    # --- other calls --------------------------------------------------------------------------------------------------

    async def answer(self, message: Callable[[int], Message]) -> CallAnswer:
        """Sends `message(call number)`, and waits for the answer. Raises Refused, also if the link is lost."""
        call, answer = self._open_call(message)
        try:
            return await answer
        except asyncio.CancelledError:
            self.report(messages.CancelCall(call))
            raise
        finally:
            del self._calls[call]
            # Avoids a reference cycle, as in `admit`.
            del answer

    def _open_call(self, message: Callable[[int], Message]) -> tuple[int, asyncio.Future[CallAnswer]]:
        if self.link is None:
            raise shutting_down()
        call = next(self._serial)
        answer = self._calls[call] = asyncio.get_running_loop().create_future()
        self.link.send(message(call))
        return call, answer

    @contextmanager
    def lasting(self, message: Callable[[int], Message], refused: Callable[[], None]) -> Iterator[None]:
        """Keeps a call open during the block. Calls `refused` if the call is refused or the link is lost.

        Raises Refused without a link.
        """
        call, answer = self._open_call(message)

        def ended(answer: asyncio.Future[CallAnswer]) -> None:
            if not answer.cancelled() and answer.exception() is not None and call in self._calls:
                refused()

        answer.add_done_callback(ended)
        try:
            yield
        finally:
            self.report(messages.CancelCall(call))
            del self._calls[call]
            answer.cancel()

    async def caught_up(self) -> None:
        """Waits for all messages that the other side has sent so far: they arrive before the answer to this call."""
        with suppress(Refused):
            await self.answer(lambda call: messages.Resolve(call, None, 0.0, 0))

    # --- events of leases ---------------------------------------------------------------------------------------------

    def apply(self, event: LeaseEvent, now: float) -> None:
        """Reports an event of a lease. Without a link, `RunningLease` reports the progress later."""
        run = self._runs[event.lease]
        match event:
            # The cases are tried in this order: the frequent ones come first.
            case Progress(_, output_tokens):
                run.output_tokens = output_tokens
            case Started():
                run.started_s = now
            case Committed():
                run.committed = True
            case _:
                if isinstance(event, Returned):
                    del self._runs[event.lease]
                self.report(event)
                return
        if self.link is not None:
            self.link.send(event)

    # --- the other side -----------------------------------------------------------------------------------------------

    def attach(self, link: Sender, prefixes: Iterable[messages.RememberedPrefix] = ()) -> None:
        """Uses a new link, and reports all waiting requests, running leases and `prefixes` on it."""
        now = loop_time()
        self.link = link
        while self._unsent:
            link.send(self._unsent.popleft())
        waiting = {call: asked for call, asked in self._waiting.items() if not asked.granted.done()}
        link.send(messages.Resume(frozenset(waiting), frozenset(self._runs)))
        for prefix in prefixes:
            link.send(prefix)
        for call, run in self._runs.items():
            link.send(_running(call, run, relative_to(run.lease.grant.request, 0.0 if link.local else now), now))
        for asked in waiting.values():
            if asked.sent and asked.entry is AdmissionKind.NEW:
                # A leader has already counted the request, which keeps its place in the queue.
                asked.entry = AdmissionKind.RESUMED
            self._ask(asked)
        link.send(messages.Resumed())

    def detach(self, link: Sender | None = None) -> None:
        """Forgets the current link if it is `link` (None: always). Then refuses the calls of `answer` and `lasting`."""
        if link is None or self.link is link:
            self.link = None
            for answer in self._calls.values():
                if not answer.done():
                    answer.set_exception(shutting_down())

    def handle(self, message: Answer) -> None:
        """Handles a message from the attached link. Does nothing if its call or lease has ended."""
        match message:
            case messages.LeaseGranted():
                self._granted(message)
            case messages.LeaseCut():
                # In the next iteration of the event loop, after the task has received its lease.
                asyncio.get_running_loop().call_soon(self._cut, message)
            case messages.CallRefused(call, outcome, text, retry_after_s):
                asked = self._waiting.get(call)
                if (
                    asked is not None
                    and asked.unknown
                    and outcome is Outcome.REJECTED_NO_BACKENDS
                    and loop_time() < asked.since_s + DISCOVERY_LAG_S
                ):
                    asyncio.get_running_loop().call_later(DISCOVERY_RETRY_S, self._ask_for_unknown, call)
                    return
                refused = self._calls.get(call) if asked is None else asked.granted
                if refused is not None and not refused.done():
                    refused.set_exception(Refused(outcome, text, retry_after_s))
            case messages.NameResolved(call) | messages.PageResponse(call):
                if (answer := self._calls.get(call)) is not None and not answer.done():
                    answer.set_result(message)

    def _granted(self, message: messages.LeaseGranted) -> None:
        asked = self._waiting.get(message.call)
        if asked is None or asked.granted.done():
            return
        if message.placed.backend not in self._backends:
            # Processes find backends at different times.
            self.report(messages.CancelCall(message.call))
            asked.unknown |= {message.placed.backend}
            self._ask_again(asked, asked.excluded | asked.unknown)
            return
        link, at_s = self.link, message.at_s
        if link is not None and not link.local:
            at_s += loop_time()
            link.send(messages.LeaseAcknowledged(message.call))
        # Each event loop reads the clock once an iteration, so the grant may seem earlier than the request.
        grant = Grant(
            message.call, as_stage(asked.request, message.stage), message.placed, max(asked.since_s, at_s),
            message.queued_ahead, message.why, message.left_s,
        )  # fmt: skip
        run = self._runs[message.call] = _Run(Lease(grant, self.apply))
        asked.granted.set_result(run.lease)

    def _ask_for_unknown(self, call: int) -> None:
        """Asks again for a lease, also on backends that were unknown here: this process may have found them by now."""
        asked = self._waiting.get(call)
        if asked is not None and not asked.granted.done():
            known, asked.unknown = asked.excluded - asked.unknown, frozenset()
            self._ask_again(asked, known)

    def _ask_again(self, asked: _Waiting, excluded: frozenset[str]) -> None:
        """Asks again with another call number, because the leader may still have a lease with the old number."""
        del self._waiting[asked.call]
        asked.call, asked.excluded = next(self._serial), excluded
        self._waiting[asked.call] = asked
        self._ask(asked)

    def _cut(self, message: messages.LeaseCut) -> None:
        run = self._runs.get(message.lease)
        if run is None:
            return
        lease, flags = run.lease, (message.revoked, message.hung, message.preempted, message.leaving)
        # The leader repeats this message after a lost connection.
        if flags != (lease.revoked, lease.hung, lease.preempted, lease.leaving):
            revoked, hung, preempted, leaving = flags
            lease.cut(revoked=revoked, hung=hung, preempted=preempted, leaving=leaving)

    # --- refusals -----------------------------------------------------------------------------------------------------

    def refuse_waiting(self, since_s: float) -> None:
        """Refuses waiting requests past their deadline; from `since_s` on, all waiting requests."""
        now = loop_time()
        for asked in [*self._waiting.values()]:
            if asked.granted.done():
                continue
            if now >= since_s:
                message = "No member of the cluster schedules at the moment. Try again."
                refused = Refused(Outcome.REJECTED_NO_BACKENDS, message, NO_LEADER_RETRY_S)
            elif now >= asked.request.deadline_s:
                refused = refusal(Drop(asked.request, Outcome.EXPIRED, NO_LEADER_RETRY_S))
            else:
                continue
            asked.granted.set_exception(refused)

    def drain(self, *, finish_waiting: bool = False) -> None:
        """Refuses new requests of this process, and its waiting ones unless `finish_waiting`. Leases go on."""
        self.draining = True
        if finish_waiting:
            return
        self.granting = False
        for call, asked in self._waiting.items():
            if not asked.granted.done():
                self.report(messages.CancelCall(call))
                asked.granted.set_exception(shutting_down())


def _running(call: int, run: _Run, request: Request, now: float) -> messages.RunningLease:
    grant = run.lease.grant
    started_age_s = None if run.started_s is None else now - run.started_s
    return messages.RunningLease(
        call, request, grant.placed, now - grant.at_s, started_age_s, run.committed, run.output_tokens
    )
