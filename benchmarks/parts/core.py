"""The cost of the scheduler's decisions: no network, no event loop, one core.

    python -m benchmarks.parts.core

A row is a full fleet with waiting requests of 1,000 flows. In each cycle a lease ends, a request comes, another comes
and is cancelled, and one is granted. *Decide* is the whole decision, from deadlines to the next wake-up: over a backend
that a trivial placement names, or with `cost` over 8 to 128 backends. *Bytes* are allocations for each waiting request
(tracemalloc) without its body. *Alone* is all work of the core for one request in an idle proxy with the defaults:
submit, grant, first byte, end, the next pass, and learning.

The garbage collector is set as in `llmproxy serve`. Times are thread time, so that other processes do not count. Each
figure is the least of several rounds, because a busy machine only adds time. The longest call of all rounds is mostly a
full garbage collection.
"""

from __future__ import annotations

import gc
import statistics
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from time import thread_time

from benchmarks.table import Table
from llmproxy.config import Config, settings_of
from llmproxy.core.backends.view import View
from llmproxy.core.domain import (
    CRITICAL,
    DEFAULT,
    SHEDDABLE,
    Decision,
    Grant,
    Listing,
    ModelCard,
    NoCapacity,
    Placed,
    Reading,
    Request,
    Usage,
    Verdict,
)
from llmproxy.core.lease_events import Committed, Returned, Started
from llmproxy.core.placement.policy import NO_CAPACITY, Placement, make
from llmproxy.core.pools import Pools

WAITING = (1_000, 100_000, 1_000_000)
FLEETS = (8, 32, 128)
FLOWS = 1_000
ROUNDS = 5
CYCLES = 2_000
BATCH = 32
MODEL = "base"
DEFAULTS = settings_of(Config())
BOUNDLESS = replace(
    DEFAULTS.queue, requests_max=10**9, bytes_max=10**15, band_requests_max=10**9, band_bytes_max=10**15
)
COLUMNS = ("p50 µs", "p99 µs", "longest µs")


class TrivialPlacement(Placement):
    """Names the only backend, without any computation."""

    def __init__(self) -> None:
        self._placed = Placed("backend-000", 0.0, (), 1)

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity:
        return self._placed if views[0].has_room(ceiling) else NO_CAPACITY


@dataclass
class Times:
    """The seconds of single calls, in several rounds."""

    rounds: list[list[float]] = field(default_factory=list)

    def cells(self) -> tuple[str, str, str]:
        """Returns the values for `COLUMNS`."""
        cuts = [statistics.quantiles(one, n=100) for one in self.rounds]
        p50, p99 = (min(cut[at] for cut in cuts) * 1e6 for at in (49, 98))
        return f"{p50:,.1f}", f"{p99:,.1f}", f"{max(max(one) for one in self.rounds) * 1e6:,.0f}"


def request(serial: int, flow: str, now: float, band: int = DEFAULT) -> Request:
    return Request(
        id=str(serial),
        pool=MODEL,
        model=MODEL,
        adapter=None,
        band=band,
        flow=flow,
        arrived_s=now,
        deadline_s=now + 1e6,
        body_bytes=4_000,
        prompt_tokens=500,
        output_tokens=200,
        prefix=(1, 2, 3 + serial),
        prefix_tokens=64.0,
        stream=True,
    )


def up(pools: Pools, kv_tokens: int) -> Pools:
    """Makes all backends available, and returns the pools."""
    for name in pools.backends:
        pools.backends[name].answered(0.0)
        pools.listed(name, Listing(0.0, (ModelCard(MODEL, None, 32_768),)))
        pools.backends[name].observe(Reading(0.0, 0, 0, 0.3, kv_tokens))
    return pools


def names(count: int) -> list[str]:
    return [f"backend-{number:03d}" for number in range(count)]


class Bench:
    """A full fleet with waiting requests, and the clock of its scheduler."""

    def __init__(self, backends: int, waiting: int) -> None:
        self._rng = Random(1)
        placement: Callable[[], Placement] = partial(make, "cost", self._rng) if backends > 1 else TrivialPlacement
        settings = replace(
            DEFAULTS,
            queue=BOUNDLESS,
            capacity=replace(DEFAULTS.capacity, look_ahead=2),
            ceilings={SHEDDABLE: 1.0},
            headroom_s=0.0,
        )
        # The cache is larger than all prompts together, so that the batch alone limits the grants.
        self.pools = up(Pools(settings, dict.fromkeys(names(backends), BATCH), {}, placement), 10**9)
        self.now = 0.0
        self._serial = 0
        self._running: deque[Grant] = deque()
        for _ in range(backends * (BATCH + 2)):
            self.pools.submit(self.request(CRITICAL), self.now)
        while self._note(self.pools.decide(self.now)):
            pass
        self.fill(waiting)

    def fill(self, waiting: int) -> None:
        for _ in range(waiting):
            self.pools.submit(self.request(), self.now)

    def request(self, band: int | None = None) -> Request:
        self._serial += 1
        band = (CRITICAL, DEFAULT, DEFAULT, SHEDDABLE)[self._serial % 4] if band is None else band
        return request(self._serial, f"flow-{self._rng.randrange(FLOWS)}", self.now, band)

    def _note(self, decisions: Sequence[Decision]) -> int:
        for decision in decisions:
            assert isinstance(decision, Grant)
            self.pools.apply(Started(decision.lease), self.now)
            self._running.append(decision)
        return len(decisions)

    def round(self, decide: Times, enqueue: Times, cancel: Times) -> None:
        for times in (decide, enqueue, cancel):
            times.rounds.append([])
        pools = self.pools
        for _ in range(CYCLES):
            self.now += 1e-4
            pools.apply(Returned(self._running.popleft().lease, Verdict.SERVED, Usage(500, 180)), self.now)
            one, other = self.request(), self.request()
            began_s = thread_time()
            pools.submit(one, self.now)
            enqueue.rounds[-1].append(thread_time() - began_s)
            pools.submit(other, self.now)
            began_s = thread_time()
            pools.cancel(other)
            cancel.rounds[-1].append(thread_time() - began_s)
            began_s = thread_time()
            decisions = pools.decide(self.now)
            pools.next_wakeup(self.now)
            decide.rounds[-1].append(thread_time() - began_s)
            assert self._note(decisions) >= 1


def measure(bench: Bench) -> tuple[Times, Times, Times]:
    """Returns the times of decide, enqueue and cancel."""
    decide, enqueue, cancel = Times(), Times(), Times()
    bench.round(Times(), Times(), Times())
    gc.collect()
    gc.freeze()
    for _ in range(ROUNDS):
        bench.round(decide, enqueue, cancel)
    gc.unfreeze()
    return decide, enqueue, cancel


def bytes_each(waiting: int) -> float:
    """Returns the bytes of memory for a waiting request, including its part of its flow and its band."""
    bench = Bench(1, 0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    bench.fill(waiting)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / waiting


def alone(backends: int) -> float:
    """Returns the microseconds that the core takes for one request in an idle proxy.

    The result is the smallest mean of several rounds.
    """
    pools = up(Pools(DEFAULTS, dict.fromkeys(names(backends), BATCH), {}, partial(make, "cost", Random(1))), 10**6)
    now, means = 0.0, []
    for number in range(ROUNDS + 1):
        requests = [request(at, f"flow-{at % 8}", now) for at in range(number * CYCLES, (number + 1) * CYCLES)]
        began_s = thread_time()
        for one in requests:
            now += 1e-3
            pools.submit(one, now)
            (grant,) = pools.decide(now)
            assert isinstance(grant, Grant)
            pools.next_wakeup(now)
            pools.apply(Committed(grant.lease), now)
            pools.apply(Started(grant.lease), now)
            pools.apply(Returned(grant.lease, Verdict.SERVED, Usage(500, 60, 128)), now)
            pools.decide(now)
            pools.next_wakeup(now)
            pools.ended(one, None, now)
            pools.cached(grant.request.pool, grant.lease, grant.placed.backend, one.prefix)
        means.append((thread_time() - began_s) / CYCLES)
    return min(means[1:]) * 1e6


def main() -> None:
    alone_us = ", ".join(f"{alone(backends):.0f} µs over {backends}" for backends in (4, *FLEETS))
    print(f"one request alone in the proxy, all calls of the core: {alone_us} backends\n")
    parts = [f"{name} {column}" for name in ("decide", "enqueue", "cancel") for column in COLUMNS]
    table = Table("backends", "waiting", *parts, texts=0)
    for backends, waiting in (*((1, count) for count in WAITING), *((count, 2_000) for count in FLEETS)):
        times = measure(Bench(backends, waiting))
        table.row(backends, f"{waiting:,}", *(cell for one in times for cell in one.cells()))
        gc.collect()
    print(f"\nbytes per waiting request at 100,000: {bytes_each(100_000):,.0f} (tracemalloc, without the body)")


if __name__ == "__main__":
    main()
