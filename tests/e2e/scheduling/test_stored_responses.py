"""Who goes on from a stored response goes to the replica that made it, through the waiting room, and to no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llmproxy.lab.simulator.replica import Replica
from tests.e2e.operators.test_reload import ADMIN, KEYED, reloadable, rewrite
from tests.e2e.operators.test_workers import TWO
from tests.e2e.processes import served
from tests.e2e.proxies import FAST, Answer, ProxyUnderTest, serving, until

RESPONSES = "/v1/responses"
ASKED: dict[str, Any] = {"model": "base", "input": "Hello there, and more", "max_output_tokens": 4}
THREE = (FAST, FAST, FAST)
# Whoever comes is sent to the replica after the last one, unless it is held to another.
AROUND = {"placement": "round_robin"}
HOLD = {"no_backend_wait_s": 30.0}


async def made(proxy: ProxyUnderTest, **more: Any) -> Answer:
    answer = await proxy.post(RESPONSES, ASKED | more)
    assert answer.status == 200
    return answer


def further(of: Answer | str, **more: Any) -> dict[str, Any]:
    return ASKED | {"input": "And then?", "previous_response_id": of if isinstance(of, str) else of.json["id"]} | more


async def go_on(proxy: ProxyUnderTest, of: Answer | str, **more: Any) -> Answer:
    return await proxy.post(RESPONSES, further(of, **more))


def went_on(proxy: ProxyUnderTest, of: Answer | str, **more: Any) -> asyncio.Task[Answer]:
    return asyncio.create_task(go_on(proxy, of, **more))


@asynccontextmanager
async def busy(proxy: ProxyUnderTest, first: Answer) -> AsyncIterator[None]:
    """The replica that made a response has a stream that does not end."""
    endless = further(first, stream=True, max_output_tokens=20_000, ignore_eos=True)
    async with proxy.stream(endless, RESPONSES) as running:
        await running.content.readany()
        assert running.headers["x-llmproxy-backend"] == first.backend
        yield


def lost(answer: Answer, response_id: str) -> bool:
    error = answer.json["error"]
    said = response_id in error["message"] and "Send the whole conversation as `input`." in error["message"]
    return said and (answer.status, error["type"], error["param"]) == (404, "NotFoundError", "previous_response_id")


# --- where it goes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["round_robin", "cost", "session"])
async def test_every_turn_goes_to_the_replica_that_made_the_one_before(placement: str) -> None:
    async with serving(*THREE, scheduling={"placement": placement}) as proxy:
        firsts = [await made(proxy) for _ in range(7)]
        last = firsts
        for stream in (False, False, True):
            last = [await go_on(proxy, one, stream=stream) for one in last]
            assert [(one.status, one.backend) for one in last] == [(200, first.backend) for first in firsts]
        if placement == "round_robin":
            assert {first.backend for first in firsts} == {"b0", "b1", "b2"}


async def test_adapter_may_continue_a_response_of_its_base_model() -> None:
    async with serving(*THREE, scheduling=AROUND) as proxy:
        first = await made(proxy)
        assert (await go_on(proxy, first, model="lora-0")).backend == first.backend


# --- the waiting room -------------------------------------------------------------------------------------------------


# --- where the replica is not to be had -------------------------------------------------------------------------------


async def test_a_bound_request_is_held_while_its_replica_drains() -> None:
    async with serving(*THREE, **KEYED, scheduling=AROUND, queue=HOLD) as proxy:
        first = await made(proxy)
        drain = f"/admin/backends/{first.backend}/"
        assert (await proxy.post(drain + "drain", None, headers=ADMIN)).status == 200
        turn = went_on(proxy, first)
        await until(lambda: proxy.queued == 1)
        assert (await proxy.chat()).backend != first.backend
        assert (await proxy.get(f"{RESPONSES}/{first.json['id']}")).status == 200
        assert (await proxy.post(drain + "undrain", None, headers=ADMIN)).status == 200
        assert ((await turn).status, (await turn).backend) == (200, first.backend)
        assert (await proxy.post(drain + "drain", None, headers=ADMIN)).status == 200
        answer = await proxy.post(RESPONSES, further(first), headers={"x-llm-d-inference-ttl": "30ms"})
        assert (answer.status, int(answer.headers["retry-after"]) > 0) == (503, True)
    async with serving(*THREE, **KEYED, scheduling=AROUND) as proxy:
        first = await made(proxy)
        await proxy.post(f"/admin/backends/{first.backend}/drain", None, headers=ADMIN)
        answer = await go_on(proxy, first)
        assert (answer.status, "is not up. Try again" in answer.json["error"]["message"]) == (503, True)


async def test_responses_end_with_the_process_of_their_replica() -> None:
    async with serving(*THREE, scheduling=AROUND, queue=HOLD) as proxy:
        first = await made(proxy)
        replica = proxy.replica(first.backend)
        replica.faults.set("refuse")
        await until(lambda: proxy.app.pools.backends[first.backend].health.gone)
        # At once: there is nothing to wait for.
        async with asyncio.timeout(10.0):
            assert lost(await go_on(proxy, first), first.json["id"])
        await replica.restart()
        await until(lambda: not proxy.app.pools.backends[first.backend].health.down)
        again = await go_on(proxy, first)
        # The new process says so itself.
        assert (again.status, again.json["error"]["param"], again.backend) == (404, "response_id", first.backend)


async def test_a_request_bound_to_a_removed_replica_is_refused() -> None:
    async with serving(*THREE, fixed_limit=1, scheduling=AROUND | {"look_ahead": 0}, queue=HOLD) as proxy:
        first = await made(proxy)
        async with busy(proxy, first):
            turn = went_on(proxy, first)
            await until(lambda: proxy.queued == 1)
            proxy.replica(first.backend).faults.set("refuse")
            async with asyncio.timeout(10.0):
                assert lost(await turn, first.json["id"])


async def test_a_replica_that_is_removed_takes_its_responses_along(tmp_path: Path) -> None:
    async with reloadable(tmp_path, *THREE, scheduling=AROUND, queue=HOLD) as proxy:
        first = await made(proxy)
        await proxy.post(f"/admin/backends/{first.backend}/drain", None, headers=ADMIN)
        turn = went_on(proxy, first)
        await until(lambda: proxy.queued == 1)
        await rewrite(proxy, backends=[one for one in proxy.config_data["backends"] if one["name"] != first.backend])
        await until(lambda: first.backend not in proxy.app.pools.backends)
        for answer in (await turn, await go_on(proxy, first)):
            assert lost(answer, first.json["id"])
        assert proxy.outcomes()["bad_request"] == 2


async def test_request_bound_to_a_backend_is_retried_there() -> None:
    async with serving(*THREE, scheduling=AROUND) as proxy:
        first = await made(proxy)
        proxy.replica(first.backend).faults.set("reset", times=1)
        answer = await go_on(proxy, first, stream=True)
        assert (answer.status, answer.backend, answer.headers["x-llmproxy-attempts"]) == (200, first.backend, "2")


async def test_a_replica_that_does_not_serve_the_model_is_no_use() -> None:
    async with serving(FAST, replace(FAST, adapters=("rare",)), scheduling=AROUND) as proxy:
        firsts = {(answer := await made(proxy)).backend: answer for _ in range(2)}
        assert (await go_on(proxy, firsts["b1"], model="rare")).status == 200
        assert lost(await go_on(proxy, firsts["b0"], model="rare"), firsts["b0"].json["id"])


# --- responses that are not known here --------------------------------------------------------------------------------


async def of_another_proxy(proxy: ProxyUnderTest, backend: str) -> str:
    answer = await proxy.post(proxy.replica(backend).url + RESPONSES, ASKED)
    return str(answer.json["id"])


async def test_a_response_of_another_proxy_is_looked_for() -> None:
    async with serving(*THREE, scheduling=AROUND) as proxy:
        name = await of_another_proxy(proxy, "b2")
        found = await go_on(proxy, name)
        assert (found.status, found.backend, found.headers["x-llmproxy-attempts"]) == (200, "b2", "3")
        again = await go_on(proxy, name)
        assert (again.status, again.backend, again.headers["x-llmproxy-attempts"]) == (200, "b2", "1")
        assert proxy.outcomes() == {"completed": 2}


async def test_an_unknown_response_is_asked_of_each_replica_once() -> None:
    async with serving(*THREE, scheduling=AROUND) as proxy:
        answer = await go_on(proxy, "resp_of_nobody")
        assert answer.json["error"] == {
            "message": "Response with id 'resp_of_nobody' not found.",
            "type": "invalid_request_error",
            "param": "response_id",
            "code": 404,
        }
        assert [sum(one.path == RESPONSES for one in replica.requests_seen) for replica in proxy.replicas] == [1, 1, 1]


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(120, method="thread")
async def test_every_worker_knows_which_backend_made_a_response(tmp_path: Path) -> None:
    async with Replica(FAST) as one, Replica(FAST) as two, Replica(FAST) as three:
        urls = (one.url, two.url, three.url)
        async with served(tmp_path / "log", *TWO, *urls) as process:
            url = await process.url()

            async def ask(body: dict[str, Any]) -> tuple[str, str]:
                # A connection of its own, which may lead to either worker.
                async with aiohttp.ClientSession() as http, http.post(url + RESPONSES, json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    assert answer.headers["x-llmproxy-attempts"] == "1"
                    return (await answer.json())["id"], answer.headers["x-llmproxy-backend"]

            for _ in range(8):
                response_id, backend = await ask(ASKED)
                await asyncio.sleep(0)
                for _ in range(3):
                    response_id, at = await ask(further(response_id))
                    assert at == backend


async def test_an_unknown_response_is_not_held_for_a_gone_process() -> None:
    async with serving(*THREE, scheduling=AROUND, queue=HOLD) as proxy:
        proxy.replicas[1].faults.set("refuse")
        await until(lambda: proxy.app.pools.backends["b1"].health.gone)
        async with asyncio.timeout(HOLD["no_backend_wait_s"] / 3):
            answer = await go_on(proxy, "resp_unknown")
        assert (answer.status, answer.headers["x-llmproxy-attempts"]) == (404, "2")
