"""What a prompt's identity and the prefix index cost: `python -m benchmarks.prefix`, about a minute, one core.

Three tables. *Chains*: microseconds from a parsed body to its chain, parsing apart, and from a large body read in
slices, with the longest slice; 4.3 bytes make a token. Below, the hash alone beside what the standard library has to
offer, for the longest prompt, in blocks of several sizes. *Index*: microseconds of `match` and `record` where every
backend's room is taken; a match is that of a prompt nobody knows, of one that one backend knows, and of one that all
know; a record that of a new prompt, and that of a known one with another turn. *Memory*: bytes per block and backend
as tracemalloc counts them, at about a million blocks.
"""

from __future__ import annotations

import hashlib
import statistics
import time
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import orjson
from xxhash import xxh64_intdigest

from llmproxy.core.placement.prefix_index import PrefixIndex
from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.request.json_scan import drain, scan_members
from llmproxy.gateway.request.prefix_hash import BLOCK_BYTES, PROMPT_MEMBERS, chain_of
from llmproxy.gateway.request.prefix_hash_large import chain_of_large

BYTES_PER_TOKEN = 4.3
ROUNDS = 9
CAPACITY_BLOCKS = 16_000


def timed_us(work: Callable[[], object], times: int) -> float:
    """Microseconds per call: the median over the rounds, each of which is the mean over `times` calls."""
    rounds = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        for _ in range(times):
            work()
        rounds.append((time.perf_counter() - began_s) / times * 1e6)
    return statistics.median(rounds)


def conversation(tokens: int, message_bytes: int) -> dict[str, Any]:
    text = 'He said "no".\n\tThen he went, and nobody knew where to. '
    count = max(1, int(tokens * BYTES_PER_TOKEN) // message_bytes)
    content = (text * (message_bytes // len(text) + 1))[:message_bytes]
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": content} for n in range(count)]}


def slices_of(body: bytes) -> tuple[float, float]:
    """Milliseconds that reading a body in slices takes, scanning apart, and the longest slice."""
    members = drain(scan_members(body, PROMPT_MEMBERS[BodyKind.CHAT]))
    slices, gaps_ms = chain_of_large(body, members, BodyKind.CHAT), []
    while True:
        began_s = time.perf_counter()
        ended = next(slices, slices) is slices
        gaps_ms.append((time.perf_counter() - began_s) * 1e3)
        if ended:
            return sum(gaps_ms), max(gaps_ms)


def show_chains() -> None:
    print(f"Chains, blocks of {BLOCK_BYTES} bytes\n\n| prompt | messages of | parsed µs |\n| --- | ---: | ---: |")
    for tokens in (2_000, 8_000, 32_000):
        for message_bytes in (400, 2_000, 10**9):
            if message_bytes == 10**9:
                message_bytes = int(tokens * BYTES_PER_TOKEN)
            fields = conversation(tokens, message_bytes)
            took_us = timed_us(partial(chain_of, fields, BodyKind.CHAT), 100)
            print(f"| {tokens // 1000}k tokens | {message_bytes:,} bytes | {took_us:.0f} |")
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


def xxh64_chain(text: bytes, block_bytes: int) -> None:
    last = 0
    for start in range(0, len(text) - block_bytes + 1, block_bytes):
        last = xxh64_intdigest(text[start : start + block_bytes], last)


def crc32_chain(text: bytes, block_bytes: int) -> None:
    last = 0
    for start in range(0, len(text) - block_bytes + 1, block_bytes):
        last = zlib.crc32(text[start : start + block_bytes], last)


def blake2b_chain(text: bytes, block_bytes: int) -> None:
    last = b""
    for start in range(0, len(text) - block_bytes + 1, block_bytes):
        last = hashlib.blake2b(last + text[start : start + block_bytes], digest_size=8).digest()
        int.from_bytes(last, "little")


def sha1_chain(text: bytes, block_bytes: int) -> None:
    last = b""
    for start in range(0, len(text) - block_bytes + 1, block_bytes):
        last = hashlib.sha1(last + text[start : start + block_bytes], usedforsecurity=False).digest()[:8]
        int.from_bytes(last, "little")


def show_hashes() -> None:
    text = Random(1).randbytes(int(32_000 * BYTES_PER_TOKEN))
    print("\n| hash of 32k tokens, µs | 256 bytes | 512 bytes | 1,024 bytes |\n| --- | ---: | ---: | ---: |")
    for chain in (xxh64_chain, crc32_chain, blake2b_chain, sha1_chain):
        costs_us = [timed_us(partial(chain, text, block_bytes), 20) for block_bytes in (256, 512, 1024)]
        print(f"| {chain.__name__} | " + " | ".join(f"{cost_us:.0f}" for cost_us in costs_us) + " |")


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


if __name__ == "__main__":
    show_chains()
    show_hashes()
    show_index()
    show_memory()
