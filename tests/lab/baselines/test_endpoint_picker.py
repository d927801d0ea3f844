from __future__ import annotations

from typing import Any

import pytest

from llmproxy.core.backends.view import View
from llmproxy.core.domain import NoCapacity, Placed
from llmproxy.lab.baselines.endpoint_picker import saturation
from tests.core.make import reading, view
from tests.lab.baselines.baseline_world import BLOCK, World


def seen(name: str, at_s: float = 100.0, **given: Any) -> View:
    return view(name, max_model_len=None, reading=reading(at_s, **given))


def idle(*names: str, at_s: float = 100.0) -> list[View]:
    return [seen(name, at_s) for name in names]


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_saturation_is_the_mean_of_the_worse_of_queue_and_cache() -> None:
    assert saturation([seen("a", waiting=2, kv_used=0.2), seen("b", waiting=1, kv_used=0.6)], 100.0) == (
        pytest.approx((2 / 5 + 0.6 / 0.8) / 2)
    )
    assert saturation([seen("a", waiting=10)], 100.0) == 2.0


def test_one_hot_backend_among_nine_idle_ones_is_invisible() -> None:
    assert saturation([*idle(*"abcdefghi"), seen("j", waiting=30)], 100.0) == pytest.approx(0.6)


def test_what_is_not_known_or_older_than_200_ms_counts_as_full() -> None:
    assert saturation([view("a"), *idle("b")], 100.0) == 0.5
    assert saturation(idle("a"), 100.2 - 1e-9) == 0.0
    assert saturation(idle("a"), 100.21) == 1.0
    assert saturation([], 100.0) == 1.0
    assert saturation([*idle("a"), view("down", available=False)], 100.0) == 0.0


@pytest.mark.parametrize("name", ["epp_blend", "epp_sticky(gate=1)"])
def test_a_full_pool_holds_up_everybody_even_where_one_is_free(name: str) -> None:
    world = World(name)
    assert world.place(world.ask(1), [seen("a", waiting=10), seen("b")]) == NoCapacity()
    assert isinstance(world.place(world.ask(1), [seen("a", waiting=9), seen("b")]), Placed)
    assert world.place(world.ask(1, adapter="unknown"), [seen("a", waiting=10), seen("b")]) == NoCapacity()


def test_the_gate_does_not_see_what_was_just_dispatched() -> None:
    world = World("epp_blend")
    fleet = [seen("a", waiting=4)]
    assert [world.send(world.ask(i), fleet)[0] for i in range(200)] == ["a"] * 200


def test_the_queue_is_drained_by_one_per_millisecond() -> None:
    world = World("epp_blend")
    waited = 0
    while isinstance(world.place(world.ask(waited, arrived_s=99.0), idle("a")), Placed):
        world.send(world.ask(waited, arrived_s=99.0), idle("a"))
        waited += 1
    assert waited == 50
    world.now += 0.0031
    for i in range(3):
        world.send(world.ask(i, arrived_s=99.0), idle("a"))
    assert world.place(world.ask(1, arrived_s=99.0), idle("a")) == NoCapacity()


# --- the blend --------------------------------------------------------------------------------------------------------


def test_the_blend_of_three_endpoints() -> None:
    world = World("epp_blend")
    world.serve(world.ask(1, 2, 3, 4), idle("b"))
    world.serve(world.ask(1, 2), idle("c"))
    a, b, c = seen("a", waiting=0, kv_used=0.5), seen("b", waiting=2, kv_used=0.2), seen("c", waiting=4, kv_used=0.1)
    placed = world.placed(world.ask(1, 2, 3, 4), [a, b, c])
    assert placed.backend == "b"
    assert dict(placed.terms) == {"queue": 0.5, "kv": 0.8, "prefix": 1.0}
    assert placed.score == pytest.approx(2 * 0.5 + 2 * 0.8 + 3 * 1.0)
    without_b = world.placed(world.ask(1, 2, 3, 4), [a, c])
    assert without_b.backend == "c"
    assert without_b.score == pytest.approx(0 + 2 * 0.9 + 3 * 0.5)
    cold = world.placed(world.ask(7, 8, 9), [a, b, c])
    assert cold.backend == "a"
    assert cold.score == pytest.approx(2 * 1.0 + 2 * 0.5)


@pytest.mark.parametrize("behind", [1, 50])
def test_one_waiting_request_is_as_decisive_as_fifty(behind: int) -> None:
    world = World("epp_blend")
    world.serve(world.ask(1), idle("b"))
    others = idle(*"cdefghijklmn")
    warm = world.placed(world.ask(1), [*others, seen("b", waiting=behind)])
    assert (warm.backend, dict(warm.terms)["queue"], warm.score) == ("b", 0.0, 0.0 + 2.0 + 3.0)
    cold = world.placed(world.ask(2), [seen("a", kv_used=0.75), seen("b", waiting=1)])
    assert (cold.backend, cold.score) == ("a", 2.0 + 0.5)


def test_between_two_scrapes_all_arrivals_pick_the_same_one() -> None:
    world = World("epp_blend")
    fleet = [seen("a", waiting=1), seen("b"), seen("c", kv_used=0.01)]
    assert {world.send(world.ask(i), fleet)[0] for i in range(30)} == {"b"}


def test_equal_queues_all_score_one() -> None:
    world = World("epp_blend")
    assert world.placed(world.ask(1), [seen("a", waiting=3), seen("b", waiting=3)]).score == 4.0


def test_a_backend_without_a_reading_counts_as_idle() -> None:
    world = World("epp_blend(gate=0)")
    placed = world.placed(world.ask(1), [view("a", max_model_len=None), seen("b", waiting=2, kv_used=0.5)])
    assert (placed.backend, placed.score) == ("a", 4.0)


def test_weights_are_parameters() -> None:
    world = World("epp_blend(queue=0,kv=1,prefix=0)")
    assert world.placed(world.ask(1), [seen("a", kv_used=0.5), seen("b", waiting=4)]).backend == "b"


# --- the index --------------------------------------------------------------------------------------------------------


def test_the_index_is_as_large_as_the_cache_and_forgets_tails_first() -> None:
    world = World("epp_blend(queue=0,kv=0,prefix=1)")
    small = [seen("a", kv_tokens=4 * BLOCK)]
    world.serve(world.ask(1, 2, 3), small)
    assert world.placed(world.ask(1, 2, 3), small).score == 1.0
    world.serve(world.ask(7, 8, 9), small)
    assert world.placed(world.ask(7, 8, 9), small).score == 1.0
    assert world.placed(world.ask(1, 2, 3), small).score == pytest.approx(1 / 3)


def test_the_size_of_a_cache_stays_valid_without_later_readings() -> None:
    world = World("epp_blend(queue=0,kv=0,prefix=1,gate=0)")
    world.serve(world.ask(1, 2), [seen("a", kv_tokens=4 * BLOCK)])
    unread = [view("a", max_model_len=None)]
    for blocks in ((7, 8), (4, 5)):
        world.serve(world.ask(*blocks), unread)
    assert [world.placed(world.ask(*blocks), unread).score for blocks in ((1, 2), (7, 8), (4, 5))] == [0.0, 1.0, 1.0]


def test_an_unknown_cache_is_taken_for_31250_blocks_of_64_tokens() -> None:
    world = World("epp_blend(queue=0,kv=0,prefix=1)")
    kept = 31_250 * 64 // BLOCK
    world.serve(world.ask(1), idle("a"))
    for first in range(1_000, 1_000 + kept - 1, 200):
        world.serve(world.ask(*range(first, min(first + 200, 1_000 + kept - 1))), idle("a"))
    assert world.placed(world.ask(1), idle("a")).score == 1.0
    world.serve(world.ask(2), idle("a"))
    assert world.placed(world.ask(1000), idle("a")).score == 1.0
    assert world.placed(world.ask(1), idle("a")).score == 0.0


def test_prompts_without_ids_fill_the_index_too() -> None:
    world = World("epp_blend(queue=0,kv=0,prefix=1)")
    small = [seen("a", kv_tokens=2 * BLOCK)]
    world.serve(world.ask(1), small)
    world.serve(world.ask(tokens=2 * BLOCK), small)
    assert world.placed(world.ask(1), small).score == 0.0


def test_beyond_131072_tokens_a_prompt_is_not_looked_at() -> None:
    world = World("epp_blend(queue=0,kv=0,prefix=1)")
    head, tail = tuple(range(256)), tuple(range(1_000, 1_010))
    world.serve(world.ask(*head), idle("a"))
    assert world.placed(world.ask(*head, *tail), idle("a")).score == 1.0


def test_a_departed_endpoint_is_forgotten_within_two_minutes() -> None:
    world = World("epp_blend(queue=0,kv=0,prefix=1)")
    world.serve(world.ask(1), idle("a"))
    world.now += 60.0
    world.placed(world.ask(2), idle("b", at_s=160.0))
    assert world.placed(world.ask(1), idle("a", at_s=160.0)).score == 1.0
    world.now += 60.0
    world.placed(world.ask(2), idle("b", at_s=220.0))
    assert world.placed(world.ask(1), idle("a", at_s=220.0)).score == 0.0


# --- sticky until saturated -------------------------------------------------------------------------------------------


def loaded(world: World, name: str, tokens: int) -> int:
    return world.send(world.ask(tokens=tokens), idle(name))[1]


@pytest.mark.parametrize(("known", "goes_to"), [(4, "a"), (3, "b")])
def test_four_fifths_of_a_prompt_are_enough_to_stick(known: int, goes_to: str) -> None:
    world = World("epp_sticky")
    world.serve(world.ask(*range(known)), idle("a"))
    loaded(world, "a", 100_000)
    assert world.placed(world.ask(0, 1, 2, 3, 4), idle("a", "b")).backend == goes_to


@pytest.mark.parametrize(("ahead", "goes_to"), [(286_704, "a"), (286_705, "b")])
def test_stickiness_breaks_beyond_18_seconds_of_backlog(ahead: int, goes_to: str) -> None:
    world = World("epp_sticky")
    world.serve(world.ask(1, 2), idle("a"))
    loaded(world, "b", 1_000)
    loaded(world, "a", 1_000 + ahead)
    assert world.placed(world.ask(1, 2), idle("a", "b")).backend == goes_to
    always = World("epp_sticky(penalty_s=0)")
    always.serve(always.ask(1, 2), idle("a"))
    loaded(always, "a", 10_000_000)
    assert always.placed(always.ask(1, 2), idle("a", "b")).backend == "a"


def test_the_best_of_each_side_decides_the_escape() -> None:
    world = World("epp_sticky")
    for name in "ab":
        world.serve(world.ask(1, 2), idle(name))
    loaded(world, "a", 400_000)
    loaded(world, "b", 5_000)
    assert world.placed(world.ask(1, 2), idle("a", "b", "c")).backend == "b"


def test_the_load_is_uncached_tokens_in_flight_and_this_prompt() -> None:
    world = World("epp_sticky")
    _, lease = world.send(world.ask(1, 2, 3, 4), idle("a"))
    placed = world.placed(world.ask(1, 2, 3, 4, 5), idle("a"))
    assert dict(placed.terms) == {"tokens": 4 * BLOCK + BLOCK, "match": 0.8}
    assert placed.score == 1.0 - 5 * BLOCK / 4_194_304
    world.send(world.ask(1, 2, 3, 4, 5), idle("a"))
    assert dict(world.placed(world.ask(9), idle("a")).terms)["tokens"] == 6 * BLOCK
    world.policy.started(lease, world.now)
    assert dict(world.placed(world.ask(9), idle("a")).terms)["tokens"] == 2 * BLOCK


def test_cold_prompts_go_to_the_fewest_tokens_in_flight() -> None:
    world = World("epp_sticky")
    assert {world.send(world.ask(i), idle("a", "b", "c"))[0] for i in (10, 20, 30)} == {"a", "b", "c"}
