"""A hundred thousand requests, three in ten left by their clients: does anything stay behind?

The proxy runs in this process, so that its tasks can be counted; simulated replicas and the clients are processes of
their own. After every slice of requests, once all clients are gone, one row says what is left of them. Run
`python -m benchmarks.soak`; it takes about a minute and a half on two cores. `--trace` shows where memory was taken
that was never given back, at a quarter of the speed.

`python -m benchmarks.soak --minutes 60` is the other form, by time: `llmproxy serve` as a process of its own under 70 %
of what its fleet can serve, and a fault every minute (`benchmarks/endurance/`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop

from benchmarks.endurance.load import sending_traced
from benchmarks.endurance.run import soak as soak_for
from benchmarks.fleet import free_port, is_whole, start
from benchmarks.proxy import rss_bytes
from llmproxy.app import Proxy, running
from llmproxy.config import BackendConfig, Config
from llmproxy.observe import logs

REPLICAS = 2
REPLICA_FLAGS = ("--model", "sim", "--profile", "tiny", "--max-num-seqs", "16", "--speed", "4")
CLIENTS = 64
"""More than the replicas run at once, so that some wait, and leave, in the waiting room."""
WARM_UP = 500
SETTLE_S = 20.0
UNSENT = "left before anything was sent"
GROWTH_BYTES_MAX = 50.0
"""Per request, measured after the first third: less than any object that a request could leave behind."""


# --- the clients, a process of their own ------------------------------------------------------------------------------


class SoakClients:
    """Sends requests and counts how each ended for its client; the seed decides who leaves, and when."""

    def __init__(self, url: str, requests: int, seed: int) -> None:
        self._url = url
        self._left = requests
        self._rng = random.Random(seed)
        self.ends: Counter[str] = Counter()

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        session = aiohttp.ClientSession(connector=connector, trace_configs=[sending_traced()])
        async with session, asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(self._client(session))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while self._left > 0:
            self._left -= 1
            kind = self._rng.choices(("stays", "early", "midway", "late"), (70, 10, 10, 10))[0]
            self.ends[await self._one(session, kind)] += 1

    async def _one(self, session: aiohttp.ClientSession, kind: str) -> str:
        stream = kind == "midway" or self._rng.random() < 0.5
        body = {
            "model": "sim",
            "messages": [{"role": "user", "content": f"Count to {self._rng.randrange(1000)}"}],
            "max_tokens": 200 if kind == "midway" else 4,
            "ignore_eos": True,
            "stream": stream,
        }
        # A connection that is closed right behind the answer, not kept for the next request.
        headers = {"connection": "close"} if kind == "late" else {}
        sent: list[bool] = []
        leaves_after_s = self._rng.uniform(0.001, 0.03) if kind == "early" else None
        try:
            async with (
                asyncio.timeout(leaves_after_s),
                session.post(
                    self._url + "/v1/chat/completions", json=body, headers=headers, trace_request_ctx=sent
                ) as answer,
            ):
                if kind == "midway":
                    await answer.content.readany()
                    answer.close()
                    return "left midway"
                data = await answer.read()
        except TimeoutError:
            return "left early" if sent else UNSENT
        except aiohttp.ClientError as error:
            return f"failed: {type(error).__name__}"
        return "whole" if answer.status == 200 and is_whole(data, stream=stream) else f"failed: {answer.status}"


async def clients(url: str, requests: int, seed: int) -> Counter[str]:
    """Run one slice of requests in a process of its own; how many ended in which way."""
    arguments = ["-m", "benchmarks.soak", "--clients-of", url, "--requests", str(requests), "--seed", str(seed)]
    child = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    output, _ = await child.communicate()
    if child.returncode:
        raise RuntimeError(f"the clients ended with status {child.returncode}")
    return Counter(json.loads(output))


# --- the proxy, here --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Left:
    """What is there of requests at one moment."""

    tasks: int
    open_requests: int
    leases: int
    in_flight: int
    queued: int
    ended: int

    @classmethod
    def of(cls, proxy: Proxy) -> Left:
        page = proxy.metrics.page().decode()

        def total(name: str) -> int:
            return int(sum(map(float, re.findall(rf"^llmproxy_{name}{{.*}} (\S+)$", page, re.MULTILINE))))

        return cls(
            tasks=len(asyncio.all_tasks()),
            open_requests=proxy.handler.open_requests,
            leases=proxy.dispatcher.leases,
            in_flight=total("in_flight_requests"),
            queued=total("queued_requests"),
            ended=total("requests_total"),
        )

    @property
    def nothing(self) -> bool:
        return not (self.open_requests or self.leases or self.in_flight or self.queued)


@asynccontextmanager
async def replicas_and_proxy() -> AsyncIterator[Proxy]:
    """Replicas, and a proxy before them that has heard of all."""
    with tempfile.TemporaryDirectory(prefix="llmproxy-soak-") as folder:
        ports = [free_port() for _ in range(REPLICAS)]
        replicas = [await start(["replica", "--port", str(port), *REPLICA_FLAGS], Path(folder) / f"{port}.log")
                    for port in ports]  # fmt: skip
        try:
            backends = tuple(BackendConfig(url=f"http://127.0.0.1:{port}") for port in ports)
            async with running(Config(host="127.0.0.1", port=0, backends=backends)) as proxy:
                await until(lambda: proxy.metrics.page().count(b"llmproxy_backend_running{") == REPLICAS)
                yield proxy
        finally:
            for replica in replicas:
                await replica.stop()


async def until(condition: Callable[[], bool]) -> bool:
    """Wait for something that should come about by itself; False when it has not within SETTLE_S."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + SETTLE_S
    while not condition():
        if loop.time() > end_s:
            return False
        await asyncio.sleep(0.1)
    return True


async def what_is_left(proxy: Proxy, goal: Left) -> Left:
    """What is there once nothing but `goal` is, or what is still there when that never comes about."""
    await until(lambda: Left.of(proxy) == goal)
    return Left.of(proxy)


async def soak(requests: int, slices: int, seed: int) -> bool:
    """Print one row for each slice. True when nothing was left behind, and nothing was lost."""
    print("| sent | seconds | whole | left early | left midway | failed | outcomes counted | in flight | leases "
          "| queued | tasks (start) | RSS MB |")  # fmt: skip
    print("|" + " --: |" * 12)
    ends: Counter[str] = Counter()
    memory: list[int] = []
    fine = True
    loop = asyncio.get_running_loop()
    async with replicas_and_proxy() as proxy:
        # The first requests load what is loaded once, and open what stays open.
        ends += await clients(proxy.url, WARM_UP, seed)
        await until(lambda: Left.of(proxy).nothing)
        start = Left.of(proxy)
        for index in range(slices):
            began_s = loop.time()
            ends += await clients(proxy.url, requests // slices, seed + index + 1)
            took_s = loop.time() - began_s
            sent = ends.total() - ends[UNSENT]
            left = await what_is_left(proxy, Left(start.tasks, 0, 0, 0, 0, sent))
            memory.append(rss_bytes([os.getpid()]))
            failed = sum(count for end, count in ends.items() if end.startswith("failed"))
            fine = fine and left.nothing and left.tasks == start.tasks and left.ended == sent and not failed
            print(f"| {sent} | {took_s:.0f} | {ends['whole']} | {ends['left early']} | {ends['left midway']} "
                  f"| {failed} | {left.ended} | {left.in_flight} | {left.leases} | {left.queued} "
                  f"| {left.tasks} ({start.tasks}) | {memory[-1] / 1e6:.1f} |", flush=True)  # fmt: skip
        outcomes = Counter[str]()
        for outcome, count in re.findall(
            r'^llmproxy_requests_total{.*outcome="(\w+)"} (\S+)$', proxy.metrics.page().decode(), re.MULTILINE
        ):
            outcomes[outcome] += int(float(count))
    third = len(memory) // 3
    growth_bytes = (memory[-1] - memory[third]) / max(1, (len(memory) - 1 - third) * (requests // slices))
    print(f"\nas clients saw it: {dict(ends)}\nas the proxy counted it: {dict(outcomes)}")
    print(f"memory after the first third grew by {growth_bytes:.1f} bytes per request")
    return fine and growth_bytes < GROWTH_BYTES_MAX


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--slices", type=int, default=10, help="rows of the table")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--minutes", type=float, help="the timed form: load at 70 %% of capacity, a fault every minute")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the timed form writes soak.json")
    parser.add_argument("--trace", action="store_true", help="show which lines hold memory taken since the start")
    parser.add_argument("--clients-of", metavar="URL", help="be the clients of a proxy, as a child of this benchmark")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.clients_of:
            sending = SoakClients(options.clients_of, options.requests, options.seed)
            runner.run(sending.run())
            print(json.dumps(sending.ends))
            return 0
        if options.minutes is not None:
            return 0 if runner.run(soak_for(options.minutes, options.seed, options.out)) else 1
        logs.configure("json", "error")
        if options.trace:
            tracemalloc.start(8)
        fine = runner.run(soak(options.requests, options.slices, options.seed))
    if options.trace:
        for line in tracemalloc.take_snapshot().statistics("lineno")[:25]:
            print(line)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
