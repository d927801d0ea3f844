"""The published policies with their documented defaults. Importing this package registers them."""

from llmproxy.lab.baselines import deployed_picker, disaggregated, dynamo, plain, session, sglang
from llmproxy.lab.baselines.policy import baselines
from llmproxy.lab.baselines.tuning import baseline_named, variants, variants_of

__all__ = [
    "baseline_named",
    "baselines",
    "deployed_picker",
    "disaggregated",
    "dynamo",
    "plain",
    "session",
    "sglang",
    "variants",
    "variants_of",
]
