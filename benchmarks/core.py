"""Decisions per second of the scheduler alone: no network, no event loop, one core.

    .venv/bin/python -m benchmarks.core

For every fleet and number of flows two situations are measured. *Half full*: nobody waits and every backend has room,
so each request is placed over all of them. *Saturated*: every flow has requests waiting, and each one that ends lets
exactly one other go. A cycle is one `submit`, one `decide` and one `finish`. A *reading* is one poll and the pass that
follows it.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from functools import partial
from random import Random
from time import perf_counter

from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, Grant, Listing, ModelCard, Reading, Request, Verdict
from llmproxy.core.placement import make
from llmproxy.core.pools import Pools
from llmproxy.core.settings import Settings

FLEETS = (8, 32, 128)
FLOWS = (10, 1_000)
ROUNDS = 3
ROUND_S = 0.6
BATCH = 32
MODEL = "base"


@dataclass
class Figures:
    cycles_per_s: float
    decide_p50_us: float
    decide_p99_us: float
    reading_us: float


class Bench:
    """One fleet kept at one load, and the clock that its scheduler is told."""

    def __init__(self, backends: int, flows: int, saturated: bool) -> None:
        self._rng = Random(1)
        self._flows = flows
        self._names = [f"backend-{number:03d}" for number in range(backends)]
        self._pools = Pools(Settings(), dict.fromkeys(self._names, BATCH), {}, partial(make, "blend", self._rng))
        self._now = 0.0
        self._serial = 0
        self._readings = 0
        self._running: deque[Grant] = deque()
        card = ModelCard(MODEL, None, 32_768)
        for name in self._names:
            self._pools.answered(name, 0.0)
            self._pools.listed(name, Listing(0.0, (card,)))
            self._observe(name, 0)
        waiting = 2 * flows if saturated else 0
        in_flight = backends * (BATCH + 2 if saturated else BATCH // 2)
        for _ in range(in_flight + waiting):
            self._pools.submit(self._request(), self._now)
        while granted := self._pools.decide(self._now):
            self._running.extend(grant for grant in granted if isinstance(grant, Grant))
        self._running = deque(self._rng.sample(list(self._running), len(self._running)))

    def _request(self) -> Request:
        self._serial += 1
        return Request(
            id=str(self._serial),
            pool=MODEL,
            model=MODEL,
            adapter=None,
            band=(CRITICAL, DEFAULT, DEFAULT, SHEDDABLE)[self._serial % 4],
            flow=f"flow-{self._rng.randrange(self._flows)}",
            arrived_s=self._now,
            deadline_s=self._now + 1e6,
            body_bytes=4_000,
            prompt_tokens=500,
            output_tokens=200,
        )

    def _observe(self, name: str, running: int) -> None:
        # The cache is larger than all prompts together, so that only the batch limits what is granted.
        self._pools.observe(name, Reading(self._now, running, 0, 0.3, 10**9))

    def round(self) -> Figures:
        took: list[float] = []
        ends_s = perf_counter() + ROUND_S
        cycles, began_s = 0, perf_counter()
        while perf_counter() < ends_s:
            for _ in range(50):
                self._cycle(took)
            cycles += 50
        cycles_per_s = cycles / (perf_counter() - began_s)
        readings_us = []
        for _ in range(200):
            name = self._names[self._readings % len(self._names)]
            self._readings += 1
            began_s = perf_counter()
            self._reading(name)
            readings_us.append((perf_counter() - began_s) * 1e6)
        percentiles = statistics.quantiles(took, n=100)
        return Figures(cycles_per_s, percentiles[49] * 1e6, percentiles[98] * 1e6, statistics.median(readings_us))

    def _cycle(self, took: list[float]) -> None:
        pools = self._pools
        self._now += 1e-4
        pools.finish(self._running.popleft(), Verdict.SERVED, self._now)
        pools.submit(self._request(), self._now)
        began_s = perf_counter()
        decisions = pools.decide(self._now)
        pools.next_wakeup(self._now)
        took.append(perf_counter() - began_s)
        self._running.extend(grant for grant in decisions if isinstance(grant, Grant))

    def _reading(self, name: str) -> None:
        self._now += 1e-4
        self._observe(name, BATCH)
        decisions = self._pools.decide(self._now)
        self._pools.next_wakeup(self._now)
        self._running.extend(grant for grant in decisions if isinstance(grant, Grant))


def main() -> None:
    cases = [(backends, flows, full) for backends in FLEETS for flows in FLOWS for full in (False, True)]
    benches = {case: Bench(*case) for case in cases}
    rounds: dict[tuple[int, int, bool], list[Figures]] = {case: [] for case in cases}
    for _ in range(ROUNDS):
        for case, bench in benches.items():
            rounds[case].append(bench.round())
    print("| backends | flows | load | cycles/s | decide p50 µs | decide p99 µs | reading µs |")
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for (backends, flows, full), figures in rounds.items():
        cells = [
            f"{statistics.median(values):,.0f} ({min(values):,.0f}–{max(values):,.0f})"
            for values in zip(
                *((f.cycles_per_s, f.decide_p50_us, f.decide_p99_us, f.reading_us) for f in figures), strict=True
            )
        ]
        load = "saturated" if full else "half full"
        print(f"| {backends} | {flows:,} | {load} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
