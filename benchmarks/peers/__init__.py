"""llmproxy beside other proxies, all in front of the same mock replicas: what each costs, and what it adds."""
