"""The oracle: it chooses the fastest replica from the true engine states, and counts its own requests correctly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from llmproxy.core.domain import NoCapacity, NoMatch, Outcome, Placed, Request, Verdict
from llmproxy.core.placement.policy import NO_CAPACITY, NO_MATCH, NO_MATCH_FOR_MODEL, Placement
from llmproxy.lab.baselines.policy import Surroundings
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind, SimulatedFleet
from llmproxy.lab.fleet.world import Blocks, World
from llmproxy.lab.policies.oracle import BEGIN_WITHIN_S, Oracle
from llmproxy.lab.simulator.engine.profiles import profile_named
from llmproxy.lab.traces.arrival import BASE_MODEL, Arrival
from tests.core.make import view
from tests.dispatching import virtual
from tests.lab.small import fleet, records_of, setup, started, traffic


class Stand:
    """An oracle before a fleet that is given what to hold, and asked where the next request should go."""

    def __init__(self, on: SimulatedFleet) -> None:
        self._now = asyncio.get_running_loop().time
        self.world = World(started(on), ("x", "y"), Blocks(64, 16))
        self.oracle = Oracle(self.world, self._now)
        self.down: set[str] = set()
        self._leases = 0

    def request(self, arrival: Arrival) -> Request:
        model = arrival.adapter or BASE_MODEL
        # All figures of the request are the proxy's guesses: the oracle must not need them.
        return Request(self.world.enter(arrival), "base", model, arrival.adapter, 0, "", 0.0, 60.0, 1, 1, 1)

    def place(self, arrival: Arrival, excluded: frozenset[str] = frozenset()) -> Placed | NoCapacity | NoMatch:
        views = [
            view(name, available=name not in self.down, served=served, limit=1, kv_full_ratio=1.0)
            for served in (frozenset({BASE_MODEL, "x", "y"}),)
            for name in self.world.replicas
        ]
        return self.oracle.place(self.request(arrival), views, 1.0, excluded, self._now())

    def chosen(self, arrival: Arrival, excluded: frozenset[str] = frozenset()) -> str:
        placed = self.place(arrival, excluded)
        assert isinstance(placed, Placed)
        return placed.backend

    async def hold(self, arrival: Arrival, backend: str) -> Callable[[], None]:
        """Let a replica begin a request; answers what ends its lease."""
        self._leases += 1
        lease, request = self._leases, self.request(arrival)
        self.oracle.booked(lease, request, Placed(backend, 0.0, (), 1), self._now())
        self.world.replicas[backend].open(
            self.world.sequence(request.id, request.id), lambda: self.oracle.started(lease, self._now())
        )
        await asyncio.sleep(1.0)
        return lambda: self.oracle.finished(lease, Verdict.SERVED, None, self._now())


@virtual
async def test_it_goes_where_the_prompt_is_cached() -> None:
    stand = Stand(fleet(3))
    prompt = Arrival(0.0, 3_200, 5, tuple(range(50)))
    other = Arrival(0.0, 3_200, 5, tuple(range(100, 150)))
    (await stand.hold(other, "gpu-1"))()
    (await stand.hold(prompt, "gpu-2"))()
    assert stand.chosen(prompt) == "gpu-2"
    assert stand.chosen(other) == "gpu-1"
    assert stand.chosen(prompt, frozenset({"gpu-2"})) == "gpu-0"


@virtual
async def test_a_warm_cache_does_not_outweigh_a_crowd() -> None:
    stand = Stand(fleet(2))
    prompt = Arrival(0.0, 640, 400, tuple(range(10)))
    for _ in range(8):
        await stand.hold(replace(prompt, output_tokens=1_500), "gpu-1")
    assert stand.chosen(prompt) == "gpu-0"


@virtual
async def test_it_counts_what_a_request_takes_from_those_beside_it() -> None:
    stand = Stand(fleet(2))
    for _ in range(10):
        await stand.hold(Arrival(0.0, 50, 3_000), "gpu-0")
    stand.world.replicas["gpu-1"].slow_down(1.4)
    # Alone it would end sooner on gpu-0, but its long prompt would hold up ten others there.
    assert stand.chosen(Arrival(0.0, 50, 100)) == "gpu-0"
    assert stand.chosen(Arrival(0.0, 4_000, 100)) == "gpu-1"


@virtual
async def test_it_takes_the_faster_of_two_replicas() -> None:
    fast, slow = fleet(1).replicas[0], fleet(1).replicas[0]
    slow = replace(slow, name="a-slow", profile_name="llama-8b-a100", profile=profile_named("llama-8b-a100"))
    stand = Stand(SimulatedFleet("mixed", (slow, replace(fast, name="b-fast"))))
    assert stand.chosen(Arrival(0.0, 1_000, 100)) == "b-fast"
    stand.world.replicas["b-fast"].slow_down(10.0)
    assert stand.chosen(Arrival(0.0, 1_000, 100)) == "a-slow"


@virtual
async def test_it_waits_where_nobody_can_begin() -> None:
    stand = Stand(fleet(2, max_num_seqs=1))
    long, next_one = Arrival(0.0, 100, 1_000), Arrival(0.0, 100, 10)
    await stand.hold(long, "gpu-0")
    assert stand.chosen(next_one) == "gpu-1"
    end = await stand.hold(replace(long, output_tokens=500), "gpu-1")
    assert stand.place(next_one) is NO_CAPACITY
    end()
    assert stand.chosen(next_one) == "gpu-1"
    assert stand.place(next_one, frozenset({"gpu-1"})) is NO_CAPACITY


@virtual
async def test_oracle_waits_for_a_place_only_for_a_warm_cache() -> None:
    stand = Stand(fleet(1, max_num_seqs=1))
    warm, cold = Arrival(0.0, 3_200, 500, tuple(range(50))), Arrival(0.0, 3_200, 500)
    await stand.hold(warm, "gpu-0")
    # The answer has run for a second.
    left_s = 500 * stand.world.replicas["gpu-0"].engine.profile.step_s(1, 3_200, []) - 1.0
    await asyncio.sleep(left_s - BEGIN_WITHIN_S - 0.1)
    assert stand.place(warm) is NO_CAPACITY
    await asyncio.sleep(0.2)
    assert stand.chosen(warm) == "gpu-0"
    assert stand.place(cold) is NO_CAPACITY


@virtual
async def test_it_waits_for_room_in_the_cache() -> None:
    stand = Stand(fleet(1, kv_tokens=4_000))
    end = await stand.hold(Arrival(0.0, 2_000, 1_000), "gpu-0")
    assert isinstance(stand.place(Arrival(0.0, 500, 300)), Placed)
    # Both prompts would fit, but not both answers.
    assert stand.place(Arrival(0.0, 500, 1_000)) is NO_CAPACITY
    stand.world.replicas["gpu-0"].kill()
    stand.world.replicas["gpu-0"].start()
    end()
    assert isinstance(stand.place(Arrival(0.0, 500, 1_000)), Placed)


@virtual
async def test_it_leaves_out_who_is_down_excluded_or_too_small() -> None:
    small, large = fleet(1, max_model_len=1_000).replicas[0], fleet(1).replicas[0]
    stand = Stand(SimulatedFleet("mixed", (replace(small, name="a"), replace(large, name="b"))))
    # The true length of the answer, not `max_tokens` of the request.
    assert stand.chosen(Arrival(0.0, 600, 600)) == "b"
    assert stand.chosen(Arrival(0.0, 600, 100)) == "a"
    stand.down.add("a")
    assert stand.chosen(Arrival(0.0, 600, 100)) == "b"
    assert stand.place(Arrival(0.0, 600, 100), frozenset({"a", "b"})) is NO_MATCH_FOR_MODEL


@virtual
async def test_adapter_prefers_its_replica_and_waits_for_a_slot() -> None:
    stand = Stand(fleet(2, max_loras=1))
    await stand.hold(Arrival(0.0, 100, 2_000, adapter="x"), "gpu-1")
    assert stand.chosen(Arrival(0.0, 100, 10, adapter="y")) == "gpu-0"
    await stand.hold(Arrival(0.0, 100, 2_000, adapter="x"), "gpu-0")
    assert stand.place(Arrival(0.0, 100, 10, adapter="y")) is NO_MATCH
    assert isinstance(stand.place(Arrival(0.0, 100, 10, adapter="x")), Placed)
    assert isinstance(stand.place(Arrival(0.0, 100, 10)), Placed)


def test_an_adapter_that_fits_nowhere_does_not_hold_up_the_others() -> None:
    first = Arrival(0.0, 100, 500, adapter="x")
    waiting = Arrival(0.5, 100, 20, adapter="y")
    passing = [Arrival(0.6, 100, 20), Arrival(0.7, 100, 20, adapter="x")]
    ends = records_of(setup([first, waiting, *passing], "oracle", fleet(1, max_loras=1)))
    by_arrival = {id(one.arrival): one for one in ends}
    assert [by_arrival[id(one)].queue_wait_s for one in passing] == [0.0, 0.0]
    late = by_arrival[id(waiting)]
    assert late.outcome is Outcome.COMPLETED
    assert 0.5 + (late.queue_wait_s or 0.0) >= by_arrival[id(first)].ended_s


@pytest.mark.sampled(2)
@pytest.mark.parametrize("faults", [(), (Fault(1.5, FleetFaultKind.RESTART, "gpu-1", None, 1.0),)])
def test_its_books_are_empty_when_everything_has_ended(faults: tuple[Fault, ...]) -> None:
    kept: list[Oracle] = []

    def kept_oracle(around: Surroundings, world: World) -> Placement:
        kept.append(Oracle(world, around.clock))
        return kept[-1]

    arrivals = [replace(one, adapter="x" if i % 3 else None) for i, one in enumerate(traffic(rate=80.0))]
    what = setup(arrivals, "oracle", fleet(3, faults))
    ends = records_of(replace(what, plan=replace(what.plan, make_placement=kept_oracle)))
    assert any(one.outcome is Outcome.BROKEN_STREAM for one in ends) == bool(faults)
    (oracle,) = kept
    fresh = Oracle(oracle._world, oracle._clock)
    assert oracle._held == fresh._held
    assert oracle._where == {}
