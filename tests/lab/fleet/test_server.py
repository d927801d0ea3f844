"""The simulated replica in virtual time: lazily advanced, it must be the replica that takes every step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from llmproxy.lab.fleet.job import Broken, Refusing, ServerJob, TooLong
from llmproxy.lab.fleet.server import SimulatedServer
from llmproxy.lab.fleet.spec import ReplicaSpec
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.profiles import Noise, profile_named
from llmproxy.lab.simulator.engine.reports import Gauges
from llmproxy.lab.simulator.engine.sequence import EngineRequest
from tests.dispatching import virtual
from tests.lab.simulator.engine.invariants import check_engine
from tests.lab.simulator.engine.stepping import stepped

QUIET = Noise(sigma=0.0, slow_chance=0.0)
PROFILE = profile_named("llama-8b-h100")


def spec(**given: int) -> ReplicaSpec:
    facts: dict[str, Any] = {"kv_tokens": 4_000, "max_num_seqs": 8, **given}
    return ReplicaSpec("gpu-0", "llama-8b-h100", PROFILE, max_model_len=3_000, **facts)


def replica(noise: Noise = QUIET, seed: int = 0, **given: int) -> SimulatedServer:
    made = SimulatedServer(spec(**given), 1.0, seed, asyncio.get_running_loop(), noise)
    made.start()
    return made


@dataclass(slots=True)
class Seen:
    """When a request got its first token and its last one."""

    firsts: dict[str, float] = field(default_factory=dict)
    lasts: dict[str, float] = field(default_factory=dict)

    async def send(self, to: SimulatedServer, request: EngineRequest) -> ServerJob:
        loop = asyncio.get_running_loop()
        job = to.open(request, lambda: self.firsts.update({request.id: loop.time()}))
        await job.ended
        self.lasts[request.id] = loop.time()
        return job


def arrivals(seed: int, count: int = 40) -> list[tuple[float, EngineRequest]]:
    rng = Random(seed)
    at_s, made = 0.0, []
    for number in range(count):
        at_s += rng.expovariate(20.0)
        prompt = rng.randint(1, 600)
        hashes = tuple(range(rng.randint(0, 4) * 1000, 10_000))[: prompt // 16]
        made.append((at_s, EngineRequest(str(number), prompt, rng.randint(1, 120), hashes)))
    return made


async def lazily(plan: list[tuple[float, EngineRequest]], looks_s: list[float]) -> tuple[Seen, list[Gauges]]:
    seen = Seen()
    scrapes: list[Gauges] = []
    one, loop = replica(), asyncio.get_running_loop()
    tasks = []

    async def later(at_s: float, request: EngineRequest) -> None:
        await asyncio.sleep(at_s)
        await seen.send(one, request)

    def look() -> None:
        scrape = one.scrape()
        assert scrape is not None
        scrapes.append(scrape)

    for at_s in looks_s:
        loop.call_at(at_s, look)
    for at_s, request in plan:
        tasks.append(asyncio.create_task(later(at_s, request)))
    await asyncio.gather(*tasks)
    check_engine(one.engine)
    assert not one.engine.busy
    return seen, scrapes


@pytest.mark.parametrize("seed", range(6))
def test_lazy_server_answers_when_a_stepping_one_does(seed: int) -> None:
    plan = arrivals(seed)
    looks_s = [0.013 * number for number in range(400)]
    seen, scrapes = run(lazily(plan, looks_s))
    engine = Engine(PROFILE, max_num_seqs=8, kv_tokens=4_000, max_loras=8, max_cpu_loras=32)
    firsts, lasts = stepped(engine, [(at_s + PROFILE.frontend_s, request) for at_s, request in plan])
    assert seen.firsts == pytest.approx(firsts, abs=1e-6)
    assert seen.lasts == pytest.approx(lasts, abs=1e-6)
    assert len(scrapes) > 50


@virtual
async def test_a_dead_replica_refuses_and_a_long_request_is_turned_away() -> None:
    one = replica()
    with pytest.raises(TooLong):
        one.open(EngineRequest("long", 2_900, 200), lambda: None)
    one.kill()
    with pytest.raises(Refusing):
        one.open(EngineRequest("a", 10, 10), lambda: None)
    with pytest.raises(Refusing):
        one.scrape()


@virtual
async def test_a_killed_replica_breaks_its_answers_and_comes_back_cold() -> None:
    one, seen = replica(), Seen()
    hashes = tuple(range(20))
    await seen.send(one, EngineRequest("warm", 330, 5, hashes))
    again = await seen.send(one, EngineRequest("again", 330, 5, hashes))
    assert again.hit_tokens == 320
    job = one.open(EngineRequest("cut", 330, 500, hashes), lambda: None)
    await asyncio.sleep(0.5)
    assert job.first_s is not None
    one.kill()
    with pytest.raises(Broken):
        await job.ended
    one.start()
    cold = await seen.send(one, EngineRequest("cold", 330, 5, hashes))
    assert cold.hit_tokens == 0


@virtual
async def test_a_hung_replica_answers_nothing_and_goes_on_where_it_stood() -> None:
    loop = asyncio.get_running_loop()
    one, seen = replica(), Seen()
    task = asyncio.create_task(seen.send(one, EngineRequest("a", 100, 200)))
    await asyncio.sleep(0.3)
    one.freeze(True)
    other = asyncio.create_task(seen.send(one, EngineRequest("b", 100, 10)))
    with pytest.raises(TimeoutError):
        one.scrape()
    await asyncio.sleep(10.0)
    assert not task.done()
    assert not other.done()
    one.freeze(False)
    await asyncio.gather(task, other)
    free = Seen()
    begun_s = loop.time()
    await free.send(replica(), EngineRequest("a", 100, 200))
    alone_s = loop.time() - begun_s
    assert alone_s + 10.0 <= seen.lasts["a"] <= alone_s + 10.2


@virtual
async def test_a_slow_replica_takes_so_many_times_as_long() -> None:
    loop = asyncio.get_running_loop()
    one, seen = replica(), Seen()
    await seen.send(one, EngineRequest("a", 100, 200))
    plain_s = loop.time()
    one.slow_down(3.0)
    await seen.send(one, EngineRequest("b", 100, 200))
    frontend_s = PROFILE.frontend_s
    assert loop.time() - plain_s - frontend_s == pytest.approx(3.0 * (plain_s - frontend_s))


@virtual
async def test_answers_are_reset_in_mid_stream_as_often_as_asked_for() -> None:
    one, seen = replica(seed=5), Seen()
    one.faults.reset = 0.25
    results = await asyncio.gather(
        *(seen.send(one, EngineRequest(str(i), 20, 30)) for i in range(200)), return_exceptions=True
    )
    broken = sum(isinstance(result, Broken) for result in results)
    assert 30 <= broken <= 70
    assert all(str(i) in seen.firsts for i in range(200))


@virtual
async def test_old_readings_show_the_past() -> None:
    one, seen = replica(), Seen()
    one.faults.metric_age_s = one.faults.remembered_s = 2.0
    await asyncio.sleep(0.05)
    task = asyncio.create_task(seen.send(one, EngineRequest("a", 100, 900)))
    observed: list[int | None] = []
    for _ in range(50):
        gauges = one.scrape()
        observed.append(None if gauges is None else gauges.running)
        await asyncio.sleep(0.1)
    await task
    # In the first two seconds no gauges are old enough, so the page shows its first ones.
    assert observed[:21] == [0] * 21
    assert observed[22:] == [1] * 28


@virtual
async def test_a_client_that_leaves_frees_its_place_at_once() -> None:
    one = replica()
    jobs = [one.open(EngineRequest(str(i), 50, 1_000), lambda: None) for i in range(12)]
    await asyncio.sleep(1.0)
    assert one.load() == (8, 4)
    for job in jobs:
        one.leave(job)
    assert one.load() == (0, 0)
    assert not one.engine.busy
