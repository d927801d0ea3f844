"""The cost of the body reader and of the stream tap: `python -m benchmarks.parts.body_reader`, ten seconds, one core.

*Bodies* has the time to read a body of each shape and size, and its longest stall: the longest time between two turns
of the loop, which must not exceed 10 ms. *Small* has the stall of dense bodies just below the size limit for parsing.
*Chunks* has microseconds per event in `StreamTap.feed`. Stalls are the median and the worst of several rounds, because
other processes cause outliers.
"""

from __future__ import annotations

import asyncio
import statistics
import time

import orjson

from benchmarks.table import Table
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


def names(size_bytes: int) -> bytes:
    return orjson.dumps({"messages": {f"k{n}": n for n in range(size_bytes // 14)}})


async def read_and_stall_s(body: bytes) -> tuple[float, float]:
    """Returns the seconds to read a body, and the longest stall of the event loop meanwhile."""
    stalls_s = [0.0]
    began_s = last_s = time.perf_counter()
    read = asyncio.create_task(BodyReader().read(body, BodyKind.CHAT))
    while not read.done():
        await asyncio.sleep(0)
        now_s = time.perf_counter()
        stalls_s.append(now_s - last_s)
        last_s = now_s
    read.result()
    return last_s - began_s, max(stalls_s)


def show_bodies() -> None:
    print("Bodies: a read on an otherwise idle loop\n")
    table = Table("shape", "MB", "ms", "MB/s", "stall ms, median", "worst")
    for shape in (image, messages, token_ids, brackets):
        for size_mb in (1, 4, 16, 50):
            body = shape(size_mb * MB)
            rounds = [asyncio.run(read_and_stall_s(body)) for _ in range(ROUNDS)]
            took_s = statistics.median(took for took, _ in rounds)
            size, rate = f"{len(body) / MB:.1f}", f"{len(body) / MB / took_s:.0f}"
            table.row(shape.__name__, size, f"{took_s * 1e3:.1f}", rate, *_stalls([stall for _, stall in rounds]))


def show_small() -> None:
    print(f"\nSmall: bodies of {PARSE_BYTES_MAX // 1024} KiB\n")
    table = Table("shape", "stall ms, median", "worst")
    for shape in (image, messages, token_ids, brackets, names):
        body = shape(PARSE_BYTES_MAX - 64)
        table.row(shape.__name__, *_stalls([asyncio.run(read_and_stall_s(body))[1] for _ in range(ROUNDS * 4)]))


def _stalls(seconds: list[float]) -> tuple[str, str]:
    return f"{1e3 * statistics.median(seconds):.2f}", f"{1e3 * max(seconds):.2f}"


def feed_s(hide_usage: bool, first: bytes, chunks: list[bytes]) -> float:
    """Returns the seconds to feed all `chunks` to a StreamTap once."""
    tap = StreamTap(hide_usage)
    tap.feed(first)
    began_s = time.perf_counter()
    for _ in range(FEEDS):
        for chunk in chunks:
            tap.feed(chunk)
    return (time.perf_counter() - began_s) / FEEDS


def show_chunks() -> None:
    head = b'data: {"id":"chatcmpl-988e8116b75856c2","object":"chat.completion.chunk","created":1795225636,"model":"m",'
    token = head + b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
    usage = head + (
        b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}],'
        b'"usage":{"prompt_tokens":32,"total_tokens":34,"completion_tokens":2}}\n\n'
    )
    delta = b'event: response.output_text.delta\ndata: {"delta":" word","type":"response.output_text.delta"}\n\n'
    cases = [
        ("a token event", [token], 1),
        ("a token event cut in two", [token[:150], token[150:]], 1),
        ("four token events at once", [token * 4], 4),
        ("event: and data:", [delta], 1),
        ("usage on every event", [usage], 1),
    ]
    print("\nChunks: microseconds per event\n")
    table = Table("events", "plain", "hiding usage")
    for label, chunks, events in cases:
        costs = (min(feed_s(hide, token, chunks) for _ in range(3)) for hide in (False, True))
        table.row(label, *(f"{1e6 * cost / events:.2f}" for cost in costs))


if __name__ == "__main__":
    show_bodies()
    show_small()
    show_chunks()
