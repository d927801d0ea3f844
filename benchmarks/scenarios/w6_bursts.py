"""W6: bursts, and replicas that come when they are needed; how late does a first token get?"""

from benchmarks.scenarios.scenario import TTFT_P99, Case, Scenario, both, joining, sized

SCENARIO = Scenario(
    "W6",
    "Bursts and growth",
    "Steps of five times the rate, with two replicas that join in mid-burst; a bursty production hour (ServeGen"
    " m-large; Azure's code trace, burstier still, cannot be had).",
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
