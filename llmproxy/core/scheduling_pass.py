"""A scheduling pass over one pool: chooses requests and backends, band by band."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import chain, islice

from msgspec import Struct

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.view import View, rooms
from llmproxy.core.domain import DEFAULT, Decision, Grant, GrantReason, NoCapacity, Placed, WaitReason
from llmproxy.core.leases import Leases
from llmproxy.core.placement.first_fit import Fit, Limited, Unmatched, first_fit, head, limited, passes_over
from llmproxy.core.placement.policy import NO_CAPACITY, could_serve
from llmproxy.core.placement.staged import StagedPlacement, as_prefill
from llmproxy.core.pool_backends import PoolBackends
from llmproxy.core.preemption import LOOK_MAX, Preemption
from llmproxy.core.queueing.headroom import Headroom
from llmproxy.core.queueing.min_share import MinShares
from llmproxy.core.queueing.occupancy import DrainRate
from llmproxy.core.queueing.queue import Band, Queued
from llmproxy.core.queueing.usage_limits import UsageLimits
from llmproxy.core.queueing.waiting_room import WaitingRoom

LOOK_AGAIN = 8  # `Pass.most / LOOK_AGAIN` requests of a band that wait for a full backend are tried again in a pass.
PASS_MAX = 64  # Maximum number of steps of a pass, so that a mass release never blocks the event loop.
PASS_LEAST = 8  # The maximum number of steps falls with the number of backends, but not below this.
PASS_PRICES = 512  # Maximum of steps times backends, unless PASS_LEAST allows more steps.
LINES_A_STEP = 64  # A search that walks over so many flows takes about as long as a step.


class Parts(Struct, frozen=True):
    """The parts of a pool that a pass uses."""

    room: WaitingRoom
    backends: PoolBackends
    placement: StagedPlacement
    headroom: Headroom
    min_shares: MinShares
    preemption: Preemption
    limits: UsageLimits
    leases: Leases
    drain: DrainRate


class Pass(Struct):
    """A scheduling pass over one pool. `grant_all` adds its decisions to `decisions`."""

    parts: Parts
    now: float
    views: list[View]
    decisions: list[Decision]
    most: int  # Maximum of `steps`.
    # Requests granted, blocked, readmitted or assigned to a backend without room so far, and flows / LINES_A_STEP.
    steps: int = 0
    outdated: Sequence[Backend] = ()  # Backends booked last, whose views are refreshed before the next placement.
    blocked: bool = False  # Whether no backend has room for any request.
    # Bands whose requests fit on no backend, even within the minimum share of the band.
    guaranteed_none: set[int] = set()
    retries: list[Queued] = []  # Requests that failed before, and found no backend in this pass.

    def grant_all(self) -> None:
        """Grants requests, the highest band first, until no slot is free or the pass has its maximum of steps."""
        # A blocked request that was readmitted may fit where the others of its band did not.
        self.guaranteed_none.clear()
        for level in self.parts.room.order:
            band = self.parts.room.bands[level]
            if not band.size and not self.parts.room.blocked.size:
                continue
            unmatched = Unmatched(looks=self.most // LOOK_AGAIN, retries=self.retries)
            # After a readmission to a higher band, a band below it may be due for its minimum share.
            while band.size or (self.parts.room.blocked.size and self._readmit(level)):
                if self.steps >= self.most or (self.parts.min_shares.shares and not self._grant_guaranteed()):
                    break
                if not band.size:
                    # The minimum share granted the band's last request, or only higher bands were readmitted.
                    continue
                granted = self._grant_one(level, self.parts.headroom.ceiling(level, self.now), unmatched)
                if isinstance(granted, NoCapacity):
                    self._preempt(level)
                    self._set_wait_reason(level)
                    # Lower bands have lower ceilings, so they find no room either.
                    return
                if granted is None and not self._readmit(level):
                    self.parts.room.set_wait_reason(level, WaitReason.NO_MATCH, self.now)
                    break
            if self.steps >= self.most or self.blocked:
                return
            if level > DEFAULT and (band.size or self.parts.room.blocked.size):
                self._preempt(level, some_room=True)

    def _set_wait_reason(self, level: int) -> None:
        """Records why the band `level` and the lower bands wait."""
        ceiling, views = self.parts.headroom.ceiling(level, self.now), self.views
        if not any(view.available for view in views):
            reason = WaitReason.NO_BACKEND
        elif True not in rooms(views, 1.0):
            reason = WaitReason.FULL
        elif True in rooms(views, ceiling) and not self.parts.headroom.keeps_slot(level, views, self.now):
            reason = WaitReason.PROMPTS
        else:
            reason = WaitReason.CEILING
        self.parts.room.set_wait_reason(level, reason, self.now)
        for lower in self.parts.room.levels():
            if lower < level:
                self.parts.room.set_wait_reason(lower, WaitReason.HIGHER_BAND, self.now)

    def _grant_guaranteed(self) -> bool:
        """Grants requests of bands with a credit from their minimum share.

        Returns False if the pass must end: no backend has room for any band, or the maximum of steps is reached.
        """
        while self.steps < self.most:
            due = [x for x in self.parts.min_shares.due(self.parts.room.levels()[1:]) if x not in self.guaranteed_none]
            if not due:
                return True
            granted = self._grant_one(due[0], 1.0, Unmatched(), guaranteed=True)
            if isinstance(granted, NoCapacity) and True not in rooms(self.views, 1.0):
                self.blocked = True
                return False
            if not isinstance(granted, Grant):
                # The objectives of its own streams may close all backends to the band. Other bands go on.
                self.guaranteed_none.add(due[0])
        return self.steps < self.most

    def _readmit(self, level: int) -> int:
        """Moves more blocked requests of a band and of higher bands back to their flows. Returns their number."""
        readmitted = self.parts.room.readmit(self.now, level)
        self.steps += readmitted
        if readmitted:
            self.guaranteed_none.clear()
        return readmitted

    def _grant_one(
        self, level: int, ceiling: float, unmatched: Unmatched, *, guaranteed: bool = False
    ) -> Grant | NoCapacity | None:
        """Grants the next request of a band under `ceiling` (0..1], or by its minimum share if `guaranteed`.

        Returns None if no examined request can use the free slots, or the steps or requests ran out. Returns NoCapacity
        if the band has no free slot. Requests that wait for a usage limit or for their only backend leave their flows.
        """
        band = self.parts.room.bands[level]
        for backend in self.outdated:
            self.parts.backends.refresh(self.views, backend, self.now)
        self.outdated = ()
        kept = not guaranteed and self.parts.headroom.keeps_slot(level, self.views, self.now)
        views = self.views if guaranteed else self.parts.headroom.views_for(level, self.views, self.now)
        placement, limits = self.parts.placement, self.parts.limits
        while True:
            found: Fit | Limited | NoCapacity | None
            assigned = 0
            if kept:
                found = limited(head(band, self.now), limits) or NO_CAPACITY
            else:
                # `any_below` counts blocked requests, which may be readmitted in this pass and take the declined room.
                patient = len(self.parts.room.waiting) == 1 or not self.parts.room.any_below(level)
                unmatched.later_most = max(1, self.most - self.steps)
                found = first_fit(band, placement, views, ceiling, limits, unmatched, self.now, patient=patient)
                assigned = len(unmatched.later)
                if assigned or unmatched.lines >= LINES_A_STEP:
                    self._count_search(band, unmatched)
            if isinstance(found, Limited):
                # A usage limit of the request is full, so it leaves the flow until the limit has room.
                self.parts.room.block(found.queued, found.limit)
                self.steps += 1
            elif found is not None or not assigned:
                # Without a match, a further search tries the requests behind the assigned ones.
                break
            if not band.size or self.steps >= self.most:
                return None
        if not isinstance(found, Fit):
            return found
        return self._book(found, guaranteed)

    def _count_search(self, band: Band, unmatched: Unmatched) -> None:
        """Counts the steps of a search, and sorts the requests that it assigned to backends without room."""
        for queued in unmatched.later:
            band.sort(queued)
        self.steps += len(unmatched.later) + unmatched.lines // LINES_A_STEP
        unmatched.later.clear()
        unmatched.lines %= LINES_A_STEP

    def _book(self, found: Fit, guaranteed: bool) -> Grant:
        """Books a lease for a request on the backend that was chosen, and adds the Grant to `decisions`."""
        queued, placed, now = found.queued, found.placed, self.now
        request = queued.request
        band = self.parts.room.bands[request.band]
        ahead, left_s = len(self.parts.room.waiting) - 1, self.parts.room.deadlines.own_left_s(queued, now)
        inverted = ahead > 0 and not guaranteed and self._inverts(placed, request.band, now)
        standing = band.fairness.standing(request.flow)
        # Most grants find no other waiting request.
        sizes, flows = self.parts.room.sizes() if ahead else ((request.band, 1),), band.flows
        waited = self.parts.room.leave(queued)
        backend, answers_on = self.parts.backends.by_name[placed.backend], None
        probe = backend.health.ejected
        why = GrantReason(sizes, flows, standing, found.passed_over, guaranteed, inverted, waited, probe)
        if placed.answers_on is not None:
            request, answers_on = as_prefill(request), self.parts.backends.by_name[placed.answers_on]
        lease = self.parts.leases.book(request, placed, backend, now, guaranteed=guaranteed, answers_on=answers_on)
        self.outdated = [backend] if answers_on is None else [backend, answers_on]
        grant = Grant(lease, request, placed, now, ahead, why, left_s)
        self.decisions.append(grant)
        if request.band > DEFAULT and backend.view(now).waiting:
            # The engine queues the request behind its waiting requests.
            self.decisions += self.parts.preemption.clear((backend,), now)
        self.parts.drain.granted(request, now)
        self.steps += 1
        return grant

    def _inverts(self, placed: Placed, level: int, now: float) -> bool:
        """Returns whether a grant to band `level` takes a slot that a waiting request of a higher band could use."""
        backend = placed.answers_on or placed.backend
        room = self.parts.room
        above = [one for one in room.order if one > level and room.bands[one].size and room.room_on(backend, one, now)]
        if not above:
            return False
        view = self.parts.backends.by_name[backend].view(now)
        return passes_over(map(room.bands.__getitem__, above), view, self.parts.limits)

    def _preempt(self, level: int, *, some_room: bool = False) -> None:
        """Preempts leases for waiting requests of a band above `default`.

        `some_room`: some backends have free slots, so requests that one of these could serve are left out.
        """
        if level <= DEFAULT or not self.parts.preemption.open:
            return
        ready: Sequence[View] = ()
        if some_room:
            seen = self.parts.headroom.views_for(level, self.views, self.now)
            ready = self.parts.placement.ready(seen, level, self.parts.headroom.ceiling(level, self.now), self.now)
        with closing(self.parts.room.bands[level].heads()) as heads:
            waiting = (
                one
                for one in chain(islice(heads, LOOK_MAX), self.parts.room.blocked.at_backends(level))
                if limited(one, self.parts.limits) is None
                and not any(could_serve(one.request, one.excluded, view) for view in ready)
            )
            self.decisions += self.parts.preemption.choose(waiting, self.now)
