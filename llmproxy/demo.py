"""The demo: simulated replicas, the proxy before them, a little mixed traffic, and one line of news now and then.

Everything it starts runs as a `llmproxy.child`, which ends when its standard input does. The other end of that pipe is
held by the demo alone, so nothing outlives it, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Awaitable
from types import TracebackType
from typing import Self, TypeVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

HOST = "127.0.0.1"
MODEL = "sim-8b"
ADAPTERS = ("sim-8b-sql", "sim-8b-support")
REQUESTS_PER_S = 3.0
IN_FLIGHT_MAX = 64
NEWS_INTERVAL_S = 5.0
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
TTFT_SAMPLES = 200

GUIDE = """
llmproxy serves {models} on {base}, from simulated vLLM replicas ({count}), without a GPU.

curl {base}/v1/chat/completions -H 'content-type: application/json' \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}'

from openai import OpenAI
client = OpenAI(base_url="{base}/v1", api_key="none")
stream = client.chat.completions.create(
    model="{adapter}", messages=[{{"role": "user", "content": "Hello"}}], max_tokens=32, stream=True,
    extra_headers={{"x-llm-d-inference-objective": "critical"}},
)
print("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))

To look at: {base}/v1/models
            {base}/metrics
            {base}/ready
            {base}/debug/explain
  replicas: {replicas}

Now it sends itself about {rate:g} requests per second. Ctrl-C ends everything.
"""

Result = TypeVar("Result")


class DemoError(Exception):
    """The demo cannot start or go on; the text says why, for the person at the terminal."""


def run_demo(port: int, replicas: int) -> int:
    """Run until Ctrl-C or SIGTERM on this port (0: any free one) with so many replicas.

    Returns the exit code: 0 when it was asked to end, 1 after a message when it cannot start or go on.
    """
    try:
        return asyncio.run(_until_signal(_demo(_free_port(port), replicas)))
    except DemoError as error:
        print(f"llmproxy demo: {error}", file=sys.stderr, flush=True)
        return 1


def _free_port(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            reason = error.strerror.lower() if error.strerror else error
            raise DemoError(f"port {port} cannot be used ({reason}); try another one with --port") from None
        return int(probe.getsockname()[1])


async def _until_signal(work: Awaitable[None]) -> int:
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        # Once only: a second Ctrl-C must not cut short the ending of the children, which is bounded in time.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: None)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        _say("Stopped; nothing is left running.")
    return 0


async def _demo(port: int, count: int) -> None:
    base = f"http://{HOST}:{port}"
    async with _Children() as children:
        _say(f"Starting the proxy and simulated vLLM replicas ({count})...")
        adapters = [word for adapter in ADAPTERS for word in ("--adapter", adapter)]
        names = [f"replica-{number}" for number in range(1, count + 1)]
        for name in names:
            await children.start(name, "replica", "--host", HOST, "--port", "0", "--model", MODEL, *adapters)
        urls = [await children.printed_url(name) for name in names]
        backends = [word for url in urls for word in ("--backend", url)]
        await children.start("proxy", "serve", "--host", HOST, "--port", str(port), *backends)
        async with aiohttp.ClientSession(base, timeout=aiohttp.ClientTimeout(total=START_TIMEOUT_S)) as session:
            await children.unless_one_dies(_soon(_serving(session), "the proxy is not ready"))
            models = ", ".join((MODEL, *ADAPTERS))
            _say(
                GUIDE.format(
                    base=base,
                    models=models,
                    count=count,
                    model=MODEL,
                    adapter=ADAPTERS[0],
                    replicas=" ".join(urls),
                    rate=REQUESTS_PER_S,
                )
            )
            await children.unless_one_dies(_Visitors(session).come_and_go())


async def _soon(work: Awaitable[Result], complaint: str) -> Result:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            return await work
    except TimeoutError:
        raise DemoError(f"{complaint} after {START_TIMEOUT_S:g} s") from None


async def _serving(session: aiohttp.ClientSession) -> None:
    """Return once the proxy is ready and lists every name that the replicas serve."""
    wanted = {MODEL, *ADAPTERS}
    while True:
        try:
            async with session.get("/ready") as ready, session.get("/v1/models") as models:
                if ready.status == 200 and wanted <= {card["id"] for card in (await models.json())["data"]}:
                    return
        except aiohttp.ClientError:
            pass  # It does not listen yet; its death or the caller's patience ends the waiting.
        await asyncio.sleep(0.1)


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Nobody reads any more, which ends the demo as a signal would; what is still printed then goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        signal.raise_signal(signal.SIGTERM)


# --- the processes ----------------------------------------------------------------------------------------------------


class _Child:
    """One process of ours and the last lines that it printed."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.tail: deque[str] = deque(maxlen=20)
        self.life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        """Read what it prints until it ends, so that it never blocks on a full pipe."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            text = line.decode(errors="replace").rstrip()
            self.tail.append(text)
            if not self.url.done() and (found := re.search(r"https?://[\w.:\[\]-]+", text)):
                self.url.set_result(found[0])
        await self.process.wait()

    def obituary(self) -> str:
        said = "\n".join(f"  {line}" for line in self.tail) or "  (nothing)"
        return f"{self.name} ended with exit code {self.process.returncode}; its last words:\n{said}"


class _Children:
    """The processes of the demo; leaving the block ends them all, the proxy before the replicas that serve it."""

    def __init__(self) -> None:
        self._children: dict[str, _Child] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        newest_first = list(reversed(self._children.values()))
        await self._end(newest_first[:1])
        await self._end(newest_first[1:])

    async def start(self, name: str, *arguments: str) -> None:
        # Settings of the person's own shell are meant for their proxy, not for this one.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LLMPROXY_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "llmproxy.child", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            limit=1 << 20,
            # Ctrl-C reaches a whole process group; the children are to be ended by us, in order.
            start_new_session=True,
        )
        self._children[name] = _Child(name, process)

    async def printed_url(self, name: str) -> str:
        return await self.unless_one_dies(_soon(self._children[name].url, f"{name} does not say where it listens"))

    async def unless_one_dies(self, work: Awaitable[Result]) -> Result:
        """The result of `work`. Raises DemoError when a child ends first."""
        task = asyncio.ensure_future(work)
        lives = [child.life for child in self._children.values()]
        try:
            await asyncio.wait([task, *lives], return_when=asyncio.FIRST_COMPLETED)
            dead = [child for child in self._children.values() if child.life.done()]
            if dead:
                raise DemoError(dead[0].obituary())
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])

    @staticmethod
    async def _end(children: list[_Child]) -> None:
        for child in children:
            if child.process.returncode is None:
                child.process.terminate()
        if children:
            _, alive = await asyncio.wait([child.life for child in children], timeout=STOP_TIMEOUT_S)
            for child in children:
                if child.life in alive:
                    child.process.kill()
                await child.life


# --- the traffic ------------------------------------------------------------------------------------------------------

QUESTIONS = (
    "What is a KV-cache?",
    "Why does a batch of one waste a GPU?",
    "Write a query that counts orders by month.",
    "A customer's parcel is late. What do we answer?",
    "Explain continuous batching to a child.",
)
PREAMBLE = (
    "You are the assistant of a small shop that sells bicycles. Be brief, be kind, and never invent a price. " * 8
)


class _Visitors:
    """Clients that come at random moments, each with one request, and the news of how they fared."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._random = random.Random()
        self._ttft_s: deque[float] = deque(maxlen=TTFT_SAMPLES)
        self._lost = 0

    async def come_and_go(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell_news())
            present: set[asyncio.Task[None]] = set()
            while True:
                if len(present) < IN_FLIGHT_MAX:
                    visit = group.create_task(self._visit())
                    present.add(visit)
                    visit.add_done_callback(present.discard)
                await asyncio.sleep(self._random.expovariate(REQUESTS_PER_S))

    async def _visit(self) -> None:
        pick = self._random
        stream = pick.random() < 0.7
        objective = pick.choices(("critical", "default", "sheddable"), (20, 60, 20))[0]
        body = {
            "model": pick.choice((MODEL, *ADAPTERS)),
            "messages": [
                {"role": "system", "content": PREAMBLE},
                {"role": "user", "content": pick.choice(QUESTIONS)},
            ],
            "max_tokens": pick.randint(16, 160),
            "stream": stream,
        }
        sent_s, spoke = time.perf_counter(), False
        headers = {"x-llm-d-inference-objective": objective}
        try:
            async with self._session.post("/v1/chat/completions", json=body, headers=headers) as answer:
                async for _ in answer.content.iter_any():
                    if stream and answer.status == 200 and not spoke:
                        self._ttft_s.append(time.perf_counter() - sent_s)
                    spoke = True
        except (aiohttp.ClientError, TimeoutError):
            self._lost += 1

    async def _tell_news(self) -> None:
        while True:
            await asyncio.sleep(NEWS_INTERVAL_S)
            try:
                async with self._session.get("/metrics") as answer:
                    page = await answer.text()
            except (aiohttp.ClientError, TimeoutError):
                _say(f"{time.strftime('%H:%M:%S')}  the proxy does not answer /metrics")
                continue
            _say(self._news(page))

    def _news(self, page: str) -> str:
        """One line from the proxy's own metrics page and from what the clients saw."""
        outcomes = _sums(page, "llmproxy_requests_total", "outcome") or {"none": 0.0}
        in_flight = _sums(page, "llmproxy_in_flight_requests", "backend")
        queued = sum(_sums(page, "llmproxy_queued_requests", "band").values())
        ttft = f"{1000 * statistics.median(self._ttft_s):.0f} ms" if self._ttft_s else "not known yet"
        parts = [
            "requests " + ", ".join(f"{outcome} {count:.0f}" for outcome, count in sorted(outcomes.items())),
            "in flight " + ", ".join(f"{backend} {count:.0f}" for backend, count in sorted(in_flight.items())),
            f"queued {queued:.0f}",
            f"TTFT p50 {ttft}",
        ]
        if self._lost:
            parts.append(f"connections lost {self._lost}")
        return f"{time.strftime('%H:%M:%S')}  " + " | ".join(parts)


def _sums(page: str, sample: str, label: str) -> dict[str, float]:
    """Values of one sample of a metrics page, summed by one of its labels."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for one in family.samples:
            if one.name == sample:
                name = one.labels.get(label, "")
                sums[name] = sums.get(name, 0.0) + one.value
    return sums


# --- a child ----------------------------------------------------------------------------------------------------------
