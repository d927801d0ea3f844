"""Objects of the inference extension, made, changed and deleted while the proxy of their InferencePool serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from llmproxy.backends.kubernetes import watched
from llmproxy.config import hash_of
from llmproxy.lab.simulator.replica import Replica
from tests.backends.kubernetes.api_server import ApiServer, api_server, inference_pool, objective, pod, rewrite, rule
from tests.e2e.backends.test_kubernetes import LABELS, port_of
from tests.e2e.operators.test_reload import ADMIN, KEYED
from tests.e2e.operators.test_reload import rewrite as reloaded
from tests.e2e.proxies import FAST, HELLO, ProxyUnderTest, is_poll, serving, until

OBJECTIVES, REWRITES = "inferenceobjectives", "inferencemodelrewrites"
POOL = "kubernetes+http://inferencepool/qwen"
HEADER = "x-llm-d-inference-objective"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "PAUSE_MIN_S", 0.001)


@asynccontextmanager
async def cluster(
    *objects: Any, refused: dict[str, int] | None = None, **config: Any
) -> AsyncIterator[tuple[ApiServer, Replica, ProxyUnderTest]]:
    """A pool of one pod, which serves `base`, `lora-0` and `lora-1`."""
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(api_server())
        replica = await stack.enter_async_context(Replica(FAST))
        api.put("inferencepools", inference_pool("qwen", LABELS, port_of(replica)))
        api.put("pods", pod("vllm-0", "127.0.0.1", labels=LABELS))
        api.refused |= refused or {}
        for one in objects:
            api.put(OBJECTIVES if one["kind"] == "InferenceObjective" else REWRITES, one)
        given: dict[str, Any] = {
            "queue": {"no_backend_wait_s": 5.0},
            "discovery": {"kubernetes_api": api.url},
            **config,
        }
        yield api, replica, await stack.enter_async_context(serving(extra=[POOL], wait=False, **given))


async def band_of(proxy: ProxyUnderTest, name: str, header: str = HEADER, **headers: str) -> tuple[str, int]:
    """Returns the name and the number of the band of a request with this objective."""
    assert (await proxy.chat(headers={header: name, **headers})).status == 200
    await until(lambda: proxy.app.handler.open_requests == 0)
    proxy.app.flush_records()
    asked = next(proxy.app.recorder.recent.newest_first())
    return asked.band or "", asked.level or 0


async def model_of(proxy: ProxyUnderTest, replica: Replica, name: str, request: str) -> str:
    """Returns the model in the replica's request, after a check that the answer has the same one."""
    answer = await proxy.chat(HELLO | {"model": name}, headers={"x-request-id": request})
    assert answer.status == 200
    sent = json.loads([seen for seen in replica.requests_seen if not is_poll(seen)][-1].body)
    assert answer.json["model"] == sent["model"]
    return str(sent["model"])


def knows(proxy: ProxyUnderTest, section: str, **wanted: Any) -> bool:
    return {one.name: getattr(one, "criticality", None) for one in getattr(proxy.app.config, section)} == wanted


async def test_objectives_are_bands_while_they_exist() -> None:
    async with cluster(objective("batch", -10)) as (api, _, proxy):
        # The first client meets a proxy that knows them.
        assert await band_of(proxy, "batch") == ("batch", -10)
        assert await band_of(proxy, "batch", "x-gateway-inference-objective") == ("batch", -10)
        assert await band_of(proxy, "critical") == ("critical", 100)
        assert proxy.metric("llmproxy_requests_total", band="batch") == 2
        api.put(OBJECTIVES, objective("batch", 20))
        api.put(OBJECTIVES, objective("unset", created="2026-01-02"))
        api.put(OBJECTIVES, objective("wrong", "high"))
        await until(lambda: knows(proxy, "objectives", batch=20, unset=0))
        assert await band_of(proxy, "batch") == ("batch", 20)
        assert await band_of(proxy, "unset") == ("default", 0)
        assert await band_of(proxy, "wrong") == ("default", 0)
        api.delete(OBJECTIVES, "batch")
        await until(lambda: knows(proxy, "objectives", unset=0))
        assert await band_of(proxy, "batch") == ("default", 0)
        assert proxy.metric("llmproxy_unknown_objectives_total") == 2


async def test_an_objective_decides_who_goes_first() -> None:
    async with cluster(objective("low", -10), objective("high", 10)) as (_, _, proxy):
        assert (await proxy.chat()).status == 200
        proxy.app.pools.backends["vllm-0"].set_limits_and_role(1, None)
        async with proxy.stream() as seat:
            await seat.content.readany()
            waiting = [
                await proxy.enter(name, None, **({HEADER: name} if name != "none" else {}))
                for name in ("low", "none", "high")
            ]
        for task in waiting:
            assert (await task).status == 200
        proxy.app.flush_records()
        order = [ended.request_id for ended in proxy.app.recorder.recent.newest_first()]
        assert order[2::-1] == ["high", "none", "low"]


async def test_objective_gives_no_band_that_the_client_may_not_choose() -> None:
    tenants = [
        {"name": "free", "keys": [hash_of("free")], "trusted": True, "band_max": "default"},
        {"name": "stranger", "keys": [hash_of("stranger")]},
    ]
    async with cluster(objective("high", 500), tenants=tenants, trust_headers="none") as (_, _, proxy):
        assert await band_of(proxy, "high", authorization="Bearer free") == ("default", 0)
        assert await band_of(proxy, "high", authorization="Bearer stranger") == ("default", 0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_rewrites_are_aliases_while_they_exist(workers: int) -> None:
    ids = [f"r{number}" for number in range(24)]
    async with cluster(rewrite("r", rule("chat", base=None)), workers=workers) as (api, replica, proxy):
        assert await model_of(proxy, replica, "chat", "first") == "base"
        split = {"modelRewrite": "lora-0", "weight": 1}, {"modelRewrite": "lora-1", "weight": 1}
        api.put(REWRITES, rewrite("r", rule("chat", base=None) | {"targets": [*split]}))
        await until(lambda: proxy.app.config.models[0].targets)
        models = [await model_of(proxy, replica, "chat", name) for name in ids]
        assert set(models) == {"lora-0", "lora-1"}
        assert [await model_of(proxy, replica, "chat", name) for name in ids] == models
        assert "chat" in {card["id"] for card in (await proxy.get("/v1/models")).json["data"]}
        # An older object precedes it; an object for every name precedes nothing.
        api.put(REWRITES, rewrite("older", rule("chat", base=None), created="2025-01-01"))
        api.put(REWRITES, rewrite("all", {"targets": [split[0]]}, created="2024-01-01"))
        await until(lambda: {one.name for one in proxy.app.config.models} == {"chat", "*"})
        assert {await model_of(proxy, replica, "chat", name) for name in ids[:4]} == {"base"}
        assert await model_of(proxy, replica, "made-up", "one") == "lora-0"
        for name in ("r", "older", "all"):
            api.delete(REWRITES, name)
        await until(lambda: proxy.app.config.models == ())
        assert (await proxy.chat(HELLO | {"model": "chat"})).status == 404


async def test_a_name_is_waited_for_while_the_cluster_cannot_be_asked() -> None:
    async with cluster(rewrite("r", rule("chat", base=None)), refused={REWRITES: 503}) as (api, _, proxy):
        assert (await proxy.chat()).status == 200
        asked = asyncio.create_task(proxy.chat(HELLO | {"model": "chat"}))
        await until(lambda: proxy.app.dispatcher.nameless == 1)
        api.refused.clear()
        assert (await asked).status == 200


async def test_a_reload_keeps_the_objects_and_objects_keep_the_reload(tmp_path: Path) -> None:
    async with cluster(objective("batch", -10), file=tmp_path / "c.yaml", **KEYED) as (api, _, proxy):
        await reloaded(proxy, objectives=[{"name": "mine", "criticality": 5}])
        assert knows(proxy, "objectives", mine=5, batch=-10)
        api.put(OBJECTIVES, objective("batch", -20))
        await until(lambda: knows(proxy, "objectives", mine=5, batch=-20))
        assert await band_of(proxy, "batch") == ("batch", -20)
        await reloaded(proxy, objectives=[{"name": "batch", "criticality": 7}])
        assert knows(proxy, "objectives", batch=7)
        settings = {one["key"]: one for one in (await proxy.get("/debug/config", headers=ADMIN)).json["settings"]}
        assert settings["objectives[batch].criticality"]["value"] == "7"
        await reloaded(proxy, objectives=[])
        settings = {one["key"]: one for one in (await proxy.get("/debug/config", headers=ADMIN)).json["settings"]}
        assert settings["objectives[batch].criticality"] == {
            "key": "objectives[batch].criticality", "value": "-20", "origin": "InferenceObjective default/batch",
            "restart": False,
        }  # fmt: skip
        api.refuses = 503
        api.cut()
        await reloaded(proxy, queue={"max_wait_s": 9})
        assert knows(proxy, "objectives", batch=-20), "the last objects stay"
