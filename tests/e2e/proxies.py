"""A proxy for one test, with simulated replicas and a client, all on the loop of the test.

Leaving its block checks what must hold after any test: no request is open, waits, holds a lease or is booked,
no engine computes for nobody, and no task, socket or timer stays behind (`leftovers`).
"""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
from multidict import CIMultiDictProxy
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from llmproxy.app import Proxy, running
from llmproxy.backends.state_file import StateFile
from llmproxy.config import Config, WatchedFile, load
from llmproxy.config.reload import Reread
from llmproxy.lab.simulator.replica import Replica, ReplicaOptions, SeenRequest
from tests.e2e.leftovers import nothing_left
from tests.lab.simulator.engine.invariants import check_engine

FAST = ReplicaOptions(model="base", adapters=("lora-0", "lora-1"), profile="tiny", noise=False)
"""A replica whose steps take about a millisecond."""
REAL = replace(FAST, profile="llama-8b-h100")
"""A replica that takes as long as a GPU, 55 ms for 3,000 tokens of a prompt: they are cheaper where they are cached."""
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 4}
STREAM = HELLO | {"stream": True}
OWN_ID = re.compile(r"-\d+-\d+$")
"""The end of an id that the proxy made its own, because an engine may still have a request of the client's id."""
ENDLESS = STREAM | {"max_tokens": 30_000, "ignore_eos": True}
"""A stream that only ends when it is cut."""

QUICK: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "log_level": "error",
    "poll": {"interval_s": 0.02, "page_interval_s": 0.05, "models_interval_s": 0.05, "timeout_s": 5.0},
    "health": {"ejection_s": 0.05},
    "drain_timeout_s": 5.0,
    # Only tests of holding requests hold them; all others want an answer at once.
    "queue": {"no_backend_wait_s": 0.0},
}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, read to its end."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[bytes]:
        """The events of a stream, without the blank lines between them."""
        return [event for event in self.body.split(b"\n\n") if event]

    @property
    def backend(self) -> str:
        return self.headers["x-llmproxy-backend"]


class ProxyUnderTest:
    """A running proxy. Replica number i is the backend `b<i>`."""

    def __init__(
        self, app: Proxy, replicas: Sequence[Replica], http: aiohttp.ClientSession, config_data: Mapping[str, Any]
    ) -> None:
        self.app = app
        self.config_data = config_data
        self.replicas = tuple(replicas)
        self.http = http
        self.url = app.url
        self.bugs_expected = 0

    def replica(self, name: str) -> Replica:
        """The replica behind a backend's name."""
        return self.replicas[int(name.removeprefix("b"))]

    def sent(self, backend: str = "b0") -> SeenRequest:
        """The latest request that is no poll, as the replica behind a backend got it."""
        return [seen for seen in self.replica(backend).requests_seen if not is_poll(seen)][-1]

    @property
    def address(self) -> tuple[str, int]:
        """Returns host and port of the proxy, for connections below HTTP."""
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    async def request(self, method: str, path: str, body: object = None, **options: Any) -> Answer:
        """Send one request; `body` is sent as it is where it is bytes, as JSON where it is anything else."""
        if isinstance(body, bytes):
            # The client's library wants large bodies as files.
            options["data"] = io.BytesIO(body) if body else body
            options["headers"] = {"content-type": "application/json"} | options.get("headers", {})
        elif body is not None:
            options["json"] = body
        url = path if path.startswith("http") else self.url + path
        async with self.http.request(method, url, allow_redirects=False, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def post(self, path: str, body: object, **options: Any) -> Answer:
        return await self.request("POST", path, body, **options)

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.request("GET", path, **options)

    async def chat(self, body: object = None, **options: Any) -> Answer:
        return await self.post(CHAT, HELLO if body is None else body, **options)

    @asynccontextmanager
    async def stream(
        self, body: object = None, path: str = CHAT, **headers: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A stream in progress. Its connection is cut on leaving, as by a client that goes away."""
        response = await self.http.post(self.url + path, json=ENDLESS if body is None else body, headers=headers)
        try:
            yield response
        finally:
            response.close()

    @asynccontextmanager
    async def wire(self, data: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection below HTTP on which `data` was sent; it is cut on leaving."""
        # A small limit, so that nothing is read ahead of a test that reads nothing.
        reader, writer = await asyncio.open_connection(*self.address, limit=4096)
        try:
            writer.write(data)
            yield reader, writer
        finally:
            writer.transport.abort()

    def waiting(self, body: object = None, **headers: str) -> asyncio.Task[Answer]:
        """Sends a request in a task of its own, because it will wait."""
        return asyncio.create_task(self.chat(body, headers=headers))

    async def enter(self, name: str, body: object = None, **headers: str) -> asyncio.Task[Answer]:
        """A request with this id that waits."""
        before = self.queued
        task = self.waiting(body, **headers, **{"x-request-id": name})
        await until(lambda: self.queued == before + 1)
        return task

    @property
    def queued(self) -> int:
        return sum(requests for requests, _ in self.app.pools.queued().values())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of one metric that have these labels."""
        return sum(sample.value for sample in self._samples(name) if labels.items() <= sample.labels.items())

    def outcomes(self) -> Counter[str]:
        """How many requests ended in which outcome."""
        self.app.flush_records()
        counted: Counter[str] = Counter()
        # The other collectors of the registry read all of the pools and of /proc.
        for family in self.app.metrics.registry.restricted_registry(["llmproxy_requests_total"]).collect():
            for sample in family.samples:
                counted[sample.labels["outcome"]] += int(sample.value)
        return counted

    def _samples(self, name: str) -> list[Sample]:
        """The samples of one metric. To write and parse the whole page takes longer than most tests."""
        self.app.flush_records()
        families = self.app.metrics.registry.collect()
        return [sample for family in families for sample in family.samples if sample.name == name]

    async def settled(self) -> None:
        """Wait until every request has ended and every engine has nothing to do."""
        handler = self.app.handler
        await until(lambda: not (handler.open_requests or handler.captured_bytes or self.app.dispatcher.leases))
        await until(lambda: all(not r.in_flight and not r.engine.busy for r in self.replicas))
        self.app.flush_records()

    def check(self) -> None:
        """Everything that was taken was given back."""
        pools = self.app.pools
        assert self.app.handler.open_requests == 0
        assert (self.app.handler.bodies.buffered_bytes, self.app.handler.bodies.arriving_bytes) == (0, 0)
        assert self.app.dispatcher.leases == 0
        assert all(self.app.dispatcher.in_flight(name) == 0 for name in pools.backends)
        assert all(queue == (0, 0) for queue in pools.queued().values())
        assert {name: backend.own_in_flight for name, backend in pools.backends.items()} == dict.fromkeys(
            pools.backends, 0
        )
        pools.check(asyncio.get_running_loop().time())
        for replica in self.replicas:
            assert not replica.engine.busy
            check_engine(replica.engine)
        assert self.outcomes()["internal"] == self.bugs_expected, "the proxy met a bug of its own"


@asynccontextmanager
async def one_seat(
    body: object = None, headers: Mapping[str, str] = MappingProxyType({}), **config: Any
) -> AsyncIterator[tuple[ProxyUnderTest, aiohttp.ClientResponse]]:
    """A proxy with one place, and the stream that has it until it is closed."""
    scheduling = {"look_ahead": 0} | config.pop("scheduling", {})
    one_place = serving(FAST, fixed_limit=1, scheduling=scheduling, **config)
    async with one_place as proxy, proxy.stream(body, **headers) as seat:
        await seat.content.readany()
        yield proxy, seat


def decisions(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of a decision log by request id, in their order."""
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["llmproxy_decisions"] == 1
    return {line["request_id"]: line for line in lines}


def posts(proxy: ProxyUnderTest) -> int:
    """How many requests that are no polls have reached the first replica."""
    return sum(seen.method == "POST" for seen in proxy.replicas[0].requests_seen)


async def all_of(stream: aiohttp.ClientResponse) -> bytes:
    """Returns the bytes of a stream that may break."""
    pieces = bytearray()
    with suppress(aiohttp.ClientPayloadError):
        while piece := await stream.content.readany():
            pieces += piece
    return bytes(pieces)


def samples(page: str, name: str, labels: Mapping[str, str] = MappingProxyType({})) -> list[Sample]:
    """The samples of one metric that have these labels, on a page of metrics."""
    found = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return [one for one in found if one.name == name and labels.items() <= one.labels.items()]


def raw_post(body: object, path: str = CHAT, version: str = "1.1", extra: str = "") -> bytes:
    """The bytes of a request; `extra` are further header lines."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n{extra}"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def until(condition: Callable[[], object], limit_s: float = 15.0) -> None:
    """Waits for a condition that other tasks fulfil."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.002)


@asynccontextmanager
async def serving(
    *options: ReplicaOptions,
    fixed_limit: int | None = None,
    extra: Sequence[str] = (),
    wait: bool = True,
    file: Path | None = None,
    state: StateFile | None = None,
    usage_folder: Path | None = None,
    roles: Mapping[str, str] = MappingProxyType({}),
    **config: Any,
) -> AsyncIterator[ProxyUnderTest]:
    """Start a proxy over one replica for each of `options`; `config` goes over the quick settings of tests.

    `fixed_limit` is every backend's `max_in_flight`. `extra` are URLs of further backends. With `wait`, every backend
    was read when the block is entered. With a `file`, the configuration is in it and can be read again. `state` keeps
    learned numbers, `usage_folder` the use of tenants. `roles` are by backend.
    """
    async with nothing_left(), AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(Replica(o)) for o in options]
        urls = [replica.url for replica in replicas] + list(extra)
        named = [(f"b{number}", url) for number, url in enumerate(urls)]
        backends = [
            {"url": url, "name": name, "max_in_flight": fixed_limit, "role": roles.get(name, "both")}
            for name, url in named
        ]
        config_data = merged_with(QUICK | {"backends": backends}, config)
        reread = _written(file, config_data) if file is not None else None
        app = await stack.enter_async_context(
            running(Config.model_validate(config_data), reread, state=state, usage_folder=usage_folder)
        )
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        proxy = ProxyUnderTest(app, replicas, http, config_data)
        if wait:
            await until(lambda: all_up(proxy))
        yield proxy
        await proxy.settled()
        proxy.check()


def _written(file: Path, config_data: Mapping[str, Any]) -> Reread:
    file.write_text(json.dumps(config_data))  # JSON is YAML, too.
    watched = WatchedFile(file)
    watched.take()
    return Reread(watched, partial(load, file))


POLLED = ("/health", "/v1/models", "/metrics", "/metrics/", "/server_info")


def is_poll(seen: SeenRequest) -> bool:
    return seen.method == "GET" and seen.path.partition("?")[0] in POLLED


def all_up(proxy: ProxyUnderTest) -> bool:
    """Every backend was read and may be given work."""
    now = asyncio.get_running_loop().time()
    backends = proxy.app.pools.backends.values()
    return all(b.listing is not None and b.health.available(now) for b in backends)


def merged_with(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merged_with(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
