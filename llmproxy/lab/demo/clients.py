"""The traffic of the demo: clients of three bands with random arrivals, and the outcomes of their requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import NamedTuple

import aiohttp

MODEL = "sim-8b"
ADAPTERS = ("sim-8b-sql", "sim-8b-support")
BANDS = ("critical", "default", "sheddable")
PRESENT_MAX = 256

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


OUTCOMES = ("answered", "retried", "refused", "broken", "lost")
"""`retried`: answered after several attempts. `refused`: status 429. `broken`: an error after the first byte. `lost`:
an error before it."""

Outcomes = Counter[str]  # Requests of one band by outcome.


class DemoClients:
    """Clients that send one request each. `sources` defines their arrivals, and may change at any time."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._random = random.Random()
        self._present = 0
        self.sources = set(CALM)
        self.bands = {band: Outcomes() for band in BANDS}

    async def come_and_go(self, group: asyncio.TaskGroup) -> None:
        """Sends requests in tasks of `group`, until cancelled."""
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
        body = {
            "model": pick.choice(source.models),
            "messages": [
                {"role": "system", "content": PREAMBLE},
                {"role": "user", "content": pick.choice(QUESTIONS)},
            ],
            "max_tokens": 24 if critical else pick.randint(80, 200),
            "stream": stream,
        }
        began = False
        headers = {"x-llm-d-inference-objective": source.band, "x-llm-d-inference-fairness-id": source.flow}
        try:
            async with self._session.post("/v1/chat/completions", json=body, headers=headers) as answer:
                async for _ in answer.content.iter_any():
                    began = stream and answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            outcomes["broken" if began else "lost"] += 1
            return
        outcomes[{200: "answered", 429: "refused"}.get(answer.status, "lost")] += 1
        outcomes["retried"] += answer.status == 200 and answer.headers.get("x-llmproxy-attempts", "1") != "1"
