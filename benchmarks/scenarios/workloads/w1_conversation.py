"""W1: real chat traffic with prompts of up to 126,000 tokens; what does it matter where a request goes?"""

from benchmarks.scenarios.scenario import GOODPUT, TELLING, Case, Scenario

SCENARIO = Scenario(
    "W1",
    "Conversations",
    "Stretches of the Mooncake conversation trace, faster than they were, but never ten times."
    " Where objectives are named, each request says by which it is judged, as a client does in a trusted header.",
    GOODPUT,
    (
        Case(
            "8 x 8B",
            "mooncake_conversation.jsonl.gz",
            "8xllama-8b-h100",
            (0.7, 0.85, 1.1),
            requests=1_000,
            quick_loads=(0.7,),
        ),
        Case(
            "16 x 8B",
            "mooncake_conversation.jsonl.gz",
            "16xllama-8b-h100",
            (0.85,),
            requests=1_000,
            replicate=2,
            policies=TELLING,
            quick=False,
        ),
        Case(
            "8 x 70B TP8",
            "mooncake_conversation.jsonl.gz",
            "8xllama-70b-h100-tp8",
            (0.85,),
            requests=1_000,
            policies=TELLING,
            quick=False,
        ),
        Case(
            "8 x 8B, objectives named",
            "mooncake_conversation.jsonl.gz",
            "8xllama-8b-h100",
            (0.85, 1.1),
            requests=1_000,
            policies=TELLING,
            quick=False,
            objectives_named=True,
        ),
    ),
)
