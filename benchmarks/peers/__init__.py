"""Compares llmproxy with other proxies in front of the same mock replicas: CPU cost and added latency."""
