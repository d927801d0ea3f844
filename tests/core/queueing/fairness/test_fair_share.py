from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmproxy.core.queueing.fairness import policies
from llmproxy.core.queueing.fairness.fair_share import FairShare
from llmproxy.core.settings import Settings
from tests.core.queueing.fairness.fairness_engine import Engine, arrive, offered, rivals, standing


def fair_share() -> FairShare:
    return FairShare(Settings())


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


def test_credit_does_not_pile_up_while_idle() -> None:
    share = fair_share()
    arrive(share, "busy", "other")
    share.charge("busy", 1000.0)
    share.charge("other", 900.0)
    arrive(share, "idle")
    assert share.counter("idle") == 900.0, "lifted to the least of those that wait"


def test_debt_is_not_shed_by_pausing() -> None:
    share = fair_share()
    arrive(share, "greedy", "other")
    share.charge("greedy", 1000.0)
    share.emptied("greedy")
    arrive(share, "greedy")
    assert share.counter("greedy") == 1000.0
    assert offered(share) == ["other", "greedy"]


def test_a_newcomer_to_an_empty_room_starts_level_with_the_last_flow() -> None:
    share = fair_share()
    arrive(share, "in debt", "last")
    share.charge("in debt", 5000.0)
    share.charge("last", 3000.0)
    share.emptied("in debt")
    share.emptied("last")
    arrive(share, "new", "in debt", "last")
    assert [share.counter(flow) for flow in ("new", "last", "in debt")] == [3000.0, 3000.0, 5000.0]


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

    def check(self) -> None:
        self._note_peaks()
        bound = self.peak_all + 1e-6
        counters = [standing(self.policy, flow)["counter"] for flow in self.backlogged]
        if counters:
            assert max(counters) - min(counters) <= bound, "counters"
        for low, high in self.pairs().values():
            assert high - low <= 2 * bound, "service in an interval"


WEIGHTS = st.lists(st.sampled_from((0.5, 1.0, 2.0, 5.0)), min_size=2, max_size=4)


@settings(max_examples=40, deadline=None)
@given(weights=WEIGHTS, slots=st.integers(1, 6), seed=st.integers(0, 1 << 32))
def test_backlogged_flows_never_differ_by_more_than_the_bounds(weights: list[float], slots: int, seed: int) -> None:
    engine = Bounded(fair_share(), {f"flow-{n}": weight for n, weight in enumerate(weights)}, slots)
    engine.churn(Random(seed), 300)


def test_the_bounds_hold_in_a_long_run_and_service_follows_weights() -> None:
    engine = Bounded(fair_share(), {"paid": 3.0, "free": 1.0}, slots=4)
    rivals(engine, {"paid": 3, "free": 30}, 1500)
    assert engine.service["free"] > 20 * engine.peak_all
    assert engine.service["paid"] == pytest.approx(engine.service["free"], abs=2 * engine.peak_all)


@pytest.mark.parametrize("unfair", ["fcfs", "round_robin"])
def test_without_fairness_the_same_run_breaks_the_bound(unfair: str) -> None:
    engine = Engine(policies.get(unfair)(Settings()), {"paid": 3.0, "free": 1.0}, slots=4)
    rivals(engine, {"paid": 3, "free": 30}, 1500)
    assert abs(engine.service["paid"] - engine.service["free"]) > 10 * engine.peak_all


def test_the_bound_of_the_counters_is_reached() -> None:
    engine = Bounded(fair_share(), {"a": 1.0, "b": 1.0}, slots=4)
    for _ in range(5):
        engine.arrive("a", 0, 0, 50)
    engine.arrive("b", 0, 0, 50)
    for job in engine.running:
        engine.stream(job, 50)
    assert engine.policy.standing("a") == (("counter", engine.peak_all),)
    assert engine.policy.standing("b") == (("counter", 0.0),)


def test_a_flow_that_pauses_does_not_take_over_when_it_is_back() -> None:
    engine = Bounded(fair_share(), {"steady": 1.0, "returning": 1.0}, slots=4)
    rivals(engine, {"steady": 5, "returning": 0}, 500)
    before = engine.service["steady"]
    rivals(engine, {"steady": 5, "returning": 5}, 500)
    assert engine.service["returning"] == pytest.approx(engine.service["steady"] - before, abs=2 * engine.peak_all)
