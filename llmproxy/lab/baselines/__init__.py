"""The published policies, each with its documented defaults; importing this registers them all."""

from llmproxy.lab.baselines import disaggregated, dynamo, epp, plain, session, sglang
from llmproxy.lab.baselines.policy import baselines
from llmproxy.lab.baselines.tuning import baseline_named, variants, variants_of

__all__ = [
    "baseline_named",
    "baselines",
    "disaggregated",
    "dynamo",
    "epp",
    "plain",
    "session",
    "sglang",
    "variants",
    "variants_of",
]
