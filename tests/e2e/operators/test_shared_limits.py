"""Independent proxies that share the limits of tenants in a Valkey or Redis, which may be slow, away or empty."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llmproxy.app import running
from llmproxy.config import Config, hash_of
from llmproxy.lab.simulator.replica import Replica
from llmproxy.scheduling.valkey import ValkeyServer
from tests.e2e.leftovers import nothing_left
from tests.e2e.processes import served
from tests.e2e.proxies import CHAT, FAST, HELLO, QUICK, ProxyUnderTest, all_up, merged_with, one_seat, until
from tests.scheduling.shared.servers import Server, needs_server, serving_store

pytestmark = needs_server

KEY = {"authorization": "Bearer acme-1"}


def limited(server: Server, on_failure: str = "closed", **limits: Any) -> dict[str, Any]:
    """A tenant with these limits, and another one without any."""
    tenants = [
        {"name": "acme", "keys": [hash_of("acme-1")], "limits": limits},
        {"name": "free", "keys": [hash_of("free-1")]},
    ]
    return {"tenants": tenants, "shared_limits": {"store": server.url, "on_failure": on_failure}}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving_store(Server(tmp_path)) as one:
        yield one


@asynccontextmanager
async def two(config: dict[str, Any]) -> AsyncIterator[list[ProxyUnderTest]]:
    """Two proxies over one replica, which know nothing of each other."""
    async with nothing_left(), AsyncExitStack() as stack:
        replica = await stack.enter_async_context(Replica(FAST))
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        data = merged_with(QUICK | {"backends": [{"url": replica.url, "name": "b0"}]}, config)
        found = []
        for _ in range(2):
            app = await stack.enter_async_context(running(Config.model_validate(data)))
            found.append(ProxyUnderTest(app, [replica], http, data))
        await until(lambda: all(all_up(one) for one in found))
        yield found
        for one in found:
            await one.settled()
            one.check()


async def statuses(proxies: list[ProxyUnderTest], each: int) -> Counter[int]:
    answers = await asyncio.gather(*(one.chat(headers=KEY) for one in proxies for _ in range(each)))
    return Counter(answer.status for answer in answers)


def away(proxy: ProxyUnderTest) -> bool:
    return not proxy.metric("llmproxy_limits_store_up")


# --- as one -----------------------------------------------------------------------------------------------------------


async def test_two_proxies_let_a_tenant_pass_as_one_would(server: Server) -> None:
    clock = asyncio.get_running_loop().time
    async with two(limited(server, requests_per_min=30)) as proxies:
        began_s = clock()
        found = await statuses(proxies, 40)
        assert set(found) == {200, 429}
        assert 30 <= found[200] <= 30 + (clock() - began_s) / 2
        refused = await proxies[0].chat(headers=KEY)
        assert refused.status == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 2
        assert refused.json["error"]["message"].startswith("The limit of 30 requests per minute of the tenant `acme`")
        free = {"authorization": "Bearer free-1"}
        assert (await proxies[1].chat(headers=free)).status == 200


async def test_tokens_are_taken_from_the_store_as_the_engine_counted_them(server: Server) -> None:
    clock = asyncio.get_running_loop().time
    async with two(limited(server, tokens_per_min=1200)) as proxies:
        began_s = clock()
        assert await statuses(proxies, 10) == {200: 20}
        await asyncio.gather(*(one.settled() for one in proxies))
        store = ValkeyServer(server.url, "", 5.0)

        async def taken() -> float:
            return 20.0 * float(await store.client.pttl("llmproxy:{llmproxy}:tokens:tenant:acme")) / 1000.0

        used = sum(
            one.metric("llmproxy_tenant_tokens_total", tenant="acme", direction=direction)
            for one in proxies
            for direction in ("input", "output")
        )
        assert used > 100
        async with asyncio.timeout(10):
            while not used - 20.0 * (clock() - began_s) - 1.0 <= await taken() <= used + 1.0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await store.close()


async def test_a_request_that_is_refused_for_another_reason_costs_nothing(server: Server) -> None:
    config = limited(server, requests_per_min=3) | {"queue": {"requests_max": 1, "no_backend_wait_s": 0.0}}
    async with one_seat(headers=KEY, **config) as (proxy, seat):
        waiting = await proxy.enter("waits", **KEY)
        for _ in range(5):
            assert (await proxy.chat(headers=KEY)).status == 429
        assert proxy.outcomes()["rejected_capacity"] == 5
        seat.close()
        assert (await waiting).status == 200
        assert (await proxy.chat(headers=KEY)).status == 200
        assert (await proxy.chat(headers=KEY)).status == 429
        assert proxy.outcomes()["rate_limited"] == 1


async def test_changed_limits_hold_from_the_next_request_on(server: Server) -> None:
    async with two(limited(server, requests_per_min=2)) as proxies:
        assert await statuses(proxies, 2) == {200: 2, 429: 2}
        changed = limited(server, tokens_per_min=10**6)
        for one in proxies:
            one.app.reconfigure(Config.model_validate(merged_with(one.config_data, changed)))
        assert await statuses(proxies, 4) == {200: 8}


# --- a store that fails -----------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_closed_refuses_until_the_store_is_back(server: Server, log: io.StringIO) -> None:
    async with two(limited(server, requests_per_min=1000)) as proxies:
        assert await statuses(proxies, 2) == {200: 4}
        await server.kill()
        assert await statuses(proxies, 3) == {503: 6}
        refused = await proxies[0].chat(headers=KEY)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "limits" in refused.json["error"]["message"]
        assert (await proxies[0].get("/ready")).status == 200
        assert (await proxies[0].chat(headers={"authorization": "Bearer free-1"})).status == 200
        assert proxies[0].outcomes()["rejected_limits_unavailable"] == 4
        assert all(map(away, proxies))
        await server.start()
        await until(lambda: not any(map(away, proxies)))
        assert await statuses(proxies, 2) == {200: 4}
    lines = log.getvalue().splitlines()
    assert [
        sum(event in line for line in lines) for event in ("limits_store_unreachable", "limits_store_reachable")
    ] == [2, 2]


@pytest.mark.slow
async def test_a_share_passes_each_proxy_and_never_the_whole(server: Server) -> None:
    async with two(limited(server, "1/2", requests_per_min=10)) as proxies:
        await server.kill()
        await statuses(proxies, 1)
        await until(lambda: all(map(away, proxies)))
        found = [await statuses([one], 20) for one in proxies]
        assert all(one[200] <= 5 for one in found)
        assert sum(one[200] for one in found) in (8, 9, 10), "one may have passed each before it was known"
        await server.start()
        await until(lambda: not any(map(away, proxies)))
        assert (await statuses(proxies, 20))[200] in (10, 11), "the store was restarted empty"


@pytest.mark.slow
async def test_a_store_that_is_away_at_the_start_keeps_no_proxy_from_starting(server: Server) -> None:
    await server.kill()
    async with two(limited(server, requests_per_min=1000)) as proxies:
        assert (await proxies[0].get("/ready")).status == 200
        assert await statuses(proxies, 1) == {503: 2}
        await server.start()
        await until(lambda: not any(map(away, proxies)))
        assert await statuses(proxies, 1) == {200: 2}


async def test_a_store_that_does_not_answer_is_not_waited_for(server: Server) -> None:
    async with two(limited(server, requests_per_min=1000)) as proxies:
        assert await statuses(proxies, 1) == {200: 2}
        server.send(signal.SIGSTOP)
        try:
            assert await statuses(proxies, 3) == {503: 6}
        finally:
            server.send(signal.SIGCONT)
        await until(lambda: not any(map(away, proxies)))
        assert await statuses(proxies, 1) == {200: 2}


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_two_processes_one_of_them_with_workers(server: Server, tmp_path: Path) -> None:
    """The scheduler process asks, whichever worker has the client."""
    clock = asyncio.get_running_loop().time
    async with AsyncExitStack() as stack:
        replica = await stack.enter_async_context(Replica(FAST))
        file = tmp_path / "llmproxy.yaml"
        file.write_text(json.dumps({"backends": [replica.url]} | limited(server, requests_per_min=60)))
        ports = ("--port", "0", "--config", str(file))
        one = await stack.enter_async_context(served(tmp_path / "one.log", *ports))
        other = await stack.enter_async_context(served(tmp_path / "other.log", *ports, "--workers", "2"))
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=20)))
        urls = [await one.url(), await other.url()]

        async def status(url: str) -> int:
            async with http.post(url + CHAT, json=HELLO, headers=KEY) as answer:
                await answer.read()
                return answer.status

        began_s = clock()
        found = Counter(await asyncio.gather(*(status(url) for url in urls for _ in range(100))))
        assert set(found) == {200, 429}
        assert 60 <= found[200] <= 60 + (clock() - began_s)
        await server.kill()
        assert Counter(await asyncio.gather(*(status(url) for url in urls for _ in range(10)))) == {503: 20}
        for proxy in (one, other):
            assert "a request to " in (await proxy.event("limits_store_unreachable"))["why"]
