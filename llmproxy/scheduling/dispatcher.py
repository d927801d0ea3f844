"""Runs the core on an event loop: runs scheduling passes, hands out leases, cancels and drains."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf

from llmproxy.core.backends.catalogue import Aliases, Target
from llmproxy.core.backends.health import EjectionEvent
from llmproxy.core.domain import (
    AdmissionKind,
    Decision,
    Drop,
    Grant,
    GrantReason,
    Listing,
    Outcome,
    Placed,
    Preempt,
    Reading,
    Refused,
    Request,
    Revoke,
    Trouble,
    Verdict,
    Waited,
)
from llmproxy.core.lease_events import LeaseEvent, Returned, Started
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.admission import refusal
from llmproxy.lifecycle.paced import PacedCalls
from llmproxy.scheduling.lease import Lease

DRAIN_RETRY_S = 1.0


@dataclass(slots=True)
class _Unresolved:
    """A model name that no backend lists yet, and the requests that wait for it."""

    requests: int = 0
    resolved: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Dispatcher:
    """Passes events to the core and carries out its decisions, on one event loop.

    All events of one iteration of the event loop are decided in one scheduling pass. A request that arrives while no
    other request waits and no pass is due is decided at once.
    """

    pools: Pools
    # Called after each scheduling pass with its duration in seconds.
    on_decision: Callable[[float], None] = lambda _: None
    # Called with the name of a backend, and the event of its ejection.
    on_ejection: Callable[[str, EjectionEvent], None] = lambda *_: None
    # Gets each request that had to wait and leaves without a backend, and why it waited.
    on_left: Callable[[Request, Waited], None] = lambda *_: None
    # Called after backends, their models or the drain may have changed, before the next pass.
    on_change: list[Callable[[], None]] = field(default_factory=list)
    draining: bool = False  # Whether the process shuts down.
    admitting: bool = True  # Whether new requests are admitted.
    # Whether waiting requests and further attempts still get leases; if False, they are refused.
    granting: bool = True
    granted: Counter[int] = field(default_factory=Counter)  # Band -> number of grants since the start.
    inversions: int = 0  # Number of grants since the start that a waiting request of a higher band could have used.
    # Request id -> the waiting request, and the future of its lease.
    _waiting: dict[str, tuple[Request, asyncio.Future[Lease]]] = field(default_factory=dict)
    _leases: dict[int, Lease] = field(default_factory=dict)
    _scheduled: bool = False  # Whether a pass is due in the next iteration of the event loop.
    _until_s: float = inf
    _cuts: PacedCalls = field(default_factory=PacedCalls)
    _closed: bool = False
    _timer: asyncio.TimerHandle | None = None
    nameless: int = 0  # Number of requests in `resolve`. They wait until a backend lists their model name.
    _nameless_bytes: int = 0  # Body bytes of the requests in `nameless`.
    _unresolved: dict[str | None, _Unresolved] = field(default_factory=dict)
    _aliases: Aliases = field(init=False)  # The aliases at the last wake-up of `nameless` requests.
    _emptied: dict[str, asyncio.Event] = field(default_factory=dict)  # Backend -> event for `emptied`.
    # Backend -> callbacks that cut the direct requests to this backend.
    _direct: dict[str, set[Callable[[], None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._aliases = self.pools.catalogue.aliases

    # --- for requests -------------------------------------------------------------------------------------------------

    async def admit(
        self, request: Request, excluded: frozenset[str] = frozenset(), entry: AdmissionKind = AdmissionKind.NEW
    ) -> Lease:
        """Waits for the lease of a request. The caller gives it back. Safe to cancel.

        `entry`: whether this is a new request or a further attempt. Raises Refused if the request is not admitted, or
        is dropped from the waiting room.
        """
        if not self.granting or (entry is AdmissionKind.NEW and not self.admitting):
            raise shutting_down()
        loop = asyncio.get_running_loop()
        self.pools.submit(request, loop.time(), excluded, entry)
        granted: asyncio.Future[Lease] = loop.create_future()
        self._waiting[request.id] = request, granted
        if len(self._waiting) == 1 and not self._scheduled:
            # No other request waits. The next iteration of a busy event loop would delay the first token by a
            # millisecond.
            self._decide()
        else:
            self._decide_soon()
        try:
            return await granted
        except asyncio.CancelledError:
            self._abandon(request, granted)
            raise

    def resume(self, request: Request, placed: Placed, at_s: float) -> Lease | None:
        """Returns the lease of an attempt that another scheduler granted at `at_s`.

        Returns None if this process does not know the backend in the pool of the request.
        """
        number = self.pools.resume(request, placed, at_s)
        if number is None:
            return None
        lease = Lease(Grant(number, request, placed, at_s, 0, GrantReason((), 0, (), 0)), self.apply)
        self._leases[number] = lease
        return lease

    def _abandon(self, request: Request, granted: asyncio.Future[Lease]) -> None:
        """Handles a client that left: cancels its waiting request, or returns the lease if it was already granted."""
        if request.id in self._waiting:
            del self._waiting[request.id]
            self._note_left(request, self.pools.cancel(request))
        elif granted.done() and not granted.cancelled() and granted.exception() is None:
            self.apply(Returned(granted.result().grant.lease, Verdict.CLIENT_GONE), loop_time())
        self._decide_soon()

    def _note_left(self, request: Request, waited: Waited | None) -> None:
        if waited is not None:
            self.on_left(request, waited)

    def _note_emptied(self) -> None:
        for backend in [name for name in self._emptied if self._is_empty(name)]:
            self._emptied.pop(backend).set()

    @contextmanager
    def direct(self, backend: str, cut: Callable[[], None]) -> Iterator[None]:
        """Counts a request to `backend` as in flight there for the duration of the block.

        The request does not wait and adds no load, because its answer is already computed. `cut` is called if the
        backend can answer no more. Raises Refused while the proxy drains, or if the backend was removed.
        """
        if self.draining:
            raise shutting_down()
        if backend not in self.pools.backends:
            raise Refused(Outcome.REJECTED_NO_BACKENDS, "The backend was removed.")
        cuts = self._direct.setdefault(backend, set())
        cuts.add(cut)
        try:
            yield
        finally:
            cuts.remove(cut)
            if not cuts:
                del self._direct[backend]
            self._note_emptied()

    # --- events of leases ---------------------------------------------------------------------------------------------

    def apply(self, event: LeaseEvent, now: float) -> None:
        """Applies an event of a lease. `Returned` takes the lease back."""
        kind = type(event)
        if kind is Returned:
            del self._leases[event.lease]
        self.pools.apply(event, now)
        if self._emptied:
            self._note_emptied()
        # After a first token, the backend may take another prompt, or may have passed its probe.
        if kind is Returned or (kind is Started and self._waiting):
            self._decide_soon()

    def ended(self, request: Request, met: bool | None) -> None:
        """Records the end of a request. `met`: whether it met its objective; None if that is unknown."""
        self.pools.ended(request, met, loop_time())
        if self._emptied:
            self._note_emptied()

    def cached(self, pool: str, lease: int, backend: str, hashes: Sequence[int]) -> None:
        """Records that a backend has cached the prompt and the answer of an ended lease, given as block hashes."""
        self.pools.cached(pool, lease, backend, hashes)

    async def resolve(
        self, name: str | None, no_backend_wait_s: float, body_bytes: int, key: str = "", beside: str | None = None
    ) -> Target:
        """Returns the target of a model name. Waits up to `no_backend_wait_s` until a backend serves the name.

        Before the first model list of any backend, the wait is at most `startup_wait_s`, except for names in
        `scaling.pools`. Waiting requests are in no pool's waiting room, but `requests_max` and `bytes_max` of a waiting
        room apply to all of them together. Safe to cancel.

        `key` and `beside` choose among the targets of an alias; see the catalogue. Raises Refused if no backend serves
        the name, none came up in time, the limits are reached, or the proxy drains.
        """
        limits = self.pools.settings.queue
        catalogue = self.pools.catalogue
        if name is not None and (target := catalogue.targets.get(name)) is not None:
            return target
        meant = catalogue.resolve_alias(name, key, beside)
        expected = catalogue.ever_read or meant in catalogue.named
        ends_s = loop_time() + (no_backend_wait_s if expected else min(no_backend_wait_s, limits.startup_wait_s))
        while True:
            try:
                return catalogue.resolve(name, key, beside)
            except Refused as refused:
                if refused.outcome is not Outcome.REJECTED_NO_BACKENDS or loop_time() >= ends_s:
                    raise
                if self.draining:
                    raise shutting_down() from None
                if self.nameless >= limits.requests_max or self._nameless_bytes + body_bytes > limits.bytes_max:
                    raise
            meant = catalogue.resolve_alias(name, key, beside)
            named = meant if meant in catalogue.named else None
            unresolved = self._unresolved.setdefault(meant, _Unresolved())
            unresolved.requests += 1
            self.nameless += 1
            self._nameless_bytes += body_bytes
            self.pools.scaling.count_on_hold(named, 1, loop_time())
            try:
                async with asyncio.timeout_at(ends_s):
                    await unresolved.resolved.wait()
            except TimeoutError:
                pass
            finally:
                self.nameless -= 1
                self._nameless_bytes -= body_bytes
                self.pools.scaling.count_on_hold(named, -1, loop_time())
                unresolved.requests -= 1
                if not unresolved.requests and not unresolved.resolved.is_set():
                    del self._unresolved[meant]

    # --- for pollers --------------------------------------------------------------------------------------------------

    def answered(self, backend: str) -> None:
        self.pools.backends[backend].answered(loop_time())
        self._decide_soon()

    def observe(self, backend: str, reading: Reading) -> None:
        self.pools.observe(backend, reading)
        self._decide_soon()

    def published(self, backend: str, limit: int) -> None:
        self.pools.backends[backend].published(limit)
        self._decide_soon()

    def listed(self, backend: str, listing: Listing) -> None:
        self.pools.listed(backend, listing)
        self._wake_nameless()
        self._decide_soon()

    def timed_out(self, backend: str) -> None:
        self.pools.timed_out(backend, loop_time())
        self._note_silent()

    def troubled(self, backend: str, trouble: Trouble, detail: str) -> None:
        del detail
        gone, held = self.pools.troubled(backend, trouble), self.pools.backends[backend]
        # A backend that is down may still send bytes, so its direct requests go on, unless it is drained.
        if gone or (held.drained and held.health.down):
            for cut in tuple(self._direct.get(backend, ())):
                cut()
        self._note_silent()

    def _note_silent(self) -> None:
        if self._unresolved and self.pools.externals:
            self._wake_nameless()
        self._decide_soon()

    # --- for operators ------------------------------------------------------------------------------------------------

    def reconsider(self) -> None:
        """Schedules a pass after a change, and wakes requests that wait for a model name."""
        self._wake_nameless()
        self._decide_soon()

    def expects_backends(self, sources: Collection[str]) -> None:
        """Records the sources that discovery still waits for, so that a backend for an unknown name may appear."""
        self.pools.catalogue.expecting = sources
        self.reconsider()

    def leaves(self, backend: str, *, moves: bool = False) -> None:
        """Sets `Lease.leaving` on the leases of a drained backend, whose end then counts as planned and not as a crash.

        With `moves`, `Lease.hung` is set too: attempts that another backend can continue end now.
        """
        for lease in self._leases.values():
            if lease.backend == backend:
                self._cuts.add(partial(lease.cut, hung=moves, leaving=True))

    async def emptied(self, backend: str) -> None:
        """Waits until nothing is in flight on a backend, and no other backend may still fetch a prompt from it.

        Drain the backend first. Otherwise it may get new requests meanwhile. Safe to cancel.
        """
        try:
            while not self._is_empty(backend):
                emptied = self._emptied.setdefault(backend, asyncio.Event())
                # The expiry of an unfetched prompt is no event, hence the timeout.
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(self.pools.backends[backend].kv_pinned_until_s(loop_time())):
                        await emptied.wait()
        finally:
            # The backend may be removed now. Another waiter looks again.
            if (waited := self._emptied.pop(backend, None)) is not None:
                waited.set()

    # --- decisions ----------------------------------------------------------------------------------------------------

    def decide_until(self, until_s: float) -> None:
        """Stops decisions at `until_s`, because another process may decide from then on."""
        self._until_s = until_s
        self._decide_soon()

    @property
    def decides(self) -> bool:
        """Whether no other process decides."""
        return loop_time() < self._until_s

    def _decide_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        """Runs the scheduling passes that are due, and carries out their decisions.

        Then reports exceptions of policies and health events, and sets the timer for the next pass.
        """
        self._scheduled = False
        if self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now >= self._until_s:
            return
        for decision in self.pools.decide(now):
            self._carry_out(decision)
        for fault, unreported in self.pools.faults.take(now) if self.pools.faults.noted else ():
            more = f", and {unreported} times since the last report" if unreported else ""
            loop.call_exception_handler({"message": f"a scheduling policy failed{more}", "exception": fault})
        after = loop.time()
        self.on_decision(after - now)
        for backend, event in self.pools.take_health_events() if self.pools.health_events else ():
            self.on_ejection(backend, event)
        wakeup_s = self.pools.next_wakeup(after)
        if wakeup_s is None:
            return
        if wakeup_s <= after:
            self._decide_soon()
        else:
            self._timer = loop.call_at(wakeup_s, self._decide)

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Grant):
            self.granted[decision.request.band] += 1
            self.inversions += decision.why.inverted
            lease = self._leases[decision.lease] = Lease(decision, self.apply)
            _, granted = self._waiting.pop(decision.request.id)
            # The client left in this iteration of the event loop: its future is cancelled, so `_abandon` cannot give
            # the grant back.
            if granted.done():
                self.apply(Returned(decision.lease, Verdict.CLIENT_GONE), decision.at_s)
            else:
                granted.set_result(lease)
        elif isinstance(decision, Drop):
            _, granted = self._waiting.pop(decision.request.id)
            self._note_left(decision.request, decision.waited)
            if not granted.done():
                granted.set_exception(refusal(decision))
        else:
            held = self._leases.get(decision.lease)
            if held is not None:
                # The end of a backend may revoke thousands of leases at once.
                hung, preempted = isinstance(decision, Revoke) and decision.hung, isinstance(decision, Preempt)
                revoked = not (hung or preempted)
                self._cuts.add(partial(held.cut, revoked=revoked, hung=hung, preempted=preempted))

    # --- drain --------------------------------------------------------------------------------------------------------

    def drain(self, *, finish_waiting: bool = False, admitting: bool = False) -> None:
        """Refuses new and waiting requests with the outcome `draining`. Leases go on.

        With `finish_waiting`, requests in waiting rooms and their further attempts are still granted, until a second
        call without it. With `admitting`, new requests are still admitted: those of other members of a cluster.
        """
        self.draining, self.admitting = True, admitting
        self._wake_nameless()
        if finish_waiting:
            return
        self.granting = False
        for request, granted in list(self._waiting.values()):
            del self._waiting[request.id]
            self._note_left(request, self.pools.cancel(request))
            if not granted.done():
                granted.set_exception(shutting_down())

    def _wake_nameless(self) -> None:
        """Wakes the requests that wait for a model name whose state may have changed."""
        catalogue = self.pools.catalogue
        if self.draining or catalogue.aliases is not self._aliases:
            resolved = list(self._unresolved)
        else:
            # While names may still be added, only served and external names are resolved.
            asked = self._unresolved.keys()
            known = catalogue.served.keys() | catalogue.external | {None}
            among = asked if catalogue.complete else asked & known
            resolved = [name for name in among if not catalogue.awaits(name)]
        self._aliases = catalogue.aliases
        for name in resolved:
            self._unresolved.pop(name).resolved.set()
        for changed in self.on_change:
            changed()

    @property
    def leases(self) -> int:
        return len(self._leases)

    def in_flight(self, backend: str) -> int:
        return len(self.pools.backends[backend].bookings) + len(self._direct.get(backend, ()))

    def _is_empty(self, backend: str) -> bool:
        """Returns whether nothing is in flight on a backend, and it keeps no prompt for another backend."""
        return not self.in_flight(backend) and self.pools.backends[backend].kv_pinned_until_s(loop_time()) is None

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def shutting_down() -> Refused:
    """Returns the refusal of requests while the proxy shuts down."""
    return Refused(Outcome.DRAINING, "The proxy is shutting down. Try again.", DRAIN_RETRY_S)
