"""Fairness policies: the order of the flows of a band. Each policy has a file."""

from llmproxy.core.queueing.fairness import fair_share, fcfs, round_robin, slo
from llmproxy.core.queueing.fairness.policy import FairnessPolicy, policies

__all__ = ["FairnessPolicy", "fair_share", "fcfs", "policies", "round_robin", "slo"]
