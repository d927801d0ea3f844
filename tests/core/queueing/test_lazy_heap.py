from __future__ import annotations

import pickle

from llmproxy.core.queueing.lazy_heap import KeyedHeap, LazyHeap
from llmproxy.core.queueing.ordering import Rank
from llmproxy.core.queueing.queue import Queued, waits
from tests.core.make import request


def test_entries_that_left_do_not_pile_up() -> None:
    heap: LazyHeap[float, Queued] = LazyHeap(waits)
    for at in range(10_000):
        one = Queued(request(), Rank((0.0, 0.0)))
        heap.push(-float(at), one, 1)
        one.gone = True
    assert len(pickle.dumps(heap)) < 100 * len(pickle.dumps(one))


def test_looking_along_a_heap_takes_nothing_out() -> None:
    heap: LazyHeap[float, Queued] = LazyHeap(waits)
    lines = [Queued(request(arrived_s=float(at)), Rank((0.0, 0.0))) for at in (2, 0, 1)]
    for one in lines:
        heap.push(one.request.arrived_s, one, 3)
    lines[1].gone = True
    looking = iter(heap)
    assert next(looking) is lines[2]
    assert next(looking) is lines[0]
    looking.close()
    assert [one.request.arrived_s for one in heap] == [1.0, 2.0]


def test_names_come_by_their_newest_key_and_equals_as_set() -> None:
    flows = KeyedHeap()
    for flow, key in (("a", 3.0), ("b", 1.0), ("c", 3.0), ("b", 5.0), ("d", 3.0), ("e", 0.0)):
        flows.set(flow, key)
    del flows.current["e"]
    assert list(flows) == ["a", "c", "d", "b"]
    assert flows.least_first(0.0) == 3.0
    assert flows.take_below(3.0) == []
    assert flows.take_below(5.0) == ["a", "c", "d"]
    assert list(flows) == ["b"]
    assert "a" not in flows.current


def test_a_key_that_changes_often_leaves_no_old_ones() -> None:
    flows = KeyedHeap()
    for number in range(1000):
        flows.set("a", float(number))
    assert len(pickle.dumps(flows)) < 2_000
