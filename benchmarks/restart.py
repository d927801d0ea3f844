"""The proxy is replaced, or its configuration rewritten, again and again under load: failed requests.

    python -m benchmarks.restart [--how reload]

The fleet has simulated replicas, the proxy, and four kinds of clients without retries. The goal is 0 failures.

    --how successor  Every five seconds the proxy gets SIGUSR2, starts its successor and hands its sockets over.
    --how stop       Every five seconds the proxy is ended and another process is started, for comparison.
    --how reload     Every second the configuration file is written: backends, weights, limits and retries change. A
                     fifth of the files is invalid, and some files are written in two halves.

    streams  each client sends one stream after the other on one connection
    small    each client sends one short request without a stream after the other on one connection
    pausing  as small, with random pauses: a request may be sent at the moment when an idle connection is closed
    new      requests at random moments, each on a new connection
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import aiohttp

from benchmarks.fleet import Fleet, fleet, until
from benchmarks.load import Clients, Work, percentile
from benchmarks.table import Table

REPLICAS = 3
FLAGS = ("--model", "sim", "--profile", "llama-8b-h100", "--max-num-seqs", "32", "--speed", "2")
PROXY_FLAGS = ("--drain-timeout-s", "30", "--reload", "watch")
SMALL = Work(stream=False, tokens=(8,), words=5)
KINDS = {
    "streams": (16, Work(tokens=(200,), words=5)),
    "small": (8, SMALL),
    "pausing": (48, Work(stream=False, tokens=(8,), words=5, pause_s=4.0)),
}
NEW_PER_S = 20.0
EVERY_S = {"successor": 5.0, "stop": 5.0, "reload": 1.0}
INVALID = (
    "backends: [http://127.0.0.1:1\n",
    "backends: [http://127.0.0.1:1]\nquue: {max_wait_s: 1}\n",
    "backends: []\n",
    "port: many\n",
    "",
)


class Changes:
    """Replaces the process and the configuration of the proxy."""

    def __init__(self, running: Fleet, seed: int) -> None:
        self._running = running
        self._rng = random.Random(seed)
        self._wanted = sorted(running.replica_urls)
        self._pids = [running.proxy.child.pid]

    async def successor(self) -> None:
        """Sends SIGUSR2 to the proxy, and waits until its successor serves."""
        os.kill(self._pids[-1], signal.SIGUSR2)
        await until(lambda: len(self._running.events("replaced")) >= len(self._pids))
        self._pids.append(self._running.events("replaced")[len(self._pids) - 1]["by_pid"])

    async def stop(self) -> None:
        """Sends SIGTERM to the proxy, and starts another process on the same port when the first has ended."""
        await self._running.proxy.stop()
        await self._running.start_proxy(PROXY_FLAGS)

    async def reload(self, *, valid: bool = False) -> None:
        """Writes a random configuration file, which may be invalid unless `valid`."""
        rng, running = self._rng, self._running
        if not valid and rng.random() < 0.2:
            running.write_text(rng.choice(INVALID))
            return
        self._wanted = sorted(rng.sample(running.replica_urls, rng.randint(1, REPLICAS)))
        file = running.write(
            backends=[{"url": url, "max_in_flight": rng.choice((None, 24, 32))} for url in self._wanted],
            scheduling={"weights": {"sim": rng.choice((1.0, 2.0, 5.0))}},
            retry={"extra_attempts": rng.choice((1, 2, 3))},
            queue={"max_wait_s": rng.choice((60.0, 120.0)), "requests_max": rng.choice((5_000, 20_000))},
        )
        if rng.random() < 0.3:
            # As an editor does that writes in place.
            text = file.read_text()
            file.write_text(text[: len(text) // 2])
            await asyncio.sleep(0.05)
            file.write_text(text)

    async def as_wanted(self) -> bool:
        """Returns whether the proxy has the backends of the last valid file."""
        try:
            page = await self._running.json("/admin/backends")
        except aiohttp.ClientError:
            # A new process may not listen yet.
            return False
        return sorted(one["url"] for one in page["backends"]) == self._wanted

    async def end(self) -> None:
        """Ends the successors, which are not children of this process."""
        for pid in self._pids[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self._pids[1:]))


async def clients_of(stack: AsyncExitStack, url: str, seed: int) -> dict[str, list[Clients]]:
    """Starts all clients. Each client that sends one request after the other has its own connection."""
    found: dict[str, list[Clients]] = {name: [] for name in (*KINDS, "new")}

    async def started(name: str, work: Work, connector: aiohttp.TCPConnector) -> Clients:
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        clients = Clients(session, work, seed + len(found[name]))
        found[name].append(await stack.enter_async_context(clients))
        return clients

    for name, (count, work) in KINDS.items():
        for _ in range(count):
            (await started(name, work, aiohttp.TCPConnector(limit=1))).closed(1, lambda: url)
    new = await started("new", SMALL, aiohttp.TCPConnector(limit=0, force_close=True))
    new.poisson(NEW_PER_S, lambda: url)
    return found


async def main() -> int:
    """Prints a row for each kind of clients. Returns 1 if a request failed, or a reload did not take effect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the load")
    parser.add_argument("--how", choices=tuple(EVERY_S), default="successor")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    loop, took_s = asyncio.get_running_loop(), list[float]()
    async with fleet([FLAGS] * REPLICAS, PROXY_FLAGS) as running, AsyncExitStack() as stack:
        changes = Changes(running, options.seed)
        stack.push_async_callback(changes.end)
        change: Callable[[], Awaitable[None]] = getattr(changes, options.how)
        every = await clients_of(stack, running.url, options.seed)
        end_s = loop.time() + options.seconds
        while loop.time() + EVERY_S[options.how] < end_s:
            await asyncio.sleep(EVERY_S[options.how])
            begun_s = loop.time()
            await change()
            took_s.append(loop.time() - begun_s)
        if options.how == "reload":
            await changes.reload(valid=True)
        await asyncio.gather(*(clients.ended() for some in every.values() for clients in some))
        await until(changes.as_wanted)
    print(f"{len(took_s)} changes by {options.how}, each took {percentile(took_s, 0.5):.1f} s (median)\n")
    table = Table("clients", "whole", "failed", "seconds until whole, p50", "p99", "longest", "failures")
    failed = Counter[str]()
    for name, some in every.items():
        seen = [one for clients in some for one in clients.seen]
        ends = Counter(one.outcome for one in seen if not one.whole)
        times_s = [(one.ended_s or 0.0) - one.sent_s for one in seen if one.whole]
        spread = (percentile(times_s, 0.5), percentile(times_s, 0.99), max(times_s))
        reasons = ", ".join(f"{count} x {end}" for end, count in ends.items())
        table.row(name, len(times_s), ends.total(), *(f"{one:.2f}" for one in spread), reasons)
        failed += ends
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
