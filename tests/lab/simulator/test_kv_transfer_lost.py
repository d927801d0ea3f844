"""KV that is not available, times of transfers, and replicas that share a store."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llmproxy.lab.simulator.replica import FaultKind, Replica
from llmproxy.lab.simulator.server.nixl import NixlConnector
from tests.lab.simulator.conftest import CHAT_PATH, FAST, NIXL, chunks_of, post, until
from tests.lab.simulator.legs import (
    BAD,
    CHAT,
    WORDS,
    decode,
    events_of,
    kv_used,
    metrics,
    params_of,
    plain,
    prefill,
    text,
)

LOST_FAST = replace(NIXL, speed=50.0, kv_lease_s=3000.0)
INTERNAL = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}


@pytest.fixture
def waits_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times of the model that transfers and losses take; nobody waits for them."""
    seen: list[float] = []

    async def until_then(_: NixlConnector, __: float, seconds: float) -> None:
        seen.append(seconds)

    monkeypatch.setattr(NixlConnector, "_until", until_then)
    return seen


async def test_transfers_take_their_bytes_and_the_first_one_a_handshake(
    client: aiohttp.ClientSession, waits_s: list[float], prefiller: Replica
) -> None:
    options = replace(NIXL, kv_latency_s=0.25, kv_handshake_s=2.0, kv_gb_per_s=0.5)
    async with Replica(options) as decoder:
        tokens: list[int] = []
        for number in range(3):
            body: dict[str, Any] = {"messages": [{"role": "user", "content": f"{number} {WORDS}"}]}
            params = (await prefill(client, prefiller, **body))["kv_transfer_params"]
            tokens.append(params["remote_num_tokens"])
            await decode(client, decoder, params, **body)
    took_s = [0.25 + count * 131_072 / 0.5e9 for count in tokens]
    assert waits_s == pytest.approx([took_s[0] + 2.0, *took_s[1:]])


async def test_a_lost_prefiller_is_noticed_sooner_where_it_was_known(
    client: aiohttp.ClientSession, waits_s: list[float], decoder: Replica
) -> None:
    async with Replica(NIXL) as met, Replica(NIXL) as unknown:
        await decode(client, decoder, await params_of(client, met))
        lost = [await params_of(client, met), await params_of(client, unknown)]
    waits_s.clear()
    assert [(await decode(client, decoder, params))[0] for params in lost] == [500, 500]
    assert waits_s == [0.1, 5.0]


@pytest.mark.parametrize("known", [False, True])
async def test_a_lost_prefiller_fails_the_request(client: aiohttp.ClientSession, known: bool) -> None:
    async with Replica(LOST_FAST) as decoder:
        async with Replica(LOST_FAST) as prefiller:
            if known:
                await decode(client, decoder, await params_of(client, prefiller))
            params = await params_of(client, prefiller)
        status, answer = await decode(client, decoder, params)
        assert (status, answer) == (500, {"error": INTERNAL})
        body = CHAT | {"kv_transfer_params": params, "stream": True}
        async with client.post(decoder.url + CHAT_PATH, json=body) as response:
            assert response.status == 200
            chunks = await chunks_of(response)
        role, error = events_of(chunks)
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert error == {"error": INTERNAL}
        assert chunks[-1] == b"data: [DONE]\n\n"
        page = await metrics(client, decoder)
        assert page["nixl_num_failed_transfers_total"] == 2
        assert page['request_success_total{engine="0",finished_reason="error",model_name="base"}'] == 2
        assert kv_used(decoder) == 0.0
        assert await plain(client, decoder) != BAD, "the engine lives"


async def test_with_the_other_policy_a_lost_prompt_is_computed(client: aiohttp.ClientSession) -> None:
    async with Replica(replace(LOST_FAST, kv_load_failure_policy="recompute")) as decoder:
        async with Replica(LOST_FAST) as prefiller:
            params = await params_of(client, prefiller)
            wanted = await plain(client, prefiller)
        status, answer = await decode(client, decoder, params)
        assert (status, text(answer)) == (200, wanted)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await metrics(client, decoder))["nixl_num_failed_transfers_total"] == 1


async def test_a_restarted_prefiller_is_another_engine(client: aiohttp.ClientSession) -> None:
    async with Replica(LOST_FAST) as prefiller, Replica(LOST_FAST) as decoder:
        old = await params_of(client, prefiller)
        await prefiller.restart()
        new = await params_of(client, prefiller)
        assert (await decode(client, decoder, old))[0] == 500
        status, answer = await decode(client, decoder, new)
        assert (status, text(answer) != BAD) == (200, True)


@pytest.mark.parametrize("how", [FaultKind.REFUSE, FaultKind.HANG, FaultKind.ENGINE_DEAD])
async def test_a_prefiller_that_goes_under_a_transfer_is_lost(
    client: aiohttp.ClientSession, prefiller: Replica, how: FaultKind
) -> None:
    async with Replica(replace(NIXL, kv_latency_s=0.3)) as decoder:
        waiting = asyncio.create_task(decode(client, decoder, await params_of(client, prefiller)))
        await until(lambda: prefiller.requests_seen[-1].path == "/sim/kv_transfer")
        assert decoder.engine.gauges().fetching == 1
        prefiller.faults.set(how)
        assert await waiting == (500, {"error": INTERNAL})


@pytest.mark.parametrize("where", [{"remote_port": 70_000}, {"remote_host": "a b/c"}, {"remote_host": ""}])
async def test_an_address_that_is_none_is_a_lost_prefiller(
    client: aiohttp.ClientSession, prefiller: Replica, where: dict[str, Any]
) -> None:
    params = await params_of(client, prefiller)
    async with Replica(LOST_FAST) as decoder:
        assert (await decode(client, decoder, params | where))[0] == 500


# --- a store ----------------------------------------------------------------------------------------------------------


async def test_replicas_share_a_store_without_parameters(client: aiohttp.ClientSession, tmp_path: Path) -> None:
    options = replace(FAST, kv_transfer="store", kv_store=tmp_path / "kv")
    async with Replica(options) as prefiller, Replica(options) as decoder:
        assert (await prefill(client, prefiller))["kv_transfer_params"] is None
        assert kv_used(prefiller) == 0.0
        _, answer = await post(client, decoder.url + CHAT_PATH, CHAT)
        tokens = answer["usage"]["prompt_tokens"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (tokens - 1) // 16 * 16
        assert text(answer) == await plain(client, prefiller)
        assert (await metrics(client, decoder))["external_prefix_cache_hits_total"] > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_transfer": "store"},
        {"kv_transfer": "nixl", "kv_store": Path("kv")},
        {"kv_lease_s": 0.0},
        {"kv_gb_per_s": -1.0},
    ],
)
def test_options_that_do_not_go_together_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kv_"):
        replace(FAST, **wrong)


async def test_what_another_replica_may_tell_is_checked(client: aiohttp.ClientSession, prefiller: Replica) -> None:
    url = f"{prefiller.url}/sim/kv_transfer"
    engine_id = (await params_of(client, prefiller))["remote_engine_id"]
    told = {"notice": "heartbeat", "engine_id": engine_id, "request_id": "unknown"}
    assert (await post(client, url, told))[0] == 410
    assert (await post(client, url, told | {"engine_id": "other"}))[0] == 404
    assert (await post(client, url, told | {"notice": "hello"}))[0] == 400
    assert (await post(client, url, {}))[0] == 400
    assert (await metrics(client, prefiller))["nixl_num_notifications_after_expiry_total"] == 0
    async with Replica(FAST) as other:
        assert (await post(client, f"{other.url}/sim/kv_transfer", told))[0] == 404
