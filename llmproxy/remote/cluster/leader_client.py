"""Member side of one shard: the client of its current leader, which may be this process itself.

The client keeps the member's waiting requests and running leases. After a change of leader or a lost connection it
reports all of them to the leader, so that no request loses its place in the queue and no response is cut.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import AdmissionKind, Drop, Grant, Outcome, Refused, Request
from llmproxy.core.lease_events import Committed, LeaseEvent, Progress, Returned, Started
from llmproxy.core.placement.staged import as_stage
from llmproxy.core.queueing.admission import refusal
from llmproxy.observe.exit import RequestExit
from llmproxy.remote.cluster.channel import Sender
from llmproxy.remote.cluster.protocol import (
    LeaseAcknowledged,
    RememberedPrefix,
    Resume,
    Resumed,
    RunningLease,
    relative_to,
)
from llmproxy.remote.workers import protocol
from llmproxy.remote.workers.protocol import Message, Sendable
from llmproxy.remote.workers.remote import Calls
from llmproxy.scheduling.dispatcher import Dispatcher, shutting_down
from llmproxy.scheduling.lease import Admitted, Lease

PREFIXES_MAX = 2_000
"""Prompts that a member remembers for its next leader."""
HASHES_MAX = 100_000
"""Block hashes of all remembered prompts. They describe 50 MB of text, use 4 MB of memory and fill 1 MB of frames."""
UNSENT_MAX = 10_000
"""Maximum number of reports kept while there is no leader. The oldest are dropped: they only correct estimates."""
NO_LEADER_RETRY_S = 1.0
DISCOVERY_LAG_S = 10.0
"""How long a member that has found a backend waits for the leader to find it too."""


class _Prefixes:
    """Remembers which blocks of the member's most recent requests are cached, and where."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = backends
        self._by_lease: OrderedDict[int, tuple[RememberedPrefix, int]] = OrderedDict()
        """Lease -> its prefix, and the value of `Backend.processes` at that time."""
        self._hashes = 0

    def note(self, grant: Grant, hashes: Sequence[int]) -> None:
        """Remember that the backend of a lease has cached these blocks of its prompt, or of prompt and answer."""
        backend = self._backends.get(grant.placed.backend)
        if backend is None or not hashes:
            return
        self._forget(grant.lease)
        prefix = RememberedPrefix(grant.request.pool, grant.placed.backend, tuple(hashes))
        self._by_lease[grant.lease] = prefix, backend.processes
        self._hashes += len(prefix.hashes)
        while self._hashes > HASHES_MAX or len(self._by_lease) > PREFIXES_MAX:
            self._forget(next(iter(self._by_lease)))

    def _forget(self, lease: int) -> None:
        if lease in self._by_lease:
            self._hashes -= len(self._by_lease.pop(lease)[0].hashes)

    def all(self) -> Iterator[RememberedPrefix]:
        """Yields the remembered prefixes, oldest first, without those of engine processes that have ended."""
        for prefix, process in self._by_lease.values():
            backend = self._backends.get(prefix.backend)
            if backend is not None and backend.processes == process:
                yield prefix


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for a lease."""

    call: int
    request: Request
    excluded: frozenset[str]
    entry: AdmissionKind
    since_s: float
    sent: bool = False
    """Whether any leader has received its `Admit`."""
    granted: asyncio.Future[Lease] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(slots=True, eq=False)
class _Run:
    """A running lease, and the progress of its response, which a new leader needs."""

    lease: Lease
    started_s: float | None = None
    committed: bool = False
    output_tokens: int = 0


class LeaderClient:
    """A `Leasing` that sends each call to the leader. Names are resolved in this process."""

    def __init__(self, local: Dispatcher, backends: Container[str]) -> None:
        """
        Args:
            local: The dispatcher of this process. It resolves names and counts requests that need no lease.
            backends: Names of the backends that this member knows.
        """
        self._local = local
        self._backends = backends
        self._serial = count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._runs: dict[int, _Run] = {}
        self._leader: Sender | None = None
        self._unsent: deque[Sendable] = deque(maxlen=UNSENT_MAX)
        self._prefixes = _Prefixes(local.pools.backends)
        self.calls: Callable[[], Calls | None] = lambda: None
        """Makes calls to the leader that need no lease. None unless a leader in another process is connected."""
        self.draining = False
        self.granting = True

    @property
    def waiting(self) -> int:
        """Requests of this member that wait for a lease."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Leases that this member has."""
        return len(self._runs)

    # --- for requests -------------------------------------------------------------------------------------------------

    def admit(
        self, request: Request, excluded: frozenset[str] = frozenset(), entry: AdmissionKind = AdmissionKind.NEW
    ) -> Admitted:
        """See `Dispatcher.admit`."""
        return Admitted(self, request, excluded, entry)

    async def wait(self, request: Request, excluded: frozenset[str], entry: AdmissionKind) -> Lease:
        """Wait for the lease of a request; see `Dispatcher.admit`. Cancellation is safe: the leader ends the lease."""
        if not self.granting or (self.draining and entry is AdmissionKind.NEW):
            raise shutting_down()
        call = next(self._serial)
        asked = self._waiting[call] = _Waiting(call, request, excluded, entry, _now())
        self._ask(asked)
        try:
            return await asked.granted
        except asyncio.CancelledError:
            # The lease may have been granted in this turn of the loop; the leader then ends it.
            self._runs.pop(asked.call, None)
            self._report(protocol.CancelCall(asked.call))
            raise
        finally:
            del self._waiting[asked.call]

    async def resolve(
        self, name: str | None, no_backend_wait_s: float, body_bytes: int, key: str = "", beside: str | None = None
    ) -> Target:
        """See `Dispatcher.resolve`. While this member waits for a name, the leader counts the wait for the autoscaler.

        Returns when both processes know the name, because a leader refuses requests for an unknown name. Does not wait
        for the leader longer than DISCOVERY_LAG_S after this member knows the name.
        """
        ends_s = _now() + no_backend_wait_s
        try:
            return await self._local.resolve(name, 0.0, body_bytes, key, beside)
        except Refused as refused:
            if refused.outcome is not Outcome.REJECTED_NO_BACKENDS or no_backend_wait_s <= 0.0:
                raise

        def message(call: int) -> protocol.Resolve:
            return protocol.Resolve(call, name, ends_s - _now(), body_bytes, key, beside)

        asking = asyncio.create_task(self._ask_leader(message), name="hold at the leader")
        try:
            target = await self._local.resolve(name, no_backend_wait_s, body_bytes, key, beside)
            if not self.is_leader:
                await asyncio.wait([asking], timeout=min(DISCOVERY_LAG_S, ends_s - _now()))
            return target
        finally:
            asking.cancel()

    async def _ask_leader(self, message: Callable[[int], Message]) -> None:
        """Make a call to a leader in another process. Waits for such a leader; repeats the call if it changes."""
        while True:
            calls = self.calls()
            if calls is not None:
                try:
                    await calls.answer(message)
                except Refused as refused:
                    if refused.outcome is not Outcome.DRAINING:
                        return
                else:
                    return
            await asyncio.sleep(NO_LEADER_RETRY_S)

    @property
    def is_leader(self) -> bool:
        """Whether the leader is in this process."""
        return self._leader is not None and self._leader.local

    def direct(self, backend: str, cut: Callable[[], None]) -> AbstractContextManager[None]:
        """See `Dispatcher.direct`."""
        return self._local.direct(backend, cut)

    def ended(self, request: Request, met: bool | None) -> None:
        """See `Dispatcher.ended`."""
        self._report(protocol.RequestEnded(request.id, met))

    def cached(self, grant: Grant, hashes: Sequence[int]) -> None:
        """See `Dispatcher.cached`."""
        self._prefixes.note(grant, hashes)
        self._report(protocol.PrefixCached(grant.request.pool, grant.lease, grant.placed.backend, tuple(hashes)))

    def response_stored(self, response_id: str, backend: str, tenant: str) -> None:
        """Report a stored response, because clients of other members may refer to it."""
        self._report(protocol.ResponseStored(response_id, backend, tenant))
        if self._leader is not None:
            # Flush now: the client may refer to the response at another member as soon as it has the head.
            self._leader.flush()

    def exited(self, ended: RequestExit) -> None:
        """Report the exit of a request for the page of a leader in another process."""
        if self._leader is not None and not self._leader.local:
            self._leader.send(protocol.ExitReport(ended.later(-_now())))

    def _report(self, message: Sendable) -> None:
        if self._leader is None:
            self._unsent.append(message)
        else:
            self._leader.send(message)

    # --- events of leases ---------------------------------------------------------------------------------------------

    def apply(self, event: LeaseEvent, now: float) -> None:
        """Report an event of a lease. Without a leader, `RunningLease` reports its progress later."""
        run = self._runs[event.lease]
        match event:
            # The cases are tried in this order: the frequent ones come first.
            case Progress(_, output_tokens):
                run.output_tokens = output_tokens
            case Started():
                run.started_s = now
                self._prefixes.note(run.lease.grant, run.lease.grant.request.prefix)
            case Committed():
                run.committed = True
            case _:
                if isinstance(event, Returned):
                    del self._runs[event.lease]
                self._report(event)
                return
        if self._leader is not None:
            self._leader.send(event)

    def _ask(self, asked: _Waiting) -> None:
        if self._leader is not None:
            asked.sent = True
            self._leader.send(_admit(asked))

    # --- the leader ---------------------------------------------------------------------------------------------------

    @property
    def has_leader(self) -> bool:
        """Whether a leader is attached. In standalone mode, this process is attached as leader."""
        return self._leader is not None

    def attach(self, leader: Sender) -> None:
        """Use this leader from now on, and report all waiting requests and running leases to it."""
        now = _now()
        self._leader = leader
        while self._unsent:
            leader.send(self._unsent.popleft())
        waiting = {call: asked for call, asked in self._waiting.items() if not asked.granted.done()}
        leader.send(Resume(frozenset(waiting), frozenset(self._runs)))
        for prefix in self._prefixes.all():
            leader.send(prefix)
        for call, run in self._runs.items():
            leader.send(_running(call, run, now))
        for asked in waiting.values():
            if asked.sent and asked.entry is AdmissionKind.NEW:
                # A leader has already counted the request, which keeps its place in the queue.
                asked.entry = AdmissionKind.RESUMED
            self._ask(asked)
        leader.send(Resumed())

    def detach(self, leader: Sender | None = None) -> None:
        """Forget a leader that is lost or has stopped leading; None: the current leader."""
        if leader is None or self._leader is leader:
            self._leader = None

    def handle(self, message: protocol.LeaseGranted | protocol.CallRefused | protocol.LeaseCut) -> None:
        """Handle a message of the attached leader."""
        if isinstance(message, protocol.LeaseCut):
            # In the next turn of the loop, after the task has received its lease.
            asyncio.get_running_loop().call_soon(self._cut, message)
            return
        asked = self._waiting.get(message.call)
        if asked is None or asked.granted.done():
            return
        if isinstance(message, protocol.CallRefused):
            asked.granted.set_exception(Refused(message.outcome, message.message, message.retry_after_s))
        elif message.placed.backend not in self._backends:
            # Members find backends at different times.
            self._report(protocol.CancelCall(message.call))
            self._ask_again(asked, message.placed.backend)
        else:
            grant = Grant(
                message.call, as_stage(asked.request, message.stage), message.placed,
                max(asked.since_s, _now() + message.at_s), message.queued_ahead, message.why, message.left_s,
            )  # fmt: skip
            run = self._runs[message.call] = _Run(Lease(grant, self.apply))
            if self._leader is not None and not self._leader.local:
                self._leader.send(LeaseAcknowledged(message.call))
            asked.granted.set_result(run.lease)

    def _ask_again(self, asked: _Waiting, without: str) -> None:
        """Ask again with another call number, because the leader may still have a lease with the old number."""
        del self._waiting[asked.call]
        asked.call, asked.excluded = next(self._serial), asked.excluded | {without}
        self._waiting[asked.call] = asked
        self._ask(asked)

    def _cut(self, message: protocol.LeaseCut) -> None:
        run = self._runs.get(message.lease)
        # The leader repeats this message after a lost connection.
        if run is not None and not (run.lease.revoked if message.revoked else run.lease.preempted):
            run.lease.cut(revoked=message.revoked)

    def refuse_waiting(self, since_s: float) -> None:
        """Refuse waiting requests that are past their deadline, or all of them if the clock is past `since_s`."""
        now = _now()
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

    # --- drain --------------------------------------------------------------------------------------------------------

    def drain(self, *, finish_waiting: bool = False) -> None:
        """See `Dispatcher.drain`, for the requests of this member."""
        self.draining = True
        self._local.drain(finish_waiting=True)
        if finish_waiting:
            return
        self.granting = False
        for call, asked in self._waiting.items():
            if not asked.granted.done():
                self._report(protocol.CancelCall(call))
                asked.granted.set_exception(shutting_down())


def _admit(asked: _Waiting) -> protocol.Admit:
    return protocol.Admit(asked.call, relative_to(asked.request, _now()), asked.excluded, asked.entry)


def _running(call: int, run: _Run, now: float) -> RunningLease:
    grant = run.lease.grant
    started_age_s = None if run.started_s is None else now - run.started_s
    return RunningLease(
        call,
        relative_to(grant.request, now),
        grant.placed,
        now - grant.at_s,
        started_age_s,
        run.committed,
        run.output_tokens,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
