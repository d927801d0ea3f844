from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmproxy.core.queueing.fairness import accounts, policies
from llmproxy.core.queueing.fairness.fair_share import FairShare
from tests.core.make import DEFAULTS
from tests.core.queueing.fairness.fairness_engine import Engine, arrive, offered, rivals
from tests.sizes import examples


def fair_share() -> FairShare:
    return FairShare(DEFAULTS)


def counter(policy: FairShare, flow: str) -> float:
    return dict(policy.standing(flow))["counter"]


def serve(policy: FairShare, flow: str, requests: int, cost: float = 100.0) -> None:
    for _ in range(requests):
        policy.dispatched(flow)
        policy.charge(flow, cost)


# --- the rules --------------------------------------------------------------------------------------------------------


def test_the_flow_that_got_least_goes_next() -> None:
    share = fair_share()
    arrive(share, "a", "b")
    share.charge("a", 100.0)
    assert offered(share) == ["b", "a"]
    share.charge("b", 300.0)
    assert offered(share) == ["a", "b"]
    share.charge("b", -250.0)
    assert offered(share) == ["b", "a"], "an estimate that was too high is given back"


def test_a_flow_that_comes_back_has_the_credit_of_a_few_requests() -> None:
    share = fair_share()
    arrive(share, "busy", "other")
    serve(share, "busy", 10)
    serve(share, "other", 9)
    arrive(share, "idle")
    assert counter(share, "idle") == pytest.approx(900.0 - 400.0)
    assert offered(share) == ["idle", "other", "busy"]


def test_a_charge_counts_as_use_of_an_idle_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "IDLE_FLOWS_MAX", 2)
    share = fair_share()
    for flow in ("a", "b", "a", "c"):
        share.charge(flow, 1.0)
    assert share.balances().keys() == {"a", "c"}


def test_credit_does_not_pile_up_while_idle() -> None:
    share = fair_share()
    arrive(share, "idle", "busy")
    share.emptied("idle")
    serve(share, "busy", 1000)
    arrive(share, "idle")
    assert counter(share, "idle") == pytest.approx(100_000.0 - 400.0)


def test_credit_does_not_add_to_the_credit_of_others() -> None:
    share = fair_share()
    arrive(share, "busy")
    serve(share, "busy", 10)
    arrive(share, "first", "second", "third")
    assert counter(share, "first") == counter(share, "second") == counter(share, "third") == pytest.approx(600.0)


def test_credit_that_was_not_saved_is_not_given() -> None:
    share = fair_share()
    arrive(share, "busy", "brief")
    serve(share, "busy", 10)
    serve(share, "brief", 9)
    share.emptied("brief")
    arrive(share, "brief")
    assert counter(share, "brief") == 900.0


def test_credit_counts_from_the_highest_level() -> None:
    share = fair_share()
    arrive(share, "a", "b")
    for _ in range(10):
        serve(share, "a", 1)
        serve(share, "b", 1)
    serve(share, "a", 1)
    share.charge("b", -1000.0)
    arrive(share, "new")
    assert counter(share, "new") == 1000.0 - share.credit


def test_credit_follows_the_recent_cost_of_requests() -> None:
    share = fair_share()
    serve(share, "any", 20_000, 100.0)
    assert share.credit == pytest.approx(400.0)
    serve(share, "any", 20_000, 1.0)
    assert share.credit == pytest.approx(4.0, rel=0.01)
    share.charge("any", -1e6)
    assert share.credit == 0.0, "estimates that were far too high"


def test_debt_is_not_shed_by_pausing() -> None:
    share = fair_share()
    arrive(share, "greedy", "other")
    share.charge("greedy", 1000.0)
    share.emptied("greedy")
    arrive(share, "greedy")
    assert counter(share, "greedy") == 1000.0
    assert offered(share) == ["other", "greedy"]


def test_a_newcomer_to_an_empty_room_starts_as_beside_the_last_flow() -> None:
    share = fair_share()
    arrive(share, "in debt", "last")
    serve(share, "in debt", 50)
    serve(share, "last", 30)
    share.emptied("in debt")
    share.emptied("last")
    arrive(share, "new", "in debt", "last")
    counters = [counter(share, flow) for flow in ("new", "last", "in debt")]
    assert counters == [pytest.approx(2600.0), 3000.0, 5000.0]


def test_a_charge_of_an_idle_flow_counts_when_it_is_back() -> None:
    share = fair_share()
    arrive(share, "a", "b")
    share.emptied("a")
    share.charge("a", 70.0)
    arrive(share, "a")
    assert offered(share) == ["b", "a"]


# --- the bounds, as the docstring states them -------------------------------------------------------------------------


class Bounded(Engine):
    """Checks both bounds after every charge."""

    credit_most = 0.0

    def check(self) -> None:
        self._note_peaks()
        assert isinstance(self.policy, FairShare)
        self.credit_most = max(self.credit_most, self.policy.credit)
        counters = {flow: counter(self.policy, flow) for flow in self.backlogged}
        for (one, other), (low, high) in self.pairs().items():
            bound = self.bound(one, other) + 1e-6
            assert abs(counters[one] - counters[other]) <= bound, "counters"
            assert high - low <= 2 * bound, "service in an interval"

    def bound(self, one: str, other: str) -> float:
        return self.peak_of[one] + self.peak_of[other] + self.credit_most


WEIGHTS = st.lists(st.sampled_from((0.5, 1.0, 2.0, 5.0)), min_size=2, max_size=4)


@settings(max_examples=examples(40), deadline=None)
@given(weights=WEIGHTS, slots=st.integers(1, 6), seed=st.integers(0, 1 << 32))
def test_backlogged_flows_never_differ_by_more_than_the_bounds(weights: list[float], slots: int, seed: int) -> None:
    engine = Bounded(fair_share(), {f"flow-{n}": weight for n, weight in enumerate(weights)}, slots)
    engine.churn(Random(seed), 300)


def test_the_bounds_hold_in_a_long_run_and_service_follows_weights() -> None:
    engine = Bounded(fair_share(), {"paid": 3.0, "free": 1.0}, slots=4)
    rivals(engine, {"paid": 3, "free": 30}, 1500)
    bound = engine.bound("paid", "free")
    assert engine.service["free"] > 20 * bound
    assert engine.service["paid"] == pytest.approx(engine.service["free"], abs=2 * bound)


@pytest.mark.parametrize("unfair", ["fcfs", "round_robin"])
def test_without_fairness_the_same_run_breaks_the_bound(unfair: str) -> None:
    engine = Engine(policies.get(unfair)(DEFAULTS), {"paid": 3.0, "free": 1.0}, slots=4)
    rivals(engine, {"paid": 3, "free": 30}, 1500)
    assert abs(engine.service["paid"] - engine.service["free"]) > 10 * engine.peak_all


def test_the_bound_of_the_counters_is_reached() -> None:
    engine = Bounded(fair_share(), {"a": 1.0, "b": 1.0}, slots=1)
    for expected in (*(50 for _ in range(10)), 0, 50):
        engine.arrive("a", 0, expected, 50)
    for _ in range(10):
        engine.stream(engine.running[0], 50)
        engine.end(engine.running[0])
    assert isinstance(engine.policy, FairShare)
    credit = engine.policy.credit
    engine.arrive("b", 0, 50, 50)
    engine.stream(engine.running[0], 50)
    assert counter(engine.policy, "a") - counter(engine.policy, "b") == pytest.approx(engine.peak_of["a"] + credit)
    assert engine.peak_of["a"] == 100.0
    assert engine.peak_of["b"] == 0.0
    assert credit > 300.0


def test_a_burst_of_a_quiet_flow_goes_before_a_flow_that_fills_all_slots() -> None:
    engine = Bounded(fair_share(), {"steady": 1.0, "quiet": 1.0}, slots=4)
    rivals(engine, {"steady": 5, "quiet": 0}, 100)
    for _ in range(2):
        engine.arrive("quiet", 100, 200, 100)
    del engine.order[:]
    rivals(engine, {"steady": 5, "quiet": 0}, 3)
    assert engine.order == ["quiet", "quiet", "steady"]


def test_a_flow_that_pauses_does_not_take_over_when_it_is_back() -> None:
    engine = Bounded(fair_share(), {"steady": 1.0, "returning": 1.0}, slots=4)
    rivals(engine, {"steady": 5, "returning": 0}, 500)
    before = engine.service["steady"]
    rivals(engine, {"steady": 5, "returning": 5}, 500)
    since = engine.service["steady"] - before
    bound = engine.bound("steady", "returning")
    assert since > 5 * bound
    assert engine.service["returning"] == pytest.approx(since, abs=2 * bound)
