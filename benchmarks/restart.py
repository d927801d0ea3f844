"""The proxy is replaced under load, again and again: how many requests fail?

Real processes: simulated replicas, the proxy, and four kinds of clients, none of which tries anything twice. Every few
seconds the proxy gets SIGUSR2, starts its successor and hands over its clients. Run `python -m benchmarks.restart`; it
takes a minute. The goal is 0 failures. `--how stop` ends the proxy and starts another one instead, which is what the
figures are to be held against.

    streams  each on a kept connection, one after the other, without a pause
    small    the same with short answers in one piece
    pausing  on a kept connection too, but with pauses of random length: a request may be sent in the very moment in
             which an idle connection is closed
    new      a connection for each request, at random moments
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.fleet import Fleet, fleet, is_whole, start
from benchmarks.overload import percentile

MODEL = "sim"
REPLICA_FLAGS = ("--model", MODEL, "--profile", "llama-8b-h100", "--max-num-seqs", "32", "--speed", "2")
DRAIN_TIMEOUT_S = "30"
SMALL: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me how things go on."}],
    "max_tokens": 8,
    "ignore_eos": True,
}
STREAM = SMALL | {"max_tokens": 200, "stream": True}
CLIENTS = {"streams": 16, "small": 8, "pausing": 48}
PAUSE_MAX_S = 4.0
NEW_PER_S = 20.0
LEFT_MAX_S = 60.0


@dataclass(slots=True)
class Kind:
    """What one kind of clients saw: seconds until each answer was whole, and what went wrong otherwise."""

    whole_s: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)


class RestartClients:
    """All clients of one run. They stop between two requests, once `over` is set."""

    def __init__(self, url: str, seed: int) -> None:
        self.kinds = {name: Kind() for name in (*CLIENTS, "new")}
        self.over = asyncio.Event()
        self._url = url + "/v1/chat/completions"
        self._rng = random.Random(seed)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for name, count in CLIENTS.items():
                for _ in range(count):
                    tasks.create_task(self._one_after_the_other(name))
            while not self.over.is_set():
                await asyncio.sleep(self._rng.expovariate(NEW_PER_S))
                tasks.create_task(self._once())

    async def _one_after_the_other(self, name: str) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            while not self.over.is_set():
                await self._send(self.kinds[name], session, STREAM if name == "streams" else SMALL)
                if name == "pausing":
                    await asyncio.sleep(self._rng.uniform(0.0, PAUSE_MAX_S))

    async def _once(self) -> None:
        async with aiohttp.ClientSession() as session:
            await self._send(self.kinds["new"], session, SMALL)

    async def _send(self, kind: Kind, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        try:
            async with asyncio.timeout(60.0), session.post(self._url, json=body) as answer:
                data = await answer.read()
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            kind.failed[type(error).__name__] += 1
            # A client that is refused at once would retry at once.
            await asyncio.sleep(0.05)
            return
        if status != 200 or not is_whole(data, stream="stream" in body):
            kind.failed[f"status {status}"] += 1
            await asyncio.sleep(0.05)
            return
        kind.whole_s.append(loop.time() - sent_s)


# --- two ways to replace a process ------------------------------------------------------------------------------------


async def until(condition: Callable[[], object], limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - another process brings it about
            await asyncio.sleep(0.05)


async def by_successor(running: Fleet, pids: list[int]) -> None:
    """SIGUSR2 to the last of `pids`; its successor is appended."""
    os.kill(pids[-1], signal.SIGUSR2)
    await until(lambda: len(running.events("replaced")) >= len(pids), 60.0)
    pids.append(running.events("replaced")[len(pids) - 1]["by_pid"])


async def by_stopping(running: Fleet, pids: list[int]) -> None:
    """SIGTERM, and another process on the same port once the first has ended."""
    await running.proxy.stop()
    port = running.url.rpartition(":")[2]
    log = running.folder / f"proxy-{len(pids)}.log"
    running.proxy = await start(["serve", "--host", "127.0.0.1", "--port", port, *running.replica_urls], log)
    pids.append(running.proxy.child.pid)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def main() -> int:
    """Print what each kind of clients saw. 1 when anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the load")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two restarts")
    parser.add_argument("--how", choices=("successor", "stop"), default="successor")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    replace = by_successor if options.how == "successor" else by_stopping
    loop = asyncio.get_running_loop()
    async with fleet([REPLICA_FLAGS] * 3, ("--drain-timeout-s", DRAIN_TIMEOUT_S)) as running:
        clients, pids, took_s = RestartClients(running.url, options.seed), [running.proxy.child.pid], list[float]()
        load = asyncio.create_task(clients.run())
        end_s = loop.time() + options.seconds
        try:
            while loop.time() + options.every < end_s:
                await asyncio.sleep(options.every)
                begun_s = loop.time()
                await replace(running, pids)
                took_s.append(loop.time() - begun_s)
            await asyncio.sleep(max(0.0, end_s - loop.time()))
            clients.over.set()
            await load
        finally:
            load.cancel()
            # Only the first process is a child of this one.
            for pid in pids[1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        if options.how == "successor":
            await until(lambda: len(running.events("stopped")) >= len(pids), LEFT_MAX_S)
            await until(lambda: all(gone(pid) for pid in pids[1:]), LEFT_MAX_S)
    print(f"{len(took_s)} restarts in {options.seconds:g} s, each {percentile(took_s, 0.5):.1f} s (median) until the "
          f"next process served\n")  # fmt: skip
    print("| clients | whole | failed | seconds until whole, p50 | p99 | longest | what failed |")
    print("| --- |" + " --: |" * 5 + " --- |")
    for name, kind in clients.kinds.items():
        reasons = ", ".join(f"{count} x {what}" for what, count in kind.failed.items())
        times = kind.whole_s
        print(f"| {name} | {len(times)} | {kind.failed.total()} | {percentile(times, 0.5):.2f} "
              f"| {percentile(times, 0.99):.2f} | {max(times):.2f} | {reasons} |")  # fmt: skip
    return int(any(kind.failed for kind in clients.kinds.values()))


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
