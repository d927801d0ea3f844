"""Adapters loaded and unloaded through the proxy, before simulated replicas that come and go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llmproxy.config import hash_of
from llmproxy.core import adapters as memory
from llmproxy.lab.simulator.replica import Replica
from tests.e2e.proxies import FAST, HELLO, Answer, ProxyUnderTest, serving, until

LOAD, UNLOAD, PAGE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/debug/adapters"
KEY = {"authorization": "Bearer for-admins"}
ADMIN: dict[str, Any] = {"admin_key": hash_of("for-admins")}
PLAIN = replace(FAST, adapters=())
NO_LORA = replace(PLAIN, max_loras=0)
FRESH = {"lora_name": "fresh", "lora_path": "/adapters/fresh"}
ASK = HELLO | {"model": "fresh"}


async def load(proxy: ProxyUnderTest, **body: Any) -> Answer:
    return await proxy.post(LOAD, FRESH | body, headers=KEY)


async def unload(proxy: ProxyUnderTest, **body: Any) -> Answer:
    return await proxy.post(UNLOAD, {"lora_name": "fresh"} | body, headers=KEY)


def replies(answer: Answer) -> list[tuple[str, int | None, bool]]:
    return [(one["backend"], one["status"], one["ok"]) for one in answer.json["replicas"]]


def sent(replica: Replica) -> list[tuple[str, dict[str, Any]]]:
    seen = [request for request in replica.requests_seen if request.path in (LOAD, UNLOAD)]
    return [(request.path, json.loads(request.body)) for request in seen]


def adapters(proxy: ProxyUnderTest, backend: str) -> list[str]:
    """As the proxy knows them."""
    listing = proxy.app.pools.backends[backend].listing
    return [card.name for card in listing.cards if card.parent is not None] if listing is not None else []


# --- all, or some -----------------------------------------------------------------------------------------------------


async def test_all_replicas_have_the_adapter_when_the_answer_comes() -> None:
    async with serving(FAST, FAST, **ADMIN, poll={"models_interval_s": 60.0}) as proxy:
        assert (await proxy.chat(ASK)).status == 404
        answer = await load(proxy, is_3d_lora_weight=False, replicas="all")
        assert (answer.status, answer.json["ok"], answer.json["failed"]) == (200, 2, 0)
        assert (answer.json["adapter"], answer.json["model"], answer.json["remembered"]) == ("fresh", "base", True)
        assert replies(answer) == [("b0", 200, True), ("b1", 200, True)]
        assert answer.json["replicas"][0]["message"] == "Success: LoRA adapter 'fresh' added successfully."
        for replica in proxy.replicas:
            assert sent(replica) == [(LOAD, FRESH | {"is_3d_lora_weight": False})], "in vLLM's own words alone"
        assert {(await proxy.chat(ASK)).status for _ in range(4)} == {200}
        assert "fresh" in [model["id"] for model in (await proxy.get("/v1/models")).json["data"]]
        assert proxy.metric("llmproxy_adapter_changes_total", action="load", result="success") == 2
        answer = await unload(proxy)
        assert (answer.status, replies(answer)) == (200, [("b0", 200, True), ("b1", 200, True)])
        assert (await proxy.chat(ASK)).status == 404


async def test_adapters_go_to_the_backends_with_the_fewest() -> None:
    async with serving(FAST, PLAIN, FAST, **ADMIN) as proxy:
        assert replies(await load(proxy, replicas=1)) == [("b1", 200, True)]
        assert {(await proxy.chat(ASK)).backend for _ in range(4)} == {"b1"}
        assert replies(await load(proxy, replicas=2)) == [("b0", 200, True), ("b1", 400, True)], "b1 has it already"
        assert replies(await unload(proxy, replicas=1)) == [("b0", 200, True)]
        assert [adapters(proxy, f"b{i}").count("fresh") for i in range(3)] == [0, 1, 0]


async def test_two_models_have_adapters_of_their_own() -> None:
    aliases = [{"name": "nick", "target": "other"}]
    async with serving(PLAIN, replace(PLAIN, model="other"), **ADMIN, models=aliases) as proxy:
        refused = await load(proxy)
        assert (refused.status, "one of base, other" in refused.json["error"]["message"]) == (400, True)
        assert (await load(proxy, model="nope")).status == 404
        answer = await load(proxy, model="other")
        assert (answer.status, answer.json["model"], replies(answer)) == (200, "other", [("b1", 200, True)])
        assert "model" not in sent(proxy.replicas[1])[0][1]
        assert (await proxy.chat(ASK)).backend == "b1"
        for name in ("nick", "base", "fresh"):
            assert (await load(proxy, lora_name=name, model="base")).status == 400
        assert sent(proxy.replicas[0]) == []


# --- invalid changes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[1]", {}, {"lora_name": "fresh"}, FRESH | {"lora_name": ""}, FRESH | {"lora_path": 7},
        FRESH | {"lora_name": "x" * 1025}, FRESH | {"lora_path": "x" * 4097}, FRESH | {"replicas": 0},
        FRESH | {"replicas": True}, FRESH | {"replicas": "some"}, FRESH | {"replicas": 3}, FRESH | {"model": 1},
        FRESH | {"load_inplace": 1},
    ],
)  # fmt: skip
async def test_an_invalid_change_is_sent_to_no_backend(body: object) -> None:
    async with serving(PLAIN, **ADMIN) as proxy:
        answer = await proxy.post(LOAD, body, headers=KEY)
        assert (answer.status, answer.json["error"]["code"]) == (400, 400)
        assert sent(proxy.replicas[0]) == []


async def test_a_body_has_a_type_and_a_size() -> None:
    async with serving(PLAIN, **ADMIN) as proxy:
        wrong = await proxy.post(LOAD, json.dumps(FRESH).encode(), headers=KEY | {"content-type": "text/plain"})
        assert (wrong.status, "application/json" in wrong.json["error"]["message"]) == (400, True)
        assert (await load(proxy, surplus="x" * (16 << 10))).status == 413


# --- backends that do not take it -------------------------------------------------------------------------------------


async def test_replica_that_has_the_adapter_already_counts_as_loaded() -> None:
    async with serving(PLAIN, PLAIN, **ADMIN) as proxy:
        assert (await proxy.post(proxy.replicas[1].url + LOAD, FRESH)).status == 200
        answer = await load(proxy)
        assert (answer.status, replies(answer)) == (200, [("b0", 200, True), ("b1", 400, True)])
        assert "already been loaded" in answer.json["replicas"][1]["message"]


async def test_replica_with_another_adapter_of_that_name_does_not_count_as_loaded() -> None:
    async with serving(PLAIN, PLAIN, **ADMIN) as proxy:
        for replica in proxy.replicas:
            assert (await proxy.post(replica.url + LOAD, FRESH | {"lora_path": "/old"})).status == 200
        answer = await load(proxy)
        assert (answer.status, answer.json["error"]["code"]) == (400, 400), "the status on which all agree"
        assert (answer.json["remembered"], replies(answer)) == (False, [("b0", 400, False), ("b1", 400, False)])
        assert (await proxy.get(PAGE, headers=KEY)).json == {"adapters": [], "more": 0}
        assert (await load(proxy, load_inplace=True)).status == 200


async def test_a_report_lists_backends_that_took_the_change() -> None:
    async with serving(PLAIN, NO_LORA, **ADMIN) as proxy:
        answer = await load(proxy)
        assert (answer.status, answer.json["ok"], answer.json["failed"]) == (502, 1, 1)
        assert replies(answer) == [("b0", 200, True), ("b1", 500, False)]
        assert "1 of 2 replicas did not load it: b1: " in answer.json["error"]["message"]
        assert "LoRA is not enabled" in answer.json["replicas"][1]["message"]
        assert answer.json["remembered"]
        assert {(await proxy.chat(ASK)).backend for _ in range(4)} == {"b0"}
        (shown,) = (await proxy.get(PAGE, headers=KEY)).json["adapters"]
        assert (shown["adapter"], shown["path"], shown["later_ones_too"]) == ("fresh", "/adapters/fresh", True)
        assert [(one["backend"], one["wanted"], one["done"]) for one in shown["replicas"]] == [
            ("b0", "load", True), ("b1", "load", False)
        ]  # fmt: skip
        assert proxy.metric("llmproxy_adapter_changes_total", backend="b1", result="failure") == 1


async def test_an_error_of_all_engines_is_a_bad_gateway() -> None:
    async with serving(NO_LORA, NO_LORA, **ADMIN) as proxy:
        answer = await load(proxy)
        assert (answer.status, answer.json["error"]["code"], answer.json["remembered"]) == (502, 502, False)


async def test_unloading_an_unknown_adapter_is_not_found() -> None:
    async with serving(PLAIN, **ADMIN) as proxy:
        answer = await unload(proxy)
        assert (answer.status, answer.json["error"]["type"]) == (404, "NotFoundError")
        assert sent(proxy.replicas[0]) == []


# --- backends that come back ------------------------------------------------------------------------------------------


async def test_restarted_replica_gets_the_adapter_back() -> None:
    async with serving(PLAIN, PLAIN, **ADMIN) as proxy:
        assert (await load(proxy, extra_word=1)).status == 200
        await proxy.replicas[0].restart()
        await until(lambda: len(sent(proxy.replicas[0])) == 2 and "fresh" in adapters(proxy, "b0"))
        assert sent(proxy.replicas[0]) == [(LOAD, FRESH | {"extra_word": 1})] * 2
        assert len(sent(proxy.replicas[1])) == 1
        await until(lambda: proxy.metric("llmproxy_adapter_changes_total", backend="b0", result="success") == 2)


async def test_backend_that_was_down_or_unknown_gets_the_adapter_when_it_comes(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "BACKOFF_S", 0.05)
    async with serving(PLAIN, PLAIN, extra=[f"http://127.0.0.1:{port}"], wait=False, **ADMIN) as proxy:
        await until(lambda: not any(proxy.app.pools.backends[name].health.down for name in ("b0", "b1")))
        proxy.replicas[1].faults.set("refuse")
        await until(lambda: proxy.app.pools.backends["b1"].health.down)
        answer = await load(proxy)
        assert (answer.status, replies(answer)) == (502, [("b0", 200, True), ("b1", None, False)])
        assert answer.json["replicas"][1]["message"] == "The backend is down."
        await proxy.replicas[1].restart()
        async with Replica(PLAIN, port=port) as late:
            await until(lambda: "fresh" in adapters(proxy, "b1") and "fresh" in adapters(proxy, "b2"))
            assert sent(late) == [(LOAD, FRESH)]


# --- slow loads -------------------------------------------------------------------------------------------------------


class Slow:
    """A server that loads adapters once `let` is set. Its first answer may be another one."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.began = asyncio.Event()
        self.loads = 0
        self.adapters: list[str] = []

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == LOAD:
            self.loads += 1
            self.began.set()
            await self.let.wait()
            self.adapters.append("fresh")
        cards = [{"id": "base", "parent": None}, *({"id": name, "parent": "base"} for name in self.adapters)]
        return web.json_response({"object": "list", "data": cards})


def changes() -> list[asyncio.Task[Any]]:
    """The tasks that send a change to backends."""
    return [task for task in asyncio.all_tasks() if "AdapterKeeper" in repr(task)]


@asynccontextmanager
async def serving_slowly(**config: Any) -> AsyncIterator[tuple[Slow, ProxyUnderTest]]:
    slow = Slow()
    # No handler_cancellation: like vLLM's, the loading goes on when its client has left.
    runner = web.ServerRunner(web.Server(slow.serve))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with serving(extra=[f"http://127.0.0.1:{runner.addresses[0][1]}"], **ADMIN, **config) as proxy:
            yield slow, proxy
        assert changes() == [], "no backend is sent anything once the proxy is closed"
    finally:
        slow.let.set()
        await runner.cleanup()


async def test_one_change_of_an_adapter_is_under_way_at_a_time() -> None:
    async with serving_slowly() as (slow, proxy):
        first = asyncio.create_task(load(proxy))
        await slow.began.wait()
        second = await unload(proxy)
        assert (second.status, second.headers["retry-after"]) == (409, "1")
        slow.let.set()
        assert (await first).status == 200
        assert slow.loads == 1


async def test_a_change_is_carried_out_although_its_client_left() -> None:
    async with serving_slowly() as (slow, proxy):
        first = asyncio.create_task(load(proxy))
        await slow.began.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        slow.let.set()
        await until(lambda: "fresh" in adapters(proxy, "b0"))
        (shown,) = (await proxy.get(PAGE, headers=KEY)).json["adapters"]
        assert [one["done"] for one in shown["replicas"]] == [True]


async def test_closing_gives_up_a_change_that_is_under_way() -> None:
    async with serving_slowly() as (slow, proxy):
        first = asyncio.create_task(load(proxy))
        await slow.began.wait()
        for change in changes():
            # Not before: an answer that comes while the proxy is being closed is a change that was carried out.
            change.add_done_callback(lambda _: slow.let.set())
    with pytest.raises(aiohttp.ClientError):
        await first
    assert proxy.metric("llmproxy_adapter_changes_total") == 0, "it was given up before its connection was cut"


async def test_a_late_backend_is_reported_and_believed_later() -> None:
    async with serving_slowly(timeouts={"adapter_s": 0.05}) as (slow, proxy):
        answer = await load(proxy)
        assert (answer.status, replies(answer)) == (502, [("b0", None, False)])
        assert "timeouts.adapter_s" in answer.json["replicas"][0]["message"]
        slow.let.set()
        await until(lambda: "fresh" in adapters(proxy, "b0"))
        (shown,) = (await proxy.get(PAGE, headers=KEY)).json["adapters"]
        assert [one["done"] for one in shown["replicas"]] == [True]


async def test_nothing_is_changed_any_more_while_draining() -> None:
    async with serving(PLAIN, **ADMIN) as draining:
        await draining.app.drain()
        answer = await load(draining)
        assert (answer.status, sent(draining.replicas[0])) == (503, [])
