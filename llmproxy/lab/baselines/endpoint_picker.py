"""The endpoint picker (EPP, v0.10) of llm-d and the Gateway API Inference Extension.

`epp_blend` is EPP's default: a weighted sum of scores, behind a saturation gate. `epp_sticky` is the "sticky until
saturated" of EPP's newer guides, without the gate. The parameter `gate` overrides either. Filters, scorers, weights and
thresholds are as documented. Differences:

* Requests wait in this project's queue (strict bands, first come, first served), without EPP's check for expired
  requests once a second.
* Prompts are divided into the blocks of the trace, because a trace has no text.
* Neither default has the scorer for adapters. Each adapter has separate blocks, as in EPP.
* Two defects of EPP's index are fixed, as in later versions: heads evicted before their tails, and a capacity of
  16-token blocks counted in 64-token blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from llmproxy.core.backends.view import View
from llmproxy.core.domain import NoCapacity, NoMatch, Placed, Request, Usage, Verdict
from llmproxy.core.placement.policy import NO_CAPACITY, Placement
from llmproxy.lab.baselines.common import Ledger, candidates, highest, prompt_blocks
from llmproxy.lab.baselines.index import Block, BlockIndex
from llmproxy.lab.baselines.policy import Baseline, Surroundings, baselines

SCRAPE_S = 0.05
GATE_WAITING = 5
GATE_KV = 0.8
FRESH_S = 0.2
TICKS_PER_S = 1_000.0
DEPARTED_AFTER_S = 120.0
PROMPT_TOKENS_MAX = 131_072  # Longest beginning of a prompt, in tokens, that is looked up and recorded.
INDEX_TOKENS = 31_250 * 64
"""Capacity of the prefix index per backend while the size of its KV cache is unknown: blocks times tokens per block."""
TOKEN_LOAD_FULL = 4_194_304


@dataclass(frozen=True, slots=True)
class ScoringInput:
    """A backend that may be chosen for one prompt."""

    view: View
    # Share of the prompt's blocks that the backend has probably cached, 0..1.
    match: float
    cached_tokens: int
    # Uncached tokens of this prompt.
    new_tokens: int
    # Uncached tokens of earlier prompts without a first byte.
    tokens_in_flight: int


@dataclass(frozen=True, slots=True)
class Scored:
    """The candidates that passed a profile's filters, with scores and terms in the same order."""

    kept: Sequence[ScoringInput]
    scores: Sequence[float]
    terms: Mapping[str, Sequence[float]]


Profile = Callable[[Sequence[ScoringInput]], Scored]
"""EPP's scheduling profile: filters and weighted scorers. The highest score wins; ties are drawn at random."""


def blend(queue: float = 2.0, kv: float = 2.0, prefix: float = 3.0) -> Profile:
    """Returns a profile with queue-scorer, kv-cache-utilization-scorer and prefix-cache-scorer.

    The queue score is min-max normalized over the candidates, so a difference of one request weighs as much as a
    difference of fifty. Queue and KV cache usage come from the last scrape, so between two scrapes only the cached
    prefix tells requests apart.
    """

    def scored(candidates: Sequence[ScoringInput]) -> Scored:
        readings = [candidate.view.reading for candidate in candidates]
        waiting = [reading.waiting if reading is not None else 0 for reading in readings]
        shortest, longest = min(waiting), max(waiting)
        spread = longest - shortest
        queues = [(longest - w) / spread if spread else 1.0 for w in waiting]
        kvs = [1.0 - ((reading.kv_used or 0.0) if reading is not None else 0.0) for reading in readings]
        prefixes = [candidate.match for candidate in candidates]
        scores = [queue * q + kv * k + prefix * p for q, k, p in zip(queues, kvs, prefixes, strict=True)]
        return Scored(candidates, scores, {"queue": queues, "kv": kvs, "prefix": prefixes})

    return scored


def sticky(match: float = 0.8, penalty_s: float = 18.0, rate: float = 15_928.0) -> Profile:
    """Returns a profile with prefix-cache-affinity-filter and token-load-scorer.

    A backend is warm if it has at least the share `match` of the prompt's blocks. If there are warm backends, only they
    are candidates. The exception: at `rate` prompt tokens per second, the least loaded warm backend would begin more
    than `penalty_s` (0: no limit) later than the least loaded other backend. The candidate with the fewest tokens in
    flight, including this prompt's uncached tokens, is chosen.
    """

    def warm_candidates(candidates: Sequence[ScoringInput]) -> Sequence[ScoringInput]:
        warm = [candidate for candidate in candidates if candidate.match >= match]
        others = [candidate for candidate in candidates if candidate.match < match]
        if not warm or not others:
            return candidates
        ahead_tokens = min(one.tokens_in_flight for one in warm) - min(one.tokens_in_flight for one in others)
        return candidates if penalty_s and ahead_tokens / rate > penalty_s else warm

    def scored(candidates: Sequence[ScoringInput]) -> Scored:
        kept = warm_candidates(candidates)
        loads = [candidate.tokens_in_flight + candidate.new_tokens for candidate in kept]
        scores = [1.0 - min(1.0, load / TOKEN_LOAD_FULL) for load in loads]
        return Scored(kept, scores, {"tokens": loads, "match": [candidate.match for candidate in kept]})

    return scored


def saturation(views: Sequence[View], now: float) -> float:
    """Returns the mean of max(waiting / 5, KV cache usage / 0.8) over the healthy backends. At 1 the pool is full.

    A backend without a scrape in the last 200 ms counts 1.0, and so does an empty pool. As in EPP's default detector,
    one hot backend among idle ones is invisible, and requests since the last scrapes do not count.
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
    """The rate of EPP's dispatch loop: one queued request per millisecond. A request that did not wait uses no tick.

    A replay runs at events, not at ticks, so the ticks until the next scrape may be used in advance: the metrics do not
    change before it.
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
    """Evicts exactly the least recently used blocks, like EPP. The core's index does so approximately."""

    def __init__(self) -> None:
        super().__init__()
        self._capacity: dict[str, int] = {}

    def match(self, blocks: Sequence[Block]) -> dict[str, int]:
        """Returns the number of blocks on each backend, up to the first block that no backend has.

        A backend may miss some of the blocks in between.
        """
        return self.matches(blocks, unbroken=False)

    def record(self, backend: str, blocks: Sequence[Block]) -> None:
        self.insert(backend, dict.fromkeys(blocks, 0))
        while self.size(backend) > self._capacity.get(backend, 0):
            self.drop_oldest(backend)

    def resize(self, backend: str, blocks: int) -> None:
        self._capacity[backend] = blocks


class EndpointPicker(Placement):
    """A profile with its saturation gate, prefix index and work in flight.

    Work in flight is counted in uncached prompt tokens, until the first byte. Prompts, not answers, are indexed when a
    request is sent. A removed backend is forgotten within two minutes.
    """

    def __init__(self, around: Surroundings, gate: bool, profile: Profile) -> None:
        self._around = around
        self._gate = gate
        self._profile = profile
        self._index = LruIndex()
        self._kv_tokens: dict[str, int] = {}
        self._ticks = Ticks(around.clock)
        self._sweep_at_s = around.clock() + DEPARTED_AFTER_S
        self.tokens_in_flight = Ledger()

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

    def choose(self, request: Request, views: Sequence[View]) -> Placed:
        """Chooses a backend among `views`, which must not be empty."""
        tokens, size = self._around.prompts[request.id].tokens, self._around.block_tokens
        blocks = self._blocks(request)
        matches = self._index.match(blocks)
        found = []
        for view in views:
            matched = matches.get(view.backend, 0)
            cached_tokens = min(tokens, matched * size)
            share = matched / len(blocks) if blocks else 0.0
            ahead_tokens = self.tokens_in_flight.amount(view.backend)
            found.append(ScoringInput(view, share, cached_tokens, tokens - cached_tokens, ahead_tokens))
        scored = self._profile(found)
        at = highest(scored.scores, self._around.rng)
        chosen = scored.kept[at]
        self._fit_index(chosen.view)
        terms = tuple((name, part[at]) for name, part in scored.terms.items())
        return Placed(chosen.view.backend, scored.scores[at], terms, len(views), chosen.cached_tokens)

    def booked(self, lease: int, request: Request, placed: Placed, now: float) -> None:
        self._ticks.use(request)
        new_tokens = self._around.prompts[request.id].tokens - placed.cached_tokens
        self.tokens_in_flight.give(lease, placed.backend, new_tokens)
        self._index.record(placed.backend, self._blocks(request))

    def started(self, lease: int, now: float) -> None:
        self.tokens_in_flight.take_back(lease)

    def finished(self, lease: int, verdict: Verdict, usage: Usage | None, now: float) -> None:
        self.tokens_in_flight.take_back(lease)

    def _blocks(self, request: Request) -> list[Block]:
        count = max(1, PROMPT_TOKENS_MAX // self._around.block_tokens)
        return list(islice(prompt_blocks(request, self._around), count))

    def _fit_index(self, view: View) -> None:
        """Makes the index of this backend as large as its KV cache."""
        known = view.reading.kv_tokens if view.reading is not None else None
        # A size stays valid when later readings fail.
        kv_tokens = known or self._kv_tokens.get(view.backend, INDEX_TOKENS)
        if self._kv_tokens.get(view.backend) != kv_tokens:
            self._kv_tokens[view.backend] = kv_tokens
            self._index.resize(view.backend, max(1, kv_tokens // self._around.block_tokens))

    def _sweep(self, views: Sequence[View], now: float) -> None:
        self._sweep_at_s = now + DEPARTED_AFTER_S
        up = [view.backend for view in views if view.available]
        for backend in self._index.backends():
            if backend not in up:
                self._index.forget(backend)


@baselines.register("epp_blend")
def epp_blend(*, queue: float = 2.0, kv: float = 2.0, prefix: float = 3.0, gate: float = 1.0) -> Baseline:
    about = "llm-d endpoint picker, code default: queue, KV-cache and prefix scores behind its pool-wide gate"
    return Baseline(
        "epp_blend", about, lambda around: EndpointPicker(around, gate > 0, blend(queue, kv, prefix)), SCRAPE_S
    )


@baselines.register("epp_sticky")
def epp_sticky(*, match: float = 0.8, penalty_s: float = 18.0, rate: float = 15_928.0, gate: float = 0.0) -> Baseline:
    about = (
        "llm-d endpoint picker, newer guide: sticky to a cached prefix until saturated, then fewest tokens in flight"
    )
    profile = sticky(match, penalty_s, rate)
    return Baseline("epp_sticky", about, lambda around: EndpointPicker(around, gate > 0, profile), SCRAPE_S)
