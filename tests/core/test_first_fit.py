"""Who of a band is asked about after one that could not go, by why it could not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmproxy.core.domain import Grant, NoCapacity, NoMatch, Placed, Request
from llmproxy.core.fleet import View
from llmproxy.core.placement import NO_MATCH, NO_MATCH_FOR_MODEL, Unobserved
from llmproxy.core.pools import Pools
from llmproxy.core.settings import Settings
from tests.core.make import listing, request

LATER = NoMatch(whole_model=False, later=True)


class Picky(Unobserved):
    """Gives some requests, by their ids, the same answer always, and all others the only backend."""

    def __init__(self, misses: dict[str, NoMatch]) -> None:
        self._misses = misses
        self.asked: list[str] = []

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        del ceiling, excluded, now
        self.asked.append(request.id)
        return self._misses.get(request.id) or Placed(views[0].backend, 0.0, (), 1)


def granted(of: Picky, *asked: Request) -> list[str]:
    pools = Pools(Settings(), {"a": 100}, {}, lambda: of)
    pools.answered("a", 0.0)
    pools.listed("a", listing())
    for one in asked:
        pools.submit(one, 0.0)
    return [decision.request.id for decision in pools.decide(0.0) if isinstance(decision, Grant)]


@pytest.mark.parametrize("flows", [("f", "f", "f"), ("f", "g", "h")])
@pytest.mark.parametrize(
    ("why", "went"),
    [(LATER, ["second", "third"]), (NO_MATCH, ["third"]), (NO_MATCH_FOR_MODEL, [])],
)
def test_one_that_waits_for_a_full_backend_does_not_hide_others_of_its_model(
    why: NoMatch, went: list[str], flows: tuple[str, str, str]
) -> None:
    # What finds no match for its length hides those that are as long, and what finds none for its model all others.
    first, second = (request(id=name, flow=flow) for name, flow in zip(("first", "second"), flows, strict=False))
    third = request(id="third", flow=flows[2], prompt_tokens=5)
    assert sorted(granted(Picky({"first": why}), first, second, third)) == went


def test_one_that_waits_is_asked_about_again_after_each_grant() -> None:
    placement = Picky({"first": LATER})
    granted(placement, request(id="first"), request(id="second"), request(id="third"))
    assert placement.asked.count("first") > 1
