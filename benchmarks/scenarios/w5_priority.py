"""W5: more work than the fleet can do, a fifth of it critical; is that fifth served as if it were alone?"""

from benchmarks.scenarios.scenario import CRITICAL_GOODPUT, Case, Scenario, sized

SCENARIO = Scenario(
    "W5",
    "Priorities in overload",
    "20 % critical, 60 % default, 20 % sheddable, of one kind otherwise, up to twice what the fleet can do;"
    " and the critical fifth of that alone, for comparison.",
    CRITICAL_GOODPUT,
    (
        Case(
            "20/60/20, 4 x 8B",
            "gen:priority_mix,rate=50,duration_s=40,shared_tokens=500",
            "4xllama-8b-h100",
            (0.7, 1.5, 2.0),
            shape=sized(max_num_seqs=64),
            quick_loads=(2.0,),
        ),
        Case(
            "critical alone, 4 x 8B",
            "gen:priority_mix,rate=50,duration_s=40,shared_tokens=500,critical=1,sheddable=0",
            "4xllama-8b-h100",
            (0.4,),
            shape=sized(max_num_seqs=64),
            policies=("blend", "least_request", "oracle"),
        ),
    ),
)
