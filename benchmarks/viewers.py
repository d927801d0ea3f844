"""What people who look at the page cost the requests of others: 500 JSON requests a second, without and with viewers.

    .venv/bin/python -m benchmarks.viewers

A viewer asks for `/debug/live` once a second, packed, as the page does, and for the past when it comes. Windows without
and with viewers alternate over one proxy. *Of a core* is the CPU time of the proxy by wall time; the difference of
neighbouring windows is what the viewers cost. *Not sent* are requests whose turn came while every client waited: this
machine was too slow for the rate. It takes about two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp

from benchmarks import proxy
from benchmarks.peers.cases import Case
from benchmarks.peers.competitors import llmproxy
from benchmarks.peers.measure import Bench, Running, Window

LOAD = Case(name="json", title="JSON requests", clients=64, rate=500.0, warmup_s=1.0)
COLUMNS = "fleet/,band/"


class Viewers:
    """So many pages that are open."""

    def __init__(self, url: str, count: int) -> None:
        self.read_bytes = 0
        self._url = url
        self._count = count

    async def look(self) -> None:
        """Until cancelled."""
        async with AsyncExitStack() as stack:
            pages = [await stack.enter_async_context(aiohttp.ClientSession(self._url)) for _ in range(self._count)]
            await asyncio.gather(*(self._page(page) for page in pages))

    async def _page(self, page: aiohttp.ClientSession) -> None:
        await asyncio.sleep(random.random())
        await self._read(page, f"/debug/history?span=300&columns={COLUMNS}")
        while True:
            await self._read(page, "/debug/live")
            await asyncio.sleep(1.0)

    async def _read(self, page: aiohttp.ClientSession, path: str) -> None:
        async with page.get(path) as answer:
            self.read_bytes += len(await answer.read())


async def window(bench: Bench, served: Running, viewers: Viewers, load: Case, seconds: float) -> Window:
    looks = asyncio.create_task(viewers.look())
    try:
        return await asyncio.to_thread(bench.measure, load, served, seconds)
    finally:
        looks.cancel()
        await asyncio.gather(looks, return_exceptions=True)


async def measure(bench: Bench, served: Running, options: argparse.Namespace) -> None:
    url = f"http://127.0.0.1:{served.port}"
    counts, load = (0, *options.viewers), replace(LOAD, rate=options.rate)
    found: dict[int, list[Window]] = {count: [] for count in counts}
    for turn in range(options.rounds):
        for count in counts if turn % 2 == 0 else counts[::-1]:
            viewers = Viewers(url, count)
            found[count].append(await window(bench, served, viewers, load, options.seconds))
            print(f"{count} viewers: {viewers.read_bytes / 1e3:,.0f} kB read", flush=True)
    print(
        "\n| viewers | of a core | more than without | latency p50 | p99 ms | failures | not sent |\n"
        + "| --: " * 7
        + "|"
    )
    alone = [_share(one) for one in found[0]]
    for count in counts:
        shares = [_share(one) for one in found[count]]
        more = [share - base for share, base in zip(shares, alone, strict=True)]
        spreads = [one.latency for one in found[count] if one.latency is not None]
        failures = sum(sum(one.failures.values()) for one in found[count])
        skipped = sum(one.skipped for one in found[count])
        print(
            f"| {count} | {statistics.median(shares):.1%} | {statistics.median(more):+.1%} "
            f"({min(more):+.1%} to {max(more):+.1%}) | {statistics.median(s.p50_us for s in spreads) / 1e3:.2f} "
            f"| {statistics.median(s.p99_us for s in spreads) / 1e3:.2f} "
            f"({min(s.p99_us for s in spreads) / 1e3:.1f} to {max(s.p99_us for s in spreads) / 1e3:.1f}) "
            f"| {failures} | {skipped} |"
        )


def _share(one: Window) -> float:
    return (one.cpu_s or 0.0) / one.window_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.viewers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--viewers", type=int, nargs="*", default=[10, 50])
    parser.add_argument("--rate", type=float, default=LOAD.rate, help="requests a second; fewer where others work too")
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
