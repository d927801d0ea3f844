"""Collects the data for scaling from the requests of each pool."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Mapping, Sequence
from math import inf

from llmproxy.core.backends.backend import Backend
from llmproxy.core.backends.batch_limit import UNPUBLISHED
from llmproxy.core.backends.view import View
from llmproxy.core.domain import DECODE, PREFILL, BackendPace, KnownCapacity, Learned, Request, Verdict
from llmproxy.core.estimates.learning import follow, gain
from llmproxy.core.lease_events import Returned
from llmproxy.core.leases import LeaseObserver, LeaseRecord
from llmproxy.core.scaling.curve import StepCurve
from llmproxy.core.scaling.mix import Count, Mix, size_class
from llmproxy.core.scaling.need import ENDED_MIN, Demand, Need, ReplicaFacts, mean_known, pool_need
from llmproxy.core.settings import ScalingSettings

ADAPTERS_S = 300.0
ADAPTERS_MAX = 10_000
TPOT_GAIN = 0.02
START_S = 120.0  # Assumed time until a new replica serves, before `STARTS_MIN` were observed.
STARTS_MIN, STARTS_KEPT = 3, 20


class _Engine:
    """The load of one backend process so far, as sums over time."""

    __slots__ = ("area", "at_s", "prompt_tokens", "sequences")

    def __init__(self, now: float) -> None:
        self.sequences = 0  # Sequences in flight.
        # The integral of `sequences` over time up to `at_s`, and the sum of prompt tokens weighted by attention.
        self.area = self.prompt_tokens = 0.0
        self.at_s = now

    def at(self, now: float) -> float:
        """Returns the integral of `sequences` over time until now."""
        if now > self.at_s:
            self.area += self.sequences * (now - self.at_s)
            self.at_s = now
        return self.area


# State when a request was sent: engine, the engine's `area` and `prompt_tokens`, and the time.
_Begun = tuple[_Engine, float, float, float]


class PoolScaling(LeaseObserver):
    """The scaling data of one pool. Only requests of `settings.from_band` and above demand replicas."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self.mix = Mix()
        self.curve = StepCurve()
        self._engines: dict[str, _Engine] = {}
        self._begun: dict[int, _Begun] = {}  # Lease -> totals of the engine when the lease began.
        # Id of a waiting request -> its prompt tokens, and the count of waiting requests of its size class.
        self.waiting: dict[str, tuple[int, Count]] = {}
        self._waiting_since_s = 0.0  # The time since which at least one request waits.
        self._sizes: dict[int, Count] = {}  # Size class -> its waiting requests.
        self._usual_limit: float = UNPUBLISHED  # Mean learned batch limit, kept after the last replica is gone.
        self._running = self._others = 0  # Sequences in flight from `from_band` on, and of lower bands.
        self._on_hold = 0  # Requests on hold while the pool has no replica.
        self._joined: list[PoolScaling] = []  # Pools that became part of this one and still have requests in flight.
        # Adapter -> time of its last request, the oldest first.
        self._adapters: OrderedDict[str, float] = OrderedDict()
        # Mean objective in seconds per output token, over requests that have such an objective; None before the first.
        self._tpot_s: float | None = None
        self._tpots = 0  # Number of these requests.
        # The time of the last request; before the first one, the time since which a replica is known to be up.
        self._asked_s: float | None = None
        self._attention = 0.0
        self._learned_s = -inf  # The time of the last observation.
        # Observed seconds from the start of a replica until it served.
        self._starts: deque[float] = deque(maxlen=STARTS_KEPT)

    def reconfigure(self, settings: ScalingSettings) -> None:
        self._settings = settings

    def join(self, other: PoolScaling) -> None:
        """Merges the pool `other` into this one. The requests in flight of `other` count here until they end."""
        self._joined.append(other)
        self._on_hold, other._on_hold = self._on_hold + other._on_hold, 0

    @property
    def known_capacity(self) -> KnownCapacity | None:
        """The learned capacity, for `restore` in a later process; None before `ENDED_MIN` answers."""
        if self.mix.ended < ENDED_MIN:
            return None
        sizes = sorted(self.mix.sizes.items())
        return KnownCapacity(
            self.curve.sums,
            tuple((size, one.seen, one.output_tokens, one.cached_share) for size, one in sizes),
            tuple(one.output_squares for _, one in sizes),
        )

    def replica_started(self, took_s: float) -> None:
        """Records that a new replica began to serve `took_s` after its start."""
        self._starts.append(took_s)

    @property
    def start_s(self) -> float:
        """The seconds until a new replica serves: as configured, else the p90 of the observed times."""
        if self._settings.start_s is not None:
            return self._settings.start_s
        if len(self._starts) < STARTS_MIN:
            return START_S
        return sorted(self._starts)[int(0.9 * len(self._starts))]

    def restore(self, known: KnownCapacity, at_s: float) -> None:
        """Takes over the capacity that another process had learned by `at_s`, unless this process learned later."""
        curve, mix = StepCurve(), Mix()
        younger = at_s >= self._learned_s and known != self.known_capacity
        if younger and curve.restore(known.sums, at_s) and mix.restore(known.sizes, known.squares):
            self.curve, self.mix = curve, mix

    # --- requests ------------------------------------------------------------------------------------------------

    def arrived(self, request: Request, now: float, *, new: bool, counts: bool) -> None:
        """Records that a request entered the queue.

        `new` is False for a request that was admitted before, which is no arrival. `counts` is False for a request that
        waits for a usage limit, because more replicas would not help it.
        """
        self._asked_s = now
        if request.band < self._settings.from_band or not counts:
            return
        if request.id in self.waiting:
            self.left(request)
        if not self.waiting:
            self._waiting_since_s = now
        size = size_class(request.prompt_tokens)
        count = self._sizes.get(size)
        if count is None:
            count = self._sizes[size] = Count()
        self.waiting[request.id] = request.prompt_tokens, count
        count.requests += 1
        count.prompt_tokens += request.prompt_tokens
        if not new:
            return
        self.mix.arrived(request.prompt_tokens, now)
        if request.adapter is not None:
            self._adapters[request.adapter] = now
            self._adapters.move_to_end(request.adapter)
            if len(self._adapters) > ADAPTERS_MAX:
                self._adapters.popitem(last=False)
        if request.slo is not None and request.slo.tpot_s is not None:
            self._tpots += 1
            mean = self._tpot_s if self._tpot_s is not None else request.slo.tpot_s
            self._tpot_s = follow(mean, request.slo.tpot_s, gain(TPOT_GAIN, self._tpots))

    def count_on_hold(self, change: int, now: float) -> None:
        """Adds `change` to the number of requests held for this pool while it has no replica."""
        self._asked_s = now
        self._on_hold += change

    def left(self, request: Request) -> None:
        """Records that a request ended or no longer waits."""
        if request.id in self.waiting:
            prompt_tokens, count = self.waiting.pop(request.id)
            count.requests -= 1
            count.prompt_tokens -= prompt_tokens

    def booked(self, lease: LeaseRecord, now: float) -> None:
        request = lease.request
        self.left(request)
        engine = self._engines.get(lease.backend.name)
        if engine is None:
            engine = self._engines[lease.backend.name] = _Engine(now)
        begun = engine, engine.at(now), engine.prompt_tokens, now
        if request.stage is not DECODE:
            cached = lease.placed.cached_tokens or 0
            uncached = max(0, request.prompt_tokens - cached)
            engine.prompt_tokens += uncached * (1.0 + self._attention * (cached + uncached / 2.0))
        if request.stage is PREFILL:
            # A prefill stage has no sequence in the batch. The decode stage reports its usage.
            return
        engine.sequences += request.sequences
        self._begun[lease.number] = begun
        if request.band >= self._settings.from_band:
            self._running += request.sequences
        else:
            self._others += request.sequences

    def returned(self, lease: LeaseRecord, event: Returned, now: float) -> None:
        request = lease.request
        if request.stage is PREFILL:
            return
        if request.band >= self._settings.from_band:
            self._running -= request.sequences
        else:
            self._others -= request.sequences
        engine, area, prompt_tokens, begun_s = self._begun.pop(lease.number)
        area = engine.at(now) - area
        engine.sequences -= request.sequences
        usage = event.usage
        if usage is None or event.verdict is not Verdict.SERVED or usage.prompt_tokens <= 0:
            return
        if not request.continued:
            # The size of the whole request is not known from its rest.
            self.mix.learn(usage)
        self._learned_s = now
        took_s = now - begun_s
        if took_s > 0.0 and self._engines.get(lease.backend.name) is engine:
            # A request without output, such as an embedding, takes a step too.
            steps = max(1.0, usage.output_tokens / request.sequences)
            self.curve.learn(steps, took_s, area / took_s, engine.prompt_tokens - prompt_tokens, now)

    def process_gone(self, backend: str) -> None:
        # Leases of the old process may end later, and are not learned from.
        self._engines.pop(backend, None)

    # --- the number ----------------------------------------------------------------------------------------------

    def need(self, learned: Learned | None, replicas: Sequence[ReplicaFacts], kv_full_ratio: float, now: float) -> Need:
        """Returns the number of replicas that the pool needs now, with the reason.

        `replicas` are all known replicas of the pool. `learned` is None if the placement learns no speeds.
        `kv_full_ratio` is the KV cache usage (0..1) from which an engine is full.
        """
        if learned is not None:
            self._attention = learned.prefill_attention
        while self._adapters and next(iter(self._adapters.values())) < now - ADAPTERS_S:
            self._adapters.popitem(last=False)
        self._joined = [one for one in self._joined if one._running or one._others]
        running = self._running + sum(one._running for one in self._joined)
        others = self._others + sum(one._others for one in self._joined)
        busy = running + others + len(self.waiting) + self._on_hold
        if self._asked_s is None and any(one.up for one in replicas):
            # After a restart, the earlier requests are unknown, so the pool is idle from now on.
            self._asked_s = now
        idle_s = 0.0 if busy or self._asked_s is None else now - self._asked_s
        waited_s = now - self._waiting_since_s if self.waiting else 0.0
        demand = Demand(running, others, self._sizes, self._on_hold, len(self._adapters), idle_s, waited_s)
        # The last mean also serves new replicas and a pool without replicas.
        self._usual_limit = mean_known((one.limit for one in replicas), self._usual_limit)
        tpot_s = self._settings.target_tpot_s if self._settings.target_tpot_s is not None else self._tpot_s
        return pool_need(
            self.mix, learned, self.curve, replicas, demand, self._settings, tpot_s, self.start_s, kv_full_ratio, now,
            self._usual_limit,
        )  # fmt: skip


class Scaling:
    """The scaling data of all pools. The pools named in the settings exist even without a replica."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._restored: Mapping[str, KnownCapacity] = {}
        self._restored_s = -inf
        self.pools = {name: PoolScaling(settings) for name in settings.pools}

    def pool(self, name: str) -> PoolScaling:
        found = self.pools.get(name)
        if found is None:
            found = self.pools[name] = PoolScaling(self._settings)
            if name in self._restored:
                found.restore(self._restored[name], self._restored_s)
        return found

    def restore(self, known: Mapping[str, KnownCapacity], at_s: float) -> None:
        """Takes over the capacities that another process had learned by `at_s`, also for pools that are added later."""
        self._restored, self._restored_s = known, at_s
        for name in known.keys() & self.pools.keys():
            self.pools[name].restore(known[name], at_s)

    def known_capacities(self) -> dict[str, KnownCapacity]:
        """Returns pool -> learned capacity, for `restore` in a later process."""
        found = ((name, pool.known_capacity) for name, pool in self.pools.items())
        return {name: known for name, known in found if known is not None}

    def count_on_hold(self, name: str | None, change: int, now: float) -> None:
        """Adds `change` to the number of requests held for a pool of the settings that has no replica."""
        if name in self._settings.pools:
            self.pool(name).count_on_hold(change, now)

    def left(self, request: Request) -> None:
        """Records that a request ended or leaves its pool. Its model may belong to another pool by now."""
        for pool in self.pools.values():
            pool.left(request)

    def rename(self, kept: Mapping[str, str], merged: Mapping[str, str]) -> None:
        """Renames pools (`kept`: old name -> new name), and merges pools (`merged`: name -> pool that gets it)."""
        before = dict(self.pools)
        moved = {now: self.pools.pop(was) for was, now in kept.items() if was in before}
        for now, pool in moved.items():
            if now in self.pools:
                pool.join(self.pools[now])
        self.pools |= moved
        for was, now in merged.items():
            if was in before and now in self.pools:
                self.pools[now].join(before[was])

    def retain(self, names: Container[str]) -> None:
        """Forgets all pools, with their data, except `names` and the pools named in the settings."""
        named = self._settings.pools
        self.pools = {name: pool for name, pool in self.pools.items() if name in names or name in named}
        for name in named:
            self.pool(name)

    def reconfigure(self, settings: ScalingSettings) -> None:
        self._settings = settings
        for pool in self.pools.values():
            pool.reconfigure(settings)
        for name in settings.pools:
            self.pool(name)


def replica_facts(backend: Backend, view: View, pace: BackendPace | None, ceiling: float) -> ReplicaFacts:
    """Returns the scaling facts of a backend. `ceiling` is the ceiling of `from_band`."""
    limit = backend.limit
    # An unlearned limit is only the starting point of learning.
    learned = limit.value if limit.converged or limit.known is not None else None
    return ReplicaFacts(
        backend.up,
        learned,
        view.kv_tokens,
        view.kv_used if view.reading is not None else None,
        view.max_adapters,
        # Relative to a replica of the usual speed in its pool.
        1.0 if pace is None else 2.0 / max(0.1, pace.prefill_factor + pace.step_factor),
        view.role,
        not view.has_room(ceiling),
    )
