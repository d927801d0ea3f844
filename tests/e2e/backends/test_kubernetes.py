"""Replicas in pods get requests once they are ready, and end their requests when they are deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from llmproxy.backends.kubernetes import watched
from llmproxy.lab.simulator.replica import Replica
from tests.backends.kubernetes.api_server import (
    ApiServer,
    Object,
    api_server,
    endpoint,
    endpoint_slice,
    inference_pool,
    pod,
)
from tests.e2e.proxies import ENDLESS, FAST, HELLO, ProxyUnderTest, serving, until

LABELS = {"app": "vllm"}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "PAUSE_MIN_S", 0.001)


@asynccontextmanager
async def cluster(url: str, replicas: int) -> AsyncIterator[tuple[ApiServer, list[Replica], ProxyUnderTest]]:
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(api_server())
        made = [await stack.enter_async_context(Replica(FAST)) for _ in range(replicas)]
        proxy = await stack.enter_async_context(
            serving(extra=[url], wait=False, discovery={"kubernetes_api": api.url}, queue={"no_backend_wait_s": 5.0})
        )
        yield api, made, proxy


def port_of(replica: Replica) -> int:
    return urlsplit(replica.url).port or 0


def as_pod(name: str, replica: Replica, *, ready: bool = True, **more: Any) -> Object:
    return pod(name, "127.0.0.1", ready=ready, labels=LABELS, ports={"http": port_of(replica)}, **more)


def states(proxy: ProxyUnderTest) -> dict[str, str]:
    return {one.name: one.state for one in proxy.app.registry.statuses()}


async def test_a_pod_gets_requests_from_when_it_is_ready_until_it_terminates() -> None:
    async with cluster("kubernetes+http://pods/app=vllm", 2) as (api, (first, second), proxy):
        api.put("pods", as_pod("vllm-0", first))
        assert (await proxy.post("/v1/chat/completions", HELLO)).backend == "vllm-0"
        api.put("pods", as_pod("vllm-1", second, ready=False))
        await until(lambda: states(proxy).get("vllm-1") == "starting")
        await until(lambda: proxy.app.pools.pool_of("vllm-1") == "base")
        assert {(await proxy.chat()).backend for _ in range(8)} == {"vllm-0"}
        assert (await proxy.get("/scale/base")).json["replicas"]["starting"] == 1, "the polls of the start are over"
        # A pod that still loads its model has listed none; it is in the pool of all others.
        api.put("pods", pod("vllm-2", "127.0.0.1", ready=False, labels=LABELS, ports={"http": 1}))
        await until(lambda: states(proxy).get("vllm-2") == "starting")
        replicas = (await proxy.get("/scale/base")).json["replicas"]
        assert (replicas["up"], replicas["starting"]) == (1, 2)
        api.delete("pods", "vllm-2")
        assert proxy.metric("llmproxy_backend_drained", backend="vllm-1") == 1.0
        api.put("pods", as_pod("vllm-1", second))
        await until(lambda: states(proxy)["vllm-1"] == "up")
        async with proxy.stream(ENDLESS) as stream:
            busy = stream.headers["x-llmproxy-backend"]
            other = ({"vllm-0", "vllm-1"} - {busy}).pop()
            api.put("pods", as_pod(busy, first if busy == "vllm-0" else second, deleted=True))
            await until(lambda: states(proxy)[busy] == "leaving")
            assert {(await proxy.chat()).backend for _ in range(4)} == {other}
            assert await stream.content.readany(), "its stream goes on"
        api.delete("pods", busy)
        await until(lambda: states(proxy) == {other: "up"})


async def test_another_pod_with_the_name_and_address_of_one_is_another_process() -> None:
    async with cluster("kubernetes+http://pods/app=vllm", 1) as (api, (replica,), proxy):
        api.put("pods", as_pod("vllm-0", replica))
        await until(lambda: states(proxy) == {"vllm-0": "up"})
        poller = proxy.app.registry.pollers["vllm-0"]
        api.put("pods", as_pod("vllm-0", replica))
        assert (await proxy.chat()).status == 200
        assert proxy.app.registry.pollers["vllm-0"] is poller
        api.put("pods", as_pod("vllm-0", replica, uid="another"))
        await until(lambda: proxy.app.registry.pollers["vllm-0"] is not poller)
        await until(lambda: states(proxy) == {"vllm-0": "up"})
        assert (await proxy.chat()).status == 200


async def test_requests_are_served_while_the_api_server_is_away() -> None:
    async with cluster("kubernetes+http://service/vllm", 2) as (api, replicas, proxy):
        for number, replica in enumerate(replicas):
            ports = {"http": port_of(replica)}
            api.put("endpointslices", endpoint_slice(f"s{number}", endpoint(f"p{number}", "127.0.0.1"), ports=ports))
        await until(lambda: states(proxy) == {"p0": "up", "p1": "up"})
        await until(lambda: api.watching)
        api.refuses = 503
        api.cut()
        await until(lambda: proxy.metric("llmproxy_discovery_lookups_total", result="failure"))
        answers = await asyncio.gather(*(proxy.chat() for _ in range(8)))
        assert [one.status for one in answers] == [200] * 8
        assert {one.backend for one in answers} == {"p0", "p1"}
        api.refuses = None
        api.delete("endpointslices", "s0")
        await until(lambda: states(proxy) == {"p1": "up"})


async def test_two_services_are_followed_at_once() -> None:
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(api_server())
        replicas = {name: await stack.enter_async_context(Replica(FAST)) for name in ("qwen", "llama")}
        urls = [f"kubernetes+http://service/{name}" for name in replicas]
        proxy = await stack.enter_async_context(
            serving(extra=urls, wait=False, discovery={"kubernetes_api": api.url}, queue={"no_backend_wait_s": 5.0})
        )
        await until(lambda: api.watching == ["endpointslices"] * 2)
        for name, replica in replicas.items():
            ports = {"http": port_of(replica)}
            api.put("endpointslices", endpoint_slice(name, endpoint(name, "127.0.0.1"), service=name, ports=ports))
        await until(lambda: states(proxy) == {"qwen": "up", "llama": "up"})


async def test_roles_come_from_the_labels_of_a_pool() -> None:
    async with cluster("kubernetes+http://inferencepool/qwen", 1) as (api, (replica,), proxy):
        api.put("inferencepools", inference_pool("qwen", LABELS, port_of(replica)))
        api.put("pods", as_pod("a", replica))
        await until(lambda: states(proxy) == {"a": "up"})
        one = as_pod("a", replica)
        one["metadata"]["labels"] = LABELS | {"llm-d.ai/role": "decode"}
        api.put("pods", one)
        await until(lambda: proxy.app.registry.backends["a"].role == "decode")
        assert proxy.app.registry.pollers.keys() == {"a"}
