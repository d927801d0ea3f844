"""The index holds the upper end of the LRU order, heads outlive tails, and no capacity is exceeded."""

import gc
import tracemalloc
from collections.abc import Iterable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmproxy.core.placement.prefix_index import CAPACITY_BLOCKS_MAX, PrefixIndex

# Chains of a small tree: a block's hash is its path in the tree, so chains share heads and never meet again.
PATHS = st.lists(st.integers(0, 2), max_size=14)
NAMES = st.sampled_from(["a", "b", "c"])


def chain(path: Sequence[int]) -> tuple[int, ...]:
    return tuple(hash(tuple(path[: length + 1])) for length in range(len(path)))


class Lru:
    """The blocks of a backend in exact LRU order, the least recently used first."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def touch(self, hashes: Sequence[int]) -> None:
        for block in reversed(hashes):
            if block in self.order:
                self.order.remove(block)
            self.order.append(block)

    def upper(self, blocks: int) -> set[int]:
        return set(self.order[max(0, len(self.order) - blocks) :]) if blocks > 0 else set()


def held(index: PrefixIndex, backend: str, hashes: Sequence[int]) -> int:
    return index.match(hashes).get(backend, 0)


@given(st.integers(1, 60), st.lists(st.tuples(NAMES, PATHS), max_size=60))
def test_indexed_blocks_lie_between_two_exact_lrus(capacity: int, records: list[tuple[str, list[int]]]) -> None:
    index, models = PrefixIndex(capacity), {name: Lru() for name in "abc"}
    every = {tuple(path[:length]) for _, path in records for length in range(1, len(path) + 1)}
    for backend, path in records:
        hashes = chain(path)
        index.record(backend, hashes)
        models[backend].touch(hashes[:capacity])
        index.check()
        assert index.size(backend) <= capacity
    for name, model in models.items():
        sure, possible = model.upper(capacity - capacity // 8), model.upper(capacity)
        for path_of in every:
            hashes = chain(path_of)
            is_held = held(index, name, hashes) == len(hashes)
            # A block is held with all before it, so its head being there is part of the question.
            assert is_held or hashes[-1] not in sure
            assert hashes[-1] in possible or not is_held


@given(st.integers(1, 40), st.lists(st.tuples(NAMES, PATHS), max_size=40), PATHS)
def test_match_is_the_longest_prefix_and_no_head_goes_before_its_tail(
    capacity: int, records: list[tuple[str, list[int]]], asked: list[int]
) -> None:
    index = PrefixIndex(capacity)
    for backend, path in records:
        index.record(backend, chain(path))
    hashes = chain(asked)
    found = index.match(hashes)
    assert all(found.values())
    for name in "abc":
        blocks = found.get(name, 0)
        # Seen one by one, the held blocks of a chain are its first ones, with nothing after them.
        by_length = [held(index, name, hashes[: length + 1]) for length in range(len(hashes))]
        assert by_length == [min(length + 1, blocks) for length in range(len(hashes))]


@given(st.lists(st.tuples(NAMES, PATHS), max_size=20))
def test_with_room_for_all_the_index_is_the_naive_one(records: list[tuple[str, list[int]]]) -> None:
    index, naive = PrefixIndex(1000), {name: set[int]() for name in "abc"}
    for backend, path in records:
        hashes = chain(path)
        expected = {
            name: next((at for at, block in enumerate(hashes) if block not in blocks), len(hashes))
            for name, blocks in naive.items()
        }
        assert index.match(hashes) == {name: blocks for name, blocks in expected.items() if blocks}
        index.record(backend, hashes)
        naive[backend] |= set(hashes)
        assert index.size(backend) == len(naive[backend])


def test_head_of_a_chain_longer_than_the_capacity_is_kept() -> None:
    index = PrefixIndex(100)
    index.record("a", range(1000))
    assert index.size("a") == held(index, "a", range(1000)) == 100


def test_used_head_outlives_unused_blocks() -> None:
    index = PrefixIndex(80)
    index.record("a", range(20))
    for number in range(1, 40):
        index.record("a", (*range(4), *range(number * 100, number * 100 + 6)))
    assert held(index, "a", range(20)) == 4


def test_chain_touched_often_drives_nothing_else_out() -> None:
    index = PrefixIndex(800)
    index.record("a", range(1000, 1300))
    for _ in range(50):
        for number in range(3):
            index.record("a", range(number * 100, number * 100 + 100))
    assert held(index, "a", range(1000, 1300)) == 300
    assert index.size("a") == 600


@given(st.lists(st.tuples(st.sampled_from(["record", "resize", "calibrate"]), PATHS), max_size=60))
def test_counts_stay_right_after_any_calls(steps: list[tuple[str, list[int]]]) -> None:
    index = PrefixIndex(24)
    for what, path in steps:
        hashes = chain(path)
        if what == "record":
            index.record("a", hashes)
            assert held(index, "a", hashes) >= min(len(hashes), index.limit("a") * 7 // 8)
        elif what == "resize":
            index.resize("a", len(path) * 5)
        else:
            index.calibrate("a", 10, len(path))
        index.check()


def test_a_forgotten_backend_holds_nothing_and_is_sized_anew() -> None:
    index = PrefixIndex(10)
    index.resize("a", 50)
    index.record("a", range(50))
    index.calibrate("a", 100, 0)
    index.forget("a")
    index.forget("nobody")
    assert index.match(range(50)) == {}
    assert index.size("a") == 0
    assert index.limit("a") == 10


def test_a_resize_acts_at_once_and_is_bounded() -> None:
    index = PrefixIndex(100)
    index.record("a", range(40))
    index.record("a", range(100, 140))
    index.resize("a", 45)
    assert index.match(range(40)) == {}
    assert held(index, "a", range(100, 140)) == 40
    index.resize("a", 0)
    assert index.limit("a") == 1
    assert index.size("a") <= 1
    index.resize("a", 10**12)
    assert index.limit("a") == CAPACITY_BLOCKS_MAX


def test_high_predictions_shrink_the_limit_and_right_ones_restore_it() -> None:
    index = PrefixIndex(1000)
    index.record("a", range(1000))
    for _ in range(10):
        index.calibrate("a", 4000, 0)
    cut = index.limit("a")
    assert 400 < cut < 600
    assert index.size("a") <= cut
    for _ in range(20):
        index.calibrate("a", 4000, 3900)
    assert cut < index.limit("a") < cut + 50
    for _ in range(400):
        index.calibrate("a", 4000, 2100)
    assert index.limit("a") == 1000
    for _ in range(1000):
        index.calibrate("a", 4000, 0)
    assert index.limit("a") == 1000 // 16


def test_a_prediction_of_nothing_teaches_nothing() -> None:
    index = PrefixIndex(1000)
    index.calibrate("a", 0, 0)
    index.record("a", [1])
    index.calibrate("a", 4000, 0)
    cut = index.limit("a")
    index.calibrate("a", 0, 500)
    assert index.limit("a") == cut


def test_at_most_an_eighth_is_dropped_at_a_time() -> None:
    index = PrefixIndex(1000)
    for number in range(100):
        index.record("a", range(number * 100, number * 100 + 10))
        sizes = index.size("a")
    index.record("a", [10**6])
    assert 1000 - 125 <= index.size("a") <= 1000
    assert sizes == 1000


def bytes_per_block(index: PrefixIndex, records: Iterable[Sequence[int]]) -> float:
    gc.collect()
    tracemalloc.start()
    try:
        for hashes in records:
            index.record("a", hashes)
        del hashes
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return used_bytes / index.size("a")


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 40])
def test_a_block_costs_no_more_than_a_hundred_bytes(length: int) -> None:
    rng = Random(1)
    chains = (tuple(rng.getrandbits(64) for _ in range(length)) for _ in range(20_000 // length))
    assert bytes_per_block(PrefixIndex(6000), chains) <= 100


@pytest.mark.slow
def test_a_block_costs_no_more_where_touches_thin_generations_out() -> None:
    rng, live = Random(2), list[tuple[int, ...]]()

    def turns() -> Iterable[Sequence[int]]:
        for _ in range(6000):
            if len(live) < 100:
                live.append(())
            turn = rng.randrange(len(live))
            live[turn] = (*live[turn], *(rng.getrandbits(64) for _ in range(2)))
            yield live[turn]
            if len(live[turn]) == 80:
                del live[turn]
        live.clear()

    assert bytes_per_block(PrefixIndex(6000), turns()) <= 100
