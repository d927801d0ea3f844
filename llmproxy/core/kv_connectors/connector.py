"""The base class of KV connectors, their shared types, and the registry of their names."""

from __future__ import annotations

from abc import ABC, abstractmethod

from msgspec import Struct

from llmproxy.core.policy_registry import Registry


class NotHandedOver(Exception):  # noqa: N818 - a fact about one answer, not an error of this code
    """The answer to a prefill stage does not say where the prompt's KV cache is. `missing`: it has no parameters."""

    def __init__(self, message: str, *, missing: bool) -> None:
        super().__init__(message)
        self.message = message
        self.missing = missing


class Parameters(Struct, frozen=True):
    """The parameters of a decode stage. They are valid for a single request."""

    value: bytes | None = None  # The JSON value of `kv_transfer_params`, None for none.
    # The host at which the decode engine connects to the prefill engine, None if it does not connect.
    host: str | None = None
    age_max_s: float | None = None  # How long the parameters are valid; None for no limit.


class KvConnector(ABC):
    """A protocol by which two engines hand over the KV cache of a prompt. The proxy carries their parameters."""

    asks: bytes | None = None  # The JSON value of `kv_transfer_params` in the prefill stage, None for none.
    frees_refused = False  # Whether a 4xx to the decode stage makes the prefill engine free the blocks at once.

    def __init__(self, lease_s: float) -> None:
        """`lease_s`: how long the prefill engine keeps the blocks of a prompt for the decode engine."""
        self.lease_s = lease_s

    @abstractmethod
    def parameters(self, answer: bytes) -> Parameters:
        """Reads the parameters for the decode stage from the prefill `answer`. Raises NotHandedOver."""


connectors: Registry[type[KvConnector]] = Registry("KV connector")
