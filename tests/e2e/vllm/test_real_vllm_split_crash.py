"""Real vLLM servers that are killed under split requests: opt in with LLMPROXY_TEST_VLLM_CONTROL too.

It is a command that is called with `crash`, `start` or `wait` and the port of a server, and kills all processes of it,
starts it again, or waits until it answers.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
import pytest

from llmproxy.app import Proxy
from llmproxy.core.domain import Stage
from tests.e2e.vllm.test_real_vllm_split import LATE, LONG, URLS, at, before_servers, chat, gauges, hows, reached, texts

CONTROL = os.environ.get("LLMPROXY_TEST_VLLM_CONTROL", "")
CLIENTS, REQUESTS, KILLED_AFTER = 8, 60, 15
TOKENS, ALIKE = 40, 40
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(len(URLS) < 3 or not CONTROL, reason="needs real vLLM servers, and LLMPROXY_TEST_VLLM_CONTROL"),
]


async def control(verb: str, url: str) -> None:
    process = await asyncio.create_subprocess_shell(
        f"{CONTROL} {verb} {urlsplit(url).port}", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0


@asynccontextmanager
async def restarted(url: str) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await control("start", url)
        await control("wait", url)


async def stream(session: aiohttp.ClientSession, url: str, prompt: str, **more: str) -> tuple[int, bytes]:
    """The status of a streamed chat, and all that came of it."""
    body = b""
    asked = chat(prompt, max_tokens=TOKENS, ignore_eos=True, stream=True, **more)
    async with session.post(url + "/v1/chat/completions", json=asked) as answer:
        try:
            async for data in answer.content.iter_any():
                body += data
        except aiohttp.ClientPayloadError:
            pass
        return answer.status, body


def fate(answer: tuple[int, bytes]) -> str:
    """`served` as a whole, `broken` off with one error event after a token, or what else became of it."""
    status, body = answer
    if status != 200:
        return f"{status}: {body.decode(errors='replace')}"
    errors, ended = body.count(b'data: {"error"'), b"data: [DONE]" in body
    if ended and not errors:
        return "served"
    if errors == 1 and not ended and b'"content":"' in body.replace(b'"content":""', b""):
        return "broken"
    return body.decode(errors="replace")


@pytest.mark.parametrize(("stage", "started"), [(Stage.PREFILL, False), (Stage.DECODE, False), (Stage.DECODE, True)])
@pytest.mark.parametrize("victim", [0, 1], ids=["prefill", "decode"])
async def test_a_server_that_is_killed_costs_no_answer_that_has_not_begun(
    victim: int, stage: Stage, started: bool
) -> None:
    prompts = [f"{uuid.uuid4()} {LONG}" for _ in range(REQUESTS)]
    answers: dict[str, tuple[int, bytes]] = {}
    enough = asyncio.Event()

    async def client(session: aiohttp.ClientSession, proxy: Proxy, own: list[str]) -> None:
        for prompt in own:
            answers[prompt] = await stream(session, proxy.url, prompt)
            if len(answers) >= KILLED_AFTER:
                enough.set()

    async with aiohttp.ClientSession() as session, restarted(URLS[victim]):
        survivors = [url for url in URLS if url != URLS[victim]]
        late = [await gauges(session, url, LATE) for url in survivors]
        async with before_servers() as proxy:
            async with asyncio.TaskGroup() as group:
                for number in range(CLIENTS):
                    group.create_task(client(session, proxy, prompts[number::CLIENTS]))
                await enough.wait()
                await reached(proxy, stage, started)
                there = sorted(f"{stage} {started}" for stage, started in at(proxy))
                await control("crash", URLS[victim])
            fates = Counter(map(fate, answers.values()))
            print(f"killed while {', '.join(there)}: {dict(fates)}, {await hows(session, proxy)}")
        assert fates.keys() <= {"served", "broken"}
        assert [await gauges(session, url, LATE) for url in survivors] == late
        for prompt, answer in answers.items():
            if fate(answer) == "served":
                # With a salt, because no fetched block may be in its cache. The end of a text depends a little on
                # other requests of its batch. A text with the KV of another prompt differs from the beginning.
                # Computations from the cache round differently, as do prompts that were tried twice.
                direct = [await stream(session, URLS[2], prompt, cache_salt="alone") for _ in range(2)]
                assert texts(answer)[0][:ALIKE] in [texts(one)[0][:ALIKE] for one in direct]
