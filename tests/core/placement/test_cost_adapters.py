"""The price of loading an adapter: its own time, that of others, and the displaced adapter."""

from __future__ import annotations

from typing import Any

import pytest

from llmproxy.core.backends.view import View
from llmproxy.core.placement.rates import TIERS, LoadTimesByTier
from tests.core.cost_bench import BASE_S, TOKEN_S, CostBench, streamed
from tests.core.make import view

NAMES = tuple(f"lora-{number}" for number in range(8))
SERVED = frozenset({"base", *NAMES})


def slotted(name: str, *resident: int, slots: int = 2, **given: Any) -> View:
    """A backend that has these adapters in its slots."""
    return view(name, served=SERVED, resident=frozenset(NAMES[i] for i in resident), max_adapters=slots, **given)


def taught(load_s: float) -> CostBench:
    """A placement with observed adapter loads of these times."""
    bench = CostBench()
    for _ in range(10):
        bench.serve(streamed(adapter="elsewhere"), view("z", served=SERVED | {"elsewhere"}), more_s=load_s)
    return bench


def asked(number: int, **given: Any) -> Any:
    return streamed(adapter=NAMES[number], **given)


@pytest.mark.parametrize("known", [True, False])
def test_a_burst_of_one_adapter_loads_it_once(known: bool) -> None:
    bench = taught(2.0) if known else CostBench()
    views = [slotted("a"), slotted("b"), slotted("c")]
    homes = set()
    for _ in range(8):
        placed = bench.place(asked(0), views)
        homes.add(placed.backend)
        bench.take(asked(0), placed)
        views = [slotted(one.backend, *([0] if one.backend in homes else [])) for one in views]
        bench.now += 0.2
    assert len(homes) == 1


def test_evicting_the_only_copy_of_an_adapter_costs_its_load_time() -> None:
    bench = taught(2.0)
    for _ in range(5):
        for number in range(4):
            bench.serve(asked(number), slotted("ab"[number // 2], *((0, 1) if number < 2 else (2, 3))))
    views = [slotted("a", 0, 1), slotted("b", 2, 3), slotted("c", 2, 3)]
    assert bench.place(asked(4), views).backend != "a"
    price = {one.backend: dict(one.terms)["eviction"] for one in bench.cost.explained()[-1].prices}
    assert price == {"a": pytest.approx(2.0, rel=0.3), "b": 0.0, "c": 0.0}


def test_the_adapters_of_each_backend_are_read_a_few_times_however_many_backends_there_are() -> None:
    read = 0

    class Resident(frozenset[str]):
        def __len__(self) -> int:
            nonlocal read
            read += 1
            return super().__len__()

    bench = taught(2.0)
    views = [view(f"b{i}", served=SERVED, resident=Resident(NAMES[:4]), max_adapters=5) for i in range(50)]
    bench.serve(asked(0), views[0])
    read = 0
    bench.place(asked(5), views)
    assert read <= 4 * len(views)


def test_adapter_in_use_is_not_evicted_first() -> None:
    bench = taught(2.0)
    bench.start(asked(0), slotted("a", 0, 1))
    bench.serve(asked(1), slotted("a", 0, 1))
    # The other backend has the idle adapter too, so its eviction costs nothing.
    bench.place(asked(2), [slotted("a", 0, 1), slotted("b", 1)])
    price = {one.backend: dict(one.terms)["eviction"] for one in bench.cost.explained()[-1].prices}
    assert price["a"] == 0.0


def test_free_slot_costs_nothing_unless_a_second_copy_takes_it() -> None:
    bench = taught(2.0)
    for slots, number, price_s in ((2, 0, 2.0), (2, 2, 0.0), (8, 0, 0.0)):
        bench.place(asked(number), [slotted("a", 0), slotted("b", 1, slots=slots)])
        price = {one.backend: dict(one.terms)["eviction"] for one in bench.cost.explained()[-1].prices}
        assert price["b"] == pytest.approx(price_s, rel=0.1)


def test_adapter_load_delays_streams_and_waiting_prompts() -> None:
    bench = taught(2.0)
    idle = bench.terms(asked(0), slotted("a"))
    beside = bench.terms(asked(0), slotted("a", load=10, limit=100))
    assert beside["harm"] - idle["harm"] == pytest.approx(0.1 * 10 * 2.0, rel=0.1)
    bench.book(streamed(), slotted("b"))
    waiting = bench.terms(asked(0), slotted("b"))
    assert waiting["harm"] - idle["harm"] == pytest.approx(0.9 * 2.0, rel=0.1)


def test_booked_prompts_wait_for_a_load_and_are_not_overdue() -> None:
    bench = taught(2.0)
    loading = bench.book(asked(0), slotted("a"))
    behind = bench.book(streamed(prompt_tokens=100), slotted("a"))
    bench.now += 0.5
    assert bench.terms(streamed(), slotted("a"))["queue"] == pytest.approx(BASE_S + 1.5, abs=0.1)
    bench.now += 1.5
    bench.cost.started(loading, bench.now)
    assert bench.terms(streamed(), slotted("a"))["queue"] == pytest.approx(BASE_S + 100 * TOKEN_S, abs=0.01)
    bench.cost.started(behind, bench.now)


def test_request_that_waits_for_an_adapter_slot_delays_no_others() -> None:
    bench = taught(2.0)
    for number in range(2):
        bench.start(asked(number), slotted("a", 0, 1))
    before_s = bench.terms(asked(0), slotted("a", 0, 1))["queue"]
    deferred = bench.book(asked(2), slotted("a", 0, 1))
    bench.now += 5.0
    assert bench.terms(asked(0), slotted("a", 0, 1))["queue"] == pytest.approx(before_s, abs=0.01)
    # Others of the adapter wait for the same slot.
    assert bench.terms(asked(2, output_tokens=300), slotted("a", 0, 1))["adapter"] == pytest.approx(3.0, rel=0.1)
    bench.finish(deferred)
    assert bench.terms(asked(2, output_tokens=300), slotted("a", 0, 1))["adapter"] == pytest.approx(3.0 + 2.0, rel=0.1)


def test_loads_of_one_step_share_its_time() -> None:
    bench = CostBench()
    for _ in range(10):
        leases = [bench.book(asked(number), slotted("a", slots=8)) for number in range(4)]
        bench.now += 4 * 0.7
        for lease in leases:
            bench.cost.started(lease, bench.now)
            bench.finish(lease)
        bench.now += 1.0
    assert bench.terms(asked(5), slotted("a", slots=8))["adapter"] == pytest.approx(0.7, rel=0.1)


def test_load_time_is_known_before_the_next_first_byte() -> None:
    bench = CostBench()
    bench.start(asked(0), slotted("a"), more_s=2.0)
    bench.now += 0.01
    bench.place(asked(1), [slotted("a", 0)])
    assert bench.terms(asked(1), slotted("b"))["adapter"] == pytest.approx(2.0, rel=0.1)


def test_loads_from_host_memory_and_disk_are_distinguished() -> None:
    bench = CostBench()
    for lap in range(40):
        # Six adapters in turns and two slots: three others are loaded before one comes back. Each lap has a new one.
        for name in [*NAMES[:4], f"new-{lap}"]:
            on = view("a", served=SERVED | {name}, max_adapters=2)
            bench.serve(streamed(adapter=name), on, more_s=0.02 if name in NAMES and lap else 1.0)
            bench.now += 1.0
    swapped, read = (bench.terms(asked(number), slotted("a"))["adapter"] for number in (0, 7))
    assert swapped < 0.1
    assert read == pytest.approx(1.0, rel=0.1)


def test_unknown_load_time_is_taken_from_the_next_colder_tier() -> None:
    times = LoadTimesByTier()
    times.learn(TIERS - 1, 1.0)
    assert times.at(1) == 1.0
    times.learn(2, 0.1)
    assert [times.at(tier) for tier in (1, 2, 3, TIERS - 1)] == [0.1, 0.1, 1.0, 1.0]
