"""A stream goes on at another replica in each setting of the proxy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llmproxy.config import hash_of
from llmproxy.lab.simulator.replica import Replica
from tests.e2e.backends.test_continued import (
    CHAT_BODY,
    NUMBERED,
    TOKENS,
    TURNS,
    WAYS,
    Read,
    check,
    read,
    read_broken,
    tokens,
)
from tests.e2e.disaggregation.conftest import hows, split
from tests.e2e.operators.test_reload import reloadable, rewrite
from tests.e2e.operators.test_tracing import traced
from tests.e2e.operators.test_workers import reached
from tests.e2e.processes import served
from tests.e2e.proxies import CHAT, ENDLESS, ProxyUnderTest, serving, until
from tests.otlp import attributes
from tests.remote.cluster.fleet import members

ONE_PLACE: dict[str, Any] = {"fixed_limit": 1, "scheduling": {"look_ahead": 0}}
NO_USAGE = CHAT_BODY | {"stream_options": None}


async def read_text(http: aiohttp.ClientSession, url: str) -> Read:
    async with http.post(url + CHAT, json=CHAT_BODY) as answer:
        return Read((await answer.read()).split(b"\n\n"))


@pytest.mark.slow
@pytest.mark.timeout(300, method="thread")
async def test_workers(tmp_path: Path) -> None:
    async with Replica(NUMBERED) as first, Replica(NUMBERED) as second, aiohttp.ClientSession() as http:
        arguments = ("--port", "0", "--workers", "2", first.url, second.url)
        async with served(tmp_path / "log", *arguments) as process:
            url = await process.url()
            undisturbed = await read_text(http, url)
            first.faults.set("reset", after_tokens=8, times=1)
            while first.faults.kind is not None:
                check(await read_text(http, url), undisturbed)
            await reached(url, "llmproxy_continued_streams_total", 1)


async def test_a_member_that_leases_from_a_leader() -> None:
    async with members(2, NUMBERED, NUMBERED) as found:
        (member,) = found.followers
        undisturbed = await read(member, CHAT, CHAT_BODY)
        check(await read_broken(member, CHAT, CHAT_BODY, "reset", after_tokens=8), undisturbed)
        await member.settled()
        assert member.metric("llmproxy_continued_streams_total") == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("after_tokens", [1, 8])
async def test_prefill_and_decode_apart(way: str, after_tokens: int) -> None:
    path, body = WAYS[way]
    transferring = replace(NUMBERED, kv_transfer="nixl", kv_latency_s=0.0, kv_handshake_s=0.0)
    async with split(transferring, transferring, transferring, roles="prefill decode decode") as proxy:
        undisturbed = await read(proxy, path, body)
        check(await read_broken(proxy, path, body, "reset", 1, after_tokens=after_tokens), undisturbed)
        await proxy.settled()
        assert proxy.metric("llmproxy_continued_streams_total") == 1
        assert hows(proxy).keys() == {"split"}


async def test_an_adapter() -> None:
    body = CHAT_BODY | {"model": "lora-0"}
    async with serving(NUMBERED, NUMBERED, **TURNS) as proxy:
        undisturbed = await read(proxy, CHAT, body)
        check(await read_broken(proxy, CHAT, body, "reset", after_tokens=8), undisturbed)
        sent = json.loads(proxy.sent("b1").body)
        assert (sent["model"], sent["continue_final_message"]) == ("lora-0", True)


@asynccontextmanager
async def in_the_gap(
    proxy: ProxyUnderTest, body: object = CHAT_BODY, **headers: str
) -> AsyncIterator[tuple[int, asyncio.Task[Read]]]:
    """The reader of a stream that broke, and the number of its replica. The rest waits for the only place of another
    replica, until the block is left.
    """
    async with proxy.stream(ENDLESS, **headers) as seat:
        await seat.content.readany()
        broken = 1 - int(seat.headers["x-llmproxy-backend"][1:])
        proxy.replicas[broken].faults.set("reset", after_tokens=8, times=1)
        reading = asyncio.create_task(read(proxy, CHAT, body, **headers))
        await until(lambda: proxy.queued == 1)
        yield broken, reading
        assert not reading.done()


async def test_a_reload_in_the_gap(tmp_path: Path) -> None:
    old, new = ({"name": "acme", "keys": [hash_of(key)], "trusted": True} for key in ("old", "new"))
    headers = {"authorization": "Bearer old"}
    async with reloadable(tmp_path, NUMBERED, NUMBERED, tenants=[old], **ONE_PLACE) as proxy:
        undisturbed = await read(proxy, CHAT, CHAT_BODY, **headers)
        async with in_the_gap(proxy, **headers) as (broken, reading):
            backends = list(proxy.config_data["backends"])
            backends[1 - broken] = backends[1 - broken] | {"api_key": "other"}
            del backends[broken]
            await rewrite(proxy, tenants=[new], retry={"continue": "off"}, backends=backends)
            await until(lambda: len(proxy.app.pools.backends) == 1)
            assert (await proxy.chat(headers=headers)).status == 401
        check(await reading, undisturbed)
        assert proxy.sent(f"b{1 - broken}").headers["authorization"] == "Bearer other"


async def test_a_rest_enters_a_full_waiting_room_and_goes_first() -> None:
    body = CHAT_BODY | {"max_tokens": 600}
    async with serving(NUMBERED, NUMBERED, queue={"requests_max": 1}, **ONE_PLACE) as proxy:
        undisturbed = await read(proxy, CHAT, body)
        async with proxy.stream(ENDLESS) as seat:
            await seat.content.readany()
            reading = asyncio.create_task(read(proxy, CHAT, body))
            await until(lambda: all(replica.engine.busy for replica in proxy.replicas))
            waiting = await proxy.enter("waits")
            proxy.replicas[1 - int(seat.headers["x-llmproxy-backend"][1:])].faults.set("engine_dead")
            await until(lambda: proxy.queued == 2)
            assert (await proxy.chat()).status == 429
        check(await reading, undisturbed)
        assert not waiting.done()
        assert (await waiting).status == 200


async def test_limits_count_a_continued_stream_once() -> None:
    limits = {"requests_per_min": 1, "tokens_per_min": 6000, "in_flight": 1}
    async with serving(NUMBERED, NUMBERED, models=[{"name": "base", "limits": limits}]) as proxy:
        faults = [replica.faults for replica in proxy.replicas]
        for one in faults:
            one.set("reset", after_tokens=50, times=1)
        reading = asyncio.create_task(read(proxy, CHAT, CHAT_BODY))
        await until(lambda: None in [one.kind for one in faults])
        for one in faults:
            one.clear()
        found = await reading
        assert (len(found.comments), found.errors, found.done) == (1, [], 1)
        await proxy.settled()
        (limit,) = proxy.app.pools.snapshot(asyncio.get_running_loop().time()).limits
        ((prompt_tokens, _, total_tokens),) = tokens(found.usage)
        assert limit.tokens_left is not None
        # The estimate of a prompt differs a little from the engine's count.
        assert 0 <= 6000 - limit.tokens_left <= total_tokens + prompt_tokens
        assert limit.in_flight == 0
        assert (await proxy.chat()).status == 429


async def test_usage_that_only_the_proxy_asked_for() -> None:
    async with serving(NUMBERED, NUMBERED, **TURNS) as proxy:
        undisturbed = await read(proxy, CHAT, NO_USAGE)
        found = await read_broken(proxy, CHAT, NO_USAGE, "reset", after_tokens=8)
        check(found, undisturbed)
        assert found.usage == []
        await proxy.settled()
        counted = proxy.metric("llmproxy_tokens_total", direction="output")
        assert counted == TOKENS * proxy.outcomes()["completed"]


async def test_both_attempts_have_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch) as receiver:
        async with serving(NUMBERED, NUMBERED, **TURNS, tracing=True) as proxy:
            await read_broken(proxy, CHAT, CHAT_BODY, "reset", after_tokens=8)
            seen = [proxy.sent(name).headers["traceparent"].split("-")[2] for name in ("b0", "b1")]
        (broken,) = [span for span in receiver.spans if "continued" in [event.name for event in span.events]]
        spans = receiver.of(broken.trace_id.hex())
        assert [span.name for span in spans] == [
            "POST /v1/chat/completions",
            "queue",
            "chat base",
            "queue",
            "chat base",
        ]
        first, second = spans[2], spans[4]
        assert [span.span_id.hex() for span in (first, second)] == seen
        assert [event.name for event in first.events] == ["first token", "continued"]
        assert attributes(first)["error.type"] == "failed"
        assert attributes(second)["gen_ai.usage.output_tokens"] == TOKENS
