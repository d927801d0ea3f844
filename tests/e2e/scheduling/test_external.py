"""A simulated replica as the external endpoint: the calls that reach it, their cost, and the time of its use."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from llmproxy.config import Config, ConfigError
from llmproxy.lab.simulator.replica import Replica
from llmproxy.lab.simulator.server.faults import FaultKind
from tests.e2e.proxies import CHAT, ENDLESS, FAST, HELLO, STREAM, ProxyUnderTest, all_of, is_poll, serving, until

KEY = "s3cret-key-of-the-endpoint"
THERE = replace(FAST, model="there", adapters=(), api_key=KEY)
ACME = {"authorization": "Bearer client-key"}


@asynccontextmanager
async def overflowing(
    external: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **given: Any
) -> AsyncIterator[tuple[ProxyUnderTest, Replica]]:
    """A proxy with one replica of one slot, and the external backend `x`."""
    async with Replica(THERE) as there, Replica(FAST) as here:
        entry = {
            "models": {"base": "there"}, "only_above_wait_s": 0.05, "max_per_day": 100.0,
            "price_per_million_input": 1e6, "price_per_million_output": 1e5,
        } | (external or {})  # fmt: skip
        backends = [
            {"url": here.url, "name": "a", "max_in_flight": 1},
            {"url": there.url, "name": "x", "api_key": KEY, "external": entry},
        ]
        defaults = {"scheduling": {"look_ahead": 0}, "backend_api_key": "key-of-the-fleet"}
        async with serving(backends=backends, wait=False, **(defaults | (config or {})), **given) as proxy:
            await until(lambda: proxy.app.pools.backends["a"].listing is not None)
            proxy.replicas = (here,)
            yield proxy, there


def sent_to(replica: Replica) -> Any:
    return [one for one in replica.requests_seen if not is_poll(one)][-1]


async def test_an_overloaded_fleet_overflows_and_the_endpoint_learns_nothing_about_the_client() -> None:
    async with overflowing() as (proxy, there), proxy.stream() as seat:
        await seat.content.readany()
        headers = ACME | {"cookie": "c", "x-tenant": "t", "x-request-id": "mine", "user-agent": "agent"}
        answer = await proxy.chat(headers=headers)
        assert (answer.status, answer.backend, answer.json["model"]) == (200, "x", "there")
        seen = sent_to(there)
        assert seen.headers.keys() <= {
            "host", "accept", "accept-encoding", "authorization", "content-type", "content-length",
        }  # fmt: skip
        assert seen.headers["authorization"] == f"Bearer {KEY}"
        assert json.loads(seen.body) == HELLO | {"model": "there"}
        assert not [one for one in there.requests_seen if is_poll(one)]
        usage = answer.json["usage"]
        cost = usage["prompt_tokens"] + usage["completion_tokens"] / 10
        assert proxy.metric("llmproxy_external_cost_total", backend="x") == pytest.approx(cost)
        assert proxy.metric("llmproxy_external_day_left", backend="x") == pytest.approx(100.0 - cost)
        (row,) = [one for one in (await proxy.get("/debug/live")).json["backends"] if one["backend"] == "x"]
        assert row["external"] == {"max_per_day": 100.0, "left": pytest.approx(100.0 - cost)}
        for path in ("/debug/config", "/debug/live", "/debug/queue", "/admin/backends", "/metrics"):
            assert KEY not in (await proxy.get(path)).body.decode()


async def test_an_answer_counts_beyond_the_context_of_the_replicas_and_trains_no_estimate() -> None:
    seen: list[str] = []
    meanwhile: list[Callable[[], None]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path_qs)
        for call in meanwhile:
            call()
        choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5_000, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 4_000}}
        return web.json_response({"id": "1", "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as there, Replica(replace(FAST, max_model_len=512)) as here:
        entry = {"models": {"base": "there"}, "max_per_day": 1e6, "price_per_million_input": 1e6}
        entry |= {"price_per_million_output": 1e5, "price_per_million_cached": 1e5}
        backends = [{"url": here.url, "name": "a"}, {"url": str(there.make_url("/")), "name": "x", "external": entry}]
        async with serving(backends=backends, wait=False) as proxy:
            await until(lambda: proxy.app.pools.backends["a"].listing is not None)
            estimator = proxy.app.pools.estimator
            await proxy.chat()
            learned = estimator.bytes_per_token("base")
            proxy.app.registry.drain("a")
            for _ in range(3):
                answered = await proxy.post(f"{CHAT}?secret=1", HELLO)
                assert (answered.status, answered.backend) == (200, "x")
            assert estimator.bytes_per_token("base") == learned
            cost = 3 * (1_000 + 4_000 / 10 + 4 / 10)
            assert proxy.metric("llmproxy_external_cost_total", backend="x") == pytest.approx(cost)
            assert proxy.metric("llmproxy_external_day_left", backend="x") == pytest.approx(1e6 - cost)
            # A reload during the call removes the endpoint.
            without = Config.model_validate({**proxy.config_data, "backends": backends[:1]})
            meanwhile.append(lambda: proxy.app.reconfigure(without))
            assert (await proxy.post(CHAT, HELLO)).backend == "x"
            assert estimator.bytes_per_token("base") == learned
    assert seen == [CHAT] * 4


@pytest.mark.parametrize("replica", ["none", "down"])
async def test_it_serves_right_after_a_start_without_a_replica(replica: str) -> None:
    async with Replica(THERE) as there, Replica(FAST) as gone:
        pass
    async with there:
        entry = {"models": {"base": "there"}, "max_per_day": 100.0}
        entry |= {"price_per_million_input": 1, "price_per_million_output": 1}
        backends: list[Any] = [{"url": there.url, "name": "x", "api_key": KEY, "external": entry}]
        if replica == "down":
            backends.append({"url": gone.url, "name": "a"})
        async with serving(backends=backends, wait=False) as proxy:
            answer = await proxy.chat()
            assert (answer.status, answer.backend) == (200, "x")
            if replica == "down":
                async with gone:
                    await until(lambda: proxy.app.registry.status("a").state == "up")
                    assert (await proxy.chat()).backend == "a"


async def test_streams_cost_as_much_and_go_to_the_fleet_when_it_is_back() -> None:
    async with overflowing({"only_above_wait_s": None}) as (proxy, _):
        proxy.app.registry.drain("a")
        answer = await proxy.chat(STREAM)
        assert (answer.status, answer.backend) == (200, "x")
        first = proxy.metric("llmproxy_external_cost_total")
        await proxy.chat()
        assert proxy.metric("llmproxy_external_cost_total") == pytest.approx(2 * first)
        proxy.app.registry.undrain("a")
        assert (await proxy.chat(STREAM)).backend == "a"


def of_another_process(folder: Path) -> None:
    """Renames the files of this process."""
    for file in folder.iterdir():
        file.rename(folder / f"{file.name[:10]}.another-process.jsonl")


async def test_the_bound_of_the_day_ends_it_also_after_a_restart(tmp_path: Path) -> None:
    config = {"queue": {"no_backend_wait_s": 0.0}}
    left = []
    for statuses in ([200, 503], [503]):
        of_another_process(tmp_path)
        async with overflowing({"max_per_day": 11.0}, config, usage_folder=tmp_path) as (proxy, _):
            proxy.app.registry.drain("a")
            left.append(proxy.metric("llmproxy_external_day_left"))
            assert [(await proxy.chat()).status for _ in statuses] == statuses
            left.append(proxy.metric("llmproxy_external_day_left"))
    assert 11.0 == left[0] > left[1] == pytest.approx(left[2])


async def test_an_attempt_that_timed_out_costs_also_after_a_restart(tmp_path: Path) -> None:
    config = {"timeouts": {"total_s": 0.3}, "queue": {"no_backend_wait_s": 0.0}}
    left = []
    for asks in (True, False):
        of_another_process(tmp_path)
        async with overflowing(config=config, usage_folder=tmp_path) as (proxy, there):
            proxy.app.registry.drain("a")
            left.append(proxy.metric("llmproxy_external_day_left"))
            if asks:
                there.faults.set(FaultKind.SILENT)
                assert (await proxy.chat()).status == 504
                left.append(proxy.metric("llmproxy_external_day_left"))
                there.faults.clear()
    assert 100.0 == left[0] > left[1] == pytest.approx(left[2])


@pytest.mark.parametrize("breaks", ["x", "a"])
async def test_streams_are_not_continued_from_or_at_an_endpoint(breaks: str) -> None:
    async with overflowing({"only_above_wait_s": 0.0}) as (proxy, there):
        if breaks == "x":
            proxy.app.registry.drain("a")
        async with proxy.stream(ENDLESS) as stream:
            await stream.content.readany()
            proxy.app.registry.undrain("a")
            asked = len(there.requests_seen)
            (there if breaks == "x" else proxy.replicas[0]).faults.set(FaultKind.REFUSE)
            assert b"error" in await all_of(stream)
        assert len(there.requests_seen) == asked


async def test_it_is_no_replica_for_autoscaling() -> None:
    async with overflowing() as (proxy, _):
        (pool,) = (await proxy.get("/scale")).json["pools"]
        assert (pool["pool"], sum(pool["replicas"].values())) == ("base", 1)
        shown = (await proxy.get("/admin/backends")).json["backends"]
        assert {one["backend"]: (one["role"], one["state"]) for one in shown} == {
            "a": ("both", "up"), "x": ("external", "up"),
        }  # fmt: skip


async def test_a_reload_moves_it_makes_it_an_engine_and_removes_it() -> None:
    async with overflowing({"only_above_wait_s": None}) as (proxy, there):
        given, moved = proxy.config_data, there.url.replace("127.0.0.1", "localhost")

        def reloaded(**change: Any) -> None:
            backends = [given["backends"][0], *([given["backends"][1] | change] if change else [])]
            proxy.app.reconfigure(Config.model_validate({**given, "backends": backends}))

        proxy.app.registry.drain("a")
        reloaded(url=moved)
        assert (await proxy.chat()).backend == "x"
        async with proxy.stream() as stream:
            await stream.content.readany()
            # The running stream ends before the endpoint becomes an engine.
            reloaded(external={})
            assert proxy.app.registry.status("x").state == "leaving"
        await until(lambda: proxy.app.registry.status("x").state == "up")
        assert (await proxy.chat(HELLO | {"model": "there"})).backend == "x"
        assert (await proxy.chat(headers={"x-llm-d-inference-ttl": "50ms"})).status == 503
        reloaded()
        await until(lambda: "x" not in proxy.app.registry.backends)


@pytest.mark.slow
async def test_workers_send_requests_there_too() -> None:
    async with overflowing({"only_above_wait_s": None}, {"workers": 2}) as (proxy, _):
        proxy.app.registry.drain("a")
        answer = await proxy.chat()
        assert (answer.status, answer.backend, answer.json["model"]) == (200, "x", "there")
        # The report of a worker comes later.
        await until(lambda: proxy.metric("llmproxy_external_cost_total", backend="x"))


async def test_a_key_that_is_missing_is_an_error_in_words(tmp_path: Path) -> None:
    for entry, message in (
        ({"api_key_file": str(tmp_path / "none")}, "cannot be read: No such file"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "the variable NO_SUCH_VARIABLE should hold its key"),
    ):
        external = {"models": {"m": "n"}, "max_per_day": 1, "price_per_million_input": 1, "price_per_million_output": 1}
        backends = [{"url": "https://api.example.com", "external": external | entry}]
        with pytest.raises(ConfigError, match=message):
            async with serving(backends=backends, wait=False):
                pass
