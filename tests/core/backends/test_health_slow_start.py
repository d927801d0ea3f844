"""Slow start: a recovered backend gets its share step by step, and delays no request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from llmproxy.core.domain import Grant, Trouble
from llmproxy.core.pools import Pools
from llmproxy.core.settings import HealthSettings, Settings
from tests.core.make import pools, request

SETTINGS = Settings(placement="least_request", ceilings={}, health=HealthSettings(slow_start_s=10.0))
SERIAL = count()


def pool(slots: Mapping[str, int]) -> Pools:
    of = pools(slots, replace(SETTINGS, capacity=replace(SETTINGS.capacity, look_ahead=0)))
    send(of, 0, 100.0)
    return of


def come_back(of: Pools, *names: str) -> None:
    for name in names:
        of.troubled(name, Trouble.UNHEALTHY)
    for name in names:
        of.backends[name].answered(100.0)


def send(of: Pools, requests: int, now: float) -> Counter[str]:
    for _ in range(requests):
        of.submit(request(id=f"r{next(SERIAL)}", arrived_s=now, deadline_s=now + 60.0), now)
    return Counter(d.placed.backend for d in of.decide(now) if isinstance(d, Grant))


def test_returning_backend_gets_its_share_and_not_all_requests() -> None:
    of = pool({"old": 20, "new": 20})
    come_back(of, "new")
    assert send(of, 10, 100.0) == {"new": 2, "old": 8}
    assert send(of, 6, 105.0) == {"new": 6}, "half of its limit, and the least load until then"
    assert send(of, 12, 106.5) == {"new": 4, "old": 8}
    assert send(of, 0, 110.0) == {}


def test_request_without_room_elsewhere_ignores_slow_start() -> None:
    of = pool({"old": 4, "new": 20})
    come_back(of, "new")
    assert send(of, 24, 100.0) == {"old": 4, "new": 20}


def test_backends_that_come_back_together_share_equally() -> None:
    of = pool({"a": 20, "b": 20})
    come_back(of, "a", "b")
    assert send(of, 20, 100.5) == {"a": 10, "b": 10}


def test_slow_start_causes_no_wakeup() -> None:
    of = pool({"old": 1, "new": 1})
    come_back(of, "new")
    assert send(of, 3, 100.0) == {"old": 1, "new": 1}
    assert of.next_wakeup(100.0) == 160.0, "the deadline of the third"
