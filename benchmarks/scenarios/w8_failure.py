"""W8: replicas that die, hang, crawl or cut their answers; what is lost?"""

from benchmarks.scenarios.scenario import GOODPUT, Case, Scenario, Shape, befallen, both, sized
from llmproxy.lab.fleet import FaultKind

SIZES = sized(max_num_seqs=16)


def _case(name: str, shape: Shape, quick: bool = True) -> Case:
    return Case(
        f"{name}, 8 x 8B",
        "azure2023_conv.csv.gz",
        "8xllama-8b-h100",
        (0.7,),
        requests=2_500,
        stride=150,
        shape=both(SIZES, shape),
        quick=quick,
    )


SCENARIO = Scenario(
    "W8",
    "Failures",
    "Azure's conversations while one of eight replicas is killed, hangs for a quarter of the time, takes ten times as"
    " long, or restarts cold, or all of them cut 5 % of their answers.",
    GOODPUT,
    (
        _case("kill", befallen(0.4, FaultKind.KILL, 1)),
        _case("hang", befallen(0.4, FaultKind.HANG, 1, until=0.65), quick=False),
        _case("slow x10", befallen(0.4, FaultKind.SLOW, 1, 10.0, until=0.8)),
        _case("5 % resets", befallen(0.2, FaultKind.RESET, 8, 0.05), quick=False),
        _case("restart", befallen(0.4, FaultKind.RESTART, 1, 5.0), quick=False),
    ),
)
