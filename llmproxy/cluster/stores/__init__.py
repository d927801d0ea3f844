"""Where the lock of a cluster is kept."""

from __future__ import annotations

from llmproxy.cluster.election import LockStore
from llmproxy.cluster.stores.kubernetes import KubernetesLock
from llmproxy.cluster.stores.valkey import ValkeyLock
from llmproxy.config import ClusterConfig


def opened(config: ClusterConfig, kubernetes_api: str | None) -> LockStore:
    """The store that `cluster.lock` names. Raises ConfigError where a library is missing."""
    if config.lock == "kubernetes":
        return KubernetesLock(kubernetes_api, config.name)
    return ValkeyLock(str(config.lock), config.name)
