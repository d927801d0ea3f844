from __future__ import annotations

import pickle

import pytest

from llmproxy.core.domain import Slo
from llmproxy.core.queueing.fairness import FairnessPolicy, accounts, policies
from llmproxy.core.queueing.fairness.accounts import Accounts
from tests.core.make import DEFAULTS, request
from tests.core.queueing.fairness.fairness_engine import arrive, first, offered

# --- all policies -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=sorted(policies.names()))
def policy(request: pytest.FixtureRequest) -> FairnessPolicy:
    return policies.get(request.param)(DEFAULTS)


def test_a_flow_is_offered_once_while_it_waits_and_not_at_all_after(policy: FairnessPolicy) -> None:
    arrive(policy, "a", "b", "a", "c", "b")
    policy.charge("a", 50_000.0)
    policy.charge("a", -20_000.0)
    policy.dispatched("b")
    policy.ended(request(flow="c"), False, 1.0)
    assert sorted(offered(policy, 1.0)) == ["a", "b", "c"]
    policy.emptied("b")
    policy.charge("b", 10.0)
    policy.dispatched("b")
    policy.ended(request(flow="b"), True, 2.0)
    assert sorted(offered(policy, 2.0)) == ["a", "c"]
    policy.emptied("a")
    policy.emptied("c")
    assert offered(policy, 3.0) == []


def test_looking_at_some_candidates_changes_nothing(policy: FairnessPolicy) -> None:
    arrive(policy, "a", "b", "c")
    policy.charge("b", 20_000.0)
    before = offered(policy)
    looking = policy.candidates(0.0)
    next(looking)
    next(looking)
    getattr(looking, "close", lambda: None)()
    assert offered(policy) == before == offered(policy)


def test_a_flow_alone_is_always_offered(policy: FairnessPolicy) -> None:
    arrive(policy, "alone")
    for number in range(200):
        assert offered(policy, float(number)) == ["alone"]
        policy.dispatched("alone")
        policy.charge("alone", 1e6)
        policy.ended(request(flow="alone"), False, float(number))


def test_a_flood_of_flow_names_leaves_nothing_that_grows(
    policy: FairnessPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "IDLE_FLOWS_MAX", 20)
    slo = Slo(ttft_s=0.5)
    steady = request(flow="steady", slo=slo)
    policy.entered(steady, 0.0)
    policy.backlogged("steady", steady)
    for number in range(3000):
        now = number / 100
        one = request(flow=f"passing-{number}", arrived_s=now, slo=slo)
        policy.entered(one, now)
        policy.backlogged(one.flow, one)
        first(policy, now)
        policy.emptied(one.flow)
        policy.dispatched(one.flow)
        policy.charge(one.flow, 30_000.0)
        policy.started(one, now)
        policy.ended(one, number % 2 == 0, now)
    assert offered(policy, 31.0) == ["steady"]
    assert len(pickle.dumps(policy)) < 20_000, "all that it holds, in bytes"


# --- fcfs -------------------------------------------------------------------------------------------------------------


def test_fcfs_offers_the_flow_whose_head_came_first() -> None:
    fcfs = policies.get("fcfs")(DEFAULTS)
    arrive(fcfs, "late", at_s=3.0)
    arrive(fcfs, "early", at_s=1.0)
    assert offered(fcfs) == ["early", "late"]
    fcfs.charge("early", 1e9)
    assert offered(fcfs) == ["early", "late"], "first come, first served ignores costs"
    arrive(fcfs, "early", at_s=5.0)
    assert offered(fcfs) == ["late", "early"]


# --- round robin ------------------------------------------------------------------------------------------------------


def test_round_robin_gives_each_flow_a_turn_whatever_it_costs() -> None:
    turns = policies.get("round_robin")(DEFAULTS)
    arrive(turns, "a", "b", "c")
    served = []
    for _ in range(7):
        flow = offered(turns)[0]
        served.append(flow)
        turns.charge(flow, 1e6 if flow == "a" else 1.0)
        turns.dispatched(flow)
    assert served == ["a", "b", "c", "a", "b", "c", "a"]


def test_round_robin_puts_a_flow_that_comes_back_behind_the_others() -> None:
    turns = policies.get("round_robin")(DEFAULTS)
    arrive(turns, "a", "b")
    turns.emptied("a")
    arrive(turns, "a")
    assert offered(turns) == ["b", "a"]


# --- accounts ---------------------------------------------------------------------------------------------------------


def test_the_oldest_idle_flow_is_forgotten_and_waiting_ones_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "IDLE_FLOWS_MAX", 2)
    gone: list[str] = []
    kept: Accounts[list[str]] = Accounts(list, gone.append)
    kept.set_waiting("waits").append("x")
    for flow in ("a", "b", "waits", "a", "c"):
        kept.open(flow)
    assert gone == ["b"]
    assert kept.get("waits") == ["x"]
    kept.set_idle("waits")
    assert gone == ["b", "a"]
    assert kept.set_waiting("waits") == ["x"], "one account, whether the flow waits or not"
    kept.drop("waits")
    assert kept.get("waits") is None


def test_a_process_that_goes_on_in_the_place_of_another_goes_on_in_its_order() -> None:
    before, after = policies.get("fair_share")(DEFAULTS), policies.get("fair_share")(DEFAULTS)
    arrive(before, "a", "b", "c")
    for flow, cost in (("a", 100.0), ("b", 40.0)):
        before.charge(flow, cost)
    arrive(after, "a", "b", "c")
    after.restore(before.balances())
    orders: list[list[str]] = []
    for policy in (before, after):
        orders.append([])
        for _ in range(12):
            orders[-1].append(next(iter(offered(policy, 0.0))))
            policy.charge(orders[-1][-1], 15.0)
    assert orders[0] == orders[1]
    assert orders[0].count("a") < orders[0].count("b") < orders[0].count("c")
