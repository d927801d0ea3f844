"""KV connectors: the `kv_transfer_params` in the bodies of the prefill and the decode stage of a split request."""

from llmproxy.core.kv_connectors import nixl, store
from llmproxy.core.kv_connectors.connector import KvConnector, NotHandedOver, Parameters, connectors

__all__ = ["KvConnector", "NotHandedOver", "Parameters", "connectors", "nixl", "store"]
