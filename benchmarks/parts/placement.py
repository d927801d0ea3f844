"""The cost of `cost`: pricing a fleet, matching and hashing a prompt, and its bookings. No network, no loop, one core.

    python -m benchmarks.parts.placement

*Place* is one choice without the prefix match, and *match* is the match. *Bookings* are the calls `booked`, `started`
and `finished` for one choice. Every backend has half of its load, a history of some minutes, and four of sixteen
adapters; half of the requests ask for an adapter. Half of a prompt is one of twenty shared beginnings, and the index is
as full as a KV cache of 400,000 tokens. *Hash* is the chain of a prompt from a parsed body.

Figures are made as in `parts.core`. *Memory* of the index is bytes per block and backend by tracemalloc, at about a
million blocks.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections import deque
from collections.abc import Sequence
from random import Random
from time import thread_time

from msgspec.structs import replace

from benchmarks.parts.core import BATCH, COLUMNS, CYCLES, MODEL, ROUNDS, Times, names, request
from benchmarks.table import Table
from llmproxy.core.backends.view import View
from llmproxy.core.domain import Placed, Request, Usage, Verdict
from llmproxy.core.placement.cost import CostPlacement
from llmproxy.core.placement.prefix_index import PrefixIndex
from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.request.prefix_hash import BLOCK_BYTES, prompt_chain

FLEETS = (8, 32, 64)
PROMPTS = (2_000, 32_000)
BYTES_PER_TOKEN = 4
BLOCK_TOKENS = BLOCK_BYTES / BYTES_PER_TOKEN
KV_TOKENS = 400_000
ADAPTERS = tuple(f"adapter-{number}" for number in range(16))
SLOTS = 4
SHARED = 20
MESSAGE_BYTES = 1_000


class MatchedBefore(PrefixIndex):
    """A prefix index whose match is computed in advance, so that a placement is timed without the match."""

    known: dict[str, int]

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        del hashes
        return self.known

    def matched(self, hashes: Sequence[int]) -> dict[str, int]:
        return super().match(hashes)


class Bench:
    """A fleet that stays half loaded: one request ends for each new request."""

    def __init__(self, backends: int, prompt_tokens: int) -> None:
        self._rng = rng = Random(1)
        self._prompt_tokens = prompt_tokens
        self._index = MatchedBefore()
        self._cost = CostPlacement(rng, self._index)
        self.now = 0.0
        self._serial = 0
        half = int(prompt_tokens / BLOCK_TOKENS / 2)
        self._heads = [hashes_of(half, rng) for _ in range(SHARED)]
        self._tail_blocks = int(prompt_tokens / BLOCK_TOKENS) - half
        served = frozenset({MODEL, *ADAPTERS})
        empty = View("", True, served, frozenset(), SLOTS, 65_536, None, BATCH, 0, 0, 0.5, KV_TOKENS, 4, 0.95, None)
        self._at = {name: number for number, name in enumerate(names(backends))}
        self._views = [
            replace(empty, backend=name, resident=frozenset(rng.sample(ADAPTERS, SLOTS))) for name in self._at
        ]
        self._running: deque[tuple[int, str]] = deque()
        for name in self._at:
            for _ in range(int(KV_TOKENS / prompt_tokens * 5 / 4)):
                self._index.record(name, self._request().prefix)
        for _ in range(backends * BATCH // 2):
            self.cycle(finishes=False)
        for _ in range(backends * BATCH):
            self.cycle()

    def _request(self) -> Request:
        self._serial += 1
        adapter = self._rng.choice(ADAPTERS) if self._serial % 2 else None
        return replace(
            request(self._serial, "flow", self.now),
            model=adapter or MODEL,
            adapter=adapter,
            body_bytes=self._prompt_tokens * BYTES_PER_TOKEN,
            prompt_tokens=self._prompt_tokens,
            prefix=self._rng.choice(self._heads) + hashes_of(self._tail_blocks, self._rng),
            prefix_tokens=BLOCK_TOKENS,
        )

    def cycle(self, *, finishes: bool = True) -> tuple[float, float, float]:
        """Places one request, and returns the seconds of the placement, of the match before it, and of its bookings."""
        cost, one = self._cost, self._request()
        self.now += 0.4 / len(self._at)
        began_s = thread_time()
        self._index.known = self._index.matched(one.prefix)
        matched_s = thread_time()
        placed = cost.place(one, self._views, 1.0, frozenset(), self.now)
        placed_s = thread_time()
        assert isinstance(placed, Placed)
        cost.booked(self._serial, one, placed, self.now)
        booked_s = thread_time()
        self._load(placed.backend, 1)
        self._running.append((self._serial, placed.backend))
        self.now += self._rng.uniform(0.02, 0.06)
        begun_s = thread_time()
        cost.started(self._serial, self.now)
        started_s = thread_time()
        ended_s = 0.0
        if finishes:
            lease, backend = self._running.popleft()
            usage = Usage(self._prompt_tokens, 180, placed.cached_tokens)
            ends_s = thread_time()
            cost.finished(lease, Verdict.SERVED, usage, self.now)
            ended_s = thread_time() - ends_s
            self._load(backend, -1)
        return placed_s - matched_s, matched_s - began_s, booked_s - placed_s + started_s - begun_s + ended_s

    def _load(self, backend: str, more: int) -> None:
        at = self._at[backend]
        self._views[at] = replace(self._views[at], load=self._views[at].load + more)


def measure(bench: Bench) -> tuple[Times, Times, Times]:
    """Returns the times of place, match and bookings."""
    all_times = Times(), Times(), Times()
    gc.collect()
    gc.freeze()
    for _ in range(ROUNDS):
        cycles = [bench.cycle() for _ in range(CYCLES)]
        for times, seconds in zip(all_times, zip(*cycles, strict=True), strict=True):
            times.rounds.append(list(seconds))
    gc.unfreeze()
    return all_times


def hashing(prompt_tokens: int) -> Times:
    """Returns the times to compute the chain of a conversation."""
    text = ('He said "no".\n\tThen he went, and nobody knew where to. ' * 20)[:MESSAGE_BYTES]
    count = prompt_tokens * BYTES_PER_TOKEN // MESSAGE_BYTES
    fields = {"messages": [{"role": ("user", "assistant")[number % 2], "content": text} for number in range(count)]}
    times = Times()
    for _ in range(ROUNDS):
        times.rounds.append([])
        for _ in range(CYCLES // 4):
            began_s = thread_time()
            prompt_chain(fields, BodyKind.CHAT).hashes_on(MODEL, None)
            times.rounds[-1].append(thread_time() - began_s)
    return times


def filled(backends: int, capacity_blocks: int, length: int, rng: Random) -> PrefixIndex:
    index = PrefixIndex(capacity_blocks)
    for name in names(backends):
        for _ in range(capacity_blocks * 5 // 4 // length):
            index.record(name, hashes_of(length, rng))
    return index


def hashes_of(length: int, rng: Random) -> tuple[int, ...]:
    return tuple(rng.getrandbits(64) for _ in range(length))


def show_memory() -> None:
    print()
    table = Table("memory: backends", "blocks each", "blocks of a prompt", "blocks", "bytes per block", texts=0)
    for backends, capacity_blocks, length in ((64, 16_000, 50), (64, 16_000, 1), (8, 131_072, 250)):
        tracemalloc.start()
        index = filled(backends, capacity_blocks, length, Random(1))
        used_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        blocks = sum(index.size(name) for name in names(backends))
        table.row(backends, f"{capacity_blocks:,}", length, f"{blocks:,}", f"{used_bytes / blocks:.1f}")


def main() -> None:
    parts = [f"{name} {column}" for name in ("place", "match", "bookings") for column in COLUMNS]
    table = Table("backends", "prompt", *parts, texts=0)
    for backends in FLEETS:
        for tokens in PROMPTS:
            times = measure(Bench(backends, tokens))
            table.row(backends, f"{tokens:,}", *(cell for one in times for cell in one.cells()))
    print()
    table = Table("prompt", *(f"hash {column}" for column in COLUMNS), texts=0)
    for tokens in PROMPTS:
        table.row(f"{tokens:,}", *hashing(tokens).cells())
    show_memory()


if __name__ == "__main__":
    main()
