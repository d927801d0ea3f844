"""KV connectors: what the bodies of both legs say where one engine computes a prompt and another one answers."""

from llmproxy.core.kv_connectors import nixl, store
from llmproxy.core.kv_connectors.connector import KvConnector, NotHandedOver, Parameters, connectors

__all__ = ["KvConnector", "NotHandedOver", "Parameters", "connectors", "nixl", "store"]
