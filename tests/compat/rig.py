"""`llmproxy serve` as a process of its own before a simulated replica, with the counts of its requests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from llmproxy.lab.simulator.replica import Replica, ReplicaOptions
from tests.e2e.processes import Served, served
from tests.e2e.proxies import is_poll, samples, until

MODEL = "sim-8b"
# Slow enough that a browser gets a stream in pieces: at full speed, it reads some answers in one.
OPTIONS = ReplicaOptions(
    model=MODEL, adapters=("lora-0",), profile="tiny", speed=0.05, noise=False, reply_tokens=(8, 24)
)
LATE_S = 10.0
"""How long after a client has ended its last request may take to be logged."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The proxy's log lines and `/metrics` counts of the requests of a client."""

    requests: tuple[dict[str, Any], ...]
    metrics: int

    @property
    def statuses(self) -> Counter[int]:
        return Counter(int(one["status"]) for one in self.requests)

    @property
    def agrees(self) -> bool:
        """Whether the metrics count as many requests as there are log lines."""
        return self.metrics == len(self.requests)

    @property
    def output_tokens(self) -> int:
        """Of answers that came to their end."""
        return sum(one.get("output_tokens") or 0 for one in self.requests if one["outcome"] == "completed")

    @property
    def without_usage(self) -> int:
        """Counts completed generations without known tokens."""
        made = [one for one in self.requests if one["outcome"] == "completed" and one["path"] in GENERATIONS]
        return sum(one.get("output_tokens") is None for one in made)


GENERATIONS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@dataclass(slots=True)
class Rig:
    """A proxy that serves, with its replica."""

    url: str
    process: Served
    replica: Replica

    async def counted(self) -> Counted:
        """Returns the counts so far, after the requests in flight have ended."""
        await until(lambda: not self.replica.in_flight, LATE_S)
        metrics = -1
        while metrics != (metrics := await self._metrics()):
            pass
        return Counted(tuple(self.process.events("request")), metrics)

    def reached(self) -> list[str]:
        """Methods and paths of the requests that reached the replica, without polls."""
        return [f"{seen.method} {seen.path}" for seen in self.replica.requests_seen if not is_poll(seen)]

    async def _metrics(self) -> int:
        async with aiohttp.ClientSession() as http, http.get(self.url + "/metrics") as page:
            return sum(int(one.value) for one in samples(await page.text(), "llmproxy_requests_total"))


@asynccontextmanager
async def rig(log: Path, *flags: str, breaks: bool = False) -> AsyncIterator[Rig]:
    """A fresh one, on free ports. With `breaks`, there is a second replica, and each stream breaks once."""
    async with AsyncExitStack() as stack:
        options = replace(OPTIONS, text="numbered", reply_tokens=(24, 24)) if breaks else OPTIONS
        replicas = [await stack.enter_async_context(Replica(options)) for _ in range(1 + breaks)]
        if breaks:
            for replica in replicas:
                # The rest of an answer is shorter, so it does not break.
                replica.faults.set("reset", after_tokens=13)
        backends = [word for replica in replicas for word in ("--backend", replica.url)]
        process = await stack.enter_async_context(served(log, "--port", "0", *backends, *flags))
        yield Rig(await process.url(), process, replicas[0])


def last_json(text: str) -> dict[str, Any]:
    """The last line that is a JSON object."""
    lines = [line for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found
