"""A load generator on bare sockets: three shapes of load, each bounded in clients and in time.

    closed  every client sends its next request when its last one is answered
    open    requests leave at random moments (Poisson), `--rate` a second, whatever the answers do
    idle    streams are opened and then say nothing: what does the proxy's memory grow by?

With `--chunks 0` a request asks for one JSON answer, otherwise for a stream of so many chunks, `--interval-us` apart.
Run `python -m benchmarks.loadgen --help`; the result is one line of JSON (`Result`). Only the mock backend of this
folder sends the stamps that `transit` is computed from, so the target has to be it, or a proxy in front of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import random
import sys
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import orjson
import uvloop

from benchmarks import proxy
from benchmarks.client import Client, Tally, request_bytes

RAMP_PER_S = 500.0
RECONNECT_S = 0.05
IDLE_INTERVAL_US = 120_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One measurement: which load goes where, and whose CPU time and memory are read meanwhile."""

    target: str
    shape: str = "closed"
    clients: int = 64
    rate: float = 500.0
    chunks: int = 0
    interval_us: int = 0
    warmup_s: float = 0.5
    seconds: float = 3.0
    proxy_pid: int = 0
    mock_pid: int = 0
    core: int = -1

    def argv(self) -> list[str]:
        """The command line that runs this plan in a process of its own."""
        return [
            word
            for item in fields(self)
            for word in ("--" + item.name.replace("_", "-"), str(getattr(self, item.name)))
        ]


@dataclass(frozen=True, slots=True)
class Spread:
    """Two percentiles of `count` samples, in microseconds."""

    p50_us: float
    p99_us: float
    count: int

    @classmethod
    def of(cls, samples_ns: Sequence[int]) -> Spread | None:
        ordered = sorted(samples_ns)
        if not ordered:
            return None
        count = len(ordered)
        return cls(ordered[count // 2] / 1e3, ordered[min(count - 1, count * 99 // 100)] / 1e3, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one measurement saw inside its window; None where the load has no such thing or nobody was named to be read.

    `failures` counts by reason over the whole run, `skipped` are requests of an open load that found no free client.
    `foreign_s` is CPU time on the proxy's core that was not the proxy's.
    """

    window_s: float
    requests: int
    chunks: int
    failures: dict[str, int]
    skipped: int
    latency: Spread | None
    ttft: Spread | None
    transit: Spread | None
    gap: Spread | None
    proxy_cpu_s: float | None
    foreign_s: float | None
    harness_cpu_s: float
    rss_before_bytes: int | None
    rss_after_bytes: int | None

    @classmethod
    def parse(cls, line: bytes) -> Result:
        known = orjson.loads(line)
        for name in ("latency", "ttft", "transit", "gap"):
            known[name] = Spread(**known[name]) if known[name] else None
        return cls(**known)


class Load:
    """Keeps the clients of one plan going; `run` never returns by itself, it is cancelled."""

    def __init__(self, plan: Plan, tally: Tally) -> None:
        self._plan = plan
        self._tally = tally
        self._random = random.Random(1)
        self._open: set[Client] = set()
        self._free: list[Client] = []
        self._interval_us = IDLE_INTERVAL_US if plan.shape == "idle" else plan.interval_us
        self._request = request_bytes(plan.target, plan.chunks, self._interval_us)
        self.ramp_s = 0.0 if plan.shape == "open" else plan.clients / RAMP_PER_S

    async def run(self) -> None:
        try:
            if self._plan.shape == "open":
                await self._run_open()
            else:
                async with asyncio.TaskGroup() as group:
                    for number in range(self._plan.clients):
                        group.create_task(self._run_client(number))
        finally:
            for client in list(self._open):
                client.abandon()

    async def _connect(self, done: Callable[[Client], None]) -> Client | None:
        address = urllib.parse.urlsplit(self._plan.target)
        loop = asyncio.get_running_loop()
        try:
            _, client = await loop.create_connection(
                lambda: Client(self._tally, done), address.hostname or "", address.port or 80
            )
        except OSError as error:
            self._tally.failures[f"cannot connect ({error.strerror})"] += 1
            return None
        self._open.add(client)
        return client

    async def _run_client(self, number: int) -> None:
        """One client of a closed or idle load; a lost connection is counted and opened anew, not too fast."""
        plan = self._plan
        await asyncio.sleep(number / RAMP_PER_S)
        # Streams of random remaining length at first, so that later ones start evenly and not all at one moment.
        chunks = self._random.randint(1, plan.chunks) if plan.chunks and plan.shape == "closed" else plan.chunks
        first = request_bytes(plan.target, chunks, self._interval_us)
        while True:
            client = await self._connect(self._again)
            if client is not None:
                client.send(first, plan.chunks > 0)
                await client.gone
                self._open.discard(client)
            await asyncio.sleep(RECONNECT_S)

    def _again(self, client: Client) -> None:
        client.send(self._request, self._plan.chunks > 0)

    async def _run_open(self) -> None:
        """Latency counts from the moment of sending: no answer can delay a later request, only this process can."""
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        due_s = loop.time()
        try:
            while True:
                due_s += self._random.expovariate(self._plan.rate)
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                while self._free and self._free[-1].gone.done():
                    self._open.discard(self._free.pop())
                if self._free:
                    self._again(self._free.pop())
                elif len(self._open) + len(tasks) < self._plan.clients:
                    task = loop.create_task(self._send_on_new_connection())
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                else:
                    self._tally.skipped += 1
        finally:
            for task in tasks:
                task.cancel()

    async def _send_on_new_connection(self) -> None:
        client = await self._connect(self._free.append)
        if client is not None:
            client.gone.add_done_callback(lambda _: self._open.discard(client))
            self._again(client)


@dataclass(frozen=True, slots=True)
class Books:
    """The CPU clocks at one border of the window."""

    at_s: float
    proxy_s: float | None
    core_s: float | None
    harness_s: float

    @classmethod
    def read(cls, plan: Plan) -> Books:
        return cls(
            time.monotonic(),
            proxy.cpu_s(proxy.family(plan.proxy_pid)) if plan.proxy_pid else None,
            proxy.core_busy_s(plan.core) if plan.core >= 0 else None,
            time.process_time() + (proxy.cpu_s([plan.mock_pid]) if plan.mock_pid else 0.0),
        )


def rss_bytes(plan: Plan) -> int | None:
    return proxy.rss_bytes(proxy.family(plan.proxy_pid)) if plan.proxy_pid else None


async def measure(plan: Plan) -> Result:
    """Runs one plan: ramp, warm-up, window. Raises BenchError when the proxy dies meanwhile."""
    tally = Tally()
    load = Load(plan, tally)
    rss_before = rss_bytes(plan)
    task = asyncio.create_task(load.run())
    await asyncio.sleep(load.ramp_s + plan.warmup_s)
    before = Books.read(plan)
    tally.open = True
    await asyncio.sleep(plan.seconds)
    tally.open = False
    after = Books.read(plan)
    rss_after = rss_bytes(plan)
    task.cancel()
    # A load that broke by itself must not pass for one that was ended here, so nothing but the cancelling is swallowed.
    with contextlib.suppress(asyncio.CancelledError):
        await task
    if plan.shape == "idle" and tally.started < plan.clients:
        tally.failures["streams that never gave a first chunk"] += plan.clients - tally.started
    return _result(tally, before, after, rss_before, rss_after)


def _result(tally: Tally, before: Books, after: Books, rss_before: int | None, rss_after: int | None) -> Result:
    proxy_s = foreign_s = None
    if before.proxy_s is not None and after.proxy_s is not None:
        proxy_s = after.proxy_s - before.proxy_s
        if before.core_s is not None and after.core_s is not None:
            foreign_s = max(0.0, after.core_s - before.core_s - proxy_s)
    return Result(
        window_s=after.at_s - before.at_s,
        requests=tally.requests,
        chunks=tally.chunks,
        failures=dict(tally.failures),
        skipped=tally.skipped,
        latency=Spread.of(tally.latency_ns),
        ttft=Spread.of(tally.ttft_ns),
        transit=Spread.of(tally.transit_ns),
        gap=Spread.of(tally.gap_ns),
        proxy_cpu_s=proxy_s,
        foreign_s=foreign_s,
        harness_cpu_s=after.harness_s - before.harness_s,
        rss_before_bytes=rss_before,
        rss_after_bytes=rss_after,
    )


def parse_plan(argv: Sequence[str] | None = None) -> Plan:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loadgen",
        description="Bounded load on a mock backend, or on a proxy in front of it; prints one line of JSON.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    default = Plan(target="")
    add("--target", required=True, help="base URL, http only")
    add("--shape", choices=("closed", "open", "idle"), default=default.shape, help="shape of the load")
    add("--clients", type=int, default=default.clients, help="connections; for open: at most so many at once")
    add("--rate", type=float, default=default.rate, help="requests per second of an open load")
    add("--chunks", type=int, default=default.chunks, help="chunks of a stream; 0: one JSON answer")
    add("--interval-us", type=int, default=default.interval_us, help="microseconds between chunks (not for idle)")
    add("--warmup-s", type=float, default=default.warmup_s, help="seconds between the ramp and the window")
    add("--seconds", type=float, default=default.seconds, help="length of the window")
    add("--proxy-pid", type=int, default=default.proxy_pid, help="whose CPU time and memory to read; 0: nobody's")
    add("--mock-pid", type=int, default=default.mock_pid, help="a mock's process, counted as harness; 0: none")
    add("--core", type=int, default=default.core, help="the proxy's own core, to see foreign load on it; -1: none")
    return Plan(**vars(parser.parse_args(argv)))


def main() -> None:
    plan = parse_plan()
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)
    try:
        proxy.raise_open_files_limit()
        result = uvloop.run(measure(plan))
    except proxy.BenchError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(orjson.dumps(result) + b"\n")


if __name__ == "__main__":
    main()
