"""A running fleet, what its pages say, and the checks of a scene."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fleet import Fleet, fleet, total_of, value_of
from benchmarks.small_fleets.load import Clients, Work

SPEED = 0.4
"""Of the replicas: slow enough that two cores are not what bounds a small fleet."""


@dataclass(frozen=True, slots=True)
class Check:
    """One figure of a scene, which is well from `least` to `most`. `note` says what was seen beside it."""

    what: str
    value: float
    least: float = -inf
    most: float = inf
    note: str = ""

    @property
    def well(self) -> bool:
        return self.least <= self.value <= self.most


def true(what: str, holds: bool, note: str = "") -> Check:
    """A check of a statement: 1 where it holds."""
    return Check(what, float(holds), least=1.0, note=note)


@dataclass(slots=True)
class Stage:
    """A fleet and a session for its clients and pages."""

    fleet: Fleet
    session: aiohttp.ClientSession

    def proxy(self) -> str:
        return self.fleet.url

    def clients(self, work: Work, seed: int = 1) -> Clients:
        return Clients(self.session, work, seed)

    async def json(self, path: str) -> dict[str, Any]:
        async with self.session.get(self.fleet.url + path) as answer:
            document: dict[str, Any] = await answer.json()
            return document

    async def text(self, url: str) -> str:
        async with self.session.get(url) as answer:
            return await answer.text()

    async def sentence(self) -> str:
        """The headline of the page."""
        return str((await self.json("/debug/live"))["summary"]["text"])

    async def limits(self) -> list[int]:
        """Places that the proxy believes each replica to have, in the order of the fleet; 0 where it says nothing."""
        page = await self.text(self.fleet.url + "/metrics")
        names = [self.fleet.name(index) for index in range(len(self.fleet.replicas))]
        return [int(value_of(page, f'llmproxy_backend_limit{{backend="{name}"}}') or 0) for name in names]

    async def generated(self) -> float:
        """Tokens that all replicas have generated, by their own counters."""
        pages = await asyncio.gather(*(self.text(url + "/metrics") for url in self.fleet.replica_urls))
        return sum(total_of(page, "vllm:generation_tokens_total") for page in pages)

    async def tokens_per_s(self, seconds: float) -> float:
        """Tokens per second that the replicas generate over the next `seconds`."""
        loop = asyncio.get_running_loop()
        before, began_s = await self.generated(), loop.time()
        await asyncio.sleep(seconds)
        return (await self.generated() - before) / (loop.time() - began_s)

    async def fault(self, index: int, kind: str | None, **more: Any) -> None:
        """Switch a fault of a replica on, or off with None."""
        url = self.fleet.replica_urls[index] + "/sim/fault"
        async with self.session.post(url, json={"kind": kind, **more}) as answer:
            answer.raise_for_status()

    async def refuses(self, index: int) -> bool:
        """Whether a replica refuses connections. A simulated replica whose engine died closes its port and runs on."""
        try:
            await self.text(self.fleet.replica_urls[index] + "/health")
        except aiohttp.ClientConnectionError:
            return True
        return False

    def named(self, event: str, index: int) -> int:
        """How many log lines of one kind name a replica."""
        return sum(entry.get("backend") == self.fleet.name(index) for entry in self.fleet.events(event))

    async def soon(self, words: Sequence[str], within_s: float) -> tuple[float, str]:
        """Seconds until the headline has all `words` (inf beyond `within_s`), and the last headline."""
        loop = asyncio.get_running_loop()
        began_s, text = loop.time(), ""
        while loop.time() < began_s + within_s:
            text = await self.sentence()
            if all(word in text for word in words):
                return loop.time() - began_s, text
            await asyncio.sleep(0.2)
        return inf, text


@asynccontextmanager
async def staged(
    sizes: Sequence[int], *proxy_flags: str, speed: float = SPEED, tree: Path | None = None
) -> AsyncIterator[Stage]:
    """A fleet of replicas with `sizes` places behind a proxy of the checkout `tree` (this one if None)."""
    flags = [["--max-num-seqs", str(size), "--speed", str(speed)] for size in sizes]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, fleet(flags, proxy_flags, tree=tree) as running:
        yield Stage(running, session)
