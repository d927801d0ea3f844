"""The requests of a band that are tried after a request without a place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set

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
    Usage,
    Verdict,
)
from llmproxy.core.lease_events import Returned, Started
from llmproxy.core.placement.policy import NO_MATCH, NO_MATCH_FOR_MODEL, Placement
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.queue import Band, Queued
from llmproxy.core.scheduling_pass import LINES_A_STEP, LOOK_AGAIN, PASS_MAX
from tests.core.make import DEFAULTS, grants, kill, listing, pools, reading, request

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


class Waiting(Picky):
    """Has requests of the model `m` wait for backend `a` while that is up. Others get the first backend with room."""

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        self.asked.append(request.id)
        ready = [view.backend for view in self.ready(views, request.band, ceiling, now)]
        up = any(view.available and view.backend == "a" for view in views)
        if request.model == "m" and up and "a" not in ready:
            return LATER
        return Placed(ready[0], 0.0, (), 1)


def waiting_for_a(waiters: int, flows: int = 1) -> tuple[Pools, Waiting]:
    """Returns a pool whose backend `a` is full, with this many requests that wait for it."""
    placement = Waiting({})
    cards = {name: Listing(0.0, (ModelCard("m", None, 4096), ModelCard("n", None, 4096))) for name in "ab"}
    of = pools({"a": 1, "b": 100}, placements=lambda: placement, listings=cards)
    pool = of.pool_of("a")
    of.submit(request(id="running", pool=pool, model="m"), 0.0)
    assert [grant.placed.backend for grant in grants(of)] == ["a"]
    for number in range(waiters):
        of.submit(
            request(id=f"m{number}", pool=pool, model="m", flow=f"f{number % flows}", arrived_s=float(number)), 0.0
        )
    return of, placement


def test_many_requests_that_wait_for_a_backend_hide_no_later_request() -> None:
    of, _ = waiting_for_a(20)
    of.submit(request(id="n", pool=of.pool_of("a"), model="n", arrived_s=99.0), 0.0)
    assert [(grant.request.id, grant.placed.backend) for grant in grants(of)] == [("n", "b")]


@pytest.mark.parametrize("flows", [1, 10])
def test_few_of_the_requests_that_wait_for_a_backend_are_tried_again_in_a_pass(flows: int) -> None:
    """Each of them needs the prices of all backends."""
    of, placement = waiting_for_a(100, flows)
    assert grants(of) == grants(of) == [], "the first pass had its maximum of steps"
    placement.asked.clear()
    assert grants(of, 1.0) == []
    assert len(placement.asked) == PASS_MAX // LOOK_AGAIN
    of.apply(Returned(1, Verdict.SERVED, Usage(1, 1)), 2.0)
    assert [grant.request.id for grant in grants(of, 2.0)] == placement.asked[:1]


def test_requests_that_wait_for_a_backend_are_not_passed_over() -> None:
    of, placement = waiting_for_a(3)
    assert grants(of) == []
    placement.asked.clear()
    of.submit(request(id="n", pool=of.pool_of("a"), model="n", flow="f0", arrived_s=99.0), 1.0)
    assert [grant.why.passed_over for grant in grants(of, 1.0)] == [0]
    assert placement.asked[:4] == ["m0", "m1", "m2", "n"]


def test_pass_over_many_flows_that_wait_for_a_backend_is_short() -> None:
    """Each grant walks over all flows before its own."""
    flows = 5 * LINES_A_STEP
    of, _ = waiting_for_a(flows, flows)
    while grants(of) or of.next_wakeup(0.0) == 0.0:
        pass
    pool = of.pool_of("a")
    for number in range(30):
        of.submit(request(id=f"n{number}", pool=pool, model="n", flow=f"n{number}", arrived_s=1_000.0), 1.0)
    counts: list[int] = []
    while sum(counts) < 30:
        counts.append(len(grants(of, 1.0)))
        assert 0 < counts[-1] <= PASS_MAX // 5


def test_request_that_waits_for_a_backend_goes_elsewhere_when_that_is_down() -> None:
    of, _ = waiting_for_a(3)
    assert grants(of) == []
    kill(of, "a")
    assert [grant.placed.backend for grant in grants(of, 1.0)] == ["b", "b", "b"]


def test_request_that_leaves_is_not_waited_behind() -> None:
    of, _ = waiting_for_a(3)
    assert grants(of) == []
    of.cancel(request(id="m1", pool=of.pool_of("a"), model="m"))
    of.check(1.0)


def test_requests_with_a_hot_prefix_spill_to_other_backends() -> None:
    """Each waits for the backend that has cached the prefix only while that is quicker than to compute the prefix."""
    of, prefix = pools(dict.fromkeys("abc", 16), DEFAULTS), tuple(range(100))
    for number in range(16):
        of.submit(request(id=f"hot{number}", prefix=prefix, prefix_tokens=320.0, prompt_tokens=32_000), number / 10)
        for grant in grants(of, number / 10):
            of.apply(Started(grant.lease), number / 10 + 0.05)
    home = [name for name, backend in of.backends.items() if backend.own_in_flight]
    assert len(home) == 1
    for _ in range(100):
        of.submit(request(prefix=prefix, prefix_tokens=320.0, prompt_tokens=32_000, output_tokens=100), 2.0)
    spilled = [grant.placed.backend for _ in range(2) for grant in grants(of, 2.0)]
    assert set(spilled) == set("abc") - set(home)


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

    def counted(self: Band, now: float, *closed: Set[str]) -> Iterator[Iterable[Queued]]:
        for line in lines(self, now, *closed):
            looked.append(line)
            yield line

    monkeypatch.setattr(Band, "lines", counted)
    assert grants(of, 1.0) == []
    assert (len(looked) > 2) is bound
