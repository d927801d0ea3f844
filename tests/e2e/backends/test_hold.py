"""Requests are held while their replicas start, roll or come back, and lose neither their place nor their time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from llmproxy.lab.simulator.replica import Replica
from tests.e2e.proxies import FAST, HELLO, STREAM, ProxyUnderTest, serving, until

HOLD = {"no_backend_wait_s": 10.0}
TTL = "x-llm-d-inference-ttl"


async def stop(proxy: ProxyUnderTest, number: int = 0) -> None:
    proxy.replicas[number].faults.set("refuse")
    await until(lambda: proxy.app.pools.backends[f"b{number}"].health.down)


@pytest.mark.parametrize(
    ("no_backend_wait_s", "outcome"), [(0.05, "expired_no_backends"), (0.0, "rejected_no_backends")]
)
async def test_being_held_has_an_end_of_its_own(no_backend_wait_s: float, outcome: str) -> None:
    async with serving(
        FAST, replace(FAST, adapters=("rare",)), queue={"no_backend_wait_s": no_backend_wait_s, "max_wait_s": 60.0}
    ) as proxy:
        await stop(proxy, 1)
        answer = await proxy.chat(HELLO | {"model": "rare"})
        assert (answer.status, proxy.outcomes()) == (503, {outcome: 1})
        await stop(proxy)
        answer = await proxy.chat()
        assert (answer.status, proxy.outcomes()) == (503, {outcome: 2})
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_client_may_ask_for_a_shorter_hold() -> None:
    async with serving(FAST, queue=HOLD) as proxy:
        await stop(proxy)
        assert (await proxy.chat(headers={TTL: "30ms"})).status == 503


async def test_a_request_that_meets_a_dead_process_is_held_for_the_next_one() -> None:
    async with serving(FAST, queue=HOLD, poll={"interval_s": 5.0, "page_interval_s": 5.0}) as proxy:
        # The polls have not noticed: the request is the first to find no backend there.
        proxy.replicas[0].faults.set("refuse")
        asked = proxy.waiting(STREAM)
        await until(lambda: proxy.queued == 1)
        assert not proxy.app.pools.backends["b0"].health.down
        await proxy.replicas[0].restart()
        answer = await asked
        assert (answer.status, proxy.outcomes()) == (200, {"completed": 1})


async def test_a_request_is_held_while_replicas_start_for_the_first_time(port: int) -> None:
    async with serving(extra=[f"http://127.0.0.1:{port}"], wait=False, queue=HOLD) as proxy:
        early = [proxy.waiting(), proxy.waiting({"messages": HELLO["messages"], "max_tokens": 2})]
        await until(lambda: proxy.app.dispatcher.nameless == 2)
        async with Replica(FAST, port=port):
            assert [(await task).status for task in early] == [200, 200]
            await proxy.settled()


async def test_a_request_for_an_unknown_name_is_refused_in_time(port: int) -> None:
    async with serving(extra=[f"http://127.0.0.1:{port}"], wait=False, queue={"no_backend_wait_s": 0.05}) as proxy:
        assert (await proxy.chat()).status == 503
    async with serving(extra=[f"http://127.0.0.1:{port}"], wait=False, queue=HOLD) as proxy:
        early = proxy.waiting()
        await until(lambda: proxy.app.dispatcher.nameless == 1)
        await proxy.app.drain()
        assert (await early).status == 503


async def test_the_log_says_at_once_that_no_backend_is_up(port: int) -> None:
    with capture_logs() as logs:
        async with serving(
            extra=[f"http://127.0.0.1:{port}"], wait=False, queue=HOLD | {"startup_wait_s": 0.05}
        ) as proxy:
            await until(lambda: any(line["event"] == "no_backend_up" for line in logs))
            answer = await proxy.chat()
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
            async with Replica(FAST, port=port):
                await until(lambda: any(line["event"] == "backend_up" for line in logs))
                assert (await proxy.chat()).status == 200
    events = {line["event"]: line for line in logs}
    assert (events["no_backend_up"]["backends"], events["no_backend_up"]["held_s"]) == (["b0"], 0.05)
    assert "nothing listens there (yet): is the address right?" in events["backend_down"]["why"]


async def test_a_request_for_an_unknown_name_may_ask_for_less(port: int) -> None:
    async with serving(extra=[f"http://127.0.0.1:{port}"], wait=False, queue={"no_backend_wait_s": 60.0}) as proxy:
        # Without an end the test would be as long as the hold.
        async with asyncio.timeout(15.0):
            assert (await proxy.chat(headers={TTL: "30ms"})).status == 503
