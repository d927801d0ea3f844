"""The published policies, each with its documented defaults; importing this registers them all."""

from llmproxy.lab.baselines import dynamo, epp, plain, session, sglang
from llmproxy.lab.baselines.tuning import baseline_named, variants, variants_of
from llmproxy.lab.policy import baselines

__all__ = ["baseline_named", "baselines", "dynamo", "epp", "plain", "session", "sglang", "variants", "variants_of"]
