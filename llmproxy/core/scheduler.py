"""Joins the parts: one synchronous object per pool that decides who goes next and where, in one step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

from llmproxy.core.domain import (
    Decision,
    Drop,
    Grant,
    NoCapacity,
    NoMatch,
    Outcome,
    Placed,
    Refused,
    Request,
    Revoke,
    Usage,
    Verdict,
)
from llmproxy.core.fairness import policies
from llmproxy.core.fleet import Backend, View
from llmproxy.core.placement import NO_CAPACITY, Placement, context_tokens
from llmproxy.core.queue import Band, Deadlines, DrainRate, Occupancy, Queued
from llmproxy.core.settings import Settings

PASS_MAX = 64
"""Drops or grants of one pass; the rest follow in a pass asked for at once, so that a mass release never holds the
loop."""
RETRY_EMPTY_S = 2.0
"""Retry-After while no backend is up: about the time in which a poll finds one that came back."""


@dataclass(slots=True)
class _Lease:
    request: Request
    backend: Backend
    charged: float


class _Unmatched:
    """Requests of one band that found no match in this pass: room only shrinks, so their like finds none either."""

    def __init__(self) -> None:
        self._from_tokens: dict[tuple[str, frozenset[str]], int] = {}

    def add(self, queued: Queued, why: NoMatch) -> None:
        tokens = 0 if why.whole_model else context_tokens(queued.request)
        self._from_tokens[queued.request.model, queued.excluded] = tokens

    def covers(self, queued: Queued) -> bool:
        tokens = self._from_tokens.get((queued.request.model, queued.excluded))
        return tokens is not None and context_tokens(queued.request) >= tokens


class Scheduler:
    """The waiting room and the backends of one pool.

    Every event is a method that takes `now`; none decides anything. `decide(now)` then answers what is to be done, and
    `next_wakeup(now)` when to ask again although nothing happened. A granted request stays booked on its backend until
    `finish`. Not thread-safe, and need not be.
    """

    def __init__(
        self, pool: str, settings: Settings, occupancy: Occupancy, lease_serial: Iterator[int], placement: Placement
    ) -> None:
        self.pool = pool
        self._settings = settings
        self._occupancy = occupancy
        self._placement = placement
        self._make_fairness = policies.get(settings.fairness)
        self._backends: dict[str, Backend] = {}
        self._bands: dict[int, Band] = {}
        self._order: list[int] = []
        self._waiting: dict[str, Queued] = {}
        self._deadlines = Deadlines()
        self._drain = DrainRate()
        self._leases: dict[int, _Lease] = {}
        # Shared by all pools, because a backend that moves between them still holds leases of the old one.
        self._lease_serial = lease_serial
        self._lost: list[int] = []
        self._shed: list[Drop] = []
        self._more = False

    # --- backends ------------------------------------------------------------------------------------------------

    def attach(self, backend: Backend) -> None:
        self._backends[backend.name] = backend

    def detach(self, backend: str) -> None:
        """Stop granting to a backend; its leases run on."""
        del self._backends[backend]

    def lost(self, backend: Backend) -> None:
        """The process behind a backend is gone: the next `decide` revokes its leases."""
        self._placement.lost(backend.name)
        self._lost += [lease for lease, held in self._leases.items() if held.backend is backend]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        return not (self._backends or self._waiting or self._leases)

    def alive(self) -> bool:
        """Some backend of this pool is up, be it full or resting."""
        return any(not backend.health.down for backend in self._backends.values())

    # --- requests ------------------------------------------------------------------------------------------------

    def submit(
        self, request: Request, now: float, excluded: frozenset[str] = frozenset(), *, again: bool = False
    ) -> None:
        """Let a request into the waiting room; `excluded` names backends that already failed it.

        A request that comes `again`, after a failed attempt, was let in once and is not held to the limits anew: those
        are few, and turning them away would lose what a retry is there to save. Where a total is reached, the newest
        request of the lowest band makes room for one of a higher band.

        Raises Refused: `rejected_no_backends` when no backend that is up could ever serve it, `rejected_capacity`
        when a limit is reached.
        """
        up = (name for name, b in self._backends.items() if not b.health.down and b.serves(request.model))
        # Asked as a question with an early answer, because almost always the first backend answers it.
        if not any(name not in excluded for name in up):
            message = f"No backend of `{request.model}` is up. Try again shortly."
            if excluded:
                message = f"Every backend of `{request.model}` that is up has failed this request."
            raise Refused(Outcome.REJECTED_NO_BACKENDS, message, RETRY_EMPTY_S)
        if not again:
            self._make_room(request, now)
        self._occupancy.enter(request.band, request.body_bytes)
        queued = Queued(request, excluded)
        self._waiting[request.id] = queued
        self._band(request.band).push(queued)
        self._deadlines.add(request.deadline_s, request.id, self._waiting)

    def _make_room(self, request: Request, now: float) -> None:
        """Shed until `request` fits into the waiting room. Raises Refused where shedding cannot help."""
        while (full := self._occupancy.full(request.band, request.body_bytes)) is not None:
            below = [self._bands[level] for level in self._order if level < request.band and self._bands[level].size]
            if not below or not full.total:
                ahead = sum(band.size for level, band in self._bands.items() if level >= request.band)
                message = f"The queue is full: {full.name} ({full.limit}) is reached. Try again later."
                raise Refused(Outcome.REJECTED_CAPACITY, message, self._drain.retry_after_s(ahead, now))
            victim = below[-1].newest()
            self._leave(victim)
            self._shed.append(Drop(victim, Outcome.SHED, self._drain.retry_after_s(len(self._waiting), now)))

    def cancel(self, request_id: str) -> None:
        """The client of a waiting request left, perhaps one that was shed a moment ago."""
        queued = self._waiting.get(request_id)
        if queued is not None:
            self._leave(queued.request)
        else:
            self._shed = [drop for drop in self._shed if drop.request.id != request_id]

    # --- leases --------------------------------------------------------------------------------------------------

    def started(self, lease: int) -> None:
        """The first byte of the answer arrived."""
        self._leases[lease].backend.started(lease)
        self._placement.started(lease)

    def progress(self, lease: int, output_tokens: int) -> None:
        """The answer has about so many tokens by now: charge what exceeds the estimate."""
        held = self._leases[lease]
        so_far = self._cost(held.request.prompt_tokens, output_tokens)
        if so_far > held.charged:
            self._charge(held, so_far)

    def finish(self, lease: int, verdict: Verdict, now: float, usage: Usage | None = None) -> None:
        """Return a lease. `usage` is what the engine counted, or the tokens seen so far where it was cut short."""
        held = self._leases.pop(lease)
        held.backend.release(lease, verdict, now)
        self._placement.finished(lease, verdict, usage)
        if usage is not None:
            self._charge(held, self._cost(usage.prompt_tokens, usage.output_tokens))
        elif verdict is not Verdict.SERVED:
            # The attempt gave nothing: a retry is charged anew, and a failure is not the client's debt.
            self._charge(held, 0.0)

    def _cost(self, prompt_tokens: int, output_tokens: int) -> float:
        return self._settings.input_weight * prompt_tokens + self._settings.output_weight * output_tokens

    def _charge(self, held: _Lease, cost: float) -> None:
        self._band(held.request.band).fairness.charge(held.request.flow, cost - held.charged)
        held.charged = cost

    # --- decisions -----------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Decision]:
        """What is to be done now. A second call at the same `now` answers nothing, unless the pass was capped."""
        decisions: list[Decision] = [*self._revoked(), *self._shed]
        self._shed.clear()
        expired = list(self._expired(now))
        decisions += expired
        # Nothing is granted while somebody who is past the deadline may still wait.
        self._more = len(expired) == PASS_MAX
        if self._more or not self._waiting:
            # Most passes are asked for by a reading while nobody waits: a large fleet need not be looked over for them.
            return decisions
        views = [backend.view(now) for backend in self._backends.values()]
        grants = 0
        for level in self._order:
            unmatched = _Unmatched()
            while self._bands[level].size:
                if grants == PASS_MAX:
                    self._more = True
                    return decisions
                granted = self._grant_one(level, views, unmatched, now)
                if isinstance(granted, NoCapacity):
                    # Lower bands see a lower ceiling: where this one finds no room, neither may they.
                    return decisions
                if granted is None:
                    break
                decisions.append(granted)
                grants += 1
        return decisions

    def next_wakeup(self, now: float) -> float | None:
        """When `decide` may have something to do although no event happens; None when only an event can."""
        if self._more or self._shed:
            return now
        if not self._waiting:
            return None
        times = [backend.changes_at(now) for backend in self._backends.values()]
        times.append(self._deadlines.next(self._waiting))
        return min((time for time in times if time is not None), default=None)

    def _grant_one(self, level: int, views: list[View], unmatched: _Unmatched, now: float) -> Grant | NoCapacity | None:
        """Book the band's next request; None when there is room, but for none of those looked at."""
        found = self._find(self._bands[level], self._settings.ceiling(level), views, unmatched)
        return self._book(*found, views, now) if isinstance(found, tuple) else found

    def _find(
        self, band: Band, ceiling: float, views: list[View], unmatched: _Unmatched
    ) -> tuple[Queued, Placed] | NoCapacity | None:
        with closing(_generator(band.fairness.candidates())) as flows:
            for flow in flows:
                # A head that fits nowhere must not hold up those behind it while lower bands are served.
                for queued in band.first(flow):
                    if unmatched.covers(queued):
                        continue
                    placed = self._placement.place(queued.request, views, ceiling, queued.excluded)
                    if isinstance(placed, NoCapacity):
                        return placed
                    if isinstance(placed, Placed):
                        return queued, placed
                    unmatched.add(queued, placed)
        # Those passed over were not asked about room, and a band that is blocked must stop the pool.
        return None if any(view.has_room(ceiling) for view in views) else NO_CAPACITY

    def _book(self, queued: Queued, placed: Placed, views: list[View], now: float) -> Grant:
        request = queued.request
        ahead = len(self._waiting) - 1
        self._leave(request)
        backend = self._backends[placed.backend]
        lease = next(self._lease_serial)
        backend.book(lease, request, now)
        self._placement.booked(lease, request, backend.name)
        views[next(i for i, view in enumerate(views) if view.backend == placed.backend)] = backend.view(now)
        held = _Lease(request, backend, 0.0)
        self._leases[lease] = held
        fairness = self._band(request.band).fairness
        fairness.dispatched(request.flow)
        self._charge(held, self._cost(request.prompt_tokens, request.output_tokens))
        self._drain.granted(now)
        return Grant(lease, request, placed, now, ahead)

    def _revoked(self) -> Iterator[Revoke]:
        lost, self._lost = self._lost, []
        for lease in lost:
            held = self._leases.get(lease)
            if held is not None:
                yield Revoke(lease, held.request, held.backend.name)

    def _expired(self, now: float) -> Iterator[Drop]:
        outcome = Outcome.EXPIRED if self.alive() else Outcome.EXPIRED_NO_BACKENDS
        for queued in self._deadlines.due(now, self._waiting, PASS_MAX):
            self._leave(queued.request)
            yield Drop(queued.request, outcome, self._drain.retry_after_s(len(self._waiting), now))

    def _leave(self, request: Request) -> None:
        del self._waiting[request.id]
        self._bands[request.band].remove(request)
        self._occupancy.leave(request.band, request.body_bytes)

    def _band(self, level: int) -> Band:
        band = self._bands.get(level)
        if band is None:
            band = self._bands[level] = Band(self._make_fairness(self._settings))
            self._order = sorted(self._bands, reverse=True)
        return band

    # --- looking in ----------------------------------------------------------------------------------------------

    def views(self, now: float) -> list[View]:
        return [backend.view(now) for backend in self._backends.values()]

    def check(self) -> None:
        """Raise AssertionError when two accounts of the same thing differ."""
        self._occupancy.check()
        for band in self._bands.values():
            band.check()
        queued = [request.id for band in self._bands.values() for request in band.requests()]
        assert sorted(queued) == sorted(self._waiting), "the bands and the index of waiting requests differ"
        booked = {lease: held.backend for lease, held in self._leases.items()}
        for backend in {id(b): b for b in (*self._backends.values(), *booked.values())}.values():
            backend.check()
            mine = {lease for lease, owner in booked.items() if owner is backend}
            assert mine <= backend.bookings.keys(), "a lease is not booked on its backend"


def _generator(flows: Iterator[str]) -> Generator[str, None, None]:
    # Policies may answer any iterator; only a generator can be closed, which is what ends the looking.
    yield from flows
