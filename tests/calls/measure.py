"""Counts the Python calls of one request. As a program, it writes the table of the documentation.

Client, proxy and engines share one loop, and only functions of the proxy, and of libraries on its behalf, are counted.
"""

from __future__ import annotations

import asyncio
import io
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import cache
from math import inf
from statistics import mode
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import uvloop

from llmproxy.core.domain import Outcome, Usage, Verdict
from llmproxy.core.lease_events import Committed, Started
from llmproxy.gateway.proxying import answers
from llmproxy.observe import logs
from tests import ROOT
from tests.core.make import request
from tests.dispatching import dispatcher, holding, now
from tests.docs.reference import table
from tests.e2e.proxies import HELLO, STREAM, ProxyUnderTest, raw_post, serving
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, answering, chunk, scripted, whole
from tests.exits import exit_of
from tests.remote.workers.link import WorkerLink
from tests.upstream.raw_server import Peer

PAGE = ROOT / "docs/development/testing.md"
REGION = re.compile(r"(<!-- measured: calls -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CASES = ("JSON answer", "start and end of a stream", "16 more chunks", "lease through a worker")
GROUPS = ("gateway", "scheduling", "core", "upstream", "observe", "remote", "other", "aiohttp", "libraries", "python")
BACKENDS = 4
WARM_UP, REQUESTS, CHUNKS = 8, 13, 16
POLLS = {"interval_s": 1.0, "page_interval_s": 1.0, "models_interval_s": 1.0}
QUIET_S = 0.015
"""Longer than any work that is left for later, such as records."""
APART_S = 0.001
"""Requests of a busy proxy: it learns from an answer at most 50 times a second, which costs more calls."""

USAGE = b'"usage":{"prompt_tokens":20,"completion_tokens":2,"total_tokens":22}'
MESSAGE = b'"choices":[{"index":0,"message":{"role":"assistant","content":"Hello."},"finish_reason":"stop"}]'
ANSWER = whole(b'{"id":"1","object":"chat.completion","created":1,"model":"base",%s,%s}' % (MESSAGE, USAGE))
DELTA = b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]'
EVENT = b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"base",%s}\n\n'
METRICS = (
    b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="10000"} 1\n'
)
BACKGROUND_S = 0.05
"""Timers of this length and longer, such as polls, wait until a request is counted."""

Calls = Counter[str]


class Clock(uvloop.Loop):
    """The loop of production. While requests are counted, its clock moves by requests alone."""

    stopped_s: float | None = None

    def time(self) -> float:
        return super().time() if self.stopped_s is None else self.stopped_s

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        if delay < BACKGROUND_S:
            return super().call_later(delay, callback, *args, context=context)
        return super().call_later(delay, self._unless_stopped, callback, *args, context=context)

    def _unless_stopped(self, callback: Callable[..., object], *args: object) -> None:
        if self.stopped_s is None:
            callback(*args)
        else:
            super().call_later(BACKGROUND_S, self._unless_stopped, callback, *args)


@cache
def group(code: CodeType) -> str | None:
    """Returns the group of a function: "" in a test, and None in Python, whose functions count for their callers."""
    path = code.co_filename
    if path.startswith(str(ROOT / "tests")):
        return ""
    if "/site-packages/" in path:
        return "aiohttp" if "/site-packages/aiohttp/" in path else "libraries"
    if path.startswith(str(ROOT / "llmproxy")):
        folder = path.removeprefix(str(ROOT / "llmproxy")).split("/")[1]
        return folder if folder in GROUPS else "other"
    return None


def count(calls: Calls) -> None:
    """Counts all calls of this thread from now on, except those of tests and of Python on their behalf."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        found, caller = group(frame.f_code), frame.f_back
        while found is None and caller is not None:
            found = "python" if group(caller.f_code) else group(caller.f_code)
            caller = caller.f_back
        if found:
            calls[found] += 1

    sys.setprofile(profile)


async def usual(calls: Calls, request: Callable[[], Awaitable[None]]) -> Calls:
    """Returns the most frequent calls of a request in each group, because the proxy learns from some requests."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Clock)
    seen: list[Calls] = []
    loop.stopped_s = loop.time()
    for _ in range(WARM_UP + REQUESTS):
        loop.stopped_s += APART_S
        calls.clear()
        await request()
        await asyncio.sleep(QUIET_S)
        seen.append(calls.copy())
    loop.stopped_s = None
    return Counter({name: mode([one[name] for one in seen[WARM_UP:]]) for name in GROUPS})


class Client:
    """Plays a client with one connection and the engine behind the proxy."""

    def __init__(self) -> None:
        self._read = asyncio.Event()
        self._chunks = 0

    async def connect(self, proxy: ProxyUnderTest) -> None:
        self._reader, self._writer = await asyncio.open_connection(*proxy.address)

    def close(self) -> None:
        self._writer.close()

    async def answer(self, peer: Peer, request: bytes) -> None:
        """Plays the engine. The next chunk is sent after the client has read the chunk before it."""
        if b'"stream": true' not in request:
            await peer.send(ANSWER)
            return
        await peer.send(STREAM_HEAD)
        last = EVENT % DELTA.replace(b"null", b'"stop"') + EVENT % (b'"choices":[],' + USAGE) + b"data: [DONE]\n\n"
        for event in [*[EVENT % DELTA] * (1 + self._chunks), last]:
            self._read.clear()
            await peer.send(chunk(event))
            await self._read.wait()
        await peer.send(STREAM_END)

    async def json(self) -> None:
        self._writer.write(raw_post(HELLO))
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        await self._reader.readexactly(len(ANSWER.partition(b"\r\n\r\n")[2]))

    async def stream(self, chunks: int = 0) -> None:
        self._chunks = chunks
        self._writer.write(raw_post(STREAM))
        answer = b""
        while not answer.endswith(b"\r\n" + STREAM_END):
            answer += await self._reader.read(65_536)
            self._read.set()


async def alone(calls: Calls) -> list[Calls]:
    client = Client()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(scripted(client.answer)) for _ in range(BACKENDS)]
        for engine in engines:
            engine.polls[b"/metrics"] = answering(whole(METRICS, content_type="text/plain"))
        urls = [engine.url for engine in engines]
        proxy = await stack.enter_async_context(serving(extra=urls, poll=POLLS, log_level="info"))
        await client.connect(proxy)
        json = await usual(calls, client.json)
        short = await usual(calls, client.stream)
        long = await usual(calls, lambda: client.stream(CHUNKS))
        client.close()
    return [json, short, long - short]


async def through_worker(calls: Calls) -> Calls:
    """Counts both halves of a worker's link, and the scheduler behind it: all of a request but its HTTP."""
    line = WorkerLink(dispatcher(a=8, b=8, c=8, d=8))
    ended = exit_of(
        request_id="r", method="POST", path="/", outcome=Outcome.COMPLETED, status=200, duration_s=1.0, model="base"
    )

    async def lease() -> None:
        asked = request(arrived_s=now(), deadline_s=now() + 60.0)
        async with holding(line.remote, asked) as lease:
            lease.apply(Committed(lease.grant.lease), now())
            lease.apply(Started(lease.grant.lease), now())
            lease.verdict, lease.usage = Verdict.SERVED, Usage(20, 2)
        line.remote.ended(asked, True)
        line.metrics.record(ended)

    return await usual(calls, lease)


def measured() -> dict[str, Calls]:
    """Counts every case of `CASES`, on the loop of production."""
    calls: Calls = Counter()
    logs.configure("text", "info", io.StringIO())
    # The time of a turn is real, so a busy machine would need more turns.
    with patch.object(answers, "TURN_S", inf), asyncio.Runner(loop_factory=Clock) as runner:
        count(calls)
        try:
            found = [*runner.run(alone(calls)), runner.run(through_worker(calls))]
        finally:
            sys.setprofile(None)
    return dict(zip(CASES, found, strict=True))


def shown(found: dict[str, Calls]) -> str:
    """Returns the table of the documentation."""
    rows = [[name, *(str(found[case][name]) for case in CASES)] for name in GROUPS]
    return table(["calls in", *CASES], [*rows, ["**sum**", *(str(found[case].total()) for case in CASES)]])


if __name__ == "__main__":
    lines = shown(measured())
    PAGE.write_text(REGION.sub(lambda part: f"{part[1]}{lines}\n{part[3]}", PAGE.read_text()))
    sys.stdout.write(lines + "\n")
