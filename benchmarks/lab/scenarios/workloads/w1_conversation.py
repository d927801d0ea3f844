"""W1: real chat traffic with prompts of up to 126,000 tokens. Does the choice of the replica matter?"""

from functools import partial

from benchmarks.lab.scenarios.scenario import GOODPUT, TELLING, Case, Scenario, sized

CHAT = partial(Case, trace="mooncake_conversation.jsonl.gz", requests=1_000)
FURTHER = partial(CHAT, policies=TELLING, quick=False)


def _small(replicas: int, sequences: int, known: bool) -> Case:
    """Returns a case whose batches fill before the KV cache does.

    `known`: the proxy is configured with the batch limit.
    """
    return FURTHER(
        f"{replicas} x 8B, batches of {sequences}, limits {'given' if known else 'learned'}",
        fleet=f"{replicas}xllama-8b-h100",
        loads=(0.85,),
        shape=sized(max_num_seqs=sequences),
        known_limits=known,
        policies=("cost", "late_least_request") if known else TELLING,
    )


SCENARIO = Scenario(
    "W1",
    "Conversations",
    "Stretches of the Mooncake conversation trace, accelerated by less than ten times."
    " Small batches, whose limit is given or learned, are in cases of their own."
    " Where objectives are named, each request names its objectives, as a client does in a trusted header.",
    GOODPUT,
    (
        CHAT("8 x 8B", fleet="8xllama-8b-h100", loads=(0.7, 0.85, 1.1), quick_loads=(0.7,)),
        FURTHER("16 x 8B", fleet="16xllama-8b-h100", loads=(0.85,), replicate=2),
        FURTHER("8 x 70B TP8", fleet="8xllama-70b-h100-tp8", loads=(0.85,)),
        FURTHER("8 x 8B, objectives named", fleet="8xllama-8b-h100", loads=(0.85, 1.1), objectives_named=True),
        *(_small(replicas, sequences, known) for replicas, sequences in ((8, 16), (2, 8)) for known in (False, True)),
    ),
)
