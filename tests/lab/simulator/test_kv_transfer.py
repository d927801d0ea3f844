"""KV transfers between replicas: both legs over HTTP, and mistakes in them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from llmproxy.lab.simulator.replica import FaultKind, Replica
from llmproxy.lab.simulator.server.text import WRONG_WORD
from tests.lab.simulator.conftest import CHAT_PATH, ENDLESS, FAST, NIXL, chunks_of, post, until
from tests.lab.simulator.legs import (
    BAD,
    BODIES,
    CHAT,
    KEEP,
    busy,
    decode,
    events_of,
    kv_used,
    metrics,
    params_of,
    plain,
    prefill,
    text,
)

RECORDED = [
    *("do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id"),
    *("remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens"),
    *("remote_blocks_expiry_time", "transfer_mode", "remote_prefill_cached_tokens"),
]
POISONED = "later answers from the same cache are wrong, too"


# --- both legs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", list(BODIES))
async def test_both_legs_answer_as_one_replica_and_the_blocks_are_free_after(
    client: aiohttp.ClientSession, prefiller: Replica, decoder: Replica, path: str
) -> None:
    async with Replica(FAST) as alone:
        _, wanted = await post(client, alone.url + path, BODIES[path])
    params = (await prefill(client, prefiller, path))["kv_transfer_params"]
    assert list(params) == RECORDED
    assert kv_used(prefiller) > 0
    status, answer = await post(client, decoder.url + path, BODIES[path] | {"kv_transfer_params": params})
    assert status == 200
    for name in ("choices", "content"):
        assert answer.get(name) == wanted.get(name)
    if "output" in answer:
        assert answer["output"][0]["content"] == wanted["output"][0]["content"]
    assert answer.get("kv_transfer_params") is None
    assert kv_used(prefiller) == kv_used(decoder) == 0.0
    assert decoder.engine.counters.external == decoder.engine.counters.prompt == params["remote_num_tokens"]
    connector = decoder._service.nixl
    assert connector is not None
    await until(lambda: not connector._tasks and not connector._fetches)


async def test_parameters_say_where_the_blocks_are(client: aiohttp.ClientSession, prefiller: Replica) -> None:
    url = prefiller.url + CHAT_PATH
    body = CHAT | {"max_tokens": 1, "kv_transfer_params": KEEP}
    async with client.post(url, json=body, headers={"x-request-id": "mine"}) as response:
        answer = await response.json()
    params, tokens = answer["kv_transfer_params"], answer["usage"]["prompt_tokens"]
    assert list(answer).index("kv_transfer_params") == len(answer) - 3, "where it is null otherwise"
    request_id = params.pop("remote_request_id")
    assert request_id.rpartition("-")[0] == "chatcmpl-mine"
    assert len(params.pop("remote_engine_id")) == 36
    (blocks,) = params.pop("remote_block_ids")
    assert len(set(blocks)) == -(-tokens // 16), "the last block counts, which is not full"
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": "127.0.0.1",
        "remote_port": prefiller.port,
        **dict.fromkeys(("tp_size", "dcp_size", "pp_size"), 1),
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


async def test_cached_tokens_of_the_second_leg_are_those_of_the_first(
    client: aiohttp.ClientSession, prefiller: Replica, decoder: Replica
) -> None:
    await plain(client, prefiller)
    params = await params_of(client, prefiller)
    cached_tokens = params["remote_prefill_cached_tokens"]
    assert cached_tokens > 0
    _, answer = await decode(client, decoder, params)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached_tokens
    _, again = await post(client, decoder.url + CHAT_PATH, CHAT)
    own = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert own == (params["remote_num_tokens"] - 1) // 16 * 16, "what was fetched is cached here"


async def test_the_page_of_metrics_counts_transfers(
    client: aiohttp.ClientSession, prefiller: Replica, decoder: Replica
) -> None:
    params = await params_of(client, prefiller)
    await decode(client, decoder, params)
    await until(lambda: not prefiller.engine.kv.kept)
    page = await metrics(client, decoder)
    tokens = params["remote_num_tokens"]
    assert (page["nixl_xfer_time_seconds_count"], page["nixl_bytes_transferred_sum"]) == (1, tokens * 131_072)
    assert page["external_prefix_cache_hits_total"] == tokens
    source = 'prompt_tokens_by_source_total{engine="0",model_name="base",source="external_kv_transfer"}'
    assert page[source] == tokens
    counters = ("nixl_num_failed_transfers", "nixl_num_kv_expired_reqs", "nixl_num_notifications_after_expiry")
    for replica in (prefiller, decoder):
        page = await metrics(client, replica)
        assert [page[f"{name}_total"] for name in counters] == [0, 0, 0]
    async with Replica(FAST) as other:
        assert not [name for name in await metrics(client, other) if "nixl" in name or "by_stage" in name]


async def test_without_a_connector_parameters_are_ignored(client: aiohttp.ClientSession, prefiller: Replica) -> None:
    params = await params_of(client, prefiller)
    async with Replica(FAST) as other:
        assert (await prefill(client, other))["kv_transfer_params"] is None
        status, answer = await decode(client, other, params)
        assert (status, other.engine.counters.external, kv_used(other)) == (200, 0, 0.0)
        status, refused = await decode(client, other, "x")
    assert text(answer) != BAD
    assert (status, refused["error"]["param"]) == (400, "body.kv_transfer_params")
    assert kv_used(prefiller) > 0


async def test_a_first_leg_that_tells_nobody_keeps_its_blocks_until_the_lease_ends(
    client: aiohttp.ClientSession,
) -> None:
    async with Replica(replace(NIXL, kv_lease_s=0.5)) as prefiller:
        body = CHAT | {"stream": True, "max_tokens": 1, "kv_transfer_params": KEEP}
        async with client.post(prefiller.url + CHAT_PATH, json=body) as response:
            assert b"remote_" not in await response.read()
        assert len(prefiller.engine.kv.kept) == 1
        answer = await prefill(client, prefiller, n=2)
        assert answer["kv_transfer_params"]["remote_request_id"].startswith("0_chatcmpl-"), "one of two"
        await prefill(client, prefiller, "/v1/completions", prompt=["x" * 99, "y" * 99])
        await until(lambda: not prefiller.engine.kv.kept)
        assert (await metrics(client, prefiller))["nixl_num_kv_expired_reqs_total"] == 5


# --- what must not be done --------------------------------------------------------------------------------------------


async def test_parameters_serve_once(client: aiohttp.ClientSession, prefiller: Replica, decoder: Replica) -> None:
    params = await params_of(client, prefiller)
    async with Replica(NIXL) as second:
        _, first = await decode(client, decoder, params)
        status, again = await decode(client, second, params)
        assert (status, text(first) == BAD, text(again)) == (200, False, BAD)
        assert await plain(client, second) == BAD, POISONED
        other = [{"role": "user", "content": "Another prompt " * 9}]
        assert await plain(client, second, messages=other) != BAD
    assert (await metrics(client, prefiller))["nixl_num_notifications_after_expiry_total"] == 1


async def test_parameters_of_an_ended_lease_give_a_wrong_answer(
    client: aiohttp.ClientSession, decoder: Replica
) -> None:
    async with Replica(replace(NIXL, kv_lease_s=0.01)) as prefiller:
        params = await params_of(client, prefiller)
        await until(lambda: not prefiller.engine.kv.kept)
        assert kv_used(prefiller) == 0.0
        body = CHAT | {"kv_transfer_params": params, "stream": True}
        async with client.post(decoder.url + CHAT_PATH, json=body) as response:
            deltas = [event["choices"][0]["delta"]["content"] for event in events_of(await chunks_of(response))]
        assert deltas == ["", *[WRONG_WORD] * 5]
        page = await metrics(client, prefiller)
    assert page["nixl_num_kv_expired_reqs_total"] == page["nixl_num_notifications_after_expiry_total"] == 1
    assert await plain(client, decoder) == BAD, POISONED


async def test_of_several_choices_one_reads_what_is_its_own(
    client: aiohttp.ClientSession, prefiller: Replica, decoder: Replica
) -> None:
    _, answer = await decode(client, decoder, await params_of(client, prefiller), n=2)
    wrong = [choice["message"]["content"].strip() == BAD for choice in answer["choices"]]
    assert sorted(wrong) == [False, True]


async def test_an_engine_dies_of_parameters_that_name_nobody(client: aiohttp.ClientSession, decoder: Replica) -> None:
    async with client.post(decoder.url + CHAT_PATH, json=ENDLESS) as running:
        await running.content.readany()
        status, answer = await decode(client, decoder, {"do_remote_prefill": True})
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        assert "EngineCore" in answer["error"]["message"]
        assert b'"code": 500' in await running.read()
    await until(lambda: decoder.faults.kind is FaultKind.REFUSE)
    with pytest.raises(aiohttp.ClientConnectionError):
        await plain(client, decoder)


async def test_with_some_of_the_parameters_a_request_hangs_and_the_engine_dies_when_it_leaves(
    client: aiohttp.ClientSession, decoder: Replica
) -> None:
    hanging = asyncio.create_task(decode(client, decoder, {"do_remote_prefill": True, "remote_engine_id": "x"}))
    await until(lambda: decoder.engine.gauges().fetching == 1)
    assert await plain(client, decoder, messages=[{"role": "user", "content": "Another one"}])
    assert not hanging.done()
    hanging.cancel()
    await until(lambda: decoder.faults.kind is FaultKind.REFUSE)
    await decoder.restart()
    assert await plain(client, decoder)


# --- who gives blocks free --------------------------------------------------------------------------------------------


async def test_waiting_for_a_place_extends_the_lease(client: aiohttp.ClientSession) -> None:
    async with (
        Replica(replace(NIXL, kv_lease_s=0.9)) as prefiller,
        Replica(replace(prefiller.options, max_num_seqs=1)) as decoder,
    ):
        params = await params_of(client, prefiller)
        ends_s = lease_end_s(prefiller)
        async with busy(client, decoder):
            waiting = asyncio.create_task(decode(client, decoder, params))
            await until(lambda: lease_end_s(prefiller) > ends_s)
            assert (await metrics(client, decoder))[stage("waiting_to_start")] == 1
        _, answer = await waiting
    assert text(answer) != BAD


def lease_end_s(replica: Replica) -> float:
    connector = replica._service.nixl
    assert connector is not None
    (lease,) = connector._leases.values()
    return lease.when()


def stage(name: str) -> str:
    return f'num_requests_kv_fetch_by_stage{{engine="0",model_name="base",stage="{name}"}}'


async def test_a_client_that_leaves_the_queue_frees_the_blocks(
    client: aiohttp.ClientSession, prefiller: Replica
) -> None:
    async with Replica(replace(NIXL, max_num_seqs=1)) as decoder:
        params = await params_of(client, prefiller)
        async with busy(client, decoder):
            waiting = asyncio.create_task(decode(client, decoder, params))
            await until(lambda: decoder.engine.gauges().to_fetch == 1)
            assert kv_used(prefiller) > 0
            waiting.cancel()
            await until(lambda: kv_used(prefiller) == 0.0)
    page = await metrics(client, prefiller)
    assert page["kv_cache_usage_perc"] == 0.0
    assert page["nixl_num_kv_expired_reqs_total"] == page["nixl_num_notifications_after_expiry_total"] == 0


async def test_a_client_that_leaves_under_a_transfer_frees_the_blocks_at_its_end(
    client: aiohttp.ClientSession, prefiller: Replica
) -> None:
    async with Replica(replace(NIXL, kv_latency_s=0.1)) as decoder:
        leaving = asyncio.create_task(decode(client, decoder, await params_of(client, prefiller)))
        await until(lambda: decoder.engine.gauges().fetching == 1)
        leaving.cancel()
        await until(lambda: kv_used(prefiller) == kv_used(decoder) == 0.0)
        assert decoder.engine.counters.external == 0
    assert (await metrics(client, prefiller))["nixl_num_notifications_after_expiry_total"] == 0


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"model": "unknown"}, {"temperature": -1}])
async def test_a_refused_second_leg_frees_the_blocks(
    client: aiohttp.ClientSession, prefiller: Replica, decoder: Replica, fields: dict[str, Any]
) -> None:
    status, _ = await decode(client, decoder, await params_of(client, prefiller), **fields)
    assert 400 <= status < 500
    await until(lambda: kv_used(prefiller) == 0.0)


async def test_a_second_leg_that_is_refused_for_its_form_leaves_the_blocks_to_their_lease(
    client: aiohttp.ClientSession, prefiller: Replica, decoder: Replica
) -> None:
    status, _ = await decode(client, decoder, await params_of(client, prefiller), max_tokens="many")
    assert status == 400
    # Whoever is told is told in a task of the connector.
    assert decoder._service.nixl is not None
    assert not decoder._service.nixl._tasks
    assert kv_used(prefiller) > 0.0


async def test_a_first_leg_that_is_left_before_its_answer_keeps_nothing(client: aiohttp.ClientSession) -> None:
    async with Replica(replace(NIXL, max_num_seqs=1)) as prefiller, busy(client, prefiller):
        leaving = asyncio.create_task(prefill(client, prefiller))
        await until(lambda: prefiller.engine.gauges().waiting == 1)
        leaving.cancel()
        await until(lambda: prefiller.engine.gauges().waiting == 0)
        assert not prefiller.engine.kv.kept


async def test_a_replica_that_has_ended_does_nothing_later(client: aiohttp.ClientSession) -> None:
    async with Replica(NIXL) as prefiller, Replica(NIXL) as dying:
        await params_of(client, prefiller)
        await decode(client, dying, {"do_remote_prefill": True})
        connectors = [replica._service.nixl for replica in (prefiller, dying)]
    timers = [timer for one in connectors if one is not None for timer in one._leases.values()]
    assert [timer.cancelled() for timer in (*timers, dying.faults._dying) if timer] == [True, True]
