"""Split requests before real vLLM servers: opt in with LLMPROXY_TEST_VLLM_SPLIT=prefill-url,decode-url,...

They run with NixlConnector, serve the model `tiny` with the adapters `lora-0` and `lora-1`, and have a
`kv_lease_duration` of 20 s; or they share a store, and LLMPROXY_TEST_VLLM_CONNECTOR=store says so.

An engine with a KV connector steps without pause while it keeps or awaits blocks, and its worker spins for each step.
Where there are fewer cores than engines, transfers then take seconds, up to the lease. They take 0.1 s with
`time.sleep(0.0002)` instead of `sched_yield()` in vLLM's `shm_broadcast.py`. On a CPU with AMX an engine dies of an
illegal instruction where the first request of its life is the second stage of a split one, so each gets another first.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from llmproxy.app import Proxy
from llmproxy.config import BackendConfig, SchedulingConfig
from llmproxy.core.domain import Stage
from llmproxy.core.kv_connectors import KvConnector, Parameters, connectors
from llmproxy.scheduling.attempt import Split
from tests.e2e.vllm.test_real_vllm import proxy_before, until
from tests.e2e.vllm.vllm_requests import CASES, FRESH, Case

URLS = [url for url in os.environ.get("LLMPROXY_TEST_VLLM_SPLIT", "").split(",") if url]
CONNECTOR = os.environ.get("LLMPROXY_TEST_VLLM_CONNECTOR", "nixl")
LEASE_S = 20.0
WHOLE = ("completion-batch-prompts",)
"""The requests that one server answers."""
SPLIT_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
LONG = "Tell me about load balancers, one fact after the other. " * 60
LATE = "vllm:nixl_num_notifications_after_expiry_total"
FETCHED = r'vllm:prompt_tokens_by_source_total(?=\{.*source="external_kv_transfer")'
late_before: list[list[float]] = []
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        len(URLS) < 2, reason="needs real vLLM servers: set LLMPROXY_TEST_VLLM_SPLIT=prefill,decode,..."
    ),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


@asynccontextmanager
async def before_servers() -> AsyncIterator[Proxy]:
    """Starts a proxy that splits what can be split."""
    async with aiohttp.ClientSession() as session:
        for url in URLS:
            assert (await post(session, url, chat("first")))[0] == 200
    backends = [BackendConfig(url=url, role="decode" if number else "prefill") for number, url in enumerate(URLS)]
    scheduling = SchedulingConfig(disaggregation="always", kv_connector=CONNECTOR, kv_lease_s=LEASE_S)
    async with proxy_before(*backends, scheduling=scheduling) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def proxy(session: aiohttp.ClientSession) -> AsyncIterator[Proxy]:
    late_before[:] = [await gauges(session, url, LATE) for url in URLS]
    async with before_servers() as opened:
        yield opened


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0} | more


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    async with session.post(url + "/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.read()


async def hows(session: aiohttp.ClientSession, proxy: Proxy) -> dict[str, float]:
    """How often requests were served in each way so far."""
    async with session.get(proxy.url + "/metrics") as answer:
        page = await answer.text()
    found = re.findall(r'^llmproxy_disaggregation_total\{mode="(\w+)"\} (\S+)$', page, re.MULTILINE)
    return {name: float(count) for name, count in found if float(count)}


async def gauges(session: aiohttp.ClientSession, url: str, *names: str) -> list[float]:
    async with session.get(url + "/metrics") as answer:
        page = await answer.text()
    return [sum(map(float, re.findall(rf"^{name}\{{.*\}} (\S+)$", page, re.MULTILINE))) for name in names]


def meaning(case: Case, body: bytes) -> list[Any]:
    """Returns the texts of an answer, the reasons of their ends, and the numbers of tokens."""
    events = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: {")]
    texts: list[str] = []
    rest: list[Any] = []
    for found in map(json.loads, events if case.streams else [body]):
        for choice in found.get("choices", ()):
            part = choice.get("message") or choice.get("delta") or {}
            texts.append(str(part.get("content") or choice.get("text") or ""))
            texts += [str(call["function"].get("arguments")) for call in part.get("tool_calls") or ()]
            rest += [choice["finish_reason"]] if choice.get("finish_reason") else []
        texts += re.findall(r'"text": ?"([^"]*)"', json.dumps(found)) if case.path in SPLIT_PATHS[2:] else []
        texts += [found["delta"]] if isinstance(found.get("delta"), str) else []
        usage = found.get("usage") or {}
        rest += [usage[name] for name in ("prompt_tokens", "completion_tokens", "output_tokens") if name in usage][-1:]
    return ["".join(texts), rest[-2:]]


ONE_TOKEN = b'"prompt":"x"'
"""A prompt of one token kills an engine with vLLM 0.32's ExampleConnector, also without a proxy."""
DIVISIBLE = [
    case
    for case in CASES
    if case.path in SPLIT_PATHS and case.method == "POST" and "n2-" not in case.name
    if CONNECTOR == "nixl" or ONE_TOKEN not in case.body
]
"""Without the streams of several answers, whose events come in any order."""


@pytest.mark.parametrize("case", DIVISIBLE, ids=lambda case: case.name)
async def test_split_answer_equals_the_answer_of_one_server(
    session: aiohttp.ClientSession, proxy: Proxy, case: Case
) -> None:
    body, headers = case.body.replace(FRESH, b"fresh"), dict(case.headers)
    before = await hows(session, proxy)
    answers = []
    for url in (URLS[0], proxy.url):
        async with session.post(url + case.path, data=io.BytesIO(body), headers=headers) as answer:
            answers.append((answer.status, meaning(case, await answer.read()) if answer.status == 200 else []))
    assert answers[0] == answers[1]
    after = await hows(session, proxy)
    if answers[0][0] == 200:
        changed = {name for name in after if after[name] != before.get(name, 0.0)}
        assert changed == {Split.WHOLE if case.name in WHOLE else Split.SPLIT}


async def test_parameters_of_clients_kill_no_server(session: aiohttp.ClientSession, proxy: Proxy) -> None:
    for params in ({"do_remote_prefill": True}, {"do_remote_decode": True}):
        status, _ = await post(session, proxy.url, chat("evil", kv_transfer_params=params))
        assert status == 200
    for url in URLS:
        assert (await post(session, url, chat("alive")))[0] == 200


@pytest.mark.parametrize("streams", [False, True])
async def test_several_answers_come_from_one_server(
    session: aiohttp.ClientSession, proxy: Proxy, streams: bool
) -> None:
    before = await hows(session, proxy)
    body = chat(LONG, n=2, seed=1, temperature=1, ignore_eos=True, stream=streams)
    direct, proxied = [texts(await post(session, url, body)) for url in (URLS[1], proxy.url)]
    assert len(direct) == 2
    assert proxied == direct
    assert await hows(session, proxy) == before | {Split.WHOLE: before.get(Split.WHOLE, 0.0) + 1}


def texts(answer: tuple[int, bytes]) -> dict[int, str]:
    """The text of each choice of a chat, by its number."""
    status, body = answer
    assert status == 200, body
    found: dict[int, str] = {}
    for line in body.splitlines():
        if (data := line.removeprefix(b"data: ")).startswith(b"{"):
            for choice in json.loads(data)["choices"]:
                said = (choice.get("message") or choice["delta"]).get("content") or ""
                found[choice["index"]] = found.get(choice["index"], "") + said
    return found


async def test_prompt_computed_by_one_server_is_fetched_by_another(
    session: aiohttp.ClientSession, proxy: Proxy
) -> None:
    async def fetched() -> float:
        return sum([(await gauges(session, url, FETCHED))[0] for url in URLS[1:]])

    before = await fetched()
    body = chat(f"{uuid.uuid4()} {LONG}")
    # First through the proxy, because the prefill server would not compute a cached prompt again.
    proxied, direct = [texts(await post(session, url, body)) for url in (proxy.url, URLS[0])]
    assert proxied == direct
    assert await fetched() > before + len(LONG) / 8


def at(proxy: Proxy) -> set[tuple[Stage, bool]]:
    """The stages of all requests in flight, and whether their first token was there."""
    booked = [booking for backend in proxy.pools.backends.values() for booking in backend.bookings.values()]
    return {(one.request.stage, one.started) for one in booked}


async def reached(proxy: Proxy, stage: Stage, started: bool) -> None:
    async with asyncio.timeout(LEASE_S):
        while True:
            if (stage, started) in at(proxy):
                return
            await asyncio.sleep(0)


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1])
@pytest.mark.parametrize(("stage", "started"), [(Stage.PREFILL, False), (Stage.DECODE, False), (Stage.DECODE, True)])
async def test_a_client_that_leaves_leaves_nothing_in_engines(
    session: aiohttp.ClientSession, proxy: Proxy, stage: Stage, started: bool, after_s: float
) -> None:
    # An engine that is not told has to do for longer than anything here takes.
    body = chat(f"{uuid.uuid4()} {LONG}", max_tokens=2900, ignore_eos=True, stream=True)
    asked = [asyncio.create_task(post(session, proxy.url, body)) for _ in range(3)]
    await reached(proxy, stage, started)
    await asyncio.sleep(after_s)
    left = at(proxy)
    for task in asked:
        task.cancel()
    # Nobody fetches the others any more, so that they go with the lease.
    took_s = await emptied_s(session, LEASE_S / 4 if left == {(Stage.DECODE, True)} else LEASE_S + 5.0)
    print(f"left {', '.join(sorted(f'{stage} {started}' for stage, started in left))}, empty {took_s:.2f} s later")


async def emptied_s(session: aiohttp.ClientSession, within_s: float) -> float:
    """How long it takes until no engine has work, or blocks that are in use."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    for url in URLS:
        await until(lambda url=url: gauges(session, url, *HELD), [0.0, 0.0, 0.0], within_s)  # type: ignore[misc]
    return loop.time() - begun_s


async def test_a_client_that_leaves_between_the_stages_leaves_nothing_in_engines(
    session: aiohttp.ClientSession, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = connectors.get(CONNECTOR)
    real = kind.parameters

    def and_leave(self: KvConnector, answer: bytes) -> Parameters:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return real(self, answer)

    monkeypatch.setattr(kind, "parameters", and_leave)
    with pytest.raises(aiohttp.ClientError):
        await post(session, proxy.url, chat(f"{uuid.uuid4()} {LONG}", stream=True))
    print(f"left between the stages, empty {await emptied_s(session, LEASE_S + 5.0):.2f} s later")


async def test_no_block_was_read_after_its_lease(session: aiohttp.ClientSession, proxy: Proxy) -> None:
    assert (await hows(session, proxy))[Split.SPLIT] > 0
    assert [await gauges(session, url, LATE) for url in URLS] == late_before
