"""Slow start: a recovered backend gets its share step by step, and delays no request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import count

import pytest

from llmproxy.core.domain import Grant, Trouble
from llmproxy.core.pools import Pools
from tests.core.make import DEFAULTS, pools, request

SETTINGS = replace(DEFAULTS, placement="least_request", ceilings={}, health=replace(DEFAULTS.health, slow_start_s=10.0))
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


@pytest.mark.parametrize(
    ("slots", "back", "sent"),
    [
        pytest.param({"old": 4, "new": 20}, ["new"], {"old": 4, "new": 20}, id="no room elsewhere"),
        pytest.param({"a": 20, "b": 20}, ["a", "b"], {"a": 10, "b": 10}, id="all came back together"),
    ],
)
def test_slow_start_delays_no_request(slots: dict[str, int], back: list[str], sent: dict[str, int]) -> None:
    of = pool(slots)
    come_back(of, *back)
    assert send(of, sum(sent.values()), 100.0) == sent


def test_slow_start_causes_no_wakeup() -> None:
    of = pool({"old": 1, "new": 1})
    come_back(of, "new")
    assert send(of, 3, 100.0) == {"old": 1, "new": 1}
    assert of.next_wakeup(100.0) == 160.0, "the deadline of the third"
