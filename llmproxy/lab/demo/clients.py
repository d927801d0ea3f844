"""The traffic of the demo: clients of three bands with random arrivals, and the outcomes of their requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp

MODEL = "sim-8b"
ADAPTERS = ("sim-8b-sql", "sim-8b-support")
BANDS = ("critical", "default", "sheddable")
PRESENT_MAX = 256
RECENT_S = 10.0
"""Window of the displayed TTFT quantiles."""

QUESTIONS = (
    "What is a KV-cache?",
    "Why does a batch of one waste a GPU?",
    "Write a query that counts orders by month.",
    "A customer's parcel is late. What do we answer?",
    "Explain continuous batching to a child.",
)
PREAMBLE = (
    "You are the assistant of a small shop that sells bicycles. Be brief, be kind, and never invent a price. " * 20
)


class Source(NamedTuple):
    """A Poisson process of requests with `rate_per_s`, of one band and one tenant (`flow`)."""

    band: str
    flow: str
    rate_per_s: float
    models: tuple[str, ...] = (MODEL, *ADAPTERS)


CALM = (
    Source("critical", "acme", 1.0),
    Source("default", "acme", 1.0),
    Source("default", "globex", 1.0),
    Source("sheddable", "batch", 1.0),
)
"""The base traffic. Three replicas can serve about ten requests a second."""


@dataclass(slots=True)
class BandOutcomes:
    """Outcomes of the requests of one band."""

    answered: int = 0
    retried: int = 0
    """Answered requests that needed more than one attempt."""
    refused: int = 0
    """Requests with a 429."""
    broken: int = 0
    """Streams that ended in an error after their first byte."""
    lost: int = 0
    """Requests that got only an error."""
    ttft: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=1000))
    """(Time, TTFT) of the latest streams, in seconds."""

    def recent_ttft_s(self) -> list[float]:
        """Returns the TTFTs of the last RECENT_S seconds, sorted."""
        since = time.monotonic() - RECENT_S
        return sorted(ttft_s for at, ttft_s in self.ttft if at >= since)


class DemoClients:
    """Clients that send one request each, as `sources` generate them. `sources` may change at any time."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._random = random.Random()
        self._present = 0
        self.sources = set(CALM)
        self.bands = {band: BandOutcomes() for band in BANDS}
        self.adapters: dict[str, Counter[str]] = {adapter: Counter() for adapter in ADAPTERS}

    async def come_and_go(self, group: asyncio.TaskGroup) -> None:
        """Send requests in tasks of `group`, until cancelled."""
        while True:
            # Poisson processes add up: draw the next arrival of all sources, then its source.
            sources = list(self.sources)
            await asyncio.sleep(self._random.expovariate(sum(source.rate_per_s for source in sources)))
            (source,) = self._random.choices(sources, [source.rate_per_s for source in sources])
            if source in self.sources and self._present < PRESENT_MAX:
                self._present += 1
                group.create_task(self._visit(source)).add_done_callback(self._left)

    def _left(self, _: asyncio.Task[None]) -> None:
        self._present -= 1

    async def _visit(self, source: Source) -> None:
        pick, outcomes = self._random, self.bands[source.band]
        critical = source.band == "critical"
        stream = critical or pick.random() < 0.3
        model = pick.choice(source.models)
        body = {
            "model": model,
            "messages": [
                {"role": "system", "content": PREAMBLE},
                {"role": "user", "content": pick.choice(QUESTIONS)},
            ],
            "max_tokens": 24 if critical else pick.randint(80, 200),
            "stream": stream,
        }
        sent_s, began = time.monotonic(), False
        headers = {"x-llm-d-inference-objective": source.band, "x-llm-d-inference-fairness-id": source.flow}
        try:
            async with self._session.post("/v1/chat/completions", json=body, headers=headers) as answer:
                async for _ in answer.content.iter_any():
                    if stream and answer.status == 200 and not began:
                        began = True
                        now_s = time.monotonic()
                        outcomes.ttft.append((now_s, now_s - sent_s))
        except (aiohttp.ClientError, TimeoutError):
            if began:
                outcomes.broken += 1
            else:
                outcomes.lost += 1
            return
        if answer.status == 429:
            outcomes.refused += 1
        elif answer.status != 200:
            outcomes.lost += 1
        else:
            outcomes.answered += 1
            outcomes.retried += answer.headers.get("x-llmproxy-attempts", "1") != "1"
            if model in self.adapters:
                self.adapters[model][answer.headers.get("x-llmproxy-backend", "")] += 1
