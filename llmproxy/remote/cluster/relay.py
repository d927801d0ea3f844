"""What the gateway of a member uses in place of the scheduler: it asks the leader, whoever that is at the moment.

Requests that wait and leases that run are kept here. When another member leads, or a connection was lost, the leader
is told of all of them, so that nothing that waits loses its turn by more than the switch, and no answer is cut.
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
from llmproxy.core.placement.staged import as_stage
from llmproxy.core.queueing.admission import refusal
from llmproxy.observe.exit import RequestExit
from llmproxy.remote.cluster.channel import Sender
from llmproxy.remote.cluster.protocol import LeaseTaken, PrefixHeld, Resume, Resumed, Running, aged
from llmproxy.remote.workers import protocol
from llmproxy.remote.workers.protocol import Message
from llmproxy.remote.workers.remote import Calls
from llmproxy.scheduling.dispatcher import Dispatcher, shutting_down
from llmproxy.scheduling.lease import Admitted, Lease

PREFIXES_MAX = 2_000
"""Prompts that a member remembers for the next leader."""
HASHES_MAX = 100_000
"""Blocks of all of these together: 50 MB of text, 4 MB of memory, a frame of 1 MB."""
UNSENT_MAX = 10_000
"""Reports that are kept while no leader is there. Of more, the oldest are lost: they correct estimates."""
NO_LEADER_RETRY_S = 1.0
KNOWN_S = 10.0
"""How much later than this member a leader may find a backend."""


class _Prefixes:
    """Which backend holds which blocks, of the requests of this member that were answered last."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = backends
        self._held: OrderedDict[int, tuple[PrefixHeld, int]] = OrderedDict()
        self._hashes = 0

    def note(self, grant: Grant, hashes: Sequence[int]) -> None:
        """The backend of a lease holds these blocks: its prompt, or that and the answer."""
        backend = self._backends.get(grant.placed.backend)
        if backend is None or not hashes:
            return
        self._forget(grant.lease)
        held = PrefixHeld(grant.request.pool, grant.placed.backend, tuple(hashes))
        self._held[grant.lease] = held, backend.processes
        self._hashes += len(held.hashes)
        while self._hashes > HASHES_MAX or len(self._held) > PREFIXES_MAX:
            self._forget(next(iter(self._held)))

    def _forget(self, lease: int) -> None:
        if lease in self._held:
            self._hashes -= len(self._held.pop(lease)[0].hashes)

    def all(self) -> Iterator[PrefixHeld]:
        """The oldest first. What a process held that is gone is left out."""
        for held, process in self._held.values():
            backend = self._backends.get(held.backend)
            if backend is not None and backend.processes == process:
                yield held


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that waits at the leader for a lease, since `at_s`. `told`: a leader was asked for it."""

    call: int
    request: Request
    excluded: frozenset[str]
    entry: AdmissionKind
    at_s: float
    told: bool = False
    granted: asyncio.Future[Lease] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(slots=True, eq=False)
class _Run:
    """A lease that runs, and what is known of its answer."""

    lease: Lease
    started_s: float | None = None
    committed: bool = False
    output_tokens: int = 0


class RelayDispatcher:
    """`Leasing`, by calls of the leader. Names and backends are those that this member found itself.

    `local` is the dispatcher of this process: it resolves names, and counts requests that need no lease. `backends` are
    those that this member can reach.
    """

    def __init__(self, local: Dispatcher, backends: Container[str]) -> None:
        self._local = local
        self._backends = backends
        self._serial = count(1)
        self._waiting: dict[int, _Asked] = {}
        self._runs: dict[int, _Run] = {}
        self._leader: Sender | None = None
        self._unsent: deque[Message] = deque(maxlen=UNSENT_MAX)
        self._prefixes = _Prefixes(local.pools.backends)
        self.calls: Callable[[], Calls | None] = lambda: None
        """Calls of another member that leads, beside those for leases; None where there is none."""
        self.draining = False
        self.granting = True

    @property
    def waiting(self) -> int:
        """Requests of this member that wait for a lease."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Leases of this member."""
        return len(self._runs)

    # --- for requests -------------------------------------------------------------------------------------------------

    def admit(
        self, request: Request, excluded: frozenset[str] = frozenset(), entry: AdmissionKind = AdmissionKind.NEW
    ) -> Admitted:
        """See `Dispatcher.admit`."""
        return Admitted(self, request, excluded, entry)

    async def wait(self, request: Request, excluded: frozenset[str], entry: AdmissionKind) -> Lease:
        """The lease of a request; see `admit`."""
        if not self.granting or (self.draining and entry is AdmissionKind.NEW):
            raise shutting_down()
        call = next(self._serial)
        asked = self._waiting[call] = _Asked(call, request, excluded, entry, _now())
        self._ask(asked)
        try:
            return await asked.granted
        except asyncio.CancelledError:
            # Also where it was granted in this turn: the leader then ends that lease.
            self._runs.pop(asked.call, None)
            self._report(protocol.CancelCall(asked.call))
            raise
        finally:
            del self._waiting[asked.call]

    def returned(self, lease: Lease) -> None:
        """A lease has ended."""
        del self._runs[lease.grant.lease]
        self._report(protocol.LeaseReturned(lease.grant.lease, lease.verdict, lease.usage))

    async def resolve(
        self, name: str | None, hold_s: float, body_bytes: int, key: str = "", beside: str | None = None
    ) -> Target:
        """See `Dispatcher.resolve`. What is held here is held by the leader too, which says what it needs.

        It goes on when both know who serves it: a leader refuses what it does not know yet.
        """
        ends_s = _now() + hold_s
        try:
            return await self._local.resolve(name, 0.0, body_bytes, key, beside)
        except Refused as refused:
            if refused.outcome is not Outcome.REJECTED_NO_BACKENDS or hold_s <= 0.0:
                raise

        def held(call: int) -> protocol.Resolve:
            return protocol.Resolve(call, name, ends_s - _now(), body_bytes, key, beside)

        asking = asyncio.create_task(self._ask_leader(held), name="held by the leader")
        try:
            target = await self._local.resolve(name, hold_s, body_bytes, key, beside)
            if not self.leads:
                await asyncio.wait([asking], timeout=min(KNOWN_S, ends_s - _now()))
            return target
        finally:
            asking.cancel()

    async def _ask_leader(self, message: Callable[[int], Message]) -> None:
        """Make this call of another member that leads, and of the next one where that ends, until one has answered."""
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
    def leads(self) -> bool:
        """Whether this member is the leader."""
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
        """A client of this member had a response stored, which clients of other members may name."""
        self._report(protocol.ResponseStored(response_id, backend, tenant))
        if self._leader is not None:
            # At once: its client may name it to another member as soon as it has the head.
            self._leader.flush()

    def exited(self, ended: RequestExit) -> None:
        """A request of this member has ended, for the page of the leader. Only one that is elsewhere is told."""
        if self._leader is not None and not self._leader.local:
            self._leader.send(protocol.ExitReport(ended.later(-_now())))

    def _report(self, message: Message) -> None:
        if self._leader is None:
            self._unsent.append(message)
        else:
            self._leader.send(message)

    # --- events of leases ---------------------------------------------------------------------------------------------

    def recomputing(self, grant: Grant) -> None:
        self._report(protocol.LeaseRecomputing(grant.lease))

    def started(self, grant: Grant, now: float) -> None:
        self._runs[grant.lease].started_s = now
        self._prefixes.note(grant, grant.request.prefix)
        self._say(protocol.LeaseStarted(grant.lease))

    def committed(self, grant: Grant, now: float) -> None:
        del now
        self._runs[grant.lease].committed = True
        self._say(protocol.LeaseCommitted(grant.lease))

    def progress(self, grant: Grant, output_tokens: int, now: float) -> None:
        del now
        self._runs[grant.lease].output_tokens = output_tokens
        self._say(protocol.LeaseProgress(grant.lease, output_tokens))

    def _ask(self, asked: _Asked) -> None:
        if self._leader is not None:
            asked.told = True
            self._leader.send(_admit(asked))

    def _say(self, message: Message) -> None:
        """Send what `Running` tells a leader that is not there yet."""
        if self._leader is not None:
            self._leader.send(message)

    # --- the leader ---------------------------------------------------------------------------------------------------

    @property
    def led(self) -> bool:
        """Whether there is a leader to ask."""
        return self._leader is not None

    def follow(self, leader: Sender) -> None:
        """Ask this leader from now on, and tell it of everything that this member has."""
        now = _now()
        self._leader = leader
        while self._unsent:
            leader.send(self._unsent.popleft())
        waiting = {call: asked for call, asked in self._waiting.items() if not asked.granted.done()}
        leader.send(Resume(frozenset(waiting), frozenset(self._runs)))
        for held in self._prefixes.all():
            leader.send(held)
        for call, run in self._runs.items():
            leader.send(_running(call, run, now))
        for asked in waiting.values():
            if asked.told and asked.entry is AdmissionKind.NEW:
                # It was counted, and no other request may take its place now.
                asked.entry = AdmissionKind.RESUMED
            self._ask(asked)
        leader.send(Resumed())

    def detach(self, leader: Sender | None = None) -> None:
        """This leader, or whoever leads, is gone or leads no more."""
        if leader is None or self._leader is leader:
            self._leader = None

    def take(self, message: protocol.LeaseGranted | protocol.CallRefused | protocol.LeaseCut) -> None:
        """One message of the leader that is followed."""
        if isinstance(message, protocol.LeaseCut):
            # In the next turn, after the task that was granted the lease knows of it.
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
                max(asked.at_s, _now() + message.at_s), message.queued_ahead, message.why, message.left_s,
            )  # fmt: skip
            run = self._runs[message.call] = _Run(Lease(grant, self))
            if self._leader is not None and not self._leader.local:
                self._leader.send(LeaseTaken(message.call))
            asked.granted.set_result(run.lease)

    def _ask_again(self, asked: _Asked, without: str) -> None:
        """Ask under another number, as the leader may still have a lease under this one."""
        del self._waiting[asked.call]
        asked.call, asked.excluded = next(self._serial), asked.excluded | {without}
        self._waiting[asked.call] = asked
        self._ask(asked)

    def _cut(self, message: protocol.LeaseCut) -> None:
        run = self._runs.get(message.lease)
        # It may be said again after a connection was lost.
        if run is not None and not (run.lease.revoked if message.revoked else run.lease.preempted):
            run.lease.cut(revoked=message.revoked)

    def refuse_waiting(self, since_s: float) -> None:
        """Without a leader: refuse what is past its deadline, and everything where that is so since `since_s`."""
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


def _admit(asked: _Asked) -> protocol.Admit:
    return protocol.Admit(asked.call, aged(asked.request, _now()), asked.excluded, asked.entry)


def _running(call: int, run: _Run, now: float) -> Running:
    grant = run.lease.grant
    started_age_s = None if run.started_s is None else now - run.started_s
    return Running(
        call, aged(grant.request, now), grant.placed, now - grant.at_s, started_age_s, run.committed, run.output_tokens
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
