from __future__ import annotations

import pytest

from llmproxy.core.domain import Verdict
from llmproxy.lab.baselines import dynamo, sglang
from llmproxy.lab.baselines.index import Block, BlockIndex
from tests.lab.baselines.baseline_world import BLOCK, World, views


def sized(*pairs: tuple[Block, int]) -> dict[Block, int]:
    return dict(pairs)


# --- the index that they share ----------------------------------------------------------------------------------------


def test_a_match_counts_up_to_the_first_gap_or_over_it() -> None:
    index = BlockIndex()
    index.insert("a", sized((1, 1), (2, 1), (3, 1)))
    index.insert("b", sized((1, 1)))
    index.insert("b", sized((3, 1)))
    assert index.matches((1, 2, 3, 4), unbroken=True) == {"a": 3, "b": 1}
    assert index.matches((1, 2, 3, 4), unbroken=False) == {"a": 3, "b": 2}
    assert index.matches((9, 1), unbroken=False) == {}


def test_tails_are_dropped_before_heads_and_the_unused_before_both() -> None:
    index = BlockIndex()
    assert index.insert("a", sized((1, 10), (2, 20), (3, 30))) == 60
    assert index.insert("a", sized((7, 5))) == 5
    assert index.insert("a", sized((1, 10), (2, 20))) == 0
    assert [index.drop_oldest("a") for _ in range(4)] == [30, 5, 20, 10]
    assert (index.size("a"), index.oldest("a"), len(index._holders)) == (0, None, 0)


def test_forgetting_one_leaves_the_others() -> None:
    index = BlockIndex()
    for name in "ab":
        index.insert(name, sized((1, 1), (2, 1)))
    index.remove("b", 2)
    index.forget("a")
    index.forget("nobody")
    assert index.matches((1, 2), unbroken=True) == {"b": 1}
    assert len(index._holders) == 1


# --- cache_aware ------------------------------------------------------------------------------------------------------


def busy(world: World, name: str, times: int) -> None:
    for i in range(times):
        world.send(world.ask(1_000_000 + i), views(name))


@pytest.mark.parametrize(("known", "goes_to"), [(4, "a"), (3, "b")])
def test_more_than_three_tenths_of_a_prompt_lead_to_its_holder(known: int, goes_to: str) -> None:
    world = World("cache_aware")
    world.serve(world.ask(*range(known)), views("a"))
    assert world.placed(world.ask(*range(10)), views("a", "b")).backend == goes_to


def test_a_cold_prompt_goes_to_the_smallest_tree() -> None:
    world = World("cache_aware")
    world.serve(world.ask(1, 2, 3), views("a"))
    world.serve(world.ask(4, 5, tokens=BLOCK + 1), views("b"))
    world.serve(world.ask(6, 7, tokens=BLOCK + 2), views("c"))
    placed = world.placed(world.ask(9), views("a", "b", "c"))
    assert (placed.backend, dict(placed.terms)) == ("b", {"tree_tokens": BLOCK + 1})


@pytest.mark.parametrize(
    ("on_a", "on_b", "goes_to"), [(64, 0, "a"), (65, 0, "b"), (201, 134, "a"), (202, 134, "b"), (198, 134, "a")]
)
def test_unequal_loads_switch_to_the_shortest_queue(on_a: int, on_b: int, goes_to: str) -> None:
    world = World("cache_aware")
    world.serve(world.ask(1, 2), views("a"))
    busy(world, "a", on_a)
    busy(world, "b", on_b)
    assert world.placed(world.ask(1, 2), views("a", "b")).backend == goes_to


def test_it_learns_also_where_the_shortest_queue_led() -> None:
    world = World("cache_aware(abs_load=0,rel_load=1)")
    _, lease = world.send(world.ask(1, 2), views("a"))
    assert world.serve(world.ask(1, 2), views("a", "b")) == "b"
    world.policy.finished(lease, Verdict.SERVED, None, world.now)
    assert world.placed(world.ask(1, 2), views("b", "c")).backend == "b"


def test_one_of_several_holders_is_taken_every_time() -> None:
    world = World("cache_aware")
    for name in "abc":
        world.serve(world.ask(1, 2), views(name))
    assert len({world.placed(world.ask(1, 2), views(*"abc")).backend for _ in range(20)}) == 1


def test_a_holder_that_is_gone_is_forgotten() -> None:
    world = World("cache_aware")
    world.serve(world.ask(1, 2), views("c"))
    world.serve(world.ask(8), views("b"))
    assert world.placed(world.ask(1, 2), views("a", "b")).backend == "a"
    assert dict(world.placed(world.ask(1, 2), views("c")).terms) == {"tree_tokens": 0.0}


def test_the_tree_is_cut_back_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "TREE_CHARACTERS", 4 * 3 * BLOCK)
    world = World("cache_aware")
    world.serve(world.ask(1, 2), views("a"))
    world.now += 59.0
    world.serve(world.ask(3, 4), views("a"))
    assert dict(world.placed(world.ask(1, 2), views("a")).terms) == {"match": 1.0}
    world.now += 1.0
    world.serve(world.ask(5), views("a"))
    assert dict(world.placed(world.ask(1, 2), views("a")).terms) == {"tree_tokens": 3 * BLOCK}
    assert dict(world.placed(world.ask(3, 4), views("a")).terms) == {"match": 1.0}


# --- dynamo_cost ------------------------------------------------------------------------------------------------------


def costs(world: World, *blocks: int, at: str = "a", tokens: int | None = None) -> tuple[float, float, float]:
    placed = world.placed(world.ask(*blocks, tokens=tokens), views(at))
    terms = dict(placed.terms)
    return terms["prefill"], terms["decode"], -placed.score


def test_the_cost_of_a_prompt_at_an_idle_backend() -> None:
    assert costs(World("dynamo_cost(events=0)"), 1, 2) == (64.0, 64, 128.0)
    assert costs(World("dynamo_cost(events=0)"), 1, tokens=100) == (100 / 16, 7, 100 / 16 + 7)


def test_work_in_flight_costs_and_what_is_cached_is_credited() -> None:
    world = World("dynamo_cost(events=0)")
    _, lease = world.send(world.ask(1, 2), views("a"))
    # Prefill (1024 + 1024) / 16 less 64 cached; of the blocks in use none is new.
    assert costs(world, 1, 2) == (64.0, 64, 128.0)
    assert costs(world, 1, 9) == (96.0, 96, 192.0)
    assert costs(world, 7, 8) == (128.0, 128, 256.0)
    world.policy.started(lease, world.now)
    assert costs(world, 1, 2) == (0.0, 64, 64.0)
    assert costs(world, 7, 8) == (64.0, 128, 192.0)
    world.policy.finished(lease, Verdict.SERVED, None, world.now)
    assert costs(world, 1, 2) == (0.0, 64, 64.0)


def test_prefill_counts_uncached_tokens_and_shared_blocks_once() -> None:
    world = World("dynamo_cost(events=0)")
    world.serve(world.ask(1, 2), views("a"))
    first = world.send(world.ask(1, 2, 3), views("a"))[1]
    second = world.send(world.ask(1, 2, 4), views("a"))[1]
    # Two new blocks of 512 tokens are in flight; in use are the blocks 1, 2, 3, 4 and this prompt's own.
    assert costs(world, 9) == ((2 * BLOCK + BLOCK) / 16, 5 * 32, 96 + 160)
    world.policy.finished(first, Verdict.SERVED, None, world.now)
    assert costs(world, 9) == (64.0, 4 * 32, 192.0)
    world.policy.finished(second, Verdict.LOST, None, world.now)
    assert costs(world, 9) == (32.0, 32, 64.0)


def test_affinity_yields_to_load_beyond_the_prompt_length() -> None:
    world = World("dynamo_cost(events=0)")
    world.serve(world.ask(1, 2, 3), views("a"))
    world.send(world.ask(50, tokens=300), views("a"))
    assert world.placed(world.ask(1, 2, 3), views("a", "b")).backend == "a"
    world.send(world.ask(60, 61, 62), views("a"))
    assert world.placed(world.ask(1, 2, 3), views("a", "b")).backend == "b"


def test_parameters_scale_credit_and_prefill() -> None:
    for name, cost in (
        ("dynamo_cost(overlap=0.5,events=0)", 32 + 64),
        ("dynamo_cost(overlap=0,prefill_scale=3,events=0)", 3 * 64 + 64),
    ):
        world = World(name)
        world.serve(world.ask(1, 2), views("a"))
        assert costs(world, 1, 2)[2] == cost


def test_a_prediction_lives_for_two_minutes_after_its_last_use() -> None:
    world = World("dynamo_cost(events=0)")
    world.serve(world.ask(1, 2), views("a"))
    world.now += 119.0
    world.serve(world.ask(1), views("a"))
    world.now += 0.9
    assert costs(world, 1, 2)[0] == 0.0
    world.now += 0.1
    assert costs(world, 1, 2)[0] == 32.0
    world.now += 119.0
    assert costs(world, 1, 2)[0] == 64.0


def test_the_prediction_is_pruned_to_four_fifths_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "TREE_BLOCKS", 10 * BLOCK // 16)
    world = World("dynamo_cost(events=0)")
    for i in range(10):
        world.serve(world.ask(100 + i), views("ab"[i % 2]))
        world.now += 1.0
    assert costs(world, 100)[0] == 0.0
    world.serve(world.ask(200), views("a"))
    found = [costs(world, 100 + i, at="ab"[i % 2])[0] == 0.0 for i in range(10)]
    assert found == [False] * 3 + [True] * 7
    assert costs(world, 200)[0] == 0.0


def test_a_lost_backend_has_nothing_cached() -> None:
    world = World("dynamo_cost(events=0)")
    world.serve(world.ask(1, 2), views("a"))
    world.serve(world.ask(1, 2), views("b"))
    world.policy.lost("a")
    assert costs(world, 1, 2) == (64.0, 64, 128.0)
    assert costs(world, 1, 2, at="b") == (0.0, 64, 64.0)


def test_with_events_it_credits_what_the_engines_say_and_nothing_else() -> None:
    world = World("dynamo_cost")
    world.serve(world.ask(1, 2), views("a"))
    assert costs(world, 1, 2)[0] == 64.0
    world.cached = {"b": 2 * BLOCK - 16}
    assert world.placed(world.ask(1, 2), views("a", "b")).backend == "b"
    assert costs(world, 1, 2, at="b")[0] == 1.0


def test_equal_costs_are_drawn() -> None:
    world = World("dynamo_cost(events=0)")
    assert {world.placed(world.ask(1), views("a", "b")).backend for _ in range(30)} == {"a", "b"}
