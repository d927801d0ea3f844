"""Leader side: the session of one member. Its leases survive a lost connection."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from llmproxy.core.domain import Outcome
from llmproxy.core.lease_events import Committed, LeaseEvent, Progress, Returned, Started
from llmproxy.remote.cluster.channel import Sender
from llmproxy.remote.cluster.protocol import (
    Drained,
    FromMember,
    Hello,
    Learned,
    LeaseAcknowledged,
    RememberedPrefix,
    Resume,
    Resumed,
    RunningLease,
    relative_to,
)
from llmproxy.remote.workers import protocol
from llmproxy.remote.workers.session import SchedulerContext, WorkerSession
from llmproxy.scheduling.lease import Lease

GRACE_S = 10.0
"""How long the leases of a member stay booked after its connection was lost. Their responses continue meanwhile."""
RETURNED_MAX = 4096
"""The number of returned leases that are remembered, because a `PrefixCached` may still arrive for them."""


@dataclass(frozen=True, slots=True)
class MemberCallbacks:
    """Callbacks for the state of one shard that members share, except for leases."""

    record_stored: Callable[[protocol.ResponseStored], protocol.ResponseStored]
    """As leader: records a stored response of a member. Returns the valid owner: the first report wins."""
    record_owner: Callable[[protocol.ResponseStored], object]
    """As follower: records the owner that the leader announces."""
    stored_responses: Callable[[], Iterable[protocol.ResponseStored]]
    """Returns all known stored responses, oldest first."""
    drained: Callable[[], Drained]
    """Returns the backends that an operator has drained."""
    apply_drained: Callable[[Drained], None]
    """Drains and undrains backends as the leader announces."""
    learned: Callable[[], Learned]
    """Returns the learned limits and capacities."""
    restore_learned: Callable[[Learned, float], None]
    """Loads announced limits and capacities, with the loop time at which they were received."""


class MemberSession(WorkerSession):
    """Serves one member over successive connections, until the member is gone.

    `on_resumed` is called after the `Resumed` of the member.
    """

    def __init__(self, context: SchedulerContext, hello: Hello, on_resumed: Callable[[], None]) -> None:
        super().__init__(context)
        self.hello = hello
        self.resumed = False
        """Whether the member has reported its requests and leases."""
        self.over = False
        """Whether the session has ended; a reconnecting member then gets a new session."""
        self._requests_continue = False
        self._on_resumed = on_resumed
        self._sender: Sender | None = None
        self._unacknowledged: set[int] = set()
        """Granted leases that the member has not acknowledged."""
        self._started: set[int] = set()
        self._committed: set[int] = set()
        self._declared: set[str] = set()
        """Ids of the requests that the member has reported on this connection."""
        self._numbers: OrderedDict[int, int] = OrderedDict()
        """The member's call number of a lease -> the lease number of this dispatcher."""
        self._grace: asyncio.TimerHandle | None = None

    # --- connections --------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the member has a connection."""
        return self._sender is not None

    def is_attached_to(self, sender: Sender) -> bool:
        """Whether this is the current connection of the member. Messages of older connections are stale."""
        return self._sender is sender

    @property
    def leases(self) -> int:
        """Number of leases of the member."""
        return len(self._leases)

    def attach(self, sender: Sender) -> None:
        """Use a new connection of the member, on which it will report its requests and leases."""
        self._sender, self.resumed = sender, False
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def detach(self, sender: Sender) -> None:
        """Note a lost connection. The leases of the member stay booked for GRACE_S.

        Pending calls are cancelled. After reconnecting, the member sends them again with their current age.
        """
        if self._sender is sender:
            self._sender = None
            self._grace = self._loop.call_later(GRACE_S, self.end)
            for call, task in list(self._calls.items()):
                if call not in self._leases or call in self._unacknowledged:
                    task.cancel()

    def send(self, message: protocol.Message) -> None:
        if self._sender is not None:
            self._sender.send(message)

    def end(self, *, requests_continue: bool = False) -> None:
        """End the session. `requests_continue`: the member goes on, and another leader takes its requests over."""
        self._sender, self._requests_continue = None, requests_continue
        if self._grace is not None:
            self._grace.cancel()
        if not self.over:
            self.over = True
            self._lost()

    def _end_requests(self) -> None:
        # The member itself logs its requests.
        for request in list(self._requests.values()):
            if self._requests_continue:
                self._pools.goes_on_elsewhere(request, self._loop.time())
            self._ended(request.id, None)
        self.gone.set()

    # --- messages -----------------------------------------------------------------------------------------------------

    def handle(self, message: FromMember) -> None:
        """Handle a message of the member."""
        match message:
            case protocol.Admit(call, request):
                self._declared.add(request.id)
                if call in self._leases:
                    # The grant was lost with the connection.
                    self.send(self._grant_message(call, self._leases[call][0]))
                    self._repeat_cut(call)
                elif self._pools.shards.for_pool(request.pool) != self.hello.shard:
                    why = f"Members differ about the lock of `{request.pool}`. Give all of them the same cluster.pools."
                    self.send(protocol.CallRefused(call, Outcome.REJECTED_NO_BACKENDS, why, None))
                elif call not in self._calls:
                    self._handle(replace(message, request=relative_to(request, -self._loop.time())))
            case LeaseEvent(call):
                # A lease that this leader could not book has no entry.
                if call in self._leases:
                    self._apply(message)
            case LeaseAcknowledged(call):
                self._unacknowledged.discard(call)
            case protocol.RequestEnded():
                self._handle(message)
            case protocol.ExitReport(ended):
                self._context.exits.record(ended.later(self._loop.time()))
            case protocol.PrefixCached(pool, call, backend, hashes):
                if call in self._numbers:
                    self._handle(protocol.PrefixCached(pool, self._numbers[call], backend, hashes))
            # The cases are tried in this order: the rare ones come last.
            case Resume():
                self._resume(message)
            case RunningLease():
                self._resume_lease(message)
            case Resumed():
                self.resumed = True
                for request_id in self._requests.keys() - self._declared:
                    # The request ended while the connection was lost.
                    self._loop.call_soon(self._ended, request_id, None)
                self._on_resumed()
            case RememberedPrefix(pool, backend, hashes):
                self._pools.restore_prefix(pool, backend, hashes)
            case Hello():
                # The member has reloaded its configuration.
                self.hello = message
            case _:
                self._handle(message)  # type: ignore[arg-type]

    def _apply(self, event: LeaseEvent) -> None:
        call = event.lease
        if isinstance(event, Started):
            self._started.add(call)
        elif isinstance(event, Committed):
            self._committed.add(call)
        super()._apply(event)

    def _book(self, key: int, lease: Lease) -> asyncio.Future[Returned]:
        self._numbers[key] = lease.grant.lease
        if len(self._numbers) > RETURNED_MAX + len(self._leases):
            self._numbers.popitem(last=False)
        return super()._book(key, lease)

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self._unacknowledged.discard(key)
        self._started.discard(key)
        self._committed.discard(key)

    def _grant_message(self, call: int, lease: Lease) -> protocol.LeaseGranted:
        message = super()._grant_message(call, lease)
        self._unacknowledged.add(call)
        return replace(message, lease=call, at_s=message.at_s - self._loop.time())

    # --- resuming a member --------------------------------------------------------------------------------------------

    def _resume(self, resume: Resume) -> None:
        """Cancel calls that the member does not report any more."""
        self._declared.clear()
        for call, task in list(self._calls.items()):
            # The task of a lease that was just returned has not finished yet.
            given_back = call in self._leases and self._leases[call][1].done()
            if call not in resume.waiting and call not in resume.running and not given_back:
                task.cancel()

    def _resume_lease(self, running: RunningLease) -> None:
        """Book a lease that an earlier leader granted, or catch up with the progress of a lease of this leader."""
        call, now = running.call, self._loop.time()
        self._declared.add(running.request.id)
        if call not in self._leases:
            request = relative_to(running.request, -now)
            resumed = self._dispatcher.resume(request, running.placed, now - running.age_s)
            if resumed is None:
                return
            self._requests[request.id] = request
            returned = self._book(call, resumed)
            returned.add_done_callback(partial(self._given_back, call, resumed))
            self._note_call(call, returned)
        self._unacknowledged.discard(call)
        lease, _ = self._leases[call]
        number = lease.grant.lease
        if running.started_age_s is not None and call not in self._started:
            self._started.add(call)
            lease.apply(Started(number), now - running.started_age_s)
        if running.committed and call not in self._committed:
            self._committed.add(call)
            lease.apply(Committed(number), now)
        if running.output_tokens:
            lease.apply(Progress(number, running.output_tokens), now)
        self._repeat_cut(call)

    def _repeat_cut(self, call: int) -> None:
        """Send the `LeaseCut` of a lease again, because the first may have been lost with the connection."""
        lease, _ = self._leases[call]
        if lease.on_cut is not None and (lease.revoked or lease.preempted):
            lease.on_cut()

    def _given_back(self, call: int, lease: Lease, returned: asyncio.Future[Returned]) -> None:
        self._forget(call)
        number = lease.grant.lease
        event = Returned(number, lease.verdict) if returned.cancelled() else replace(returned.result(), lease=number)
        lease.apply(event, self._loop.time())
