"""Backends with several served names: rolled out one by one, listed in any order, or with no list for a moment."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.e2e.proxies import HELLO, ProxyUnderTest, serving, until
from tests.e2e.scripted import Scripted, answering, scripted, whole

DONE = whole(json.dumps({"id": "c", "object": "chat.completion", "choices": [{"index": 0}]}).encode())


def model_list(*names: str, adapters: tuple[str, ...] = ()) -> bytes:
    cards = [{"id": name, "object": "model", "parent": None} for name in names]
    cards += [{"id": name, "object": "model", "parent": names[0]} for name in adapters]
    return whole(json.dumps({"object": "list", "data": cards}).encode())


def lists(backend: Scripted, *names: str, adapters: tuple[str, ...] = ()) -> None:
    backend.polls[b"/v1/models"] = answering(model_list(*names, adapters=adapters))


async def asked(proxy: ProxyUnderTest, model: str) -> set[int]:
    answers = await asyncio.gather(*(proxy.chat(HELLO | {"model": model}) for _ in range(8)))
    return {answer.status for answer in answers}


async def test_a_name_is_rolled_out_over_another_one_without_a_failure() -> None:
    async with scripted(answering(DONE)) as a, scripted(answering(DONE)) as b:
        for backend in (a, b):
            lists(backend, "old")
        async with serving(extra=[a.url, b.url], fixed_limit=2) as proxy:
            waiting: list[asyncio.Task[set[int]]] = []
            for model, served in (("old", ("new", "old")), ("new", ("new",))):
                for name, backend in (("b0", a), ("b1", b)):
                    waiting.append(asyncio.create_task(asked(proxy, model)))
                    lists(backend, *served)
                    found = proxy.app.pools.backends[name]
                    await until(lambda: found.serves("new") and found.serves("old") == ("old" in served))  # noqa: B023
                    assert await asked(proxy, model) == {200}
            assert [await one for one in waiting] == [{200}] * 4
            assert proxy.app.pools.catalogue.pools == ("new",)
            assert a.requests
            assert b.requests
            assert await asked(proxy, "old") == {404}


async def test_a_pool_answers_to_all_of_its_names_for_autoscalers() -> None:
    async with scripted(answering(DONE)) as a, scripted(answering(DONE)) as b:
        lists(a, "new", "old")
        lists(b, "old")
        async with serving(extra=[a.url, b.url]) as proxy:
            for name in ("new", "old"):
                assert (await proxy.get(f"/scale/{name}")).json["pool"] == "old"
            assert (await proxy.get("/scale/none")).status == 404


@pytest.mark.parametrize(
    "poll",
    [model_list(), whole(b"", "404 Not Found"), whole(b"", "503 Service Unavailable")],
    ids=["empty", "404", "503"],
)
async def test_requests_wait_while_a_backend_lists_nothing(poll: bytes) -> None:
    async with scripted(answering(DONE)) as backend, serving(extra=[backend.url], queue={"hold_s": 30.0}) as proxy:
        backend.polls[b"/v1/models"] = answering(poll)
        await until(lambda: proxy.app.pools.backends["b0"].health.down)
        waiting = asyncio.create_task(asked(proxy, "base"))
        await until(lambda: sum(requests for requests, _ in proxy.app.pools.queued().values()) == 8)
        lists(backend, "base")
        assert await waiting == {200}
