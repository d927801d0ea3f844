"""A request in a replay that is retried, preempted, held, or limited."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from llmproxy.config import Config, hash_of
from llmproxy.core import retry
from llmproxy.core.domain import AdmissionKind, Outcome, Request, Verdict
from llmproxy.core.pools import Pools
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind
from llmproxy.lab.run.replay import Run, replay
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.traces.arrival import Arrival
from llmproxy.scheduling.lease import Lease
from tests.lab.run.conftest import SchedulerCalls, given, hung
from tests.lab.small import fleet, records_of, setup, traffic

# --- where it tries again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_retry_goes_to_a_backend_that_has_not_failed_it(calls: SchedulerCalls, extra: int) -> None:
    on, config = hung(4, 0.0, first_byte_s=0.4)
    config = config.model_copy(update={"retry": given(retry={"extra_attempts": extra}).retry})
    ends = records_of(setup([Arrival(0.1 + 0.01 * i, 100, 10) for i in range(12)], on=on, config=config))
    # A prompt that an engine took is computed twice at most.
    attempts = min(extra + 1, 2)
    assert {(one.outcome, one.attempts) for one in ends} == {(Outcome.UPSTREAM_TIMEOUT, attempts)}
    tried: dict[str, list[str]] = {}
    for grant, verdict, _ in calls.ends:
        tried.setdefault(grant.request.id, []).append(grant.placed.backend)
        assert verdict is Verdict.TIMED_OUT
    assert [len(set(backends)) for backends in tried.values()] == [attempts] * 12
    # A retry was admitted before, so the limits of the queue do not apply again.
    assert Counter(calls.attempts) == {
        (failed, AdmissionKind.RETRY if failed else AdmissionKind.NEW): 12 for failed in range(attempts)
    }


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_retries_stay_within_their_budget(monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    monkeypatch.setattr(retry, "RETRY_RESERVE", 2.0)
    config = given(
        retry={"budget_ratio": ratio, "extra_attempts": 1},
        timeouts={"first_byte_s": 0.3},
        health={"failures_before_ejection": 100, "misses_before_down": 100},
    )
    on = fleet(2, [Fault(0.0, FleetFaultKind.HANG, "gpu-0")])
    ends = records_of(setup([Arrival(0.1 * i, 100, 5) for i in range(20)], "late_round_robin", on, config))
    outcomes = Counter(one.outcome for one in ends)
    retries = sum(one.attempts - 1 for one in ends)
    if ratio == 0.0:
        assert retries == 2
        # Until the share of its answers that failed ejects it.
        assert outcomes[Outcome.UPSTREAM_TIMEOUT] > 2
    else:
        assert retries > 5
        assert outcomes == {Outcome.COMPLETED: 20}


# --- taking back, holding, usage limits -------------------------------------------------------------------------------


def overloaded() -> list[Arrival]:
    """Sheddable requests that fill an engine's batch and its look-ahead, then a critical one."""
    crowd = [Arrival(0.001 * i, 4_000, 200, band="sheddable") for i in range(20)]
    return [*crowd, Arrival(0.3, 100, 10, band="critical")]


def one_engine(**scheduling: Any) -> Config:
    return given(scheduling={"initial_batch_limit": 4, "fairness": "fcfs", "ceilings": dict.fromkeys(
        ("critical", "default", "sheddable"), 1.0), **scheduling})  # fmt: skip


@pytest.mark.parametrize("on", [True, False])
def test_sheddable_request_is_preempted_for_a_critical_one(calls: SchedulerCalls, on: bool) -> None:
    what = setup(overloaded(), on=fleet(1, max_num_seqs=4), config=one_engine(preemption=on))
    ends = records_of(what)
    assert {one.outcome for one in ends} == {Outcome.COMPLETED}
    preempted = [one for one in ends if one.preemptions]
    assert bool(preempted) == on
    assert Counter(verdict for _, verdict, _ in calls.ends)[Verdict.PREEMPTED] == sum(one.preemptions for one in ends)
    assert {one.attempts for one in ends} == {1}
    assert replay(what).result("blend", 1, 1.0, 1.0).preemptions == sum(one.preemptions for one in ends)
    if on:
        # It returns as a preempted request: its backend is not excluded, and its wait continues.
        assert calls.attempts.count((0, AdmissionKind.PREEMPTED)) >= len(preempted)
        assert all(one.queue_wait_s is not None and one.queue_wait_s > 0.0 for one in preempted)


def test_engine_drops_a_preempted_request_before_its_next_token_and_is_empty_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Run(setup(overloaded(), on=fleet(1, max_num_seqs=4), config=one_engine()), lambda _: None)
    left: list[int] = []
    cut = Lease.cut

    def spied(lease: Lease, **flags: bool) -> None:
        (replica,) = one._replicas.values()
        before = len(replica._jobs)
        cut(lease, **flags)
        left.append(before - len(replica._jobs))

    monkeypatch.setattr(Lease, "cut", spied)
    run(one.go())
    assert left
    assert set(left) == {1}
    (replica,) = one._replicas.values()
    assert replica.load() == (0, 0)
    assert not replica._jobs
    assert not replica._before_first_token


def test_every_request_ends_once_for_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[str, bool | None]] = []
    ended = Pools.ended

    def record_end(pools: Pools, request: Request, met: bool | None, now: float) -> None:
        ends.append((request.id, met))
        ended(pools, request, met, now)

    monkeypatch.setattr(Pools, "ended", record_end)
    arrivals = [
        Arrival(0.0, 100, 10),
        Arrival(1.0, 100, 10, ttft_slo_s=5.0),
        Arrival(2.0, 100, 10, ttft_slo_s=0.001),
        Arrival(3.0, 100, 10, tpot_slo_s=1e-6),
        Arrival(4.0, 100, 900, ttft_slo_s=5.0),
    ]
    records_of(setup(arrivals, on=fleet(1, [Fault(5.0, FleetFaultKind.KILL)])))
    assert ends == [("1", None), ("2", True), ("3", False), ("4", False), ("5", False)]


@pytest.mark.parametrize(
    ("no_backend_wait_s", "outcome"), [(30.0, Outcome.COMPLETED), (0.0, Outcome.REJECTED_NO_BACKENDS)]
)
def test_request_is_held_while_no_backend_is_up(no_backend_wait_s: float, outcome: Outcome) -> None:
    on = fleet(1, [Fault(1.0, FleetFaultKind.RESTART, "gpu-0", None, 8.0)])
    config = given(queue={"no_backend_wait_s": no_backend_wait_s, "max_wait_s": 10.0})
    (end,) = records_of(setup([Arrival(4.0, 100, 10)], on=on, config=config))
    assert end.outcome is outcome
    if no_backend_wait_s:
        assert end.queue_wait_s is not None
        assert 5.0 <= end.queue_wait_s <= 7.0


@pytest.mark.parametrize(
    ("no_backend_wait_s", "outcome"), [(30.0, Outcome.COMPLETED), (0.0, Outcome.REJECTED_NO_BACKENDS)]
)
def test_a_request_is_held_while_nobody_knows_yet_what_will_be_served(
    no_backend_wait_s: float, outcome: Outcome
) -> None:
    late = fleet(1)
    late = replace(late, replicas=(replace(late.replicas[0], joins_s=5.0),))
    (end,) = records_of(
        setup([Arrival(1.0, 100, 10)], on=late, config=given(queue={"no_backend_wait_s": no_backend_wait_s}))
    )
    assert end.outcome is outcome
    if no_backend_wait_s:
        assert end.ttft_s is not None
        assert 4.0 <= end.ttft_s <= 6.0


def test_in_flight_limit_waits_and_rate_limit_refuses() -> None:
    tenants = [{"name": "a", "keys": [hash_of("a")], "limits": {"in_flight": 1}},
               {"name": "b", "keys": [hash_of("b")], "limits": {"requests_per_min": 2}}]  # fmt: skip
    config = Config.model_validate({"tenants": tenants})
    arrivals = [Arrival(0.01 * i, 100, 50, tenant=name) for i in range(4) for name in "ab"]
    ends = records_of(setup(arrivals, on=fleet(1), config=config))
    mine = sorted((one for one in ends if one.arrival.tenant == "a"), key=lambda one: one.ended_s)
    assert {one.outcome for one in mine} == {Outcome.COMPLETED}
    for before, after in pairwise(mine):
        assert after.arrived_s + (after.queue_wait_s or 0.0) >= before.ended_s - 1e-6
    theirs = Counter(one.outcome for one in ends if one.arrival.tenant == "b")
    assert theirs == {Outcome.COMPLETED: 2, Outcome.RATE_LIMITED: 2}


def test_a_configured_batch_limit_is_believed_from_the_start() -> None:
    backends = [{"url": "http://gpu-0:8000", "name": "gpu-0", "max_in_flight": 3}]
    config = Config.model_validate({"backends": backends, "scheduling": {"look_ahead": 0}})
    one = Run(setup(traffic(count=20), on=fleet(2), config=config), lambda _: None)
    run(one.go())
    (proxy,) = one.proxies
    assert proxy.pools.backends["gpu-0"].limit.value == 3
    assert proxy.pools.backends["gpu-1"].limit.value != 3
