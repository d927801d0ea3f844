"""Traces made from traces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from llmproxy.lab.traces import replicated, scaled, sliced
from llmproxy.lab.traces.arrival import Arrival, Trace, TraceError

LOOP = Arrival(
    4.0, 10, 5, (0, 3), session="loop", think_s=2.0, then=Arrival(7.0, 20, 5, (0, 3, 4), session="loop", think_s=2.0)
)
ARRIVALS = [Arrival(1.0, 10, 5, (0, 1)), LOOP, Arrival(4.0, 10, 5, (0, 1, 5), tenant="x", session="b")]
TRACE = Trace("t", lambda: iter(ARRIVALS), 8)


def read(trace: Trace) -> list[Arrival]:
    first = list(trace.arrivals())
    assert first == list(trace.arrivals())
    return first


def test_scaled_divides_times_and_keeps_think_times() -> None:
    trace = scaled(TRACE, 2.0)
    first, loop, last = read(trace)
    assert (first.at_s, loop.at_s, last.at_s) == (0.5, 2.0, 2.0)
    assert loop.then is not None
    assert (loop.think_s, loop.then.at_s) == (2.0, 5.0)
    assert (trace.name, trace.block_tokens) == ("t x2 rate", 8)
    assert replace(last, at_s=4.0) == ARRIVALS[2]


def test_sliced_counts_arrivals_and_begins_at_zero() -> None:
    assert [a.at_s for a in read(sliced(TRACE, 1))] == [0.0, 0.0]
    (only,) = read(sliced(TRACE, 1, 1))
    assert only.then is not None
    assert only.then.at_s == 3.0
    assert sliced(TRACE, 1, 2).name == "t [1-2]"
    with pytest.raises(TraceError, match="t: no requests left: the trace has 3 arrivals or fewer"):
        list(sliced(TRACE, 3).arrivals())


def test_replicated_keeps_one_copy_as_it_was() -> None:
    copies = read(replicated(TRACE, 3, seed=1))
    assert len(copies) == 9
    assert [a.at_s for a in copies] == sorted(a.at_s for a in copies)
    for original in ARRIVALS:
        assert any((a.at_s, a.prompt_tokens, a.tenant) == (original.at_s, 10, original.tenant) for a in copies)


def test_copies_share_nothing_but_the_shared_blocks() -> None:
    rng = Random(5)
    arrivals = [Arrival(float(n), 512, 1, tuple(rng.randrange(2**62) for _ in range(4))) for n in range(50)]
    arrivals += [Arrival(50.0, 512, 1, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9))]
    copies = read(replicated(Trace("t", lambda: iter(arrivals)), 7, seed=3, shared=2))
    by_id: dict[int, int] = {}
    for arrival in copies:
        for block in arrival.blocks:
            by_id[block] = by_id.get(block, 0) + 1
    assert {block: n for block, n in by_id.items() if n > 1} == {0: 7, 1: 7}
    assert len(by_id) == 7 * (50 * 4 + 8) + 2


def test_a_copy_keeps_its_own_prefixes_sessions_and_pace() -> None:
    copies = read(replicated(TRACE, 2, seed=1))
    by_session = {a.session: a for a in copies if a.session}
    assert sorted(by_session) == ["b/0", "b/1", "loop/0", "loop/1"]
    late = by_session["loop/1"]
    assert late.then is not None
    assert late.then.session == "loop/1"
    assert late.then.at_s - late.at_s == pytest.approx(3.0)
    assert late.then.blocks[:2] == late.blocks
    assert late.blocks[0] == 0
    assert late.blocks[1] != by_session["loop/0"].blocks[1]
    assert 0 < late.at_s - 4.0 <= 60


def test_replicated_depends_on_its_seed() -> None:
    assert read(replicated(TRACE, 4, seed=1)) != read(replicated(TRACE, 4, seed=2))


def test_replicated_holds_a_minute_of_an_endless_trace() -> None:
    read_s = 0.0

    def endless() -> Iterator[Arrival]:
        nonlocal read_s
        while True:
            read_s += 1.0
            yield Arrival(read_s, 10, 5)

    for arrival in islice(replicated(Trace("t", endless), 5, seed=1).arrivals(), 1_000):
        assert read_s - arrival.at_s <= 1.0


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_above_zero(scale: float) -> None:
    with pytest.raises(TraceError, match="rate scale is"):
        scaled(TRACE, scale)


def test_other_figures_that_make_no_sense() -> None:
    with pytest.raises(TraceError, match="0 copies; should be 1 to 1,000"):
        replicated(TRACE, 0, seed=0)
    with pytest.raises(TraceError, match="should be at least one"):
        sliced(TRACE, -1)
    with pytest.raises(TraceError, match="should be at least one"):
        sliced(TRACE, 0, 0)
