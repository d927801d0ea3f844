"""W9: old or lost readings, and proxies that know nothing of each other. What does it cost?"""

from benchmarks.lab.scenarios.scenario import (
    GOODPUT,
    OURS,
    POLICIES,
    TELLING,
    Case,
    Scenario,
    Shape,
    behind,
    both,
    plain,
    sized,
    with_fault,
)
from llmproxy.lab.fleet.spec import FleetFaultKind

SIZES = sized(max_num_seqs=16)


def _case(name: str, shape: Shape, quick: bool = False) -> Case:
    return Case(
        f"{name}, 8 x 8B",
        "azure2023_conv.csv.gz",
        "8xllama-8b-h100",
        (0.85,),
        requests=2_000,
        shape=both(SIZES, shape),
        policies=POLICIES if quick else TELLING,
        quick=quick,
    )


def _shared(name: str, shape: Shape) -> Case:
    """Returns a case of traffic with shared prefixes, so that KV events matter. Azure's file has no shared prefixes."""
    return Case(
        f"{name}, b2b, 8 x Qwen3-32B TP2",
        "gen:shared_system_prompts,rate=12,duration_s=100",
        "8xqwen-32b-h100-tp2",
        (0.85,),
        shape=shape,
        policies=(*OURS, "dynamo_cost"),
        quick=False,
    )


SCENARIO = Scenario(
    "W9",
    "Stale and divided knowledge",
    "Azure's conversations with fresh readings, readings 1 s and 10 s old, half of the readings lost, and behind four"
    " proxies; and many requests with common beginnings, with all KV events and with 1 % of them lost.",
    GOODPUT,
    (
        _case("fresh", plain),
        _case("1 s old", with_fault(0.0, FleetFaultKind.METRIC_AGE, 8, 1.0)),
        _case("10 s old", with_fault(0.0, FleetFaultKind.METRIC_AGE, 8, 10.0), quick=True),
        _case("half lost", with_fault(0.0, FleetFaultKind.LOST_READINGS, 8, 0.5)),
        _case("2 proxies", behind(2)),
        _case("4 proxies", behind(4)),
        _shared("all KV events", plain),
        _shared("KV events, 1 % lost", with_fault(0.0, FleetFaultKind.LOST_KV_EVENTS, 8, 0.01)),
    ),
)
