"""The cost of the body reader and the stream tap: `python -m benchmarks.parts.body_reader`, ten seconds, one core.

Three tables. *Bodies*: for each shape and size, the time to read one body, and the longest stretch during which nothing
else on the loop could run, which must not exceed 10 ms. Worst and median of several rounds are shown, because other
work on a shared machine causes outliers. *Small*: the longest such stretch for dense bodies just below the size limit
for parsing, which shows that the limit on values holds. *Chunks*: microseconds per chunk in `StreamTap.feed`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from functools import partial

import orjson

from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.proxying.sse import StreamTap
from llmproxy.gateway.request.body_reader import BodyReader
from llmproxy.gateway.request.json_scan import PARSE_BYTES_MAX

MB = 1_000_000
ROUNDS = 5
FEEDS = 20_000


def image(size_bytes: int) -> bytes:
    return (
        b'{"model":"m","stream":true,"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":'
        + (b'"data:image/png;base64,' + b"iVBORw0K" * (size_bytes // 8) + b'"}}]}]}')
    )


def messages(size_bytes: int) -> bytes:
    message = {"role": "user", "content": 'He said "no".\n\tThen a path: C:\\temp\\é'}
    count = size_bytes // (len(orjson.dumps(message)) + 1)
    return orjson.dumps({"model": "m", "messages": [message] * count})


def token_ids(size_bytes: int) -> bytes:
    return orjson.dumps({"model": "m", "prompt": [[17, 4099, 128_000, 55_555]] * (size_bytes // 24)})


def brackets(size_bytes: int) -> bytes:
    return b'{"model":"m","messages":[' + b"[]," * (size_bytes // 3) + b"[]]}"


def objects(size_bytes: int) -> bytes:
    return b'{"model":"m","messages":[' + b"{}," * (size_bytes // 3) + b"{}]}"


def names(size_bytes: int) -> bytes:
    return orjson.dumps({"messages": {f"k{n}": n for n in range(size_bytes // 14)}})


async def longest_stall_s(body: bytes) -> tuple[float, float]:
    """The time one read takes, and the longest gap between two turns of the loop while it runs, both in seconds."""
    body_reader, gaps_s = BodyReader(), [0.0]
    began_s = time.perf_counter()
    read = asyncio.create_task(body_reader.read(body, BodyKind.CHAT))
    last_s = began_s
    while not read.done():
        await asyncio.sleep(0)
        now_s = time.perf_counter()
        gaps_s.append(now_s - last_s)
        last_s = now_s
    read.result()
    return last_s - began_s, max(gaps_s)


def show_bodies() -> None:
    print("Bodies: one read on an otherwise idle loop")
    print(f"{'shape':>10} {'MB':>6} {'ms':>8} {'MB/s':>8} {'stall ms: median':>17} {'worst':>7}")
    for shape in (image, messages, token_ids, brackets):
        for size_mb in (1, 4, 16, 50):
            body = shape(size_mb * MB)
            rounds = [asyncio.run(longest_stall_s(body)) for _ in range(ROUNDS)]
            took_s = statistics.median(took for took, _ in rounds)
            stalls = [stall * 1e3 for _, stall in rounds]
            print(
                f"{shape.__name__:>10} {len(body) / MB:6.1f} {took_s * 1e3:8.1f} {len(body) / MB / took_s:8.0f}"
                f" {statistics.median(stalls):17.2f} {max(stalls):7.2f}"
            )


def show_small() -> None:
    print(f"\nSmall: bodies of {PARSE_BYTES_MAX // 1024} KiB, the longest stretch")
    print(f"{'shape':>10} {'ms: median':>11} {'worst':>7}")
    for shape in (image, messages, token_ids, brackets, objects, names):
        body = shape(PARSE_BYTES_MAX - 64)
        stalls_ms = [asyncio.run(longest_stall_s(body))[1] * 1e3 for _ in range(ROUNDS * 4)]
        print(f"{shape.__name__:>10} {statistics.median(stalls_ms):11.2f} {max(stalls_ms):7.2f}")


def timed_s(work: Callable[[], object], times: int) -> float:
    """Seconds per call over `times` calls."""
    began_s = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began_s) / times


def feed_all(tap: StreamTap, first: bytes, chunks: list[bytes]) -> None:
    tap.feed(first)
    for _ in range(FEEDS):
        for chunk in chunks:
            tap.feed(chunk)


def show_chunks() -> None:
    head = b'data: {"id":"chatcmpl-988e8116b75856c2","object":"chat.completion.chunk","created":1795225636,"model":"m",'
    token = head + b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
    usage = head + (
        b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}],'
        b'"usage":{"prompt_tokens":32,"total_tokens":34,"completion_tokens":2}}\n\n'
    )
    delta = b'event: response.output_text.delta\ndata: {"delta":" word","type":"response.output_text.delta"}\n\n'
    cases = [
        ("one token event", [token], 1),
        ("one token event cut in two", [token[:150], token[150:]], 1),
        ("four token events at once", [token * 4], 4),
        ("event: and data:", [delta], 1),
        ("usage on every event", [usage], 1),
    ]
    print(f"\nChunks: microseconds per event\n{'':>28} {'plain':>7} {'hiding':>7}")
    for label, chunks, events in cases:
        costs = []
        for hide_usage in (False, True):
            best_s = min(timed_s(partial(feed_all, StreamTap(hide_usage), token, chunks), 1) for _ in range(3))
            costs.append(best_s / FEEDS / events * 1e6)
        print(f"{label:>28} {costs[0]:7.2f} {costs[1]:7.2f}")


if __name__ == "__main__":
    show_bodies()
    show_small()
    show_chunks()
