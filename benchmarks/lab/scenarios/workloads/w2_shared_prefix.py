"""W2: many requests with common beginnings. Do they stay on few replicas, and spread when one is not enough?"""

from benchmarks.lab.scenarios.scenario import GOODPUT, TELLING, Case, Scenario

SCENARIO = Scenario(
    "W2",
    "Agents and shared prefixes",
    "The b2b workload (150 system prompts of 6,000 tokens); tool agents, from a synthetic trace with the"
    " published sums of a real trace that is too large to ship; code agents in a closed loop.",
    GOODPUT,
    (
        Case(
            "b2b, 8 x Qwen3-32B TP2",
            "gen:shared_system_prompts,rate=12,duration_s=100",
            "8xqwen-32b-h100-tp2",
            (0.85, 0.95),
            quick_loads=(0.85,),
        ),
        Case(
            "tool agents, 16 x 8B",
            "SYNTHETIC_toolagent_like.jsonl.gz",
            "16xllama-8b-h100",
            (0.7, 0.85),
            requests=1_500,
            policies=TELLING,
            quick=False,
        ),
        Case(
            "code agents, 8 x Qwen3-32B TP2",
            "gen:agent_loops,concurrency=40,conversations=2",
            "8xqwen-32b-h100-tp2",
            (None,),
            policies=TELLING,
            quick=False,
        ),
    ),
)
