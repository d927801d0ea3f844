"""llmproxy: a load balancer for vLLM replicas with its own request queue."""

__version__ = "0.1.0"
