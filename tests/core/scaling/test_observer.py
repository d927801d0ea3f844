"""The requests of a pool that count for scaling."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, KnownCapacity, Request, Usage, Verdict
from llmproxy.core.lease_events import Returned
from llmproxy.core.leases import LeaseRecord
from llmproxy.core.scaling.mix import HISTORY_SLOTS
from llmproxy.core.scaling.need import Need, ReplicaFacts
from llmproxy.core.scaling.observer import PoolScaling, Scaling
from tests.core.make import DEFAULTS, request

REPLICAS = [ReplicaFacts(up=True, limit=64, kv_tokens=200_000, kv_used=0.2)] * 2


class Pool:
    """A pool with one backend whose steps take 20 ms."""

    def __init__(self, **settings: Any) -> None:
        self.scaling = PoolScaling(replace(DEFAULTS.scaling, **settings))
        self.now = 0.0
        self.number = 0

    def lease(self, one: Request) -> LeaseRecord:
        self.number += 1
        backend: Any = SimpleNamespace(name="b")
        placed: Any = SimpleNamespace(cached_tokens=0)
        return LeaseRecord(self.number, one, placed, backend, self.now, False, False)

    def serve(self, count: int, every_s: float = 0.5, **given: Any) -> None:
        for _ in range(count):
            self.now += every_s
            one = request(prompt_tokens=1_000, **given)
            self.scaling.arrived(one, self.now, new=True, counts=True)
            lease = self.lease(one)
            self.scaling.booked(lease, self.now)
            self.scaling.returned(
                lease, Returned(lease.number, Verdict.SERVED, Usage(1_000, 100, 0)), self.now + 100 * 0.02
            )
            self.scaling.left(one)

    def need(self) -> Need:
        return self.scaling.need(None, REPLICAS, 1.0, self.now)


def test_lower_bands_ask_for_no_replicas() -> None:
    pool = Pool()
    pool.serve(100)
    before = pool.need()
    assert before.sure
    for _ in range(500):
        pool.scaling.arrived(request(band=SHEDDABLE, prompt_tokens=9_000), pool.now, new=True, counts=True)
    pool.scaling.booked(pool.lease(request(band=SHEDDABLE)), pool.now)
    after = pool.need()
    assert after.need == pytest.approx(before.need)
    assert (after.waiting, after.terms["seats"]) == (0, 0.0)
    alone = Pool(from_band=CRITICAL)
    alone.serve(100, band=DEFAULT)
    assert alone.need().need == 2.0, "nothing that counts has come, so what there is stays"
    assert not alone.need().sure


def test_requests_at_a_limit_and_retries_need_no_replicas() -> None:
    pool = Pool()
    pool.serve(100)
    before = pool.need()
    for _ in range(300):
        pool.scaling.arrived(request(prompt_tokens=1_000), pool.now, new=True, counts=False)
    assert pool.need().need == pytest.approx(before.need)
    again = request(prompt_tokens=1_000)
    pool.scaling.arrived(again, pool.now, new=False, counts=True)
    assert pool.need().waiting == 1
    assert pool.need().terms["work"] == pytest.approx(before.terms["work"])
    pool.scaling.left(again)
    assert pool.need().waiting == 0


def test_granted_and_ended_requests_wait_no_more() -> None:
    pool = Pool()
    granted, gone = request(), request()
    for one in (granted, gone):
        pool.scaling.arrived(one, 1.0, new=True, counts=True)
    assert pool.need().waiting == 2
    pool.scaling.booked(pool.lease(granted), 1.0)
    pool.scaling.left(gone)
    pool.scaling.left(gone)
    assert pool.need().waiting == 0


def test_cached_tokens_are_a_share_of_the_prompt_however_many_answers_it_has() -> None:
    """vLLM counts a prompt once for all its answers, and its cached tokens too."""
    pool = Pool()
    one = pool.lease(request(prompt_tokens=4_000, sequences=4))
    pool.scaling.booked(one, 0.0)
    pool.scaling.returned(one, Returned(one.number, Verdict.SERVED, Usage(4_000, 400, 3_000)), 1.0)
    (learned,) = pool.scaling.mix.sizes.values()
    assert learned.cached_share == 0.75


@pytest.mark.parametrize("stream", [True, False])
def test_step_time_is_learned_from_every_kind_of_answer(stream: bool) -> None:
    pool = Pool()
    pool.serve(200, stream=stream)
    line = pool.scaling.curve.line
    assert line is not None
    # Two seconds of each half second overlap: about four at once.
    assert line.at(4.0) == pytest.approx(0.02, rel=0.25)


def test_a_backend_that_is_gone_is_forgotten_and_its_leases_end_quietly() -> None:
    pool = Pool()
    one = pool.lease(request(stream=True))
    pool.scaling.booked(one, 0.0)
    pool.scaling.process_gone("b")
    pool.scaling.returned(one, Returned(one.number, Verdict.SERVED, Usage(10, 500)), 9.0)
    assert pool.scaling.curve.seen == 0
    assert pool.need().waiting == 0


def test_an_answer_of_an_old_process_is_not_counted_on_the_new_one() -> None:
    pool = Pool()
    old, new = pool.lease(request(stream=True)), pool.lease(request(stream=True))
    pool.scaling.booked(old, 0.1)
    pool.scaling.process_gone("b")
    pool.scaling.booked(new, 1.0)
    pool.scaling.returned(old, Returned(old.number, Verdict.SERVED, Usage(10, 500)), 2.0)
    pool.scaling.returned(new, Returned(new.number, Verdict.SERVED, Usage(10, 100)), 3.0)
    line = pool.scaling.curve.line
    assert line is not None
    assert line.at(1.0) == pytest.approx(0.02, rel=0.01)


def test_memory_does_not_grow_with_time() -> None:
    pool = Pool()
    for day in range(7):
        pool.now = day * 86_400.0
        pool.serve(300, every_s=1.0)
    mix = pool.scaling.mix
    assert len(mix._slots) <= 2 * HISTORY_SLOTS + 1
    assert not pool.scaling.waiting
    assert not pool.scaling._begun


def test_paused_or_backward_clock_does_no_harm() -> None:
    pool = Pool()
    pool.serve(50, every_s=0.0)
    pool.now = -5.0
    pool.serve(50, every_s=0.0)
    assert pool.need().desired >= 1


def test_a_pool_without_any_request_becomes_idle() -> None:
    pool = PoolScaling(replace(DEFAULTS.scaling, min=0, idle_s=900.0))
    assert pool.need(None, [], 1.0, 50.0).desired == 0
    found = [pool.need(None, REPLICAS, 1.0, now) for now in (100.0, 999.0, 1_000.0)]
    assert [(one.desired, one.reason) for one in found] == [(2, "unknown"), (2, "unknown"), (0, "idle")]


def test_named_pools_are_there_before_and_after_their_replicas() -> None:
    scaling = Scaling(replace(DEFAULTS.scaling, pools=("a",), min=0))
    assert set(scaling.pools) == {"a"}
    scaling.pool("b")
    scaling.retain(())
    assert set(scaling.pools) == {"a"}
    scaling.count_on_hold("a", 1, 5.0)
    scaling.count_on_hold("c", 1, 5.0)
    need = scaling.pools["a"].need(None, [], 1.0, 6.0)
    assert (need.desired, need.reason, set(scaling.pools)) == (1, "queue", {"a"})
    scaling.count_on_hold("a", -1, 7.0)
    assert scaling.pools["a"].need(None, [], 1.0, 1_000.0).desired == 0
    scaling.reconfigure(replace(DEFAULTS.scaling, pools=("d",)))
    scaling.retain(())
    assert set(scaling.pools) == {"d"}


def test_restored_capacity_counts_after_some_arrivals() -> None:
    before = Pool()
    before.serve(200)
    known = before.scaling.known_capacity
    assert known is not None
    after = Pool()
    after.scaling.restore(known, 0.0)
    assert not after.need().sure
    for number in range(10):
        after.now += 1.0
        after.scaling.arrived(request(prompt_tokens=1_000), after.now, new=True, counts=True)
        # Ten seconds of requests do not say how many there are.
        assert not after.need().sure, number
    for _ in range(30):
        after.now += 0.5
        after.scaling.arrived(request(prompt_tokens=1_000), after.now, new=True, counts=True)
    after.now += 10.0
    capacity, earlier = after.need().capacity, before.need().capacity
    assert after.need().sure
    assert capacity is not None
    assert earlier is not None
    assert capacity.request_s == pytest.approx(earlier.request_s, rel=0.05)


def test_only_a_later_capacity_of_another_process_replaces_the_own_one() -> None:
    """As in a cluster, where a leader leads again after another one."""
    pool, other = Pool(), Pool()
    pool.serve(100)
    other.serve(300)
    known = other.scaling.known_capacity
    assert known is not None
    sums = pool.scaling.curve.sums
    pool.scaling.restore(known, pool.now)
    assert pool.scaling.curve.sums == sums
    assert not pool.scaling.mix.restored
    pool.scaling.restore(known, other.now)
    line, learned = pool.scaling.curve.line, other.scaling.curve.line
    assert line is not None
    assert learned is not None
    assert line.at(4.0) == pytest.approx(learned.at(4.0), rel=1e-3)
    pool.now = other.now
    assert not pool.need().sure, "what arrived meanwhile is not known here"
    pool.serve(100)
    again = pool.scaling.known_capacity
    pool.scaling.restore(known, other.now)
    assert pool.scaling.known_capacity == again
    assert Pool().scaling.known_capacity is None


def test_the_clock_may_be_anything_when_a_process_begins() -> None:
    source = Pool()
    source.serve(200)
    known = source.scaling.known_capacity
    assert known is not None
    pool = Pool()
    pool.now = 1e6
    pool.scaling.restore(known, pool.now)
    weight = pool.scaling.curve.sums[0]
    pool.serve(10)
    assert pool.scaling.curve.sums[0] > weight


@pytest.mark.parametrize(
    "known",
    [
        KnownCapacity((1.0,) * 8, ((7, 40, 100.0, 0.5),)),
        KnownCapacity((float("nan"),) * 9, ((7, 40, 100.0, 0.5),)),
        KnownCapacity((0.0,) * 9, ((7, 40, 100.0, 0.5),)),
        KnownCapacity((-1.0,) * 9, ((7, 40, 100.0, 0.5),)),
        KnownCapacity((1.0,) * 9, ()),
        KnownCapacity((1.0,) * 9, ((7, 0, 100.0, 0.5),)),
        KnownCapacity((1.0,) * 9, ((7, 40, float("inf"), 0.5),)),
        KnownCapacity((1.0,) * 9, ((7, 40, 100.0, 1.5),)),
        KnownCapacity((1.0,) * 9, ((999, 40, 100.0, 0.5),)),
        # The mean of squares is never below the square of the mean.
        KnownCapacity((1.0,) * 9, ((7, 40, 100.0, 0.5),), (9_000.0,)),
        KnownCapacity((1.0,) * 9, ((7, 40, 100.0, 0.5),), (float("inf"),)),
    ],
)
def test_numbers_that_cannot_be_right_are_not_restored(known: KnownCapacity) -> None:
    pool = Pool()
    pool.scaling.restore(known, 0.0)
    assert not pool.scaling.mix.restored
    for _ in range(100):
        pool.now += 1.0
        pool.scaling.arrived(request(prompt_tokens=1_000), pool.now, new=True, counts=True)
    assert not pool.need().sure


def test_pool_begins_with_the_restored_capacity_of_its_name() -> None:
    source = Pool()
    source.serve(100)
    assert source.scaling.known_capacity is not None
    scaling = Scaling(replace(DEFAULTS.scaling, pools=("named",)))
    scaling.restore({"named": source.scaling.known_capacity, "later": source.scaling.known_capacity}, 0.0)
    assert [scaling.pool(name).mix.restored for name in ("named", "later", "other")] == [True, True, False]
    source.serve(1)
    assert scaling.known_capacities() == {}
