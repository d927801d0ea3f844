"""A reference for placements: the best greedy choice with full knowledge, which no real proxy has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from llmproxy.core.backends.view import View
from llmproxy.core.domain import NoCapacity, NoMatch, Placed, Request, Usage, Verdict
from llmproxy.core.placement.policy import NO_CAPACITY, NO_MATCH, NO_MATCH_FOR_MODEL, Placement
from llmproxy.lab.fleet.server import SimulatedServer
from llmproxy.lab.fleet.world import World
from llmproxy.lab.simulator.engine.sequence import EngineRequest
from llmproxy.lab.traces.arrival import Arrival

BEGIN_WITHIN_S = 0.5
"""A request is bound to a replica that can begin it within this time. Otherwise it waits in the central queue."""
SOON_S = 0.01
SAVING_TOKENS = 2_048
"""Additional cached prompt tokens that make a replica worth waiting for. A resident adapter counts like these."""


@dataclass(slots=True)
class _Held:
    """The unfinished requests of one replica, keyed by lease, and the prompt tokens still to compute."""

    arrivals: dict[int, Arrival] = field(default_factory=dict)
    ends_s: dict[int, float] = field(default_factory=dict)
    lasts_s: dict[int, float] = field(default_factory=dict)
    prefill_tokens: dict[int, int] = field(default_factory=dict)
    context_tokens: int = 0
    ahead_tokens: int = 0

    def adapters(self) -> set[str]:
        return {one.adapter for one in self.arrivals.values() if one.adapter is not None}

    def growing_tokens(self, now: float) -> float:
        """Returns the KV cache tokens that the running answers will still need."""
        return sum(
            arrival.output_tokens * min(1.0, max(0.0, (self.ends_s[lease] - now) / self.lasts_s[lease]))
            for lease, arrival in self.arrivals.items()
        )


class _Offer(NamedTuple):
    """The delay if one replica gets a request. The replica with the least `delay_s` gets it."""

    delay_s: float
    name: str
    begin_s: float
    warm_tokens: int


class Oracle(Placement):
    """A central queue that sends each request to the replica with the least total delay, from the true engine states.

    The delay at a replica is the sum of:

    * the time until the request can begin (a free sequence, an adapter slot, KV cache for prompt and answer, earlier
      prompts),
    * the prefill of uncached tokens,
    * the answer, with its true length and step times,
    * the delay that this prefill and decode cause to every request in the batch,
    * the prefill a second time, as a penalty: a prefix in the caches of two replicas evicts other blocks.

    Candidates are the replicas that can begin at once, and replicas with so many more cached tokens that waiting may
    pay. If the best candidate cannot begin soon, the request waits, and a request of higher priority may overtake it.

    The oracle uses the caches as they are. If it counted a hit at one replica as a hit at all, it would scatter prompts
    that share a prefix, and the copies would waste KV cache.
    """

    def __init__(self, world: World, clock: Callable[[], float]) -> None:
        self._world = world
        self._clock = clock
        self._held = {name: _Held() for name in world.replicas}
        self._where: dict[int, str] = {}

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        serving = [view for view in views if request.model in view.served and view.backend not in excluded]
        if not serving:
            return NO_MATCH_FOR_MODEL
        sequence = self._world.sequence_of(request.id)
        replicas = [self._world.replicas[view.backend] for view in serving if view.available]
        offers = [self._offer(replica, sequence) for replica in replicas if replica.holds(sequence)]
        at_once = [offer for offer in offers if offer.begin_s == 0.0]
        warm_tokens = max((offer.warm_tokens for offer in at_once), default=0) + SAVING_TOKENS
        best = min((*at_once, *(offer for offer in offers if offer.warm_tokens >= warm_tokens)), default=None)
        if best is None or best.begin_s > BEGIN_WITHIN_S:
            # A request that waits for an adapter slot does not block the others.
            return NO_CAPACITY if sequence.adapter is None else NO_MATCH
        return Placed(best.name, -best.delay_s, (("delay_s", best.delay_s), ("begin_s", best.begin_s)), len(serving))

    def _offer(self, replica: SimulatedServer, sequence: EngineRequest) -> _Offer:
        held, profile, slow = self._held[replica.spec.name], replica.engine.profile, replica.faults.slow
        cached_tokens = replica.engine.cached_tokens(sequence)
        batch, context_tokens = len(held.arrivals), held.context_tokens
        idle_s = profile.step_s(batch, context_tokens, []) if batch else 0.0
        prefill_s = profile.step_s(batch, context_tokens, [(cached_tokens, sequence.prompt_tokens)]) - idle_s
        step_s = profile.step_s(batch + 1, context_tokens + sequence.prompt_tokens, [])
        begin_s = self._begin_s(replica, sequence, cached_tokens)
        own_s = 2.0 * prefill_s + sequence.output_tokens * step_s
        harm_s = batch * (prefill_s + sequence.output_tokens * (step_s - idle_s))
        warm_tokens = cached_tokens
        if sequence.adapter is not None and sequence.adapter in held.adapters():
            warm_tokens += SAVING_TOKENS
        return _Offer(begin_s + slow * (own_s + harm_s), replica.spec.name, begin_s, warm_tokens)

    def _begin_s(self, replica: SimulatedServer, sequence: EngineRequest, cached_tokens: int) -> float:
        """Returns the seconds until the replica can begin the request, after earlier prompts and requests."""
        held, spec, engine = self._held[replica.spec.name], replica.spec, replica.engine
        ahead_s = 0.0
        if held.ahead_tokens > spec.step_tokens:
            ahead_s = replica.faults.slow * engine.profile.step_s(0, 0, [(0, held.ahead_tokens - spec.step_tokens)])
        # Prompts that are not scheduled yet have no blocks, and every answer still grows.
        taken_tokens = engine.gauges().kv_used * engine.kv_room_tokens + held.ahead_tokens
        taken_tokens += held.growing_tokens(self._clock())
        new_tokens = sequence.prompt_tokens - cached_tokens + sequence.output_tokens
        lacking_tokens = taken_tokens + new_tokens - engine.kv_room_tokens
        lacking_sequences = len(held.arrivals) + 1 - spec.max_num_seqs
        if lacking_tokens <= 0 and lacking_sequences <= 0 and self._adapter_fits(held, sequence, spec.max_loras):
            return ahead_s
        return max(ahead_s, self._room_at_s(held, sequence, lacking_tokens, lacking_sequences, spec.max_loras))

    def _room_at_s(
        self, held: _Held, sequence: EngineRequest, lacking_tokens: float, lacking_sequences: int, slots: int
    ) -> float:
        now = self._clock()
        left = _Held(dict(held.arrivals))
        for lease in sorted(held.ends_s, key=lambda one: (held.ends_s[one], one)):
            ended = left.arrivals.pop(lease)
            lacking_tokens -= ended.prompt_tokens + ended.output_tokens
            lacking_sequences -= 1
            if lacking_tokens <= 0 and lacking_sequences <= 0 and self._adapter_fits(left, sequence, slots):
                # A request whose predicted end has passed has not ended yet, but will soon.
                return max(SOON_S, held.ends_s[lease] - now)
        return inf

    @staticmethod
    def _adapter_fits(held: _Held, sequence: EngineRequest, slots: int) -> bool:
        if sequence.adapter is None:
            return True
        adapters = held.adapters()
        return sequence.adapter in adapters or len(adapters) < slots

    # --- its own leases -----------------------------------------------------------------------------------------------

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        backend = placed.backend
        arrival, held = self._world.arrivals[request.id], self._held[backend]
        replica, sequence = self._world.replicas[backend], self._world.sequence_of(request.id)
        prefill_tokens = arrival.prompt_tokens - replica.engine.cached_tokens(sequence)
        step_s = replica.engine.profile.step_s(len(held.arrivals) + 1, held.context_tokens + arrival.prompt_tokens, [])
        begin_s = self._begin_s(replica, sequence, arrival.prompt_tokens - prefill_tokens)
        self._where[lease] = backend
        held.lasts_s[lease] = replica.faults.slow * arrival.output_tokens * step_s
        held.ends_s[lease] = now + begin_s + held.lasts_s[lease]
        held.arrivals[lease] = arrival
        held.prefill_tokens[lease] = prefill_tokens
        held.ahead_tokens += prefill_tokens
        held.context_tokens += arrival.prompt_tokens + arrival.output_tokens // 2

    def started(self, lease: int, now: float) -> None:
        held = self._held[self._where[lease]]
        held.ahead_tokens -= held.prefill_tokens.pop(lease, 0)

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None, now: float) -> None:
        self.started(lease, now)
        held = self._held[self._where.pop(lease)]
        arrival = held.arrivals.pop(lease)
        del held.ends_s[lease], held.lasts_s[lease]
        held.context_tokens -= arrival.prompt_tokens + arrival.output_tokens // 2
