"""At most one engine of a pool tries a larger batch, and critical requests avoid it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from llmproxy.core.backends.batch_limit import BatchLimit, Exploration
from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, Grant, Preempt, Verdict
from llmproxy.core.lease_events import Returned
from llmproxy.core.pools import Pools
from tests.core.make import DEFAULTS, grants, pools, reading, request, submit

SETTINGS = replace(
    DEFAULTS, capacity=replace(DEFAULTS.capacity, initial_batch_limit=4, look_ahead=0), headroom_s=1_000.0
)


def unknown_pool(*names: str, placement: str = "cost") -> Pools:
    """Engines without configured limits, after a critical request has ended."""
    of = pools(dict.fromkeys(names), replace(SETTINGS, placement=placement))
    for name in names:
        of.backends[name].limit.forget()
        runs(of, name, 0.0, 8)
    of.submit(request(id="before", band=CRITICAL), 0.0)
    (grant,) = grants(of)
    of.apply(Returned(grant.lease, Verdict.SERVED), 0.0)
    return of


def flood(of: Pools, count: int, band: int, now: float) -> dict[str, list[Grant]]:
    """Submits `count` requests of a band; returns the grants by backend."""
    submit(of, *(request(id=f"{band}-{now}-{index}", band=band, arrived_s=now) for index in range(count)), now=now)
    return granted(of, now)


def granted(of: Pools, now: float) -> dict[str, list[Grant]]:
    went: dict[str, list[Grant]] = {}
    for one in of.decide(now):
        if isinstance(one, Grant):
            went.setdefault(one.placed.backend, []).append(one)
    return went


def runs(of: Pools, name: str, now: float, batch: int) -> None:
    """Reads an engine that runs its requests up to its batch, after their first bytes."""
    backend = of.backends[name]
    for lease in list(backend.bookings)[:batch]:
        if not backend.bookings[lease].started:
            backend.started(lease, now)
    load = backend.in_flight
    of.backends[name].observe(
        reading(now, running=min(load, batch), waiting=max(0, load - batch), kv_used=0.1, kv_tokens=10**6)
    )


def limit(of: Pools, name: str) -> int:
    return of.backends[name].limit.value


@pytest.mark.parametrize(("tried", "other"), [("a", "b"), ("b", "a")])
def test_only_one_engine_is_tried_at_a_time(tried: str, other: str) -> None:
    of = unknown_pool("a", "b")
    flood(of, 100, SHEDDABLE, 1.0)
    runs(of, tried, 1.2, 8)
    assert limit(of, tried) == 8
    granted(of, 1.2)
    runs(of, other, 1.25, 8)
    # The first has more than any engine was seen to run, so the limit of the other does not grow.
    assert of.backends[tried].in_flight > 4
    assert limit(of, other) == 4
    runs(of, tried, 1.4, 8)
    granted(of, 1.4)
    runs(of, other, 1.45, 8)
    assert limit(of, tried) > 8
    assert limit(of, other) == 7


def test_limit_that_one_engine_met_is_believed_of_the_others() -> None:
    of = unknown_pool("a", "b")
    flood(of, 100, SHEDDABLE, 1.0)
    now = 1.0
    for _ in range(10):
        now += 0.2
        runs(of, "a", now, 8)
        granted(of, now)
    assert limit(of, "a") == 8
    runs(of, "b", now, 64)
    assert limit(of, "b") == 8
    # It differs from the other engine, as its own readings show.
    for _ in range(40):
        now += 0.2
        granted(of, now)
        runs(of, "b", now, 64)
    assert limit(of, "b") > 8


def test_an_engine_on_its_own_waits_for_nobody() -> None:
    of = unknown_pool("a")
    flood(of, 100, SHEDDABLE, 1.0)
    for now in (1.2, 1.4, 1.6):
        runs(of, "a", now, 64)
        granted(of, now)
    assert limit(of, "a") >= 32


def test_critical_request_avoids_the_engine_that_is_being_tried() -> None:
    of = unknown_pool("a", "b", placement="least_request")
    flood(of, 100, SHEDDABLE, 1.0)
    runs(of, "a", 1.2, 8)
    went = granted(of, 1.2)["a"]
    for one in went[-2:]:
        of.apply(Returned(one.lease, Verdict.SERVED), 1.2)
    # It has a smaller load relative to its limit than the other, and more than was ever seen to run.
    tried, other = of.backends["a"].view(1.2), of.backends["b"].view(1.2)
    assert tried.saturation < other.saturation
    assert tried.doubtful
    assert [one.request.band for one in flood(of, 1, CRITICAL, 1.3)["b"]] == [CRITICAL]


def test_requests_beyond_an_engines_limit_are_preempted_in_any_band() -> None:
    of = unknown_pool("a")
    flood(of, 100, DEFAULT, 1.0)
    now = 1.0
    taken: list[Preempt] = []
    while not taken and now < 5.0:
        now += 0.2
        runs(of, "a", now, 8)
        taken += [one for one in of.decide(now) if isinstance(one, Preempt)]
    assert of.backends["a"].in_flight > 8
    assert 1 <= len(taken) <= 4
    assert {one.request.band for one in taken} == {DEFAULT}


@dataclass
class Engine:
    """A pool member that was seen to run eight sequences."""

    in_flight: int
    limit: BatchLimit = field(default_factory=lambda: ran(8))
    up: bool = True


def ran(batch: int) -> BatchLimit:
    limit = BatchLimit(None, 4)
    limit.observe(running=batch, waiting=0, load=batch)
    limit.value = batch
    return limit


def test_requests_sent_ahead_of_a_limit_are_no_trial() -> None:
    """Otherwise full engines would all wait for each other, because each has requests in its look-ahead."""
    pool = Exploration()
    pool.members = {"a": Engine(in_flight=8), "b": Engine(in_flight=9), "c": Engine(in_flight=9)}
    pool.refresh()
    assert pool.proven_load == 8
    assert pool.bound(pool.members["a"].limit) is None
    pool.members["b"].limit.value = 16
    assert pool.bound(pool.members["a"].limit) == 8


def test_a_reload_of_the_start_value_reaches_present_engines() -> None:
    of = unknown_pool("a", "b")
    for start in (64, 2):
        of.reconfigure(replace(SETTINGS, capacity=replace(SETTINGS.capacity, initial_batch_limit=start)), {}, 1.0)
        assert [limit(of, name) for name in "ab"] == [start, start]
        assert {view.limit for view in of.views(1.0).values()} == {start}
