"""The base class of KV connectors, what all of them share, and the registry of their names."""

from __future__ import annotations

from abc import ABC, abstractmethod

from msgspec import Struct

from llmproxy.core.policy_registry import Registry


class NotHandedOver(Exception):  # noqa: N818 - a fact about one answer, not an error of this code
    """The answer to a prefill does not say where the KV-cache of the prompt is. `missing`: it says nothing of that."""

    def __init__(self, message: str, *, missing: bool) -> None:
        super().__init__(message)
        self.message = message
        self.missing = missing


class Parameters(Struct, frozen=True):
    """What the second leg needs: the JSON value of its `kv_transfer_params`, None for none.

    They are of use for `age_max_s`, and for one request alone. `host` is where the second engine will look for the
    first one, None where it does not connect to it.
    """

    value: bytes | None = None
    host: str | None = None
    age_max_s: float | None = None


class KvConnector(ABC):
    """How two engines hand the KV-cache of a prompt over. They move it themselves; the proxy carries what they say."""

    asks: bytes | None = None
    """The JSON value of `kv_transfer_params` in the first leg, None for none."""
    frees_refused = False
    """Whether the first engine frees the blocks of a prompt at once where the second one refuses its leg with a 4xx."""

    def __init__(self, lease_s: float) -> None:
        """`lease_s` is how long the first engine keeps the blocks of a prompt for the second one."""
        self.lease_s = lease_s

    @abstractmethod
    def parameters(self, answer: bytes) -> Parameters:
        """What the second leg needs, by the JSON answer to the first one. Raises NotHandedOver."""


connectors: Registry[type[KvConnector]] = Registry("KV connector")
