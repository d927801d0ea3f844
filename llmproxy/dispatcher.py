"""The async shell of the core: `admit()` lends a lease, one timer, one coalesced decision, cancellation, drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.backends.health import EjectionEvent
from llmproxy.core.domain import (
    Decision,
    Drop,
    Entry,
    Grant,
    Listing,
    Outcome,
    Preempt,
    Reading,
    Refused,
    Request,
    Trouble,
    Usage,
    Verdict,
)
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.admission import refusal

DRAIN_RETRY_S = 1.0


class Progresses(Protocol):
    """Who is told how the attempt of a lease goes on, at `now` on the clock of the loop."""

    def started(self, grant: Grant, now: float) -> None: ...
    def committed(self, grant: Grant, now: float) -> None: ...
    def progress(self, grant: Grant, output_tokens: int, now: float) -> None: ...


class Lender(Protocol):
    """Who lends leases, and takes them back."""

    async def wait(self, request: Request, excluded: frozenset[str], entry: Entry) -> Lease: ...

    def returned(self, lease: Lease) -> None: ...


class Leasing(Protocol):
    """What the walk of a request needs of a dispatcher, which may be one in another process; see `Dispatcher`."""

    def admit(self, request: Request, excluded: frozenset[str] = frozenset(), entry: Entry = Entry.NEW) -> Admitted: ...

    async def resolve(self, name: str | None, hold_s: float, body_bytes: int) -> Target: ...

    def direct(self, backend: str, cut: Callable[[], None]) -> AbstractContextManager[None]: ...

    def ended(self, request: Request, met: bool | None) -> None: ...

    def cached(self, grant: Grant, hashes: Sequence[int]) -> None: ...

    @property
    def draining(self) -> bool: ...

    @property
    def granting(self) -> bool: ...


@dataclass(slots=True)
class Lease:
    """The right to use one backend for one attempt; returned exactly once, by leaving the block that lent it.

    The holder says what became of the attempt by setting `verdict`; a block left without a word counts as left by its
    client. `on_cut` is called when the attempt is to end at once: `revoked`, because the backend is known to be gone
    and nothing more will come from it, or `preempted`, because a request of a higher band needs the room. A preempted
    lease whose answer has begun may be kept.
    """

    grant: Grant
    _told: Progresses
    verdict: Verdict = Verdict.CLIENT_GONE
    usage: Usage | None = None
    on_cut: Callable[[], None] | None = None
    revoked: bool = False
    preempted: bool = False

    @property
    def backend(self) -> str:
        return self.grant.placed.backend

    def started(self) -> None:
        """The first token of the answer arrived."""
        self._told.started(self.grant, _now())

    def committed(self) -> None:
        """The first byte of the answer is on its way to the client."""
        self._told.committed(self.grant, _now())

    def progress(self, output_tokens: int) -> None:
        """About so many tokens were answered by now."""
        self._told.progress(self.grant, output_tokens, _now())

    def cut(self, *, revoked: bool) -> None:
        """Ask the holder to end the attempt."""
        self.revoked, self.preempted = self.revoked or revoked, self.preempted or not revoked
        if self.on_cut is not None:
            self.on_cut()


@dataclass(slots=True)
class _Waiter:
    request: Request
    granted: asyncio.Future[Grant]


@dataclass(slots=True)
class _Unresolved:
    """A name that nobody lists yet, and how many requests wait for it; None stands for the only model there is."""

    requests: int = 0
    settled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Dispatcher:
    """Hands the core its events and carries out its decisions, on one event loop.

    Events of one turn of the loop are decided together, once; a request that comes while nobody waits, and nothing else
    is to be decided, is decided about at once. `on_decision` is told how long each pass took, in
    seconds, and `on_news` which backend was ejected or is back. `on_change` hears that the fleet, what it lists or the
    drain may have changed, before any decision that follows from it.
    """

    pools: Pools
    on_decision: Callable[[float], None] = lambda _: None
    on_news: Callable[[str, EjectionEvent], None] = lambda *_: None
    on_change: Callable[[], None] = lambda: None
    _waiting: dict[str, _Waiter] = field(default_factory=dict)
    _leases: dict[tuple[str, int], Lease] = field(default_factory=dict)
    _scheduled: bool = False
    _timer: asyncio.TimerHandle | None = None
    _draining: bool = False
    _granting: bool = True
    nameless: int = 0
    _nameless_bytes: int = 0
    _unresolved: dict[str | None, _Unresolved] = field(default_factory=dict)
    _emptied: dict[str, asyncio.Event] = field(default_factory=dict)
    _direct: dict[str, set[Callable[[], None]]] = field(default_factory=dict)

    # --- the face that requests see ---------------------------------------------------------------------------------

    def admit(self, request: Request, excluded: frozenset[str] = frozenset(), entry: Entry = Entry.NEW) -> Admitted:
        """Wait for a backend, hold it for the length of the block, and give it back however the block ends.

        `entry` tells a new attempt of a request that was admitted before from a new request. Entering the block raises
        Refused when the request is not let in, or has to leave the waiting room.
        """
        return Admitted(self, request, excluded, entry)

    def returned(self, lease: Lease) -> None:
        """A lease is over."""
        del self._leases[lease.grant.request.pool, lease.grant.lease]
        self._finish(lease.grant, lease.verdict, _now(), lease.usage)
        self._decide_soon()

    async def wait(self, request: Request, excluded: frozenset[str], entry: Entry) -> Lease:
        """The lease of a request; see `admit`."""
        if not self._granting or (self._draining and entry is Entry.NEW):
            raise shutting_down()
        self.pools.submit(request, _now(), excluded, entry)
        waiter = _Waiter(request, asyncio.get_running_loop().create_future())
        self._waiting[request.id] = waiter
        if len(self._waiting) == 1 and not self._scheduled:
            # Nobody else is to be decided about: a turn of the loop would bring nothing, and costs a busy proxy a
            # millisecond before each first token.
            self._decide()
        else:
            self._decide_soon()
        try:
            grant = await waiter.granted
        except asyncio.CancelledError:
            self._abandon(waiter)
            raise
        return self._leases[request.pool, grant.lease]

    def _abandon(self, waiter: _Waiter) -> None:
        """The client left while its request waited, or in the very turn in which it was granted."""
        request, granted = waiter.request, waiter.granted
        if request.id in self._waiting:
            del self._waiting[request.id]
            self.pools.cancel(request)
        elif granted.done() and not granted.cancelled() and granted.exception() is None:
            grant = granted.result()
            del self._leases[request.pool, grant.lease]
            self._finish(grant, Verdict.CLIENT_GONE, _now())
        self._decide_soon()

    def _finish(self, grant: Grant, verdict: Verdict, now: float, usage: Usage | None = None) -> None:
        self.pools.finish(grant, verdict, now, usage)
        self._tell_emptied(grant.placed.backend)

    def _tell_emptied(self, backend: str) -> None:
        if backend in self._emptied and not self.in_flight(backend):
            self._emptied.pop(backend).set()

    @contextmanager
    def direct(self, backend: str, cut: Callable[[], None]) -> Iterator[None]:
        """A request to `backend` and no other is in flight there for the length of the block.

        It does not wait and is no load, as what it asks for has been computed. `cut` is called when nothing more will
        come from there. Raises Refused while the proxy drains, or where there is no such backend any more.
        """
        if self._draining:
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
            self._tell_emptied(backend)

    def ended(self, request: Request, met: bool | None) -> None:
        """See `Pools.ended`."""
        self.pools.ended(request, met, _now())

    def cached(self, grant: Grant, hashes: Sequence[int]) -> None:
        """See `Pools.cached`."""
        self.pools.cached(grant, hashes)

    async def resolve(self, name: str | None, hold_s: float, body_bytes: int) -> Target:
        """What a requested name means, waiting up to `hold_s` for a backend that was never read to come up.

        Where none was ever read, the wait is no longer than the setting `first_hold_s`.
        Those who wait here are in no pool's waiting room, and its limits in total hold for them on their own.
        Raises Refused for a name that no backend serves, or when nothing came up in time.
        """
        limits = self.pools.settings.queue
        ends_s = _now() + (hold_s if self.pools.catalogue.ever_read else min(hold_s, limits.first_hold_s))
        while True:
            try:
                return self.pools.resolve(name)
            except Refused as refused:
                if refused.outcome is not Outcome.REJECTED_NO_BACKENDS or _now() >= ends_s:
                    raise
                if self._draining:
                    raise shutting_down() from None
                if self.nameless >= limits.requests_max or self._nameless_bytes + body_bytes > limits.bytes_max:
                    raise
            unresolved = self._unresolved.setdefault(name, _Unresolved())
            unresolved.requests += 1
            self.nameless += 1
            self._nameless_bytes += body_bytes
            try:
                async with asyncio.timeout_at(ends_s):
                    await unresolved.settled.wait()
            except TimeoutError:
                pass
            finally:
                self.nameless -= 1
                self._nameless_bytes -= body_bytes
                unresolved.requests -= 1
                if not unresolved.requests and not unresolved.settled.is_set():
                    del self._unresolved[name]

    # --- the face that pollers see ------------------------------------------------------------------------------------

    def answered(self, backend: str) -> None:
        self.pools.answered(backend, _now())
        self._decide_soon()

    def observe(self, backend: str, reading: Reading) -> None:
        self.pools.observe(backend, reading)
        self._decide_soon()

    def published(self, backend: str, limit: int) -> None:
        self.pools.published(backend, limit)
        self._decide_soon()

    def listed(self, backend: str, listing: Listing) -> None:
        self.pools.listed(backend, listing)
        self._wake_nameless()
        self._decide_soon()

    def troubled(self, backend: str, trouble: Trouble, detail: str) -> None:
        del detail
        if self.pools.troubled(backend, trouble):
            for cut in tuple(self._direct.get(backend, ())):
                cut()
        self._decide_soon()

    # --- the face that those who run it see ---------------------------------------------------------------------------

    def reconsider(self) -> None:
        """The fleet or its settings changed: decide anew, and let those look again who wait for a name to be known."""
        self._wake_nameless()
        self._decide_soon()

    def expects_backends(self, expected: bool) -> None:
        """Somebody who knows of further backends has not named them yet: a name that nobody lists may turn up."""
        self.pools.catalogue.expecting = expected
        self.reconsider()

    async def emptied(self, backend: str) -> None:
        """Wait until nothing is in flight on a backend, which is to be drained: else it may be given more meanwhile."""
        while self.in_flight(backend):
            await self._emptied.setdefault(backend, asyncio.Event()).wait()

    # --- decisions ----------------------------------------------------------------------------------------------------

    def _decide_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        self._scheduled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for decision in self.pools.decide(now):
            self._carry_out(decision)
        for fault, untold in self.pools.faults(now):
            more = f", as {untold} times since this was last told" if untold else ""
            loop.call_exception_handler({"message": f"a scheduling policy failed{more}", "exception": fault})
        after = loop.time()
        self.on_decision(after - now)
        for backend, news in self.pools.news():
            self.on_news(backend, news)
        wakeup_s = self.pools.next_wakeup(after)
        if wakeup_s is None:
            return
        if wakeup_s <= after:
            self._decide_soon()
        else:
            self._timer = loop.call_at(wakeup_s, self._decide)

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Grant):
            self._leases[decision.request.pool, decision.lease] = Lease(decision, self.pools)
            waiter = self._waiting.pop(decision.request.id)
            # A waiter cancelled in this very turn finds its grant in the future's absence: see _abandon.
            if waiter.granted.done():
                del self._leases[decision.request.pool, decision.lease]
                self._finish(decision, Verdict.CLIENT_GONE, decision.at_s)
            else:
                waiter.granted.set_result(decision)
        elif isinstance(decision, Drop):
            waiter = self._waiting.pop(decision.request.id)
            if not waiter.granted.done():
                waiter.granted.set_exception(refusal(decision))
        else:
            lease = self._leases.get((decision.request.pool, decision.lease))
            if lease is not None:
                lease.cut(revoked=not isinstance(decision, Preempt))

    # --- drain --------------------------------------------------------------------------------------------------------

    def drain(self, *, finish_waiting: bool = False) -> None:
        """Refuse what comes with `draining`, and stop granting: what waits is refused too, and leases run on.

        With `finish_waiting`, what is in the waiting room is still granted, and so are its further attempts; a second
        call without it ends that.
        """
        self._draining = True
        self._wake_nameless()
        if finish_waiting:
            return
        self._granting = False
        for waiter in list(self._waiting.values()):
            del self._waiting[waiter.request.id]
            self.pools.cancel(waiter.request)
            if not waiter.granted.done():
                waiter.granted.set_exception(shutting_down())

    def _wake_nameless(self) -> None:
        """Let those look again who wait for a name of which there is news; the others sleep on."""
        catalogue = self.pools.catalogue
        if self._draining:
            settled = list(self._unresolved)
        else:
            # While names may still turn up, there is news only of those that did.
            asked = self._unresolved.keys()
            among = asked if catalogue.complete else (asked & catalogue.targets.keys()) | (asked & {None})
            settled = [name for name in among if not catalogue.awaits(name)]
        for name in settled:
            self._unresolved.pop(name).settled.set()
        self.on_change()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    @property
    def granting(self) -> bool:
        """Whether requests that were let in, waiting ones and further attempts, may still get a lease."""
        return self._granting

    @property
    def leases(self) -> int:
        return len(self._leases)

    def in_flight(self, backend: str) -> int:
        """Requests that were sent to a backend and have not ended."""
        return len(self.pools.backends[backend].bookings) + len(self._direct.get(backend, ()))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Admitted:
    """The block for whose length a backend is lent. A class, because a generator for it costs every request more."""

    __slots__ = ("_dispatcher", "_entry", "_excluded", "_lease", "_request")

    def __init__(self, dispatcher: Lender, request: Request, excluded: frozenset[str], entry: Entry) -> None:
        self._dispatcher = dispatcher
        self._request = request
        self._excluded = excluded
        self._entry = entry
        self._lease: Lease | None = None

    async def __aenter__(self) -> Lease:
        lease = self._lease = await self._dispatcher.wait(self._request, self._excluded, self._entry)
        return lease

    async def __aexit__(self, *_: object) -> None:
        if self._lease is not None:
            self._dispatcher.returned(self._lease)


def _now() -> float:
    return asyncio.get_running_loop().time()


def shutting_down() -> Refused:
    """What those are told who come while the proxy ends."""
    return Refused(Outcome.DRAINING, "The proxy is shutting down. Try again.", DRAIN_RETRY_S)
