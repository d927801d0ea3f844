"""llmproxy beside other proxies, all in front of the same mock replicas: cost and added latency."""
