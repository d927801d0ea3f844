"""The endpoint picker of llm-d and the Gateway API Inference Extension (EPP, v0.10), as it is deployed.

What it chooses is `core.placement.epp`; here is what stands around it there. Of its two default configurations the
blend runs with its flow control on, and "sticky until saturated" binds at once, as the flow control is off by default;
`gate` changes either. Simplified: the waiting room is the production one (strict bands, first come first served),
without their one-second expiry sweep; blocks of prompts are those of the trace, because only these have names. Adapters
are seen through the blocks alone, which are distinct for each, as the hash chain begins with the model's name; the
scorer for adapters is not part of either default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xxhash import xxh64_intdigest

from llmproxy.core.backends.view import View
from llmproxy.core.domain import NoCapacity, NoMatch, Placed, Request
from llmproxy.core.placement.policy import NO_CAPACITY
from llmproxy.lab.baselines.common import candidates
from llmproxy.lab.baselines.endpoint_picker import EndpointPicker, Profile, PromptBlocks, blend, sticky
from llmproxy.lab.baselines.index import Block, BlockIndex
from llmproxy.lab.baselines.policy import Baseline, Surroundings, baselines

SCRAPE_S = 0.05
GATE_WAITING = 5
GATE_KV = 0.8
FRESH_S = 0.2
TICKS_PER_S = 1_000.0
DEPARTED_AFTER_S = 120.0


def saturation(views: Sequence[View], now: float) -> float:
    """The default detector: mean over the healthy backends of max(waiting / 5, KV use / 0.8), 1 and above is full.

    A backend without a reading of the last 200 ms counts 1.0, and so does a pool of none. One hot backend among idle
    ones is invisible, and what was dispatched since the readings does not count; both are how it works.
    """
    up = [view.reading for view in views if view.available]
    parts = [
        max(reading.waiting / GATE_WAITING, (reading.kv_used or 0.0) / GATE_KV)
        if reading is not None and now - reading.taken_at_s <= FRESH_S
        else 1.0
        for reading in up
    ]
    return sum(parts) / len(parts) if parts else 1.0


class Ticks:
    """Their loop takes one request out of the queue per millisecond, and one more for every arrival.

    A replay wakes at events, not at every tick: the ticks until the next scrape are allowed in advance, since nothing
    that the gate or the scorers read from outside changes before it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used = 0.0
        self._at_s = clock()

    def left(self) -> bool:
        now = self._clock()
        self._used = max(0.0, self._used - TICKS_PER_S * (now - self._at_s))
        self._at_s = now
        return self._used + 1.0 <= TICKS_PER_S * SCRAPE_S

    def use(self, request: Request) -> None:
        if request.arrived_s < self._clock():
            self._used += 1.0


class LruIndex(BlockIndex):
    """Least recently used blocks go first, exactly and by count, as in theirs; that of the core is nearly exact."""

    def __init__(self) -> None:
        super().__init__()
        self._capacity: dict[str, int] = {}

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """How many blocks each backend holds, gaps included, up to the first block that no backend holds."""
        return self.matches(hashes, unbroken=False)

    def record(self, backend: str, hashes: Sequence[int]) -> None:
        blocks: dict[Block, int] = dict.fromkeys(hashes, 0)
        self.insert(backend, blocks)
        while self.size(backend) > self._capacity.get(backend, 0):
            self.drop_oldest(backend)

    def resize(self, backend: str, blocks: int) -> None:
        self._capacity[backend] = blocks


class DeployedPicker(EndpointPicker):
    """Binds at once, behind the gate where there is one, and learns within two minutes that a backend is gone."""

    def __init__(self, around: Surroundings, gate: bool, profile: Profile) -> None:
        self._lru = LruIndex()
        super().__init__(around.rng, profile, self._lru)
        self._around = around
        self._gate = gate
        self._ticks = Ticks(around.clock)
        self._sweep_at_s = around.clock() + DEPARTED_AFTER_S

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        del ceiling  # Their default allows every band the whole pool.
        if self._gate and (saturation(views, now) >= 1.0 or not self._ticks.left()):
            return NO_CAPACITY
        found = candidates(request, views, excluded)
        if not isinstance(found, list):
            return found
        if now >= self._sweep_at_s:
            self._sweep(views, now)
        return self.choose(request, found)

    def prompt(self, request: Request) -> PromptBlocks:
        """Its length and blocks as the trace has them, the last one partial; those without a name match nothing."""
        known, size = self._around.prompts[request.id], self._around.block_tokens
        count = -(-known.tokens // size)
        named = known.blocks[:count]
        unnamed = [xxh64_intdigest(request.id.encode(), i) for i in range(len(named), count)]
        return PromptBlocks(known.tokens, (*named, *unnamed), size)

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        self._ticks.use(request)
        super().booked(lease, request, placed, now)

    def lost(self, backend: str) -> None:
        pass

    def _sweep(self, views: Sequence[View], now: float) -> None:
        self._sweep_at_s = now + DEPARTED_AFTER_S
        up = [view.backend for view in views if view.available]
        for backend in self._lru.backends():
            if backend not in up:
                self._lru.forget(backend)


@baselines.register("epp_blend")
def epp_blend(*, queue: float = 2.0, kv: float = 2.0, prefix: float = 3.0, gate: float = 1.0) -> Baseline:
    about = "llm-d endpoint picker, code default: queue, KV-cache and prefix scores behind its pool-wide gate"
    return Baseline(
        "epp_blend", about, lambda around: DeployedPicker(around, gate > 0, blend(queue, kv, prefix)), SCRAPE_S
    )


@baselines.register("epp_sticky")
def epp_sticky(*, match: float = 0.8, penalty_s: float = 18.0, rate: float = 15_928.0, gate: float = 0.0) -> Baseline:
    about = (
        "llm-d endpoint picker, newer guide: sticky to a cached prefix until saturated, then fewest tokens in flight"
    )
    profile = sticky(match, penalty_s, rate)
    return Baseline("epp_sticky", about, lambda around: DeployedPicker(around, gate > 0, profile), SCRAPE_S)
