"""A poller before a server that answers as a recorded one does, on a clock that the test advances."""

from __future__ import annotations

import asyncio
import gzip
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import pytest
from aiohttp import web

from llmproxy.backends.events import BackendObserver
from llmproxy.backends.poller import Poller
from llmproxy.config import PollConfig
from llmproxy.core.domain import Listing, Reading, Trouble
from llmproxy.upstream.client import HttpUpstream

MODELS = '{"object":"list","data":[{"id":"tiny","parent":null,"max_model_len":4096},{"id":"lora-0","parent":"tiny"}]}'


def load(running: int, waiting: int) -> str:
    return (
        f'vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}.0\n'
        f'vllm:num_requests_waiting{{engine="0",model_name="tiny"}} {waiting}.0\n'
    )


NEEDED = load(3, 1)
PAGE = "# HELP python_info Python platform information\npython_info 1.0\n" + NEEDED + "x_total 1.0\n" * 5000
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def saying(text: str = "", status: int = 200) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text, status=status, headers={"location": "/"} if status == 307 else None)

    return answer


async def hang(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def no_status(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"HTTP/1.1 000 OK\r\ncontent-length: 0\r\n\r\n")
    request.transport.close()
    return web.Response()


async def never_end(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"x" * 65536)


BOMB = gzip.compress(bytes(64 << 20))


async def explode(_: web.Request) -> web.StreamResponse:
    return web.Response(body=BOMB, headers={"content-encoding": "gzip"})


class FakeVllm:
    """Answers by path; other paths answer 404. `asked` keeps the paths in order."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {
            "/health": saying(),
            "/v1/models": saying(MODELS),
            "/metrics/": saying(NEEDED),
            "/metrics": saying(PAGE),
        }
        self.asked: list[str] = []
        self.requests: list[web.Request] = []

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        self.requests.append(request)
        answer = self.answers.get(request.path)
        return web.Response(status=404) if answer is None else await answer(request)


@dataclass
class Times:
    """`PollConfig`, but mutable and without its limits."""

    interval_s: float = 0.2
    page_interval_s: float = 1.0
    models_interval_s: float = 2.0
    timeout_s: float = 5.0


@dataclass
class Sink(BackendObserver):
    """Records its calls; `seen` has one word for each."""

    seen: list[str] = field(default_factory=list)
    listings: list[Listing] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    limit_published: asyncio.Event = field(default_factory=asyncio.Event)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    def listed(self, backend: str, listing: Listing) -> None:
        self._seen(backend, "listed")
        self.listings.append(listing)

    def observe(self, backend: str, reading: Reading) -> None:
        self._seen(backend, "observe")
        self.readings.append(reading)

    def published(self, backend: str, limit: int) -> None:
        assert backend == "b"
        self.limits.append(limit)
        self.limit_published.set()

    def unread(self, backend: str, trouble: Trouble, detail: str) -> None:
        self._seen(backend, f"unread: {trouble.value}", detail)

    def answered(self, backend: str) -> None:
        self._seen(backend, "answered")
        if self.seen.count("answered") >= 3:
            self.enough.set()

    def timed_out(self, backend: str) -> None:
        self._seen(backend, "timed out")

    def troubled(self, backend: str, trouble: Trouble, detail: str) -> None:
        self._seen(backend, trouble.value, detail)

    def _seen(self, backend: str, word: str, *details: str) -> None:
        assert backend == "b"
        self.seen.append(word)
        self.details.extend(details)

    def take(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen


@dataclass
class Bench:
    """A poller, its backend and its sink, on a clock that only `polls` and the backend advance."""

    upstream: HttpUpstream
    url: str = ""
    now: float = 1000.0
    vllm: FakeVllm = field(default_factory=FakeVllm)
    sink: Sink = field(default_factory=Sink)
    times: Times = field(default_factory=Times)
    works: bool = True

    def poller(self, url: str | None = None, api_key: str | None = None) -> Poller:
        times, rng = cast(PollConfig, self.times), random.Random(1)
        return Poller(
            "b", url or self.url, api_key, self.upstream, self.sink, times,
            has_work=lambda: self.works, clock=lambda: self.now, rng=rng,
        )  # fmt: skip

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let a poller run as a task with pauses of a millisecond, unless `times` were set; it ends when cancelled."""
        if self.times == Times():
            self.times = Times(interval_s=0.001, page_interval_s=0.001)
        task = asyncio.create_task(self.poller().run())
        async with asyncio.timeout(10):
            yield
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def polls(self, poller: Poller, seconds: float) -> int:
        """Let the poller run for so long. Returns the number of polls."""
        end, count = self.now + seconds, 0
        while self.now < end:
            self.now += await poller.poll_once()
            count += 1
        return count
