"""Requests are held while their replicas start, roll or come back, and lose neither their place nor their time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from structlog.testing import capture_logs

from llmproxy.simulator.replica import Replica
from tests.e2e.proxies import FAST, HELLO, STREAM, House, all_of, house, until

HOLD = {"hold_s": 10.0}
TTL = "x-llm-d-inference-ttl"


async def stop(home: House, number: int = 0) -> None:
    home.replicas[number].faults.set("refuse")
    await until(lambda: home.proxy.pools.backends[f"b{number}"].health.down)


async def test_a_request_is_held_until_its_backend_is_back() -> None:
    async with house(FAST, queue=HOLD) as home:
        await stop(home)
        held = home.waiting()
        await until(lambda: home.queued == 1)
        await home.replicas[0].restart()
        assert (await held).status == 200
        assert home.outcomes() == {"completed": 1}


async def test_being_held_has_an_end_of_its_own() -> None:
    async with house(FAST, queue={"hold_s": 0.05, "ttl_s": 60.0}) as home:
        await stop(home)
        answer = await home.chat()
        assert (answer.status, home.outcomes()) == (503, {"expired_no_backends": 1})
        assert int(answer.headers["retry-after"]) >= 1


async def test_an_adapter_whose_only_backend_is_down_is_held_as_long_and_told_the_same() -> None:
    async with house(FAST, replace(FAST, adapters=("rare",)), queue={"hold_s": 0.05, "ttl_s": 60.0}) as home:
        await stop(home, 1)
        answer = await home.chat(HELLO | {"model": "rare"})
        assert (answer.status, home.outcomes()) == (503, {"expired_no_backends": 1})


async def test_a_client_may_want_to_be_told_sooner() -> None:
    async with house(FAST, queue=HOLD) as home:
        await stop(home)
        assert (await home.chat(headers={TTL: "30ms"})).status == 503


async def test_a_request_that_meets_a_dead_process_is_held_for_the_next_one() -> None:
    async with house(FAST, queue=HOLD, poll={"interval_s": 5.0, "page_interval_s": 5.0}) as home:
        # The polls have not noticed: the request is the first to find nobody there.
        home.replicas[0].faults.set("refuse")
        asked = home.waiting(STREAM)
        await until(lambda: home.queued == 1)
        assert not home.proxy.pools.backends["b0"].health.down
        await home.replicas[0].restart()
        answer = await asked
        assert (answer.status, home.outcomes()) == (200, {"completed": 1})


async def test_a_request_is_held_while_replicas_start_for_the_first_time(port: int) -> None:
    async with house(extra=[f"http://127.0.0.1:{port}"], wait=False, queue=HOLD) as home:
        early = [home.waiting(), home.waiting({"messages": HELLO["messages"], "max_tokens": 2})]
        await until(lambda: home.proxy.dispatcher.nameless == 2)
        async with Replica(FAST, port=port):
            assert [(await task).status for task in early] == [200, 200]
            await home.settled()


async def test_who_has_no_name_yet_is_told_when_time_is_over_or_the_proxy_stops(port: int) -> None:
    async with house(extra=[f"http://127.0.0.1:{port}"], wait=False, queue={"hold_s": 0.05}) as home:
        assert (await home.chat()).status == 503
    async with house(extra=[f"http://127.0.0.1:{port}"], wait=False, queue=HOLD) as home:
        early = home.waiting()
        await until(lambda: home.proxy.dispatcher.nameless == 1)
        await home.proxy.drain()
        assert (await early).status == 503


async def test_the_log_says_at_once_that_no_backend_is_up(port: int) -> None:
    with capture_logs() as logs:
        async with house(extra=[f"http://127.0.0.1:{port}"], wait=False, queue=HOLD | {"first_hold_s": 0.05}) as home:
            await until(lambda: any(line["event"] == "no_backend_up" for line in logs))
            answer = await home.chat()
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
            async with Replica(FAST, port=port):
                await until(lambda: any(line["event"] == "backend_up" for line in logs))
                assert (await home.chat()).status == 200
    told = {line["event"]: line for line in logs}
    assert (told["no_backend_up"]["backends"], told["no_backend_up"]["held_s"]) == (["b0"], 0.05)
    assert "nothing listens there (yet): is the address right?" in told["backend_down"]["why"]


async def test_who_has_no_name_yet_may_want_to_be_told_sooner_too(port: int) -> None:
    async with house(extra=[f"http://127.0.0.1:{port}"], wait=False, queue={"hold_s": 60.0}) as home:
        # Without an end the test would be as long as the hold.
        async with asyncio.timeout(15.0):
            assert (await home.chat(headers={TTL: "30ms"})).status == 503


async def test_a_rolling_restart_refuses_no_client() -> None:
    async with house(FAST, FAST, queue=HOLD) as home:
        done = asyncio.Event()

        async def client() -> list[int]:
            statuses = []
            while not done.is_set():
                async with home.stream(STREAM) as response:
                    statuses.append(response.status)
                    await all_of(response)
            return statuses

        clients = [asyncio.create_task(client()) for _ in range(4)]
        for number, replica in enumerate(home.replicas):
            await stop(home, number)
            await replica.restart()
            await until(lambda n=number: not home.proxy.pools.backends[f"b{n}"].health.down)  # type: ignore[misc]
        done.set()
        statuses = [status for task in clients for status in await task]
        assert set(statuses) == {200}
