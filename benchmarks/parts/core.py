"""What one decision of the scheduler costs: no network, no event loop, one core.

    .venv/bin/python -m benchmarks.parts.core

*Who* is band, flow, head and charge alone: the request that goes next is found, leaves the waiting room and is charged
to its flow, for 1,000 flows and up to 1,000,000 waiting requests; one backend, and a placement that names it at once.
The other rows are whole decisions, from deadlines to the next wake-up, over 1 backend so named, or with `blend` over 8
to 128 backends. *Enqueue* and *cancel*
are one `submit` and one `cancel` at the same numbers of waiting requests. *Bytes* are what Python allocates for each
waiting request (tracemalloc), less its body, which is not there. A *mass release* returns 1,000 leases at once, and the
passes that follow are timed one by one. In a cycle one lease ends, one request comes and one is granted.

*Alone* is all that the core does for one request that finds an idle proxy, with the defaults (`cost`, `fair_share`):
submit, the decision that grants it, first byte, end, the pass that follows its end, and what is learned of it.

The collector is set as in `llmproxy serve`: frozen once the fleet is set up, its own thresholds after. Times are those
of the thread on its core, so that other work on the machine is not counted. Each figure is the least of the medians
(p50), and of the 99th percentiles, of several rounds, because a busy machine only ever adds; the longest single call of
all rounds stands beside them, and is a full collection of the garbage collector more often than not.
"""

from __future__ import annotations

import gc
import statistics
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from time import thread_time

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
from llmproxy.core.placement.first_fit import Fit, Unmatched, first_fit
from llmproxy.core.placement.policy import NO_CAPACITY, Placement, make
from llmproxy.core.pools import Pools
from llmproxy.core.settings import CapacitySettings, QueueSettings, Settings

WAITING = (1_000, 100_000, 1_000_000)
FLEETS = (8, 32, 128)
FLOWS = 1_000
ROUNDS = 5
CYCLES = 2_000
BATCH = 32
MASS = 1_000
MODEL = "base"
BOUNDLESS = QueueSettings(requests_max=10**9, bytes_max=10**15, band_requests_max=10**9, band_bytes_max=10**15)


class NoCostPlacement(Placement):
    """A placement that costs nothing: the one backend, or no room."""

    def __init__(self) -> None:
        self._placed = Placed("backend-000", 0.0, (), 1)

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity:
        return self._placed if views[0].has_room(ceiling) else NO_CAPACITY


@dataclass
class Times:
    """Seconds of single calls, round by round."""

    rounds: list[list[float]] = field(default_factory=list)

    def p50_us(self) -> float:
        return min(statistics.median(one) for one in self.rounds) * 1e6

    def cells(self) -> str:
        cuts = [statistics.quantiles(one, n=100) for one in self.rounds]
        p50, p99 = (min(cut[at] for cut in cuts) * 1e6 for at in (49, 98))
        return f"{p50:,.1f} | {p99:,.1f} | {max(max(one) for one in self.rounds) * 1e6:,.0f}"


class Bench:
    """One fleet kept full with so many waiting, and the clock of its scheduler."""

    def __init__(self, backends: int, waiting: int, trivial: bool) -> None:
        self._rng = Random(1)
        self._names = [f"backend-{number:03d}" for number in range(backends)]
        placement: Callable[[], Placement] = NoCostPlacement if trivial else partial(make, "blend", self._rng)
        settings = Settings(
            queue=BOUNDLESS, capacity=CapacitySettings(look_ahead=2), ceilings={SHEDDABLE: 1.0}, headroom_s=0.0
        )
        self.pools = Pools(settings, dict.fromkeys(self._names, BATCH), {}, placement)
        self.now = 0.0
        self._serial = 0
        self.running: deque[Grant] = deque()
        card = ModelCard(MODEL, None, 32_768)
        for name in self._names:
            self.pools.backends[name].answered(0.0)
            self.pools.listed(name, Listing(0.0, (card,)))
            # The cache is larger than all prompts together, so that only the batch limits what is granted.
            self.pools.backends[name].observe(Reading(self.now, 0, 0, 0.3, 10**9))
        for _ in range(backends * (BATCH + 2)):
            self.submit(self.request(CRITICAL))
        while self.note(self.pools.decide(self.now)):
            pass
        for _ in range(waiting):
            self.submit(self.request())

    def request(self, band: int | None = None) -> Request:
        self._serial += 1
        return Request(
            id=str(self._serial),
            pool=MODEL,
            model=MODEL,
            adapter=None,
            band=(CRITICAL, DEFAULT, DEFAULT, SHEDDABLE)[self._serial % 4] if band is None else band,
            flow=f"flow-{self._rng.randrange(FLOWS)}",
            arrived_s=self.now,
            deadline_s=self.now + 1e6,
            body_bytes=4_000,
            prompt_tokens=500,
            output_tokens=200,
            stream=True,
        )

    def submit(self, request: Request) -> None:
        self.pools.submit(request, self.now)

    def note(self, decisions: Sequence[Decision]) -> int:
        for decision in decisions:
            assert isinstance(decision, Grant)
            self.pools.started(decision, self.now)
            self.running.append(decision)
        return len(decisions)

    def finish(self) -> None:
        self.pools.finish(self.running.popleft(), Verdict.SERVED, self.now, Usage(500, 180))

    def round(self, decide: Times, enqueue: Times, cancel: Times) -> None:
        for times in (decide, enqueue, cancel):
            times.rounds.append([])
        pools = self.pools
        for _ in range(CYCLES):
            self.now += 1e-4
            self.finish()
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
            assert self.note(decisions) == 1


def who(bench: Bench) -> Times:
    """The part of a decision that says who goes; what was taken out comes back, as a new request, untimed."""
    scheduler = bench.pools.schedulers[MODEL]
    room, limits, placement = scheduler._room, scheduler._limits, scheduler._placement
    bench.finish()
    views = scheduler._backends.views(bench.now)
    times = Times()
    for number in range(ROUNDS + 1):
        if number == 1:
            gc.collect()
            gc.freeze()
            times.rounds.clear()
        times.rounds.append([])
        for _ in range(CYCLES):
            bench.now += 1e-4
            began_s = thread_time()
            level = room.levels()[0]
            band = room.band(level)
            found = first_fit(band, placement, views, 1.0, limits, Unmatched(), bench.now, patient=True)
            assert isinstance(found, Fit)
            request = found.queued.request
            room.leave(found.queued)
            band.fairness.dispatched(request.flow)
            band.fairness.charge(request.flow, scheduler.charges.charge.estimate(request) / request.weight)
            times.rounds[-1].append(thread_time() - began_s)
            bench.submit(bench.request())
    gc.unfreeze()
    return times


def measure(bench: Bench) -> tuple[Times, Times, Times]:
    decide, enqueue, cancel = Times(), Times(), Times()
    bench.round(Times(), Times(), Times())
    gc.collect()
    gc.freeze()
    for _ in range(ROUNDS):
        bench.round(decide, enqueue, cancel)
    gc.unfreeze()
    return decide, enqueue, cancel


def bytes_each(waiting: int) -> float:
    """What a waiting request allocates, its flow's and its band's part included."""
    bench = Bench(1, 0, trivial=True)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(waiting):
        bench.submit(bench.request())
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / waiting


def mass_release() -> list[float]:
    """Seconds of each pass after a thousand leases ended in one turn, `blend` over 32 backends."""
    bench = Bench(32, 5_000, trivial=False)
    gc.collect()
    gc.freeze()
    bench.now += 1.0
    for _ in range(MASS):
        bench.finish()
    passes: list[float] = []
    decided = 1
    while decided:
        began_s = thread_time()
        decided = bench.note(bench.pools.decide(bench.now))
        passes.append(thread_time() - began_s)
    gc.unfreeze()
    return passes


def alone(backends: int) -> float:
    """Microseconds of the core for one request that is in the proxy alone, the least mean of several rounds."""
    names = [f"backend-{number:03d}" for number in range(backends)]
    pools = Pools(Settings(), dict.fromkeys(names, BATCH), {}, partial(make, "cost", Random(1)))
    for name in names:
        pools.backends[name].answered(0.0)
        pools.listed(name, Listing(0.0, (ModelCard(MODEL, None, 32_768),)))
        pools.backends[name].observe(Reading(0.0, 0, 0, 0.3, 10**6))
    now, means = 0.0, []
    for number in range(ROUNDS + 1):
        asked = [
            Request(
                id=str(one),
                pool=MODEL,
                model=MODEL,
                adapter=None,
                band=DEFAULT,
                flow=f"flow-{one % 8}",
                arrived_s=now,
                deadline_s=1e6,
                body_bytes=800,
                prompt_tokens=200,
                output_tokens=60,
                prefix=(1, 2, 3 + one),
                prefix_tokens=64.0,
            )
            for one in range(number * CYCLES, (number + 1) * CYCLES)
        ]
        began_s = thread_time()
        for request in asked:
            now += 1e-3
            pools.submit(request, now)
            (grant,) = pools.decide(now)
            assert isinstance(grant, Grant)
            pools.next_wakeup(now)
            pools.committed(grant, now)
            pools.started(grant, now)
            pools.finish(grant, Verdict.SERVED, now, Usage(200, 60, 128))
            pools.decide(now)
            pools.next_wakeup(now)
            pools.ended(request, None, now)
            pools.cached(grant.request.pool, grant.lease, grant.placed.backend, request.prefix)
        means.append((thread_time() - began_s) / CYCLES)
    return min(means[1:]) * 1e6


def main() -> None:
    alone_us = ", ".join(f"{alone(backends):.0f} µs over {backends}" for backends in (4, *FLEETS))
    print(f"one request alone in the proxy, all calls of the core: {alone_us} backends\n")
    columns = "p50 µs | p99 µs | longest µs"
    print(f"| backends | waiting | decide {columns} | enqueue {columns} | cancel {columns} |")
    print("| ---: " * 11 + "|")
    for waiting in WAITING:
        bench = Bench(1, waiting, trivial=True)
        rest = " | ".join(times.cells() for times in measure(bench))
        print(f"| 1 | {waiting:,} | {rest} |")
        print(f"| who | {waiting:,} | {who(bench).cells()} |" + " |" * 6)
        del bench
        gc.collect()
    for backends in FLEETS:
        rest = " | ".join(times.cells() for times in measure(Bench(backends, 2_000, False)))
        print(f"| {backends} | 2,000 | {rest} |")
    print(f"\nbytes per waiting request at 100,000: {bytes_each(100_000):,.0f} (tracemalloc, without the body)")
    passes = min((mass_release() for _ in range(ROUNDS)), key=max)
    longest_ms, mean_ms = max(passes) * 1e3, statistics.mean(passes) * 1e3
    print(f"mass release of {MASS:,} leases: {len(passes)} passes, longest {longest_ms:.1f} ms, mean {mean_ms:.2f} ms")


if __name__ == "__main__":
    main()
