"""What the production scheduler is calls in a replay, recorded call by call."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from llmproxy.config import Config
from llmproxy.core.domain import Entry, Grant, Reading, Request, Usage, Verdict
from llmproxy.core.pools import Pools
from llmproxy.dispatcher import Dispatcher
from llmproxy.lab.fleet.server import SimulatedServer
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind, SimulatedFleet
from llmproxy.simulator.engine.reports import Gauges
from tests.lab.small import fleet


@dataclass(slots=True)
class SchedulerCalls:
    """All that the production side was calls, in its order; `published` are the gauges on their way there.

    `attempts` has, for every request that was let in, how many backends were excluded and how it came.
    """

    requests: list[Request] = field(default_factory=list)
    attempts: list[tuple[int, Entry]] = field(default_factory=list)
    readings: list[tuple[str, Reading]] = field(default_factory=list)
    published: list[tuple[float, SimulatedServer, Gauges]] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)
    ends: list[tuple[Grant, Verdict, Usage | None]] = field(default_factory=list)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> SchedulerCalls:
    calls = SchedulerCalls()
    submit, observe, progress, finish = Pools.submit, Dispatcher.observe, Pools.progress, Pools.finish
    scrape = SimulatedServer.scrape

    def submitted(pools: Pools, request: Request, now: float, excluded: frozenset[str], entry: Entry) -> None:
        calls.requests.append(request)
        calls.attempts.append((len(excluded), entry))
        submit(pools, request, now, excluded, entry)

    def observed(dispatcher: Dispatcher, backend: str, reading: Reading) -> None:
        calls.readings.append((backend, reading))
        observe(dispatcher, backend, reading)

    def progressed(pools: Pools, grant: Grant, output_tokens: int, now: float) -> None:
        calls.progress.append(output_tokens)
        progress(pools, grant, output_tokens, now)

    def finished(pools: Pools, grant: Grant, verdict: Verdict, now: float, usage: Usage | None = None) -> None:
        calls.ends.append((grant, verdict, usage))
        finish(pools, grant, verdict, now, usage)

    def scraped(replica: SimulatedServer) -> Gauges | None:
        gauges = scrape(replica)
        if gauges is not None:
            calls.published.append((asyncio.get_running_loop().time(), replica, gauges))
        return gauges

    for owner, name, spy in (
        (Pools, "submit", submitted),
        (Dispatcher, "observe", observed),
        (Pools, "progress", progressed),
        (Pools, "finish", finished),
        (SimulatedServer, "scrape", scraped),
    ):
        monkeypatch.setattr(owner, name, spy)
    return calls


def given(**sections: dict[str, Any]) -> Config:
    return Config.model_validate(sections)


def hung(count: int, at_s: float, **timeouts: float) -> tuple[SimulatedFleet, Config]:
    config = given(timeouts=timeouts, health={"failures": 100})
    return fleet(count, [Fault(at_s, FleetFaultKind.HANG)]), config
