"""The cost of open pages for other requests: JSON requests at a constant rate, without and with viewers.

    python -m benchmarks.viewers

A viewer requests the history when it opens, and then `/debug/live` once a second, compressed, as the page does. Periods
without and with viewers alternate at one proxy. *Of a core* is the CPU time of the proxy divided by wall time. *More*
is the difference between neighbouring periods. *Not sent* are requests for which no client was free, because the
machine is too slow for the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

import aiohttp

from benchmarks import proxy
from benchmarks.peers.cases import Case
from benchmarks.peers.competitors import llmproxy
from benchmarks.peers.measure import Bench, Running, Window
from benchmarks.table import Table

LOAD = Case(name="json", title="JSON requests", clients=64, rate=500.0, warmup_s=1.0)
HISTORY = "/debug/history?span=300&columns=fleet/,band/"


async def view(url: str, count: int) -> None:
    """Opens `count` pages, and keeps them open until the task is cancelled."""

    async def page(session: aiohttp.ClientSession) -> None:
        await asyncio.sleep(random.random())
        path = HISTORY
        while True:
            async with session.get(path, raise_for_status=True) as answer:
                await answer.read()
            path = "/debug/live"
            await asyncio.sleep(1.0)

    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(aiohttp.ClientSession(url)) for _ in range(count)]
        await asyncio.gather(*(page(session) for session in sessions))


async def window(bench: Bench, served: Running, count: int, load: Case, seconds: float) -> Window:
    viewers = asyncio.create_task(view(f"http://127.0.0.1:{served.port}", count))
    try:
        return await asyncio.to_thread(bench.measure, load, served, seconds)
    finally:
        viewers.cancel()
        await asyncio.gather(viewers, return_exceptions=True)


async def measure(bench: Bench, served: Running, options: argparse.Namespace) -> None:
    counts, load = (0, *options.viewers), replace(LOAD, rate=options.rate)
    found: dict[int, list[Window]] = {count: [] for count in counts}
    for turn in range(options.rounds):
        for count in counts if turn % 2 == 0 else counts[::-1]:
            found[count].append(await window(bench, served, count, load, options.seconds))
    table = Table("viewers", "of a core", "more, points", "p50 ms", "p99 ms", "failures", "not sent", texts=0)
    shares = {count: [(one.cpu_s or 0.0) / one.window_s for one in windows] for count, windows in found.items()}
    for count, windows in found.items():
        more = [100 * (share - base) for share, base in zip(shares[count], shares[0], strict=True)]
        spreads = [one.latency for one in windows if one.latency is not None]
        times = (_spread([getattr(one, name) / 1e3 for one in spreads]) for name in ("p50_us", "p99_us"))
        failures = sum(sum(one.failures.values()) for one in windows)
        skipped = sum(one.skipped for one in windows)
        table.row(count, f"{median(shares[count]):.1%}", _spread(more), *times, failures, skipped)


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--viewers", type=int, nargs="*", default=[10, 50])
    parser.add_argument("--rate", type=float, default=LOAD.rate, help="requests per second")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a window")
    options = parser.parse_args()
    proxy.raise_open_files_limit()
    everywhere = proxy.Cores(None, frozenset(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        bench = Bench(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmproxy-viewers-"))), everywhere)
        stack.callback(bench.stop)
        served = bench.start(llmproxy("llmproxy", proxy.ROOT))
        assert served.child is not None
        stack.callback(served.child.stop)
        asyncio.run(measure(bench, served, options))


if __name__ == "__main__":
    main()
