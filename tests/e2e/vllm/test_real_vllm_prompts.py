"""The proxy's knowledge of prompts and stored responses, before two real vLLM servers: LLMPROXY_TEST_VLLM=url,url.

They serve `tiny`, were started with VLLM_ENABLE_RESPONSES_API_STORE=1 and `--enable-prompt-tokens-details
--enable-scale-out --enable-auto-tool-choice --tool-call-parser hermes`, and have room for 4,096 tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from itertools import takewhile
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from llmproxy.config import BackendConfig, SchedulingConfig
from llmproxy.gateway.http.routes import BodyKind
from tests.e2e.vllm.test_real_vllm import MODEL, URLS, proxy_before
from tests.gateway.request.prompt_pairs import FACTS, PAIRS, Body, texts, user

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(len(URLS) < 2, reason="needs two real vLLM servers: set LLMPROXY_TEST_VLLM=url,url"),
    pytest.mark.asyncio(loop_scope="module"),
]
RENDERS = {
    BodyKind.CHAT: "/v1/chat/completions/render",
    BodyKind.MESSAGES: "/v1/messages/render",
    BodyKind.RESPONSES: "/v1/responses/render",
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def tokens(http: aiohttp.ClientSession, kind: BodyKind, body: Body) -> list[int]:
    async with http.post(URLS[0] + RENDERS[kind], json={"model": MODEL} | body) as answer:
        assert answer.status == 200, await answer.text()
        rendered = await answer.json()
    found: list[int] = (rendered[0] if isinstance(rendered, list) else rendered)["token_ids"]
    return found


@pytest.mark.parametrize("name", PAIRS)
async def test_engine_tokens_of_a_pair_are_the_recorded_ones(http: aiohttp.ClientSession, name: str) -> None:
    one, other = [await tokens(http, kind, body) for kind, body in PAIRS[name]]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    assert (len(one), len(other), same) == FACTS[name]


async def test_two_runs_of_a_coding_agent_find_one_cache(http: aiohttp.ClientSession) -> None:
    """Sessions with different headers and the same prompt go to the replica that has the prompt."""
    backends = (BackendConfig(url=url) for url in URLS[:2])
    async with proxy_before(*backends, scheduling=SchedulingConfig(placement="cost")) as proxy:

        async def run(prompt: str) -> tuple[str, int, int]:
            header = f"x-anthropic-billing-header: cc_version=2.1.7.{secrets.token_hex(2)}; cch={secrets.token_hex(3)};"
            body: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": [user(f"Do {secrets.token_hex(2)}.")]}
            body["system"] = texts(header, "You are a coding agent.", prompt, cache_control={"type": "ephemeral"})
            async with http.post(proxy.url + "/v1/messages", json=body) as answer:
                assert answer.status == 200, await answer.text()
                usage = (await answer.json())["usage"]
                cached = usage.get("cache_read_input_tokens") or 0
                return answer.headers["x-llmproxy-backend"], cached, cached + usage["input_tokens"]

        for _ in range(4):
            # Two prompts by turns: by load alone, the second run would go elsewhere half the time.
            prompts = [f"{secrets.token_hex(8)}: " + "Be careful with files. " * 350 for _ in range(2)]
            firsts = [await run(prompt) for prompt in prompts]
            seconds = [await run(prompt) for prompt in reversed(prompts)][::-1]
            for (backend, cached, _), (again, hit, whole) in zip(firsts, seconds, strict=True):
                assert cached < 64
                assert again == backend
                assert hit > 0.9 * whole


async def test_a_continued_response_is_found(http: aiohttp.ClientSession) -> None:
    backends = (BackendConfig(url=url) for url in URLS[:2])
    async with proxy_before(*backends, scheduling=SchedulingConfig(placement="round_robin")) as proxy:

        async def ask(url: str = proxy.url, **more: Any) -> tuple[int, str, dict[str, Any]]:
            body = {"model": MODEL, "input": "Hello there", "max_output_tokens": 4, **more}
            async with http.post(url + "/v1/responses", json=body) as answer:
                return answer.status, answer.headers.get("x-llmproxy-backend", ""), await answer.json()

        turns = [await ask() for _ in range(5)]
        assert len({backend for _, backend, _ in turns}) == 2
        for _ in range(3):
            before, turns = turns, [await ask(previous_response_id=said["id"]) for _, _, said in turns]
            for (_, maker, said), (status, backend, more) in zip(before, turns, strict=True):
                assert (status, backend) == (200, maker)
                assert more["usage"]["input_tokens"] > said["usage"]["input_tokens"]
        # A response of another proxy is looked for. The engine answers for a response that nobody has.
        for url in URLS[:2]:
            _, _, elsewhere = await ask(url)
            status, at, _ = await ask(previous_response_id=elsewhere["id"])
            assert (status, url.endswith(at)) == (200, True)
        status, _, error = await ask(previous_response_id="resp_of_nobody")
        assert (status, error["error"]["message"]) == (404, "Response with id 'resp_of_nobody' not found.")
