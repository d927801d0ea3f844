"""An independent model of the scheduler: which grants, drops and preemptions are allowed, and which are due.

It shares no logic with the scheduler: it uses only the views from before a pass and its own records of events.
`assert_nothing_left` checks the scheduler's own state after all requests have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from llmproxy.core.backends.view import View
from llmproxy.core.domain import DEFAULT, AdmissionKind, Grant, Preempt, Request
from llmproxy.core.placement.cost import CostPlacement
from llmproxy.core.pools import Pools
from llmproxy.core.preemption import PREEMPT_MAX
from llmproxy.core.queueing.queue import FLOW_LOOK_MAX
from llmproxy.core.settings import Settings

Rank = tuple[float, float]


@dataclass
class Row:
    """A backend in this model."""

    view: View
    available: bool
    load: int
    kv_used: float
    half_open: bool

    def has_room(self, ceiling: float) -> bool:
        spare = self.load < self.slots(ceiling) and self.kv_used < self.view.kv_full_ratio * ceiling
        return self.available and (self.load == 0 or spare)

    def slots(self, ceiling: float) -> int:
        limit, highest = self.view.limit, self.view.highest_ceiling
        if ceiling >= 1.0:
            return limit + self.view.look_ahead
        rounded = max(1, int(limit * ceiling + 0.5))
        if limit < 4 or ceiling >= highest:
            return rounded
        return max(1, min(rounded, (limit if highest >= 1.0 else int(limit * highest + 0.5)) - 1))

    def book(self, request: Request, held_tokens: int) -> None:
        self.load += request.sequences
        self.kv_used += (request.prompt_tokens - held_tokens) / self.view.kv_tokens if self.view.kv_tokens else 0.0
        self.available = self.available and not self.half_open


@dataclass
class Waiter:
    """A waiting request. `own_s` and `held_s` are its remaining times to wait while its pool is up, and while down.

    `held`: it arrived while no backend that it may use was up.
    """

    request: Request
    excluded: frozenset[str]
    entry: AdmissionKind
    service_s: float
    own_s: float
    held_s: float
    held: bool = False

    def rank(self, ordering: str, now: float) -> Rank:
        """Returns the sort key in the flow, by the definitions of the ordering policies."""
        asked = self.request
        if self.entry is AdmissionKind.PREEMPTED or asked.continued:
            return (-inf, asked.arrived_s)
        ttft_s = asked.slo.ttft_s if asked.slo is not None else None
        match ordering:
            case "least_slack" if ttft_s is not None:
                start_by_s = asked.arrived_s + ttft_s - self.service_s
                late = asked.arrived_s + ttft_s + 60.0, asked.arrived_s
                return (start_by_s, asked.arrived_s) if start_by_s > now else late
            case "least_slack":
                return (asked.arrived_s + 60.0, asked.arrived_s)
        return (0.0, asked.arrived_s)


@dataclass
class Held:
    """A lease in this model. `taken_back`: the scheduler has preempted it. `in_the_way`: a request waits behind it."""

    grant: Grant
    excluded: frozenset[str]
    started: bool = False
    taken_back: bool = False
    in_the_way: bool = False


@dataclass
class Books:
    """The waiting requests and the leases of all pools."""

    settings: Settings
    now: float = 0.0
    waiting: dict[str, Waiter] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    used_s: dict[tuple[str, int], float] = field(default_factory=dict)

    # --- facts -----------------------------------------------------------------------------------------------------

    def waiting_in(self, pool: str) -> Iterator[Waiter]:
        return (waiter for waiter in self.waiting.values() if waiter.request.pool == pool)

    def limited(self, waiter: Waiter) -> bool:
        """Whether a usage limit in flight of the request is reached."""
        flying = self.in_flight()
        return any(flying[name] >= (self.settings.limits[name].in_flight or inf) for name in waiter.request.limits)

    def in_flight(self) -> Counter[str]:
        return Counter(name for held in self.held.values() for name in held.grant.request.limits)

    def use(self, pool: str, band: int) -> None:
        """A request of `band` was admitted."""
        self.used_s[pool, band] = self.now

    def above(self, pool: str, band: int) -> list[int]:
        """The bands above `band` that are in use."""
        lasts_s = self.settings.headroom_s
        return [b for (name, b), at_s in self.used_s.items() if name == pool and b > band and self.now - at_s < lasts_s]

    def ceiling(self, pool: str, band: int) -> float:
        ceilings, above = self.settings.ceilings, self.above(pool, band)
        own = ceilings[max((b for b in ceilings if b <= band), default=min(ceilings))]
        if not above:
            return max([own, *(ceilings[b] for b in ceilings if b > band)])
        goes_by = max((b for b in ceilings if b <= min(above)), default=band)
        own = max([own, *(ceilings[b] for b in ceilings if band < b < goes_by)])
        return min(own, 0.99 * max(ceilings.values()))

    def kept(self, pool: str, band: int, rows: Mapping[str, Row]) -> bool:
        """Whether the pool has a single free slot, kept for a higher band; False in an idle pool of a single slot."""
        if not self.above(pool, band):
            return False
        up, highest = [row for row in rows.values() if row.available], max(self.settings.ceilings.values())
        room = [row for row in up if row.has_room(highest)]
        free = sum(max(0, min(row.view.limit, row.slots(highest)) - row.load) for row in room)
        return free <= 1 and any(row.load for row in up)

    def roomy(self, pool: str, band: int, rows: Mapping[str, Row]) -> bool:
        """Whether a backend has room for a request of `band`."""
        ceiling = self.ceiling(pool, band)
        seen = self.rows_for(pool, band, rows)
        return not self.kept(pool, band, rows) and any(row.has_room(ceiling) for row in seen.values())

    def rows_for(self, pool: str, band: int, rows: Mapping[str, Row]) -> Mapping[str, Row]:
        """Returns the rows as a band sees them. A band below default must not wait in an engine's queue before a higher
        band in use, and a band above default must not wait there behind others while it would be first here.
        """
        if band > DEFAULT:
            return {
                n: replace(r, available=False)
                if r.view.waiting and 0 < r.view.proven_load <= r.load and not r.half_open
                else r
                for n, r in rows.items()
            }
        if band == DEFAULT or not self.above(pool, band):
            return rows
        return {n: replace(r, available=False) if r.view.waiting and not r.half_open else r for n, r in rows.items()}

    def rank(self, waiter: Waiter) -> Rank:
        return waiter.rank(self.settings.ordering, self.now)

    def looked_at(self, pool: str, band: int, rows: Mapping[str, Row]) -> Iterator[Waiter]:
        """Returns the requests that are surely among the first of their flows: the scheduler looks no further.

        A request whose only backend has no room blocks no other request. Requests that wait for the same backend go
        by band. So a lower band may wait behind a higher band without room, although its own ceiling is higher:
        nobody has such ceilings but this test.
        """
        flows: dict[str, list[Waiter]] = {}
        ceiling = self.ceiling(pool, band)
        above = [w.request for w in self.waiting_in(pool) if w.request.band > band and w.request.backend in rows]
        kept = {r.backend for r in above if not self._has_room_on(r.backend or "", pool, r.band, rows)}
        for waiter in self.waiting_in(pool):
            own = rows.get(waiter.request.backend or "")
            aside = own is not None and (not own.has_room(ceiling) or waiter.request.backend in kept)
            if waiter.request.band == band and not self.limited(waiter) and not aside:
                # The rests of streams are in a line of their own. No flow has this name.
                flows.setdefault("rests" if waiter.request.continued else waiter.request.flow, []).append(waiter)
        for flow in flows.values():
            ranks = sorted(self.rank(waiter) for waiter in flow)
            # Equal requests may be in any order.
            beyond = ranks[FLOW_LOOK_MAX] if len(ranks) > FLOW_LOOK_MAX else None
            yield from (waiter for waiter in flow if beyond is None or self.rank(waiter) < beyond)

    def _has_room_on(self, backend: str, pool: str, band: int, rows: Mapping[str, Row]) -> bool:
        return self.rows_for(pool, band, rows)[backend].has_room(self.ceiling(pool, band))

    def fits(self, waiter: Waiter, row: Row, rows: Mapping[str, Row], ceiling: float) -> bool:
        return row.has_room(ceiling) and self.suits(waiter, row, rows)

    def suits(self, waiter: Waiter, row: Row, rows: Mapping[str, Row]) -> bool:
        if not serves(row, waiter):
            return False
        needed = waiter.request.prompt_tokens + (waiter.request.max_tokens or 1)
        longest = max(r.view.max_model_len or needed for r in rows.values() if serves(r, waiter))
        return row.view.max_model_len is None or row.view.max_model_len >= min(needed, longest)

    def free_for(self, waiter: Waiter, rows: Mapping[str, Row], ceiling: float | None = None) -> list[str]:
        """Returns the backends that could and should take the request, under its own or the given ceiling."""
        if ceiling is None:
            if self.kept(waiter.request.pool, waiter.request.band, rows):
                return []
            ceiling = self.ceiling(waiter.request.pool, waiter.request.band)
        asked = waiter.request
        rows = self.rows_for(asked.pool, asked.band, rows)
        below = any(w.request.band < asked.band for w in self.waiting_in(asked.pool))
        if self.settings.placement == "cost" and (self.settings.limits or not below):
            # It may be worth to wait for a backend that is full, and for nothing else; but not above a band that waits.
            full = [row for row in rows.values() if row.available and not row.has_room(ceiling)]
            if any(self.suits(waiter, row, rows) for row in full):
                return []
        return [n for n, row in rows.items() if self.fits(waiter, row, rows, ceiling) and not self.has_prompts(n)]

    def has_prompts(self, backend: str) -> bool:
        """Whether a backend still owes a first byte. The placement may then keep it closed for a time of its choice."""
        if self.settings.placement != "cost" or self.settings.capacity.prompt_window_s is None:
            return False
        return any(held.grant.placed.backend == backend and not held.started for held in self.held.values())

    # --- what may be done ------------------------------------------------------------------------------------------

    def grant(self, grant: Grant, rows: Mapping[str, Row], reached: float) -> None:
        """Check a grant against all promises. `reached` is the band of the previous grant in the same pass."""
        request = grant.request
        assert request.id in self.waiting, "granted without waiting"
        waiter = self.waiting[request.id]
        assert request == waiter.request
        assert not self.limited(waiter), f"{request.id} goes beyond a limit of {request.limits}"
        self._explained(grant)
        row = rows[grant.placed.backend]
        ceiling = 1.0 if grant.why.guaranteed else self.ceiling(request.pool, request.band)
        seen = rows if grant.why.guaranteed else self.rows_for(request.pool, request.band, rows)
        assert self.fits(waiter, seen[row.view.backend], seen, ceiling), f"{request.id} does not fit {row.view.backend}"
        if grant.why.guaranteed:
            assert self.settings.min_shares.get(request.band), "no minimum share was promised"
            assert any(w.request.band > request.band for w in self.waiting_in(request.pool)), "nobody waits above"
        else:
            assert not grant.why.inverted, "a request of a higher band could have had it"
            assert not self.kept(request.pool, request.band, rows), f"{request.id} took the last slot of the pool"
            self._strict(grant, rows, reached)
        self._in_order(waiter, rows, ceiling)
        del self.waiting[request.id]
        row.book(request, grant.placed.held_tokens)
        assert grant.lease not in self.held
        self.held[grant.lease] = Held(grant, waiter.excluded)

    def _explained(self, grant: Grant) -> None:
        shown = dict(grant.why.waiting)
        pool, band = grant.request.pool, grant.request.band
        here = Counter(w.request.band for w in self.waiting_in(pool))
        assert list(shown) == sorted(shown, reverse=True)
        assert all(0 < shown[level] <= here[level] for level in shown), f"{shown} are said to wait, and {here} do"
        if not self.settings.limits and not any(w.request.backend for w in self.waiting_in(pool)):
            assert shown == here
        flows = {w.request.flow for w in self.waiting_in(pool) if w.request.band == band and not w.request.continued}
        assert (not grant.request.continued) <= grant.why.flows <= len(flows)

    def _strict(self, grant: Grant, rows: Mapping[str, Row], reached: float) -> None:
        request = grant.request
        assert request.band <= reached, "a pass went back up"
        above = {w.request.band for w in self.waiting_in(request.pool) if not self.limited(w)}
        flowing = {w.request.band for w in self.waiting_in(request.pool) if w.request.backend is None}
        for band in (band for band in above if band > request.band):
            # Asked at the moment at which the pass leaves a band; those below may take the room that was no use to it.
            asked = band in flowing and band <= reached and request.band < reached
            if asked and not (self.settings.limits or self.settings.min_shares):
                assert self.roomy(request.pool, band, rows), f"band {request.band} went although band {band} is blocked"
            for higher in self.looked_at(request.pool, band, rows):
                free = self.free_for(higher, rows)
                assert not free, f"band {request.band} went although {higher.request.id} of band {band} could"

    def _in_order(self, waiter: Waiter, rows: Mapping[str, Row], ceiling: float) -> None:
        """Asserts that no rest of a stream, and no earlier request of the same flow, could have been granted.

        Requests with usage limits or a backend of their own may have been blocked, and come back by band and arrival.
        """
        asked = waiter.request
        for other in self.looked_at(asked.pool, asked.band, rows):
            if other.request.limits or other.request.backend:
                continue
            same = asked.continued == other.request.continued and (asked.continued or asked.flow == other.request.flow)
            if (other.request.continued and not asked.continued) or (same and self.rank(other) < self.rank(waiter)):
                free = self.free_for(other, rows, ceiling)
                assert not free, f"{asked.id} went before {other.request.id} of its flow"

    def take_back(self, preempt: Preempt, rows: Mapping[str, Row]) -> None:
        held, row = self.held[preempt.lease], rows[preempt.backend]
        assert self.settings.preemption
        assert (held.grant.request, held.grant.placed.backend) == (preempt.request, preempt.backend)
        assert preempt.request.band <= DEFAULT
        assert preempt.request.band < DEFAULT or row.view.waiting > 0
        assert not held.started, "a lease was taken back that had spoken"
        assert not held.taken_back, "a lease was taken back twice"
        assert not held.grant.why.guaranteed, "a band lost a grant of its minimum share"
        held.taken_back = True
        held.in_the_way = self._in_the_way(preempt, row)
        taken = [h for h in self.held.values() if h.taken_back and h.grant.request.pool == preempt.request.pool]
        assert len(taken) <= PREEMPT_MAX
        # A victim that got its first byte meanwhile makes no room yet, and another lease is preempted instead.
        for_room = [h.grant.placed.backend for h in taken if not (h.in_the_way or h.started)]
        waiting = [w for w in self.waiting_in(preempt.request.pool) if w.request.band > DEFAULT and not self.limited(w)]
        wanting = [w for w in waiting if any(serves(rows[name], w) for name in for_room if name in rows)]
        assert len(for_room) <= len(wanting), f"{len(for_room)} leases were taken back for {len(wanting)}"

    def _in_the_way(self, preempt: Preempt, row: Row) -> bool:
        """Whether requests wait in the engine, above its learned limit or with a band above default among them."""
        if row.view.waiting > 0 and row.load > row.view.limit + row.view.look_ahead:
            return bool(self.above(preempt.request.pool, DEFAULT))
        behind = (h for lease, h in self.held.items() if lease > preempt.lease and not h.started)
        there = (h.grant for h in behind if h.grant.placed.backend == preempt.backend)
        return row.view.waiting > 0 and any(grant.request.band > DEFAULT for grant in there)

    # --- what must be done -----------------------------------------------------------------------------------------

    def nobody_left_behind(self, pool: str, rows: Mapping[str, Row]) -> None:
        for band in sorted({w.request.band for w in self.waiting_in(pool) if not self.limited(w)}, reverse=True):
            if not self.roomy(pool, band, rows):
                return
            for waiter in self.looked_at(pool, band, rows):
                free = self.free_for(waiter, rows)
                assert not free, f"{waiter.request.id} waits although {free} could take it"

    def pass_time(self, pool: str, seconds: float, held: bool) -> None:
        """Subtract passed time from all waiting requests of `pool`, on the clock that ran."""
        for waiter in self.waiting_in(pool):
            if held:
                waiter.held_s -= seconds
            else:
                waiter.own_s -= seconds


def serves(row: Row, waiter: Waiter) -> bool:
    if waiter.request.backend not in (None, row.view.backend):
        return False
    return waiter.request.model in row.view.served and row.view.backend not in waiter.excluded


def assert_nothing_left(pools: Pools, now: float) -> None:
    assert pools.next_wakeup(now) is None
    assert set(pools.queued().values()) <= {(0, 0)}
    assert not pools.limits.rates.accounts
    assert not any(pools.limits.in_flight().values())
    for one in pools.schedulers.values():
        room = one._room
        assert not room.waiting
        assert not room._labels
        assert not room.blocked.size
        assert not one.leases
        assert not one.leases.revoked
        assert not one._preemption.open
        assert one._preemption.pending == 0
        assert not any((one.charges._charges, one.charges.between))
        inner = one._placement.inner
        if isinstance(inner, CostPlacement):
            assert not inner._flights
            assert inner._backend_loads.keys() <= one._backends.by_name.keys()
            for backend_load in inner._backend_loads.values():
                left = (
                    backend_load.in_flight,
                    backend_load.unstarted,
                    backend_load.in_use._users,
                    backend_load._loading,
                )
                assert left == (0, {}, {}, {})
                assert (dict(backend_load.adapters.users), backend_load.adapters.deferred) == ({}, set())
        for band in room.bands.values():
            assert not band.flows
            assert not list(band.fairness.candidates(now))
    for backend in pools.backends.values():
        assert not backend.bookings
        assert not backend._own._debits
        assert backend.own_in_flight == backend._own.debit_tokens == 0
