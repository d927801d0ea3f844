"""A fast replica, a slow one, and a client for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from llmproxy.lab.simulator.replica import Replica, ReplicaOptions

FAST = ReplicaOptions(model="base", adapters=("lora-0", "lora-1"), profile="tiny", noise=False)
NIXL = replace(FAST, kv_transfer="nixl", kv_latency_s=0.0, kv_handshake_s=0.0)
CHAT_PATH = "/v1/chat/completions"
CHAT = {"model": "base", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 3}
ENDLESS = CHAT | {"stream": True, "max_tokens": 30_000, "ignore_eos": True}


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with Replica(FAST) as running:
        yield running


@pytest.fixture
async def client(replica: Replica) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of `replica` where a path is asked for, and of any other where a whole URL is."""
    async with aiohttp.ClientSession(replica.url) as session:
        yield session


@pytest.fixture
async def prefiller() -> AsyncIterator[Replica]:
    async with Replica(NIXL) as replica:
        yield replica


@pytest.fixture
async def decoder() -> AsyncIterator[Replica]:
    async with Replica(NIXL) as replica:
        yield replica


async def post(client: aiohttp.ClientSession, url: str, body: object) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    async with client.post(url, json=body) as response:
        return response.status, await response.json()


async def chunks_of(response: aiohttp.ClientResponse) -> list[bytes]:
    """The HTTP chunks of a body, whole."""
    chunks, chunk = [], b""
    async for data, ends in response.content.iter_chunks():
        chunk += data
        if ends:
            chunks.append(chunk)
            chunk = b""
    return chunks


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other tasks bring about; the test's own time limit ends it."""
    while not condition():  # noqa: ASYNC110 - the state of a replica has no event to wait for
        await asyncio.sleep(0.001)
