"""`/scale` of a running proxy, and pools that have no replica."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.proxies import FAST, HELLO, STREAM, serving, until

LONG = STREAM | {"max_tokens": 60, "ignore_eos": True}


async def test_page_has_the_number_of_replicas_that_the_work_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(FAST, FAST) as proxy:
        page = (await proxy.get("/scale")).json
        assert [(one["pool"], one["desired"], one["own"], one["sure"]) for one in page["pools"]] == [
            ("base", 2, 0.0, False)
        ]
        # On a busy machine the times of a few requests may tell nothing.
        for _ in range(20):
            await asyncio.gather(*(proxy.chat(LONG) for _ in range(40)))
            # The second in which they came is over for the number alone, which then stays.
            later_s = asyncio.get_running_loop().time() + 2.0
            monkeypatch.setattr(proxy.app.scale, "_clock", lambda later_s=later_s: later_s)
            found = (await proxy.get("/scale/base")).json
            if found["terms"]["work"] > 0.0:
                break
        assert found["sure"]
        assert found["own"] == pytest.approx(found["terms"]["ahead"] + found["terms"]["queue"], rel=0.2, abs=0.02)
        assert found["replicas"]["up"] == 2
        # They may be so little for one replica that only `scaling.min` asks for it.
        assert found["reason"] in ("work", "ahead", "queue") if found["need"] > 1.0 else found["desired"] == 1
        assert found["terms"]["work"] > 0.0, str([found["terms"], found["replica"]])
        assert found["replica"]["requests_per_s"] > 0.0
        assert proxy.metric("llmproxy_scale_desired_replicas", pool="base") == found["desired"]
        assert proxy.metric("llmproxy_scale_term_replicas", pool="base", term="work") == pytest.approx(
            found["terms"]["work"], abs=0.001
        )


async def test_a_pool_without_roles_has_none() -> None:
    async with serving(FAST) as proxy:
        found = (await proxy.get("/scale/base")).json
        assert found["roles"] == {}


async def test_unknown_pool_is_404_and_unknown_need_503() -> None:
    async with serving(FAST) as proxy:
        answer = await proxy.get("/scale/nothing")
        assert answer.status == 404
        assert "`base`" in answer.json["error"]["message"]
    async with serving(extra=["http://127.0.0.1:9"], wait=False) as proxy:
        assert (await proxy.get("/scale")).status == 503


async def test_a_named_pool_holds_its_requests_until_a_replica_is_there() -> None:
    scaling: dict[str, Any] = {"pools": ["base"], "min": 0}
    async with serving(
        FAST, scaling=scaling, queue={"no_backend_wait_s": 30.0, "startup_wait_s": 0.0}, wait=False
    ) as proxy:
        replica = proxy.app.registry.statuses()[0]
        assert replica.name == "b0"
        waits = proxy.waiting()
        assert (await waits).status == 200
    async with serving(
        extra=["http://127.0.0.1:9"], scaling=scaling, queue={"no_backend_wait_s": 30.0}, wait=False
    ) as proxy:
        waits = proxy.waiting()
        await until(lambda: proxy.app.dispatcher.nameless == 1)
        found = (await proxy.get("/scale/base")).json
        assert (found["desired"], found["reason"], found["waiting"]["requests"]) == (1, "queue", 1)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        await until(lambda: proxy.app.dispatcher.nameless == 0)
    async with serving(
        extra=["http://127.0.0.1:9"], scaling=scaling, queue={"no_backend_wait_s": 0.05}, wait=False
    ) as proxy:
        answer = await proxy.chat(HELLO)
        assert answer.status == 503
        assert "No replica of `base` is up" in answer.json["error"]["message"]
