"""Backends with several served names: rolled out one by one, listed in any order, or with no list for a moment."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.e2e.proxies import HELLO, ProxyUnderTest, serving, until
from tests.e2e.scripted import Scripted, answering, scripted, whole
from tests.upstream.raw_server import Peer

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
                    await until(lambda: "new" in found.served and ("old" in found.served) == ("old" in served))  # noqa: B023
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
    async with (
        scripted(answering(DONE)) as backend,
        serving(extra=[backend.url], queue={"no_backend_wait_s": 30.0}) as proxy,
    ):
        backend.polls[b"/v1/models"] = answering(poll)
        await until(lambda: proxy.app.pools.backends["b0"].health.down)
        waiting = asyncio.create_task(asked(proxy, "base"))
        await until(lambda: sum(requests for requests, _ in proxy.app.pools.queued().values()) == 8)
        lists(backend, "base")
        assert await waiting == {200}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_an_adapter_that_the_engine_loads_when_first_named_is_let_through(workers: int) -> None:
    seen: list[str] = []

    async def resolver(peer: Peer, request: bytes) -> None:
        name = json.loads(request.partition(b"\r\n\r\n")[2])["model"]
        seen.append(name)
        if name == "user-none":
            body = json.dumps({"error": {"message": "The model `user-none` does not exist.", "code": 404}}).encode()
            await peer.send(whole(body, "404 Not Found"))
        else:
            await peer.send(DONE)

    let_through = [{"name": "user-*", "base": "base"}]
    async with (
        scripted(resolver) as a,
        scripted(resolver) as b,
        serving(extra=[a.url, b.url], models=let_through, workers=workers, fixed_limit=2) as proxy,
    ):
        lists(a, "base", adapters=("user-1",))
        await until(lambda: "user-1" in proxy.app.pools.backends["b0"].served)
        assert await asked(proxy, "user-1") == {200}
        assert a.requests
        assert b.requests, "it has not loaded the adapter yet"
        assert await asked(proxy, "user-2") == {200}
        assert (await proxy.chat(HELLO | {"model": "user-none"})).status == 404
        assert (await proxy.chat(HELLO | {"model": "users"})).status == 404
        assert seen == ["user-1"] * 8 + ["user-2"] * 8 + ["user-none"]
        assert not any(backend.health.ejected for backend in proxy.app.pools.backends.values())
