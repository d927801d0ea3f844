"""Stores of the leader locks: Kubernetes and Valkey."""

from __future__ import annotations

import re
from hashlib import sha256

from llmproxy.config import ClusterConfig
from llmproxy.core.shards import DEFAULT
from llmproxy.remote.cluster.election import LockStore
from llmproxy.remote.cluster.stores.kubernetes import KubernetesLock
from llmproxy.remote.cluster.stores.valkey import ValkeyLock

READABLE_CHARS = 40
HASH_CHARS = 6


def open_lock_store(config: ClusterConfig, kubernetes_api: str | None, shard: str) -> LockStore:
    """Returns the lock of a shard in the store of `cluster.lock`. Raises ConfigError if a library is missing."""
    name = lock_name(config.name, shard)
    if config.lock == "kubernetes":
        return KubernetesLock(kubernetes_api, name)
    return ValkeyLock(str(config.lock), name)


def lock_name(cluster: str, shard: str) -> str:
    """Returns the name of a shard's lock: the cluster's name, and for a separate pool its name and a hash.

    A Lease name allows fewer characters than a model name. The hash distinguishes names that differ only in forbidden
    characters.
    """
    if shard == DEFAULT:
        return cluster
    readable = re.sub("[^a-z0-9]+", "-", shard.lower())[:READABLE_CHARS].strip("-")
    return "-".join(part for part in (cluster, readable, sha256(shard.encode()).hexdigest()[:HASH_CHARS]) if part)
