"""W1: real chat traffic with prompts of up to 126,000 tokens; what does it matter where a request goes?"""

from benchmarks.lab.scenarios.scenario import GOODPUT, TELLING, Case, Scenario, sized


def _small(replicas: int, sequences: int, known: bool) -> Case:
    """Batches so small that they fill before the memory does, whose size the proxy has to learn unless it is given."""
    return Case(
        f"{replicas} x 8B, batches of {sequences}, limits {'given' if known else 'learned'}",
        "mooncake_conversation.jsonl.gz",
        f"{replicas}xllama-8b-h100",
        (0.85,),
        requests=1_000,
        shape=sized(max_num_seqs=sequences),
        known_limits=known,
        policies=("cost", "late_least_request") if known else TELLING,
        quick=False,
    )


SCENARIO = Scenario(
    "W1",
    "Conversations",
    "Stretches of the Mooncake conversation trace, faster than they were, but never ten times."
    " Small batches, whose limit is given or has to be learned, are in cases of their own."
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
        *(_small(replicas, sequences, known) for replicas, sequences in ((8, 16), (2, 8)) for known in (False, True)),
    ),
)
