"""llmproxy: a load balancer for vLLM replicas that owns the queue, the bytes and the stream."""

__version__ = "0.1.0"
