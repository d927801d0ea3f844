"""A small fleet of unequal backends for the state machine (`test_machine`) and for `random_events`.

`World` passes any order of events to `Pools`, and checks every decision against the promises in `account`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import inf
from random import Random
from typing import Any

from msgspec import structs

from llmproxy.core.domain import (
    AdmissionKind,
    Decision,
    Drop,
    Grant,
    Listing,
    Outcome,
    Preempt,
    Reading,
    Refused,
    Request,
    Revoke,
    Trouble,
    Usage,
    Verdict,
)
from llmproxy.core.lease_events import Progress, Returned, Started
from llmproxy.core.placement.policy import make
from llmproxy.core.pools import Pools
from llmproxy.core.settings import Settings
from tests.core.machine import fleets
from tests.core.machine.account import Books, Row, Waiter, assert_nothing_left, serves


class World:
    """`Pools` and the independent books. `begins_s` is the start of the clock."""

    def __init__(
        self,
        fleet: Mapping[str, tuple[int | None, Listing]],
        settings: Settings,
        seed: int = 0,
        own_checks: bool = True,
        begins_s: float = 0.0,
    ) -> None:
        self.fleet = fleet
        self.settings = settings
        self.own_checks = own_checks
        placements = partial(make, settings.placement, Random(seed))
        self.pools = Pools(settings, {name: fixed for name, (fixed, _) in fleet.items()}, {}, placements)
        self.books = Books(settings, begins_s)
        self.waiting, self.held = self.books.waiting, self.books.held
        self.ended: dict[str, str] = {}
        self.gone: set[str] = set()
        self.shed: set[str] = set()
        self.bereft: set[str] = set()
        self.trace: list[str] = []
        self._clocks: dict[str, tuple[float, bool]] = {}
        self._serial = 0
        for name, (_, listed) in fleet.items():
            self.pools.backends[name].answered(self.now)
            self.pools.listed(name, listed)

    @property
    def now(self) -> float:
        return self.books.now

    # --- events --------------------------------------------------------------------------------------------------

    def submit(
        self, pool: str, adapter: str | None, band: int, flow: str, max_wait_s: float = fleets.FOR_EVER_S, **given: Any
    ) -> None:
        self._serial += 1
        facts = {"body_bytes": 10, "prompt_tokens": 20, "output_tokens": 20} | given
        request = Request(
            id=f"r{self._serial}", pool=pool, model=adapter or pool, adapter=adapter, band=band, flow=flow,
            arrived_s=self.now, deadline_s=self.now + max_wait_s, stream=self._serial % 2 == 0,
            weight=3.0 if flow == "g" else 1.0, **facts,
        )  # fmt: skip
        self._enter(request, frozenset(), AdmissionKind.NEW)

    def cancel(self, request_id: str) -> None:
        request = self.waiting.pop(request_id).request
        self.pools.cancel(request)
        self._end(request, "cancelled")

    def started(self, lease: int) -> None:
        self.held[lease].started = True
        self.pools.apply(Started(self.held[lease].grant.lease), self.now)

    def progress(self, lease: int, tokens: int) -> None:
        self.pools.apply(Progress(self.held[lease].grant.lease, tokens), self.now)

    def finish(self, lease: int, verdict: Verdict, tokens: int | None, retry: bool) -> None:
        held = self.held.pop(lease)
        request = held.grant.request
        if verdict is Verdict.PREEMPTED and not held.taken_back:
            verdict = Verdict.FAILED
        usage = (
            Usage(request.prompt_tokens, tokens) if tokens is not None and verdict is not Verdict.PREEMPTED else None
        )
        self.pools.apply(Returned(held.grant.lease, verdict, usage), self.now)
        if verdict is Verdict.PREEMPTED:
            self._enter(request, held.excluded, AdmissionKind.PREEMPTED)
        elif retry and verdict not in (Verdict.SERVED, Verdict.CLIENT_GONE):
            # Who may go to one backend alone is tried there again.
            failed = {held.grant.placed.backend} if request.backend is None else set()
            entry = AdmissionKind.RETRY
            if held.started and request.stream and request.backend is None:
                # The client has read a part of the answer.
                got = min(tokens or 0, request.output_tokens - 1)
                entry, request = (
                    AdmissionKind.CONTINUED,
                    structs.replace(
                        request,
                        prompt_tokens=request.prompt_tokens + got,
                        output_tokens=request.output_tokens - got,
                        continued=True,
                    ),
                )
            self._enter(request, held.excluded | failed, entry)
        else:
            self._end(request, verdict)

    def observe(self, backend: str, reading: Reading) -> None:
        self.pools.backends[backend].observe(reading)

    def troubled(self, backend: str, trouble: Trouble) -> None:
        if trouble is Trouble.TIMEOUT:
            self.pools.backends[backend].timed_out(self.now)
        self.pools.troubled(backend, trouble)
        if trouble is Trouble.REFUSED:
            self.gone.add(backend)
        self._see_bereft()

    def answered(self, backend: str) -> None:
        self.pools.backends[backend].answered(self.now)

    def listed(self, backend: str, new: Listing) -> None:
        self.pools.listed(backend, new)
        self._see_bereft()

    def drain(self, backend: str, drained: bool) -> None:
        self.pools.backends[backend].drained = drained

    def leave_or_come(self, backend: str) -> None:
        """Remove a backend of the fleet where nothing is in flight and it is not the last, or bring it back unread."""
        if backend not in self.pools.backends:
            self.pools.add_backend(backend, self.fleet[backend][0])
        elif not self.pools.backends[backend].bookings and len(self.pools.backends) > 1:
            self.pools.remove_backend(backend)
            self.gone.discard(backend)
        self._see_bereft()

    def _see_bereft(self, moved: bool = False) -> None:
        """Drop requests that wait for one backend alone when it leaves; `moved`: also when it serves other models."""
        # A pool that comes again begins anew.
        self.books.used_s = {use: at_s for use, at_s in self.books.used_s.items() if use[0] in self.pools.schedulers}
        for name, waiter in list(self.waiting.items()):
            request = waiter.request
            if request.backend is None or self._kept(request):
                continue
            own = self.pools.backends.get(request.backend)
            if moved or own is None or own.health.gone or self.pools.catalogue.pool_of(request.backend) is None:
                del self.waiting[name]
                self.bereft.add(name)

    def _kept(self, request: Request) -> bool:
        """Whether the stored response that `request` refers to still exists in its only backend."""
        name = request.backend or ""
        own = self.pools.backends.get(name)
        return own is not None and not own.health.gone and self.pools.catalogue.pool_of(name) == request.pool

    def advance(self, seconds: float) -> None:
        """Advance the clock, with a pass at each wake-up that the scheduler requested."""
        end_s = self.now + seconds
        for _ in range(10_000):
            wakeup_s = self.pools.next_wakeup(self.now)
            if wakeup_s is None or wakeup_s > end_s:
                break
            self.books.now = max(self.now, wakeup_s)
            self.decide()
        else:
            raise AssertionError("the scheduler asks to be woken again and again")
        self.books.now = end_s

    # --- into the waiting room -------------------------------------------------------------------------------------

    def _enter(self, request: Request, excluded: frozenset[str], entry: AdmissionKind) -> None:
        rows = self._rows(request.pool).values()
        able = [row.view.backend for row in rows if request.model in row.view.served]
        able = [name for name in able if request.backend in (None, name)]
        up = [name for name in able if not self._down(name) and name not in excluded]
        unavailable = {name for name in able if not self.pools.backends[name].view(self.now).available}
        if request.backend is not None:
            unavailable = set(able) - set(up)
        held = not up and unavailable and self.settings.queue.no_backend_wait_s
        # A request that is held may go to the new process of a backend whose old one failed it.
        times = self._service_s(request), *self._time_left(request, bool(held))
        waiter = Waiter(request, excluded - unavailable if held else excluded, entry, *times, held=bool(held))
        expected = self._expected(request, entry) if up or held else Outcome.REJECTED_NO_BACKENDS
        if request.backend is not None and not (self._kept(request) and able):
            expected = Outcome.BAD_REQUEST
        below = [w.request for w in self.books.waiting_in(request.pool) if w.request.band < request.band]
        in_the_way = self._too_many() if entry is AdmissionKind.NEW else 0
        refused: Outcome | None = None
        try:
            self.pools.submit(request, self.now, excluded, entry)
        except Refused as refusal:
            refused = refusal.outcome
        if refused is Outcome.UPSTREAM_TIMEOUT:
            assert entry is AdmissionKind.RETRY, "only after a time limit"
            expected = refused
        assert refused == expected, f"{request.id}: {refused}"
        if refused is not Outcome.UPSTREAM_TIMEOUT:
            self._pass_time(self.pools.catalogue.pool_of(request.backend or "") or request.pool)
        if refused is not None:
            self._end(request, refused)
            return
        if entry is AdmissionKind.NEW:
            self.books.use(request.pool, request.band)
        for victim in self._shed_by(request.pool, in_the_way):
            self._see_shed(victim, below)
        self.waiting[request.id] = waiter

    def _service_s(self, request: Request) -> float:
        scheduler = self.pools.schedulers.get(request.pool)
        return scheduler._first_token.at(request.prompt_tokens) if scheduler is not None else 0.0

    def _time_left(self, request: Request, held: bool) -> tuple[float, float]:
        """Returns how long a request may wait while its pool is up, and while it is down.

        `held`: no backend that serves its name is up.
        """
        own_s = request.deadline_s - self.now
        held_s = min(own_s, self.settings.queue.no_backend_wait_s)
        return held_s if held else own_s, held_s

    def _expected(self, request: Request, entry: AdmissionKind) -> Outcome | None:
        if entry is not AdmissionKind.NEW:
            return None
        in_band = [w.request for w in self.waiting.values() if w.request.band == request.band]
        in_flow = sum(one.flow == request.flow for one in in_band)
        below = sum(w.request.band < request.band for w in self.books.waiting_in(request.pool))
        full = in_flow >= fleets.FLOW_MAX or len(in_band) >= fleets.BAND_MAX or self._too_many() > below
        return Outcome.REJECTED_CAPACITY if full else None

    def _too_many(self) -> int:
        """Returns how many requests must be shed for another one; above 1 if retries came back above the limit."""
        return max(0, len(self.waiting) - fleets.QUEUE_MAX + 1)

    def _shed_by(self, pool: str, count: int) -> list[Request]:
        drops = self.pools.schedulers[pool]._shed
        return [drop.request for drop in drops[len(drops) - count :]]

    def _see_shed(self, victim: Request, below: list[Request]) -> None:
        """Assert that shed requests are the newest of the lowest band."""
        lowest = [request for request in below if request.band == min(one.band for one in below)]
        # The rests of streams are shed last.
        lowest = [request for request in lowest if not request.continued] or lowest
        assert victim in lowest
        assert victim.continued or victim.arrived_s == max(request.arrived_s for request in lowest)
        below.remove(victim)
        del self.waiting[victim.id]
        self.shed.add(victim.id)

    def _end(self, request: Request, how: str) -> None:
        assert request.id not in self.ended, f"{request.id} ended twice: {self.ended[request.id]}, {how}"
        self.ended[request.id] = how
        self.pools.ended(request, None if request.slo is None else how == Verdict.SERVED, self.now)

    # --- one pass --------------------------------------------------------------------------------------------------

    def decide(self) -> list[Decision]:
        """Run a pass, check all promises, and return its decisions."""
        self._see_bereft(moved=True)
        rows = {pool: self._rows(pool) for pool in {*self.pools.catalogue.pools, *self.pools.schedulers}}
        held = {pool: self._pass_time(pool) for pool in rows}
        left_s = {n: w.held_s if held[w.request.pool] else w.own_s for n, w in self.waiting.items()}
        due = {name for name, left in left_s.items() if left <= 5e-7}
        # An ejected backend may be ejected again: its pause is over, and it still hangs.
        ejected = {name: backend.health.ejected_times for name, backend in self.pools.backends.items()}
        decisions = self.pools.decide(self.now)
        for its_rows in rows.values():
            for name, row in its_rows.items():
                if self.pools.backends[name].health.ejected_times > ejected[name]:
                    row.available = False
        reached: dict[str, float] = dict.fromkeys(rows, inf)
        for decision in decisions:
            self.trace.append(repr(decision))
            request = decision.request
            match decision:
                case Drop(outcome=Outcome.SHED):
                    self.shed.remove(request.id)
                    self._end(request, decision.outcome)
                case Drop(outcome=Outcome.BAD_REQUEST):
                    self.bereft.remove(request.id)
                    self._end(request, decision.outcome)
                case Drop():
                    assert decision.outcome is self._expiry(self.waiting[request.id])
                    assert left_s[request.id] < 2e-6, "a request was dropped before its time was over"
                    due.discard(request.id)
                    del self.waiting[request.id]
                    self._end(request, decision.outcome)
                case Revoke():
                    assert self.held[decision.lease].grant.placed.backend == decision.backend
                    if decision.backend not in self.gone:
                        self._owed_by_one_that_hangs(decision)
                case Preempt():
                    self.books.take_back(decision, rows[request.pool])
                    if not request.stream:
                        self._proven_to_wait(decision)
                case Grant():
                    late = [name for name in due if self.waiting[name].request.pool == request.pool]
                    assert not late, "a request past its deadline still waits while others are granted"
                    self.books.grant(decision, rows[request.pool], reached[request.pool])
                    if not decision.why.guaranteed:
                        reached[request.pool] = request.band
        self._after(rows, due)
        return decisions

    def _after(self, rows: Mapping[str, dict[str, Row]], due: set[str]) -> None:
        capped = {pool for pool in self.pools.schedulers if self._wants_more(pool)}
        unnoticed = [name for name in due if self.waiting[name].request.pool not in capped]
        assert not unnoticed, f"deadlines passed unnoticed: {unnoticed}"
        for pool, its_rows in rows.items():
            if pool not in capped:
                self.books.nobody_left_behind(pool, its_rows)
            for row in its_rows.values():
                load = self.pools.backends[row.view.backend].view(self.now).load
                assert load == row.load, f"{row.view.backend} has {row.load} sequences, and the scheduler sees {load}"
        if not capped:
            assert self.pools.decide(self.now) == [], "a second pass at the same time found something to do"

    def _wants_more(self, pool: str) -> bool:
        wakeup_s = self.pools.schedulers[pool].next_wakeup(self.now)
        return wakeup_s is not None and wakeup_s <= self.now

    def _expiry(self, waiter: Waiter) -> Outcome:
        rows, model = self._rows(waiter.request.pool), waiter.request.model
        alive = any(model in row.view.served and not self._down(name) for name, row in rows.items()) and not waiter.held
        return Outcome.EXPIRED if alive else Outcome.EXPIRED_NO_BACKENDS

    def _proven_to_wait(self, preempt: Preempt) -> None:
        reading = self.pools.backends[preempt.backend].reading
        assert reading is not None
        assert reading.waiting > 0
        assert reading.taken_at_s > self.held[preempt.lease].grant.at_s

    def _owed_by_one_that_hangs(self, revoke: Revoke) -> None:
        backend, held = self.pools.backends[revoke.backend], self.held[revoke.lease]
        assert backend.health.ejected
        # An answer in one piece is silent until its end, and a stream that has begun may be. Only polls can tell that
        # nothing is done for it: by their readings, or because they get no answer.
        reading = backend.reading
        assert revoke.hung
        assert (
            (held.grant.request.stream and not held.started)
            or backend.health.unanswered_s < inf
            or (reading is not None and (reading.generated is not None or not (reading.running or reading.waiting)))
        )

    # --- the state of the fleet --------------------------------------------------------------------------------------

    def _pass_time(self, pool: str) -> bool:
        """Let the time since this pool was last heard of pass on the clock that ran; True when it is held from now."""
        since_s, held = self._clocks.get(pool, (self.now, False))
        self.books.pass_time(pool, self.now - since_s, held)
        held = bool(self.settings.queue.no_backend_wait_s) and not self._alive(pool)
        self._clocks[pool] = self.now, held
        return held

    def _alive(self, pool: str) -> bool:
        names = [name for name in self.pools.backends if self.pools.catalogue.pool_of(name) == pool]
        return any(not self._down(name) for name in names)

    def _rows(self, pool: str) -> dict[str, Row]:
        rows = {}
        for name, backend in self.pools.backends.items():
            if self.pools.catalogue.pool_of(name) == pool:
                view = backend.view(self.now)
                mine = [held.grant for held in self.held.values() if held.grant.placed.backend == name]
                own = sum(grant.request.sequences for grant in mine)
                assert view.load >= own, f"{name} holds {own} sequences, and the scheduler sees {view.load}"
                rows[name] = Row(view, view.available, view.load, view.kv_used, backend.health.ejected)
        return rows

    def _down(self, backend: str) -> bool:
        known = self.pools.backends[backend]
        return known.health.down or known.drained

    # --- at any time, and at the end ---------------------------------------------------------------------------------

    def check(self) -> None:
        if self.own_checks:
            self.pools.check(self.now)
        for band in fleets.BANDS:
            mine = [waiter.request for waiter in self.waiting.values() if waiter.request.band == band]
            assert self.pools.queued().get(band, (0, 0)) == (len(mine), sum(r.body_bytes for r in mine))
        for name, backend in self.pools.backends.items():
            own = {lease for lease, held in self.held.items() if held.grant.placed.backend == name}
            assert backend.bookings.keys() == own
        flying = self.books.in_flight()
        for limit, in_flight in self.pools.limits.in_flight().items():
            assert in_flight == flying[limit] <= (self.settings.limits[limit].in_flight or inf)

    def wind_down(self) -> None:
        """Let the fleet recover and the load drain; then everything must be as if nothing had ever been."""
        self.advance(10.0)
        self.decide()
        for lease in list(self.held):
            self.finish(lease, Verdict.SERVED, 5, retry=False)
        # Whoever owed first bytes all that time may have been ejected as hung, and its pause has to pass too.
        self.advance(self.settings.health.ejection_max_s)
        for name, (_, listed) in self.fleet.items():
            if name not in self.pools.backends:
                self.leave_or_come(name)
            self.drain(name, drained=False)
            self.answered(name)
            self.listed(name, listed)
            for _ in range(2):
                self.observe(name, Reading(taken_at_s=self.now, kv_used=0.0))
        # The readings do not contain later grants, so the backend may be ejected once more. Grants during that pause
        # are served within a second, so that no backend is ejected then.
        for _ in range(len(self.waiting) + len(self.held) + int(self.settings.health.ejection_max_s) + 1):
            self.decide()
            self.check()
            for lease in list(self.held):
                self.finish(lease, Verdict.SERVED, 5, retry=False)
            self.advance(1.0)
        for lease in list(self.held):
            self.finish(lease, Verdict.SERVED, 5, retry=False)
        for waiter in self.waiting.values():
            rows = self._rows(waiter.request.pool).values()
            assert not any(serves(row, waiter) for row in rows), f"{waiter.request.id} was never served"
        self.advance(2 * fleets.FOR_EVER_S)
        self.decide()
        self.check()
        assert not self.waiting
        assert len(self.ended) == self._serial, "a request is without its outcome"
        assert_nothing_left(self.pools, self.now)
