"""W3: more LoRA adapters than slots. Do adapters stay resident, and at what cost?"""

from dataclasses import replace
from functools import partial

from benchmarks.lab.scenarios.goals import mean, worst
from benchmarks.lab.scenarios.scenario import GOODPUT, TELLING, Case, Found, Goal, Scenario, Shape, both, sized
from llmproxy.lab.fleet.spec import SimulatedFleet

SIZES = sized(max_num_seqs=32, max_loras=8, max_cpu_loras=32)
SMALL = sized(max_num_seqs=32, max_loras=4, max_cpu_loras=4)
POLICIES = ("cost", "blend", "least_request", "cache_aware", "epp_blend", "session", "oracle")
UNRANKED = ("cost", "oracle")


def loading(cold_s: float) -> Shape:
    """Returns a shape that sets the seconds to read an adapter from disk."""

    def shape(fleet: SimulatedFleet, duration_s: float) -> SimulatedFleet:
        del duration_s
        slow = (replace(spec, profile=replace(spec.profile, adapter_cold_load_s=cold_s)) for spec in fleet.replicas)
        return replace(fleet, replicas=tuple(slow))

    return shape


def goals(found: Found) -> list[Goal]:
    """Returns the goals: as good as the best other policy, and no ejection of a replica that loads an adapter."""
    others = {name: mean(runs, GOODPUT.of) for name, runs in found.runs.items() if name not in UNRANKED}
    known = [(goodput, name) for name, goodput in others.items() if goodput is not None]
    best_goodput, best = max(known, default=(0.0, ""))
    ejections = worst([run for runs in found.runs.values() for run in runs], lambda run: float(run.ejections))
    return [
        Goal("goodput", mean(found.runs["cost"], GOODPUT.of), best_goodput, True, f"that of {best}" if best else ""),
        Goal("ejections under any policy", ejections, 0.0, False),
    ]


def _slow(name: str, cold_s: float, trace: str, loads: tuple[float, ...], quick: bool = False) -> Case:
    return Case(
        f"{name}, cold load {cold_s:g} s, 4 x 8B",
        f"gen:lora_zipf,{trace},rate=8,duration_s=60",
        "4xllama-8b-h100",
        loads,
        shape=both(SMALL, loading(cold_s)),
        policies=POLICIES,
        goals=goals,
        quick=quick,
        quick_loads=loads[:1],
        warmup=0.2,
    )


TRACE = "gen:lora_zipf,adapters=100,alpha={},rate=60,duration_s=40,drift_s=20"
ZIPF = partial(Case, fleet="8xllama-8b-h100", shape=SIZES)
EVEN = "adapters=16,alpha=0"
DRIFTING = "adapters=24,alpha=1.0,drift_s=20"

SCENARIO = Scenario(
    "W3",
    "Many adapters",
    "100 adapters whose popularity follows a power law and is drawn anew every 20 s (published: every 10 minutes; a"
    " run is short). The balance knows nothing of adapter slots, the scarce resource here: hence the low loads."
    " Then 16 adapters on four replicas with four slots each and nothing behind them, so that each load comes from disk"
    " and a displaced adapter is read again; and 24 adapters, more than there are slots.",
    GOODPUT,
    (
        ZIPF("Zipf 1.0, 8 x 8B", TRACE.format(1.0), loads=(0.25, 0.35), quick_loads=(0.25,)),
        ZIPF("Zipf 0.6, 8 x 8B", TRACE.format(0.6), loads=(0.15,), policies=TELLING, quick=False),
        _slow("16 evenly", 0.3, EVEN, (0.15, 0.3)),
        _slow("16 evenly", 1.2, EVEN, (0.15, 0.3), quick=True),
        _slow("16 evenly", 3.0, EVEN, (0.15, 0.3)),
        _slow("24 by Zipf 1.0", 0.3, DRIFTING, (0.1, 0.2)),
        _slow("24 by Zipf 1.0", 1.2, DRIFTING, (0.1, 0.2)),
    ),
)
