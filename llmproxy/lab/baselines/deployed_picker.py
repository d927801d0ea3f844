"""The endpoint picker of llm-d and the Gateway API Inference Extension (EPP, v0.10), as it is deployed.

`endpoint_picker` has its choices; this module adds the gate, the index and the late view of departed backends. By
default `epp_blend` runs with flow control and `epp_sticky` without it; `gate` changes either. Differences:

* Requests wait in this project's queue (strict bands, first come, first served), without EPP's one-second expiry sweep.
* Prompts are divided into the blocks of the trace, because a trace has no text.
* Neither default has the scorer for adapters. Each adapter has blocks of its own, as EPP's hash chain begins with the
  name of the model.
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
    """Returns the mean over the healthy backends of max(waiting / 5, KV cache usage / 0.8). At 1 the pool is full.

    A backend without a reading of the last 200 ms counts 1.0, and so does an empty pool. As in EPP's default detector,
    one hot backend among idle ones is invisible, and requests since the last readings do not count.
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
    """The rate of EPP's dispatch loop: one queued request per millisecond. A request that did not wait is free.

    A replay wakes at events, not at every tick. So the ticks until the next scrape may be used in advance: before that
    scrape, the readings do not change.
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
    """Evicts exactly the least recently used blocks, like EPP. The index of the core does so approximately."""

    def __init__(self) -> None:
        super().__init__()
        self._capacity: dict[str, int] = {}

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Returns the number of blocks that each backend has, up to the first block that no backend has.

        A backend may miss some of the blocks in between.
        """
        return self.matches(hashes, unbroken=False)

    def record(self, backend: str, hashes: Sequence[int]) -> None:
        blocks: dict[Block, int] = dict.fromkeys(hashes, 0)
        self.insert(backend, blocks)
        while self.size(backend) > self._capacity.get(backend, 0):
            self.drop_oldest(backend)

    def resize(self, backend: str, blocks: int) -> None:
        self._capacity[backend] = blocks


class DeployedPicker(EndpointPicker):
    """Binds at once, or behind the gate. It forgets a departed backend within two minutes."""

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
        del ceiling  # EPP's default allows every band the whole pool.
        if self._gate and (saturation(views, now) >= 1.0 or not self._ticks.left()):
            return NO_CAPACITY
        found = candidates(request, views, excluded)
        if not isinstance(found, list):
            return found
        if now >= self._sweep_at_s:
            self._sweep(views, now)
        return self.choose(request, found)

    def prompt(self, request: Request) -> PromptBlocks:
        """Returns the prompt as the trace has it. The last block may be partial; blocks without an id match nothing."""
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
