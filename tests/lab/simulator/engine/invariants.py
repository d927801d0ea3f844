"""Checks of an engine's state: recounts must agree with the incremental counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from llmproxy.lab.simulator.engine.engine import Engine
from llmproxy.lab.simulator.engine.kv_cache import KvCache


def check_engine(engine: Engine) -> None:
    """Raise AssertionError unless all state agrees with a recount."""
    live, running = engine._live.values(), engine._running.values()
    lines = engine._waiting.fetched, *engine._waiting._lines.values()
    waiting = [sequence for line in lines for sequence in line.values()]
    beside = [*engine._abandoned.values(), *engine.kv.kept.values()]
    check_cache(engine._cache, [(one.blocks, one.request.hashes, one.stored) for one in [*live, *beside]])
    for line in engine._waiting._lines.values():
        orders = [sequence.order for sequence in line.values()]
        assert orders, "an empty line was kept"
        assert orders == sorted(orders), "a line is out of order"
    fetching = engine._fetching.values()
    assert len(waiting) + len(fetching) + len(running) == len(live), "a request is in no list or in two"
    fetched = engine._waiting.fetched.values()
    assert all(bool(one.blocks) == (one in fetched) for one in waiting), "a waiting request holds blocks"
    assert engine._waiting.to_fetch == sum(one.fetch for one in waiting), "those that need KV are miscounted"
    planned = engine._ahead.fetches if engine._ahead is not None else {}
    assert planned.keys() <= engine._fetching.keys(), "a transfer is planned for nobody"
    assert len(running) <= engine.max_num_seqs, "more run than max_num_seqs"
    if engine._prefilling is not None:
        assert next(reversed(running)) is engine._prefilling, "a request runs behind a cut prefill"
    assert not engine._ended, "an ended request was forgotten"
    first_due = [] if engine._ahead is None else [one for one in engine._ahead.ready if one in running]
    assert not any(one.last_step for one in [*waiting, *first_due]), "a request that does not decode has a last step"
    decodes, decoding = engine._decodes, [one for one in running if one.last_step]
    assert len(decodes) == len(decoding), "the number of decodes is wrong"
    assert len(decoding) + len(first_due) + (engine._prefilling is not None) == len(running), "somebody gets no token"
    assert decodes._marks == sum(sequence.mark for sequence in decoding), "the decode context is wrong"
    assert sum(map(len, decodes._entering)) == sum(map(len, decodes._ending.values())) == len(decoding)
    assert all(decodes._ending.values()), "an empty ending was kept"
    slots, adapters = engine._slots, Counter(one.request.adapter for one in running if one.request.adapter is not None)
    assert adapters == slots._users, "the adapters in the batch are miscounted"
    assert len(slots._users) <= slots._limit, "more adapters run than there are slots"
    assert len(slots._resident) <= slots._limit, "more adapters are resident than there are slots"
    assert set(slots._users) <= set(slots._resident) <= set(slots._host), "a running adapter is not resident"
    assert len(slots._host) <= slots._host_limit, "more adapters in host memory than fit"


def check_cache(cache: KvCache, held: Iterable[tuple[Sequence[int], Sequence[int], int]]) -> None:
    """Raise AssertionError unless the cache agrees with what requests hold, each given as to `KvCache.release`."""
    counted: Counter[int] = Counter()
    contents = dict(cache._freed)
    for blocks, hashes, full in held:
        counted.update(blocks)
        contents.update(zip(blocks[:full], hashes, strict=False))
    assert cache._holders == {block: count for block, count in counted.items() if count > 1}, "holders miscounted"
    assert cache._used == len(counted), "the used blocks are miscounted"
    everything = sorted([*counted, *cache._empty, *cache._freed])
    assert everything == list(range(1, cache._fresh)), "a block was lost, or is free and in use"
    assert cache._fresh <= cache.blocks, "a block outside the cache is in use"
    named = {block: block_hash for block_hash, block in cache._cached.items()}
    named |= {block: block_hash for block_hash, copies in cache._copies.items() for block in copies}
    assert named == {block: name for block, name in contents.items() if name is not None}, "a hash names wrong blocks"
    assert all(cache._copies.values()), "an empty list of copies was kept"
