"""Decides which request of a pool goes next and to which backend: the one object that changes scheduling state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from math import inf

from msgspec import Struct

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.view import View
from llmproxy.core.domain import (
    DEFAULT,
    Decision,
    Drop,
    Entry,
    Grant,
    Learned,
    NoCapacity,
    NoMatch,
    Outcome,
    Placed,
    Reason,
    Refused,
    Request,
    Waited,
    Why,
)
from llmproxy.core.estimates.line import FirstToken
from llmproxy.core.lease_observers import (
    BlameObserver,
    ChargeObserver,
    FirstTokenObserver,
    LimitObserver,
    OutlierObserver,
    PlacementObserver,
    PlaceObserver,
    TransferObserver,
)
from llmproxy.core.leases import LeaseObserver, Leases
from llmproxy.core.placement.first_fit import Fit, Limited, Unmatched, first_fit, head, limited, passes_over
from llmproxy.core.placement.policy import NO_CAPACITY, Placement, could_serve
from llmproxy.core.placement.staged import as_decode, as_prefill, staged
from llmproxy.core.policy_registry import Faults
from llmproxy.core.pool_backends import PoolBackends
from llmproxy.core.preemption import LOOK_MAX, Preemption
from llmproxy.core.queueing.admission import Admission
from llmproxy.core.queueing.blocked import Key
from llmproxy.core.queueing.headroom import Headroom
from llmproxy.core.queueing.min_share import MinShares
from llmproxy.core.queueing.occupancy import DrainRate, Occupancy
from llmproxy.core.queueing.usage_limits import UsageLimits
from llmproxy.core.queueing.waiting_room import WaitingRoom
from llmproxy.core.settings import Settings
from llmproxy.core.snapshot import Look, PoolChoices, PoolSnapshot, Position

PASS_MAX = 64
"""Drops or grants of one pass; the rest follow in the next, so that a mass release never holds the event loop."""
FAULT_RETRY_S = 1.0
"""Until the next pass of a pool after one of its policies raised an exception."""


class _Pass(Struct):
    """The state of one `decide`.

    `steps` bounds how long it takes. `outdated` are the backends that were booked last; their views are refreshed only
    before the next placement. `blocked`: no backend has room for anything. `guaranteed_none` are the bands of which no
    request fits anywhere, even by their minimum share.
    """

    now: float
    views: list[View]
    decisions: list[Decision]
    steps: int = 0
    outdated: Sequence[Backend] = ()
    blocked: bool = False
    guaranteed_none: set[int] = set()


class Scheduler:
    """The waiting room and the backends of one pool.

    Every event is a method that takes `now`, of this object or, for leases, of `leases`; no event decides anything.
    `decide(now)` then returns what is to be done, and `next_wakeup(now)` when to call it again although no event
    happened. A granted request stays booked on its backend until its lease is finished. Not thread-safe.
    """

    def __init__(
        self,
        pool: str,
        settings: Settings,
        occupancy: Occupancy,
        limits: UsageLimits,
        lease_serial: Iterator[int],
        placement: Placement,
        observers: Sequence[LeaseObserver] = (),
    ) -> None:
        self.pool = pool
        self.names = frozenset({pool})
        """The base models that the pool serves, or did last."""
        self._settings = settings
        # Shared by all pools: a tenant may use several models, and a backend that moves still holds leases of the old.
        self._limits = limits
        self._placement = placement = staged(placement, settings.disaggregation)
        self._backends = PoolBackends(settings.health)
        self.faults = Faults()
        self._drain = DrainRate()
        self._room = WaitingRoom(settings, occupancy, limits, self.faults, self._room_on, self._drain)
        self._first_token = first_token = FirstToken()
        self._headroom = headroom = Headroom(settings)
        self._admission = Admission(
            settings, self._backends.by_name, self._room, headroom, limits, self._drain, first_token, placement.ready
        )
        self._min_shares = MinShares(settings.min_shares)
        self._preemption = Preemption(settings, self._headroom)
        self.charges = ChargeObserver(settings, self._room, self._min_shares, self.faults)
        self._places = PlaceObserver()
        self._transfers = TransferObserver(placement)
        self._blame = BlameObserver()
        self._prefilled: list[tuple[Request, frozenset[str]]] = []
        self.leases = Leases(
            lease_serial,
            [
                self._places,
                self._transfers,
                self._blame,
                OutlierObserver(self._backends.outliers),
                LimitObserver(limits),
                self._preemption,
                PlacementObserver(placement, self.faults),
                self.charges,
                FirstTokenObserver(self._first_token),
                *observers,
            ],
        )
        self._shed: list[Drop] = []
        self._more = False
        self._decided: list[Decision] = []
        self._rests_until_s = -inf
        self._place_changes_s: float | None = None

    def reconfigure(self, settings: Settings, now: float) -> None:
        """Apply other settings. Policies stay, with the settings that they were made with."""
        self._settings = settings
        self._placement.settings = settings.disaggregation
        self._room.reconfigure(settings, now)
        self._min_shares.reconfigure(settings.min_shares)
        self._backends.reconfigure(settings.health)
        for part in (self._headroom, self._admission, self._preemption):
            part.reconfigure(settings)

    # --- backends ------------------------------------------------------------------------------------------------

    def attach(self, backend: Backend) -> None:
        self._backends.add(backend)
        self.leases.attach(backend.name)

    def detach(self, backend: str) -> None:
        """Grant nothing more to a backend. Its leases run on."""
        self._backends.remove(backend)
        self.leases.detach(backend)

    def inherit(self, other: Scheduler) -> None:
        """Add what another pool counted for flows and bands: what waits there, or would, waits here from now on."""
        self._headroom.inherit(other._headroom)
        own = self.balances()
        for level, balances in other.balances().items():
            mine = own.get(level, {})
            self.restore(level, {flow: balance + mine.get(flow, 0.0) for flow, balance in balances.items()})

    def leave(self, leaves: Callable[[Request], bool]) -> list[tuple[Request, frozenset[str]]]:
        """Take out the waiting requests of which `leaves` says yes; returns each with what was excluded for it."""
        found = [queued for queued in self._room.waiting.values() if leaves(queued.request)]
        for queued in found:
            self._room.leave(queued)
        return [(queued.request, queued.excluded) for queued in found]

    def drop_bound(self, backend: str) -> None:
        """Drop the requests that may go to `backend` alone: what they refer to is gone with its process."""
        for queued in self._room.bound_to(backend):
            self._shed.append(Drop(queued.request, Outcome.BAD_REQUEST, 0.0, self._room.leave(queued)))

    @property
    def waiting(self) -> int:
        return len(self._room)

    @property
    def idle(self) -> bool:
        uses = self._backends.by_name, self._room, self.leases, self._shed, self._prefilled, self._places
        return not any(uses)

    # --- requests ------------------------------------------------------------------------------------------------

    def submit(
        self, request: Request, now: float, excluded: frozenset[str] = frozenset(), entry: Entry = Entry.NEW
    ) -> None:
        """Let a request into the waiting room; `excluded` names backends that already failed it.

        Raises Refused: `rejected_no_backends` when no backend could ever serve it, `rejected_capacity` when a limit of
        the waiting room is reached, `rate_limited` when one of its tenant or model is, `rejected_deadline` when it
        would be late even if served next, `upstream_timeout` for the retry of one that met a time limit on a backend
        at work.
        """
        if entry is Entry.PREFILLED:
            self._prefilled.append((request, excluded))
            return
        if entry is Entry.RETRY and self._blame.too_long(request.id):
            raise Refused(Outcome.UPSTREAM_TIMEOUT, "It takes longer than a time limit allows, and not for a fault.")
        self._room.deadlines.set_pool_up(self._backends.any_up(), now)
        self._shed += self._admission.enter(request, excluded, entry, now)

    def cancel(self, request_id: str) -> Waited | None:
        """Remove the waiting or just shed request of a client that left.

        Returns why it waited, None if nothing held it back.
        """
        queued = self._room.waiting.get(request_id)
        if queued is not None:
            return self._room.leave(queued)
        shed = next((drop for drop in self._shed if drop.request.id == request_id), None)
        if shed is not None:
            self._shed.remove(shed)
            return shed.waited
        self._prefilled = [one for one in self._prefilled if one[0].id != request_id]
        return None

    def cached(self, lease: int, backend: str, hashes: Sequence[int]) -> None:
        """The prompt and the answer of a lease that has ended are these blocks, which `backend` holds."""
        # A process that is gone holds nothing any more.
        if self.leases.is_of_process(lease, backend):
            self.faults.notify(self._placement.cached, backend, hashes)

    def restore_prefix(self, backend: str, hashes: Sequence[int]) -> None:
        """Another process knows that `backend` holds these blocks."""
        if backend in self._backends.by_name:
            self.faults.notify(self._placement.cached, backend, hashes)

    def ended(self, request: Request, met: bool | None, now: float) -> None:
        """The request is over. `met` says whether it kept its objective, None when it had none."""
        self._places.give_up(request.id)
        self._blame.ended(request.id)
        self.charges.ended(request)
        self._room.band(request.band).ended(request, met, now)

    def balances(self) -> dict[int, Mapping[str, float]]:
        """Band -> what its fairness policy knows of flows; see `FairnessPolicy.balances`."""
        return {level: self._room.band(level).fairness.balances() for level in self._room.order}

    def restore(self, band: int, balances: Mapping[str, float]) -> None:
        """Take over what another process knew of the flows of a band."""
        self.faults.notify(self._room.band(band).fairness.restore, balances)

    # --- decisions -----------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Decision]:
        """What is to be done now. A second call at the same `now` returns nothing, unless the pass was capped.

        When a policy raises, what was decided before is returned, `faults` has the exception, and this pool decides
        nothing for FAULT_RETRY_S, because a fault that repeats must not hold up other pools.
        """
        if now < self._rests_until_s:
            return []
        try:
            self._pass(now)
        except Exception as fault:  # noqa: BLE001 - a policy may be anybody's
            self.faults.note(fault)
            self._rests_until_s = now + FAULT_RETRY_S
        decided, self._decided = self._decided, []
        return decided

    def _pass(self, now: float) -> None:
        decisions = self._decided
        self.leases.revoke(self._backends.eject_outliers(now))
        decisions += self.leases.take_revoked()
        if self._shed:
            decisions += self._shed
            self._shed = []
        if self._prefilled:
            self._grant_answers(decisions, now)
        decisions += self._preemption.clear(self._backends.by_name.values(), now)
        alive = self._backends.any_up()
        self._room.deadlines.set_pool_up(alive, now)
        self._more = False
        if not self._room.waiting:
            # Most passes follow a reading or an end while no request waits; they need no views of a large fleet.
            return
        expired = self._expired(now)
        decisions += expired
        # Nothing is granted while requests that are past their deadline may still wait.
        self._more = len(expired) == PASS_MAX
        if self._more:
            return
        self._room.settle(now)
        this = _Pass(now, self._backends.views(now), decisions)
        self._placement.begin(this.views)
        self._grant_all(this)
        while this.steps < PASS_MAX and not this.blocked and self._room.readmit(now):
            self._grant_all(this)
        self._more = this.steps >= PASS_MAX and bool(self._room)
        if self._room.waiting and not self._more:
            for view in this.views:
                if not view.available:
                    self._backends.by_name[view.backend].missed(now)
        self._place_changes_s = self._placement.changes_at(now)

    def _grant_answers(self, decisions: list[Decision], now: float) -> None:
        """Grant a backend to each request whose prompt was computed, before anything that waits.

        A place was kept for it. Where that backend is gone meanwhile and no other has room, the request goes back to
        the waiting room, before all that had no turn yet, and is served from its beginning.
        """
        self._placement.begin(self._backends.views(now))
        prefilled, self._prefilled = self._prefilled, []
        for request, excluded in prefilled:
            prefilled_on = self._places.give_up(request.id)
            others = excluded if prefilled_on is None else excluded | {prefilled_on}
            answer = as_decode(request)
            placed: Placed | NoCapacity | NoMatch = NO_CAPACITY
            try:
                placed = self._placement.place(answer, self._backends.views(now), 1.0, others, now)
            except Exception as fault:  # noqa: BLE001 - a policy may be anybody's, and those behind must not be lost
                self.faults.note(fault)
            if isinstance(placed, Placed):
                backend, first = self._backends.by_name[placed.backend], self._backends.by_name.get(prefilled_on or "")
                lease = self.leases.book(answer, placed, backend, now, prefilled_on=first)
                why = Why(self._room.sizes(), 1, (), 0)
                decisions.append(Grant(lease, answer, placed, now, 0, why, request.deadline_s - now))
                continue
            self._limits.end_between_stages(request.id)
            try:
                self._shed += self._admission.enter(request, excluded, Entry.PREEMPTED, now)
            except Refused as refused:
                decisions.append(Drop(request, refused.outcome, refused.retry_after_s or 0.0))

    def _grant_all(self, this: _Pass) -> None:
        """Grant band by band, the highest first, until no backend has room or the pass is long enough."""
        # Blocked requests may have come back that fit where the others of their band did not.
        this.guaranteed_none.clear()
        for level in self._room.order:
            band = self._room.band(level)
            if not band.size and not self._room.blocked.size:
                continue
            unmatched = Unmatched()
            # A request that comes back may be of a lower band that is owed its minimum share.
            while (band.size or self._readmit(level, this)) and self._grant_guaranteed(this):
                if not band.size:
                    # Its last one went by its minimum share.
                    continue
                granted = self._grant_one(level, self._headroom.ceiling(level, this.now), this, unmatched)
                if isinstance(granted, NoCapacity):
                    self._preempt(level, this)
                    self._hold_back(level, this)
                    # Lower bands see a lower ceiling: where this one finds no room, neither may they.
                    return
                if granted is None and not self._readmit(level, this):
                    self._room.set_wait_reason(level, Reason.LATER if unmatched.later else Reason.NO_MATCH, this.now)
                    break
            if this.steps >= PASS_MAX or this.blocked:
                return
            if level > DEFAULT and (band.size or self._room.blocked.size):
                self._preempt(level, this, some_room=True)

    def _hold_back(self, level: int, this: _Pass) -> None:
        """Note why the bands from `level` down wait."""
        ceiling, views = self._headroom.ceiling(level, this.now), this.views
        if not any(view.available for view in views):
            reason = Reason.NO_BACKEND
        elif not any(view.has_room(1.0) for view in views):
            reason = Reason.FULL
        elif any(view.has_room(ceiling) for view in views) and not self._headroom.keeps_slot(level, views, this.now):
            reason = Reason.PROMPTS
        else:
            reason = Reason.CEILING
        self._room.set_wait_reason(level, reason, this.now)
        for lower in self._room.levels():
            if lower < level:
                self._room.set_wait_reason(lower, Reason.HIGHER_BAND, this.now)

    def _grant_guaranteed(self, this: _Pass) -> bool:
        """Grant what bands have earned by their minimum shares; True when the others may go on."""
        while self._min_shares.shares and this.steps < PASS_MAX:
            due = [x for x in self._min_shares.due(self._room.levels()[1:]) if x not in this.guaranteed_none]
            if not due:
                return True
            granted = self._grant_one(due[0], 1.0, this, Unmatched(), guaranteed=True)
            if isinstance(granted, NoCapacity) and not any(view.has_room(1.0) for view in this.views):
                this.blocked = True
                return False
            if not isinstance(granted, Grant):
                # Also where objectives of its own streams hold it back, which concern no band above it.
                this.guaranteed_none.add(due[0])
        return this.steps < PASS_MAX

    def _readmit(self, level: int, this: _Pass) -> int:
        """Let more blocked requests back into the band, because those that came back fit nowhere; returns how many."""
        back = self._room.readmit(this.now, level)
        this.steps += back
        if back:
            this.guaranteed_none.clear()
        return back

    def first_blocked(self) -> Key:
        """(Negated band, arrival) of the blocked request that is next under a usage limit with room; else inf."""
        return self._room.blocked.first(self._limits)

    def next_wakeup(self, now: float) -> float | None:
        """When `decide` may have something to do although no event happens; None when only an event can."""
        if now < self._rests_until_s:
            return self._rests_until_s
        if self._more or self._shed or self._prefilled:
            return now
        if not self._room.waiting:
            return self._backends.outliers.due_s
        times = [part.changes_at(now) for part in (self._backends, self._headroom)]
        times += [self._room.deadlines.next(now), self._place_changes_s]
        return min([time for time in times if time is not None], default=None)

    def _grant_one(
        self, level: int, ceiling: float, this: _Pass, unmatched: Unmatched, *, guaranteed: bool = False
    ) -> Grant | NoCapacity | None:
        """Book the band's next request; None when there is room, but for none of those looked at."""
        band = self._room.band(level)
        for backend in this.outdated:
            self._backends.refresh(this.views, backend, this.now)
        this.outdated = ()
        kept = not guaranteed and self._headroom.keeps_slot(level, this.views, this.now)
        views = this.views if guaranteed else self._headroom.views_for(level, this.views, this.now)
        while True:
            found: Fit | Limited | NoCapacity | None
            if kept:
                found = limited(head(band, this.now), self._limits) or NO_CAPACITY
            else:
                # Those that are blocked may come back in this pass, and take what a higher band did not want.
                patient = self._room.levels()[-1] == level and not self._room.blocked.any_below(level)
                found = first_fit(
                    band, self._placement, views, ceiling, self._limits, unmatched, this.now, patient=patient
                )
            if not isinstance(found, Limited):
                break
            # Its tenant or model has as many in flight as allowed: the flow goes on without it.
            self._room.block(found.queued, found.limit)
            this.steps += 1
            if not band.size or this.steps >= PASS_MAX:
                return None
        if not isinstance(found, Fit):
            return found
        return self._book(found, this, guaranteed)

    def _book(self, found: Fit, this: _Pass, guaranteed: bool) -> Grant:
        queued, placed, now = found.queued, found.placed, this.now
        request = queued.request
        band = self._room.band(request.band)
        inverted = not guaranteed and self._inverts(placed, request.band, now)
        standing = band.fairness.standing(request.flow)
        ahead, left_s = len(self._room) - 1, self._room.deadlines.own_left_s(queued, now)
        sizes, flows = self._room.sizes(), band.flows
        waited = self._room.leave(queued)
        backend, answers_on = self._backends.by_name[placed.backend], None
        probe = backend.health.ejected
        why = Why(sizes, flows, standing, found.passed_over, guaranteed, inverted, waited, probe)
        if placed.answers_on is not None:
            request, answers_on = as_prefill(request), self._backends.by_name[placed.answers_on]
        lease = self.leases.book(request, placed, backend, now, guaranteed=guaranteed, answers_on=answers_on)
        this.outdated = [backend] if answers_on is None else [backend, answers_on]
        grant = Grant(lease, request, placed, now, ahead, why, left_s)
        this.decisions.append(grant)
        if request.band > DEFAULT and backend.view(now).waiting:
            # It came behind those that wait inside the engine.
            this.decisions += self._preemption.clear((backend,), now)
        self._drain.granted(request, now)
        this.steps += 1
        return grant

    def _inverts(self, placed: Placed, level: int, now: float) -> bool:
        """Whether a grant to `level` passes over a request of a higher band that could have the place of its answer."""
        backend = placed.answers_on or placed.backend
        above = [one for one in self._room.levels() if one > level and self._room_on(backend, one, now)]
        if not above:
            return False
        view = self._backends.by_name[backend].view(now)
        return passes_over(map(self._room.band, above), view, self._limits)

    def _preempt(self, level: int, this: _Pass, *, some_room: bool = False) -> None:
        """Preempt leases for requests of a band that find no room.

        `some_room`: some backends have room, and requests that these can serve need none.
        """
        if level <= DEFAULT or not self._preemption.open:
            return
        ready: Sequence[View] = ()
        if some_room:
            seen = self._headroom.views_for(level, this.views, this.now)
            ready = self._placement.ready(seen, level, self._headroom.ceiling(level, this.now), this.now)
        with closing(self._room.band(level).heads()) as heads:
            waiting = (
                one
                for one in chain(islice(heads, LOOK_MAX), self._room.blocked.at_backends(level))
                if limited(one, self._limits) is None
                and not any(could_serve(one.request, one.excluded, view) for view in ready)
            )
            this.decisions += self._preemption.choose(waiting, this.now)

    def _room_on(self, name: str, level: int, now: float) -> int:
        """How many more requests of the band `level` a backend has room for."""
        view = self._backends.by_name[name].view(now)
        seen = self._headroom.views_for(level, [view], now)
        if not self._placement.ready(seen, level, self._headroom.ceiling(level, now), now):
            return 0
        return max(1, view.limit + view.look_ahead - view.load)

    def _expired(self, now: float) -> list[Drop]:
        drops = []
        due = [(queued, self._room.leave(queued)) for queued in self._room.deadlines.due(now, PASS_MAX)]
        for queued, waited in due:
            model = queued.request.model
            alive = any(backend.up and backend.serves(model) for backend in self._backends.by_name.values())
            outcome = Outcome.EXPIRED if alive and not queued.held else Outcome.EXPIRED_NO_BACKENDS
            drops.append(Drop(queued.request, outcome, self._drain.retry_after_s(len(self._room), now), waited))
        return drops

    # --- inspection ----------------------------------------------------------------------------------------------

    def work_s(self, now: float) -> float | None:
        """See `Placement.work_s`, of all that waits here."""
        room = self._room
        return self._placement.work_s(len(room), room.prompt_tokens, room.output_tokens, self._backends.views(now))

    def snapshot(self, now: float, flows_max: int) -> PoolSnapshot:
        """What waits and who has room, with at most so many flows."""
        shown = self._look(now).shown(
            self._backends.views(now),
            alive=self._backends.any_up(),
            leases=len(self.leases),
            preempting=self._preemption.pending,
            flows_max=flows_max,
        )
        return replace(shown, paces=self._backends.outliers.paces(now))

    def position(self, name: str, now: float) -> Position | None:
        """The position of the waiting request with this label or id, None when there is none."""
        queued = self._room.find(name)
        return None if queued is None else self._look(now).position(queued)

    def choices(self, now: float) -> PoolChoices:
        """The last placements, and why no other backend was chosen."""
        return PoolChoices(self.pool, tuple(self._placement.explained())[::-1], self.learned(now))

    def learned(self, now: float) -> Learned | None:
        """What the placement has learned of the pool's speed, None where it learns nothing."""
        return self._placement.learned(self._backends.by_name, now)

    def blocked(self) -> dict[tuple[int, str], int]:
        """(Band, usage limit or backend) -> requests that are blocked by it."""
        return self._room.blocked.counts()

    def views(self, now: float) -> Sequence[View]:
        """The backends of the pool."""
        return self._backends.views(now)

    def _look(self, now: float) -> Look:
        return Look(self.pool, now, self._settings, self._room, self._headroom, self._placement, self._first_token)

    def check(self, now: float) -> None:
        """Raise AssertionError when two accounts of the same thing differ; so does `check` of the parts."""
        assert not self.faults, "a policy raised an exception"
        self._room.check(now)
        self._backends.check()
        self.leases.check()
        self._places.check()
