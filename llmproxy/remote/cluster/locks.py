"""The locks of an election, in Kubernetes and in Valkey (or Redis 6 and later).

The lock in Kubernetes is a Lease, by the rules of client-go: nothing compares the clocks of two machines. An observer
treats a Lease as free when it has seen no renewal for the Lease's duration on its own clock. If two members take the
Lease at once, the API server rejects the second write, because its resourceVersion is stale.

The lock in Valkey is a key that expires, taken and renewed by a script.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from math import ceil
from typing import Any

from llmproxy.backends.kubernetes.api import ApiError, KubernetesApi
from llmproxy.config import ClusterConfig, ConfigError
from llmproxy.remote.cluster.election import EPOCH_MAX, Leadership, LockStore, StoreError

ADDRESS = "llmproxy/address"  # The annotation with the address of the holder.
CONFLICT, MISSING, FORBIDDEN = 409, 404, 403
TRIES = 5  # Attempts per call. Each conflict means that another member succeeded.
ANSWER_S = 5.0  # Maximum time of an answer of Valkey.

TAKE = """
local held = redis.call('GET', KEYS[1])
if held then
  local now = cjson.decode(held)
  if now.holder ~= ARGV[1] then return held end
  if now.epoch >= tonumber(ARGV[3]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[4])
    return held
  end
end
local epoch = math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[3])) + 1
redis.call('SET', KEYS[2], string.format('%.0f', epoch))
local taken = cjson.encode({holder = ARGV[1], address = ARGV[2], epoch = epoch})
redis.call('SET', KEYS[1], taken, 'PX', ARGV[4])
return taken
"""
RELEASE = """
local held = redis.call('GET', KEYS[1])
if held then
  if cjson.decode(held).holder == ARGV[1] then redis.call('DEL', KEYS[1]) end
end
return 1
"""


def open_lock_store(config: ClusterConfig, kubernetes_api: str | None) -> LockStore:
    """Returns the lock `cluster.lock`. Raises ConfigError if a library is missing or the URL is invalid."""
    if config.lock == "kubernetes":
        return KubernetesLock(kubernetes_api, config.name)
    return ValkeyLock(str(config.lock), config.name)


class KubernetesLock:
    """The Lease `name` in the namespace of this process. `api_url` is the API server; None inside a cluster."""

    def __init__(self, api_url: str | None, name: str) -> None:
        self._api = KubernetesApi(api_url)
        self.name = name
        self._seen: tuple[str, float] = "", 0.0

    async def take(self, wanted: Leadership, lock_s: float) -> Leadership:
        for _ in range(TRIES):
            lease = await self._read()
            found = None if lease is None else _in_lease(lease)
            if lease is not None and found is not None and found.holder != wanted.holder and not self._over(lease):
                return found
            try:
                return await self._write(lease, found, wanted, lock_s)
            except ApiError as error:
                # Another member has changed the Lease: read it again.
                if error.status != CONFLICT:
                    raise self._refused(error) from None
        raise StoreError("the API server refuses each change of the Lease as a conflict")

    async def holder(self) -> Leadership | None:
        lease = await self._read()
        return None if lease is None or self._over(lease) else _in_lease(lease)

    async def release(self, holder: str) -> None:
        lease = await self._read()
        found = None if lease is None else _in_lease(lease)
        if lease is None or found is None or found.holder != holder:
            return
        # As client-go does: one second is the minimum of the API.
        lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _time()}
        try:
            await self._api.send("PUT", self._path(), lease)
        except ApiError as error:
            raise self._refused(error) from None

    async def close(self) -> None:
        await self._api.close()

    async def _read(self) -> dict[str, Any] | None:
        try:
            lease = await self._api.send("GET", self._path())
        except ApiError as error:
            if error.status == MISSING:
                return None
            raise self._refused(error) from None
        if not _is_lease(lease):
            raise StoreError("the answer of the API server is not a Lease")
        return lease  # type: ignore[no-any-return] # checked by _is_lease

    def _refused(self, error: ApiError) -> StoreError:
        rights = (
            f": the service account needs the verbs get and update for the lease {self.name}, and create for leases"
        )
        return StoreError(f"{error}{rights if error.status == FORBIDDEN else ''}")

    async def _write(
        self, lease: dict[str, Any] | None, found: Leadership | None, wanted: Leadership, lock_s: float
    ) -> Leadership:
        """Takes or renews the Lease. Raises ApiError, with status CONFLICT if the Lease has changed meanwhile."""
        spec = {} if lease is None else lease["spec"]
        now = _time()
        if found is not None and found.holder == wanted.holder and found.epoch >= wanted.epoch:
            taken, times = Leadership(wanted.holder, wanted.address, found.epoch), {"renewTime": now}
        else:
            epoch = max(_epoch(spec), wanted.epoch) + 1
            taken = Leadership(wanted.holder, wanted.address, epoch)
            times = {"renewTime": now, "acquireTime": now}
        spec |= times | {
            "holderIdentity": taken.holder, "leaseDurationSeconds": ceil(lock_s), "leaseTransitions": taken.epoch,
        }  # fmt: skip
        if lease is None:
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self.name, "annotations": {ADDRESS: taken.address}},
                "spec": spec,
            }
            await self._api.send("POST", self._path().rpartition("/")[0], lease)
        else:
            metadata = lease["metadata"]
            metadata["annotations"] = (metadata.get("annotations") or {}) | {ADDRESS: taken.address}
            await self._api.send("PUT", self._path(), lease)
        return taken

    def _over(self, lease: dict[str, Any]) -> bool:
        """Returns whether the Lease has expired: this process has seen the same version for the whole duration."""
        spec, now = lease["spec"], asyncio.get_running_loop().time()
        version = str(lease["metadata"].get("resourceVersion"))
        if self._seen[0] != version:
            self._seen = version, now
        return now - self._seen[1] >= float(spec.get("leaseDurationSeconds") or 0)

    def _path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._api.namespace}/leases/{self.name}"


def _is_lease(found: object) -> bool:
    """Returns whether spec and metadata are objects, and duration and annotations are of the right type or missing."""
    if not isinstance(found, dict):
        return False
    spec, metadata = found.get("spec"), found.get("metadata")
    if not isinstance(spec, dict) or not isinstance(metadata, dict):
        return False
    lock_s, annotations = spec.get("leaseDurationSeconds"), metadata.get("annotations")
    return isinstance(lock_s, int | float | None) and isinstance(annotations, dict | None)


def _in_lease(lease: dict[str, Any]) -> Leadership | None:
    spec, metadata = lease["spec"], lease["metadata"]
    if not spec.get("holderIdentity"):
        return None
    address = (metadata.get("annotations") or {}).get(ADDRESS, "")
    return Leadership(str(spec["holderIdentity"]), str(address), _epoch(spec))


def _epoch(spec: dict[str, Any]) -> int:
    epoch = spec.get("leaseTransitions")
    return epoch if isinstance(epoch, int) and 0 <= epoch <= EPOCH_MAX else 0


def _time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class ValkeyLock:
    """The lock `name` at `url`, a server of Valkey, or of Redis 6 and later. Raises ConfigError."""

    def __init__(self, url: str, name: str) -> None:
        try:
            from valkey.asyncio import Valkey
            from valkey.exceptions import ValkeyError
        except ImportError:
            need = "cluster.lock: valkey:// needs the library valkey: pip install 'llmproxy-lb[valkey]'"
            raise ConfigError([need]) from None
        self.name = name
        self._failed: type[Exception] = ValkeyError
        # A retry inside the library would hide the age of a call.
        try:
            self.client: Any = Valkey.from_url(
                url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S, retry_on_timeout=False
            )
        except ValueError as error:
            raise ConfigError([f"cluster.lock: {error}"]) from None
        self._shown = url.partition("?")[0].rpartition("@")[2]
        # The braces are a hash tag: both keys are in one slot of a Valkey cluster.
        self._keys = f"llmproxy:{{{name}}}:leader", f"llmproxy:{{{name}}}:epoch"

    async def take(self, wanted: Leadership, lock_s: float) -> Leadership:
        given = wanted.holder, wanted.address, wanted.epoch, round(1000 * lock_s)
        return _in_key(await self._run(TAKE, self._keys, *given))

    async def holder(self) -> Leadership | None:
        held = await self._run("return redis.call('GET', KEYS[1])", self._keys[:1])
        return None if held is None else _in_key(held)

    async def release(self, holder: str) -> None:
        await self._run(RELEASE, self._keys[:1], holder)

    async def close(self) -> None:
        await self.client.aclose()

    async def _run(self, script: str, keys: Sequence[str], *given: str | int) -> Any:
        """Returns the result of a script. Raises StoreError."""
        try:
            return await self.client.eval(script, len(keys), *keys, *given)
        except (self._failed, OSError) as error:
            raise StoreError(f"a request to {self._shown} failed: {error}") from None


def _in_key(held: bytes) -> Leadership:
    """Decodes the value of the lock's key. Raises StoreError if another program wrote the value."""
    try:
        found = json.loads(held)
        epoch = int(found["epoch"])
        if not 0 <= epoch <= EPOCH_MAX:
            raise ValueError(epoch)
        return Leadership(str(found["holder"]), str(found["address"]), epoch)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise StoreError("the key of the lock holds something else") from None
