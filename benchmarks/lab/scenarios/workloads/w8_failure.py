"""W8: replicas that die, hang, become slow or cut their answers. How much is lost, and how soon is it detected?"""

from collections.abc import Callable
from dataclasses import replace

from benchmarks.lab.scenarios.goals import least, mean, versus, worst
from benchmarks.lab.scenarios.scenario import (
    GOODPUT,
    POLICIES,
    TELLING,
    Beside,
    Case,
    Found,
    Goal,
    Scenario,
    Shape,
    both,
    sized,
    with_fault,
)
from llmproxy.core.domain import Outcome
from llmproxy.lab.fleet.spec import Fault, FleetFaultKind, SimulatedFleet
from llmproxy.lab.results.result import RunResult

SIZES = sized(max_num_seqs=16)
WITHIN_S = {FleetFaultKind.KILL: 1.0, FleetFaultKind.RESTART: 1.0, FleetFaultKind.HANG: 2.0, FleetFaultKind.SLOW: 5.0}
"""The seconds within which a fault must be detected.

For a hang, five times the TTFT p99 of the run counts if that is more.
"""
SETTLED_S = 10.0  # The seconds after a fault until the fleet should be as good as without the broken replica.
ATTEMPTS_MOST = 1.05
BEFORE_A_BYTE = frozenset(Outcome) - {Outcome.COMPLETED, Outcome.CANCELLED, Outcome.BROKEN_STREAM}
LATER, WITHOUT = "later", "later, without it"
FAULT_AT = 0.4


def restarts(*moments: tuple[float, int], away_s: float) -> Shape:
    """Returns a shape with restarts. `moments` are pairs of a share of the trace and the index of a replica."""

    def shape(fleet: SimulatedFleet, duration_s: float) -> SimulatedFleet:
        names = [spec.name for spec in fleet.replicas]
        faults = [Fault(at * duration_s, FleetFaultKind.RESTART, names[index], None, away_s) for at, index in moments]
        return replace(fleet, faults=(*fleet.faults, *faults))

    return shape


IN_TURN = restarts(*((0.2 + 0.09 * index, index) for index in range(8)), away_s=3.0)


def without_first(fleet: SimulatedFleet) -> SimulatedFleet:
    """Returns the fleet without the replica that has the fault."""
    return replace(fleet, replicas=fleet.replicas[1:], faults=())


def lost(run: RunResult) -> float:
    """Returns the number of requests that ended in an error before their first byte."""
    return float(sum(count for outcome, count in run.outcomes.items() if Outcome(outcome) in BEFORE_A_BYTE))


def attempts(run: RunResult) -> float | None:
    """Returns the mean number of attempts of a request; None without requests."""
    return run.attempts / run.offered if run.offered else None


def noticed_s(kind: FleetFaultKind) -> Callable[[RunResult], float | None]:
    """Returns a figure of a run: the longest time to the detection of a fault of this kind.

    The figure is None without a fault or without a detection.
    """

    def of(run: RunResult) -> float | None:
        times = [one.noticed_s for one in run.noticed if one.kind == kind]
        return None if not times or None in times else max(time for time in times if time is not None)

    return of


def survived(found: Found) -> list[Goal]:
    """Returns the goals: nothing lost, early detection, few retries, and soon as good as without the replica."""
    ours = found.runs["cost"]
    judged = [
        Goal("requests lost before their first byte", worst(ours, lost), 0.0, False),
        Goal("attempts for each request", worst(ours, attempts), ATTEMPTS_MOST, False),
    ]
    for kind in sorted({FleetFaultKind(one.kind) for run in ours for one in run.noticed}):
        within_s, about = WITHIN_S[kind], ""
        if kind is FleetFaultKind.HANG:
            within_s = max(within_s, 5.0 * (least(ours, lambda run: run.ttft_s.p99) or 0.0))
            about = "2 s, or five times the TTFT p99"
        judged.append(Goal(f"seconds until a {kind} is noticed", worst(ours, noticed_s(kind)), within_s, False, about))
    if found.beside:
        goodput = mean(found.beside[LATER], GOODPUT.of) or 0.0
        about = f"{goodput:.3f}, of requests that came {SETTLED_S:g} s after it or later"
        ratio = versus(found.beside[LATER], found.beside[WITHOUT], GOODPUT.of)
        judged.append(Goal("goodput over the oracle's without the replica", ratio, 0.98, True, about))
    return judged


def _case(name: str, shape: Shape, quick: bool = False, *, later: float | None = None, load: float = 0.7) -> Case:
    """Returns a case. `later`: the share of the trace from which it is compared with the fleet without the replica."""
    beside: tuple[Beside, ...] = ()
    if later is not None:
        beside = (Beside(LATER, "cost", warmup=later), Beside(WITHOUT, "oracle", reshaped=without_first, warmup=later))
    return Case(
        f"{name}, 8 x 8B",
        "azure2023_conv.csv.gz",
        "8xllama-8b-h100",
        (load,),
        requests=2_000,
        shape=both(SIZES, shape),
        policies=POLICIES if quick else TELLING,
        beside=beside,
        goals=survived,
        quick=quick,
    )


AFTER = 0.58  # The share of a trace of about 58 s that is SETTLED_S after a fault at FAULT_AT.

SCENARIO = Scenario(
    "W8",
    "Failures",
    "Azure's conversations while one of eight replicas is killed, hangs for a quarter of the time, takes ten times as"
    " long, restarts cold or flaps, while all restart in turn, or all cut 5 % of their answers; and all restart in turn"
    " at 1.5 times their capacity, when retries pile up.",
    GOODPUT,
    (
        _case("kill", with_fault(FAULT_AT, FleetFaultKind.KILL, 1), quick=True, later=AFTER),
        _case("hang", with_fault(FAULT_AT, FleetFaultKind.HANG, 1, until=0.65), later=AFTER),
        _case("slow x10", with_fault(FAULT_AT, FleetFaultKind.SLOW, 1, 10.0, until=0.8), later=AFTER),
        _case("5 % resets", with_fault(0.2, FleetFaultKind.RESET, 8, 0.05)),
        _case("restart", with_fault(FAULT_AT, FleetFaultKind.RESTART, 1, 5.0), later=AFTER),
        _case("rolling restart", IN_TURN),
        _case("flapping", restarts(*((0.2 + 0.1 * number, 0) for number in range(6)), away_s=1.0)),
        _case("retry storm", IN_TURN, load=1.5),
    ),
)
