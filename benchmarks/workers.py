"""Several relay workers before one scheduler: is the queue still one, and what does it cost when a worker is killed?

Real processes on loopback. Run `python -m benchmarks.workers`; it takes about half a minute. What the workers are for,
throughput, `python -m benchmarks.peers --case mix --workers 1,2` measures.

    queue  clients of three bands and of two flows, one with three times as many clients, come by all workers at once,
           and always more wait than the fleet has room for. By the decision log: how often was a lower band granted
           something while a higher one waited, and how far apart were two flows that should get the same?
    kill   a worker with its share of long streams gets SIGKILL: how soon are its leases free, which streams broke, and
           what was the longest silence of the others?

Exits with 1 where a band was passed over, a flow got more than its share, leases were free after more than a second, or
the stream of another worker broke.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fleet import Fleet, fleet, free_port, total_of
from benchmarks.overload import percentile

MODEL = "sim"
SEQS = 8
REPLICAS = 2
REPLICA_FLAGS = ("--model", MODEL, "--profile", "llama-8b-h100", "--max-num-seqs", str(SEQS), "--speed", "2")
DEFAULT_LEVEL = 0
CLIENTS = {("critical", "c"): 4, ("default", "many"): 72, ("default", "few"): 24, ("sheddable", "s"): 16}
"""Band and flow to clients. Those of `critical` pause, or nobody else would ever be served."""
PAUSE_S = 0.2
WARMUP_S = 3.0
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me how things go on."}],
    "max_tokens": 16,
    "ignore_eos": True,
}
STREAM = ASK | {"max_tokens": 30_000, "stream": True}
STREAMS = 48
FREE_MAX_S = 1.0
LOOK_S = 0.002


# --- one queue --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Queue:
    """What the decision log shows of a time in which more waited than there was room for.

    `inversions` counts grants to a band while a higher one waited. `apart_max` is by how many requests, all alike, one
    flow was ahead of the other at most, in any stretch of time in which both waited; `shares` is how many each got.
    """

    grants: int
    inversions: int
    apart_max: int
    shares: Counter[str]
    workers: int


async def asking(url: str, band: str, flow: str, over: asyncio.Event) -> None:
    """One client, one request after another, on a connection that leads to the same worker every time."""
    headers = {"x-llm-d-inference-objective": band, "x-llm-d-inference-fairness-id": flow}
    async with aiohttp.ClientSession(headers=headers) as session:
        while not over.is_set():
            async with session.post(url + "/v1/chat/completions", json=ASK) as answer:
                await answer.read()
            if band == "critical":
                await asyncio.sleep(random.uniform(0.0, PAUSE_S))


async def queue(workers: int, seconds: float) -> Queue:
    with tempfile.TemporaryDirectory(prefix="llmproxy-bench-") as folder:
        log = Path(folder) / "decisions.jsonl"
        flags = ("--workers", str(workers), "--decision-log", str(log), "--scheduling-initial-batch-limit", str(SEQS))
        async with fleet([REPLICA_FLAGS] * REPLICAS, flags) as running:
            over = asyncio.Event()
            async with asyncio.TaskGroup() as clients:
                for (band, flow), count in CLIENTS.items():
                    for _ in range(count):
                        clients.create_task(asking(running.url, band, flow, over))
                await asyncio.sleep(WARMUP_S + seconds)
                over.set()
        lines = [json.loads(line) for line in log.read_text().splitlines() if line]
    return audited([line for line in lines if "granted_at_s" in line], seconds, workers)


def audited(lines: Sequence[dict[str, Any]], seconds: float, workers: int) -> Queue:
    granted = sorted(lines, key=lambda line: float(line["granted_at_s"]))
    begin_s = granted[0]["granted_at_s"] + WARMUP_S
    granted = [line for line in granted if begin_s <= line["granted_at_s"] <= begin_s + seconds]
    inversions, apart_max, shares = 0, 0, Counter[str]()
    apart = lowest = highest = 0
    for line in granted:
        level, why = line["criticality"], line["why"]
        inversions += any(int(other) > level and count for other, count in why["waiting"].items())
        shares[line["flow"]] += 1
        if level != DEFAULT_LEVEL:
            continue
        if why["flows"] < 2:
            # A flow of which nothing waits is owed nothing.
            apart = lowest = highest = 0
            continue
        apart += 1 if line["flow"] == "many" else -1
        lowest, highest = min(lowest, apart), max(highest, apart)
        apart_max = max(apart_max, highest - lowest)
    return Queue(len(granted), inversions, apart_max, shares, workers)


# --- a worker is killed -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kill:
    """One worker's end: its streams, seconds until the scheduler had nothing of them any more, what others noticed."""

    cut: int
    free_s: float
    others_broken: int
    others_gap_s: float


class Stream:
    """A long stream on a connection of its own, and the longest silence in it since `watch`."""

    def __init__(self) -> None:
        self.broken = False
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self.gap_s = 0.0

    async def run(self, url: str) -> None:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.post(url + "/v1/chat/completions", json=STREAM) as answer:
                    while await answer.content.readany():
                        now = self._loop.time()
                        self.gap_s = max(self.gap_s, now - self._last_s)
                        self._last_s = now
                        self.begun.set()
            except aiohttp.ClientError:
                pass
        self.broken = True

    def watch(self) -> None:
        self.gap_s, self._last_s = 0.0, self._loop.time()


@asynccontextmanager
async def streaming(url: str, count: int) -> AsyncIterator[list[Stream]]:
    async with AsyncExitStack() as stack:
        streams = [Stream() for _ in range(count)]
        tasks = [asyncio.create_task(one.run(url)) for one in streams]
        stack.push_async_callback(asyncio.wait, tasks)
        for task in tasks:
            stack.callback(task.cancel)
        for one in streams:
            await one.begun.wait()
        yield streams


def workers_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def in_flight(session: aiohttp.ClientSession, admin: str) -> float:
    async with session.get(admin + "/metrics") as page:
        return total_of(await page.text(), "llmproxy_in_flight_requests")


async def kill(running: Fleet, admin: str, number: int) -> Kill:
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession() as session, streaming(running.url, STREAMS) as streams:
        victim = workers_of(running.proxy.child.pid)[0]
        for one in streams:
            one.watch()
        begun_s = loop.time()
        os.kill(victim, signal.SIGKILL)
        left, free_s = float(STREAMS), 0.0
        # The scheduler's count falls at once, and then stays: the streams of the others run on.
        while left == STREAMS or loop.time() < begun_s + 2 * FREE_MAX_S:
            seen = await in_flight(session, admin)
            if seen != left:
                left, free_s = seen, loop.time() - begun_s
            if loop.time() > begun_s + 10.0:
                break
            await asyncio.sleep(LOOK_S)
        broken = sum(one.broken for one in streams)
        gap_s = max((one.gap_s for one in streams if not one.broken), default=0.0)
        while len(running.events("worker_lost")) < number:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)
        cut = running.events("worker_lost")[number - 1]["requests"]
    return Kill(cut, free_s if left == STREAMS - cut else 10.0, broken - cut, gap_s)


async def kills(workers: int, times: int) -> list[Kill]:
    admin = f"http://127.0.0.1:{free_port()}"
    seats = str(STREAMS)
    replica_flags = [*REPLICA_FLAGS, "--max-num-seqs", seats]
    flags = (
        "--workers",
        str(workers),
        "--admin-port",
        admin.rpartition(":")[2],
        "--scheduling-initial-batch-limit",
        seats,
    )
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(fleet([replica_flags] * REPLICAS, flags, metrics=admin))
        seen = []
        for number in range(1, times + 1):
            seen.append(await kill(running, admin, number))
            while len(workers_of(running.proxy.child.pid)) < workers:  # noqa: ASYNC110 - another process starts it
                await asyncio.sleep(0.05)
        return seen


async def main() -> int:
    """Print both tables. 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="how many, one measurement each")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each look at the queue")
    parser.add_argument("--kills", type=int, default=3, help="workers to kill, of each number above 1")
    options = parser.parse_args()
    # As many as are in flight at once may each have been granted by an estimate that proves wrong.
    apart_allowed = REPLICAS * (SEQS + 2)
    missed = False
    print("| workers | grants | inversions | few | many | most apart |\n| --: | --: | --: | --: | --: | --: |")
    for workers in options.workers:
        seen = await queue(workers, options.seconds)
        missed |= bool(seen.inversions) or seen.apart_max > apart_allowed
        print(f"| {workers} | {seen.grants} | {seen.inversions} | {seen.shares['few']} | {seen.shares['many']} "
              f"| {seen.apart_max} |", flush=True)  # fmt: skip
    print("\n| workers | killed | streams cut | leases free after s, p50 | most | streams of others cut "
          "| their longest silence, s |\n| --: | --: | --: | --: | --: | --: | --: |")  # fmt: skip
    for workers in (count for count in options.workers if count > 1 and options.kills):
        ends = await kills(workers, options.kills)
        free_s = [one.free_s for one in ends]
        missed |= max(free_s) > FREE_MAX_S or any(one.others_broken for one in ends)
        print(f"| {workers} | {len(ends)} | {sum(one.cut for one in ends)} of {len(ends) * STREAMS} "
              f"| {percentile(free_s, 0.5):.3f} | {max(free_s):.3f} | {sum(one.others_broken for one in ends)} "
              f"| {max(one.others_gap_s for one in ends):.3f} |", flush=True)  # fmt: skip
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
