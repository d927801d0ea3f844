"""All pools of the process. Passes the events of requests and leases to the scheduler of their pool."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.catalogue import Aliases, Catalogue
from llmproxy.core.backends.health import EjectionEvent
from llmproxy.core.backends.view import View
from llmproxy.core.domain import (
    AdmissionKind,
    Decision,
    Drop,
    Grant,
    KnownLimit,
    Learned,
    Listing,
    Outcome,
    Placed,
    Reading,
    Refused,
    Request,
    Role,
    Trouble,
    Waited,
)
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.core.lease_events import LeaseEvent, Returned
from llmproxy.core.leases import Leases
from llmproxy.core.placement.policy import Placement
from llmproxy.core.policy_registry import Faults
from llmproxy.core.queueing.admission import RETRY_EMPTY_S
from llmproxy.core.queueing.occupancy import Occupancy
from llmproxy.core.queueing.rate_limits import expected
from llmproxy.core.queueing.usage_limits import UsageLimits
from llmproxy.core.scaling.need import Need
from llmproxy.core.scaling.observer import Scaling, replica_facts
from llmproxy.core.scaling.roles import by_role
from llmproxy.core.scheduler import Scheduler
from llmproxy.core.settings import Settings, UsageLimit
from llmproxy.core.snapshot import (
    LIMITS_MAX,
    TOTAL_FLOWS_MAX,
    LimitSnapshot,
    PoolChoices,
    PoolSnapshot,
    Position,
    Snapshot,
)

HEALTH_EVENTS_MAX = 1_000  # Maximum number of events in `Pools.health_events`. The oldest are dropped first.


class Pools:
    """A scheduler for each pool of the `Catalogue`, so that a saturated model cannot delay another model.

    A backend belongs to no pool until its first model list. A pool keeps its scheduler as long as no change replaces
    all of its model names.
    """

    def __init__(
        self,
        settings: Settings,
        backends: Mapping[str, int | None],
        aliases: Aliases,
        make_placement: Callable[[], Placement],
    ) -> None:
        """Creates the backends. They form pools when they have listed their models.

        `backends` maps names to the configured `max_in_flight`; None to learn it. `make_placement` is called for each
        new pool.
        """
        self.settings = settings
        self._make_placement = make_placement
        self._occupancy = Occupancy(settings.queue)
        self.limits = UsageLimits(settings.limits)
        self.days = self.limits.days
        self._lease_serial = count(1)
        self.health_events: deque[tuple[str, EjectionEvent]] = deque(maxlen=HEALTH_EVENTS_MAX)
        self.faults = Faults()  # The exceptions that policies raised.
        self.schedulers: dict[str, Scheduler] = {}
        self._left: list[Scheduler] = []  # Schedulers of merged pools. They grant nothing; their leases continue.
        self._all: tuple[Scheduler, ...] = ()
        self._of_backend: dict[str, Scheduler] = {}
        self._of_lease: dict[int, Leases] = {}
        self._to_regroup = False
        self.scaling = Scaling(settings.scaling)
        self.catalogue = Catalogue((), aliases)
        self.catalogue.named = frozenset(settings.scaling.pools)
        self.catalogue.unlisted = settings.unlisted
        self.estimator = Estimator()
        self.backends: dict[str, Backend] = {}
        self.externals: dict[str, Backend] = {}
        """The external backends. They belong to no pool, and `overflow` sends requests of all pools to them."""
        for name, fixed in backends.items():
            self.add_backend(name, fixed, settings.prompt_ranges.get(name), settings.roles.get(name, Role.BOTH))

    # --- changes by the operator ----------------------------------------------------------------------------

    def add_backend(
        self, name: str, max_in_flight: int | None, prompt_range: tuple[int, int] | None = None, role: Role = Role.BOTH
    ) -> None:
        """Adds a backend. A replica is down until a poll succeeds, and in no pool until it has listed its models."""
        assert name not in self.backends
        settings = self.settings
        backend = self.backends[name] = Backend(
            name, settings.capacity, settings.health, max_in_flight, settings.ceiling_range, prompt_range, role
        )
        backend.health.on_event = lambda event: self.health_events.append((name, event))
        if name in settings.externals:
            backend.set_external(settings.externals[name])
            self.externals[name] = backend
            self._note_external_models()
        else:
            self.catalogue.add(name)

    def known_limits(self) -> dict[str, KnownLimit]:
        """Maps backends to their learned batch limits; backends without one are left out."""
        limits = ((name, backend.known_limit) for name, backend in self.backends.items())
        return {name: limit for name, limit in limits if limit is not None}

    def remove_backend(self, name: str) -> None:
        """Removes a backend that has nothing in flight, with everything learned about it."""
        assert not self.backends[name].bookings
        if self.externals.pop(name, None) is None:
            self.catalogue.remove(name)
            self._arrange()
        self._note_external_models()
        del self.backends[name]

    def _note_external_models(self) -> None:
        given = (one.external for one in self.externals.values())
        self.catalogue.external = frozenset().union(*(one.models for one in given if one is not None))

    def replace_process(self, name: str) -> None:
        """Records that a new process has the name of a backend, and resets values read from the old one."""
        self.backends[name].replaced()
        for scheduler in self._all:
            scheduler.leases.replaced(self.backends[name])
            scheduler.drop_bound(name)

    def reconfigure(self, settings: Settings, aliases: Aliases, now: float) -> None:
        """Applies new settings and aliases from the next decision on. Policy objects keep their settings."""
        self.settings = settings
        self._occupancy.reconfigure(settings.queue)
        self.limits.reconfigure(settings.limits, now)
        self.scaling.reconfigure(settings.scaling)
        self.catalogue.named = frozenset(settings.scaling.pools)
        self.catalogue.unlisted = settings.unlisted
        self.catalogue.rename(aliases)
        for backend in self.backends.values():
            backend.reconfigure(settings.capacity, settings.health, settings.ceiling_range)
        for name in self.externals.keys() & settings.externals.keys():
            self.externals[name].set_external(settings.externals[name])
        self._note_external_models()
        for scheduler in self._all:
            scheduler.reconfigure(settings, now)
        self._arrange()

    # --- polls ----------------------------------------------------------------------------------------

    def listed(self, backend: str, listing: Listing) -> None:
        """Notes a response of a backend's `/v1/models`, which may add, move or remove names, adapters and pools."""
        self.backends[backend].listed(listing)
        changed = self.catalogue.listed(backend, listing)
        # Repeated even if nothing changed, because a policy may have raised while a pool was created.
        self._arrange()
        if changed:
            # An adapter may have moved to another pool, while the pools and their backends are the same.
            self._to_regroup = any(one.waiting for one in self._all)

    def observe(self, backend: str, reading: Reading) -> None:
        """Records a scrape of a backend. A counter that has fallen shows a restart that no failed poll has shown."""
        if self.backends[backend].observe(reading):
            for scheduler in self._all:
                # The connections of leases on the old process break, so nothing is revoked.
                scheduler.leases.restarted(self.backends[backend])
                scheduler.drop_bound(backend)

    def timed_out(self, backend: str, now: float) -> None:
        """Records that a request of a poll got no answer in time."""
        self.catalogue.silent(backend)
        self.backends[backend].timed_out(now)

    def troubled(self, backend: str, trouble: Trouble) -> bool:
        """Records a failed poll. Returns whether the process is certainly gone, and its open streams with it."""
        self.catalogue.silent(backend)
        gone = self.backends[backend].troubled(trouble)
        if gone:
            for scheduler in self._all:
                scheduler.leases.lost(self.backends[backend])
                scheduler.drop_bound(backend)
        return gone

    def _arrange(self) -> None:
        """Gives each pool of the catalogue a scheduler, and the scheduler the backends of the pool.

        A pool keeps the scheduler that served any of its names before. If several did, the scheduler with most of the
        pool's backends stays, and gets the waiting requests of the others. If a pool was split, the part with most of
        the backends keeps the scheduler.
        """
        pools, members, before = self.catalogue.names, self.catalogue.members, self.schedulers
        same = all(pool in before and before[pool].names == names for pool, names in pools.items())
        if same and all(self.pool_of(backend) == members.get(backend) for backend in self.backends):
            return
        had = Counter((members.get(backend), scheduler.pool) for backend, scheduler in self._of_backend.items())
        shared = [(pool, was) for pool, names in pools.items() for was, one in before.items() if one.names & names]
        renamed: dict[str, str] = {}
        for pool, was in sorted(shared, key=lambda one: (-had[one], one[0] != one[1], one)):
            if pool not in renamed.values() and was not in renamed:
                renamed[was] = pool
        merged = {was: pool for pool, was in shared if was not in renamed}
        placements = {pool: self._make_placement() for pool in pools if pool not in renamed.values()}
        self.scaling.rename(renamed, merged)
        made = {pool: self._make(pool, placement) for pool, placement in placements.items()}
        after = {renamed.get(was, was): one for was, one in before.items() if was not in merged} | made
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
        parts = self._occupancy, self.limits, self._lease_serial
        observers = (self.scaling.pool(pool),)
        return Scheduler(pool, self.settings, *parts, placement, self.faults, observers, self.externals)

    def _assign(self, backend: Backend, new: Scheduler | None) -> None:
        old = self._of_backend.pop(backend.name, None)
        if new is not None:
            self._of_backend[backend.name] = new
        if new is not old:
            if new is None:
                # Requests bound to the backend may wait in a pool that it left earlier.
                for scheduler in self._all:
                    scheduler.drop_bound(backend.name)
            if old is not None:
                old.detach(backend.name)
            if new is not None:
                new.attach(backend)

    def _scheduler_of(self, request: Request) -> Scheduler | None:
        """Returns the scheduler of a request: of its only backend, or of the pool that lists its model now.

        If no backend lists the model, returns the scheduler of `request.pool`, or None without one. A model that only
        external backends have served so far gets a scheduler without backends.
        """
        if request.backend in self._of_backend:
            return self._of_backend[request.backend]
        target = self.catalogue.served.get(request.model)
        pool = request.pool if target is None else target.pool
        if target is None and pool not in self.schedulers and pool in self.catalogue.external:
            made = self.schedulers[pool] = self._make(pool, self._make_placement())
            made.pool, made.names = pool, frozenset({pool})
            self._all = (*self.schedulers.values(), *self._left)
        return self.schedulers.get(pool)

    def _scheduler_named(self, pool: str) -> Scheduler | None:
        """Returns the scheduler of a pool. `pool` is any of its names, because other processes may use another name."""
        return self.schedulers.get(self.catalogue.pool_named(pool))

    def _regroup(self, now: float) -> list[Drop]:
        """Moves waiting requests to the pool that now serves their model. Returns the requests that cannot move."""
        dropped: list[Drop] = []
        self._to_regroup = False
        for scheduler in self._all:
            for request, excluded in scheduler.remove_waiting(partial(self._moves, scheduler)):
                self.scaling.left(request)
                try:
                    self.submit(request, now, excluded, AdmissionKind.RESUMED)
                except Refused as refused:
                    lost = refused.outcome is Outcome.BAD_REQUEST
                    outcome = refused.outcome if lost else Outcome.EXPIRED_NO_BACKENDS
                    dropped.append(Drop(request, outcome, refused.retry_after_s or 0.0))
        return dropped

    def _moves(self, here: Scheduler, request: Request) -> bool:
        # A request for a model without backends stays, unless its only backend has left this pool.
        served = request.backend is not None or request.model in self.catalogue.served
        return served and self._scheduler_of(request) not in (None, here)

    # --- requests and leases -------------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        now: float,
        excluded: frozenset[str] = frozenset(),
        entry: AdmissionKind = AdmissionKind.NEW,
    ) -> None:
        """Adds a request to the waiting room of its pool. Raises Refused as `Scheduler.submit`, or without a pool."""
        scheduler = self._scheduler_of(request)
        if scheduler is None:
            message = f"No backend serves `{request.model}` in this pool any more. Try again shortly."
            raise Refused(Outcome.REJECTED_NO_BACKENDS, message, RETRY_EMPTY_S)
        scheduler.submit(request, now, excluded, entry)
        limited = bool(request.limits) and any(limit in request.limits for _, limit in scheduler.blocked())
        self.scaling.pools[scheduler.pool].arrived(request, now, new=entry is AdmissionKind.NEW, counts=not limited)

    def resume(self, request: Request, placed: Placed, at_s: float) -> int | None:
        """Opens a lease that another scheduler granted at `at_s`. Returns its number.

        Returns None if the backend of `placed` is not in the pool of the request. The request then
        counts as load of other clients, when a scrape shows it.
        """
        external = placed.backend in self.externals
        scheduler = self._scheduler_of(request) if external else self._of_backend.get(placed.backend)
        if scheduler is None or not (external or scheduler is self._scheduler_named(request.pool)):
            return None
        answers_on = None if placed.answers_on is None else self.backends.get(placed.answers_on)
        backend = self.backends[placed.backend]
        leases = scheduler.overflow.leases if external else scheduler.leases
        lease = leases.book(request, placed, backend, at_s, answers_on=answers_on)
        scheduler.charges.already_charged(request, lease)
        self.limits.rates.resume(request)
        self._of_lease[lease] = leases
        return lease

    def balances(self) -> dict[tuple[str, int], Mapping[str, float]]:
        """Returns the balances of flows per (pool, band). A new leader or process continues with them."""
        return {
            (name, level): balances
            for name, scheduler in self.schedulers.items()
            for level, balances in scheduler.balances().items()
        }

    def restore(self, pool: str, band: int, balances: Mapping[str, float]) -> None:
        """Takes over the flow balances of a band from another process."""
        scheduler = self._scheduler_named(pool)
        if scheduler is not None:
            scheduler.restore(band, balances)

    def usage_left(self, name: str, now: float) -> dict[str, float | None]:
        """Maps each rate and daily budget of a limit to the requests or tokens that are left.

        The keys are named as in the configuration, such as `tokens_per_day`. The value is None without such a limit.
        """
        per_min, per_day = self.limits.rates.left_per_min(name, now), self.days.left(name, now)
        names = ("requests_per_min", "tokens_per_min", "requests_per_day", "tokens_per_day")
        return dict(zip(names, (*per_min, *per_day), strict=True))

    def money_left(self, backend: str, now: float) -> float | None:
        """Returns the money that may still be spent today at an external backend; None for any other backend."""
        external = self.backends[backend].external
        return None if external is None else self.limits.days.money_left(backend, external.max_per_day, now)

    def cancel(self, request: Request) -> Waited | None:
        """Removes a request because its client left or the proxy shuts down. Returns as `Scheduler.cancel` does."""
        reasons = [scheduler.cancel(request.id) for scheduler in self._all]
        return next((waited for waited in reasons if waited is not None), None)

    def apply(self, event: LeaseEvent, now: float) -> None:
        """Passes an event to the lease with its number, which must be open. `Returned` closes the lease."""
        leases = self._of_lease[event.lease]
        if type(event) is Returned:
            del self._of_lease[event.lease]
        leases.apply(event, now)

    def cached(self, pool: str, lease: int | None, backend: str, hashes: Sequence[int]) -> None:
        """Records that a backend has cached these blocks, under `lease` or (None) a lease of another process."""
        scheduler = self._scheduler_named(pool)
        if scheduler is not None:
            scheduler.cached(lease, backend, hashes)

    def ended(self, request: Request, met: bool | None, now: float) -> None:
        """Records the end of a request, once. `met`: as in `Scheduler.ended`."""
        if request.limits:
            self.limits.ended(request, now)
        for scaling in self.scaling.pools.values():
            # A request that was never granted may have arrived in another pool.
            if request.id in scaling.waiting:
                scaling.left(request)
        scheduler = self._scheduler_of(request)
        for one in self._all:
            one.ended(request, met, now, served_here=one is scheduler)

    def goes_on_elsewhere(self, request: Request, now: float) -> None:
        """Keeps the tokens of a request charged to its limits, because it continues at another process."""
        if request.limits:
            self.limits.rates.used(request, expected(request), now)

    # --- decisions -----------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Decision]:
        """Runs a scheduling pass in each pool where it is due, and returns the decisions of all pools."""
        decisions: list[Decision] = []
        if self._to_regroup:
            decisions += self._regroup(now)
        if self._left:
            self._left = [one for one in self._left if not one.idle]
            self._all = (*self.schedulers.values(), *self._left)
        schedulers = list(self._all)
        if self.settings.limits and len(schedulers) > 1:
            # A usage limit may span pools, so its free slots are granted by band and arrival, not by pool.
            schedulers.sort(key=Scheduler.first_blocked)
        to_decide = deque(schedulers)
        while to_decide:
            scheduler = to_decide.popleft()
            filled = False
            for decision in scheduler.decide(now):
                decisions.append(decision)
                if isinstance(decision, Grant):
                    elsewhere = decision.placed.backend in self.externals
                    self._of_lease[decision.lease] = scheduler.overflow.leases if elsewhere else scheduler.leases
                    filled = filled or bool(decision.request.limits and self.limits.full(decision.request))
            if filled:
                # The limit may now block another pool's first request. Then the requests behind it can be granted.
                others = (one for one in schedulers if one.waiting and one is not scheduler)
                to_decide.extend([one for one in others if one not in to_decide])
        return decisions

    def next_wakeup(self, now: float) -> float | None:
        if self._to_regroup:
            return now
        earliest_s: float | None = None
        for scheduler in self._all:
            wakeup_s = scheduler.next_wakeup(now)
            if wakeup_s is not None and (earliest_s is None or wakeup_s < earliest_s):
                earliest_s = wakeup_s
        return earliest_s

    def take_health_events(self) -> list[tuple[str, EjectionEvent]]:
        """Returns the ejections, their ends and the skipped ejections since the last call, in order."""
        events = list(self.health_events)
        self.health_events.clear()
        return events

    # --- inspection ----------------------------------------------------------------------------------------------

    def queued(self) -> dict[int, tuple[int, int]]:
        """Returns (waiting requests, their body bytes) per band."""
        return self._occupancy.queued()

    def longest_s(self, now: float) -> dict[int, float]:
        """Returns the longest wait of each band, in seconds."""
        return self._occupancy.longest_s(now)

    def work_s(self, now: float) -> dict[str, float]:
        """Maps each pool to the seconds that its backends together need for its waiting requests.

        Pools whose placement cannot estimate this time are left out.
        """
        works = ((name, scheduler.work_s(now)) for name, scheduler in self.schedulers.items())
        return {name: work_s for name, work_s in works if work_s is not None}

    def needs(self, now: float) -> dict[str, Need]:
        """Returns the number of replicas that each pool needs, by the pool's name, for `/scale` and metrics."""
        learned = self.learned(now)
        ceiling = self.settings.ceiling(self.settings.scaling.from_band)
        needs = {}
        for name, watched in self.scaling.pools.items():
            if self.catalogue.pool_named(name) != name:
                # A named pool that was merged into another one.
                continue
            scheduler = self.schedulers.get(name)
            views = () if scheduler is None else scheduler.views(now)
            paces = {} if name not in learned else {pace.backend: pace for pace in learned[name].backends}
            replicas = [
                replica_facts(self.backends[view.backend], view, paces.get(view.backend), ceiling) for view in views
            ]
            need = watched.need(learned.get(name), replicas, self.settings.capacity.kv_full_ratio, now)
            needs[name] = by_role(need, replicas)
        return needs

    def pool_of(self, backend: str) -> str | None:
        """Returns the pool of a backend; None if it belongs to no pool."""
        scheduler = self._of_backend.get(backend)
        return None if scheduler is None else scheduler.pool

    def snapshot(self, now: float, flows_max: int | None = None) -> Snapshot:
        """Returns the waiting requests and the free slots.

        Shows at most `flows_max` flows (None: TOTAL_FLOWS_MAX) over all pools, because each flow costs time.
        """
        pools: list[PoolSnapshot] = []
        flows_left = TOTAL_FLOWS_MAX if flows_max is None else flows_max
        for scheduler in self._all:
            pools.append(scheduler.snapshot(now, flows_left))
            flows_left -= sum(len(band.shown) for band in pools[-1].bands)
        in_flight = self.limits.in_flight()
        names = sorted(in_flight, key=lambda name: -in_flight[name])[:LIMITS_MAX]
        limits = tuple(
            LimitSnapshot(
                name,
                in_flight[name],
                self.settings.limits.get(name, UsageLimit()).in_flight,
                *self.limits.rates.left_per_min(name, now),
            )
            for name in names
        )
        return Snapshot(tuple(pools), limits, len(in_flight) - len(names))

    def position(self, name: str, now: float) -> Position | None:
        """Returns the position of the waiting request with this label or id; None if there is none."""
        positions = (scheduler.position(name, now) for scheduler in self._all)
        return next((position for position in positions if position is not None), None)

    def choices(self, now: float) -> list[PoolChoices]:
        """Returns the last placements of each pool, with the prices of all candidates."""
        return [scheduler.choices(now) for scheduler in self.schedulers.values()]

    def learned(self, now: float) -> dict[str, Learned]:
        """Returns the learned speed of each pool whose placement learns."""
        speeds = ((name, scheduler.learned(now)) for name, scheduler in self.schedulers.items())
        return {name: speed for name, speed in speeds if speed is not None}

    def blocked(self) -> dict[str, int]:
        """Returns the number of blocked requests per usage limit or backend, over all pools."""
        blocked: Counter[str] = Counter()
        for scheduler in self._all:
            for (_, limit), waiting in scheduler.blocked().items():
                blocked[limit] += waiting
        return dict(blocked)

    def views(self, now: float) -> dict[str, View]:
        return {name: backend.view(now) for name, backend in self.backends.items()}

    def ready(self, now: float) -> bool:
        """Returns whether the proxy can accept requests: a backend is available, or requests for `scaling.pools` may
        wait until a replica has started.
        """
        holds = self.settings.queue.no_backend_wait_s > 0.0 and bool(self.settings.scaling.pools)
        return holds or any(b.listing is not None and b.view(now).available for b in self.backends.values())

    def check(self, now: float) -> None:
        for scheduler in self._all:
            scheduler.check(now)
        waiting = sum(requests for requests, _ in self.queued().values())
        assert waiting == sum(scheduler.waiting for scheduler in self._all)
