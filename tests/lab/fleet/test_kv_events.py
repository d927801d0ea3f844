"""KV events: a subscriber's index of the caches is late, misses lost events, and is emptied when a process ends."""

from __future__ import annotations

import asyncio

import pytest

from llmproxy.lab.fleet.kv_events import DELAY_S, KvEvents
from llmproxy.lab.fleet.server import SimulatedServer
from llmproxy.lab.fleet.world import Blocks, World
from llmproxy.lab.run.replay import Run
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.traces.arrival import Arrival
from tests.dispatching import virtual
from tests.lab.small import fleet, setup, started, traffic

SOON_S = 0.001


class Scene:
    """Replicas of 1,600 tokens of KV-cache, one subscriber, and prompts of 640 tokens that share nothing."""

    def __init__(self, count: int = 1) -> None:
        self.replicas = started(fleet(count, kv_tokens=1_616))
        self.world = World(self.replicas, (), Blocks(64, 16))
        self.events = self.subscriber()

    def subscriber(self) -> KvEvents:
        return KvEvents(self.world, asyncio.get_running_loop().time)

    def prompt(self, number: int, output_tokens: int = 1) -> str:
        blocks = tuple(range(1_000 * number, 1_000 * number + 10 + -(-output_tokens // 64)))
        return self.world.enter(Arrival(0.0, 640, output_tokens, blocks))

    async def serve(self, request_id: str, backend: str = "gpu-0") -> None:
        """Returns at the moment at which the last step of the answer ends."""
        await self.replicas[backend].open(self.world.sequence(request_id, request_id), lambda: None).ended

    def known(self, request_id: str, backend: str = "gpu-0") -> int:
        return self.events.cached_tokens(request_id).get(backend, 0)

    def true(self, request_id: str) -> int:
        return self.replicas["gpu-0"].engine.cached_tokens(self.world.sequence_of(request_id))


@virtual
async def test_what_a_step_stored_is_known_ten_milliseconds_after_its_end() -> None:
    here = Scene(2)
    one = here.prompt(1)
    await here.serve(one)
    assert (here.true(one), here.known(one)) == (624, 0)
    await asyncio.sleep(DELAY_S - SOON_S)
    assert here.known(one) == 0
    await asyncio.sleep(2 * SOON_S)
    assert here.events.cached_tokens(one) == {"gpu-0": 624}


@virtual
async def test_a_block_that_decoding_fills_is_known_before_the_answer_ends() -> None:
    here = Scene()
    one = here.prompt(1, output_tokens=320)
    turn = here.world.enter(Arrival(0.0, 960, 1, tuple(range(1_000, 1_015))))
    serving = asyncio.ensure_future(here.serve(one))
    await asyncio.sleep(1.0)
    known = here.known(turn)
    assert 640 < known < 960
    assert not serving.done()
    # Within the 10 ms that its last step may take to be heard of, at most one block is filled.
    assert here.true(turn) - known <= 16
    await serving


@virtual
async def test_what_was_evicted_is_believed_for_as_long() -> None:
    here = Scene()
    one, two, three = (here.prompt(number) for number in (1, 2, 3))
    for request_id in (one, two):
        await here.serve(request_id)
    await asyncio.sleep(1.0)
    await here.serve(three)
    assert (here.true(one), here.known(one)) == (320, 624)
    await asyncio.sleep(DELAY_S + SOON_S)
    assert here.known(one) == 320
    assert here.known(two) == here.known(three) == 624


@virtual
async def test_a_lost_batch_stays_lost_whether_it_stored_or_removed() -> None:
    here = Scene()
    one, two, three = (here.prompt(number) for number in (1, 2, 3))
    for request_id in (one, two):
        await here.serve(request_id)
    here.replicas["gpu-0"].faults.lost_kv_events = 1.0
    await here.serve(three)
    here.replicas["gpu-0"].faults.lost_kv_events = 0.0
    await asyncio.sleep(10.0)
    assert [here.true(asked) for asked in (one, two, three)] == [320, 624, 624]
    assert [here.known(asked) for asked in (one, two, three)] == [624, 624, 0]
    # The tail is computed again, so its blocks and the evicted ones are published again.
    await here.serve(one)
    await asyncio.sleep(1.0)
    assert here.known(one) == here.true(one) == 624
    assert here.known(three) == 0


@virtual
async def test_batches_are_lost_with_their_probability_per_subscriber() -> None:
    here = Scene()
    other = here.subscriber()
    here.replicas["gpu-0"].faults.lost_kv_events = 0.5
    heard: list[tuple[bool, bool]] = []
    for number in range(100):
        asked = here.prompt(number)
        await here.serve(asked)
        await asyncio.sleep(1.0)
        heard.append((bool(here.known(asked)), bool(other.cached_tokens(asked))))
    assert 30 < sum(first for first, _ in heard) < 70
    assert 30 < sum(second for _, second in heard) < 70
    assert 30 < sum(first != second for first, second in heard) < 70


@virtual
async def test_kill_clears_the_index_and_batches_on_their_way() -> None:
    here = Scene(2)
    one, two = here.prompt(1), here.prompt(2)
    for backend in here.replicas:
        await here.serve(one, backend)
    await asyncio.sleep(1.0)
    assert here.events.cached_tokens(one) == {"gpu-0": 624, "gpu-1": 624}
    await here.serve(two)
    here.replicas["gpu-0"].kill()
    here.replicas["gpu-0"].start()
    await asyncio.sleep(1.0)
    assert here.events.cached_tokens(one) == {"gpu-1": 624}
    assert here.events.cached_tokens(two) == {}
    await here.serve(two)
    await asyncio.sleep(1.0)
    assert here.known(two) == 624


@virtual
async def test_a_hung_replica_tells_nothing_until_it_wakes() -> None:
    here = Scene()
    one = here.prompt(1, output_tokens=100)
    serving = asyncio.ensure_future(here.serve(one))
    await asyncio.sleep(0.2)
    here.replicas["gpu-0"].freeze(True)
    turn = here.world.enter(Arrival(0.0, 740, 1, tuple(range(1_000, 1_012))))
    await asyncio.sleep(DELAY_S)
    before = here.known(turn)
    await asyncio.sleep(5.0)
    assert here.known(turn) == before < 736
    here.replicas["gpu-0"].freeze(False)
    await serving
    await asyncio.sleep(1.0)
    assert here.known(turn) == 736


@pytest.mark.parametrize("policy", ["round_robin", "blend", "epp_sticky", "dynamo_cost(events=0)", "oracle"])
def test_where_nobody_subscribes_nothing_is_recorded(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def subscribe(*_: object) -> None:
        raise AssertionError("nobody asked for KV events")

    monkeypatch.setattr(SimulatedServer, "subscribe", subscribe)
    one = Run(setup(traffic(count=50), policy), lambda _: None)
    run(one.go())
    assert all(replica.engine._cache.changes is None for replica in one._replicas.values())


def test_every_proxy_has_a_subscription_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    subscribers: list[object] = []
    subscribe = SimulatedServer.subscribe

    def counted(replica: SimulatedServer, subscriber: object) -> None:
        subscribers.append(subscriber)
        subscribe(replica, subscriber)  # type: ignore[arg-type]

    monkeypatch.setattr(SimulatedServer, "subscribe", counted)
    run(Run(setup(traffic(count=50), "dynamo_cost", fleet(3, proxies=2)), lambda _: None).go())
    assert len(set(map(id, subscribers))) == len(subscribers) == 6
