"""Records the calls of the production scheduler in a replay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from llmproxy.config import Config
from llmproxy.core.domain import AdmissionKind, Decision, Grant, Reading, Request, Usage, Verdict
from llmproxy.core.lease_events import LeaseEvent, Progress, Returned
from llmproxy.core.pools import Pools
from llmproxy.lab.fleet.server import SimulatedServer
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind, SimulatedFleet
from llmproxy.lab.simulator.engine.reports import Gauges
from llmproxy.scheduling.dispatcher import Dispatcher
from tests.lab.small import fleet


@dataclass(slots=True)
class SchedulerCalls:
    """The calls of the production scheduler in order. `published` are gauges on their way to it.

    `attempts` has the number of excluded backends and the `AdmissionKind` of every admitted request.
    """

    requests: list[Request] = field(default_factory=list)
    attempts: list[tuple[int, AdmissionKind]] = field(default_factory=list)
    readings: list[tuple[str, Reading]] = field(default_factory=list)
    published: list[tuple[float, SimulatedServer, Gauges]] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)
    ends: list[tuple[Grant, Verdict, Usage | None]] = field(default_factory=list)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> SchedulerCalls:
    calls = SchedulerCalls()
    scrape = SimulatedServer.scrape

    def spy(owner: type, name: str, note: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def called(*given: Any, **named: Any) -> Any:
            note(*given, **named)
            return original(*given, **named)

        monkeypatch.setattr(owner, name, called)

    def scraped(replica: SimulatedServer) -> Gauges | None:
        gauges = scrape(replica)
        if gauges is not None:
            calls.published.append((asyncio.get_running_loop().time(), replica, gauges))
        return gauges

    monkeypatch.setattr(SimulatedServer, "scrape", scraped)
    spy(Pools, "submit", lambda _, request, *__: calls.requests.append(request))
    spy(Pools, "submit", lambda *given: calls.attempts.append((len(given[3]), given[4])))
    spy(Dispatcher, "observe", lambda _, backend, reading: calls.readings.append((backend, reading)))
    grants: dict[tuple[Pools, int], Grant] = {}
    decide = Pools.decide

    def decided(pools: Pools, now: float) -> list[Decision]:
        decisions = decide(pools, now)
        grants.update(((pools, grant.lease), grant) for grant in decisions if isinstance(grant, Grant))
        return decisions

    def note(pools: Pools, event: LeaseEvent, now: float) -> None:
        del now
        if isinstance(event, Progress):
            calls.progress.append(event.output_tokens)
        elif isinstance(event, Returned):
            calls.ends.append((grants[pools, event.lease], event.verdict, event.usage))

    monkeypatch.setattr(Pools, "decide", decided)
    spy(Pools, "apply", note)
    return calls


def given(**sections: dict[str, Any]) -> Config:
    return Config.model_validate(sections)


def hung(count: int, at_s: float, **timeouts: float) -> tuple[SimulatedFleet, Config]:
    config = given(timeouts=timeouts, health={"failures_before_ejection": 100})
    return fleet(count, [Fault(at_s, FleetFaultKind.HANG)]), config
