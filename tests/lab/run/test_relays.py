"""A cluster of proxies in virtual time decides as one proxy does, and loses nothing with its leader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from llmproxy.config import Config
from llmproxy.core.domain import Outcome, Placed, Request
from llmproxy.lab.fleet.spec import ProxyCluster, SimulatedFleet
from llmproxy.lab.results.audit import AuditedPools
from llmproxy.lab.results.record import Record
from llmproxy.lab.run.replay import Run
from llmproxy.lab.run.virtual_time import run
from llmproxy.lab.traces.arrival import Arrival
from tests.lab.small import fleet, records_of, setup

pytestmark = pytest.mark.slow

SMALL = fleet(1, max_num_seqs=4)
"""A replica with four places."""


BY_TENANT = Config.model_validate(
    {"backends": [{"url": "http://a:1"}], "scheduling": {"flow": "tenant"}, "queue": {"max_wait_s": 600.0}}
)


def clustered(members: int, **how: float) -> SimulatedFleet:
    return replace(SMALL, proxies=members, cluster=ProxyCluster(**how), pinned=True)


def shares(records: Sequence[Record]) -> float:
    """The share of the first tenant in the answers while both had some to come."""
    tenants = [one.arrival.tenant for one in records if one.outcome is Outcome.COMPLETED]
    both = tenants[: len(tenants) - tenants[::-1].index("b")]
    return both.count("a") / len(both)


def backlog(requests: int = 300, output_tokens: int = 20) -> list[Arrival]:
    """Two tenants at once, the one with four times as many requests."""
    return [Arrival(0.0, 100, output_tokens, tenant="b" if number % 5 == 4 else "a") for number in range(requests)]


@pytest.mark.parametrize("members", [2, 4])
def test_shares_do_not_depend_on_where_a_tenant_comes_in(members: int) -> None:
    records = records_of(setup(backlog(), "cost", clustered(members), BY_TENANT))
    assert {one.outcome for one in records} == {Outcome.COMPLETED}
    assert shares(records) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("rtt_s", [0.0, 0.005])
def test_nothing_but_its_own_is_lost_with_the_leader(rtt_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Record] = []
    resumed: list[str] = []
    booked = AuditedPools.resume

    def resume(of: AuditedPools, request: Request, placed: Placed, at_s: float) -> int | None:
        resumed.append(request.id)
        return booked(of, request, placed, at_s)

    monkeypatch.setattr(AuditedPools, "resume", resume)
    # Answers of some 8 s outlive the lock of the dead leader.
    what = setup(backlog(60, 1_200), "cost", clustered(3, rtt_s=rtt_s, leader_dies_at_s=1.0), BY_TENANT)
    one = Run(what, on_record=ends.append)
    recorder = run(one.go())
    died, *lived = sorted(one.proxies, key=lambda proxy: not proxy.dead)
    assert died.dead
    assert not any(proxy.dead for proxy in lived)
    outcomes = Counter((one.arrival.tenant, one.outcome) for one in ends)
    # The first tenant uses the leader alone, and all others have none of their clients there.
    assert outcomes["b", Outcome.COMPLETED] == 12
    assert outcomes["a", Outcome.CONNECT_FAILED] > 0
    assert recorder.result("cost", 1, 1.0, 1.0).inversions == 0
    assert resumed
    for proxy in lived:
        proxy.pools.check(1e9)
        assert proxy.dispatcher.leases == 0
