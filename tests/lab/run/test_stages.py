"""Replays on fleets with roles: requests in two stages over the production scheduler, and a stage that fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmproxy.core.domain import Grant, Outcome, Role, Stage
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind, SimulatedFleet
from llmproxy.lab.results.record import Record
from llmproxy.lab.run.replay import replay
from tests.lab.run.conftest import SchedulerCalls
from tests.lab.small import fleet, records_of, setup, traffic

ALWAYS = "cost(disaggregation=always)"
NEVER = "cost(disaggregation=never)"


def split_up(prefill: int = 1, decode: int = 2, faults: tuple[Fault, ...] = ()) -> SimulatedFleet:
    plain = fleet(prefill + decode, faults)
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    replicas = tuple(replace(spec, role=role) for spec, role in zip(plain.replicas, roles, strict=True))
    return replace(plain, replicas=replicas)


def served(policy: str, on: SimulatedFleet, count: int = 100) -> list[Record]:
    kept = records_of(setup(traffic(count, rate=20.0), policy, on))
    assert len(kept) == count
    return kept


def test_prompts_are_computed_on_one_and_answers_on_others() -> None:
    for record in served(ALWAYS, split_up()):
        assert (record.outcome, record.prefilled_on, record.attempts) == (Outcome.COMPLETED, "gpu-0", 1)
        assert record.backend in ("gpu-1", "gpu-2")
        assert record.output_tokens == record.arrival.output_tokens


@pytest.mark.slow
def test_the_time_to_the_first_token_has_the_transfer_in_it() -> None:
    slow = replace(split_up(), kv_transfer=replace(split_up().kv_transfer, latency_s=3.0, handshake_s=0.0))
    assert min(one.ttft_s or 0.0 for one in served(ALWAYS, slow)) > 3.0
    assert max(one.ttft_s or 0.0 for one in served(NEVER, slow)) < 1.0


@pytest.mark.slow
def test_a_fleet_without_roles_splits_nothing() -> None:
    assert not any(one.prefilled_on for one in served(ALWAYS, fleet()))


def test_each_replica_is_credited_with_its_own_stage() -> None:
    run = replay(setup(traffic(60), ALWAYS, split_up())).result(ALWAYS, 1, 1.0, 1.0)
    assert run.split == run.completed == 60
    one, *others = (run.by_backend[name] for name in ("gpu-0", "gpu-1", "gpu-2"))
    assert one.prefill_tokens > 0
    assert (one.requests, one.output_tokens) == (0, 0)
    assert [other.prefill_tokens for other in others] == [0, 0]
    assert sum(other.output_tokens for other in others) == sum(one.output_tokens for one in traffic(60))
    assert replay(setup(traffic(60), NEVER, split_up())).result(NEVER, 1, 1.0, 1.0).split == 0


@pytest.mark.slow
def test_usage_says_what_the_first_replica_found_cached(calls: SchedulerCalls) -> None:
    kept = served(ALWAYS, split_up())
    usages: dict[str, dict[Stage, int | None]] = {}
    for grant, _, usage in calls.ends:
        assert isinstance(grant, Grant)
        usages.setdefault(grant.request.id, {})[grant.request.stage] = None if usage is None else usage.cached_tokens
    assert all(one[Stage.PREFILL] == one[Stage.DECODE] for one in usages.values())
    assert sum(one.hit_tokens or 0 for one in kept) > 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("replica", ["gpu-0", "gpu-1"])
@pytest.mark.parametrize("kind", [FleetFaultKind.KILL, FleetFaultKind.ROLL])
def test_no_request_is_lost_before_its_first_token(replica: str, kind: FleetFaultKind) -> None:
    """A replica that dies breaks only answers that had begun. A replica that drains breaks none."""
    fault = Fault(2.0, kind, replica, value=1.0 if kind is FleetFaultKind.ROLL else 0.0)
    kept = served(ALWAYS, split_up(2, 2, (fault,)), count=200)
    others = [one for one in kept if one.outcome is not Outcome.COMPLETED]
    assert {one.outcome for one in others} <= {Outcome.BROKEN_STREAM}
    assert all(one.output_tokens for one in others)
    if kind is FleetFaultKind.ROLL or replica == "gpu-0":
        assert not others
    assert any(one.attempts > 1 for one in kept) or kind is FleetFaultKind.ROLL


def test_without_a_partner_requests_are_served_as_a_whole() -> None:
    kept = served(ALWAYS, split_up(1, 2, (Fault(0.0, FleetFaultKind.KILL, "gpu-0"),)))
    assert all(one.outcome is Outcome.COMPLETED for one in kept)
    assert not any(one.prefilled_on for one in kept[-50:])


@pytest.mark.slow
def test_strict_priority_holds_across_stages() -> None:
    arrivals = [
        replace(one, band="critical" if number % 3 else "sheddable") for number, one in enumerate(traffic(rate=300.0))
    ]
    recorder = replay(setup(arrivals, ALWAYS, split_up()))
    run = recorder.result(ALWAYS, 1, 1.0, 1.0)
    assert (run.inversions, run.completed) == (0, len(arrivals))
    assert run.split > 0.5 * len(arrivals)
