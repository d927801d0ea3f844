"""W8: replicas that die, hang, crawl or cut their answers; what is lost?"""

from dataclasses import replace

from benchmarks.scenarios.scenario import GOODPUT, POLICIES, TELLING, Case, Scenario, Shape, befallen, both, sized
from llmproxy.lab.fleet import Fault, FaultKind, Fleet

SIZES = sized(max_num_seqs=16)


def rolling(kind: FaultKind, first: float, apart: float, count: int, value: float) -> Shape:
    """The same fault of one replica after the other."""

    def shape(fleet: Fleet, duration_s: float) -> Fleet:
        faults = [
            Fault((first + apart * i) * duration_s, kind, spec.name, None, value)
            for i, spec in enumerate(fleet.replicas[:count])
        ]
        return replace(fleet, faults=(*fleet.faults, *faults))

    return shape


def flapping(first: float, apart: float, count: int) -> Shape:
    """One replica dies and is back a second later, again and again."""

    def shape(fleet: Fleet, duration_s: float) -> Fleet:
        name = fleet.replicas[0].name
        moments = [(first + apart * i) * duration_s for i in range(count)]
        return replace(fleet, faults=tuple(Fault(at_s, FaultKind.RESTART, name, None, 1.0) for at_s in moments))

    return shape


def _case(name: str, shape: Shape, quick: bool = False) -> Case:
    return Case(
        f"{name}, 8 x 8B",
        "azure2023_conv.csv.gz",
        "8xllama-8b-h100",
        (0.7,),
        requests=2_000,
        shape=both(SIZES, shape),
        policies=POLICIES if quick else TELLING,
        quick=quick,
    )


SCENARIO = Scenario(
    "W8",
    "Failures",
    "Azure's conversations while one of eight replicas is killed, hangs for a quarter of the time, takes ten times as"
    " long, restarts cold or flaps, while all restart in turn, or all cut 5 % of their answers.",
    GOODPUT,
    (
        _case("kill", befallen(0.4, FaultKind.KILL, 1), quick=True),
        _case("hang", befallen(0.4, FaultKind.HANG, 1, until=0.65)),
        _case("slow x10", befallen(0.4, FaultKind.SLOW, 1, 10.0, until=0.8)),
        _case("5 % resets", befallen(0.2, FaultKind.RESET, 8, 0.05)),
        _case("restart", befallen(0.4, FaultKind.RESTART, 1, 5.0)),
        _case("rolling restart", rolling(FaultKind.RESTART, 0.2, 0.09, 8, 3.0)),
        _case("flapping", flapping(0.2, 0.1, 6)),
    ),
)
