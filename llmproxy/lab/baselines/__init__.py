"""The published policies with their documented defaults. Importing this package registers them."""

from llmproxy.lab.baselines import deployed_picker, disaggregated, dynamo, plain, session, sglang
from llmproxy.lab.baselines.by_name import baseline_named
from llmproxy.lab.baselines.policy import baselines

__all__ = [
    "baseline_named",
    "baselines",
    "deployed_picker",
    "disaggregated",
    "dynamo",
    "plain",
    "session",
    "sglang",
]
