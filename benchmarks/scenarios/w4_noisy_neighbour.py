"""W4: one tenant asks for ten times as much as before; do the others notice?"""

from benchmarks.scenarios.scenario import VICTIMS_GOODPUT, Case, Scenario, sized

FAIRNESS = ("blend(fairness=fcfs)", "blend(fairness=round_robin)", "least_request", "epp_sticky", "cache_aware")
POLICIES = ("blend", *FAIRNESS, "oracle")

SCENARIO = Scenario(
    "W4",
    "Noisy neighbour",
    "Eight tenants alike until one of them asks for ten times as much; the tenants of a production hour (ServeGen), of"
    " whom one makes 41 % of the requests; 27 tenants of a chat arena. `blend` shares by tokens here.",
    VICTIMS_GOODPUT,
    (
        Case(
            "aggressor x10, 2 x 8B",
            "gen:noisy_neighbour,tenants=8,rate=30,start_s=20,end_s=70,ramp_s=10,duration_s=90",
            "2xllama-8b-h100",
            (None,),
            shape=sized(max_num_seqs=64),
            policies=POLICIES,
        ),
        Case(
            "nobody noisy, 2 x 8B",
            "gen:noisy_neighbour,tenants=8,rate=30,factor=1,start_s=20,end_s=70,ramp_s=10,duration_s=90",
            "2xllama-8b-h100",
            (None,),
            shape=sized(max_num_seqs=64),
            policies=("blend", "least_request"),
            quick=False,
        ),
        Case(
            "ServeGen m-large, 2 x 8B",
            "servegen_mlarge_1h.csv.gz",
            "2xllama-8b-h100",
            (0.9, 1.3),
            requests=3_000,
            shape=sized(max_num_seqs=64),
            policies=POLICIES,
            quick=False,
        ),
        Case(
            "arena, 1 x 8B",
            "lmsys_arena_vtc_real.csv.gz",
            "1xllama-8b-h100",
            (1.3,),
            shape=sized(max_num_seqs=32),
            policies=POLICIES,
            quick=False,
        ),
    ),
)
