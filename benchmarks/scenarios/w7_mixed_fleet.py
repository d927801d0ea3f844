"""W7: replicas of two speeds, unlabelled, and one that becomes slow; who learns it?"""

from benchmarks.scenarios.scenario import GOODPUT, Case, Scenario, befallen, both, sized
from llmproxy.lab.fleet import FaultKind

SCENARIO = Scenario(
    "W7",
    "Unequal replicas",
    "Four H100 and four A100 under Azure's conversations; half way one H100 takes twice as long for everything.",
    GOODPUT,
    (
        Case(
            "4 x H100 + 4 x A100",
            "azure2023_conv.csv.gz",
            "4xllama-8b-h100+4xllama-8b-a100",
            (0.7, 0.85),
            requests=2_000,
            shape=both(sized(max_num_seqs=32), befallen(0.5, FaultKind.SLOW, 1, 2.0)),
            quick_loads=(0.7,),
        ),
    ),
)
