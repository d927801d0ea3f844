"""The KV cache: order of eviction, blocks with several holders or copies, and invariants after random operations."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llmproxy.lab.simulator.engine.kv_cache import KvCache
from tests.lab.simulator.engine.invariants import check_cache
from tests.sizes import examples


def filled(cache: KvCache, *hashes: int) -> list[int]:
    """Blocks that one request holds, full of what `hashes` name."""
    blocks = cache.allocate(len(hashes))
    assert blocks is not None
    cache.store(blocks, hashes)
    return blocks


def known(cache: KvCache, *hashes: int) -> list[int]:
    return [one for one in hashes if cache.match([one])]


def test_eviction_takes_oldest_blocks_and_tails_first() -> None:
    cache = KvCache(6)
    first, second = filled(cache, 1, 2), filled(cache, 3, 4, 5)
    cache.release(second, (3, 4, 5), 3)
    cache.release(first, (1, 2), 2)
    left = []
    for _ in range(5):
        cache.allocate(1)
        left.append(known(cache, 1, 2, 3, 4, 5))
    assert left == [[1, 2, 3, 4], [1, 2, 3], [1, 2], [1], []]


def test_a_block_that_was_never_full_is_taken_before_any_cached_one() -> None:
    cache = KvCache(5)
    old, new = filled(cache, 1, 2), cache.allocate(2)
    assert new is not None
    cache.release(old, (1, 2), 2)
    cache.store(new[:1], [3])
    cache.release(new, (3,), 1)
    assert cache.allocate(1) == new[1:]
    assert known(cache, 1, 2, 3) == [1, 2, 3]
    cache.allocate(1)
    assert known(cache, 1, 2, 3) == [1, 3]


def test_a_hit_makes_a_block_young_again() -> None:
    cache = KvCache(3)
    first, second = filled(cache, 1), filled(cache, 2)
    cache.release(first, (1,), 1)
    cache.release(second, (2,), 1)
    hits = cache.match([1])
    assert cache.unused(hits) == 1
    cache.share(hits)
    assert (cache.unused(hits), cache.free) == (0, 1)
    cache.release(hits, (1,), 1)
    cache.allocate(1)
    assert known(cache, 1, 2) == [1]


def test_a_block_is_free_when_its_last_holder_has_left() -> None:
    cache = KvCache(4)
    blocks = filled(cache, 1, 2)
    for _ in range(2):
        cache.share(cache.match([1]))
    frees = []
    for held in (blocks, blocks[:1], blocks[:1]):
        cache.release(held, (1, 2), len(held))
        frees.append(cache.free)
    assert frees == [2, 2, 3]
    assert cache.usage == 0.0


def test_of_several_copies_the_oldest_is_found_and_after_it_the_next() -> None:
    cache = KvCache(5)
    first, second, third, fourth = (filled(cache, 1) for _ in range(4))
    assert cache.match([1]) == first
    for copy in (third, first, second, fourth):
        cache.release(copy, (1,), 1)
    found = []
    for _ in range(4):
        cache.allocate(1)
        found.append(cache.match([1]))
    assert found == [first, second, fourth, []]


def test_more_than_is_free_is_refused_and_changes_nothing() -> None:
    cache = KvCache(4)
    blocks = filled(cache, 1, 2)
    assert cache.allocate(2) is None
    assert cache.free == 1
    cache.release(blocks, (1, 2), 2)
    assert cache.allocate(3) is not None


@settings(deadline=None, max_examples=examples(200))
@given(st.data())
def test_the_books_agree_and_what_is_found_was_stored_as_such(data: st.DataObject) -> None:
    cache = KvCache(data.draw(st.integers(2, 12)))
    requests: list[tuple[list[int], list[int], int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        leave = data.draw(st.booleans())
        if requests and leave:
            cache.release(*requests.pop(data.draw(st.integers(0, len(requests) - 1))))
        else:
            # Hashes are chained: content is shared from the start of a prompt on or not at all.
            family, length = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 5))
            hashes = [family * 10 + index for index in range(length)]
            hits = cache.match(hashes[: length - 1])
            if length - len(hits) + cache.unused(hits) <= cache.free:
                cache.share(hits)
                new = cache.allocate(length - len(hits))
                assert new is not None
                assert not set(new) & {block for blocks, _, _ in requests for block in blocks}
                full = data.draw(st.integers(len(hits), length))
                hashed = data.draw(st.integers(len(hits), full))
                blocks = hits + new
                cache.store(blocks[len(hits) : full], hashes[len(hits) : hashed])
                requests.append((blocks, hashes[:hashed], full))
        check_cache(cache, requests)
    for request in requests:
        cache.release(*request)
    check_cache(cache, [])
    assert cache.usage == 0.0
