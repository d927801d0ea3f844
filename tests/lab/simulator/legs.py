"""The two legs of a split request: prefill at one replica, decode at another."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from llmproxy.lab.simulator.replica import Replica
from llmproxy.lab.simulator.server.text import WRONG_WORD
from tests.lab.simulator.conftest import CHAT_PATH, ENDLESS, post

KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
WORDS = "What is said in a prompt of some length. " * 20
CHAT = {"model": "base", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 5, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "base", "prompt": WORDS, "max_tokens": 5, "ignore_eos": True},
    "/v1/messages": CHAT,
    "/v1/responses": {"model": "base", "input": WORDS, "max_output_tokens": 5, "ignore_eos": True},
}
BAD = (WRONG_WORD * 5).strip()


async def prefill(client: aiohttp.ClientSession, replica: Replica, path: str = CHAT_PATH, **fields: Any) -> Any:
    """The answer of a prefill leg."""
    limit = "max_output_tokens" if "max_output_tokens" in BODIES[path] else "max_tokens"
    body = BODIES[path] | {limit: 1, "kv_transfer_params": KEEP} | fields
    status, answer = await post(client, replica.url + path, body)
    assert status == 200
    return answer


async def params_of(client: aiohttp.ClientSession, replica: Replica) -> Any:
    return (await prefill(client, replica))["kv_transfer_params"]


async def decode(client: aiohttp.ClientSession, replica: Replica, params: Any, **fields: Any) -> tuple[int, Any]:
    return await post(client, replica.url + CHAT_PATH, CHAT | {"kv_transfer_params": params} | fields)


async def plain(client: aiohttp.ClientSession, replica: Replica, **fields: Any) -> str:
    status, answer = await post(client, replica.url + CHAT_PATH, CHAT | fields)
    assert status == 200
    return text(answer)


def text(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"]).strip()


def events_of(chunks: list[bytes]) -> list[Any]:
    return [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks if b"[DONE]" not in chunk]


def kv_used(replica: Replica) -> float:
    return replica.engine.gauges().kv_used


async def metrics(client: aiohttp.ClientSession, replica: Replica) -> dict[str, float]:
    """The samples of the page that have no labels of their own, and the stages of fetching."""
    async with client.get(f"{replica.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    common = '{engine="0",model_name="base"}'
    named = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name.removeprefix("vllm:").replace(common, ""): float(value) for name, _, value in named}


@contextlib.asynccontextmanager
async def busy(client: aiohttp.ClientSession, replica: Replica) -> AsyncIterator[None]:
    """One endless stream, which fills a batch of one."""
    async with client.post(replica.url + CHAT_PATH, json=ENDLESS) as running:
        await running.content.readany()
        yield
        running.close()
