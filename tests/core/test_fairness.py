from __future__ import annotations

from collections import Counter, deque

import pytest

from llmproxy.core import fairness
from llmproxy.core.domain import Grant, Usage, Verdict
from llmproxy.core.fairness import FairnessPolicy, FairShare, policies
from llmproxy.core.pools import Pools
from llmproxy.core.settings import Settings
from tests.core.make import pools, request


def order(policy: FairnessPolicy) -> list[str]:
    return list(policy.candidates())


def fair_share(**weights: float) -> FairShare:
    return FairShare(Settings(weights=weights))


def arrive(policy: FairnessPolicy, *flows: str, at_s: float = 0.0) -> None:
    for flow in flows:
        policy.backlogged(flow, request(flow=flow, arrived_s=at_s))


# --- all policies -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=sorted(policies.names()))
def policy(request: pytest.FixtureRequest) -> FairnessPolicy:
    return policies.get(request.param)(Settings())


def test_a_flow_is_offered_once_while_it_waits_and_not_at_all_after(policy: FairnessPolicy) -> None:
    arrive(policy, "a", "b", "a", "c", "b")
    policy.charge("a", 50.0)
    policy.charge("a", -20.0)
    policy.dispatched("b")
    assert sorted(order(policy)) == ["a", "b", "c"]
    policy.emptied("b")
    policy.charge("b", 10.0)
    policy.dispatched("b")
    assert sorted(order(policy)) == ["a", "c"]
    policy.emptied("a")
    policy.emptied("c")
    assert order(policy) == []


def test_looking_at_some_candidates_changes_nothing(policy: FairnessPolicy) -> None:
    arrive(policy, "a", "b", "c")
    before = order(policy)
    looking = policy.candidates()
    next(looking)
    next(looking)
    getattr(looking, "close", lambda: None)()
    assert order(policy) == before == order(policy)


# --- fcfs -------------------------------------------------------------------------------------------------------------


def test_fcfs_offers_the_flow_whose_head_came_first() -> None:
    fcfs = policies.get("fcfs")(Settings())
    arrive(fcfs, "late", at_s=3.0)
    arrive(fcfs, "early", at_s=1.0)
    assert order(fcfs) == ["early", "late"]
    fcfs.charge("early", 1e9)
    assert order(fcfs) == ["early", "late"], "what it costs is nothing to first come, first served"
    arrive(fcfs, "early", at_s=5.0)
    assert order(fcfs) == ["late", "early"]


# --- round robin ------------------------------------------------------------------------------------------------------


def test_round_robin_gives_each_flow_a_turn_whatever_it_costs() -> None:
    turns = policies.get("round_robin")(Settings())
    arrive(turns, "a", "b", "c")
    served = []
    for _ in range(7):
        flow = order(turns)[0]
        served.append(flow)
        turns.charge(flow, 1e6 if flow == "a" else 1.0)
        turns.dispatched(flow)
    assert served == ["a", "b", "c", "a", "b", "c", "a"]


def test_round_robin_puts_a_flow_that_comes_back_behind_the_others() -> None:
    turns = policies.get("round_robin")(Settings())
    arrive(turns, "a", "b")
    turns.emptied("a")
    arrive(turns, "a")
    assert order(turns) == ["b", "a"]


# --- fair share -------------------------------------------------------------------------------------------------------


def test_the_flow_that_got_least_goes_next() -> None:
    share = fair_share()
    arrive(share, "a", "b")
    share.charge("a", 100.0)
    assert order(share) == ["b", "a"]
    share.charge("b", 300.0)
    assert order(share) == ["a", "b"]
    share.charge("b", -250.0)
    assert order(share) == ["b", "a"], "an estimate that was too high is given back"


def test_weights_divide_what_is_charged() -> None:
    share = fair_share(heavy=4.0)
    arrive(share, "heavy", "light")
    served: Counter[str] = Counter()
    for _ in range(500):
        flow = order(share)[0]
        served[flow] += 1
        share.charge(flow, 10.0)
    assert served["heavy"] == pytest.approx(400, abs=2)


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
    assert order(share) == ["other", "greedy"]


def test_with_nobody_waiting_a_newcomer_starts_level_with_the_last_one_served() -> None:
    share = fair_share()
    arrive(share, "busy")
    share.charge("busy", 5000.0)
    share.emptied("busy")
    arrive(share, "new")
    arrive(share, "busy")
    assert share.counter("new") == share.counter("busy") == 5000.0


def test_a_charge_that_comes_while_a_flow_is_idle_counts_when_it_is_back() -> None:
    share = fair_share()
    arrive(share, "a", "b")
    share.emptied("a")
    share.charge("a", 70.0)
    arrive(share, "a")
    assert order(share) == ["b", "a"]


def test_accounts_of_idle_flows_are_bounded_and_waiting_flows_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "IDLE_FLOWS_MAX", 10)
    share = fair_share()
    arrive(share, "waits")
    share.charge("waits", 42.0)
    for number in range(500):
        arrive(share, f"passing-{number}")
        share.charge(f"passing-{number}", 1.0)
        share.emptied(f"passing-{number}")
    assert len(share._counters) <= 11
    assert share.counter("waits") == 42.0
    assert order(share) == ["waits"]
    assert len(share._flows._heap) <= 64 + 4 * 2


# --- fair share in a scheduler: the bounds of virtual token counters --------------------------------------------------

SLOTS = 8
PROMPT, LONGEST = 100, 400


class Rivals:
    """Flows that keep one server busy; each answer is served in turn, and true lengths differ from the estimates."""

    def __init__(self, settings: Settings, flows: dict[str, int]) -> None:
        self.pools: Pools = pools({"a": SLOTS}, settings)
        self.now = 0.0
        self.flows = flows
        self.running: deque[Grant] = deque()
        self.service: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self.serial = 0
        self.waiting: Counter[str] = Counter()

    def keep_waiting(self) -> None:
        """Fill each flow up to its own depth: the one that sends ten times as much always has ten times as many."""
        for flow, depth in self.flows.items():
            while self.waiting[flow] < depth:
                self.serial += 1
                one = request(flow=flow, arrived_s=self.now, deadline_s=1e9, prompt_tokens=PROMPT, output_tokens=150)
                self.pools.submit(one, self.now)
                self.waiting[flow] += 1

    def step(self) -> None:
        self.now += 1.0
        self.keep_waiting()
        for decision in self.pools.decide(self.now):
            assert isinstance(decision, Grant)
            self.waiting[decision.request.flow] -= 1
            self.running.append(decision)
        done = self.running.popleft()
        output = (done.lease * 7919) % (LONGEST + 1)
        flow = done.request.flow
        self.service[flow] += PROMPT + 2 * output
        self.served[flow] += 1
        self.pools.progress(done, output // 2)
        self.pools.finish(done, Verdict.SERVED, self.now, Usage(PROMPT, output))
        self.pools.check()


# One request costs at most w_p L_in + w_q L_out; what is dispatched and unfinished is at most SLOTS (+ look-ahead) of
# them, which takes the place of the batch's tokens in the paper's bound |W_f - W_g| <= 2 max(w_p L_in, w_q M).
BOUND = 2 * (SLOTS + 2) * (PROMPT + 2 * LONGEST)


def test_two_backlogged_flows_differ_by_no_more_than_the_bound_at_any_time() -> None:
    rivals = Rivals(Settings(fairness="fair_share"), {"modest": 2, "greedy": 20})
    widest = 0
    for _ in range(2000):
        rivals.step()
        widest = max(widest, abs(rivals.service["modest"] - rivals.service["greedy"]))
    assert widest <= BOUND
    assert sum(rivals.service.values()) > 20 * BOUND, "the run is long enough for the bound to mean something"
    assert min(rivals.served.values()) > 900


def test_without_fairness_the_same_run_breaks_the_bound() -> None:
    rivals = Rivals(Settings(fairness="fcfs"), {"modest": 2, "greedy": 20})
    for _ in range(2000):
        rivals.step()
    assert rivals.service["greedy"] - rivals.service["modest"] > 10 * BOUND


def test_weighted_flows_share_by_weight_within_the_bound() -> None:
    rivals = Rivals(Settings(fairness="fair_share", weights={"paid": 3.0}), {"paid": 10, "free": 10})
    for _ in range(3000):
        rivals.step()
        assert abs(rivals.service["paid"] / 3.0 - rivals.service["free"]) <= BOUND
    assert rivals.service["paid"] == pytest.approx(3 * rivals.service["free"], rel=0.05)


def test_a_flow_that_pauses_does_not_take_over_when_it_is_back() -> None:
    rivals = Rivals(Settings(fairness="fair_share"), {"steady": 5})
    for _ in range(1000):
        rivals.step()
    before = rivals.service["steady"]
    rivals.flows = {"steady": 5, "returning": 5}
    for _ in range(1000):
        rivals.step()
        gained = rivals.service["steady"] - before
        assert abs(gained - rivals.service["returning"]) <= BOUND


# --- what a flow is charged -------------------------------------------------------------------------------------------


def account(of: Pools, flow: str = "flow", band: int = 0) -> float:
    policy = of._schedulers["base"]._bands[band].fairness
    assert isinstance(policy, FairShare)
    return policy.counter(flow)


def granted(of: Pools, now: float = 0.0) -> Grant:
    of.submit(request(prompt_tokens=100, output_tokens=50), now)
    (grant,) = of.decide(now)
    assert isinstance(grant, Grant)
    return grant


def test_the_estimate_is_charged_at_dispatch_and_trued_up_at_the_end() -> None:
    one = pools({"a": 4})
    grant = granted(one)
    assert account(one) == 100 + 2 * 50
    one.finish(grant, Verdict.SERVED, 1.0, Usage(80, 10))
    assert account(one) == 80 + 2 * 10


def test_an_answer_longer_than_estimated_is_charged_while_it_streams() -> None:
    one = pools({"a": 4})
    grant = granted(one)
    one.progress(grant, 20)
    assert account(one) == 200, "still within the estimate"
    one.progress(grant, 500)
    assert account(one) == 100 + 2 * 500
    one.finish(grant, Verdict.SERVED, 1.0, Usage(100, 700))
    assert account(one) == 100 + 2 * 700


def test_work_that_a_client_aborts_is_charged_for_what_was_done() -> None:
    one = pools({"a": 4})
    one.finish(granted(one), Verdict.CLIENT_GONE, 1.0, Usage(100, 30))
    assert account(one) == 160


@pytest.mark.parametrize("verdict", [Verdict.CONNECT_FAILED, Verdict.FAILED, Verdict.BUSY, Verdict.LOST])
def test_an_attempt_that_gave_nothing_costs_nothing(verdict: Verdict) -> None:
    one = pools({"a": 4})
    one.finish(granted(one), verdict, 1.0)
    assert account(one) == 0


def test_an_answer_without_usage_costs_what_was_estimated() -> None:
    one = pools({"a": 4})
    one.finish(granted(one), Verdict.SERVED, 1.0)
    assert account(one) == 200
