"""Plans of policies by name. The error for an unknown name lists the known names."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from llmproxy.config import PLACEMENT_PRESETS, Config
from llmproxy.core.settings import Splitting
from llmproxy.lab.baselines import baseline_named, baselines
from llmproxy.lab.policies.by_name import is_own, names, own_name, plan_named
from tests.lab.baselines.baseline_world import NAMES
from tests.lab.small import records_of, setup, traffic

LATE = {f"late_{name}" for name in ("round_robin", "least_request", "session")}


def scheduling(**given: Any) -> Config:
    return Config.model_validate({"scheduling": given})


def test_the_names_are_ours_those_of_the_baselines_and_the_oracle() -> None:
    assert len(names()) == len(set(names()))
    assert set(names()) == {"blend", "cost", *LATE, *NAMES, "oracle"}


@pytest.mark.parametrize("name", names())
def test_every_plain_name_has_a_plan_of_that_name(name: str) -> None:
    config = scheduling(fairness="round_robin", ceilings={"sheddable": 0.5}, look_ahead=7)
    plan = plan_named(name, config)
    assert plan.name == name
    assert plan.about
    assert plan.central == (name == "oracle")
    assert plan.settings.capacity.look_ahead == 7
    if is_own(name):
        assert plan.settings.placement == name.removeprefix("late_")
        assert plan.settings.fairness == "round_robin"
        assert min(plan.settings.ceilings.values()) == 0.5
        assert plan.settings.capacity.stale_after_s == config.poll.stale_after_s
        assert plan.scrape_s == config.poll.interval_s
    else:
        assert not plan.settings.ceilings
    if name in NAMES:
        assert plan.scrape_s == baseline_named(name).scrape_s
        assert plan.settings.fairness == "fcfs"
        assert plan.settings.capacity.stale_after_s == inf


def test_ours_are_those_that_wait_in_our_room() -> None:
    assert {name for name in names() if is_own(name)} == {"cost", "blend", *LATE}
    assert is_own("blend(look_ahead=0)")
    assert not is_own("blender")
    assert not is_own("least_request(x=1)")


@pytest.mark.parametrize("placement", PLACEMENT_PRESETS)
def test_the_configuration_s_own_policy_is_its_placement_in_our_room(placement: str) -> None:
    config = scheduling(placement=placement)
    name = own_name(config)
    assert name == (f"late_{placement}" if placement in baselines.names() else placement)
    assert is_own(name)
    assert plan_named(name, config).settings.placement == placement


def test_a_name_goes_before_the_placement_of_the_configuration() -> None:
    assert own_name(scheduling(placement="least_request")) == "late_least_request"
    assert plan_named("blend", scheduling(placement="least_request")).settings.placement == "blend"


def test_parameters_of_ours_are_keys_of_the_configuration() -> None:
    config = scheduling(kv_full_ratio=0.8)
    plan = plan_named("blend(look_ahead=0, fairness=fcfs,output_weight=3.5)", config)
    assert plan.name == "blend(look_ahead=0, fairness=fcfs,output_weight=3.5)"
    assert (plan.settings.placement, plan.settings.fairness) == ("blend", "fcfs")
    assert plan.settings.capacity.look_ahead == 0
    assert plan.settings.capacity.kv_full_ratio == 0.8
    assert plan.settings.output_weight == 3.5
    assert plan_named("late_least_request(initial_batch_limit=9)", config).settings.capacity.initial_batch_limit == 9
    assert "fcfs" in plan.about
    assert config.scheduling.look_ahead is None


@pytest.mark.parametrize(
    ("given", "splitting"),
    [
        ("auto", (Splitting.AUTO, 0)),
        ("never", (Splitting.NEVER, 0)),
        ("always", (Splitting.ALWAYS, 0)),
        ("2048", (Splitting.TOKENS, 2_048)),
    ],
)
def test_what_is_split_can_be_said_in_a_name(given: str, splitting: tuple[Splitting, int]) -> None:
    chosen = plan_named(f"cost(disaggregation={given})", Config()).settings.disaggregation
    assert (chosen.splitting, chosen.min_uncached_tokens) == splitting


def test_who_goes_next_can_be_said_in_a_name() -> None:
    text = "blend(fairness=slo,ordering=least_slack,preemption=false,fairness_cost=requests,ceilings=1/0.9/0.6)"
    settings = plan_named(text, Config()).settings
    assert (settings.fairness, settings.ordering, settings.fairness_cost) == ("slo", "least_slack", "requests")
    assert settings.preemption is False
    assert [settings.ceiling(band) for band in (100, 0, -100)] == [1.0, 0.9, 0.6]


def test_what_is_not_ours_has_none_of_our_waiting_room_s_ways() -> None:
    config = scheduling(ordering="least_slack", min_shares={"sheddable": 0.1}, refuse_late=True)
    for name in (*NAMES, "oracle"):
        plan = plan_named(name, config)
        assert plan.late == (name == "oracle")
        assert plan.settings.preemption is False
        if name in NAMES:
            assert (plan.settings.ordering, plan.settings.min_shares, plan.settings.refuse_late) == ("fcfs", {}, False)
    assert plan_named("blend", config).late
    assert plan_named("blend", config).settings.preemption


def test_the_session_of_an_arrival_is_known_to_our_own_placement() -> None:
    arrivals = [replace(one, session=f"s{i % 12}") for i, one in enumerate(traffic(count=60, rate=2.0))]
    found: dict[str | None, set[str | None]] = {}
    for record in records_of(setup(arrivals, "late_session(initial_batch_limit=32)")):
        found.setdefault(record.arrival.session, set()).add(record.backend)
    assert len(found) == 12
    assert all(len(backends) == 1 for backends in found.values())
    assert len(set.union(*found.values())) == 3


def test_parameters_of_baselines_are_their_own() -> None:
    plan = plan_named("epp_sticky( penalty_s=2, match=0.5 )", Config())
    assert plan.name == baseline_named("epp_sticky(match=0.5,penalty_s=2)").name
    assert plan.name not in names()
    assert not is_own(plan.name)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("blends", r"unknown policy 'blends' \(nearest: 'blend'\); known: cost, .*oracle$"),
        ("late_blend", r"unknown policy 'late_blend'"),
        ("late_cache_aware", r"unknown policy 'late_cache_aware'"),
        ("", r"unknown policy ''"),
        ("blend(look_behind=1)", r"unknown key 'look_behind' \(nearest: 'look_ahead'\)"),
        *((f"blend({key}=1)", rf"unknown key '{key}'") for key in ("placement", "weights", "min_shares", "seed")),
        ("blend(ceilings=1/0.9)", r"ceilings are written like 1/0\.95/0\.85, for critical, default, sheddable"),
        ("blend(ceilings=0.8/0.9/0.7)", r"do not rise"),
        ("blend(ceilings=1/x/0.5)", r"ceilings are written like"),
        ("blend(ceilings=1/1/0)", r"ceilings"),
        ("cost(disaggregation=some)", r"disaggregation: "),
        ("blend(ordering=lifo)", r"ordering: "),
        ("late_session(match=0.5)", r"unknown key 'match'"),
        ("blend(look_ahead=-1)", r"look_ahead: "),
        ("blend(fairness=fifo)", r"fairness: "),
        ("blend(look_ahead)", r"parameters are written like blend\("),
        ("blend(look_ahead=0", r"parameters are written like blend\("),
        ("oracle(depth=1)", r"the oracle takes no parameters"),
        ("epp_sticky(look_ahead=1)", r"'look_ahead'"),
        ("random(x=1)", r"'x'"),
    ],
)
def test_what_means_no_policy_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        plan_named(text, Config())
    assert "\n" not in str(caught.value)
