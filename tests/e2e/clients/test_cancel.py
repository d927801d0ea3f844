"""Clients that leave at any point: their place is free at once, and no engine computes for them."""

from __future__ import annotations

import asyncio

import pytest

from llmproxy.lab.simulator.replica import Replica
from tests.e2e.proxies import ENDLESS, FAST, STREAM, ProxyUnderTest, one_seat, raw_post, serving, until


async def left(task: asyncio.Task[object]) -> None:
    """Leave in the middle of a request."""
    task.cancel()
    await asyncio.wait([task])


async def running_gauge(proxy: ProxyUnderTest, replica: Replica) -> float:
    page = await proxy.get(f"{replica.url}/metrics/?name[]=vllm:num_requests_running")
    return float(page.body.split()[-1])


async def test_leaving_the_queue() -> None:
    async with one_seat() as (proxy, running):
        waiting = [proxy.waiting(STREAM) for _ in range(3)]
        await until(lambda: proxy.queued == 3)
        await left(waiting[1])
        await until(lambda: proxy.queued == 2)
        assert proxy.metric("llmproxy_queued_requests", band="default") == 2
        assert proxy.outcomes() == {"cancelled": 1}
        running.close()
        assert [(await task).status for task in (waiting[0], waiting[2])] == [200, 200], "the others go on"
        assert len([seen for seen in proxy.replicas[0].requests_seen if seen.method == "POST"]) == 3


@pytest.mark.parametrize("body", [ENDLESS, ENDLESS | {"stream": False}], ids=["stream", "whole"])
async def test_leaving_before_the_first_byte(body: object) -> None:
    async with serving(FAST) as proxy:
        proxy.replicas[0].faults.set("frozen")
        waiting = proxy.waiting(body)
        await until(lambda: proxy.replicas[0].in_flight == 1)
        await left(waiting)
        await until(lambda: proxy.replicas[0].in_flight == 0)
        proxy.replicas[0].faults.clear()
        await proxy.settled()
        assert proxy.outcomes() == {"cancelled": 1}


async def test_a_client_that_closes_its_sending_side_counts_as_gone() -> None:
    async with serving(FAST) as proxy:
        async with proxy.wire(raw_post(ENDLESS)) as (reader, writer):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.write_eof()
            await until(lambda: proxy.replicas[0].in_flight == 0)
        await proxy.settled()
        assert proxy.outcomes() == {"cancelled": 1}


async def test_leaving_in_mid_stream_stops_the_engine() -> None:
    async with serving(FAST) as proxy:
        replica = proxy.replicas[0]
        async with proxy.stream() as running:
            await running.content.readany()
            await until(lambda: replica.engine.counters.generation > 5)
            assert await running_gauge(proxy, replica) == 1
        await until(lambda: not replica.engine.busy)
        generated = replica.engine.counters.generation
        assert generated < 1000
        while await running_gauge(proxy, replica):  # noqa: ASYNC110 - it comes with the engine's next step
            await asyncio.sleep(0.001)
        assert proxy.outcomes() == {"cancelled": 1}
        assert proxy.metric("llmproxy_attempts_total", backend="b0", verdict="client_gone") == 1
        assert replica.engine.counters.generation == generated


@pytest.mark.slow
async def test_leaving_with_the_answer_unread() -> None:
    """Many at once: some leave in the very turn in which they are granted."""
    async with serving(FAST, FAST, fixed_limit=2) as proxy:

        async def hit_and_run(turns: int) -> None:
            async with proxy.wire(raw_post(STREAM)):
                for _ in range(turns):
                    await asyncio.sleep(0)

        for turns in range(40):
            await asyncio.gather(*(hit_and_run(turns) for _ in range(3)))
        await proxy.settled()
        assert set(proxy.outcomes()) <= {"cancelled", "completed"}
        assert proxy.outcomes()["cancelled"] > 20
        assert (await proxy.chat()).status == 200
