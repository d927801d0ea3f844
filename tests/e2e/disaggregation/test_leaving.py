"""Clients and replicas that leave between the stages, or in them: nothing is kept for anybody who is gone."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from llmproxy.config import hash_of
from llmproxy.core.kv_connectors import Parameters, connectors
from llmproxy.core.kv_connectors.nixl import Nixl
from llmproxy.gateway.proxying import relay
from llmproxy.gateway.proxying.split import release
from llmproxy.lab.simulator.replica import Replica
from tests.e2e.disaggregation.conftest import NIXL, hows, split
from tests.e2e.disaggregation.test_split import LONG
from tests.e2e.disaggregation.test_split_failures import ENDLESS, PARAMS, SLOW, right_answer, scripted_prefill
from tests.e2e.proxies import CHAT, ProxyUnderTest, until
from tests.e2e.scripted import STREAM_HEAD, answering, chunk, scripted, whole
from tests.lab.simulator.legs import kv_used
from tests.upstream.raw_server import Peer

# --- clients that leave -----------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_during_the_prefill_leaves_nothing() -> None:
    async with split(replace(NIXL, speed=0.01), NIXL) as proxy:
        asked = asyncio.create_task(proxy.chat(LONG))
        await until(lambda: proxy.replicas[0].in_flight)
        asked.cancel()
        await proxy.settled()
        await until(lambda: kv_used(proxy.replicas[0]) == 0.0)


async def test_a_client_that_leaves_during_the_transfer_leaves_nothing() -> None:
    async with split(NIXL, replace(SLOW, kv_latency_s=0.2)) as proxy:
        asked = asyncio.create_task(proxy.chat(LONG))
        # Nobody fetches the prompt where its client leaves before the engine has the request: it stays for its lease.
        await until(lambda: kv_used(proxy.replicas[1]) > 0.0)
        asked.cancel()
        await proxy.settled()
        await until(lambda: kv_used(proxy.replicas[0]) == kv_used(proxy.replicas[1]) == 0.0)
        assert proxy.outcomes() == {"cancelled": 1}


async def test_a_client_that_leaves_in_mid_stream_was_served_in_two_stages(log: io.StringIO) -> None:
    """A client that leaves after the end mark, as many do, was served so too."""
    async with split() as proxy:
        async with proxy.stream(ENDLESS) as stream:
            await stream.content.readany()
        await proxy.settled()
        assert proxy.outcomes() == {"cancelled": 1}
        assert hows(proxy) == {"split": 1}
        assert "disaggregation=split prefill_backend=b0" in log.getvalue()


async def test_a_shutdown_between_the_stages_is_said_as_one() -> None:
    opened: list[ProxyUnderTest] = []

    async def script(peer: Peer, _: bytes) -> None:
        opened[0].app.dispatcher.drain()
        await peer.send(whole(json.dumps({"choices": [], "kv_transfer_params": PARAMS}).encode()))

    async with scripted_prefill(script) as proxy:
        opened.append(proxy)
        answer = await proxy.chat(LONG)
        assert (answer.status, answer.json["error"]["message"]) == (503, "The proxy is shutting down. Try again.")
        assert proxy.outcomes() == {"draining": 1}


class Leaves(Nixl):
    """The client is gone when the parameters are read."""

    def parameters(self, answer: bytes) -> Parameters:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        return super().parameters(answer)


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The configuration under which each client leaves between the stages."""
    monkeypatch.setitem(connectors._factories, "leaves", Leaves)
    return {"kv_connector": "leaves"}


async def left_between(proxy: ProxyUnderTest) -> None:
    with contextlib.suppress(aiohttp.ClientError):
        await proxy.chat(LONG)
    await proxy.settled()
    assert proxy.outcomes() == {"cancelled": 1}
    assert hows(proxy) == {}


def asked(replica: Replica) -> list[tuple[str, Any]]:
    """The paths and bodies of all requests of the proxy that are no polls."""
    seen = [one for one in replica.requests_seen if one.method == "POST" and one.path.startswith("/v1/")]
    return [(one.path, json.loads(one.body)) for one in seen]


async def test_a_client_that_leaves_between_the_stages_leaves_nothing(
    leaving: dict[str, Any], log: io.StringIO
) -> None:
    """The lease of an engine is longer than what this waits for."""
    async with split(scheduling=leaving) as proxy:
        await left_between(proxy)
        await until(lambda: kv_used(proxy.replicas[0]) == 0.0)
        ((path, body),) = asked(proxy.replicas[1])
        # It is refused, so that nothing is computed or transferred for it.
        assert (path, body["max_tokens"], body["prompt"]) == ("/v1/completions", 0, [1])
        assert body["kv_transfer_params"]["do_remote_prefill"] is True
        assert "prompt_not_released" not in log.getvalue()


async def test_a_full_decode_replica_frees_prompts_as_well(leaving: dict[str, Any]) -> None:
    """Its only place is taken by another stream, which is not touched."""
    full = replace(NIXL, max_num_seqs=1)
    scheduling = leaving | {"look_ahead": 0}
    async with (
        split(NIXL, full, scheduling=scheduling, fixed_limit=2) as proxy,
        proxy.http.post(proxy.replicas[1].url + CHAT, json=ENDLESS) as other,
    ):
        await other.content.readany()
        with contextlib.suppress(aiohttp.ClientError):
            await proxy.chat(LONG)
        await until(lambda: kv_used(proxy.replicas[0]) == 0.0)
        assert [path for path, _ in asked(proxy.replicas[1])] == [CHAT, "/v1/completions"]
        assert await other.content.readany()
        other.close()


async def test_a_decode_replica_that_is_away_leaves_prompts_to_their_lease(
    leaving: dict[str, Any], monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    monkeypatch.setattr(release, "RELEASE_S", 0.1)

    async def script(peer: Peer, _: bytes) -> None:
        await peer.reader.read(1)

    lease = replace(NIXL, kv_lease_s=0.05)
    async with (
        scripted(script) as decode,
        split(lease, roles="prefill decode", extra=[decode.url], scheduling=leaving) as proxy,
    ):
        for _ in range(2):
            with contextlib.suppress(aiohttp.ClientError):
                await proxy.chat(LONG)
        await until(lambda: proxy.outcomes() == {"cancelled": 2})
        (line,) = [line for line in log.getvalue().splitlines() if "prompt_not_released" in line]
        assert "prefill_backend=b0" in line
        assert " backend=b1" in line


async def test_an_engine_that_does_not_refuse_is_reported(leaving: dict[str, Any], log: io.StringIO) -> None:
    lease, script = replace(NIXL, kv_lease_s=0.05), answering(whole(b"fine"))
    async with (
        scripted(script) as decode,
        split(lease, roles="prefill decode", extra=[decode.url], scheduling=leaving) as proxy,
    ):
        await left_between(proxy)
        assert 'why="It answered 200: fine"' in log.getvalue()


async def test_a_client_that_leaves_at_the_last_step_of_its_prompt_leaves_nothing() -> None:
    """The engine does not hear of it before the prompt is computed, and kept."""
    rated = [{"name": "t", "keys": [hash_of("k")], "limits": {"tokens_per_min": 6000.0}}]
    async with split(replace(NIXL, speed=0.05), NIXL, tenants=rated) as proxy:
        first = proxy.replicas[0].engine
        task = asyncio.create_task(proxy.chat(LONG, headers={"authorization": "Bearer k"}))
        await until(lambda: first.kv.kept)
        task.cancel()
        await until(lambda: proxy.outcomes() == {"cancelled": 1})
        await until(lambda: kv_used(proxy.replicas[0]) == 0.0)
        assert asked(proxy.replicas[1])[-1][0] == "/v1/completions"
        # To leave early is not free: 100 tokens a second come back.
        _, left = proxy.app.pools.limits.rates.left_per_min("tenant:t", asyncio.get_running_loop().time())
        assert left is not None
        assert left < 6000 - 100


@pytest.mark.slow
async def test_a_prompt_is_not_computed_for_long_when_its_client_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PREFILL_GRACE_S", 0.05)
    async with split(replace(NIXL, speed=0.0001), NIXL) as proxy:
        task = asyncio.create_task(proxy.chat(LONG))
        await until(lambda: proxy.replicas[0].in_flight)
        task.cancel()
        await until(lambda: proxy.outcomes() == {"cancelled": 1})
        await until(lambda: not proxy.replicas[0].in_flight)
        await proxy.replicas[0].restart()


async def test_a_second_stage_is_not_cut_before_its_engine_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "DECODE_GRACE_S", 10.0)
    asked, left, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def script(peer: Peer, _: bytes) -> None:
        asked.set()
        await left.wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(peer.reader.read(1), 0.05)
        await peer.send(STREAM_HEAD + chunk(b": here\n\n"))
        assert await peer.reader.read(1) == b""
        gone.set()

    async with scripted(script) as decode, split(NIXL, roles="prefill decode", extra=[decode.url]) as proxy:
        task = asyncio.create_task(proxy.chat(LONG))
        await asked.wait()
        task.cancel()
        left.set()
        await gone.wait()
        assert proxy.outcomes() == {"cancelled": 1}


async def test_a_decode_replica_that_leaves_between_the_stages(log: io.StringIO) -> None:
    """And then its prefill replica is removed, whose prompt nobody fetched."""
    opened: list[ProxyUnderTest] = []

    class Leaves(Nixl):
        """The decode replica takes nothing new when the parameters are read."""

        def parameters(self, answer: bytes) -> Parameters:
            opened[0].app.registry.drain("b1")
            return super().parameters(answer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(connectors._factories, "leaves", Leaves)
        async with split(scheduling={"kv_connector": "leaves"}) as proxy:
            opened.append(proxy)
            await right_answer(proxy)
            await proxy.settled()
            assert proxy.outcomes() == {"completed": 1}
            assert "attempts=2 " in log.getvalue()
            # Nobody fetched the KV blocks that were computed for it.
            await until(lambda: kv_used(proxy.replicas[0]) == 0.0)
            registry = proxy.app.registry
            registry.undrain("b1")
            registry.update("config", [registry.backends["b1"]])
            await until(lambda: "b0" not in registry.backends)
            assert (await proxy.chat(LONG)).status == 200


async def test_a_drained_prefill_replica_waits_until_its_prompts_are_fetched() -> None:
    async with split(NIXL, replace(SLOW, kv_latency_s=0.3)) as proxy:
        asked = asyncio.create_task(proxy.chat(LONG))
        await until(lambda: proxy.replicas[1].in_flight)
        assert proxy.app.dispatcher.in_flight("b0") == 0
        empty = asyncio.create_task(proxy.app.dispatcher.emptied("b0"))
        await asyncio.sleep(0)
        assert not empty.done()
        assert (await asked).status == 200
        await empty


async def test_a_broken_stream_ends_with_one_error_event() -> None:
    async with split(retry={"continue": "off"}) as proxy, proxy.stream(ENDLESS) as stream:
        await stream.content.readuntil(b"\n\n")
        proxy.replicas[1].faults.set("engine_dead")
        received = bytearray()
        async for data, _ in stream.content.iter_chunks():
            received += data
        assert received.count(b'"error"') == 1
        assert hows(proxy) == {"split": 1}
