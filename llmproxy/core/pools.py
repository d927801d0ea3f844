"""All pools of the process. Events of requests and leases are passed to the scheduler of their pool."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from math import inf

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.catalogue import Aliases, Catalogue
from llmproxy.core.backends.health import EjectionEvent
from llmproxy.core.backends.view import View
from llmproxy.core.domain import (
    Decision,
    Entry,
    Grant,
    KnownLimit,
    Learned,
    Listing,
    Outcome,
    Placed,
    Refused,
    Request,
    Role,
    Trouble,
    Usage,
    Verdict,
)
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.core.placement.policy import Placement
from llmproxy.core.queueing.admission import RETRY_EMPTY_S
from llmproxy.core.queueing.occupancy import Occupancy
from llmproxy.core.queueing.rates import RateName, Rates, expected
from llmproxy.core.queueing.usage_limits import UsageLimits
from llmproxy.core.scaling.need import Need
from llmproxy.core.scaling.observer import Scaling, facts_of
from llmproxy.core.scaling.roles import apart
from llmproxy.core.scheduler import Scheduler
from llmproxy.core.settings import Settings, UsageLimit
from llmproxy.core.shards import DEFAULT, ONE_SHARD, Shards
from llmproxy.core.snapshot import (
    LIMITS_MAX,
    TOTAL_FLOWS_MAX,
    LimitSnapshot,
    PoolChoices,
    PoolSnapshot,
    Position,
    Snapshot,
)

NEWS_MAX = 1_000
"""Ejections that are kept until they are taken; the oldest are dropped first."""


class Pools:
    """One scheduler per base model, so that a saturated model cannot hold up another.

    `backends` maps a backend's name to its configured `max_in_flight`, None where it is to be learned. A backend
    belongs to no pool until its first listing. Each pool gets a placement of its own from `make_placement`.
    """

    def __init__(
        self,
        settings: Settings,
        backends: Mapping[str, int | None],
        aliases: Aliases,
        make_placement: Callable[[], Placement],
        rates: Rates | None = None,
        shards: Shards = ONE_SHARD,
    ) -> None:
        """`rates` keeps requests and tokens per minute where this process does not do it alone."""
        self.settings = settings
        self.shards = shards
        self._until_s = dict.fromkeys(shards.names, inf)
        self._parts = dict.fromkeys(shards.names, 1)
        self._make_placement = make_placement
        self._occupancy = Occupancy(settings.queue)
        self._limits = UsageLimits(settings.limits, rates)
        self._lease_serial = count(1)
        self._news: deque[tuple[str, EjectionEvent]] = deque(maxlen=NEWS_MAX)
        self.schedulers: dict[str, Scheduler] = {}
        self.scaling = Scaling(settings.scaling)
        self._pool_of: dict[str, str] = {}
        self.catalogue = Catalogue((), aliases)
        self.catalogue.named = frozenset(settings.scaling.pools)
        self.estimator = Estimator()
        self.backends: dict[str, Backend] = {}
        for name, fixed in backends.items():
            self.add_backend(name, fixed, settings.prompt_ranges.get(name), settings.roles.get(name, Role.BOTH))

    # --- changes by the operator ----------------------------------------------------------------------------

    def add_backend(
        self,
        name: str,
        max_in_flight: int | None,
        prompt_range: tuple[int, int] | None = None,
        role: Role = Role.BOTH,
    ) -> None:
        """Add a backend. It belongs to no pool, and is down, until it was read."""
        assert name not in self.backends
        settings = self.settings
        self.catalogue.add(name)
        backend = self.backends[name] = Backend(
            name, settings.capacity, settings.health, max_in_flight, settings.ceiling_range, prompt_range, role
        )
        backend.parts = self._parts[DEFAULT]
        backend.health.on_event = lambda news: self._news.append((name, news))

    def known_limits(self) -> dict[str, KnownLimit]:
        """What was learned of backends' batch limits; see `Backend.known_limit`."""
        found = ((name, backend.known_limit) for name, backend in self.backends.items())
        return {name: known for name, known in found if known is not None}

    def remove_backend(self, name: str) -> None:
        """Remove a backend on which nothing is in flight, and forget what was learned of it."""
        assert not self.backends[name].bookings
        self.catalogue.remove(name)
        self._assign(name)
        del self.backends[name]

    def replace_process(self, name: str) -> None:
        """A new process has the name of a backend; see `Backend.replaced`."""
        self.backends[name].replaced()
        for scheduler in self.schedulers.values():
            scheduler.leases.replaced(self.backends[name])
            scheduler.drop_bound(name)

    def reconfigure(self, settings: Settings, aliases: Aliases, now: float) -> None:
        """Apply other settings and aliases from the next decision on.

        What waits, what is in flight and what was learned stays. Policies stay, with their settings.
        """
        self.settings = settings
        self._occupancy.reconfigure(settings.queue)
        self._limits.reconfigure(self._parted(), now)
        self.scaling.reconfigure(settings.scaling)
        self.catalogue.named = frozenset(settings.scaling.pools)
        self.catalogue.rename(aliases)
        for backend in self.backends.values():
            backend.reconfigure(settings.capacity, settings.health, settings.ceiling_range)
        for scheduler in self.schedulers.values():
            scheduler.reconfigure(settings, now)

    def divide(self, parts: int, now: float, shard: str = DEFAULT) -> None:
        """Use a part of every limit from the next decision on: so many processes decide, and none knows of the others.

        A usage limit may span shards: it is divided by the most parts of any. Bounds of the waiting room stay whole.
        """
        self._parts[shard] = parts
        debts = self._limits.rates.debts(now)
        # A rate that is used up as a whole is used up in each part, and is back after the same time.
        self._limits.reconfigure({}, now)
        self._limits.reconfigure(self._parted(), now)
        self._limits.rates.recall(debts, now)
        for name, backend in self.backends.items():
            backend.parts = self._parts[self.shard_of(name)]

    def _parted(self) -> dict[str, UsageLimit]:
        """The limits of which this process may use all."""
        parts = max(self._parts.values())
        return {name: limit.part(parts) for name, limit in self.settings.limits.items()}

    def shard_of(self, backend: str) -> str:
        """The shard of a backend."""
        return self.shards.of(self._pool_of.get(backend))

    def decide_until(self, until_s: float, shard: str = DEFAULT) -> None:
        """Decide nothing about the pools of a shard from `until_s` on: another process may decide then."""
        self._until_s[shard] = until_s

    def decides(self, pool: str, now: float) -> bool:
        """Whether this process decides about a pool."""
        return now < self._until_s[self.shards.of(pool)]

    def decides_any(self, now: float) -> bool:
        """Whether this process decides about any pool."""
        return now < max(self._until_s.values())

    # --- polls ----------------------------------------------------------------------------------------

    def listed(self, backend: str, listing: Listing) -> None:
        """A backend's `/v1/models` was read: names, adapters and pools may appear, move or go."""
        self.backends[backend].listed(listing)
        changed = self.catalogue.listed(backend, listing)
        # A policy may have raised when its pool was to be made: the next listing makes up for what was missed.
        if changed or self.catalogue.pool_of(backend) != self._pool_of.get(backend):
            self._assign(backend)

    def troubled(self, backend: str, trouble: Trouble) -> bool:
        """See `Backend.troubled`."""
        gone = self.backends[backend].troubled(trouble)
        if gone:
            for scheduler in self.schedulers.values():
                scheduler.leases.lost(self.backends[backend])
                scheduler.drop_bound(backend)
        return gone

    def _assign(self, backend: str) -> None:
        pool, old = self.catalogue.pool_of(backend), self._pool_of.get(backend)
        if pool == old:
            return
        if old is not None:
            self.schedulers[old].detach(backend)
            del self._pool_of[backend]
        if pool is not None:
            if pool not in self.schedulers:
                self.schedulers[pool] = Scheduler(
                    pool,
                    self.settings,
                    self._occupancy,
                    self._limits,
                    self._lease_serial,
                    self._make_placement(),
                    (self.scaling.pool(pool),),
                )
            self.schedulers[pool].attach(self.backends[backend])
            self._pool_of[backend] = pool
        self.backends[backend].parts = self._parts[self.shards.of(pool)]
        self.schedulers = {name: s for name, s in self.schedulers.items() if not s.idle}
        self.scaling.keep(self.schedulers)

    # --- requests and leases -------------------------------------------------------------------------------------

    def submit(
        self, request: Request, now: float, excluded: frozenset[str] = frozenset(), entry: Entry = Entry.NEW
    ) -> None:
        """See `Scheduler.submit`. Raises Refused, also when the pool has gone since the name was resolved."""
        scheduler = self.schedulers.get(request.pool)
        if scheduler is None:
            message = f"No backend serves `{request.pool}` any more. Try again shortly."
            raise Refused(Outcome.REJECTED_NO_BACKENDS, message, RETRY_EMPTY_S)
        scheduler.submit(request, now, excluded, entry)
        limited = bool(request.limits) and any(limit in request.limits for _, limit in scheduler.blocked())
        self.scaling.pool(request.pool).arrived(request, now, new=entry is Entry.NEW, counts=not limited)

    def resume(self, request: Request, placed: Placed, at_s: float) -> int | None:
        """Book what another scheduler granted at `at_s` and what still runs; returns the lease.

        None where the backend is unknown here, or of another pool: then only its own readings tell of it.
        """
        if self._pool_of.get(placed.backend) != request.pool:
            return None
        answers_on = None if placed.answers_on is None else self.backends.get(placed.answers_on)
        backend = self.backends[placed.backend]
        scheduler = self.schedulers[request.pool]
        lease = scheduler.leases.book(request, placed, backend, at_s, answers_on=answers_on)
        scheduler.charges.taken_over(request, lease)
        return lease

    def balances(self, shard: str = DEFAULT) -> dict[tuple[str, int], Mapping[str, float]]:
        """(Pool, band) of a shard -> what its fairness policy knows of flows; see `FairnessPolicy.balances`."""
        return {
            (name, level): balances
            for name, scheduler in self.schedulers.items()
            if self.shards.of(name) == shard
            for level, balances in scheduler.balances().items()
        }

    def recall(self, pool: str, band: int, balances: Mapping[str, float]) -> None:
        """Take over what another process knew of the flows of a band; see `FairnessPolicy.recall`."""
        if pool in self.schedulers:
            self.schedulers[pool].recall(band, balances)

    def rate_debts(self, now: float) -> dict[RateName, float]:
        """See `Rates.debts`."""
        return self._limits.rates.debts(now)

    def recall_rates(self, debts: Mapping[RateName, float], now: float) -> None:
        """See `Rates.recall`."""
        self._limits.rates.recall(debts, now)

    def cancel(self, request: Request) -> None:
        self.schedulers[request.pool].cancel(request.id)

    def recomputing(self, grant: Grant) -> None:
        self.schedulers[grant.request.pool].leases.recomputing(grant.lease)

    def started(self, grant: Grant, now: float) -> None:
        self.schedulers[grant.request.pool].leases.started(grant.lease, now)

    def committed(self, grant: Grant, now: float) -> None:
        self.schedulers[grant.request.pool].leases.committed(grant.lease, now)

    def progress(self, grant: Grant, output_tokens: int, now: float) -> None:
        self.schedulers[grant.request.pool].leases.progress(grant.lease, output_tokens, now)

    def finish(self, grant: Grant, verdict: Verdict, now: float, usage: Usage | None = None) -> None:
        self.schedulers[grant.request.pool].leases.finish(grant.lease, verdict, now, usage)

    def cached(self, pool: str, lease: int, backend: str, hashes: Sequence[int]) -> None:
        """The prompt and the answer of a lease that has ended are these blocks; see `Placement.cached`."""
        scheduler = self.schedulers.get(pool)
        if scheduler is not None:
            scheduler.cached(lease, backend, hashes)

    def recall_prefix(self, pool: str, backend: str, hashes: Sequence[int]) -> None:
        """See `Scheduler.recall_prefix`."""
        scheduler = self.schedulers.get(pool)
        if scheduler is not None:
            scheduler.recall_prefix(backend, hashes)

    def ended(self, request: Request, met: bool | None, now: float) -> None:
        """A request is over: served, refused or left by its client. Called once for each.

        `met` says whether it kept its objective, None when it had none or its client left.
        """
        self._limits.ended(request, now)
        if request.pool in self.scaling.pools:
            self.scaling.pools[request.pool].left(request)
        scheduler = self.schedulers.get(request.pool)
        if scheduler is not None:
            scheduler.ended(request, met, now)

    def goes_on_elsewhere(self, request: Request, now: float) -> None:
        """Another process schedules a request that is about to end here, and counts none of its tokens: what was taken
        for it stays taken."""
        if request.limits:
            self._limits.rates.used(request, expected(request), now)

    # --- decisions -----------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Decision]:
        """See `Scheduler.decide`, of every pool."""
        schedulers = self._deciding(now)
        if self.settings.limits and len(schedulers) > 1:
            # A usage limit may span pools: its free places go by band and arrival, not by the order of pools.
            schedulers.sort(key=Scheduler.first_blocked)
        return [decision for scheduler in schedulers for decision in scheduler.decide(now)]

    def _deciding(self, now: float) -> list[Scheduler]:
        return [scheduler for pool, scheduler in self.schedulers.items() if self.decides(pool, now)]

    def faults(self, now: float) -> list[tuple[Exception, int]]:
        """See `Faults.take`, of every pool."""
        return [fault for scheduler in self.schedulers.values() for fault in scheduler.faults.take(now)]

    def next_wakeup(self, now: float) -> float | None:
        times = [scheduler.next_wakeup(now) for scheduler in self._deciding(now)]
        return min([time for time in times if time is not None], default=None)

    def news(self) -> list[tuple[str, EjectionEvent]]:
        """Ejections and returns of backends since the last call, in order."""
        if not self._news:
            return []
        news = list(self._news)
        self._news.clear()
        return news

    # --- inspection ----------------------------------------------------------------------------------------------

    def queued(self) -> dict[int, tuple[int, int]]:
        """Band -> (requests, body bytes) waiting."""
        return self._occupancy.queued()

    def longest_s(self, now: float) -> dict[int, float]:
        """See `Occupancy.longest_s`."""
        return self._occupancy.longest_s(now)

    def work_s(self, now: float) -> dict[str, float]:
        """Pool -> seconds of work that wait there, where that is known."""
        found = ((name, scheduler.work_s(now)) for name, scheduler in self.schedulers.items())
        return {name: work_s for name, work_s in found if work_s is not None}

    def needs(self, now: float) -> dict[str, Need]:
        """Pool -> how many replicas it needs."""
        learned = self.learned(now)
        found = {}
        for name, watched in self.scaling.pools.items():
            scheduler = self.schedulers.get(name)
            views = () if scheduler is None else scheduler.views(now)
            paces = {} if name not in learned else {pace.backend: pace for pace in learned[name].backends}
            replicas = [facts_of(view, self.backends[view.backend].limit, paces.get(view.backend)) for view in views]
            need = watched.need(learned.get(name), replicas, self.settings.capacity.kv_full, now)
            found[name] = apart(need, views)
        return found

    def pool_of(self, backend: str) -> str | None:
        """The pool that a backend belongs to, None before its first listing."""
        return self._pool_of.get(backend)

    def snapshot(self, now: float, flows_max: int | None = None) -> Snapshot:
        """What waits, why, and which backends have room, with at most so many flows. It costs what it shows.

        Where other processes decide about some pools, those are left out.
        """
        pools: list[PoolSnapshot] = []
        flows_left = TOTAL_FLOWS_MAX if flows_max is None else flows_max
        for scheduler in self._deciding(now) or self.schedulers.values():
            pools.append(scheduler.snapshot(now, flows_left))
            flows_left -= sum(len(band.shown) for band in pools[-1].bands)
        in_flight = self._limits.in_flight()
        names = sorted(in_flight, key=lambda name: -in_flight[name])[:LIMITS_MAX]
        limits = tuple(
            LimitSnapshot(
                name,
                in_flight[name],
                self.settings.limits[name].part(max(self._parts.values())).in_flight
                if name in self.settings.limits
                else None,
                *self._limits.rates.left_per_min(name, now),
            )
            for name in names
        )
        return Snapshot(tuple(pools), limits, len(in_flight) - len(names))

    def position(self, name: str, now: float) -> Position | None:
        """The position of the waiting request with this label or id, None when there is none."""
        found = (scheduler.position(name, now) for scheduler in self.schedulers.values())
        return next((position for position in found if position is not None), None)

    def choices(self, now: float) -> list[PoolChoices]:
        """The last placements of each pool, and why no other backend was chosen."""
        return [scheduler.choices(now) for scheduler in self.schedulers.values()]

    def learned(self, now: float) -> dict[str, Learned]:
        """What was learned of the speed of each pool, where its placement learns."""
        found = ((name, scheduler.learned(now)) for name, scheduler in self.schedulers.items())
        return {name: learned for name, learned in found if learned is not None}

    def blocked(self) -> dict[str, int]:
        """Usage limit or backend -> requests that are blocked by it, over all pools."""
        blocked: Counter[str] = Counter()
        for scheduler in self.schedulers.values():
            for (_, limit), waiting in scheduler.blocked().items():
                blocked[limit] += waiting
        return dict(blocked)

    def views(self, now: float) -> dict[str, View]:
        return {name: backend.view(now) for name, backend in self.backends.items()}

    def ready(self, now: float) -> bool:
        """Requests can be taken: some backend that was read is available (up, and not resting after failures), or pools
        are named, which hold theirs while they have no replica."""
        holds = self.settings.queue.hold_s > 0.0 and bool(self.settings.scaling.pools)
        return holds or any(b.listing is not None and b.view(now).available for b in self.backends.values())

    def check(self, now: float) -> None:
        for scheduler in self.schedulers.values():
            scheduler.check(now)
        waiting = sum(requests for requests, _ in self.queued().values())
        assert waiting == sum(scheduler.waiting for scheduler in self.schedulers.values())
