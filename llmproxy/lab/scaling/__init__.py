"""Signals of autoscalers, and the scaling rules of Kubernetes' HPA."""
