"""Where the lock of a cluster is kept."""

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


def opened(config: ClusterConfig, kubernetes_api: str | None, shard: str) -> LockStore:
    """The lock of a shard in the store that `cluster.lock` names. Raises ConfigError where a library is missing."""
    name = name_of(config.name, shard)
    if config.lock == "kubernetes":
        return KubernetesLock(kubernetes_api, name)
    return ValkeyLock(str(config.lock), name)


def name_of(cluster: str, shard: str) -> str:
    """The name of the lock of a shard: that of the cluster, and of a pool with a lock of its own something of its name.

    Names of models have characters that a Lease may not have, so a part of a hash tells those apart that look the same.
    """
    if shard == DEFAULT:
        return cluster
    readable = re.sub("[^a-z0-9]+", "-", shard.lower())[:READABLE_CHARS].strip("-")
    return "-".join(part for part in (cluster, readable, sha256(shard.encode()).hexdigest()[:HASH_CHARS]) if part)
