"""Backends with several names, some in common: each name is served by every backend that lists it, in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from llmproxy.core.domain import (
    CRITICAL,
    DEFAULT,
    SHEDDABLE,
    Drop,
    Grant,
    Listing,
    ModelCard,
    Outcome,
    Preempt,
    Verdict,
)
from llmproxy.core.lease_events import Returned, Started
from llmproxy.core.pools import Pools
from llmproxy.core.settings import Settings
from tests.core.machine.account import assert_nothing_left
from tests.core.make import DEFAULTS, grants, kill, names, only_drop, only_grant, pools, refusal, request, tight

TIGHT = tight(ceilings={DEFAULT: 1.0})


def lists(*served: str, adapters: tuple[str, ...] = (), context: int | None = None) -> Listing:
    cards = [ModelCard(name, None, context) for name in served]
    return Listing(0.0, (*cards, *(ModelCard(name, served[0], None) for name in adapters)))


def fleet(settings: Settings = TIGHT, places: int = 1, **listings: Listing) -> Pools:
    return pools(dict.fromkeys(listings, places), settings, listings=listings)


def ask(of: Pools, model: str, now: float = 0.0, **given: Any) -> None:
    """Submits a request for a model, resolved by the catalogue."""
    target = of.catalogue.resolve(model)
    facts = {"arrived_s": now, "deadline_s": now + 60.0, **given}
    of.submit(request(pool=target.pool, model=target.model, adapter=target.adapter, **facts), now)


def places(granted: list[Grant]) -> list[str]:
    return sorted(grant.placed.backend for grant in granted)


@pytest.mark.parametrize("first", [("x", "y"), ("y", "x")])
@pytest.mark.parametrize("second", [("y", "z"), ("z", "y"), ("y",), ("x", "y")])
def test_a_name_goes_to_every_backend_that_lists_it(first: tuple[str, ...], second: tuple[str, ...]) -> None:
    of = fleet(a=lists(*first), b=lists(*second))
    for _ in range(3):
        ask(of, "y")
    held = {grant.placed.backend: grant for grant in grants(of)}
    assert sorted(held) == ["a", "b"]
    kill(of, "b")
    assert grants(of, 1.0) == []
    of.apply(Returned(held["a"].lease, Verdict.SERVED), 2.0)
    assert places(grants(of, 2.0)) == ["a"]


def test_a_name_goes_to_no_backend_that_does_not_list_it() -> None:
    of = fleet(places=2, a=lists("x", "y"), b=lists("y"))
    for _ in range(4):
        ask(of, "x")
    assert places(grants(of)) == ["a", "a"]
    kill(of, "a")
    # "b" is up, but does not list the model.
    ask(of, "x", 1.0)
    assert {type(one) for one in of.decide(1.0)} != {Grant}
    assert only_outcomes(of, 32.0) == {Outcome.EXPIRED_NO_BACKENDS: 1}


def only_outcomes(of: Pools, now: float) -> Counter[Outcome]:
    return Counter(one.outcome for one in of.decide(now) if isinstance(one, Drop))


def test_when_the_only_backend_of_a_name_dies_its_other_names_are_served_on() -> None:
    of = fleet(
        replace(TIGHT, queue=replace(DEFAULTS.queue, no_backend_wait_s=0.0)), a=lists("new", "old"), b=lists("old")
    )
    kill(of, "a")
    ask(of, "old")
    assert places(grants(of)) == ["b"]
    assert "No backend of `new` is up" in refusal(ask, of, "new").message


def test_waiting_requests_learn_that_the_last_backend_of_their_name_is_gone() -> None:
    of = fleet(a=lists("new", "old"), b=lists("old"))
    for _ in range(2):
        ask(of, "new")
    only_grant(of, 0.0)
    of.listed("a", lists("old"))
    assert only_drop(of, 61.0).outcome is Outcome.EXPIRED_NO_BACKENDS


def test_a_higher_band_goes_first_across_names() -> None:
    of = fleet(replace(TIGHT, headroom_s=0.0), a=lists("x", "y"), b=lists("y"))
    ask(of, "x", band=SHEDDABLE)
    ask(of, "y", band=SHEDDABLE)
    held = {grant.placed.backend: grant for grant in grants(of)}
    ask(of, "y", 1.0, id="low", band=SHEDDABLE)
    ask(of, "x", 2.0, id="middle", band=DEFAULT)
    ask(of, "y", 3.0, id="high", band=CRITICAL)
    of.apply(Returned(held["b"].lease, Verdict.SERVED), 4.0)
    assert names(grants(of, 4.0)) == ["high"]
    of.apply(Returned(held["a"].lease, Verdict.SERVED), 5.0)
    granted = grants(of, 5.0)
    assert names(granted) == ["middle"], (
        "the only backend of its name, before a lower band that another backend serves too"
    )
    assert not any(one.why.inverted for one in granted)


@pytest.mark.parametrize(("others", "backend"), [(("x",), None), (("x", "y"), "b")])
def test_a_critical_request_preempts_where_it_can_be_served_though_another_backend_has_room(
    others: tuple[str, ...], backend: str | None
) -> None:
    of = fleet(a=lists(*others), b=lists("x", "y"))
    ask(of, "y", band=SHEDDABLE, stream=True, backend="b")
    low = only_grant(of, 0.0)
    ask(of, "y", 1.0, band=CRITICAL, backend=backend)
    (preempted,) = of.decide(1.0)
    assert isinstance(preempted, Preempt)
    assert preempted.lease == low.lease
    assert of.decide(1.0) == []
    of.apply(Returned(low.lease, Verdict.PREEMPTED), 1.1)
    assert places(grants(of, 1.1)) == ["b"]


@pytest.mark.parametrize("waiting", ["yxx", "xxy"])
def test_requests_are_preempted_only_for_names_that_can_use_the_place(waiting: str) -> None:
    settings = replace(TIGHT, headroom_s=0.0)
    of = fleet(settings, 3, a=lists("x"), b=lists("x", "y"), c=lists("y"))
    for model in "xxxxxx":
        ask(of, model)
    for _ in range(3):
        ask(of, "y", band=SHEDDABLE, stream=True)
    assert places(grants(of)) == [*"aaabbbccc"]
    for model in waiting:
        ask(of, model, 1.0, band=CRITICAL)
    (preempted,) = of.decide(1.0)
    assert isinstance(preempted, Preempt)
    assert preempted.backend == "c"
    assert of.decide(1.0) == []


def test_many_requests_of_a_full_model_do_not_hold_up_another_one() -> None:
    of = fleet(a=lists("x"), b=lists("x", "y"), c=lists("y"))
    for number in range(30):
        ask(of, "x", flow="f", id=f"x{number}", label=f"x{number}")
    ask(of, "y", flow="f", id="y", arrived_s=1.0)
    assert places(grants(of)) == ["a", "b", "c"]
    ask(of, "y", 2.0, flow="f", label="last")
    assert grants(of, 2.0) == []
    ahead = [one.ahead_in_flow for name in ("x2", "x5", "last") if (one := of.position(name, 2.0)) is not None]
    assert ahead == [0, 3, 28]


def test_failures_eject_no_backend_that_alone_serves_a_name() -> None:
    of = fleet(a=lists("x", "y"), b=lists("y"))
    for backend, model in (("a", "x"), ("b", "y")):
        for _ in range(3):
            ask(of, model, backend=backend)
            of.apply(Returned(only_grant(of, 0.0).lease, Verdict.FAILED), 0.0)
    assert [of.views(0.0)[name].available for name in "ab"] == [True, False]


# --- roll-outs and bridges --------------------------------------------------------------------------------------------


def test_a_roll_out_keeps_the_scheduler_and_all_that_waits() -> None:
    of = fleet(r0=lists("old"), r1=lists("old"), r2=lists("old"))
    scheduler = of.schedulers["old"]
    ended = Counter[str]()
    now = 0.0
    running: list[Grant] = []
    for served in (("new", "old"), ("new",)):
        for backend in range(3):
            now += 1.0
            model = "new" if "new" in of.catalogue.served and now > 3.0 else "old"
            for _ in range(4):
                ask(of, model, now)
            for grant in running:
                of.apply(Returned(grant.lease, Verdict.SERVED), now)
                ended[grant.request.model] += 1
            of.listed(f"r{backend}", lists(*served))
            running = grants(of, now)
            assert list(of.schedulers.values()) == [scheduler]
    assert scheduler.pool == "new"
    while running:
        for grant in running:
            of.apply(Returned(grant.lease, Verdict.SERVED), now)
            ended[grant.request.model] += 1
        running = grants(of, now)
    assert ended == {"old": 12, "new": 12}


def test_waiting_requests_of_two_pools_join_when_a_backend_joins_them() -> None:
    of = fleet(a=lists("x"), b=lists("y"))
    for model in "xy":
        ask(of, model)
        ask(of, model, id=f"{model} waits")
    held = grants(of)
    assert len(of.schedulers) == 2
    of.add_backend("c", 1)
    of.backends["c"].answered(1.0)
    of.listed("c", lists("y", "x"))
    assert of.next_wakeup(1.0) == 1.0
    first = only_grant(of, 1.0)
    assert (first.placed.backend, list(of.schedulers)) == ("c", ["y"])
    of.check(1.0)
    assert of.needs(1.0)["y"].waiting == 1
    for grant in (*held, first):
        of.apply(Started(grant.lease), 2.0)
        of.apply(Returned(grant.lease, Verdict.SERVED), 2.0)
    last = only_grant(of, 2.0)
    assert {first.request.id, last.request.id} == {"x waits", "y waits"}
    of.apply(Returned(last.lease, Verdict.SERVED), 3.0)
    assert_nothing_left(of, 3.0)


def test_waiting_requests_part_when_the_joining_backend_goes() -> None:
    of = fleet(a=lists("x"), b=lists("x", "y"), c=lists("y"))
    for model in "xxyyxy":
        ask(of, model)
    held = {grant.placed.backend: grant for grant in grants(of)}
    of.apply(Returned(held["b"].lease, Verdict.SERVED), 1.0)
    of.remove_backend("b")
    assert of.decide(1.0) == []
    assert sorted(of.schedulers) == ["x", "y"]
    of.check(1.0)
    for backend, model in (("a", "x"), ("c", "y")):
        of.apply(Returned(held[backend].lease, Verdict.SERVED), 2.0)
        grant = only_grant(of, 2.0)
        assert (grant.placed.backend, grant.request.model) == (backend, model)


def test_a_bridge_that_dies_parts_nothing_while_it_is_known() -> None:
    of = fleet(a=lists("x"), b=lists("x", "y"), c=lists("y"))
    kill(of, "b")
    assert list(of.schedulers) == ["x"]
    for model in "xy":
        ask(of, model)
    assert places(grants(of)) == ["a", "c"]


def test_shares_go_on_where_pools_are_joined() -> None:
    of = fleet(tight(ceilings={DEFAULT: 1.0}, fairness="fair_share"), a=lists("x"), b=lists("y"))
    for _ in range(5):
        ask(of, "y", flow="greedy", output_tokens=1000)
        of.apply(Returned(only_grant(of, 0.0).lease, Verdict.SERVED), 0.0)
    ask(of, "x")
    ask(of, "y")
    held = grants(of)
    for flow in ("greedy", "greedy", "modest", "modest"):
        ask(of, "y", 1.0, flow=flow)
    of.listed("a", lists("x", "y"))
    for grant in held:
        of.apply(Returned(grant.lease, Verdict.SERVED), 2.0)
    assert [grant.request.flow for grant in grants(of, 2.0)] == ["modest", "modest"]


def with_critical(of: Pools, model: str) -> Pools:
    """The same with the critical band in use."""
    ask(of, model, band=CRITICAL)
    of.apply(Returned(only_grant(of, 0.0).lease, Verdict.SERVED), 0.0)
    return of


def test_bands_stay_in_use_where_pools_are_joined() -> None:
    of = with_critical(fleet(places=2, a=lists("x"), b=lists("y")), "x")
    of.listed("a", lists("y", "x"))
    for _ in range(9):
        ask(of, "y", 1.0)
    assert len(grants(of, 1.0)) == 3
    ask(of, "y", 1.0, id="critical", band=CRITICAL)
    assert names(grants(of, 1.0)) == ["critical"]


def test_a_request_bound_to_a_backend_goes_with_it_into_another_pool() -> None:
    of = fleet(a=lists("x"), b=lists("y"), c=lists("y"))
    ask(of, "x")
    held = only_grant(of, 0.0)
    ask(of, "x", 1.0, backend="a", id="bound")
    of.listed("a", lists("y", "x"))
    assert of.decide(1.0) == []
    of.apply(Returned(held.lease, Verdict.SERVED), 2.0)
    assert names(grants(of, 2.0)) == ["bound"]


def test_a_bound_request_is_refused_when_its_backend_leaves_the_pool_and_nobody_serves_its_model() -> None:
    of = fleet(a=lists("x"), b=lists("x", adapters=("only",)))
    for number in range(2):
        ask(of, "only", backend="b", id=f"{number}")
    held = only_grant(of, 0.0)
    of.listed("b", lists("y"))
    assert only_drop(of, 1.0).outcome is Outcome.BAD_REQUEST
    of.check(1.0)
    ask(of, "x", 1.0)
    assert only_grant(of, 1.0).placed.backend == "a"
    of.apply(Returned(held.lease, Verdict.SERVED), 2.0)


def test_a_bound_request_is_refused_when_its_backend_leaves_the_pool_and_then_the_fleet() -> None:
    of = fleet(a=lists("x"), b=lists("x"))
    ask(of, "x", backend="b")
    of.listed("b", lists("y"))
    of.remove_backend("b")
    assert only_drop(of, 1.0).outcome is Outcome.BAD_REQUEST


# --- counts per pool --------------------------------------------------------------------------------------------------


def test_a_named_pool_that_has_joined_another_one_is_shown_once() -> None:
    settings = replace(TIGHT, scaling=replace(DEFAULTS.scaling, pools=("old", "older"), min=0))
    of = fleet(settings, a=lists("new", "old", "older"), b=lists("new"))
    assert sorted(of.needs(0.0)) == ["old"]
    of.listed("a", lists("new", "older"))
    assert sorted(of.needs(0.0)) == ["old", "older"]


def test_another_process_may_call_a_pool_by_another_of_its_names() -> None:
    of, other = (fleet(places=2, a=lists("new", "old"), b=lists("old")) for _ in range(2))
    ask(other, "new")
    placed = only_grant(other, 0.0).placed
    assert of.resume(request(pool="new", model="new"), placed, 0.0) is not None
    of.submit(request(pool="new", model="old"), 0.0)
    assert len(grants(of)) == 1
    of.check(0.0)


def test_an_engine_with_another_list_starts_a_pool_of_its_own() -> None:
    of = fleet(a=lists("x"), b=lists("x"))
    scheduler = of.schedulers["x"]
    of.listed("b", lists("y"))
    assert of.schedulers["x"] is scheduler
    assert of.schedulers["y"] is not scheduler


# --- any order --------------------------------------------------------------------------------------------------------

LISTS = (("x",), ("x", "y"), ("y", "x"), ("y",), ("y", "z"), ("z",), ("x", "z"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_idle_or_out_of_turn_whatever_is_listed_when(seed: int) -> None:
    rng = Random(seed)
    of = fleet(
        tight(queue=replace(DEFAULTS.queue, no_backend_wait_s=1e6)),
        places=2,
        **{n: lists(*rng.choice(LISTS)) for n in "abcd"},
    )
    waiting: dict[str, Grant | None] = {}
    running: list[Grant] = []
    asked = ended = 0
    now = 0.0

    def look() -> None:
        nonlocal ended
        for decision in of.decide(now):
            assert isinstance(decision, Grant), decision
            assert not decision.why.inverted
            assert decision.request.model in served(of, decision.placed.backend)
            del waiting[decision.request.id]
            running.append(decision)
        of.check(now)

    for _ in range(300):
        now += 0.1
        match rng.randrange(6):
            case 0:
                of.listed(rng.choice("abcd"), lists(*rng.choice(LISTS)))
            case 1 | 2 | 3:
                known = sorted(of.catalogue.served)
                asked += 1
                waiting[str(asked)] = None
                band = rng.choice((CRITICAL, DEFAULT, SHEDDABLE))
                ask(of, rng.choice(known), now, id=str(asked), band=band, flow=rng.choice("fg"), deadline_s=1e6)
            case _ if running:
                one = running.pop(rng.randrange(len(running)))
                of.apply(Started(one.lease), now)
                of.apply(Returned(one.lease, Verdict.SERVED), now)
                of.ended(one.request, None, now)
                ended += 1
        look()
    for name, last in zip("abcd", LISTS[1:3] + LISTS[4:6], strict=True):
        of.listed(name, lists(*last))
    while running or waiting:
        look()
        assert running, f"{sorted(waiting)} wait although nothing runs"
        for one in running:
            of.apply(Returned(one.lease, Verdict.SERVED), now)
            of.ended(one.request, None, now)
            ended += 1
        running.clear()
    assert ended == asked
    assert_nothing_left(of, now)


def served(of: Pools, backend: str) -> set[str]:
    found = of.backends[backend].listing
    return set() if found is None else {card.name for card in found.cards}
