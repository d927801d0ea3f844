"""W3: a hundred LoRA adapters and room for eight on each replica; who keeps them resident and the load even?"""

from benchmarks.scenarios.scenario import GOODPUT, TELLING, Case, Scenario, sized

SIZES = sized(max_num_seqs=32, max_loras=8, max_cpu_loras=32)

SCENARIO = Scenario(
    "W3",
    "Many adapters",
    "100 adapters whose popularity follows a power law and is drawn anew every 20 s (published: every 10 minutes; a"
    " run is short). The balance knows nothing of adapter slots, which are what is short here: hence the low loads.",
    GOODPUT,
    (
        Case(
            "Zipf 1.0, 8 x 8B",
            "gen:lora_zipf,adapters=100,alpha=1.0,rate=60,duration_s=40,drift_s=20",
            "8xllama-8b-h100",
            (0.25, 0.35),
            shape=SIZES,
            quick_loads=(0.25,),
        ),
        Case(
            "Zipf 0.6, 8 x 8B",
            "gen:lora_zipf,adapters=100,alpha=0.6,rate=60,duration_s=40,drift_s=20",
            "8xllama-8b-h100",
            (0.15,),
            shape=SIZES,
            policies=TELLING,
            quick=False,
        ),
    ),
)
