"""A KV cache store shared by all engines, such as LMCache, Mooncake or a folder (ExampleConnector)."""

from __future__ import annotations

from llmproxy.core.kv_connectors.connector import KvConnector, Parameters, connectors


@connectors.register("store")
class Store(KvConnector):
    """The prefill engine writes the blocks of the prompt to the store, and the decode engine finds them there."""

    def parameters(self, answer: bytes) -> Parameters:
        del answer
        return Parameters()
