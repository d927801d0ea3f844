"""Which waiting requests go to an external backend, and the money that they cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from typing import Any

import pytest

from llmproxy.core.domain import (
    CRITICAL,
    IDLE,
    SHEDDABLE,
    AdmissionKind,
    Grant,
    Outcome,
    Request,
    Trouble,
    Usage,
    Verdict,
)
from llmproxy.core.lease_events import Returned, Started
from llmproxy.core.overflow import LOOK_MAX
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.queue import Band, Queued
from llmproxy.core.settings import External, Settings, UsageLimit
from tests.core.make import (
    BASE,
    DEFAULTS,
    grants,
    kill,
    listing,
    names,
    only_drop,
    pools,
    refusal,
    request,
    submit,
    tight,
)

EXTERNAL = External(frozenset({BASE}), 1e6, 1e6, 10.0, 1_000.0, DEFAULTS.scaling.from_band)
"""A token costs 1, and so a request of `mine` is expected to cost 20."""


def mine(**given: Any) -> Request:
    return request(**{"overflows": True} | given)


def fleet(limit: int = 8, settings: Settings | None = None, **external: Any) -> Pools:
    """Returns the replica `a` with one slot, and the external backend `x`."""
    made = pools({"a": 1}, replace(settings or tight(), externals={"x": replace(EXTERNAL, **external)}))
    made.add_backend("x", limit)
    return made


def by_backend(found: list[Grant]) -> dict[str, list[str]]:
    return {name: names([one for one in found if one.placed.backend == name]) for name in ("a", "x")}


def test_it_is_used_after_the_wait_and_not_before() -> None:
    of = fleet()
    submit(of, mine(id="r1"), mine(id="r2"))
    (grant,) = grants(of)
    assert grant.placed.backend == "a"
    assert of.next_wakeup(1.0) == 10.0
    assert grants(of, 9.999) == []
    (grant,) = grants(of, 10.0)
    assert (grant.placed.backend, grant.placed.terms, grant.queued_ahead) == ("x", (("waited", 10.0),), 0)
    of.apply(Started(grant.lease), 11.0)
    of.apply(Returned(grant.lease, Verdict.SERVED, Usage(10, 5)), 12.0)
    of.check(12.0)
    assert of.money_left("x", 12.0) == 985.0


def test_it_is_used_at_once_while_no_replica_is_up_and_not_after() -> None:
    of = fleet(only_above_wait_s=float("inf"))
    kill(of, "a")
    submit(of, mine(id="r1"))
    assert by_backend(grants(of, 1.0)) == {"a": [], "x": ["r1"]}
    of.backends["a"].answered(2.0)
    submit(of, mine(id="r2"), mine(id="r3"), now=2.0)
    assert by_backend(grants(of, 2.0)) == {"a": ["r2"], "x": []}
    assert grants(of, 50.0) == []


@pytest.mark.parametrize("overflows", [True, False])
def test_a_pass_examines_a_bounded_number_of_requests(overflows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them may not go there."""
    of = fleet(only_above_wait_s=float("inf"))
    submit(of, *(request(flow=f"f{number}", overflows=overflows) for number in range(10 * LOOK_MAX)))
    assert len(grants(of)) == 1
    lines, looked = Band.lines, list[object]()

    def counted(self: Band, now: float, *closed: Set[str]) -> Iterator[Iterable[Queued]]:
        for line in lines(self, now, *closed):
            looked.append(line)
            yield line

    monkeypatch.setattr(Band, "lines", counted)
    assert grants(of, 1.0) == []
    assert len(looked) <= LOOK_MAX + 1, "the pass over the replicas looks at one line more"


def test_requests_are_not_refused_for_a_fleet_that_is_down() -> None:
    of = fleet(settings=tight(queue=replace(DEFAULTS.queue, no_backend_wait_s=0.0)))
    kill(of, "a")
    submit(of, mine(id="r1"))
    assert by_backend(grants(of, 1.0))["x"] == ["r1"]
    assert refusal(of.submit, request(), 1.0).outcome is Outcome.REJECTED_NO_BACKENDS
    # Its retry must not return to the endpoint that failed.
    assert (
        refusal(of.submit, mine(), 1.0, frozenset({"x"}), AdmissionKind.RETRY).outcome is Outcome.REJECTED_NO_BACKENDS
    )


@pytest.mark.parametrize(
    ("given", "goes"),
    [
        ({}, True),
        ({"band": CRITICAL}, True),
        ({"band": SHEDDABLE}, False),
        ({"band": IDLE}, False),
        ({"overflows": False}, False),
        ({"continued": True}, False),
        ({"backend": "a"}, False),
        ({"adapter": "lora"}, False),
        ({"avoid": "x"}, False),
        ({"sequences": 9}, False),
        ({"prompt_tokens": 991}, False),
    ],
)
def test_requests_that_may_go(given: dict[str, Any], goes: bool) -> None:
    of = fleet()
    submit(of, mine(id="r0"))
    assert len(grants(of)) == 1
    of.submit(mine(id="r1", model=BASE, **given), 0.0)
    assert names(grants(of, 20.0)) == (["r1"] if goes else [])


def test_a_lower_band_goes_if_it_is_allowed_and_higher_bands_go_first() -> None:
    of = fleet(limit=1, from_band=SHEDDABLE)
    submit(of, mine(id="r0"), now=0.0)
    grants(of)
    submit(of, mine(id="low", band=SHEDDABLE), mine(id="high", band=CRITICAL), now=0.0)
    (high,) = grants(of, 20.0)
    assert high.request.id == "high"
    of.apply(Returned(high.lease, Verdict.SERVED), 21.0)
    assert names(grants(of, 21.0)) == ["low"]


def test_a_usage_limit_holds_there_too() -> None:
    of = fleet(settings=tight(limits={"tenant:t": UsageLimit(in_flight=1)}))
    submit(of, *(mine(id=f"r{number}", limits=("tenant:t",)) for number in range(2)))
    assert len(grants(of)) == 1
    assert grants(of, 30.0) == []


def test_the_bound_of_the_day_holds_with_requests_in_flight_and_ends_at_midnight() -> None:
    of = fleet(max_per_day=50.0)
    kill(of, "a")
    of.days.begin("2026-11-28", 1_000.0, 0.0)
    submit(of, *(mine(id=f"r{number}", deadline_s=5_000.0) for number in range(4)))
    first, second = grants(of)
    assert of.money_left("x", 0.0) == 10.0
    of.apply(Returned(first.lease, Verdict.SERVED, Usage(10, 1)), 1.0)
    of.apply(Returned(second.lease, Verdict.FAILED, Usage(0, 0)), 1.0)
    # 11 are spent and 20 expected.
    assert names(grants(of, 1.0)) == ["r2"]
    assert grants(of, 2.0) == []
    assert of.money_left("x", 2.0) == 19.0
    assert of.money_left("x", 1_000.0) == 30.0


def test_an_answer_that_may_have_been_computed_costs_as_expected() -> None:
    of = fleet(max_per_day=50.0)
    kill(of, "a")
    of.days.begin("2026-11-28", 1_000.0, 0.0)
    submit(of, *(mine(id=f"r{number}", deadline_s=5_000.0) for number in range(2)))
    first, second = grants(of)
    of.apply(Returned(first.lease, Verdict.TIMED_OUT), 1.0)
    assert of.money_left("x", 1.0) == 10.0
    of.apply(Returned(second.lease, Verdict.CONNECT_FAILED), 1.0)
    assert of.money_left("x", 1.0) == 30.0


def test_cached_prompt_tokens_may_have_a_price_of_their_own() -> None:
    usage = Usage(10, 1, 4)
    assert EXTERNAL.cost(usage) == 11.0
    assert replace(EXTERNAL, price_per_million_cached=0.25e6).cost(usage) == 8.0
    assert replace(EXTERNAL, price_per_million_cached=0.0).cost(Usage(10, 1, 99)) == 1.0


def test_a_new_leader_counts_the_requests_that_run_there() -> None:
    of, new = fleet(limit=2, max_per_day=50.0), fleet(limit=2, max_per_day=50.0)
    for one in (of, new):
        kill(one, "a")
    submit(of, mine(id="r0"))
    (grant,) = grants(of)
    lease = new.resume(grant.request, grant.placed, 0.0)
    assert lease is not None
    assert new.money_left("x", 1.0) == 30.0
    submit(new, mine(id="r1"), mine(id="r2"))
    assert names(grants(new)) == ["r1"]
    new.apply(Returned(lease, Verdict.SERVED, Usage(10, 5)), 1.0)
    new.check(1.0)
    assert new.money_left("x", 1.0) == 15.0


@pytest.mark.parametrize("replicas", ["none", "refuse", "hang", "have other models"])
def test_a_model_that_no_replica_has_listed_is_served(replicas: str) -> None:
    of = pools({}, replace(tight(), externals={"x": EXTERNAL}))
    of.add_backend("x", 8)
    if replicas != "none":
        of.add_backend("a", 1)
        # The replica may be up.
        assert refusal(of.catalogue.resolve, BASE).outcome is Outcome.REJECTED_NO_BACKENDS
        assert of.catalogue.awaits(BASE)
    if replicas == "refuse":
        of.troubled("a", Trouble.REFUSED)
    elif replicas == "hang":
        of.timed_out("a", 1.0)
    elif replicas == "have other models":
        of.backends["a"].answered(0.0)
        of.listed("a", listing(base="other"))
    assert not of.catalogue.awaits(BASE)
    target = of.catalogue.resolve(BASE)
    assert (target.model, target.pool, target.adapter) == (BASE, BASE, None)
    submit(of, mine(id="r0"))
    (grant,) = grants(of)
    assert grant.placed.backend == "x"
    assert refusal(of.catalogue.resolve, "unknown").outcome in (Outcome.UNKNOWN_MODEL, Outcome.REJECTED_NO_BACKENDS)
    if replicas in ("refuse", "hang"):
        # It comes up.
        submit(of, mine(id="r1", overflows=False))
        of.backends["a"].answered(2.0)
        of.listed("a", listing())
        assert by_backend(grants(of, 2.0)) == {"a": ["r1"], "x": []}
    of.apply(Returned(grant.lease, Verdict.SERVED, Usage(10, 5)), 3.0)
    of.check(3.0)


def test_a_model_that_no_endpoint_has_any_more_is_unknown_again() -> None:
    of = pools({"a": 1}, replace(tight(), externals={"x": replace(EXTERNAL, models=frozenset({"only-there"}))}))
    of.add_backend("x", 8)
    assert of.catalogue.resolve("only-there").pool == "only-there"
    of.remove_backend("x")
    assert refusal(of.catalogue.resolve, "only-there").outcome is Outcome.UNKNOWN_MODEL


def test_a_request_whose_only_replica_failed_goes_out_at_once() -> None:
    of = fleet()
    submit(of, mine(id="r0"))
    (grant,) = grants(of)
    assert grant.placed.backend == "a"
    of.apply(Returned(grant.lease, Verdict.FAILED), 1.0)
    of.submit(grant.request, 1.0, frozenset({"a"}), AdmissionKind.RETRY)
    assert by_backend(grants(of, 1.0))["x"] == ["r0"]


def test_flows_take_turns() -> None:
    of = fleet()
    kill(of, "a")
    submit(of, *(mine(id=f"a{number}", flow="a") for number in range(20)), *(mine(id="b0", flow="b"),))
    assert "b0" in names(grants(of))[:3]


def test_a_failing_endpoint_is_ejected_and_a_busy_one_pauses() -> None:
    of = fleet()
    kill(of, "a")
    submit(of, mine(id="r0"))
    (grant,) = grants(of)
    of.apply(Returned(grant.lease, Verdict.CONNECT_FAILED), 1.0)
    submit(of, mine(id="r1"), now=1.0)
    assert grants(of, 1.0) == []
    due_s = of.next_wakeup(1.0)
    assert due_s is not None
    (probe,) = grants(of, due_s)
    assert probe.why.probe
    of.apply(Returned(probe.lease, Verdict.BUSY), due_s)
    assert of.backends["x"].limit.value == 8


def test_it_belongs_to_no_pool_and_can_be_removed() -> None:
    of = fleet()
    assert of.pool_of("x") is None
    assert of.catalogue.complete
    of.remove_backend("x")
    assert "x" not in of.backends
    submit(of, mine(id="r0"), mine(id="r1"))
    assert by_backend(grants(of, 0.0)) == {"a": ["r0"], "x": []}
    assert only_drop(of, 60.0).request.id == "r1"
