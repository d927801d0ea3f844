"""What it costs to price a fleet, to know a prompt, and to keep the books of `cost`: no network, no loop, one core.

    .venv/bin/python -m benchmarks.placement

*Place* is one choice of `cost` over so many backends, the prefix match apart, and *match* is that; *books* are what it
is told of one choice: `booked`, `started` and `finished`. Every backend runs half of what it may, has served for some
minutes, and keeps four of sixteen adapters; half of the requests ask for one. Half of a prompt is one of twenty that
all share, and its index is as full as a KV-cache of 400,000 tokens. *Hash* is a prompt's chain from a parsed body, or
from one read in slices, as its model and adapter have it; what is wanted is wanted of hash and match together.

Figures are made as in `benchmarks.core`. Bytes per block are measured by `benchmarks.prefix`.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from time import thread_time

import orjson
from msgspec.structs import replace

from benchmarks.core import CYCLES, ROUNDS, Times
from llmproxy.core.backends.view import View
from llmproxy.core.domain import DEFAULT, Placed, Request, Usage, Verdict
from llmproxy.core.placement.cost import CostPlacement
from llmproxy.core.placement.prefix_index import PrefixIndex
from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.request.json_scan import drain, scan_members
from llmproxy.gateway.request.prefix_hash import BLOCK_BYTES, PROMPT_MEMBERS, Chain, chain_of
from llmproxy.gateway.request.prefix_hash_large import chain_of_large

PLACE_GOALS_US = {8: 60, 32: 150, 64: 300}
HASH_GOALS_US = {2_000: 30, 32_000: 300}
"""Of the hash and the match together."""
BYTES_PER_TOKEN = 4
BLOCK_TOKENS = BLOCK_BYTES / BYTES_PER_TOKEN
KV_TOKENS = 400_000
BATCH = 32
ADAPTERS = tuple(f"adapter-{number}" for number in range(16))
SLOTS = 4
SHARED = 20
MODEL = "base"
MESSAGE_BYTES = 1_000
COLUMNS = "p50 µs | p99 µs | longest µs"


class Apart(PrefixIndex):
    """An index that is asked beforehand, so that a choice is timed without it."""

    known: dict[str, int]

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        del hashes
        return self.known

    def matched(self, hashes: Sequence[int]) -> dict[str, int]:
        return super().match(hashes)


class Bench:
    """A fleet that is kept half loaded, one request going for each that comes."""

    def __init__(self, backends: int, prompt_tokens: int) -> None:
        self._rng = rng = Random(1)
        self._prompt_tokens = prompt_tokens
        self._index = Apart()
        self._cost = CostPlacement(rng, self._index)
        self.now = 0.0
        self._serial = 0
        half = int(prompt_tokens / BLOCK_TOKENS / 2)
        self._heads = [tuple(rng.getrandbits(64) for _ in range(half)) for _ in range(SHARED)]
        self._tail_blocks = int(prompt_tokens / BLOCK_TOKENS) - half
        served = frozenset({MODEL, *ADAPTERS})
        empty = View("", True, served, frozenset(), SLOTS, 65_536, None, BATCH, 0, 0, 0.5, KV_TOKENS, 4, 0.95, None)
        self._at = {f"backend-{number:03d}": number for number in range(backends)}
        self._views = [
            replace(empty, backend=name, resident=frozenset(rng.sample(ADAPTERS, SLOTS))) for name in self._at
        ]
        self._running: deque[tuple[int, str]] = deque()
        fills = int(KV_TOKENS / prompt_tokens * 5 / 4)
        for name in self._at:
            for _ in range(fills):
                self._index.record(name, self.request().prefix)
        for _ in range(backends * BATCH // 2):
            self.cycle(finishes=False)
        for _ in range(backends * BATCH):
            self.cycle()

    def request(self) -> Request:
        self._serial += 1
        rng = self._rng
        adapter = rng.choice(ADAPTERS) if self._serial % 2 else None
        return Request(
            id=str(self._serial),
            pool=MODEL,
            model=adapter or MODEL,
            adapter=adapter,
            band=DEFAULT,
            flow="flow",
            arrived_s=self.now,
            deadline_s=self.now + 1e6,
            body_bytes=self._prompt_tokens * BYTES_PER_TOKEN,
            prompt_tokens=self._prompt_tokens,
            output_tokens=200,
            stream=True,
            prefix=rng.choice(self._heads) + tuple(rng.getrandbits(64) for _ in range(self._tail_blocks)),
            prefix_tokens=BLOCK_TOKENS,
        )

    def cycle(self, *, finishes: bool = True) -> tuple[float, float, float]:
        """Seconds of one choice, of the match before it, and of the books of one request from its choice to its end."""
        cost, request = self._cost, self.request()
        self.now += 0.4 / len(self._at)
        began_s = thread_time()
        self._index.known = self._index.matched(request.prefix)
        matched_s = thread_time()
        placed = cost.place(request, self._views, 1.0, frozenset(), self.now)
        placed_s = thread_time()
        assert isinstance(placed, Placed)
        cost.booked(self._serial, request, placed, self.now)
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
    all_times = Times(), Times(), Times()
    gc.collect()
    gc.freeze()
    for _ in range(ROUNDS):
        cycles = [bench.cycle() for _ in range(CYCLES)]
        for times, seconds in zip(all_times, zip(*cycles, strict=True), strict=True):
            times.rounds.append(list(seconds))
    gc.unfreeze()
    return all_times


def hashing(prompt_tokens: int) -> tuple[Times, Times]:
    """Of a parsed body, and of its bytes read in slices where its members lie known."""
    text = 'He said "no".\n\tThen he went, and nobody knew where to. '
    content = (text * (MESSAGE_BYTES // len(text) + 1))[:MESSAGE_BYTES]
    count = prompt_tokens * BYTES_PER_TOKEN // MESSAGE_BYTES
    fields = {"messages": [{"role": ("user", "assistant")[n % 2], "content": content} for n in range(count)]}
    body = orjson.dumps(fields)
    members = drain(scan_members(body, PROMPT_MEMBERS[BodyKind.CHAT]))
    ways: tuple[Callable[[], Chain], ...] = (
        lambda: chain_of(fields, BodyKind.CHAT),
        lambda: drain(chain_of_large(body, members, BodyKind.CHAT)),
    )
    all_times = Times(), Times()
    for _ in range(ROUNDS):
        for way, times in zip(ways, all_times, strict=True):
            times.rounds.append([])
            for _ in range(CYCLES // 4):
                began_s = thread_time()
                way().hashes_on(MODEL, None)
                times.rounds[-1].append(thread_time() - began_s)
    return all_times


def main() -> None:
    matches: dict[tuple[int, int], Times] = {}
    print(f"| backends | prompt | place {COLUMNS} | wanted p50 | match {COLUMNS} | books {COLUMNS} |")
    print("| ---: " * 12 + "|")
    for backends, goal_us in PLACE_GOALS_US.items():
        for prompt_tokens in HASH_GOALS_US:
            place, match, books = measure(Bench(backends, prompt_tokens))
            matches[backends, prompt_tokens] = match
            told = f"{place.told()} | {goal_us} | {match.told()} | {books.told()}"
            print(f"| {backends} | {prompt_tokens // 1000}k tokens | {told} |")
    fleets = " | ".join(f"and match over {backends}, p50 µs" for backends in PLACE_GOALS_US)
    print(f"\n| prompt | hash, parsed {COLUMNS} | hash, in slices {COLUMNS} | parsed {fleets} | wanted |")
    print("| ---: " * (8 + len(PLACE_GOALS_US)) + "|")
    for prompt_tokens, goal_us in HASH_GOALS_US.items():
        parsed, sliced = hashing(prompt_tokens)
        both_us = [parsed.p50_us() + matches[backends, prompt_tokens].p50_us() for backends in PLACE_GOALS_US]
        told = f"{parsed.told()} | {sliced.told()} | " + " | ".join(f"{us:,.1f}" for us in both_us)
        print(f"| {prompt_tokens // 1000}k tokens | {told} | {goal_us} |")


if __name__ == "__main__":
    main()
