"""Faults that hit a stream after a certain token: an error event, silence, and a reset at a certain byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from llmproxy.lab.simulator.replica import Replica
from tests.lab.simulator.conftest import CHAT, CHAT_PATH, FAST, chunks_of, until
from tests.lab.simulator.test_faults import ENGINE_ERROR
from tests.numbered import fault_in

STREAM = CHAT | {"stream": True, "max_tokens": 12, "ignore_eos": True}
NAMED = {"x-request-id": "mine"}
DONE = b"data: [DONE]\n\n"


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with Replica(replace(FAST, text="numbered")) as running:
        yield running


async def chunks(client: aiohttp.ClientSession, **fields: Any) -> list[bytes]:
    async with client.post(CHAT_PATH, json=STREAM | fields, headers=NAMED) as answer:
        return await chunks_of(answer)


async def test_an_error_comes_after_a_certain_token(replica: Replica, client: aiohttp.ClientSession) -> None:
    whole = await chunks(client)
    replica.faults.set("stream_error", after_tokens=5, times=1)
    async with client.post(CHAT_PATH, json=CHAT) as unharmed:
        assert unharmed.status == 200
    broken = await chunks(client)
    assert [len(chunk) for chunk in broken[:6]] == [len(chunk) for chunk in whole[:6]]
    assert broken[6:] == [ENGINE_ERROR, DONE]
    assert len(await chunks(client)) == len(whole)
    await until(lambda: not replica.engine.busy)


async def test_a_stream_falls_silent_after_a_certain_token(replica: Replica, client: aiohttp.ClientSession) -> None:
    begun = b"".join((await chunks(client))[:6])
    replica.faults.set("silent", after_tokens=5, times=1)
    async with client.post(CHAT_PATH, json=STREAM, headers=NAMED) as answer:
        assert len(await answer.content.readexactly(len(begun))) == len(begun)
        reading = asyncio.create_task(answer.content.readany())
        await until(lambda: not replica.engine.busy)
        assert len(await chunks(client)) > 12, "other streams go on"
        assert not reading.done()
        reading.cancel()


async def test_a_reset_comes_at_a_certain_byte_behind_a_token(replica: Replica, client: aiohttp.ClientSession) -> None:
    whole = await chunks(client)
    first, event = b"".join(whole[:8]), whole[8]
    within_character = event.index("😀".encode()) + 2
    for after_bytes in (0, 1, within_character, len(event)):
        replica.faults.set("reset", after_tokens=7, after_bytes=after_bytes, times=1)
        received = await until_reset(client)
        assert len(received) == len(first) + after_bytes
        assert received[len(first) :][-20:] == event[:after_bytes][-20:]
    escape = whole[5].index(b'\\""}')
    replica.faults.set("reset", after_tokens=4, after_bytes=escape + 1, times=1)
    assert (await until_reset(client)).endswith(b"\\")


async def until_reset(client: aiohttp.ClientSession) -> bytes:
    """Returns the bytes of a stream before its connection was reset."""
    received = b""
    async with client.post(CHAT_PATH, json=STREAM, headers=NAMED) as answer:
        try:
            async for data in answer.content.iter_any():
                received += data
        except aiohttp.ClientError:
            return received
    raise AssertionError("the stream ended without a reset")


async def test_a_stream_that_ends_before_is_not_hit(replica: Replica, client: aiohttp.ClientSession) -> None:
    for kind in ("stream_error", "silent", "reset"):
        replica.faults.set(kind, after_tokens=13, times=1)
        assert (await chunks(client))[-1] == DONE


@pytest.mark.parametrize(("after_tokens", "sent"), [(250, 250), (301, 300)])
async def test_a_slow_reader_gets_all_tokens_in_fewer_deltas(
    client: aiohttp.ClientSession, after_tokens: int, sent: int
) -> None:
    """Tokens of the same delta may lie on both sides of a fault. Long events fill the buffers soon."""
    body = STREAM | {"max_tokens": 300, "return_token_ids": True, "model": None}
    async with Replica(replace(FAST, model="m" * 100_000, text="numbered")) as replica:
        replica.faults.set("stream_error", after_tokens=after_tokens)
        async with client.post(replica.url + CHAT_PATH, json=body) as answer:
            await until(lambda: not replica.engine.busy)
            *events, last, done = (await answer.content.read()).split(b"\n\n")[:-1]
    hit = last + b"\n\n" == ENGINE_ERROR
    choices = [json.loads(event[6:])["choices"][0] for event in (events if hit else [*events, last])[1:]]
    tokens = [len(choice["token_ids"]) for choice in choices]
    assert (hit, sum(tokens), done) == (sent < 300, sent, DONE.strip())
    assert max(tokens) > 1
    assert choices[-1]["finish_reason"] == (None if hit else "length")


@pytest.mark.parametrize(
    ("path", "limit", "last"),
    [
        (CHAT_PATH, "max_tokens", '"finish_reason":"abort","stop_reason":null'),
        ("/v1/messages", "max_tokens", '"delta":{"stop_reason":null'),
        ("/v1/responses", "max_output_tokens", '"status":"completed"'),
    ],
)
async def test_an_aborted_stream_looks_like_an_answer_that_ended(
    replica: Replica, client: aiohttp.ClientSession, path: str, limit: str, last: str
) -> None:
    body = {"messages": CHAT["messages"], "input": "Hello", "stream": True, "ignore_eos": True}
    async with client.post(path, json=body | {limit: 30_000}) as answer:
        await until(lambda: replica.engine.counters.generation > 10)
        replica.faults.set("abort")
        assert last in (await answer.text())[-2_000_000:]
    assert replica.faults.kind is None
    await replica.idle()
    assert not replica.engine.busy
    assert (await chunks(client))[-1] == DONE


async def test_aborted_requests_end_with_what_they_have(replica: Replica, client: aiohttp.ClientSession) -> None:
    whole = asyncio.create_task(client.post(CHAT_PATH, json=CHAT | {"max_tokens": 30_000, "ignore_eos": True}))
    async with client.post(CHAT_PATH, json=STREAM | {"max_tokens": 30_000, "return_token_ids": True}) as answer:
        await until(lambda: replica.engine.counters.generation > 20)
        replica.faults.set("abort")
        events = [json.loads(chunk[6:])["choices"][0] for chunk in (await chunks_of(answer))[1:-1]]
    assert [event["finish_reason"] for event in events] == [*[None] * (len(events) - 1), "abort"]
    assert fault_in("".join(event["delta"]["content"] for event in events)) is None
    assert all(event["token_ids"] for event in events[:-1])
    choice = (await (await whole).json())["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert fault_in(choice["message"]["content"]) is None
