"""The published policies with their documented defaults. Importing this package registers them."""

from llmproxy.lab.baselines import disaggregated, dynamo, endpoint_picker, plain, session, sglang
from llmproxy.lab.baselines.by_name import baseline_named
from llmproxy.lab.baselines.policy import baselines

__all__ = [
    "baseline_named",
    "baselines",
    "disaggregated",
    "dynamo",
    "endpoint_picker",
    "plain",
    "session",
    "sglang",
]
