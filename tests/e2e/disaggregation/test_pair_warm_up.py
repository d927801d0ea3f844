"""Engines that transfer KV meet once before a request of a client needs it."""

from __future__ import annotations

import asyncio
import io
import json
from types import SimpleNamespace
from typing import Any

import pytest

from llmproxy.backends.pair_warm_up import PairWarmUp
from llmproxy.core.domain import Listing
from llmproxy.upstream.client import HttpUpstream
from tests.e2e.disaggregation.conftest import NIXL, hows, split
from tests.e2e.disaggregation.test_split import LONG
from tests.e2e.proxies import ProxyUnderTest, until
from tests.lab.simulator.legs import kv_used

ON = {"warm_up_pairs": True}


def asked(proxy: ProxyUnderTest, number: int) -> list[dict[str, Any]]:
    """Returns the bodies of the proxy's own requests to a replica."""
    seen = [one for one in proxy.replicas[number].requests_seen if one.path == "/v1/completions"]
    return [json.loads(bytes(one.body)) for one in seen]


def legs(proxy: ProxyUnderTest, number: int) -> list[dict[str, Any]]:
    """The parameters of transfers that it was asked with."""
    return [body["kv_transfer_params"] for body in asked(proxy, number) if "kv_transfer_params" in body]


async def test_each_pair_meets_once(log: io.StringIO) -> None:
    async with split(NIXL, NIXL, NIXL, NIXL, roles="prefill prefill decode both", scheduling=ON) as proxy:
        await until(lambda: log.getvalue().count("pair_warmed_up") == 4)
        for number in range(2):
            assert [one["do_remote_decode"] for one in legs(proxy, number)] == [True, True]
        engines = [{one["remote_engine_id"] for one in legs(proxy, number)} for number in (2, 3)]
        assert len(engines[0]) == 2
        assert engines[0] == engines[1]
        # Nothing is left of it, and no client's request is counted.
        await until(lambda: not any(kv_used(replica) for replica in proxy.replicas))
        assert (await proxy.chat(LONG)).status == 200
        assert hows(proxy) == {"split": 1}
        assert len(legs(proxy, 2)) == 2


async def test_warm_up_prompt_is_computed_before_others() -> None:
    async with split(scheduling=ON) as proxy:
        await until(lambda: legs(proxy, 1))
        assert ["kv_transfer_params" in body for body in asked(proxy, 1)] == [False, True]


async def test_a_pair_meets_when_the_second_of_two_that_were_listed_comes_up(log: io.StringIO) -> None:
    async with split() as proxy:
        app, up = proxy.app, dict.fromkeys(("b0", "b1"), False)
        backends = {
            name: SimpleNamespace(health=SimpleNamespace(down=True), listing=app.pools.backends[name].listing)
            for name in up
        }
        pools: Any = SimpleNamespace(backends=backends, pool_of=app.pools.pool_of)
        warm = app.config.model_copy(update={"scheduling": app.config.scheduling.model_copy(update=ON)})
        async with HttpUpstream() as upstream:
            pairs = PairWarmUp(pools, app.registry.backends, upstream, lambda: warm)
            for name in up:
                pairs.listed(name, Listing(0.0, ()))
            for name in ("b1", "b0"):
                assert not legs(proxy, 0)
                backends[name].health.down = False
                pairs.answered(name)
                await asyncio.sleep(0)
            await until(lambda: "pair_warmed_up" in log.getvalue())
            await pairs.close()


async def test_a_backend_that_comes_back_meets_its_partners_again(log: io.StringIO) -> None:
    async with split(NIXL, NIXL, NIXL, roles="prefill decode decode", scheduling=ON) as proxy:
        await until(lambda: log.getvalue().count("pair_warmed_up") == 2)
        proxy.replicas[1].faults.set("refuse")
        await until(lambda: proxy.app.pools.backends["b1"].health.down)
        await proxy.replicas[1].restart()
        await until(lambda: log.getvalue().count("pair_warmed_up") == 3)
        assert log.getvalue().count("prefill_backend=b0 backend=b1") == 2
        assert len(legs(proxy, 2)) == 1


@pytest.mark.parametrize("off", [{"warm_up_pairs": False}, {"disaggregation": "never"}, {"kv_connector": "store"}])
async def test_no_warm_up_where_there_is_no_need(off: dict[str, Any]) -> None:
    async with split(scheduling=ON | off) as proxy:
        await proxy.chat(LONG)
        assert legs(proxy, 0) == []


@pytest.mark.parametrize("number", [0, 1])
async def test_a_pair_that_fails_is_said_once_and_not_tried_again(number: int, log: io.StringIO) -> None:
    async with split(scheduling=ON, wait=False) as proxy:
        proxy.replicas[number].faults.set("draining_500")
        await until(lambda: "pair_not_warmed_up" in log.getvalue())
        assert f"b{number} answered 500" in log.getvalue()
        proxy.replicas[number].faults.clear()
        await proxy.app.registry.pollers["b0"].list_now()
        await asyncio.sleep(0)
        assert (await proxy.chat(LONG)).status == 200
        assert len(asked(proxy, number)) == 1
