"""Scenarios: traffic, a fleet, its faults, the loads, and the figure that decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from llmproxy.config import BackendConfig, Config, Override, load
from llmproxy.lab.fleet.fleet_file import fleet_named
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind, SimulatedFleet
from llmproxy.lab.policies.bounds import all_bounds
from llmproxy.lab.results.result import Bound, Point, RunResult
from llmproxy.lab.run.runs import Simulation, prepared
from llmproxy.lab.traces.mix import AS_IT_IS, Mix

TRACES = Path(__file__).resolve().parents[2] / "traces"
OURS = ("cost", "blend")
STRONG = ("cache_aware", "epp_blend", "epp_sticky", "dynamo_cost")
TELLING = (*OURS, "late_least_request", "round_robin", *STRONG, "oracle")
"""The policies for the further cases of a workload.

The other baselines are between these, and run only in the quick case.
"""
POLICIES = (*TELLING, "random", "least_request", "power_of_two", "session")
WARMUP = 0.1
"""The share of each trace whose requests are not counted, because caches are cold and limits are not learned yet."""


def critical_goodput(run: RunResult) -> float | None:
    """Returns the goodput of the critical band alone; None without such requests."""
    return run.by_band["critical"].goodput if "critical" in run.by_band else None


def victims_goodput(run: RunResult) -> float | None:
    """Returns the mean goodput of all tenants except the tenant with the most work; None without others."""
    tenants = sorted(run.by_tenant.values(), key=lambda group: group.asked_share or 0.0)[:-1]
    return fmean(group.goodput for group in tenants if group.goodput is not None) if tenants else None


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a run by which policies are compared. `higher`: whether more is better."""

    name: str
    of: Callable[[RunResult], float | None]
    higher: bool = True


GOODPUT = Metric("goodput", lambda run: run.goodput)
CRITICAL_GOODPUT = Metric("goodput of critical", critical_goodput)
VICTIMS_GOODPUT = Metric("goodput of the victims", victims_goodput)
TTFT_P99 = Metric("TTFT p99 in s", lambda run: run.ttft_s.p99, higher=False)

Shape = Callable[[SimulatedFleet, float], SimulatedFleet]
"""Changes a fleet, given the length of the trace in seconds."""


def plain(fleet: SimulatedFleet, duration_s: float) -> SimulatedFleet:
    """Returns the fleet unchanged."""
    del duration_s
    return fleet


def sized(**given: int) -> Shape:
    """Returns a shape that sets fields of every replica, such as max_num_seqs=16."""

    def shape(fleet: SimulatedFleet, duration_s: float) -> SimulatedFleet:
        del duration_s
        return replace(fleet, replicas=tuple(replace(spec, **given) for spec in fleet.replicas))  # type: ignore[arg-type]

    return shape


def with_fault(at: float, kind: FleetFaultKind, first: int, value: float = 0.0, until: float | None = None) -> Shape:
    """Returns a shape that adds a fault of the first `first` replicas.

    The fault begins at the share `at` of the trace, and ends at the share `until`; None for never.
    """

    def shape(fleet: SimulatedFleet, duration_s: float) -> SimulatedFleet:
        until_s = None if until is None else until * duration_s
        faults = [Fault(at * duration_s, kind, spec.name, until_s, value) for spec in fleet.replicas[:first]]
        return replace(fleet, faults=(*fleet.faults, *faults))

    return shape


def joining(last: int, at: float) -> Shape:
    """Returns a shape in which the last `last` replicas join at the share `at` of the trace."""

    def shape(fleet: SimulatedFleet, duration_s: float) -> SimulatedFleet:
        early, late = fleet.replicas[:-last], fleet.replicas[-last:]
        return replace(fleet, replicas=(*early, *(replace(spec, joins_s=at * duration_s) for spec in late)))

    return shape


def behind(proxies: int) -> Shape:
    """Returns a shape with several proxies in front of the fleet, which know nothing of each other."""

    def shape(fleet: SimulatedFleet, duration_s: float) -> SimulatedFleet:
        del duration_s
        return replace(fleet, proxies=proxies)

    return shape


def both(*shapes: Shape) -> Shape:
    def shape(fleet: SimulatedFleet, duration_s: float) -> SimulatedFleet:
        for one in shapes:
            fleet = one(fleet, duration_s)
        return fleet

    return shape


@dataclass(frozen=True, slots=True)
class Beside:
    """A further run of a place for comparison: another part of the same arrivals, at the same rate.

    `reshaped` changes the fleet. Requests before the share `warmup` of the trace are not counted.
    """

    name: str
    policy: str
    mix: Mix = AS_IT_IS
    reshaped: Callable[[SimulatedFleet], SimulatedFleet] | None = None
    warmup: float = WARMUP


@dataclass(frozen=True, slots=True)
class Goal:
    """A wanted value of a figure and the measured value (None without one). `about` is a remark."""

    name: str
    measured: float | None
    wanted: float
    at_least: bool = True
    about: str = ""

    @property
    def met(self) -> bool:
        if self.measured is None:
            return False
        return self.measured >= self.wanted if self.at_least else self.measured <= self.wanted


@dataclass(frozen=True, slots=True)
class Found:
    """The results of a place: by policy, and of the additional runs by name, with a run for each seed."""

    place: Place
    runs: Mapping[str, Sequence[RunResult]]
    beside: Mapping[str, Sequence[RunResult]]


@dataclass(frozen=True, slots=True)
class Case:
    """A trace on a fleet, with its loads and the figure that decides."""

    name: str
    trace: str
    """The name of a generator, or of a file in `benchmarks/traces`."""
    fleet: str
    loads: tuple[float | None, ...]
    """The loads as shares of the rate that the fleet can serve (`rate_balance` in `llmproxy.lab.policies.bounds`).

    None means the rate of the trace.
    """
    requests: int | None = None
    """How many requests of a file each seed plays, from different parts of the file; None for all."""
    replicate: int = 1
    shape: Shape = plain
    policies: tuple[str, ...] = POLICIES
    overrides: Mapping[str, str] | None = None
    mix: Mix = AS_IT_IS
    """The part of the trace's requests that is played."""
    known_limits: bool = False
    """Whether the proxy is configured with the batch limit of every replica (`max_in_flight`) and does not learn it."""
    beside: tuple[Beside, ...] = ()
    goals: Callable[[Found], list[Goal]] | None = None
    quick: bool = True
    """Whether the case is a part of `make lab`."""
    quick_loads: tuple[float | None, ...] | None = None
    warmup: float = WARMUP
    """The share of the trace whose requests are not counted."""
    warmup_s: float | None = None
    """The seconds whose requests are not counted, in place of `warmup`."""
    objectives_named: bool = False
    """Whether each request names the objectives by which it is judged."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload with its cases. `about` is a text for people."""

    key: str
    title: str
    about: str
    decides: Metric
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A case at a load, with the bounds of any policy there. All seeds run at the rate of the first seed."""

    scenario: Scenario
    case: Case
    load: float | None
    prefill_scale: float
    rate_scale: float
    fleet: SimulatedFleet
    bounds: Mapping[str, Bound]

    def simulation(self, seed: int) -> Simulation:
        """Returns the traffic and the fleet for one seed."""
        simulation = replace(_simulation(self.case, seed), fleet=self.fleet)
        if self.case.warmup_s is not None:
            duration_s = prepared(simulation, seed, self.rate_scale)[1].duration_s
            simulation = replace(simulation, warmup=min(1.0, self.case.warmup_s / duration_s))
        if not self.case.known_limits:
            return simulation
        backends = tuple(
            BackendConfig(url=f"http://{spec.name}:8000", name=spec.name, max_in_flight=spec.max_num_seqs)
            for spec in self.fleet.replicas
        )
        return replace(simulation, config=simulation.config.model_copy(update={"backends": backends}))

    def beside(self, one: Beside) -> Place:
        """Returns the place of an additional run."""
        name = f"{self.case.name}, {one.name}"
        case = replace(self.case, name=name, mix=one.mix, policies=(one.policy,), beside=(), warmup=one.warmup)
        return replace(self, case=case, fleet=self.fleet if one.reshaped is None else one.reshaped(self.fleet))

    def point(self, policy: str, seed: int) -> Point:
        return Point(policy, seed, self.rate_scale, self.prefill_scale)

    @property
    def label(self) -> str:
        load = "" if self.load is None else f", load {self.load:g}"
        return f"{self.scenario.key} {self.case.name}{load}, prefill x{self.prefill_scale:g}"


def config_of(case: Case) -> Config:
    """Returns the configuration of a case. The tenants of the trace are the flows."""
    overrides = {"scheduling.flow": "header:x-tenant", **(case.overrides or {})}
    return load(None, [Override(key, value, case.name) for key, value in overrides.items()])


def _simulation(case: Case, seed: int) -> Simulation:
    trace = case.trace if case.trace.startswith("gen:") else str(TRACES / case.trace)
    return Simulation(
        trace,
        fleet_named(case.fleet),
        config_of(case),
        skip=(case.requests or 0) * (seed - 1),
        requests=case.requests,
        replicate=case.replicate,
        warmup=case.warmup,
        mix=case.mix,
        objectives_named=case.objectives_named,
    )


def placed(scenario: Scenario, case: Case, load: float | None, prefill_scale: float, seed: int) -> Place:
    """Returns the place at `load` of the rate that the fleet can balance, for the traffic of `seed`."""
    simulation = _simulation(case, seed)
    rate_scale = 1.0
    arrivals, found = prepared(simulation, seed, rate_scale)
    # The balance depends on the sizes of replicas, and not on faults and late joins.
    fleet = case.shape(simulation.fleet, found.duration_s)
    bounds = all_bounds(arrivals, fleet, prefill_scale, WARMUP * found.duration_s)
    if load is not None:
        balance = bounds["rate_balance"].value
        assert balance is not None
        rate_scale = round(load * balance * found.duration_s / found.count, 4)
        arrivals, found = prepared(simulation, seed, rate_scale)
        fleet = case.shape(simulation.fleet, found.duration_s)
        bounds = all_bounds(arrivals, fleet, prefill_scale, WARMUP * found.duration_s)
    return Place(scenario, case, load, prefill_scale, rate_scale, fleet, bounds)


def places(scenarios: Sequence[Scenario], quick: bool, prefill_scales: Sequence[float], seed: int) -> list[Place]:
    """Returns every case of `scenarios` at each of its loads."""
    found = []
    for scenario in scenarios:
        for case in scenario.cases:
            if quick and not case.quick:
                continue
            loads = (case.quick_loads or case.loads) if quick else case.loads
            found += [placed(scenario, case, load, scale, seed) for load in loads for scale in prefill_scales]
    return found
