"""A small unequal fleet, and a second, independent account of what its scheduler may and must do.

`World` feeds `Pools` with events and keeps its own books: who waits, who holds which lease, how full every backend is.
After each pass it works through the decisions one by one and asserts the promises of the scheduler; nothing of the
scheduler's own reasoning is used, only the views taken before the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random

from llmproxy.core import scheduler
from llmproxy.core.domain import (
    CRITICAL,
    DEFAULT,
    SHEDDABLE,
    Decision,
    Drop,
    Grant,
    Listing,
    Outcome,
    Reading,
    Refused,
    Request,
    Revoke,
    Trouble,
    Usage,
    Verdict,
)
from llmproxy.core.fleet import View
from llmproxy.core.placement import make
from llmproxy.core.pools import Pools
from llmproxy.core.queue import FLOW_LOOK_MAX
from llmproxy.core.settings import CapacitySettings, HealthSettings, QueueSettings, Settings
from tests.core.make import listing

BANDS = (CRITICAL, 7, DEFAULT, SHEDDABLE)
FLOWS = ("f", "g", "h")
ADAPTERS: Mapping[str, tuple[str | None, ...]] = {"base": (None, "x", "y"), "other": (None,)}
QUEUE_MAX = 40
BAND_MAX = 30
FOR_EVER_S = 1e6

# No sane configuration: strict priority must not rest on the ceilings being in order.
RISING_CEILINGS: Mapping[int, float] = {CRITICAL: 0.5, DEFAULT: 0.75, SHEDDABLE: 1.0}
CEILINGS: tuple[Mapping[int, float], ...] = (
    {CRITICAL: 1.0, DEFAULT: 0.95, SHEDDABLE: 0.85},
    {DEFAULT: 1.0},
    {CRITICAL: 0.9, DEFAULT: 0.6, SHEDDABLE: 0.3},
    RISING_CEILINGS,
)
FLEETS: tuple[Mapping[str, tuple[int | None, Listing]], ...] = (
    {
        "a": (3, listing("x", max_model_len=1000)),
        "b": (1, listing("x", "y", max_model_len=200)),
        "c": (None, listing(base="other", max_model_len=None)),
    },
    {
        "a": (6, listing(max_model_len=100)),
        "b": (2, listing("x", max_model_len=1000)),
        "c": (None, listing("x", "y", max_model_len=None)),
        "d": (1, listing(base="other")),
    },
    {"a": (5, listing("x", max_model_len=300)), "b": (2, listing("x", "y", max_model_len=100))},
)


def world_settings(fairness: str, placement: str, ceilings: Mapping[int, float]) -> Settings:
    return Settings(
        fairness=fairness,
        placement=placement,
        ceilings=ceilings,
        weights={"g": 3.0},
        capacity=CapacitySettings(start_limit=4, look_ahead=1, stale_after_s=5.0),
        health=HealthSettings(failures=2, backoff_s=1.0, backoff_max_s=4.0, unreachable_after=2),
        queue=QueueSettings(requests_max=QUEUE_MAX, band_requests_max=BAND_MAX),
    )


@dataclass
class Row:
    """One backend in this account."""

    view: View
    available: bool
    load: int
    kv_used: float
    half_open: bool

    def has_room(self, ceiling: float) -> bool:
        slots = (
            self.view.limit + self.view.look_ahead if ceiling >= 1.0 else max(1, int(self.view.limit * ceiling + 0.5))
        )
        spare = self.load < slots and self.kv_used < self.view.kv_full * ceiling
        return self.available and (self.load == 0 or spare)

    def book(self, request: Request) -> None:
        self.load += request.sequences
        self.kv_used += request.prompt_tokens / self.view.kv_tokens if self.view.kv_tokens else 0.0
        self.available = self.available and not self.half_open


@dataclass(frozen=True)
class Waiter:
    request: Request
    excluded: frozenset[str]


class World:
    def __init__(
        self,
        fleet: Mapping[str, tuple[int | None, Listing]],
        settings: Settings,
        seed: int = 0,
        own_checks: bool = True,
    ) -> None:
        self.fleet = fleet
        self.settings = settings
        self.own_checks = own_checks
        placements = partial(make, settings.placement, Random(seed))
        self.pools = Pools(settings, {name: fixed for name, (fixed, _) in fleet.items()}, {}, placements)
        self.now = 0.0
        self.waiting: dict[str, Waiter] = {}
        self.held: dict[int, tuple[Grant, frozenset[str]]] = {}
        self.ended: dict[str, str] = {}
        self.gone: set[str] = set()
        self.shed: set[str] = set()
        self.trace: list[str] = []
        self._serial = 0
        for name, (_, listed) in fleet.items():
            self.pools.answered(name, 0.0)
            self.pools.listed(name, listed)

    # --- events --------------------------------------------------------------------------------------------------

    def submit(
        self, pool: str, adapter: str | None, band: int, flow: str, ttl_s: float = FOR_EVER_S, **sizes: int
    ) -> None:
        self._serial += 1
        facts = {"body_bytes": 10, "prompt_tokens": 20, "output_tokens": 20} | sizes
        request = Request(
            id=f"r{self._serial}",
            pool=pool,
            model=adapter or pool,
            adapter=adapter,
            band=band,
            flow=flow,
            arrived_s=self.now,
            deadline_s=self.now + ttl_s,
            stream=self._serial % 2 == 0,
            **facts,
        )
        self._enter(Waiter(request, frozenset()))

    def cancel(self, request_id: str) -> None:
        self.pools.cancel(self.waiting.pop(request_id).request)
        self._end(request_id, "cancelled")

    def started(self, lease: int) -> None:
        self.pools.started(self.held[lease][0])

    def progress(self, lease: int, tokens: int) -> None:
        self.pools.progress(self.held[lease][0], tokens)

    def finish(self, lease: int, verdict: Verdict, tokens: int | None, retry: bool) -> None:
        grant, excluded = self.held.pop(lease)
        usage = Usage(grant.request.prompt_tokens, tokens) if tokens is not None else None
        self.pools.finish(grant, verdict, self.now, usage)
        if retry and verdict not in (Verdict.SERVED, Verdict.CLIENT_GONE):
            self._enter(Waiter(grant.request, excluded | {grant.placed.backend}))
        else:
            self._end(grant.request.id, verdict)

    def observe(self, backend: str, reading: Reading) -> None:
        self.pools.observe(backend, reading)

    def troubled(self, backend: str, trouble: Trouble) -> None:
        self.pools.troubled(backend, trouble)
        if trouble is Trouble.REFUSED:
            self.gone.add(backend)

    def answered(self, backend: str) -> None:
        self.pools.answered(backend, self.now)

    def listed(self, backend: str, new: Listing) -> None:
        self.pools.listed(backend, new)

    def advance(self, seconds: float) -> None:
        """Let time pass; a wake-up that the scheduler asked for comes when it is due."""
        end_s = self.now + seconds
        for _ in range(10_000):
            wakeup_s = self.pools.next_wakeup(self.now)
            if wakeup_s is None or wakeup_s > end_s:
                break
            self.now = max(self.now, wakeup_s)
            self.decide()
        else:
            raise AssertionError("the scheduler asks to be woken again and again")
        self.now = end_s

    def _enter(self, waiter: Waiter) -> None:
        rows = self._rows(waiter.request.pool).values()
        servable = any(self._serves(row, waiter) and not self._down(row.view.backend) for row in rows)
        in_band = sum(w.request.band == waiter.request.band for w in self.waiting.values())
        again = bool(waiter.excluded)
        total_full = len(self.waiting) >= QUEUE_MAX and not again
        below = [w.request for w in self._waiting_in(waiter.request.pool) if w.request.band < waiter.request.band]
        try:
            self.pools.submit(waiter.request, self.now, waiter.excluded, again=again)
        except Refused as refusal:
            self._end(waiter.request.id, refusal.outcome)
        else:
            if total_full:
                self._see_shed(waiter.request.pool, below)
            self.waiting[waiter.request.id] = waiter
        full = (in_band >= BAND_MAX and not again) or (total_full and not below)
        expected = Outcome.REJECTED_CAPACITY if full else None
        answer = self.ended.get(waiter.request.id)
        assert answer == (expected if servable else Outcome.REJECTED_NO_BACKENDS), f"{waiter.request.id}: {answer}"

    def _see_shed(self, pool: str, below: list[Request]) -> None:
        """Whoever made room must be the newest of the lowest band."""
        victim = self.pools._schedulers[pool]._shed[-1].request
        lowest = [request for request in below if request.band == min(one.band for one in below)]
        assert victim in lowest
        assert victim.arrived_s == max(request.arrived_s for request in lowest)
        del self.waiting[victim.id]
        self.shed.add(victim.id)

    def _end(self, request_id: str, how: str) -> None:
        assert request_id not in self.ended, f"{request_id} ended twice: {self.ended[request_id]}, {how}"
        self.ended[request_id] = how

    # --- the account of one pass -----------------------------------------------------------------------------------

    def decide(self) -> list[Decision]:
        """One pass, held to every promise. Answers its decisions."""
        rows = {pool: self._rows(pool) for pool in self.pools.catalogue.pools}
        due = {name for name, waiter in self.waiting.items() if waiter.request.deadline_s <= self.now}
        decisions = self.pools.decide(self.now)
        granted, dropped = dict.fromkeys(rows, 0), dict.fromkeys(self.pools._schedulers, 0)
        reached: dict[str, float] = dict.fromkeys(rows, inf)
        for decision in decisions:
            self.trace.append(repr(decision))
            match decision:
                case Drop(outcome=Outcome.SHED):
                    self.shed.remove(decision.request.id)
                    self._end(decision.request.id, decision.outcome)
                case Drop():
                    assert decision.outcome in (Outcome.EXPIRED, Outcome.EXPIRED_NO_BACKENDS)
                    due.remove(decision.request.id)
                    dropped[decision.request.pool] += 1
                    del self.waiting[decision.request.id]
                    self._end(decision.request.id, decision.outcome)
                case Revoke():
                    assert self.held[decision.lease][0].placed.backend == decision.backend
                    assert decision.backend in self.gone
                case Grant():
                    late = [name for name in due if self.waiting[name].request.pool == decision.request.pool]
                    assert not late, "a request past its deadline still waits while others are granted"
                    pool = decision.request.pool
                    self._check_grant(decision, rows[pool], reached[pool])
                    reached[pool] = decision.request.band
                    granted[pool] += 1
        most = scheduler.PASS_MAX
        unnoticed = [name for name in due if dropped[self.waiting[name].request.pool] < most]
        assert not unnoticed, f"deadlines passed unnoticed: {unnoticed}"
        assert max((*granted.values(), *dropped.values()), default=0) <= most
        for pool, its_rows in rows.items():
            if max(granted[pool], dropped[pool]) < most:
                self._check_nobody_left_behind(pool, its_rows)
            for row in its_rows.values():
                load = self.pools.backends[row.view.backend].view(self.now).load
                assert load == row.load, f"{row.view.backend} has {row.load} sequences, and the scheduler sees {load}"
        if max((*granted.values(), *dropped.values()), default=0) < most:
            assert self.pools.decide(self.now) == [], "a second pass at the same time found something to do"
        return decisions

    def _check_grant(self, grant: Grant, rows: dict[str, Row], reached: float) -> None:
        """Hold one grant to the promises; `reached` is the band of the grant before it in the same pass."""
        request = grant.request
        assert request.id in self.waiting, "granted without waiting"
        waiter = self.waiting.pop(request.id)
        assert request == waiter.request
        row = rows[grant.placed.backend]
        ceiling = self._ceiling(request.band)
        assert self._fits(waiter, row, rows, ceiling), f"{request.id} does not fit {row.view.backend}"
        assert request.band <= reached, "a pass went back up"
        for band in {w.request.band for w in self._waiting_in(request.pool) if w.request.band > request.band}:
            above = self._ceiling(band)
            # Asked at the moment at which the pass leaves a band; those below may take the room that was no use to it.
            if band <= reached and request.band < reached:
                blocked = not any(other.has_room(above) for other in rows.values())
                assert not blocked, f"band {request.band} went although band {band} is blocked"
            for higher in self._looked_at(request.pool, band):
                free = [name for name, other in rows.items() if self._fits(higher, other, rows, above)]
                assert not free, f"band {request.band} went although {higher.request.id} of band {band} could"
        row.book(request)
        assert grant.lease not in self.held
        self.held[grant.lease] = grant, waiter.excluded

    def _check_nobody_left_behind(self, pool: str, rows: dict[str, Row]) -> None:
        for band in sorted({waiter.request.band for waiter in self._waiting_in(pool)}, reverse=True):
            ceiling = self._ceiling(band)
            if not any(row.has_room(ceiling) for row in rows.values()):
                return
            for waiter in self._looked_at(pool, band):
                free = [name for name, row in rows.items() if self._fits(waiter, row, rows, ceiling)]
                assert not free, f"{waiter.request.id} waits although {free} could take it"

    def _rows(self, pool: str) -> dict[str, Row]:
        rows = {}
        for name, backend in self.pools.backends.items():
            if self.pools.catalogue.pool_of(name) == pool:
                view = backend.view(self.now)
                own = sum(grant.request.sequences for grant, _ in self.held.values() if grant.placed.backend == name)
                assert view.load >= own, f"{name} holds {own} sequences, and the scheduler sees {view.load}"
                rows[name] = Row(view, view.available, view.load, view.kv_used, backend.health._half_open)
        return rows

    def _down(self, backend: str) -> bool:
        return self.pools.backends[backend].health.down

    def _serves(self, row: Row, waiter: Waiter) -> bool:
        return waiter.request.model in row.view.served and row.view.backend not in waiter.excluded

    def _fits(self, waiter: Waiter, row: Row, rows: dict[str, Row], ceiling: float) -> bool:
        if not (row.has_room(ceiling) and self._serves(row, waiter)):
            return False
        needed = waiter.request.prompt_tokens + (waiter.request.max_tokens or 1)
        longest = max(r.view.max_model_len or needed for r in rows.values() if self._serves(r, waiter))
        return row.view.max_model_len is None or row.view.max_model_len >= min(needed, longest)

    def _waiting_in(self, pool: str) -> Iterator[Waiter]:
        return (waiter for waiter in self.waiting.values() if waiter.request.pool == pool)

    def _looked_at(self, pool: str, band: int) -> Iterator[Waiter]:
        """The first requests of every flow: the scheduler promises to look no further."""
        flows: dict[str, list[Waiter]] = {}
        for waiter in self._waiting_in(pool):
            if waiter.request.band == band:
                flows.setdefault(waiter.request.flow, []).append(waiter)
        for flow in flows.values():
            yield from sorted(flow, key=lambda waiter: waiter.request.arrived_s)[:FLOW_LOOK_MAX]

    def _ceiling(self, band: int) -> float:
        ceilings = self.settings.ceilings
        return ceilings[max((b for b in ceilings if b <= band), default=min(ceilings))]

    # --- at any time, and at the end ---------------------------------------------------------------------------------

    def check(self) -> None:
        if self.own_checks:
            self.pools.check()
        for band in BANDS:
            mine = [waiter.request for waiter in self.waiting.values() if waiter.request.band == band]
            assert self.pools.queued().get(band, (0, 0)) == (len(mine), sum(r.body_bytes for r in mine))
        for name, backend in self.pools.backends.items():
            own = {lease for lease, (grant, _) in self.held.items() if grant.placed.backend == name}
            assert backend.bookings.keys() == own

    def wind_down(self) -> None:
        """Bring everything up, serve what waits, and assert that nothing is left anywhere."""
        for name, (_, listed) in self.fleet.items():
            self.troubled(name, Trouble.UNHEALTHY)
            self.answered(name)
            self.listed(name, listed)
            for _ in range(2):
                self.observe(name, Reading(taken_at_s=self.now, kv_used=0.0))
        for _ in range(len(self.waiting) + len(self.held) + 1):
            self.decide()
            self.check()
            for lease in list(self.held):
                self.finish(lease, Verdict.SERVED, 5, retry=False)
        for waiter in self.waiting.values():
            rows = self._rows(waiter.request.pool).values()
            assert not any(self._serves(row, waiter) for row in rows), f"{waiter.request.id} was never served"
        self.advance(2 * FOR_EVER_S)
        self.decide()
        self.check()
        assert not self.waiting
        assert len(self.ended) == self._serial, "a request is without its outcome"
        assert_nothing_left(self.pools, self.now)


def assert_nothing_left(pools: Pools, now: float) -> None:
    assert pools.next_wakeup(now) is None
    assert set(pools.queued().values()) <= {(0, 0)}
    for one in pools._schedulers.values():
        assert not one._waiting
        assert not one._leases
        assert not one._lost
        for band in one._bands.values():
            assert not band._flows
            assert not list(band.fairness.candidates())
    for backend in pools.backends.values():
        assert not backend.bookings
        assert not backend._debits
        assert backend.sequences == backend._debit_tokens == 0
