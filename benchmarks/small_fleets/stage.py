"""A running fleet, its pages, and the checks of a scene."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path

import aiohttp

from benchmarks.fleet import Fleet, fleet, total_of, value_of
from benchmarks.load import Clients, Work

SPEED = 0.4  # The speed of the replicas. They are so slow that two cores do not limit a small fleet.


@dataclass(frozen=True, slots=True)
class Check:
    """A figure of a scene and its bounds. `note` has further observations."""

    what: str
    value: float
    least: float = -inf
    most: float = inf
    note: str = ""

    @property
    def met(self) -> bool:
        return self.least <= self.value <= self.most


def true(what: str, holds: bool, note: str = "") -> Check:
    """Returns the check of a statement, whose figure is 1 if it holds and otherwise 0."""
    return Check(what, float(holds), least=1.0, note=note)


@dataclass(slots=True)
class Stage:
    """A running fleet, and functions that read its pages."""

    fleet: Fleet

    def proxy(self) -> str:
        return self.fleet.url

    def clients(self, work: Work, seed: int = 1) -> Clients:
        return Clients(self.fleet.session, work, seed)

    async def limits(self) -> list[int]:
        """Returns the batch limit that the proxy has for each replica, in the order of the fleet; 0 without a limit."""
        page = await self.fleet.metrics()
        names = [self.fleet.name(index) for index in range(len(self.fleet.replicas))]
        return [int(value_of(page, f'llmproxy_backend_limit{{backend="{name}"}}') or 0) for name in names]

    async def generated(self) -> float:
        """Returns the tokens that all replicas have generated, from their own counters."""
        pages = await asyncio.gather(*(self.fleet.text(url + "/metrics") for url in self.fleet.replica_urls))
        return sum(total_of(page, "vllm:generation_tokens_total") for page in pages)

    async def tokens_per_s(self, seconds: float) -> float:
        """Returns the tokens per second that the replicas generate during the next `seconds`."""
        loop = asyncio.get_running_loop()
        before, began_s = await self.generated(), loop.time()
        await asyncio.sleep(seconds)
        return (await self.generated() - before) / (loop.time() - began_s)

    async def refuses(self, index: int) -> bool:
        """Returns whether a replica refuses connections.

        A simulated replica whose engine died closes its port and keeps running.
        """
        try:
            async with self.fleet.control.get(self.fleet.replica_urls[index] + "/health"):
                return False
        except aiohttp.ClientConnectionError:
            return True

    def named(self, event: str, index: int) -> int:
        """Returns the number of log lines of one event about a replica."""
        return sum(entry.get("backend") == self.fleet.name(index) for entry in self.fleet.events(event))

    async def soon(self, words: Sequence[str], within_s: float) -> tuple[float, str]:
        """Returns the seconds until the summary of the page has all `words`, and the last summary.

        The seconds are infinite if `within_s` passes first.
        """
        loop = asyncio.get_running_loop()
        began_s, text = loop.time(), ""
        while loop.time() < began_s + within_s:
            text = str((await self.fleet.json("/debug/live"))["summary"]["text"])
            if all(word in text for word in words):
                return loop.time() - began_s, text
            await asyncio.sleep(0.2)
        return inf, text


@asynccontextmanager
async def staged(sizes: Sequence[int], *, speed: float = SPEED, tree: Path | None = None) -> AsyncIterator[Stage]:
    """Runs replicas with `sizes` slots behind a proxy, during the block.

    `tree` is the checkout with the code of the proxy; None for this checkout.
    """
    flags = [["--max-num-seqs", str(size), "--speed", str(speed)] for size in sizes]
    async with fleet(flags, tree=tree) as running:
        yield Stage(running)
