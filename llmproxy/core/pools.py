"""All pools of the process. Events of requests and leases are passed to the scheduler of their pool."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from math import inf

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.catalogue import Aliases, Catalogue
from llmproxy.core.backends.health import EjectionEvent
from llmproxy.core.backends.view import View
from llmproxy.core.domain import (
    Decision,
    Drop,
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
    Waited,
)
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.core.placement.policy import Placement
from llmproxy.core.queueing.admission import RETRY_EMPTY_S
from llmproxy.core.queueing.occupancy import Occupancy
from llmproxy.core.queueing.rates import RateName, Rates, expected
from llmproxy.core.queueing.usage_limits import UsageLimits
from llmproxy.core.scaling.need import Need
from llmproxy.core.scaling.observer import Scaling, replica_facts
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
    """One scheduler per pool of `Catalogue`, so that a saturated model cannot hold up another.

    `backends` maps a backend's name to its configured `max_in_flight`, None where it is to be learned. A backend
    belongs to no pool until its first listing. Each pool gets a placement of its own from `make_placement`.
    `schedulers` are by pool. A scheduler stays that of its pool while the names of the pool come and go one by one.
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
        self._left: list[Scheduler] = []
        """Schedulers whose pool became part of another one. They grant nothing more, and their leases run on."""
        self._all: tuple[Scheduler, ...] = ()
        self._of_backend: dict[str, Scheduler] = {}
        self._of_lease: dict[int, Scheduler] = {}
        self._to_regroup = False
        self.scaling = Scaling(settings.scaling)
        self.catalogue = Catalogue((), aliases)
        self.catalogue.named, self.catalogue.apart = frozenset(settings.scaling.pools), shards.own
        self.catalogue.unlisted = settings.unlisted
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
        self._arrange()
        del self.backends[name]

    def replace_process(self, name: str) -> None:
        """A new process has the name of a backend; see `Backend.replaced`."""
        self.backends[name].replaced()
        for scheduler in self._all:
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
        self.catalogue.unlisted = settings.unlisted
        self.catalogue.rename(aliases)
        for backend in self.backends.values():
            backend.reconfigure(settings.capacity, settings.health, settings.ceiling_range)
        for scheduler in self._all:
            scheduler.reconfigure(settings, now)
        self._arrange()

    def divide(self, parts: int, now: float, shard: str = DEFAULT) -> None:
        """Use a part of every limit from the next decision on: so many processes decide, and none knows of the others.

        A usage limit may span shards: it is divided by the most parts of any. Bounds of the waiting room stay whole.
        """
        self._parts[shard] = parts
        debts = self._limits.rates.debts(now)
        # A rate that is used up as a whole is used up in each part, and is back after the same time.
        self._limits.reconfigure({}, now)
        self._limits.reconfigure(self._parted(), now)
        self._limits.rates.restore(debts, now)
        for name, backend in self.backends.items():
            backend.parts = self._parts[self.shard_of(name)]

    def _parted(self) -> dict[str, UsageLimit]:
        """The limits of which this process may use all."""
        parts = max(self._parts.values())
        return {name: limit.part(parts) for name, limit in self.settings.limits.items()}

    def shard_of(self, backend: str) -> str:
        """The shard of a backend."""
        return self.shards.of(self.pool_of(backend))

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
        self.catalogue.listed(backend, listing)
        # Also where nothing changed: a policy may have raised when a pool was to be made.
        self._arrange()

    def troubled(self, backend: str, trouble: Trouble) -> bool:
        """See `Backend.troubled`."""
        gone = self.backends[backend].troubled(trouble)
        if gone:
            for scheduler in self._all:
                scheduler.leases.lost(self.backends[backend])
                scheduler.drop_bound(backend)
        return gone

    def _arrange(self) -> None:
        """Give each pool of the catalogue a scheduler, and this one the backends of the pool.

        A pool keeps the scheduler that had one of its names before. Where several had, it is the one with most of the
        pool's backends, and what waits in the others moves there. Where a pool was split, the part with most of the
        backends keeps the scheduler.
        """
        pools, members, before = self.catalogue.names, self.catalogue.members, self.schedulers
        same = all(pool in before and before[pool].names == names for pool, names in pools.items())
        if same and all(self.pool_of(backend) == members.get(backend) for backend in self.backends):
            return
        had = Counter((members.get(backend), scheduler.pool) for backend, scheduler in self._of_backend.items())
        shared = [(pool, was) for pool, names in pools.items() for was, one in before.items() if one.names & names]
        kept: dict[str, str] = {}
        for pool, was in sorted(shared, key=lambda one: (-had[one], one[0] != one[1], one)):
            if pool not in kept.values() and was not in kept:
                kept[was] = pool
        merged = {was: pool for pool, was in shared if was not in kept}
        placements = {pool: self._make_placement() for pool in pools if pool not in kept.values()}
        self.scaling.rename(kept, merged)
        made = {pool: self._make(pool, placement) for pool, placement in placements.items()}
        after = {kept.get(was, was): one for was, one in before.items() if was not in merged} | made
        for pool, was in shared:
            if after[pool] is not before[was]:
                after[pool].inherit(before[was])
        self.schedulers, self._left = after, self._left + [before[was] for was in merged]
        for pool, names in pools.items():
            after[pool].pool, after[pool].names = pool, names
        for name, backend in self.backends.items():
            self._assign(backend, after.get(members.get(name, "")))
        self.schedulers = {pool: one for pool, one in after.items() if not one.idle}
        self._all = (*self.schedulers.values(), *self._left)
        self.scaling.retain(self.schedulers)
        self._to_regroup = any(one.waiting for one in self._all)

    def _make(self, pool: str, placement: Placement) -> Scheduler:
        return Scheduler(
            pool,
            self.settings,
            self._occupancy,
            self._limits,
            self._lease_serial,
            placement,
            (self.scaling.pool(pool),),
        )

    def _assign(self, backend: Backend, new: Scheduler | None) -> None:
        old = self._of_backend.pop(backend.name, None)
        if new is not None:
            self._of_backend[backend.name] = new
        if new is not old:
            if new is None:
                # They may wait in a pool that the backend left a moment ago, too.
                for scheduler in self._all:
                    scheduler.drop_bound(backend.name)
            if old is not None:
                old.detach(backend.name)
            if new is not None:
                new.attach(backend)
        parts = self._parts[self.shard_of(backend.name)]
        if backend.parts != parts:
            backend.parts = parts

    def _scheduler_of(self, request: Request) -> Scheduler | None:
        """The scheduler of the backends that list the model of a request by now, whatever their pool was called."""
        if request.backend in self._of_backend:
            return self._of_backend[request.backend]
        target = self.catalogue.served.get(request.model)
        return self.schedulers.get(request.pool if target is None else target.pool)

    def _scheduler_named(self, pool: str) -> Scheduler | None:
        """The scheduler of a pool by any of its names: other processes, and requests of before, may use another."""
        return self.schedulers.get(self.catalogue.pool_named(pool))

    def _regroup(self, now: float) -> list[Drop]:
        """Let requests wait where their model is served by now; returns those that cannot."""
        dropped: list[Drop] = []
        self._to_regroup = False
        for scheduler in self._all:
            for request, excluded in scheduler.leave(partial(self._moves, scheduler)):
                try:
                    self.submit(request, now, excluded, Entry.RESUMED)
                except Refused as refused:
                    lost = refused.outcome is Outcome.BAD_REQUEST
                    outcome = refused.outcome if lost else Outcome.EXPIRED_NO_BACKENDS
                    dropped.append(Drop(request, outcome, refused.retry_after_s or 0.0))
        return dropped

    def _moves(self, here: Scheduler, request: Request) -> bool:
        # A request for a model that no backend serves now waits where it is, unless its own backend has left this pool.
        served = request.backend is not None or request.model in self.catalogue.served
        return served and self._scheduler_of(request) not in (None, here)

    # --- requests and leases -------------------------------------------------------------------------------------

    def submit(
        self, request: Request, now: float, excluded: frozenset[str] = frozenset(), entry: Entry = Entry.NEW
    ) -> None:
        """See `Scheduler.submit`. Raises Refused, also when the pool has gone since the name was resolved."""
        scheduler = self._scheduler_of(request)
        if scheduler is None or (
            scheduler.pool != request.pool and self.shards.of(scheduler.pool) != self.shards.of(request.pool)
        ):
            message = f"No backend serves `{request.model}` in this pool any more. Try again shortly."
            raise Refused(Outcome.REJECTED_NO_BACKENDS, message, RETRY_EMPTY_S)
        scheduler.submit(request, now, excluded, entry)
        limited = bool(request.limits) and any(limit in request.limits for _, limit in scheduler.blocked())
        self.scaling.pools[scheduler.pool].arrived(request, now, new=entry is Entry.NEW, counts=not limited)

    def resume(self, request: Request, placed: Placed, at_s: float) -> int | None:
        """Book what another scheduler granted at `at_s` and what still runs; returns the lease.

        None where the backend is unknown here, or of another pool: then only its own readings tell of it.
        """
        scheduler = self._of_backend.get(placed.backend)
        if scheduler is None or scheduler is not self._scheduler_named(request.pool):
            return None
        answers_on = None if placed.answers_on is None else self.backends.get(placed.answers_on)
        backend = self.backends[placed.backend]
        lease = scheduler.leases.book(request, placed, backend, at_s, answers_on=answers_on)
        scheduler.charges.taken_over(request, lease)
        self._of_lease[lease] = scheduler
        return lease

    def balances(self, shard: str = DEFAULT) -> dict[tuple[str, int], Mapping[str, float]]:
        """(Pool, band) of a shard -> what its fairness policy knows of flows; see `FairnessPolicy.balances`."""
        return {
            (name, level): balances
            for name, scheduler in self.schedulers.items()
            if self.shards.of(name) == shard
            for level, balances in scheduler.balances().items()
        }

    def restore(self, pool: str, band: int, balances: Mapping[str, float]) -> None:
        """Take over what another process knew of the flows of a band; see `FairnessPolicy.restore`."""
        scheduler = self._scheduler_named(pool)
        if scheduler is not None:
            scheduler.restore(band, balances)

    def rate_debts(self, now: float) -> dict[RateName, float]:
        """See `Rates.debts`."""
        return self._limits.rates.debts(now)

    def restore_rates(self, debts: Mapping[RateName, float], now: float) -> None:
        """See `Rates.restore`."""
        self._limits.rates.restore(debts, now)

    def cancel(self, request: Request) -> Waited | None:
        """Remove the request of a client that left. Returns why it waited, None if nothing held it back."""
        found = [scheduler.cancel(request.id) for scheduler in self._all]
        return next((waited for waited in found if waited is not None), None)

    def recomputing(self, grant: Grant) -> None:
        self._of_lease[grant.lease].leases.recomputing(grant.lease)

    def started(self, grant: Grant, now: float) -> None:
        self._of_lease[grant.lease].leases.started(grant.lease, now)

    def committed(self, grant: Grant, now: float) -> None:
        self._of_lease[grant.lease].leases.committed(grant.lease, now)

    def progress(self, grant: Grant, output_tokens: int, now: float) -> None:
        self._of_lease[grant.lease].leases.progress(grant.lease, output_tokens, now)

    def finish(self, grant: Grant, verdict: Verdict, now: float, usage: Usage | None = None) -> None:
        self._of_lease.pop(grant.lease).leases.finish(grant.lease, verdict, now, usage)

    def cached(self, pool: str, lease: int, backend: str, hashes: Sequence[int]) -> None:
        """The prompt and the answer of a lease that has ended are these blocks; see `Placement.cached`."""
        scheduler = self._scheduler_named(pool)
        if scheduler is not None:
            scheduler.cached(lease, backend, hashes)

    def restore_prefix(self, pool: str, backend: str, hashes: Sequence[int]) -> None:
        """See `Scheduler.restore_prefix`."""
        scheduler = self._scheduler_named(pool)
        if scheduler is not None:
            scheduler.restore_prefix(backend, hashes)

    def ended(self, request: Request, met: bool | None, now: float) -> None:
        """A request is over: served, refused or left by its client. Called once for each.

        `met` says whether it kept its objective, None when it had none or its client left.
        """
        if request.limits:
            self._limits.ended(request, now)
        scheduler = self._scheduler_of(request)
        if scheduler is not None:
            self.scaling.pools[scheduler.pool].left(request)
        for one in self._left if scheduler is None else (scheduler, *self._left):
            one.ended(request, met, now)

    def goes_on_elsewhere(self, request: Request, now: float) -> None:
        """Another process schedules a request that is about to end here, and counts none of its tokens: what was taken
        for it stays taken."""
        if request.limits:
            self._limits.rates.used(request, expected(request), now)

    # --- decisions -----------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Decision]:
        """See `Scheduler.decide`, of every pool."""
        decisions: list[Decision] = []
        if self._to_regroup:
            decisions += self._regroup(now)
        if self._left:
            self._left = [one for one in self._left if not one.idle]
            self._all = (*self.schedulers.values(), *self._left)
        schedulers = self._deciding(now)
        if self.settings.limits and len(schedulers) > 1:
            # A usage limit may span pools: its free places go by band and arrival, not by the order of pools.
            schedulers.sort(key=Scheduler.first_blocked)
        to_decide = deque(schedulers)
        while to_decide:
            scheduler = to_decide.popleft()
            filled = False
            for decision in scheduler.decide(now):
                decisions.append(decision)
                if isinstance(decision, Grant):
                    self._of_lease[decision.lease] = scheduler
                    filled = filled or bool(decision.request.limits and self._limits.full(decision.request))
            if filled:
                # A request of another pool may be blocked now, and holds up those behind it there no more.
                others = (one for one in schedulers if one.waiting and one is not scheduler)
                to_decide.extend([one for one in others if one not in to_decide])
        return decisions

    def _deciding(self, now: float) -> list[Scheduler]:
        of, until_s = self.shards.of, self._until_s
        if now < min(until_s.values()):
            return list(self._all)
        return [one for one in self._all if now < until_s[of(one.pool)]]

    def faults(self, now: float) -> list[tuple[Exception, int]]:
        """See `Faults.take`, of every pool."""
        return [fault for scheduler in self._all for fault in scheduler.faults.take(now)]

    def next_wakeup(self, now: float) -> float | None:
        if self._to_regroup:
            return now
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
        ceiling = self.settings.ceiling(self.settings.scaling.from_band)
        found = {}
        for name, watched in self.scaling.pools.items():
            if self.catalogue.pool_named(name) != name:
                # A named pool that has joined another one.
                continue
            scheduler = self.schedulers.get(name)
            views = () if scheduler is None else scheduler.views(now)
            paces = {} if name not in learned else {pace.backend: pace for pace in learned[name].backends}
            replicas = [
                replica_facts(view, self.backends[view.backend].limit, paces.get(view.backend), ceiling)
                for view in views
            ]
            need = watched.need(learned.get(name), replicas, self.settings.capacity.kv_full, now)
            found[name] = apart(need, views)
        return found

    def pool_of(self, backend: str) -> str | None:
        """The pool that a backend belongs to, None before its first listing."""
        scheduler = self._of_backend.get(backend)
        return None if scheduler is None else scheduler.pool

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
        found = (scheduler.position(name, now) for scheduler in self._all)
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
        for scheduler in self._all:
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
        for scheduler in self._all:
            scheduler.check(now)
        waiting = sum(requests for requests, _ in self.queued().values())
        assert waiting == sum(scheduler.waiting for scheduler in self._all)
