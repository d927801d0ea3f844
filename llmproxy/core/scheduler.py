"""The scheduler of one pool: decides which request goes next and to which backend, and owns the scheduling state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType

from llmproxy.core import scheduling_pass
from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.view import View
from llmproxy.core.domain import (
    AdmissionKind,
    Decision,
    Drop,
    Grant,
    GrantReason,
    Learned,
    NoCapacity,
    NoMatch,
    Outcome,
    Placed,
    Refused,
    Request,
    Waited,
)
from llmproxy.core.estimates.line import FirstToken
from llmproxy.core.lease_observers import (
    BlameObserver,
    ChargeObserver,
    FirstTokenObserver,
    LimitObserver,
    OutlierObserver,
    PlacementObserver,
    ReservationObserver,
    TransferObserver,
)
from llmproxy.core.leases import LeaseObserver, Leases
from llmproxy.core.overflow import MoneyObserver, Overflow
from llmproxy.core.placement.policy import NO_CAPACITY, Placement
from llmproxy.core.placement.staged import StagedPlacement, as_decode
from llmproxy.core.policy_registry import Faults
from llmproxy.core.pool_backends import PoolBackends
from llmproxy.core.preemption import Preemption
from llmproxy.core.queueing.admission import Admission
from llmproxy.core.queueing.blocked import Key
from llmproxy.core.queueing.headroom import Headroom
from llmproxy.core.queueing.min_share import MinShares
from llmproxy.core.queueing.occupancy import DrainRate, Occupancy
from llmproxy.core.queueing.queue import Queued
from llmproxy.core.queueing.usage_limits import UsageLimits
from llmproxy.core.queueing.waiting_room import WaitingRoom
from llmproxy.core.scheduling_pass import PASS_LEAST, PASS_PRICES, Parts, Pass
from llmproxy.core.settings import Settings
from llmproxy.core.snapshot import PoolChoices, PoolInspector, PoolSnapshot, Position

FAULT_RETRY_S = 1.0  # Pause of a pool after a policy raised an exception.


class Scheduler:
    """The waiting room and the backends of one pool.

    Each event is a method of this object, of `leases` or of a `Backend`. Events change state and decide nothing.
    `decide(now)` then returns the decisions, and `next_wakeup(now)` the time to call it again without an event. A
    granted request keeps its slot until its lease is finished. Not thread-safe.
    """

    def __init__(
        self,
        pool: str,
        settings: Settings,
        occupancy: Occupancy,
        limits: UsageLimits,
        lease_serial: Iterator[int],
        placement: Placement,
        faults: Faults,
        observers: Sequence[LeaseObserver] = (),
        externals: Mapping[str, Backend] = MappingProxyType({}),
    ) -> None:
        self.pool = pool
        self.names = frozenset({pool})  # The base models that the pool serves, or served last.
        self._settings = settings
        self._limits = limits  # Shared by all pools, because a tenant may use several models.
        if not isinstance(placement, StagedPlacement):
            placement = StagedPlacement(placement, settings.disaggregation)
        self._placement = placement
        self._backends = PoolBackends(settings.health)
        self._faults = faults  # Shared by all pools.
        self._drain = DrainRate()
        self._room = WaitingRoom(settings, occupancy, limits, self._faults, self._room_on, self._drain)
        placement.inner.watch(self._room.claims)
        self._first_token = first_token = FirstToken()
        self._headroom = headroom = Headroom(settings)
        drain, backends = self._drain, self._backends
        self._admission = Admission(
            settings, backends.by_name, self._room, headroom, limits, drain, first_token, placement.ready, faults
        )
        self._min_shares = MinShares(settings.min_shares)
        self._preemption = Preemption(settings, self._headroom)
        self.charges = ChargeObserver(settings, self._room, self._min_shares, self._faults)
        self._reservations = ReservationObserver()
        self._blame = BlameObserver()
        self._prefilled: list[tuple[Request, frozenset[str]]] = []
        self.leases = Leases(
            lease_serial,
            [
                self._reservations,
                TransferObserver(placement),
                self._blame,
                OutlierObserver(self._backends.outliers),
                LimitObserver(limits),
                self._preemption,
                PlacementObserver(placement.observer, self._faults),
                self.charges,
                FirstTokenObserver(self._first_token),
                *observers,
            ],
        )
        shares, preemption = self._min_shares, self._preemption
        self._parts = Parts(self._room, backends, placement, headroom, shares, preemption, limits, self.leases, drain)
        charged = Leases(lease_serial, [LimitObserver(limits), self.charges, MoneyObserver(limits.days)])
        self.overflow = Overflow(externals, backends.by_name, self._room, limits, charged)
        self._admission.overflow = self.overflow
        self._shed: list[Drop] = []
        self._more = False
        self._decided: list[Decision] = []
        self._rests_until_s = -inf
        self._place_changes_s: float | None = None

    def reconfigure(self, settings: Settings, now: float) -> None:
        """Applies new settings. The policy objects are kept, with the settings of their creation."""
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
        """Removes a backend from the pool. Its leases continue."""
        self._backends.remove(backend)
        self.leases.detach(backend)

    def inherit(self, other: Scheduler) -> None:
        """Adds the fairness balances and the bands in use of a pool whose requests this pool takes over."""
        self._headroom.inherit(other._headroom)
        own = self.balances()
        for level, balances in other.balances().items():
            mine = own.get(level, {})
            self.restore(level, {flow: balance + mine.get(flow, 0.0) for flow, balance in balances.items()})

    def remove_waiting(self, leaves: Callable[[Request], bool]) -> list[tuple[Request, frozenset[str]]]:
        """Removes the waiting requests for which `leaves` is true; returns each with its excluded backends."""
        leaving = [queued for queued in self._room.waiting.values() if leaves(queued.request)]
        for queued in leaving:
            self._room.leave(queued)
        return [(queued.request, queued.excluded) for queued in leaving]

    def drop_bound(self, backend: str) -> None:
        """Drops the waiting requests that only `backend` may serve, because it left or its process is gone.

        Clients get `bad_request`.
        """
        for queued in [queued for queued in self._room.waiting.values() if queued.request.backend == backend]:
            self._shed.append(Drop(queued.request, Outcome.BAD_REQUEST, 0.0, self._room.leave(queued)))

    @property
    def waiting(self) -> int:
        return len(self._room)

    @property
    def idle(self) -> bool:
        leases = self.leases, self.overflow.leases, self._reservations.by_request
        return not any((self._backends.by_name, self._room, *leases, self._shed, self._prefilled))

    # --- requests ------------------------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        now: float,
        excluded: frozenset[str] = frozenset(),
        entry: AdmissionKind = AdmissionKind.NEW,
    ) -> None:
        """Adds a request to the waiting room. `excluded` names backends that must not serve it, mostly after a failure.

        Raises Refused:
            `rejected_no_backends`: no backend that may serve the request is up, and the request is not held for one.
            `bad_request`: the backend that alone may serve the request has lost the state to which it refers.
            `rejected_capacity`: a bound of the waiting room is reached.
            `rate_limited`: a rate or a daily budget of the tenant or of the model is used up.
            `rejected_deadline`: the request would be late even if it were served next.
            `upstream_timeout`: a retry of a request that reached a time limit on a backend that was at work.
        """
        if entry is AdmissionKind.PREFILLED:
            self._prefilled.append((request, excluded))
            return
        if entry is AdmissionKind.RETRY and request.id in self._blame.too_long:
            message = "The answer takes longer than a time limit, although the backend works, so it is not tried again."
            raise Refused(Outcome.UPSTREAM_TIMEOUT, message)
        self._room.deadlines.set_pool_up(self._backends.any_up(), now)
        self._shed += self._admission.enter(request, excluded, entry, now)

    def cancel(self, request_id: str) -> Waited | None:
        """Removes a request without a decision. Returns why it waited; None if nothing blocked it."""
        queued = self._room.waiting.get(request_id)
        if queued is not None:
            return self._room.leave(queued)
        shed = next((drop for drop in self._shed if drop.request.id == request_id), None)
        if shed is not None:
            self._shed.remove(shed)
            return shed.waited
        self._prefilled = [one for one in self._prefilled if one[0].id != request_id]
        return None

    def cached(self, lease: int | None, backend: str, hashes: Sequence[int]) -> None:
        """Notes blocks as cached on `backend`; see `Pools.cached`. Does nothing if the process of `lease` is gone."""
        is_there = backend in self._backends.by_name
        if is_there and (lease is None or self.leases.is_on_current_process(lease, backend)):
            self._faults.notify(self._placement.observer.cached, backend, hashes)

    def ended(self, request: Request, met: bool | None, now: float, *, served_here: bool) -> None:
        """Notes the end of a request. `served_here`: whether this pool serves its model now.

        If not, an earlier attempt may have been granted here. `met`: whether the request met its objective; None if it
        has none, or if the client caused the miss.
        """
        if request.id in self._reservations.by_request:
            self._abandon_prompt(request.id, self._reservations.release(request.id))
        if request.id in self._blame.failed or request.id in self._blame.too_long:
            self._blame.ended(request.id)
        if request.id in self.charges.between:
            self.charges.ended(request)
        if served_here and (on_ended := self._room.bands[request.band].on_ended) is not None:
            self._faults.notify(on_ended, request, met, now)

    def balances(self) -> dict[int, Mapping[str, float]]:
        """Returns the flow balances of each band, for the process that takes over this pool."""
        return {level: self._room.bands[level].fairness.balances() for level in self._room.order}

    def restore(self, band: int, balances: Mapping[str, float]) -> None:
        """Takes over the flow balances of a band from another process."""
        self._faults.notify(self._room.bands[band].fairness.restore, balances)

    # --- decisions -----------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Decision]:
        """Returns the decisions that are due. A second call at the same `now` returns none, unless the first reached
        its maximum.

        If a policy raises, `faults` gets the exception, and the earlier decisions are returned. The pool then rests for
        FAULT_RETRY_S, so that a repeated exception does not delay other pools.
        """
        if now < self._rests_until_s:
            return []
        decisions = self._decided
        try:
            if now >= self._backends.outliers.check_s:
                self.leases.revoke(self._backends.eject_outliers(now), hung=True)
            if self.leases.revoked:
                decisions += self.leases.take_revoked()
            if self._shed:
                decisions += self._shed
                self._shed = []
            if self._prefilled:
                self._grant_answers(decisions, now)
            if self._preemption.open:
                decisions += self._preemption.clear(self._backends.by_name.values(), now)
            self._more = False
            # Most calls follow a reading or the end of a lease while no request waits, and need no views.
            if self._room.waiting:
                self._pass(now)
                if self.overflow.externals:
                    decisions += self.overflow.grants(now)
        except Exception as fault:  # noqa: BLE001 - a policy may be a plugin
            self._faults.note(fault)
            self._rests_until_s = now + FAULT_RETRY_S
        decided, self._decided = self._decided, []
        return decided

    def _pass(self, now: float) -> None:
        """Runs a scheduling pass: drops requests beyond their deadline, and then grants requests.

        Sets `_more` if the pass reached its maximum of steps, so that another pass must follow.
        """
        decisions = self._decided
        # With many backends, each step takes longer.
        most = min(scheduling_pass.PASS_MAX, max(PASS_LEAST, PASS_PRICES // (len(self._backends.by_name) or 1)))
        self._room.deadlines.set_pool_up(self._backends.any_up(), now)
        # Requests beyond their deadline are dropped before any grant.
        if due := self._room.deadlines.due(now, most):
            decisions += self._expired(due, now)
            self._more = len(due) == most
            if self._more:
                return
        self._room.refresh(now)
        this = Pass(self._parts, now, self._backends.views(now), decisions, most)
        self._placement.begin(this.views)
        this.grant_all()
        while self._room.blocked.size and this.steps < most and not this.blocked and self._room.readmit(now):
            this.grant_all()
        if this.retries:
            self._readmit_stranded(this.retries, now)
        self._more = this.steps >= most and bool(self._room)
        if self._room.waiting and not self._more:
            for view in this.views:
                if not view.available:
                    self._backends.by_name[view.backend].shorten_ejection(now)
        self._place_changes_s = self._placement.inner.changes_at(now)

    def _readmit_stranded(self, retries: list[Queued], now: float) -> None:
        """Admits retries again if no backend is left for them, because it went down or left while they waited.

        They are held, or dropped.
        """
        for first in retries:
            model, excluded, backends = first.request.model, first.excluded, self._backends.by_name.values()
            able = [backend for backend in backends if model in backend.served and backend.name not in excluded]
            if any(first.on_hold or backend.up for backend in able):
                continue
            waiting = [one for one in self._room.waiting.values() if one.excluded == excluded]
            for queued in waiting:
                if queued.request.model != model or queued.on_hold is not first.on_hold:
                    continue
                request, waited = queued.request, self._room.leave(queued)
                try:
                    self._shed += self._admission.enter(request, excluded, AdmissionKind.RETRY, now)
                except Refused as refused:
                    self._decided.append(Drop(request, refused.outcome, refused.retry_after_s or 0.0, waited))

    def _grant_answers(self, decisions: list[Decision], now: float) -> None:
        """Grants a backend for the decode stage of each prefilled request, before any waiting request.

        A slot was reserved for it. If the backend of that slot is unavailable and no other backend has a free slot, the
        request returns to the head of its flow and starts again with its prompt.
        """
        self._placement.begin(self._backends.views(now))
        prefilled, self._prefilled = self._prefilled, []
        for request, excluded in prefilled:
            prefilled_on = self._reservations.release(request.id)
            others = excluded if prefilled_on is None else excluded | {prefilled_on}
            answer = as_decode(request)
            placed: Placed | NoCapacity | NoMatch = NO_CAPACITY
            try:
                placed = self._placement.place(answer, self._backends.views(now), 1.0, others, now)
            except Exception as fault:  # noqa: BLE001 - a policy may be a plugin, and later requests must not be lost
                self._faults.note(fault)
            if isinstance(placed, Placed):
                backend, first = self._backends.by_name[placed.backend], self._backends.by_name.get(prefilled_on or "")
                lease = self.leases.book(answer, placed, backend, now, prefilled_on=first)
                why = GrantReason(self._room.sizes(), 1, (), 0)
                decisions.append(Grant(lease, answer, placed, now, 0, why, request.deadline_s - now))
                continue
            self._abandon_prompt(request.id, prefilled_on)
            self._limits.end_between_stages(request.id)
            try:
                self._shed += self._admission.enter(request, excluded, AdmissionKind.PREEMPTED, now)
            except Refused as refused:
                decisions.append(Drop(request, refused.outcome, refused.retry_after_s or 0.0))

    def _abandon_prompt(self, request_id: str, prefilled_on: str | None) -> None:
        """Notes that nobody will fetch the computed prompt of a request from its prefill backend."""
        if (first := self._backends.by_name.get(prefilled_on or "")) is not None:
            first.unpin_kv(request_id)

    def first_blocked(self) -> Key:
        """Returns (-band, arrival) of the first request that a usage limit blocked and now allows; else infinities."""
        return self._room.blocked.first(self._limits)

    def next_wakeup(self, now: float) -> float | None:
        """Returns when `decide` must be called even without an event; None if only an event can cause a decision."""
        if now < self._rests_until_s:
            return self._rests_until_s
        if self._more or self._shed or self._prefilled:
            return now
        if not self._room.waiting:
            return self._backends.outliers.due_s
        times = [part.changes_at(now) for part in (self._backends, self._headroom, self.overflow)]
        times += [self._room.deadlines.next(now), self._place_changes_s]
        return min([time for time in times if time is not None], default=None)

    def _room_on(self, name: str, level: int, now: float) -> int:
        """Returns the free slots of a backend, at least 1, if it takes a request of band `level` now; else 0."""
        view = self._backends.by_name[name].view(now)
        seen = self._headroom.views_for(level, [view], now)
        if not self._placement.ready(seen, level, self._headroom.ceiling(level, now), now):
            return 0
        return max(1, view.limit + view.look_ahead - view.load)

    def _expired(self, due: Iterable[Queued], now: float) -> list[Drop]:
        """Removes the `due` requests from the waiting room. Returns a Drop for each."""
        drops: list[Drop] = []
        for queued, waited in [(queued, self._room.leave(queued)) for queued in due]:
            model = queued.request.model
            alive = any(backend.up and model in backend.served for backend in self._backends.by_name.values())
            outcome = Outcome.EXPIRED if alive and not queued.on_hold else Outcome.EXPIRED_NO_BACKENDS
            drops.append(Drop(queued.request, outcome, self._drain.retry_after_s(len(self._room), now), waited))
        return drops

    # --- inspection ----------------------------------------------------------------------------------------------

    def work_s(self, now: float) -> float | None:
        """Returns the seconds of work of all waiting requests; None if the placement cannot estimate it."""
        room = self._room
        views = self._backends.views(now)
        return self._placement.inner.work_s(len(room), room.prompt_tokens, room.output_tokens, views)

    def snapshot(self, now: float, flows_max: int) -> PoolSnapshot:
        """Returns the waiting requests and the free slots of the backends, with at most `flows_max` flows."""
        shown = self._look(now).shown(
            self._backends.views(now),
            alive=self._backends.any_up(),
            leases=len(self.leases),
            preempting=self._preemption.pending,
            flows_max=flows_max,
        )
        return replace(shown, paces=self._backends.outliers.paces(now))

    def position(self, name: str, now: float) -> Position | None:
        """Returns the position of the waiting request with this label or id; None if there is none."""
        queued = self._room.find(name)
        return None if queued is None else self._look(now).position(queued)

    def choices(self, now: float) -> PoolChoices:
        """Returns the last placements, with the prices of all candidates."""
        return PoolChoices(self.pool, tuple(self._placement.inner.explained())[::-1], self.learned(now))

    def learned(self, now: float) -> Learned | None:
        """Returns the speed of the pool as the placement learned it; None if the placement does not learn."""
        return self._placement.inner.learned(self._backends.by_name, now)

    def blocked(self) -> dict[tuple[int, str], int]:
        """Returns the number of blocked requests per (band, usage limit or backend)."""
        return self._room.blocked.counts()

    def views(self, now: float) -> Sequence[View]:
        return self._backends.views(now)

    def _look(self, now: float) -> PoolInspector:
        return PoolInspector(
            self.pool, now, self._settings, self._room, self._headroom, self._placement, self._first_token
        )

    def check(self, now: float) -> None:
        """Raises AssertionError if two counts of the same quantity differ, also inside the components."""
        assert not self._faults, "a policy raised an exception"
        self._room.check(now)
        self._backends.check()
        self.leases.check()
        self.overflow.leases.check()
        self._reservations.check()
