"""What knowing how many replicas are needed costs: per request, per evaluation, and in memory over a week.

    .venv/bin/python -m benchmarks.parts.scaling

*Request* is all that scaling does for one streamed request: arrived, booked, started, finished, left; a mean of
50. *Evaluation* is `Pools.needs` over all pools, whose replicas are up, have served, and run half of what they may: 128
replicas in one pool and in 50, and 50 pools with 8 each. A *week* is what Python allocates (tracemalloc) for one pool,
day after day, with a request each 20 s, and rates and mixes that change by the hour. Figures are made as in `core`
beside it.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections import deque
from functools import partial
from random import Random
from time import thread_time
from types import SimpleNamespace
from typing import Any

from benchmarks.parts.core import CYCLES, ROUNDS, Times
from llmproxy.core.domain import DEFAULT, Grant, Listing, ModelCard, Reading, Request, Usage, Verdict
from llmproxy.core.leases import LeaseRecord
from llmproxy.core.placement.policy import make
from llmproxy.core.pools import Pools
from llmproxy.core.scaling.need import ReplicaFacts
from llmproxy.core.scaling.observer import PoolScaling
from llmproxy.core.settings import ScalingSettings, Settings

REQUEST_GOAL_US, NEED_GOAL_US = 3.0, 1_000.0
FLEETS = ((1, 128), (50, 128), (50, 400))
"""(Pools, replicas)."""
EVALUATIONS = 300
AT_ONCE = 50
"""Requests between two readings of the clock, which costs a third of one."""
BATCH = 32
DAYS, DAY_S, EVERY_S = 7, 86_400.0, 20.0


class Stream:
    """Requests of one pool, with about 32 answers under way, and the clock."""

    def __init__(self) -> None:
        self.scaling = PoolScaling(ScalingSettings())
        self.now = 0.0
        self._rng = Random(1)
        self._backends: list[Any] = [SimpleNamespace(name=f"backend-{number}") for number in range(8)]
        self._placed: Any = SimpleNamespace(cached_tokens=200)
        self._serial = 0
        self._under_way: deque[tuple[LeaseRecord, Usage]] = deque()

    def request(self, prompt_tokens: int) -> LeaseRecord:
        self._serial += 1
        one = Request(
            id=str(self._serial), pool="base", model="base", adapter=None, band=DEFAULT, flow="flow",
            arrived_s=self.now, deadline_s=self.now + 1e6, body_bytes=4_000, prompt_tokens=prompt_tokens,
            output_tokens=200, stream=True,
        )  # fmt: skip
        backend = self._backends[self._serial % len(self._backends)]
        return LeaseRecord(self._serial, one, self._placed, backend, self.now, False, False)

    def begin(self, lease: LeaseRecord) -> None:
        self.scaling.arrived(lease.request, self.now, new=True, counts=True)
        self.scaling.booked(lease, self.now)
        self.scaling.started(lease, self.now + 0.05)

    def end(self, lease: LeaseRecord, usage: Usage) -> None:
        self.scaling.finished(lease, Verdict.SERVED, usage, self.now)
        self.scaling.left(lease.request)

    def round(self, times: Times) -> None:
        times.rounds.append([])
        for _ in range(CYCLES // AT_ONCE):
            news = [self.request(self._rng.choice((300, 1_000, 4_000, 9_000))) for _ in range(AT_ONCE)]
            usages = [Usage(one.request.prompt_tokens, self._rng.randrange(50, 300), 200) for one in news]
            began_s = thread_time()
            for lease, usage in zip(news, usages, strict=True):
                self.now += 0.1
                self.begin(lease)
                self._under_way.append((lease, usage))
                if len(self._under_way) > BATCH:
                    self.end(*self._under_way.popleft())
            times.rounds[-1].append((thread_time() - began_s) / AT_ONCE)


def fleet(count: int, replicas: int) -> tuple[Pools, float]:
    """Pools with as many replicas each, which have served and run half of what they may; the time then."""
    names = [f"backend-{number:03d}" for number in range(replicas)]
    pools = Pools(Settings(), dict.fromkeys(names, BATCH), {}, partial(make, "cost", Random(1)))
    now = 0.0
    for number, name in enumerate(names):
        pools.backends[name].answered(now)
        pools.listed(name, Listing(now, (ModelCard(f"model-{number % count}", None, 32_768),)))
        pools.backends[name].observe(Reading(now, 0, 0, 0.3, 400_000))
    serial = 0
    running: deque[Grant] = deque()
    for _ in range(BATCH):
        for _ in range(replicas):
            serial += 1
            pool = f"model-{serial % count}"
            pools.submit(
                Request(
                    id=str(serial), pool=pool, model=pool, adapter=None, band=DEFAULT, flow="flow", arrived_s=now,
                    deadline_s=now + 1e6, body_bytes=4_000, prompt_tokens=500, output_tokens=200, stream=True,
                ),
                now,
            )  # fmt: skip
        now += 4.0
        for name in names:
            pools.backends[name].observe(Reading(now, BATCH // 2, 0, 0.3, 400_000))
        while decisions := pools.decide(now):
            for grant in decisions:
                assert isinstance(grant, Grant)
                pools.started(grant, now + 0.1)
                running.append(grant)
        while len(running) > replicas * BATCH // 2:
            pools.finish(running.popleft(), Verdict.SERVED, now, Usage(500, 180))
    return pools, now


def evaluation(count: int, replicas: int) -> tuple[Times, int]:
    """Times of `needs`, and how many pools it is sure of."""
    pools, now = fleet(count, replicas)
    gc.collect()
    gc.freeze()
    times = Times()
    sure = 0
    for _ in range(ROUNDS):
        times.rounds.append([])
        for _ in range(EVALUATIONS):
            now += 0.01
            began_s = thread_time()
            needs = pools.needs(now)
            times.rounds[-1].append(thread_time() - began_s)
            sure = sum(need.sure for need in needs.values())
    gc.unfreeze()
    return times, sure


def week() -> list[int]:
    """Bytes at the end of each day."""
    stream, rng = Stream(), Random(1)
    replicas = [ReplicaFacts(up=True, limit=BATCH, kv_tokens=400_000, kv_used=0.2)] * 8
    sizes = []
    tracemalloc.start()
    for day in range(DAYS):
        while stream.now < (day + 1) * DAY_S:
            hour = int(stream.now / 3_600.0)
            stream.now += EVERY_S * rng.expovariate(1.0) * (1 + hour % 3)
            prompt_tokens = round(rng.lognormvariate(5.0 + hour % 5, 1.0)) + 1
            lease = stream.request(prompt_tokens)
            stream.begin(lease)
            stream.now += 4.0
            stream.end(lease, Usage(prompt_tokens, rng.randrange(20, 2_000), 0))
            stream.scaling.need(None, replicas, 1.0, stream.now)
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return sizes


def main() -> None:
    """Print the tables."""
    stream, times = Stream(), Times()
    stream.round(times)
    times.rounds.clear()
    for _ in range(ROUNDS):
        stream.round(times)
    print("| of scaling | p50 µs | p99 µs | longest µs | wanted µs |")
    print("| --- | --- | --- | --- | --- |")
    print(f"| request | {times.cells()} | {REQUEST_GOAL_US:g} |")
    for count, replicas in FLEETS:
        times, sure = evaluation(count, replicas)
        print(f"| evaluation, {count} pools ({sure} known), {replicas} replicas | {times.cells()} | {NEED_GOAL_US:g} |")
    sizes = week()
    print(
        f"\nA pool after a day: {sizes[0]:,} bytes; at the end of the others {min(sizes[1:]):,} to {max(sizes[1:]):,}."
    )


if __name__ == "__main__":
    main()
