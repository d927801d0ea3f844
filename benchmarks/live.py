"""What it costs to remember for people who look, and to let them look.

    .venv/bin/python -m benchmarks.live

*Record* is what one request pays when it ends. *Row* is one row of the history, without and with requests in the
second that it ends. *Document* is one state of `/debug/live`, built at most once a
second however many look, and *packed* its compression. Memory is what all of it holds after a day (tracemalloc).

Requests of many flows and three bands end on the backends, 500 a second. Times are those of the thread on its core;
each is the least of the medians of several rounds, because a busy machine only ever adds.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from gzip import compress
from random import Random
from time import thread_time

from llmproxy.core.domain import Listing, ModelCard, Outcome, Predicted, Reading, Verdict
from llmproxy.core.placement.policy import make
from llmproxy.core.pools import Pools
from llmproxy.core.settings import Settings
from llmproxy.core.snapshot import BackendStatus
from llmproxy.observe.exit import RequestExit, RequestInput, RequestResult, RequestRouting
from llmproxy.observe.live.history import COLUMNS_MAX, SECONDS, TEN_S, TENS
from llmproxy.observe.live.recorder import Recorder
from llmproxy.observe.live.snapshot import LiveSnapshot, dumped
from llmproxy.scheduling.attempts import AttemptRecord
from llmproxy.scheduling.dispatcher import Dispatcher

FLEETS = ((3, 1_000), (64, 1_000), (200, 10_000))
"""Backends and flows."""
PER_S = 500
ROUNDS = 7
BANDS = {100: "critical", 0: "default", -100: "sheddable"}


def fleet(count: int) -> Recorder:
    """A recorder of so many backends that are up."""
    settings = Settings()
    names = [f"backend-{i:03}" for i in range(count)]
    pools = Pools(settings, dict.fromkeys(names), {}, partial(make, settings.placement, Random(1)))
    dispatcher = Dispatcher(pools)
    for name in names:
        pools.backends[name].answered(0.0)
        pools.listed(name, Listing(0.0, (ModelCard("base", None, 32_768),)))
        pools.backends[name].observe(Reading(0.0, running=3, kv_used=0.3, kv_tokens=100_000))
    statuses = [BackendStatus(name, f"http://{name}:8000", "both", "config", "up", 3, 0.0) for name in names]
    return Recorder(dispatcher, lambda: statuses, lambda: BANDS)


def exits(random: Random, count: int, backends: int, flows: int) -> list[RequestExit]:
    """Requests that ended well, each of its own numbers."""
    return [_exit(random, i, backends, flows) for i in range(count)]


def _exit(random: Random, number: int, backends: int, flows: int) -> RequestExit:
    wait_s, ttft_s = random.expovariate(5.0), 0.05 + random.expovariate(5.0)
    attempt = AttemptRecord(
        backend=f"backend-{random.randrange(backends):03}", queued_s=10.0, granted_s=10.0 + wait_s, candidates=backends,
        terms=(("queue", 0.01), ("prefill", 0.2), ("stream", 0.3), ("harm", 0.02), ("eviction", 0.0), ("memory", 0.1)),
        expected_cached_tokens=500, predicted_ttft=Predicted(ttft_s, 2.0 * ttft_s), first_byte_s=10.0 + wait_s + ttft_s,
        ended_s=15.0, verdict=Verdict.SERVED, status=200,
    )  # fmt: skip
    level = random.choice(list(BANDS))
    asked = RequestInput(
        request_id=f"{number:032x}", method="POST", path="/v1/chat/completions", model="base", band=BANDS[level],
        level=level, flow=f"flow-{random.randrange(flows)}", stream=True, arrived_s=10.0, body_bytes=4_000,
        expected_prompt_tokens=900,
    )  # fmt: skip
    result = RequestResult(
        outcome=Outcome.COMPLETED, status=200, duration_s=5.0, ttft_s=wait_s + ttft_s, prompt_tokens=900,
        cached_tokens=500, output_tokens=200, response_bytes=20_000, chunks=200, max_gap_s=0.1,
    )  # fmt: skip
    return RequestExit(asked, result, RequestRouting(tried=(attempt,), attempts=1, queue_wait_s=wait_s))


def median_us(run: Callable[[], object], count: int) -> float:
    """The least of the medians of the rounds, in microseconds a call."""
    found = []
    for _ in range(ROUNDS):
        times = []
        for _ in range(count):
            began = thread_time()
            run()
            times.append(thread_time() - began)
        found.append(statistics.median(times))
    return 1e6 * min(found)


def seconds_of(recorder: Recorder, from_s: int, batches: Sequence[Sequence[RequestExit]]) -> int:
    """Let one second pass for each batch; the next second."""
    for second, batch in enumerate(batches, from_s):
        for one in batch:
            recorder.record(one)
        recorder.tick(float(second + 1))
    return from_s + len(batches)


def record_all(recorder: Recorder, some: Sequence[RequestExit]) -> None:
    for ended in some:
        recorder.record(ended)


def print_fleet(count: int, flows: int) -> None:
    """One line of the table."""
    random, recorder = Random(2), fleet(count)
    batches = [exits(random, PER_S, count, flows) for _ in range(60)]
    second = seconds_of(recorder, 1, batches)
    some = [ended for batch in batches for ended in batch][:1_000]
    record_us = median_us(partial(record_all, recorder, some), 5) / len(some)
    clock = iter(range(second, second + 10**6))
    empty_us = median_us(lambda: recorder.tick(float(next(clock) + 1)), 20)
    busy: list[float] = []
    for batch in batches:
        for ended in batch:
            recorder.record(ended)
        began = thread_time()
        recorder.tick(float(next(clock) + 1))
        busy.append(thread_time() - began)
    row_us = 1e6 * statistics.median(busy)
    live = LiveSnapshot(recorder, "bench", lambda: float(next(clock)), lambda: 0.0)
    document_us = median_us(lambda: dumped(live.content()), 5)
    document = dumped(live.content())
    packed_us = median_us(lambda: compress(document, 1), 5)
    print(
        f"{count:8} | {flows:6,} | {record_us:6.2f} us | {empty_us / 1e3:5.2f} ms"
        f" | {row_us / 1e3:5.2f} ms | {document_us / 1e3:6.2f} ms, {len(document) / 1e3:5.0f} KB"
        f" | {packed_us / 1e3:5.2f} ms, {len(compress(document, 1)) / 1e3:4.0f} KB"
    )


def print_memory(count: int, flows: int) -> None:
    """What is held after a day with as many columns as there may be."""
    random = Random(3)
    batches = [exits(random, PER_S, count, flows) for _ in range(20)]
    gc.collect()
    tracemalloc.start()
    recorder = fleet(count)
    bare, _ = tracemalloc.get_traced_memory()
    second = seconds_of(recorder, 1, batches)
    history = recorder.history
    history.append(second, {f"filler/{i}": 1.0 for i in range(COLUMNS_MAX)})
    history.append(second + TENS * TEN_S + SECONDS, dict.fromkeys(history.names, 1.0))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"memory, {count} backends, {flows:,} flows, {len(history.names)} columns: {(held - bare) / 1e6:.1f} MB")


async def main() -> None:
    """Print the table. A recorder reads the clock of the loop that it was made on."""
    print("backends | flows  | record    | row      | row at 500/s | document           | packed")
    for count, flows in FLEETS:
        print_fleet(count, flows)
    for count, flows in FLEETS[1:]:
        print_memory(count, flows)


if __name__ == "__main__":
    asyncio.run(main())
