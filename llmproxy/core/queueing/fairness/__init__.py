"""Who goes next: which flow of a band is offered to the backends first. One file for each policy."""

from llmproxy.core.queueing.fairness import fair_share, fcfs, locality_fair_share, round_robin, slo
from llmproxy.core.queueing.fairness.policy import Fairness, FairnessPolicy, policies

__all__ = ["Fairness", "FairnessPolicy", "fair_share", "fcfs", "locality_fair_share", "policies", "round_robin", "slo"]
