"""How long new replicas took to serve."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from llmproxy.backends.start_times import LEAST_S, StartTimes
from llmproxy.core.domain import Listing, ModelCard, Trouble
from llmproxy.core.placement.policy import make
from llmproxy.core.pools import Pools
from llmproxy.core.scaling.observer import START_S, STARTS_KEPT
from tests.core.make import DEFAULTS

SETTINGS = DEFAULTS
CARD = ModelCard("sim", None, None)


class Fleet:
    def __init__(self, **scaling: Any) -> None:
        self.now = 0.0
        self.seen: list[tuple[str, float]] = []
        self.pools = Pools(SETTINGS, {}, {}, partial(make, SETTINGS.placement, Random(0)))
        self.pools.scaling.reconfigure(replace(DEFAULTS.scaling, **scaling))
        self.times = StartTimes(self.pools, lambda: self.now, lambda pool, took_s: self.seen.append((pool, took_s)))

    def starts(self, name: str, after_s: float, *, failing: bool = True) -> None:
        self.pools.add_backend(name, None)
        if failing:
            self.fails(name)
        self.now += after_s
        self.lists(name)

    def fails(self, name: str) -> None:
        self.times.troubled(name, Trouble.REFUSED, "")

    def lists(self, name: str) -> None:
        listing = Listing(self.now, (CARD,))
        self.pools.listed(name, listing)
        self.times.listed(name, listing)

    @property
    def start_s(self) -> float:
        return self.pools.scaling.pool("sim").start_s


def test_a_start_is_from_the_first_failed_poll_to_the_first_answer() -> None:
    fleet = Fleet()
    fleet.starts("a", 40.0)
    assert fleet.seen == [("sim", 40.0)]
    assert fleet.start_s == START_S
    fleet.starts("b", 60.0)
    fleet.starts("c", 50.0)
    assert fleet.start_s == 60.0
    for number in range(STARTS_KEPT):
        fleet.starts(f"later-{number}", 90.0)
    assert fleet.start_s == 90.0


def test_backend_that_answers_at_once_was_there_before() -> None:
    fleet = Fleet()
    fleet.starts("a", 40.0, failing=False)
    fleet.starts("b", LEAST_S / 2)
    assert fleet.seen == []


def test_a_backend_that_fails_later_does_not_start_again_until_it_was_removed() -> None:
    fleet = Fleet()
    fleet.starts("a", 40.0)
    fleet.fails("a")
    fleet.now += 500.0
    fleet.lists("a")
    assert len(fleet.seen) == 1
    fleet.times.removed("a")
    fleet.fails("a")
    fleet.now += 30.0
    fleet.lists("a")
    assert fleet.seen == [("sim", 40.0), ("sim", 30.0)]


def test_configured_time_counts() -> None:
    fleet = Fleet(start_s=300.0)
    for name in "abcd":
        fleet.starts(name, 40.0)
    assert fleet.start_s == 300.0
