"""The proxy before real vLLM servers: opt in with LLMPROXY_TEST_VLLM=url,url.

The first two serve the model `tiny` with the adapters `lora-0` and `lora-1`; answers of any further ones, started with
whatever options, are only compared. An engine on a CPU leaves nothing to others while it generates: clients that time
out here may lack nothing but a third core. On a CPU with AMX an engine may die where its first prompt is one token: ask
each of them something longer first.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp
import openai
import pytest
import pytest_asyncio

from llmproxy.app import Proxy, running
from llmproxy.config import BackendConfig, Config, SchedulingConfig, hash_of
from tests.e2e.vllm.vllm_requests import CASES, ENDLESS, FRESH, INVOCATIONS, REFUSED, TRAILING_SLASH, Case

URLS = [url for url in os.environ.get("LLMPROXY_TEST_VLLM", "").split(",") if url]
T = TypeVar("T")

MODEL, ADAPTERS = "tiny", ("lora-0", "lora-1")
STREAMS = 200
STREAM_TRIES = 8
GONE_WITHIN_S = 1.0
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(len(URLS) < 2, reason="needs two real vLLM servers: set LLMPROXY_TEST_VLLM=url,url"),
    pytest.mark.asyncio(loop_scope="module"),
]


@asynccontextmanager
async def proxy_before(*backends: BackendConfig, **settings: Any) -> AsyncIterator[Proxy]:
    config = Config(host="127.0.0.1", port=0, backends=backends, **settings)
    async with running(config) as proxy, aiohttp.ClientSession() as session:
        await until(lambda: values(session, proxy, "backend_available"), {"1.0"})
        yield proxy


async def until(ask: Callable[[], Awaitable[T]], wanted: T, within_s: float = 10.0) -> None:
    """Ask again and again until the answer is `wanted`; TimeoutError, with the last answer, when it never is."""
    got: T | None = None
    try:
        async with asyncio.timeout(within_s):
            while True:
                got = await ask()
                if got == wanted:
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise TimeoutError(f"still {got!r} after {within_s} s, not {wanted!r}") from None


async def values(session: aiohttp.ClientSession, proxy: Proxy, name: str) -> set[str]:
    """Returns the values of a gauge of the proxy under all its labels."""
    async with session.get(proxy.url + "/metrics") as answer:
        return set(re.findall(rf"^llmproxy_{name}\{{.*\}} (\S+)$", await answer.text(), re.MULTILINE))


async def engine_work(session: aiohttp.ClientSession, url: str) -> tuple[float, float, float]:
    """Requests that an engine runs, that wait inside it, and that it ever completed: aborted ones are not counted."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:request_success_total")
    async with session.get(f"{url}/metrics/", params=[("name[]", name) for name in names]) as answer:
        page = await answer.text()
    running, waiting, completed = (
        sum(map(float, re.findall(rf"^{name}\{{.*\}} (\S+)$", page, re.MULTILINE))) for name in names
    )
    return running, waiting, completed


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    skipped = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False, skip_auto_headers=skipped) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def proxy() -> AsyncIterator[Proxy]:
    async with proxy_before(*(BackendConfig(url=url) for url in URLS[:2])) as ready:
        yield ready


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def proxies() -> AsyncIterator[list[tuple[str, Proxy]]]:
    """A proxy before each server, so that answers are compared on the same engine and prefix cache."""
    async with AsyncExitStack() as stack:
        yield [(url, await stack.enter_async_context(proxy_before(BackendConfig(url=url)))) for url in URLS]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(proxy: Proxy) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


# --- an unchanged client ----------------------------------------------------------------------------------------------


async def test_models_of_both_servers_are_listed_once(client: openai.AsyncOpenAI) -> None:
    listed = [model async for model in await client.models.list()]
    assert sorted(model.id for model in listed) == sorted([MODEL, *ADAPTERS])
    # Fields of the engine that the client's class does not have.
    assert next(model for model in listed if model.id == MODEL).model_dump()["max_model_len"] > 0


@pytest.mark.parametrize("model", [MODEL, *ADAPTERS])
async def test_chat(client: openai.AsyncOpenAI, model: str) -> None:
    answer = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert answer.model == model
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


@pytest.mark.parametrize("include_usage", [False, True])
async def test_chat_stream(client: openai.AsyncOpenAI, include_usage: bool) -> None:
    stream = await client.chat.completions.create(
        model=ADAPTERS[0],
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True} if include_usage else openai.omit,
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == ([8] if include_usage else [])


async def test_completion(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="Hello", max_tokens=8)
    assert answer.choices[0].text


async def test_response(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.output_tokens > 0


async def test_embeddings_fail_with_the_engines_own_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        await client.embeddings.create(model=MODEL, input="Hello")
    assert raised.value.body == {"detail": "Not Found"}


async def test_an_unknown_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "Hello"}])


async def test_many_streams_at_once(client: openai.AsyncOpenAI, proxy: Proxy, session: aiohttp.ClientSession) -> None:
    async def one(index: int) -> int:
        stream = await client.chat.completions.create(
            model=(MODEL, *ADAPTERS)[index % 3],
            messages=[{"role": "user", "content": f"Hello number {index}"}],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        return [chunk.usage.completion_tokens async for chunk in stream if chunk.usage is not None][-1]

    tokens = await asyncio.gather(*(one(index) for index in range(STREAMS)))
    assert tokens == [8] * STREAMS
    assert proxy.dispatcher.leases == 0
    assert await values(session, proxy, "queued_requests") == {"0.0"}


async def test_adapters_are_loaded_by_both_servers_and_again_after_a_loss(session: aiohttp.ClientSession) -> None:
    """The servers must run with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True; they were started with lora-0."""
    name, root = f"test-{uuid.uuid4().hex}", await root_of(session, URLS[0], ADAPTERS[0])
    backends = tuple(BackendConfig(url=url) for url in URLS[:2])
    headers = {"authorization": "Bearer for-admins", "content-type": "application/json"}

    async def post(url: str, path: str, **body: str) -> bytes:
        async with session.post(url + path, json={"lora_name": name, **body}, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.read()

    async with proxy_before(*backends, admin_key=hash_of("for-admins")) as proxy:
        for _ in range(2):
            report = json.loads(await post(proxy.url, "/v1/load_lora_adapter", lora_path=root or ""))
            assert (report["ok"], report["failed"], report["model"]) == (2, 0, MODEL)
        asked = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        async with session.post(proxy.url + "/v1/chat/completions", json=asked, headers=headers) as answer:
            assert (answer.status, (await answer.json())["model"]) == (200, name)
        await post(URLS[1], "/v1/unload_lora_adapter")
        await until(lambda: root_of(session, URLS[1], name), root)
        report = json.loads(await post(proxy.url, "/v1/unload_lora_adapter"))
        assert (report["ok"], report["failed"]) == (2, 0)
        assert {await root_of(session, url, name) for url in URLS[:2]} == {None}


async def root_of(session: aiohttp.ClientSession, url: str, name: str) -> str | None:
    """Where a server has a model from, None where it has it not."""
    async with session.get(url + "/v1/models") as answer:
        return next((card["root"] for card in (await answer.json())["data"] if card["id"] == name), None)


# --- the same bytes ---------------------------------------------------------------------------------------------------

# Ids that an engine makes up, times, and what belongs to one connection or to the proxy's own leg.
_IDS = re.compile(rb'"((?:chatcmpl|cmpl|embd|resp|msg|rs|fc|call)[-_](?:tool-)?)[0-9a-f]{16,32}(-\d+)?"')
_TIMES = re.compile(rb'"(created|created_at|completed_at)":\d+(\.\d+)?')
_FINGERPRINT = re.compile(rb',"system_fingerprint":"[^"]*"')
_OWN_HEADER = re.compile("date|server|connection|keep-alive|transfer-encoding|x-request-id|x-llmproxy-.*")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer without the parts that differ between two equal requests."""

    status: int
    headers: list[tuple[str, str]]
    events: list[bytes]
    backend: str | None = field(compare=False)


async def ask(session: aiohttp.ClientSession, url: str, case: Case) -> Answer:
    body = case.body.replace(FRESH, uuid.uuid4().hex.encode())
    # The same id on both ways, or answers would differ in length.
    headers = dict([("x-request-id", "0123456789abcdef"), *case.headers])
    async with session.request(
        case.method, url + case.path, data=io.BytesIO(body) if body else None, headers=headers, allow_redirects=False
    ) as answer:
        data = _TIMES.sub(rb'"\1":0', _IDS.sub(rb'"\1\2"', await answer.read()))
        fields = sorted((name.lower(), value) for name, value in answer.headers.items())
        kept = [(name, value) for name, value in fields if not _OWN_HEADER.fullmatch(name)]
        return Answer(answer.status, kept, data.split(b"\n\n"), answer.headers.get("x-llmproxy-backend"))


async def ask_directly(session: aiohttp.ClientSession, url: str, case: Case) -> Answer:
    """Returns the engine's answer as the proxy should pass it on."""
    direct = await ask(session, url, case)
    if not case.loses_fingerprint:
        return direct
    return replace(direct, events=[_FINGERPRINT.sub(b"", event) for event in direct.events])


async def assert_same(session: aiohttp.ClientSession, url: str, proxy: Proxy, case: Case) -> None:
    # Fills the prefix cache, so that both compared answers find the prompt there.
    await ask(session, url, case)
    direct: list[Answer] = []
    proxied: list[Answer] = []
    # An engine that falls behind puts two tokens into one event, so a stream has several right answers.
    for _ in range(STREAM_TRIES if case.streams else 1):
        direct.append(await ask_directly(session, url, case))
        proxied.append(await ask(session, proxy.url, case))
        if url in URLS[2:] and proxied[-1].backend is None:
            # An adapter that this server has not: in words of the proxy's own.
            assert proxied[-1].status == direct[-1].status
            return
        assert proxied[-1].backend is not None, proxied[-1]
        if any(answer in direct for answer in proxied):
            return
    assert proxied[-1] == direct[-1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_an_answer_is_the_engines_own(
    session: aiohttp.ClientSession, proxies: list[tuple[str, Proxy]], case: Case
) -> None:
    for url, proxy in proxies:
        await assert_same(session, url, proxy, case)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
async def test_an_answer_of_the_proxys_own_has_the_engines_status(
    session: aiohttp.ClientSession, proxy: Proxy, case: Case
) -> None:
    direct, proxied = await ask(session, URLS[0], case), await ask(session, proxy.url, case)
    assert proxied.backend is None
    # The engine tries to read a compressed body as JSON; the proxy refuses it for its encoding.
    assert proxied.status == (415 if case.name == "error-encoded-gzip-request" else direct.status)


async def test_a_trailing_slash_is_served_and_not_redirected(session: aiohttp.ClientSession, proxy: Proxy) -> None:
    # The engine redirects to its own address, which a client behind the proxy cannot reach.
    assert (await ask(session, URLS[0], TRAILING_SLASH)).status == 307
    assert (await ask(session, proxy.url, TRAILING_SLASH)).status == 200


async def test_paths_without_the_engines_key_are_out_of_reach(session: aiohttp.ClientSession, proxy: Proxy) -> None:
    assert (await ask(session, URLS[0], INVOCATIONS)).status == 200
    assert (await ask(session, proxy.url, INVOCATIONS)).status == 404


# --- a client that leaves ---------------------------------------------------------------------------------------------


def endless(session: aiohttp.ClientSession, proxy: Proxy) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    return session.post(
        proxy.url + ENDLESS.path, data=ENDLESS.body, headers=dict(ENDLESS.headers), raise_for_status=True
    )


async def read(stream: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> None:
    async with stream as answer:
        await answer.read()


async def leases(proxy: Proxy) -> int:
    return proxy.dispatcher.leases


async def queued(proxy: Proxy) -> int:
    return sum(requests for requests, _ in proxy.pools.queued().values())


async def test_a_client_that_leaves_in_mid_stream_stops_the_engine(session: aiohttp.ClientSession) -> None:
    async with proxy_before(BackendConfig(url=URLS[0])) as proxy:
        before = await engine_work(session, URLS[0])
        async with endless(session, proxy) as answer:
            assert await answer.content.readany()
        await until(lambda: engine_work(session, URLS[0]), before, GONE_WITHIN_S)
        assert proxy.dispatcher.leases == 0


async def test_a_client_that_leaves_the_waiting_room_is_never_sent_on(session: aiohttp.ClientSession) -> None:
    backend = BackendConfig(url=URLS[1], max_in_flight=1)
    async with proxy_before(backend, scheduling=SchedulingConfig(look_ahead=0)) as proxy:
        before = await engine_work(session, URLS[1])
        # All this takes less time than the engine's first token, from which on it leaves little of a small machine.
        first = asyncio.create_task(read(endless(session, proxy)))
        await until(lambda: leases(proxy), 1)
        second = asyncio.create_task(read(endless(session, proxy)))
        await until(lambda: queued(proxy), 1)
        second.cancel()
        await until(lambda: queued(proxy), 0, GONE_WITHIN_S)
        assert proxy.dispatcher.leases == 1
        first.cancel()
        # With the place free again, a second request that had been kept would run on.
        await until(lambda: engine_work(session, URLS[1]), before, GONE_WITHIN_S)
        assert proxy.dispatcher.leases == 0
        await asyncio.wait([first, second])
