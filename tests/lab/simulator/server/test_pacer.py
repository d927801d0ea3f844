"""The engine in real time, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.profiles import PROFILES
from llmproxy.lab.simulator.engine.reports import Counters, Gauges
from llmproxy.lab.simulator.engine.sequence import EngineRequest
from llmproxy.lab.simulator.server.metrics import ReplicaMetrics
from llmproxy.lab.simulator.server.pacer import GenerationJob, Pacer
from tests.lab.simulator.conftest import until

TINY = PROFILES["tiny"]


@pytest.fixture
async def pacer() -> AsyncIterator[Pacer]:
    pacer = Pacer(Engine(TINY), 1.0, ReplicaMetrics("base", 4, {"block_size": "16"}))
    task = asyncio.create_task(pacer.run())
    yield pacer
    task.cancel()
    await asyncio.wait([task])


def job(name: str, output_tokens: int, adapter: str | None = None) -> GenerationJob:
    now_s = asyncio.get_running_loop().time()
    return GenerationJob(
        [EngineRequest(name, 10, output_tokens, (), adapter)], ["length"], each_token=True, arrived_s=now_s
    )


async def test_a_step_that_has_begun_gives_nothing_while_time_stands_still(pacer: Pacer) -> None:
    frozen = job("a", 1, "cold adapter")
    pacer.submit(frozen)
    await until(lambda: pacer.engine.counters.steps == 1)
    pacer.freeze(True)
    await asyncio.sleep(5 * TINY.adapter_cold_load_s)
    assert not frozen.finished
    pacer.freeze(False)
    await frozen.wait()
    assert frozen.finished


async def test_tokens_take_at_least_the_time_of_their_steps(pacer: Pacer) -> None:
    """A replica that was idle has saved up no time: a lower bound, which no slow machine can break."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0.06)
    timed = job("a", 40)
    started_s = loop.time()
    pacer.submit(timed)
    while not timed.ended:
        await timed.wait()
    assert loop.time() - started_s >= 40 * TINY.step_s(1, 10, [])


class History(ReplicaMetrics):
    """Remembers how many waited, each time that it was published."""

    def __init__(self) -> None:
        super().__init__("base", 4, {"block_size": "16"})
        self.waiting: list[int] = []

    def publish(self, gauges: Gauges, counters: Counters) -> None:
        super().publish(gauges, counters)
        self.waiting.append(gauges.waiting)


async def test_arrivals_show_in_the_gauges_with_the_next_step() -> None:
    metrics = History()
    pacer = Pacer(Engine(TINY, max_num_seqs=1), 1.0, metrics)
    pacer.submit(job("a", 3, "cold adapter"))
    task = asyncio.create_task(pacer.run())
    await asyncio.sleep(0)
    assert pacer.engine.counters.steps == 1
    pacer.submit(job("b", 3))
    assert metrics.waiting == []
    await until(lambda: len(metrics.waiting) >= 2)
    assert metrics.waiting[:2] == [0, 1]
    task.cancel()
    await asyncio.wait([task])
