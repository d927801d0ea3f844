"""The leader's side of one member: its messages become calls of the dispatcher, and what it has is kept over a cut."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from llmproxy.core.domain import Outcome, Usage, Verdict
from llmproxy.remote.cluster.channel import Sender
from llmproxy.remote.cluster.protocol import (
    Drained,
    FromMember,
    Hello,
    Learned,
    LeaseTaken,
    PrefixHeld,
    Resume,
    Resumed,
    Running,
    aged,
)
from llmproxy.remote.workers import protocol
from llmproxy.remote.workers.session import SchedulerContext, WorkerSession
from llmproxy.scheduling.lease import Lease

GRACE_S = 10.0
"""How long the leases that a member has stay booked after its connection was lost: their answers go on."""
RETURNED_MAX = 4096
"""Leases that were given back, of which a prefix may still be reported as cached."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What members share beside leases.

    `stored` notes a response that was stored for a client of a member, and returns what holds; `settle` notes what the
    leader says of one, and `owners` are all that are known, the oldest first. `drained` are the backends that were
    drained by hand, and `drain` makes them these. `learned` is what a next leader should know, and `restore` takes it
    over, as it was told at that time.
    """

    stored: Callable[[protocol.ResponseStored], protocol.ResponseStored]
    settle: Callable[[protocol.ResponseStored], object]
    owners: Callable[[], Iterable[protocol.ResponseStored]]
    drained: Callable[[], Drained]
    drain: Callable[[Drained], None]
    learned: Callable[[], Learned]
    restore: Callable[[Learned, float], None]


class MemberSession(WorkerSession):
    """Serves one member over one connection after the other, until it is gone for good.

    `on_resumed` is called when the member has said what it has.
    """

    def __init__(self, context: SchedulerContext, hello: Hello, on_resumed: Callable[[], None]) -> None:
        super().__init__(context)
        self.hello = hello
        self.resumed = False
        self.over = False
        """Whether it has ended, and no connection can go on with it."""
        self._goes_on = False
        self._on_resumed = on_resumed
        self._sender: Sender | None = None
        self._untaken: set[int] = set()
        """Leases of which the member may not know."""
        self._started: set[int] = set()
        self._committed: set[int] = set()
        self._declared: set[str] = set()
        self._numbers: OrderedDict[int, int] = OrderedDict()
        self._grace: asyncio.TimerHandle | None = None

    # --- connections --------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the member can be reached."""
        return self._sender is not None

    def hears(self, sender: Sender) -> bool:
        """Whether this is the connection by which the member is there: what comes by others is of the past."""
        return self._sender is sender

    @property
    def leases(self) -> int:
        """Leases that the member has."""
        return len(self._leases)

    def attach(self, sender: Sender) -> None:
        """The member is there, perhaps again, and is going to say what it has."""
        self._sender, self.resumed = sender, False
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def detach(self, sender: Sender) -> None:
        """A connection was lost. What the member has stays booked for GRACE_S, unless it is back by another.

        What it waits for it asks again when it is back, with the age that it has then.
        """
        if self._sender is sender:
            self._sender = None
            self._grace = self._loop.call_later(GRACE_S, self.end)
            for call, task in list(self._calls.items()):
                if call not in self._leases or call in self._untaken:
                    task.cancel()

    def send(self, message: protocol.Message) -> None:
        if self._sender is not None:
            self._sender.send(message)

    def end(self, *, goes_on: bool = False) -> None:
        """Forget all that the member has: it is gone, or another process schedules and all that `goes_on`."""
        self._sender, self._goes_on = None, goes_on
        if self._grace is not None:
            self._grace.cancel()
        if not self.over:
            self.over = True
            self._lost()

    def _end_requests(self) -> None:
        # The member, and not the leader, tells of its requests.
        for request in list(self._requests.values()):
            if self._goes_on:
                self._pools.goes_on_elsewhere(request, self._loop.time())
            self._ended(request.id, None)
        self.gone.set()

    # --- messages -----------------------------------------------------------------------------------------------------

    def take(self, message: FromMember) -> None:
        """One message of the member."""
        match message:
            case protocol.Admit(call, request):
                self._declared.add(request.id)
                if call in self._leases:
                    # Its grant was lost with the connection.
                    self.send(self._granted(call, self._leases[call][0]))
                    self._cut_again(call)
                elif self._pools.shards.of(request.pool) != self.hello.shard:
                    why = f"Members differ about the lock of `{request.pool}`. Give all of them the same cluster.pools."
                    self.send(protocol.CallRefused(call, Outcome.REJECTED_NO_BACKENDS, why, None))
                elif call not in self._calls:
                    self._take(replace(message, request=aged(request, -self._loop.time())))
            case protocol.LeaseStarted(call) | protocol.LeaseCommitted(call):
                # Leases that could not be booked here have no entry.
                if call in self._leases:
                    (self._started if isinstance(message, protocol.LeaseStarted) else self._committed).add(call)
                    self._take(message)
            case LeaseTaken(call):
                self._untaken.discard(call)
            case protocol.LeaseProgress(call) | protocol.LeaseReturned(call) | protocol.LeaseRecomputing(call):
                if call in self._leases:
                    self._take(message)
            case protocol.RequestEnded():
                self._take(message)
            case protocol.ExitReport(ended):
                self._context.exits.record(ended.later(self._loop.time()))
            case protocol.PrefixCached(pool, call, backend, hashes):
                if call in self._numbers:
                    self._take(protocol.PrefixCached(pool, self._numbers[call], backend, hashes))
            # The kinds are tried in this order, and those from here on are rare.
            case Resume():
                self._resume(message)
            case Running():
                self._take_running(message)
            case Resumed():
                self.resumed = True
                for request_id in self._requests.keys() - self._declared:
                    # Its end was lost with the connection.
                    self._loop.call_soon(self._ended, request_id, None)
                self._on_resumed()
            case PrefixHeld(pool, backend, hashes):
                self._pools.restore_prefix(pool, backend, hashes)
            case Hello():
                # Its configuration was read again.
                self.hello = message
            case _:
                self._take(message)  # type: ignore[arg-type]

    def _book(self, key: int, lease: Lease) -> asyncio.Future[tuple[Verdict, Usage | None]]:
        self._numbers[key] = lease.grant.lease
        if len(self._numbers) > RETURNED_MAX + len(self._leases):
            self._numbers.popitem(last=False)
        return super()._book(key, lease)

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self._untaken.discard(key)
        self._started.discard(key)
        self._committed.discard(key)

    def _granted(self, call: int, lease: Lease) -> protocol.LeaseGranted:
        granted = super()._granted(call, lease)
        self._untaken.add(call)
        return replace(granted, lease=call, at_s=granted.at_s - self._loop.time())

    # --- what the member had before this connection -------------------------------------------------------------------

    def _resume(self, had: Resume) -> None:
        """Forget what the member has no more."""
        self._declared.clear()
        for call, task in list(self._calls.items()):
            # What was given back a moment ago is not over yet.
            given_back = call in self._leases and self._leases[call][1].done()
            if call not in had.waiting and call not in had.running and not given_back:
                task.cancel()

    def _take_running(self, running: Running) -> None:
        """Book a lease of an earlier leader, or note what came of one of ours while the member could not say it."""
        call, now = running.call, self._loop.time()
        self._declared.add(running.request.id)
        if call not in self._leases:
            request = aged(running.request, -now)
            lease = self._dispatcher.resume(request, running.placed, now - running.age_s)
            if lease is None:
                return
            self._requests[request.id] = request
            returned = self._book(call, lease)
            returned.add_done_callback(partial(self._given_back, call, lease))
            self._note_call(call, returned)
        self._untaken.discard(call)
        grant = self._leases[call][0].grant
        if running.started_age_s is not None and call not in self._started:
            self._started.add(call)
            self._dispatcher.started(grant, now - running.started_age_s)
        if running.committed and call not in self._committed:
            self._committed.add(call)
            self._dispatcher.committed(grant, now)
        if running.output_tokens:
            self._dispatcher.progress(grant, running.output_tokens, now)
        self._cut_again(call)

    def _cut_again(self, call: int) -> None:
        """Say that the attempt of a lease has to end, where that was so when it could not be said."""
        lease, _ = self._leases[call]
        if lease.on_cut is not None and (lease.revoked or lease.preempted):
            lease.on_cut()

    def _given_back(self, call: int, lease: Lease, returned: asyncio.Future[tuple[Verdict, Usage | None]]) -> None:
        self._forget(call)
        if not returned.cancelled():
            lease.verdict, lease.usage = returned.result()
        self._dispatcher.returned(lease)
