"""KV that goes from one replica to another: the two legs over HTTP, and what comes of mistakes and failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llmproxy.simulator.engine.kv_store import KvStore, SharedStore
from llmproxy.simulator.replica import FaultKind, Replica
from llmproxy.simulator.server.text import WRONG_WORD
from tests.simulator.conftest import CHAT_PATH, ENDLESS, FAST, chunks_of, post, until

NIXL = replace(FAST, kv_transfer="nixl", kv_latency_s=0.0, kv_handshake_s=0.0)
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
RECORDED = [
    *("do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id"),
    *("remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens"),
    *("remote_blocks_expiry_time", "transfer_mode", "remote_prefill_cached_tokens"),
]
BAD = (WRONG_WORD * 5).strip()
POISONED = "later answers from the same cache are wrong, too"


@pytest.fixture
async def prefiller() -> AsyncIterator[Replica]:
    async with Replica(NIXL) as replica:
        yield replica


@pytest.fixture
async def decoder() -> AsyncIterator[Replica]:
    async with Replica(NIXL) as replica:
        yield replica


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


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
    timers = [timer for one in connectors if one is not None for timer in (*one._leases.values(), one._dying) if timer]
    assert [timer.cancelled() for timer in timers] == [True, True]


# --- lost prefillers --------------------------------------------------------------------------------------------------

LOST_FAST = replace(NIXL, speed=50.0, kv_lease_s=3000.0)
INTERNAL = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}


@pytest.mark.parametrize("known", [False, True])
async def test_a_lost_prefiller_fails_the_request(client: aiohttp.ClientSession, known: bool) -> None:
    loop = asyncio.get_running_loop()
    async with Replica(LOST_FAST) as decoder:
        async with Replica(LOST_FAST) as prefiller:
            if known:
                await decode(client, decoder, await params_of(client, prefiller))
            params = await params_of(client, prefiller)
        before_s = loop.time()
        status, answer = await decode(client, decoder, params)
        assert (status, answer) == (500, {"error": INTERNAL})
        assert loop.time() - before_s >= (0.1 if known else 5.0) / LOST_FAST.speed
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


@pytest.mark.parametrize("in_folder", [False, True])
async def test_replicas_share_a_store_without_parameters(
    client: aiohttp.ClientSession, tmp_path: Path, in_folder: bool
) -> None:
    store: KvStore | Path = tmp_path / "kv" if in_folder else SharedStore()
    options = replace(FAST, kv_transfer="store", kv_store=store)
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
        {"kv_transfer": "nixl", "kv_store": SharedStore()},
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
