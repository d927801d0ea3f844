"""What it costs to price a fleet, to know a prompt, and to keep the bookings of `cost`: no network, no loop, one core.

    .venv/bin/python -m benchmarks.parts.placement

*Place* is one choice of `cost` over so many backends, the prefix match apart, and *match* is that; *bookings* are its
calls for one choice: `booked`, `started` and `finished`. Every backend runs half of what it may, has served for some
minutes, and keeps four of sixteen adapters; half of the requests ask for one. Half of a prompt is one of twenty that
all share, and its index is as full as a KV-cache of 400,000 tokens. *Hash* is a prompt's chain from a parsed body, or
from one read in slices, as its model and adapter have it; what is wanted is wanted of hash and match together.

Figures are made as in `core` beside it. Below them: *large bodies* read in slices, scanning apart, with the longest
slice; *index*, microseconds of `match` and `record` where every backend's room is taken (a match of a prompt that is
new, one that one backend has, one that all have; a record of a new prompt, and of a known one with another turn); and
*memory*, bytes per block and backend as tracemalloc counts them, at about a million blocks.
"""

from __future__ import annotations

import gc
import statistics
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from time import thread_time
from typing import Any

import orjson
from msgspec.structs import replace

from benchmarks.parts.core import CYCLES, ROUNDS, Times
from llmproxy.core.backends.view import View
from llmproxy.core.domain import DEFAULT, Placed, Request, Usage, Verdict
from llmproxy.core.placement.cost import CostPlacement
from llmproxy.core.placement.prefix_index import PrefixIndex
from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.request.json_scan import drain, scan_members
from llmproxy.gateway.request.prefix_hash import BLOCK_BYTES, PROMPT_MEMBERS, Chain, prompt_chain
from llmproxy.gateway.request.prefix_hash_large import large_prompt_chain

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
CAPACITY_BLOCKS = 16_000
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
        """Seconds of one choice, of the match before it, and of the bookings of one request to its end."""
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
    fields = conversation(prompt_tokens, MESSAGE_BYTES)
    body = orjson.dumps(fields)
    members = drain(scan_members(body, PROMPT_MEMBERS[BodyKind.CHAT]))
    ways: tuple[Callable[[], Chain], ...] = (
        lambda: prompt_chain(fields, BodyKind.CHAT),
        lambda: drain(large_prompt_chain(body, members, BodyKind.CHAT)),
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


def timed_us(work: Callable[[], object], times: int) -> float:
    """Microseconds per call: the median over the rounds, each of which is the mean over `times` calls."""
    rounds = []
    for _ in range(ROUNDS):
        began_s = thread_time()
        for _ in range(times):
            work()
        rounds.append((thread_time() - began_s) / times * 1e6)
    return statistics.median(rounds)


def conversation(tokens: int, message_bytes: int) -> dict[str, Any]:
    text = 'He said "no".\n\tThen he went, and nobody knew where to. '
    count = max(1, int(tokens * BYTES_PER_TOKEN) // message_bytes)
    content = (text * (message_bytes // len(text) + 1))[:message_bytes]
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": content} for n in range(count)]}


def slices_of(body: bytes) -> tuple[float, float]:
    """Milliseconds that reading a body in slices takes, scanning apart, and the longest slice."""
    members = drain(scan_members(body, PROMPT_MEMBERS[BodyKind.CHAT]))
    slices, gaps_ms = large_prompt_chain(body, members, BodyKind.CHAT), []
    while True:
        began_s = thread_time()
        ended = next(slices, slices) is slices
        gaps_ms.append((thread_time() - began_s) * 1e3)
        if ended:
            return sum(gaps_ms), max(gaps_ms)


def show_large_bodies() -> None:
    big = 16_000_000
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0K" * (big // 8)}}
    bodies = {
        "64k tokens, messages of 400 bytes": orjson.dumps(conversation(64_000, 400)),
        "64k tokens, one message": orjson.dumps(conversation(64_000, int(64_000 * BYTES_PER_TOKEN))),
        "16 MB in messages of 400 bytes": orjson.dumps(conversation(int(big / BYTES_PER_TOKEN), 400)),
        "16 MB image": orjson.dumps({"messages": [{"role": "user", "content": [image]}]}),
        "16 MB of brackets": b'{"messages":[' + b"[]," * (big // 3) + b"[]]}",
        "16 MB of escapes": b'{"messages":["' + b"\\n\\u00e9" * (big // 8) + b'"]}',
    }
    print("\n| large body | ms | longest slice ms |\n| --- | ---: | ---: |")
    for name, body in bodies.items():
        rounds = [slices_of(body) for _ in range(ROUNDS)]
        took_ms, longest_ms = (statistics.median(figures) for figures in zip(*rounds, strict=True))
        print(f"| {name} | {took_ms:.1f} | {longest_ms:.2f} |")


def filled(backends: int, capacity_blocks: int, length: int, rng: Random) -> PrefixIndex:
    index = PrefixIndex(capacity_blocks)
    for number in range(backends):
        for _ in range(capacity_blocks * 5 // 4 // length):
            index.record(f"backend-{number}", hashes_of(length, rng))
    return index


def hashes_of(length: int, rng: Random) -> tuple[int, ...]:
    return tuple(rng.getrandbits(64) for _ in range(length))


def show_index() -> None:
    print(f"\nIndex, {CAPACITY_BLOCKS:,} blocks per backend\n")
    print("| backends | prompt | match none µs | one µs | all µs | record new µs | next turn µs |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    rng = Random(1)
    for backends in (8, 64, 512):
        index = filled(backends, CAPACITY_BLOCKS if backends < 512 else 2_000, 50, rng)
        for tokens in (2_000, 32_000):
            length = int(tokens * BYTES_PER_TOKEN) // BLOCK_BYTES
            nobodys, ones, everybodys = (hashes_of(length, rng) for _ in range(3))
            index.record("backend-1", ones)
            for number in range(backends):
                index.record(f"backend-{number}", everybodys)
            matches_us = [timed_us(partial(index.match, hashes), 20) for hashes in (nobodys, ones, everybodys)]
            fresh = iter([hashes_of(length, rng) for _ in range(20 * ROUNDS)])
            new_us = timed_us(lambda: index.record("backend-0", next(fresh)), 20)  # noqa: B023 - called in this turn
            turns = iter([(*everybodys, *hashes_of(4 * (n + 1), rng)) for n in range(20 * ROUNDS)])
            turn_us = timed_us(lambda: index.record("backend-1", next(turns)), 20)  # noqa: B023
            costs_us = (*matches_us, new_us, turn_us)
            print(f"| {backends} | {tokens // 1000}k tokens | " + " | ".join(f"{us:.0f}" for us in costs_us) + " |")


def show_memory() -> None:
    print("\n| memory: backends | blocks each | blocks of a prompt | held | bytes per block |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for backends, capacity_blocks, length in ((64, 16_000, 50), (64, 16_000, 1), (64, 10_000, 50), (8, 131_072, 250)):
        tracemalloc.start()
        index = filled(backends, capacity_blocks, length, Random(1))
        used_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        held = sum(index.size(f"backend-{number}") for number in range(backends))
        print(f"| {backends} | {capacity_blocks:,} | {length} | {held:,} | {used_bytes / held:.1f} |")


def main() -> None:
    matches: dict[tuple[int, int], Times] = {}
    print(f"| backends | prompt | place {COLUMNS} | wanted p50 | match {COLUMNS} | bookings {COLUMNS} |")
    print("| ---: " * 12 + "|")
    for backends, goal_us in PLACE_GOALS_US.items():
        for prompt_tokens in HASH_GOALS_US:
            place, match, bookings = measure(Bench(backends, prompt_tokens))
            matches[backends, prompt_tokens] = match
            cells = f"{place.cells()} | {goal_us} | {match.cells()} | {bookings.cells()}"
            print(f"| {backends} | {prompt_tokens // 1000}k tokens | {cells} |")
    fleets = " | ".join(f"and match over {backends}, p50 µs" for backends in PLACE_GOALS_US)
    print(f"\n| prompt | hash, parsed {COLUMNS} | hash, in slices {COLUMNS} | parsed {fleets} | wanted |")
    print("| ---: " * (8 + len(PLACE_GOALS_US)) + "|")
    for prompt_tokens, goal_us in HASH_GOALS_US.items():
        parsed, sliced = hashing(prompt_tokens)
        both_us = [parsed.p50_us() + matches[backends, prompt_tokens].p50_us() for backends in PLACE_GOALS_US]
        cells = f"{parsed.cells()} | {sliced.cells()} | " + " | ".join(f"{us:,.1f}" for us in both_us)
        print(f"| {prompt_tokens // 1000}k tokens | {cells} | {goal_us} |")
    show_large_bodies()
    show_index()
    show_memory()


if __name__ == "__main__":
    main()
