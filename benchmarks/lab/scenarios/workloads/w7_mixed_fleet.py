"""W7: replicas of two speeds without labels, and a replica that becomes slow. Is it learned, and used?"""

from __future__ import annotations

from benchmarks.lab.scenarios.goals import mean
from benchmarks.lab.scenarios.scenario import GOODPUT, Case, Found, Goal, Scenario, both, sized, with_fault
from llmproxy.lab.fleet.spec import FleetFaultKind
from llmproxy.lab.results.result import RunResult

BLIND = "cost(without=objectives)"


def tight_goodput(run: RunResult) -> float | None:
    """Returns the goodput of the requests with the narrow objective; None if there were none."""
    return run.by_tenant["tight"].goodput if "tight" in run.by_tenant else None


def attained(found: Found) -> list[Goal]:
    """Returns the goal: the share of kept objectives, compared with a policy that ignores objectives."""
    blind, blind_tight = mean(found.runs[BLIND], GOODPUT.of), mean(found.runs[BLIND], tight_goodput)
    return [
        Goal("objectives kept", mean(found.runs["cost"], GOODPUT.of), blind or 1.0, about="as without a look at them"),
        Goal("tight ones kept", mean(found.runs["cost"], tight_goodput), blind_tight or 1.0, about="the same"),
    ]


def _objectives(rate: float) -> Case:
    return Case(
        f"objectives, {rate:g} requests/s, 4 x H100 + 4 x A100",
        f"gen:mixed_objectives,rate={rate:g},duration_s=60",
        "4xllama-8b-h100+4xllama-8b-a100",
        (None,),
        policies=("cost", BLIND, "blend", "least_request", "epp_sticky", "oracle"),
        goals=attained,
        quick=False,
    )


SCENARIO = Scenario(
    "W7",
    "Unequal replicas",
    "Four H100 and four A100 under Azure's conversations; half way one H100 takes twice as long for everything. The"
    " same fleet under requests with a narrow latency objective, three in ten, or a wide one.",
    GOODPUT,
    (
        Case(
            "4 x H100 + 4 x A100",
            "azure2023_conv.csv.gz",
            "4xllama-8b-h100+4xllama-8b-a100",
            (0.7, 0.85),
            requests=2_000,
            shape=both(sized(max_num_seqs=32), with_fault(0.5, FleetFaultKind.SLOW, 1, 2.0)),
            quick_loads=(0.7,),
        ),
        _objectives(60.0),
        _objectives(80.0),
    ),
)
