"""What each part of placement by cost is good for: the same traffic without it."""

from benchmarks.lab.scenarios.scenario import GOODPUT, Case, Scenario

WITHOUT = ("queue", "prefill", "stream", "harm", "eviction", "memory")
WINDOWS = (0, 8, 64, 1_000)
"""Requests above an engine's batch limit; with a thousand everything is bound when it comes."""
POLICIES = (
    "cost",
    *(f"cost(without={term})" for term in WITHOUT),
    *(f"cost(look_ahead={window})" for window in WINDOWS),
    "blend",
    "late_least_request",
    "oracle",
)

SCENARIO = Scenario(
    "A",
    "Ablations",
    "W1's conversations, W2's shared prefixes and its tool agents, under"
    " `cost` without one of its terms, and with other windows of late binding (the default follows from batch and"
    " times).",
    GOODPUT,
    (
        Case(
            "conversation, 8 x 8B",
            "mooncake_conversation.jsonl.gz",
            "8xllama-8b-h100",
            (0.85,),
            requests=1_000,
            policies=POLICIES,
            quick=False,
        ),
        Case(
            "b2b, 8 x Qwen3-32B TP2",
            "gen:shared_system_prompts,rate=12,duration_s=100",
            "8xqwen-32b-h100-tp2",
            (0.95,),
            policies=POLICIES,
            quick=False,
        ),
        Case(
            "tool agents, 16 x 8B",
            "SYNTHETIC_toolagent_like.jsonl.gz",
            "16xllama-8b-h100",
            (0.85,),
            requests=1_500,
            policies=POLICIES,
            quick=False,
        ),
    ),
)
