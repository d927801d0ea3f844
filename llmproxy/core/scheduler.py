"""Who goes next and where, decided in one step: the one object that changes scheduling state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.batch_limit import Exploration
from llmproxy.core.backends.health import Peers
from llmproxy.core.backends.outlier_detection import OutlierDetection
from llmproxy.core.backends.view import View
from llmproxy.core.domain import DEFAULT, Decision, Drop, Entry, Grant, NoCapacity, Outcome, Request, Why
from llmproxy.core.estimates.first_token import FirstToken
from llmproxy.core.lease_observers import (
    ChargeObserver,
    FirstTokenObserver,
    LimitObserver,
    OutlierObserver,
    PlacementObserver,
)
from llmproxy.core.leases import Leases
from llmproxy.core.placement import NO_CAPACITY, Placement
from llmproxy.core.placement.first_fit import Found, Limited, Unmatched, first_fit, head, limited
from llmproxy.core.policy_registry import Faults
from llmproxy.core.preemption import Preemption
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
"""Drops or grants of one pass; the rest follow in a pass asked for at once, so that a mass release never holds the
loop."""
FAULT_RETRY_S = 1.0
"""Until the next pass of a pool after one of its policies raised an exception."""


@dataclass(slots=True)
class _Pass:
    """One `decide`: what it has seen and done so far.

    `steps` bounds how long it takes. `outdated` is the backend that was booked last, whose view is made anew only where
    somebody else is to be placed. `blocked`: nobody has room for anything. `guaranteed_none` are the bands of which
    nothing fits anywhere even under their minimum share.
    """

    now: float
    views: list[View]
    decisions: list[Decision]
    steps: int = 0
    outdated: Backend | None = None
    blocked: bool = False
    guaranteed_none: set[int] = field(default_factory=set)


class Scheduler:
    """The waiting room and the backends of one pool.

    Every event is a method that takes `now`, of this object or, where a lease is concerned, of `leases`; none decides
    anything. `decide(now)` then answers what is to be done, and `next_wakeup(now)` when to ask again although nothing
    happened. A granted request stays booked on its backend until its lease is finished. Not thread-safe, and need not
    be.
    """

    def __init__(
        self,
        pool: str,
        settings: Settings,
        occupancy: Occupancy,
        limits: UsageLimits,
        lease_serial: Iterator[int],
        placement: Placement,
    ) -> None:
        self.pool = pool
        self._settings = settings
        # Shared by all pools: a tenant may use several models, and a backend that moves still holds leases of the old.
        self._limits = limits
        self._placement = placement
        self._backends: dict[str, Backend] = {}
        self._peers = Peers(settings.health.ejected_max)
        self._outliers = OutlierDetection(settings.health, self._peers)
        self._exploration = Exploration()
        self._index: dict[str, int] = {}
        self.faults = Faults()
        self._room = WaitingRoom(settings, occupancy, limits, self.faults, self._room_on)
        self._drain = DrainRate()
        self._first_token = FirstToken()
        self._headroom = Headroom(settings)
        self._admission = Admission(
            settings, self._backends, self._room, self._headroom, limits, self._drain, self._first_token
        )
        self._min_shares = MinShares(settings.min_shares)
        self._preemption = Preemption(settings, self._headroom)
        self.charges = ChargeObserver(settings, self._room, self._min_shares, self.faults)
        self.leases = Leases(
            lease_serial,
            [
                OutlierObserver(self._outliers),
                LimitObserver(limits),
                self._preemption,
                PlacementObserver(placement, self.faults),
                self.charges,
                FirstTokenObserver(self._first_token),
            ],
        )
        self._shed: list[Drop] = []
        self._more = False
        self._decided: list[Decision] = []
        self._rests_until_s = -inf

    def reconfigure(self, settings: Settings, now: float) -> None:
        """Go by other settings, except for the choice of policies and what those were made with."""
        self._settings = settings
        self._room.reconfigure(settings, now)
        self._min_shares.reconfigure(settings.min_shares)
        self._peers.ejected_max = settings.health.ejected_max
        self._outliers.settings = settings.health
        for part in (self._headroom, self._admission, self._preemption):
            part.reconfigure(settings)

    # --- backends ------------------------------------------------------------------------------------------------

    def attach(self, backend: Backend) -> None:
        self._backends[backend.name] = backend
        self.leases.attach(backend.name)
        backend.health.peers = self._peers
        backend.exploration = self._exploration
        self._exploration.members[backend.name] = backend
        self._exploration.refresh()
        self._peers.members[backend.name] = backend.health
        self._index = {name: index for index, name in enumerate(self._backends)}

    def detach(self, backend: str) -> None:
        """Stop granting to a backend; its leases run on, and whoever waits for it alone waits in vain."""
        self.lost_kept(backend)
        self._backends.pop(backend).exploration = None
        del self._exploration.members[backend]
        self._exploration.refresh()
        self._peers.members.pop(backend).peers = None
        self.leases.detach(backend)
        self._index = {name: index for index, name in enumerate(self._backends)}

    def lost_kept(self, backend: str) -> None:
        """What `backend` kept is gone: those leave that may go nowhere else, because they refer to it."""
        for queued in self._room.bound_to(backend):
            self._room.leave(queued)
            self._shed.append(Drop(queued.request, Outcome.BAD_REQUEST, 0.0))

    @property
    def waiting(self) -> int:
        return len(self._room)

    @property
    def idle(self) -> bool:
        return not (self._backends or self._room or self.leases or self._shed)

    def alive(self) -> bool:
        """Some backend of this pool is up, be it full or resting."""
        for backend in self._backends.values():  # noqa: SIM110 - the first is up as a rule: a generator costs more
            if backend.up:
                return True
        return False

    # --- requests ------------------------------------------------------------------------------------------------

    def submit(
        self, request: Request, now: float, excluded: frozenset[str] = frozenset(), entry: Entry = Entry.NEW
    ) -> None:
        """Let a request into the waiting room; `excluded` names backends that already failed it.

        Raises Refused: `rejected_no_backends` when no backend could ever serve it, `rejected_capacity` when a limit of
        the waiting room is reached, `rate_limited` when one of its tenant or model is, `rejected_deadline` when it
        would be late even if served next.
        """
        self._room.pool_is(self.alive(), now)
        self._shed += self._admission.enter(request, excluded, entry, now)

    def cancel(self, request_id: str) -> None:
        """The client of a waiting request left, perhaps one that was shed a moment ago."""
        queued = self._room.waiting.get(request_id)
        if queued is not None:
            self._room.leave(queued)
        else:
            self._shed = [drop for drop in self._shed if drop.request.id != request_id]

    def cached(self, lease: int, backend: str, hashes: Sequence[int]) -> None:
        """The prompt and the answer of a lease that has ended are these blocks, which `backend` holds."""
        # A process that is gone holds nothing any more.
        if self.leases.is_of_process(lease, backend):
            self.faults.tell(self._placement.cached, backend, hashes)

    def ended(self, request: Request, met: bool | None, now: float) -> None:
        """The request has left the house for good. `met`: it kept its objective; None where it had none to keep."""
        self._room.band(request.band).ended(request, met, now)

    # --- decisions -----------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Decision]:
        """What is to be done now. A second call at the same `now` answers nothing, unless the pass was capped.

        Should a policy raise, what was decided until then is answered, `faults` has what it raised, and the pool rests
        for FAULT_RETRY_S: another pool must not wait for it, nor be held up by a fault that repeats.
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
        self._look_after(now)
        decisions += self.leases.take_revoked()
        if self._shed:
            decisions += self._shed
            self._shed = []
        decisions += self._preemption.clear(self._backends.values(), now)
        alive = self.alive()
        self._room.pool_is(alive, now)
        self._more = False
        if not self._room.waiting:
            # Most passes are asked for by a reading or an end while nobody waits: a large fleet need not be looked over
            # for them.
            return
        expired = self._expired(alive, now)
        decisions += expired
        # Nothing is granted while somebody who is past the deadline may still wait.
        self._more = len(expired) == PASS_MAX
        if self._more:
            return
        self._room.settle(now)
        this = _Pass(now, self.views(now), decisions)
        self._grant_all(this)
        while this.steps < PASS_MAX and not this.blocked and self._room.unpark(now):
            self._grant_all(this)
        self._more = this.steps >= PASS_MAX and bool(self._room)

    def _grant_all(self, this: _Pass) -> None:
        """Grant band by band, the highest first, until nobody has room for more or the pass is long enough."""
        for level in self._room.order:
            band, unmatched = self._room.band(level), Unmatched()
            # Who comes back may make a band below one that is owed a share.
            while (band.size or self._unpark(level, this)) and self._grant_guaranteed(this):
                if not band.size:
                    # Its last one went by its minimum share.
                    continue
                granted = self._grant_one(level, self._headroom.ceiling(level, this.now), this, unmatched)
                if isinstance(granted, NoCapacity):
                    self._preempt(level, this)
                    # Lower bands see a lower ceiling: where this one finds no room, neither may they.
                    return
                if granted is None and not self._unpark(level, this):
                    break
            if this.steps >= PASS_MAX or this.blocked:
                return

    def _grant_guaranteed(self, this: _Pass) -> bool:
        """Grant what bands have earned by their minimum shares; True when others may go on."""
        while self._min_shares.shares and this.steps < PASS_MAX:
            due = [x for x in self._min_shares.due(self._room.levels()[1:]) if x not in this.guaranteed_none]
            if not due:
                return True
            granted = self._grant_one(due[0], 1.0, this, Unmatched(), guaranteed=True)
            if isinstance(granted, NoCapacity):
                this.blocked = True
                return False
            if granted is None:
                this.guaranteed_none.add(due[0])
        return this.steps < PASS_MAX

    def _unpark(self, level: int, this: _Pass) -> int:
        """Let others back into the band in place of those that came back and fitted nowhere; answer how many."""
        back = self._room.unpark(this.now, level)
        this.steps += back
        if back:
            this.guaranteed_none.clear()
        return back

    def first_parked(self) -> Key:
        """Who is to have what a usage limit has room for: (band, negated; arrival), the least over all pools."""
        return self._room.first_parked()

    def next_wakeup(self, now: float) -> float | None:
        """When `decide` may have something to do although no event happens; None when only an event can."""
        if now < self._rests_until_s:
            return self._rests_until_s
        if self._more or self._shed:
            return now
        if not self._room.waiting:
            return self._outliers.due_s
        times = [self._outliers.due_s, *(backend.changes_at(now) for backend in self._backends.values())]
        times += [self._room.next_deadline(now), self._headroom.changes_at(now)]
        return min([time for time in times if time is not None], default=None)

    def _grant_one(
        self, level: int, ceiling: float, this: _Pass, unmatched: Unmatched, *, guaranteed: bool = False
    ) -> Grant | NoCapacity | None:
        """Book the band's next request; None when there is room, but for none of those looked at."""
        band = self._room.band(level)
        if this.outdated is not None:
            this.views[self._index[this.outdated.name]] = this.outdated.view(this.now)
            this.outdated = None
        kept = not guaranteed and self._headroom.keeps_last(level, this.views, this.now)
        views = this.views
        if not guaranteed and any(self._queue_closes(view, level, this.now) for view in views):
            views = [
                replace(view, available=False) if self._queue_closes(view, level, this.now) else view for view in views
            ]
        while True:
            found: Found | Limited | NoCapacity | None
            if kept:
                found = limited(head(band, this.now), self._limits) or NO_CAPACITY
            else:
                patient = self._room.levels()[-1] == level
                found = first_fit(
                    band, self._placement, views, ceiling, self._limits, unmatched, this.now, patient=patient
                )
            if not isinstance(found, Limited):
                break
            # Its tenant or model has enough in flight: it steps aside, and the flow goes on behind it.
            self._room.park(found.queued, found.limit)
            this.steps += 1
            if not band.size or this.steps >= PASS_MAX:
                return None
        if not isinstance(found, Found):
            return found
        return self._book(found, this, guaranteed)

    def _book(self, found: Found, this: _Pass, guaranteed: bool) -> Grant:
        queued, placed, now = found.queued, found.placed, this.now
        request = queued.request
        band = self._room.band(request.band)
        why = Why(self._room.sizes(), band.flows, band.fairness.standing(request.flow), found.passed_over, guaranteed)
        ahead, left_s = len(self._room) - 1, self._room.own_left_s(queued, now)
        self._room.leave(queued)
        backend = self._backends[placed.backend]
        lease = self.leases.book(request, placed, backend, now, guaranteed=guaranteed)
        this.outdated = backend
        grant = Grant(lease, request, placed, now, ahead, why, left_s)
        this.decisions.append(grant)
        self._drain.granted(request.id, now)
        this.steps += 1
        return grant

    def _preempt(self, level: int, this: _Pass) -> None:
        """Take back what may be taken back, for the head of a band that is blocked."""
        band = self._room.band(level)
        if not self._preemption.open:
            return
        queued = head(band, this.now)
        this.decisions += self._preemption.choose(queued.request, queued.excluded, band.size, this.now)

    def _queue_closes(self, view: View, level: int, now: float) -> bool:
        """Whether a band goes to a backend no more because somebody waits inside its engine.

        Below `default` it does not while a higher band is in use, which would stand behind it there. Above `default` it
        goes there no further than the engine was seen to run: it would stand behind others, and here it is first.
        """
        if not view.waiting or view.probed or level == DEFAULT:
            return False
        return self._headroom.used_above(level, now) if level < DEFAULT else view.doubtful

    def _room_on(self, name: str, level: int, now: float) -> int:
        """How many more requests of the band `level` a backend has room for."""
        view = self._backends[name].view(now)
        if self._queue_closes(view, level, now) or not view.has_room(self._headroom.ceiling(level, now)):
            return 0
        return max(1, view.limit + view.look_ahead - view.load)

    def _look_after(self, now: float) -> None:
        """Eject who hangs or has become slow; what one that hangs has not begun may be tried elsewhere."""
        hung, slow = self._outliers.outliers(now)
        for name, silent in hung.items():
            if self._backends[name].hangs(silent, now):
                self.leases.revoke(self._outliers.give_up(name))
        for name, why in slow.items():
            self._backends[name].slowed(why, now)

    def _expired(self, alive: bool, now: float) -> list[Drop]:
        drops = []
        for queued in self._room.due(now, PASS_MAX):
            outcome = Outcome.EXPIRED if alive and not queued.held else Outcome.EXPIRED_NO_BACKENDS
            drops.append(Drop(queued.request, outcome, self._drain.retry_after_s(len(self._room), now)))
        return drops

    # --- looking in ----------------------------------------------------------------------------------------------

    def views(self, now: float) -> list[View]:
        return [backend.view(now) for backend in self._backends.values()]

    def snapshot(self, now: float, flows_max: int) -> PoolSnapshot:
        """What waits and who has room, with at most so many flows."""
        return self._look(now).shown(
            self.views(now),
            alive=self.alive(),
            leases=len(self.leases),
            preempting=self._preemption.pending,
            flows_max=flows_max,
        )

    def position(self, name: str, now: float) -> Position | None:
        """Where the waiting request of this label or id stands; None where nothing of that name waits."""
        queued = self._room.find(name)
        return None if queued is None else self._look(now).position(queued)

    def choices(self, now: float) -> PoolChoices:
        """Where the last requests went, and why not elsewhere."""
        placement = self._placement
        return PoolChoices(self.pool, tuple(placement.explained())[::-1], placement.learned(self._backends, now))

    def parked(self) -> dict[tuple[int, str], int]:
        """(Band, usage limit) -> requests that wait for it."""
        return self._room.parked_by()

    def _look(self, now: float) -> Look:
        return Look(self.pool, now, self._settings, self._room, self._headroom, self._first_token)

    def check(self, now: float) -> None:
        """Raise AssertionError when two accounts of the same thing differ."""
        assert not self.faults, "a policy raised an exception"
        self._room.check(now)
        self._outliers.check()
        self.leases.check()
        for backend in self._backends.values():
            backend.check()
