"""W6: bursts, replicas that join, and replicas that go for a while. How late is a first token?"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.lab.scenarios.goals import in_band, mean, versus
from benchmarks.lab.scenarios.scenario import (
    CRITICAL_GOODPUT,
    TTFT_P99,
    Case,
    Found,
    Goal,
    Scenario,
    Shape,
    both,
    joining,
    sized,
)
from llmproxy.core.domain import Outcome
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind, SimulatedFleet
from llmproxy.lab.results.result import RunResult

KEPT = "cost(preemption=false)"
LEVEL, LEVEL_KEPT = "cost(headroom_s=0)", "cost(headroom_s=0,preemption=false)"
HOLD_S = 30.0
IN_TURN_S = (20.0, 27.0, 33.0, 40.0)  # For how many seconds each of the four replicas is absent.
ERRORS = frozenset(Outcome) - {Outcome.COMPLETED, Outcome.CANCELLED}

critical_ttft_p99 = in_band("critical", lambda group: group.ttft_s.p99)
sheddable_wait = in_band("sheddable", lambda group: group.ttft_s.mean)


def rolled(kind: FleetFaultKind, gone_s: tuple[float, ...]) -> Shape:
    """Returns a shape in which the replicas are absent one after the other, each for its seconds, 5 s apart."""

    def shape(fleet: SimulatedFleet, duration_s: float) -> SimulatedFleet:
        del duration_s
        at_s, faults = 20.0, []
        for spec, value in zip(fleet.replicas, gone_s, strict=True):
            faults.append(Fault(at_s, kind, spec.name, None, value))
            at_s += value + 5.0
        return replace(fleet, faults=(*fleet.faults, *faults))

    return shape


def preempted(found: Found) -> list[Goal]:
    """Returns the goals for the gain of critical requests by preemption, and its cost to sheddable requests."""
    judged = []
    for name, policy, kept in (("", "cost", KEPT), (", no ceilings", LEVEL, LEVEL_KEPT)):
        ours, others = found.runs[policy], found.runs[kept]
        count = mean(ours, lambda run: float(run.preemptions)) or 0.0
        judged += [
            Goal(f"critical goodput, preemption on / off{name}", versus(ours, others, CRITICAL_GOODPUT.of), 1.0),
            Goal(
                f"critical TTFT p99, preemption on / off{name}",
                versus(ours, others, critical_ttft_p99),
                1.0,
                False,
                f"{mean(ours, critical_ttft_p99) or 0.0:.3f} s, {count:.0f} preemptions",
            ),
            Goal(
                f"sheddable TTFT mean, on / off{name}",
                versus(ours, others, sheddable_wait),
                1.05,
                False,
                f"{mean(ours, sheddable_wait) or 0.0:.3f} s",
            ),
        ]
    return judged


def errors(run: RunResult) -> float:
    """Returns the number of requests that did not get their whole answer."""
    return float(sum(count for outcome, count in run.outcomes.items() if Outcome(outcome) in ERRORS))


def rolled_out(found: Found) -> list[Goal]:
    """Returns the goals for errors that clients see in a rollout."""
    ours = found.runs["cost"]
    outcomes: dict[str, int] = {}
    for run in ours:
        for outcome, count in run.outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    about = ", ".join(f"{outcome} {count}" for outcome, count in sorted(outcomes.items()))
    return [Goal("client errors", mean(ours, errors), 0.0, False, about)]


def _rollout(
    name: str, rate: float, gone_s: tuple[float, ...], kind: FleetFaultKind = FleetFaultKind.ROLL, quick: bool = True
) -> Case:
    return Case(
        name,
        f"gen:step_bursts,rate={rate:g},factor=1,duration_s={100 if len(gone_s) == 1 else 180}",
        f"{len(gone_s)}xllama-8b-h100",
        (None,),
        shape=both(sized(max_num_seqs=64), rolled(kind, gone_s)),
        overrides={"queue.no_backend_wait_s": f"{HOLD_S:g}"},
        policies=("cost", "least_request"),
        goals=rolled_out,
        quick=quick,
    )


SCENARIO = Scenario(
    "W6",
    "Bursts, growth and rollouts",
    "Steps of five times the rate, with two replicas that join in mid-burst; a bursty production hour (ServeGen"
    " m-large; Azure's code trace, burstier still, cannot be had); bursts of critical requests while sheddable"
    " ones fill the fleet; replicas that finish their requests and restart in turn, while new requests wait for up to"
    f" {HOLD_S:g} s.",
    TTFT_P99,
    (
        Case(
            "steps x5, 4 + 2 x 8B",
            "gen:step_bursts,rate=14,period_s=40,step_s=10,duration_s=80",
            "6xllama-8b-h100",
            (None,),
            shape=both(sized(max_num_seqs=32), joining(2, 0.4)),
        ),
        Case(
            "critical bursts, 2 x 8B",
            "gen:critical_bursts,rate=60,sheddable_rate=30,period_s=20,burst_s=4,duration_s=60",
            "2xllama-8b-h100",
            (None,),
            shape=sized(max_num_seqs=32),
            policies=("cost", KEPT, LEVEL, LEVEL_KEPT, "least_request"),
            goals=preempted,
        ),
        _rollout("rollout, 4 x 8B", 20.0, IN_TURN_S),
        _rollout("rollout of one, 25 s", 5.0, (25.0,)),
        _rollout("rollout of one, 40 s", 5.0, (40.0,), quick=False),
        _rollout("killed in turn, 4 x 8B", 20.0, IN_TURN_S, FleetFaultKind.RESTART, quick=False),
        Case(
            "ServeGen m-large, 4 x 8B",
            "servegen_mlarge_1h.csv.gz",
            "4xllama-8b-h100",
            (0.7,),
            requests=3_000,
            shape=sized(max_num_seqs=64),
            quick=False,
        ),
    ),
)
