from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmproxy.core.queueing.fairness import policies
from llmproxy.core.queueing.fairness.locality_fair_share import LocalityFairShare
from llmproxy.core.settings import Settings
from tests.core.queueing.fairness.fairness_engine import Engine, arrive, first, hot, offered, rivals, standing
from tests.sizes import examples


def locality(quantum_tokens: float = 1000.0) -> LocalityFairShare:
    return LocalityFairShare(Settings(quantum_tokens=quantum_tokens))


def serve(policy: LocalityFairShare, cost: float) -> str:
    flow = first(policy)
    assert flow is not None
    policy.dispatched(flow)
    policy.charge(flow, cost)
    return flow


# --- the rules --------------------------------------------------------------------------------------------------------


def test_a_flow_goes_on_until_its_quantum_is_spent() -> None:
    policy = locality(1000.0)
    arrive(policy, "a", "b")
    assert [serve(policy, 400.0) for _ in range(8)] == ["a", "a", "a", "b", "b", "b", "b", "b"]
    assert standing(policy, "a") == {"deficit": 800.0, "rounds": 2.0}
    assert standing(policy, "b") == {"deficit": 0.0, "rounds": 2.0}
    assert first(policy) == "a", "both were refilled, and only one has spent it"


def test_among_flows_with_deficit_the_one_served_last_goes_first() -> None:
    policy = locality()
    arrive(policy, "a", "b", "c")
    policy.dispatched("b")
    policy.dispatched("c")
    assert offered(policy) == ["c", "b", "a"]
    policy.dispatched("b")
    assert offered(policy) == ["b", "c", "a"]
    policy.charge("b", 1000.0)
    assert offered(policy) == ["c", "a", "b"], "spent flows follow, for when no head of the others fits"


def test_a_charge_of_many_quanta_is_waited_for_in_as_many_rounds() -> None:
    policy = locality(100.0)
    arrive(policy, "large", "small")
    assert serve(policy, 1050.0) == "large"
    assert [serve(policy, 50.0) for _ in range(20)] == 20 * ["small"]
    assert standing(policy, "large") == {"deficit": -50.0, "rounds": 10.0}


def test_a_flow_alone_is_refilled_by_all_rounds_it_takes_at_once() -> None:
    policy = locality(1.0)
    arrive(policy, "alone")
    for _ in range(100):
        assert serve(policy, 1e9) == "alone"
    assert standing(policy, "alone")["rounds"] == pytest.approx(99e9, rel=1e-6)


def test_an_estimate_that_was_too_high_gives_a_flow_its_turn_back() -> None:
    policy = locality(100.0)
    arrive(policy, "a", "b")
    policy.dispatched("a")
    policy.charge("a", 150.0)
    assert first(policy) == "b"
    policy.charge("a", -100.0)
    assert offered(policy) == ["a", "b"]


def test_credit_does_not_pile_up_while_idle() -> None:
    policy = locality(100.0)
    arrive(policy, "idle", "busy")
    policy.emptied("idle")
    for _ in range(50):
        serve(policy, 100.0)
    assert standing(policy, "idle")["deficit"] == 100.0
    arrive(policy, "idle")
    assert standing(policy, "idle")["deficit"] == 100.0, "one quantum, after 50 rounds"


def test_debt_is_not_shed_by_pausing() -> None:
    policy = locality(100.0)
    arrive(policy, "greedy", "other")
    policy.dispatched("greedy")
    policy.charge("greedy", 250.0)
    policy.emptied("greedy")
    arrive(policy, "greedy")
    assert standing(policy, "greedy")["deficit"] == -150.0
    policy.emptied("greedy")
    serve(policy, 120.0)
    first(policy)
    arrive(policy, "greedy")
    assert standing(policy, "greedy") == {"deficit": -50.0, "rounds": 2.0}, (
        "worked off by the rounds, as if it had waited"
    )


def test_flow_that_pauses_keeps_the_rest_of_its_quantum() -> None:
    policy = locality(100.0)
    arrive(policy, "a", "b")
    serve(policy, 60.0)
    policy.emptied("a")
    arrive(policy, "a")
    assert standing(policy, "a")["deficit"] == 40.0
    assert first(policy) == "a", "its prefix is still the warmest"


# --- the bounds, as the docstring states them -------------------------------------------------------------------------


class Bounded(Engine):
    """Checks both bounds after every charge."""

    quantum = 1000.0

    def check(self) -> None:
        self._note_peaks()
        backlogged = self.backlogged
        deficits = {flow: standing(self.policy, flow)["deficit"] for flow in backlogged}
        for (one, other), (low, high) in self.pairs().items():
            bound = self.peak_of[one] + self.peak_of[other] + self.quantum + 1e-6
            assert abs(deficits[one] - deficits[other]) <= bound, "counters"
            assert high - low <= 2 * bound, "service in an interval"


WEIGHTS = st.lists(st.sampled_from((0.5, 1.0, 2.0, 5.0)), min_size=2, max_size=4)
QUANTA = st.sampled_from((1.0, 100.0, 3000.0, 20_000.0))


@settings(max_examples=examples(40), deadline=None)
@given(weights=WEIGHTS, slots=st.integers(1, 6), quantum=QUANTA, seed=st.integers(0, 1 << 32))
def test_backlogged_flows_never_differ_by_more_than_the_bounds(
    weights: list[float], slots: int, quantum: float, seed: int
) -> None:
    engine = Bounded(locality(quantum), {f"flow-{n}": weight for n, weight in enumerate(weights)}, slots)
    engine.quantum = quantum
    engine.churn(Random(seed), 300)


def test_a_quantum_trades_fairness_for_warm_prefixes() -> None:
    depths = {"a": 3, "b": 30}
    runs = {}
    for quantum in (1000.0, 30_000.0):
        engine = runs[quantum] = Bounded(locality(quantum), {"a": 1.0, "b": 1.0}, slots=2)
        engine.quantum = quantum
        rivals(engine, depths, 1500)
    level = Engine(policies.get("fair_share")(Settings()), {"a": 1.0, "b": 1.0}, slots=2)
    rivals(level, depths, 1500)
    assert hot(level.order) < 0.1
    assert 0.4 < hot(runs[1000.0].order) < 0.9
    assert hot(runs[30_000.0].order) > 0.95
    unfairness = max(high - low for low, high in runs[30_000.0].pairs().values())
    assert unfairness > 4 * runs[30_000.0].peak_all, "which fair share would not allow"
    assert runs[30_000.0].service["a"] > 100_000, "nobody starves"
