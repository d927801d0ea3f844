"""The endpoint picker of llm-d and the Gateway API Inference Extension (EPP, v0.10).

Both of its default configurations: the weighted blend of its code, here with its flow control on, and "sticky until
saturated" of its newer guides, which binds at once as the flow control is off by default; `gate` changes either.
Simplified: the waiting room is the production one (strict bands, first come first served), without their one-second
expiry sweep; blocks of prompts are those of the trace, because only these have names; of the prefix index the two
known defects (heads evicted before their tails, capacity of 16-token blocks counted in 64-token blocks) are taken as
mended. Adapters are seen through the blocks alone, which are distinct for each, as the hash chain begins with the
model's name; the scorer for adapters is not part of either default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmproxy.core.domain import NoCapacity, NoMatch, Placed, Request, Usage, Verdict
from llmproxy.core.fleet import View
from llmproxy.core.placement import NO_CAPACITY, Unobserved
from llmproxy.lab.baselines.common import Ledger, best, candidates, prompt_blocks
from llmproxy.lab.baselines.index import Block, PrefixIndex
from llmproxy.lab.policy import Baseline, Surroundings, baselines

SCRAPE_S = 0.05
GATE_WAITING = 5
GATE_KV = 0.8
FRESH_S = 0.2
TICKS_PER_S = 1_000.0
PROMPT_TOKENS_MAX = 131_072
INDEX_TOKENS = 31_250 * 64
"""Capacity of the prefix index per backend while the size of its KV-cache is unknown: blocks times their tokens."""
DEPARTED_AFTER_S = 120.0
TOKEN_LOAD_FULL = 4_194_304


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


class Picker(Unobserved):
    """The gate in front where there is one, the prefix index, and the work in flight; a subclass scores.

    Work in flight is counted in prompt tokens that the index does not believe to be cached, until the first byte. The
    index is written when a request is sent, before it succeeds, and knows prompts only.
    """

    def __init__(self, around: Surroundings, gate: bool) -> None:
        self._around = around
        self._gate = gate
        self._index = PrefixIndex()
        self._capacity: dict[str, int] = {}
        self._ticks = Ticks(around.clock)
        self._sweep_at_s = around.clock() + DEPARTED_AFTER_S
        self.tokens_in_flight = Ledger()

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
        blocks = self._blocks(request)
        chosen = self.score(request, found, self._index.matches(blocks, unbroken=False), len(blocks))
        self._tune(next(view for view in found if view.backend == chosen.backend))
        return chosen

    def score(self, request: Request, views: list[View], matches: dict[str, int], blocks: int) -> Placed:
        """Choose among `views`, given how many of the prompt's `blocks` each backend is believed to hold."""
        raise NotImplementedError

    def uncached_tokens(self, request: Request, matched_blocks: int) -> int:
        return max(0, self._around.prompts[request.id].tokens - matched_blocks * self._around.block_tokens)

    def _blocks(self, request: Request) -> dict[Block, int]:
        blocks = prompt_blocks(request, self._around)
        most = max(1, PROMPT_TOKENS_MAX // self._around.block_tokens)
        return blocks if len(blocks) <= most else dict(list(blocks.items())[:most])

    def _tune(self, view: View) -> None:
        known = view.reading.kv_tokens if view.reading is not None else None
        self._capacity[view.backend] = max(1, (known or INDEX_TOKENS) // self._around.block_tokens)

    def _sweep(self, views: Sequence[View], now: float) -> None:
        self._sweep_at_s = now + DEPARTED_AFTER_S
        up = [view.backend for view in views if view.available]
        for backend in self._index.backends():
            if backend not in up:
                self._index.forget(backend)

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        del now
        backend = placed.backend
        self._ticks.use(request)
        blocks = self._blocks(request)
        matched = self._index.matches(blocks, unbroken=False).get(backend, 0)
        self.tokens_in_flight.give(lease, backend, self.uncached_tokens(request, matched))
        self._index.insert(backend, blocks)
        while self._index.size(backend) > self._capacity[backend]:
            self._index.drop_oldest(backend)

    def started(self, lease: int, now: float) -> None:
        del now
        self.tokens_in_flight.take_back(lease)

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None, now: float) -> None:
        del verdict, usage, now
        self.tokens_in_flight.take_back(lease)


class Blend(Picker):
    """queue-scorer, kv-cache-utilization-scorer and prefix-cache-scorer, weighted; the highest sum wins.

    The queue's score is min-max over the candidates, so that a difference of one is as decisive as one of fifty. All
    candidates with the best score share by chance, and between two scrapes everybody sees the same best one.
    """

    def __init__(self, around: Surroundings, gate: bool, queue: float, kv: float, prefix: float) -> None:
        super().__init__(around, gate)
        self._weights = queue, kv, prefix

    def score(self, request: Request, views: list[View], matches: dict[str, int], blocks: int) -> Placed:
        del request
        waiting = [view.reading.waiting if view.reading is not None else 0 for view in views]
        shortest, longest = min(waiting), max(waiting)
        spread = longest - shortest
        queue = [(longest - w) / spread if spread else 1.0 for w in waiting]
        kv = [1.0 - ((view.reading.kv_used or 0.0) if view.reading is not None else 0.0) for view in views]
        prefix = [matches.get(view.backend, 0) / blocks if blocks else 0.0 for view in views]
        weigh_queue, weigh_kv, weigh_prefix = self._weights
        scores = [weigh_queue * q + weigh_kv * k + weigh_prefix * p for q, k, p in zip(queue, kv, prefix, strict=True)]
        return best(views, scores, {"queue": queue, "kv": kv, "prefix": prefix}, self._around.rng)


class Sticky(Picker):
    """prefix-cache-affinity-filter, then token-load-scorer.

    Backends that hold at least `match` of the prompt's blocks are kept alone, unless the least loaded of them would
    answer more than `penalty_s` later than the least loaded of the others (0 = whatever it costs), at `rate` prompt
    tokens in flight per second. Of those kept the one with the fewest tokens in flight wins, this prompt's uncached
    ones included.
    """

    def __init__(self, around: Surroundings, gate: bool, match: float, penalty_s: float, rate: float) -> None:
        super().__init__(around, gate)
        self._match, self._penalty_s, self._rate = match, penalty_s, rate

    def score(self, request: Request, views: list[View], matches: dict[str, int], blocks: int) -> Placed:
        kept = self._filtered(views, matches, blocks)
        loads = [
            self.tokens_in_flight.of(view.backend) + self.uncached_tokens(request, matches.get(view.backend, 0))
            for view in kept
        ]
        scores = [1.0 - min(1.0, load / TOKEN_LOAD_FULL) for load in loads]
        ratios = [matches.get(view.backend, 0) / blocks if blocks else 0.0 for view in kept]
        return best(kept, scores, {"tokens": loads, "match": ratios}, self._around.rng)

    def _filtered(self, views: list[View], matches: dict[str, int], blocks: int) -> list[View]:
        sticky: list[View] = []
        others: list[View] = []
        for view in views:
            (sticky if blocks and matches.get(view.backend, 0) / blocks >= self._match else others).append(view)
        if not sticky or not others:
            return views
        if self._penalty_s:
            ahead_tokens = min(self.tokens_in_flight.each(sticky)) - min(self.tokens_in_flight.each(others))
            if ahead_tokens / self._rate > self._penalty_s:
                return views
        return sticky


@baselines.register("epp_blend")
def epp_blend(*, queue: float = 2.0, kv: float = 2.0, prefix: float = 3.0, gate: float = 1.0) -> Baseline:
    about = "llm-d endpoint picker, code default: queue, KV-cache and prefix scores behind its pool-wide gate"
    return Baseline("epp_blend", about, lambda around: Blend(around, gate > 0, queue, kv, prefix), SCRAPE_S)


@baselines.register("epp_sticky")
def epp_sticky(*, match: float = 0.8, penalty_s: float = 18.0, rate: float = 15_928.0, gate: float = 0.0) -> Baseline:
    about = (
        "llm-d endpoint picker, newer guide: sticky to a cached prefix until saturated, then fewest tokens in flight"
    )
    return Baseline("epp_sticky", about, lambda around: Sticky(around, gate > 0, match, penalty_s, rate), SCRAPE_S)
