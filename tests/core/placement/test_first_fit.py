"""The requests of a band that are tried after a request without a place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest

from llmproxy.core.backends.view import View
from llmproxy.core.domain import (
    CRITICAL,
    DEFAULT,
    SHEDDABLE,
    Grant,
    Listing,
    ModelCard,
    NoCapacity,
    NoMatch,
    Placed,
    Request,
)
from llmproxy.core.placement.policy import NO_MATCH, NO_MATCH_FOR_MODEL, Placement
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.queue import Band, Queued
from tests.core.make import DEFAULTS, grants, listing, pools, reading, request

PARTS = {"a": slice(1), "b": slice(2), "c": slice(1, 2)}
"""The models of three backends. `b` has both."""
LATER = NoMatch(whole_model=False, later="a")


class Picky(Placement):
    """Gives some requests, by their ids, the same answer always, and all others the only backend."""

    def __init__(self, misses: dict[str, NoMatch]) -> None:
        self._misses = misses
        self.asked: list[str] = []

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        self.asked.append(request.id)
        return self._misses.get(request.id) or Placed(views[0].backend, 0.0, (), 1)


def granted(of: Picky, *asked: Request) -> list[str]:
    made = pools({"a": 100}, placements=lambda: of)
    for one in asked:
        made.submit(one, 0.0)
    return [grant.request.id for grant in grants(made)]


@pytest.mark.parametrize("flows", [("f", "f", "f"), ("f", "g", "h")])
@pytest.mark.parametrize(
    ("why", "went"),
    [(LATER, ["second", "third"]), (NO_MATCH, ["third"]), (NO_MATCH_FOR_MODEL, [])],
)
def test_request_that_waits_by_choice_hides_no_others_of_its_model(
    why: NoMatch, went: list[str], flows: tuple[str, str, str]
) -> None:
    # A request without a match for its length hides requests at least as long, and without any backend of its model,
    # all requests of the model.
    first, second = (request(id=name, flow=flow) for name, flow in zip(("first", "second"), flows, strict=False))
    third = request(id="third", flow=flows[2], prompt_tokens=5)
    assert sorted(granted(Picky({"first": why}), first, second, third)) == went


def test_waiting_request_is_tried_again_after_each_grant() -> None:
    placement = Picky({"first": LATER})
    granted(placement, request(id="first"), request(id="second"), request(id="third"))
    assert placement.asked.count("first") > 1


class Choosy(Picky):
    """Would have the first request wait while a backend that is full is among the views."""

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        if request.id == "first" and not all(view.has_room(ceiling) for view in views):
            return LATER
        return Placed(next(view.backend for view in views if view.has_room(ceiling)), 0.0, (), 1)


@pytest.mark.parametrize(("other_band", "went"), [(DEFAULT, "second"), (SHEDDABLE, "first"), (CRITICAL, "second")])
def test_request_does_not_wait_by_choice_above_a_waiting_band(other_band: int, went: str) -> None:
    pools = Pools(DEFAULTS, {"a": 1, "b": 2}, {}, lambda: Choosy({}))
    for name in "ab":
        pools.backends[name].answered(0.0)
        pools.listed(name, listing())
    pools.backends["a"].observe(reading(running=9))
    pools.backends["a"].observe(reading(0.1, running=9))
    pools.submit(request(id="first", band=DEFAULT), 0.2)
    pools.submit(request(id="second", band=other_band), 0.2)
    grants = [decision.request.id for decision in pools.decide(0.2) if isinstance(decision, Grant)]
    assert grants[0] == went


@pytest.mark.parametrize("bound", [False, True])
def test_flows_of_a_full_model_are_not_walked_while_another_model_has_room(
    bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a request that only one backend may serve is looked for."""
    cards = [ModelCard(name, None, 4096) for name in ("m", "n")]
    listings = {name: Listing(0.0, tuple(cards[part])) for name, part in PARTS.items()}
    of = pools(dict.fromkeys("abc", 1), listings=listings)
    for number in range(102):
        of.submit(request(pool=of.pool_of("a"), model="m", flow=f"f{number}"), 0.0)
    assert {grant.placed.backend for grant in grants(of)} == {"a", "b"}
    if bound:
        of.submit(request(pool=of.pool_of("a"), model="m", flow="bound", backend="a"), 0.0)
    lines, looked = Band.lines, list[object]()

    def counted(self: Band, now: float) -> Iterator[Iterable[Queued]]:
        for line in lines(self, now):
            looked.append(line)
            yield line

    monkeypatch.setattr(Band, "lines", counted)
    assert grants(of, 1.0) == []
    assert (len(looked) > 2) is bound
