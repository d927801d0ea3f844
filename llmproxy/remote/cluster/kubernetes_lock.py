"""The lock as a Kubernetes Lease, by the rules of client-go: nothing compares the clocks of two machines.

An observer treats a Lease as free when it has seen no renewal for the Lease's duration on its own clock. If two members
take the Lease at once, the API server rejects the second write, because its resourceVersion is stale.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from math import ceil
from typing import Any

from llmproxy.backends.kubernetes.api import ApiError, KubernetesApi
from llmproxy.remote.cluster.election import EPOCH_MAX, Leadership
from llmproxy.scheduling.valkey import StoreError

ADDRESS = "llmproxy/address"  # The annotation with the address of the holder.
CONFLICT, MISSING, FORBIDDEN = 409, 404, 403
TRIES = 5  # Attempts per call. Each conflict means that another member succeeded.


class KubernetesLock:
    """The Lease `name` in the namespace of this process. `api_url` is the API server; None inside a cluster."""

    def __init__(self, api_url: str | None, name: str) -> None:
        self._api = KubernetesApi(api_url)
        self.name = name
        self._seen: tuple[str, float] = "", 0.0

    async def take(self, wanted: Leadership, lock_s: float) -> Leadership:
        for _ in range(TRIES):
            lease = await self._read()
            found = None if lease is None else _leadership(lease)
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
        return None if lease is None or self._over(lease) else _leadership(lease)

    async def release(self, holder: str) -> None:
        lease = await self._read()
        found = None if lease is None else _leadership(lease)
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
    """Returns whether the fields that this module reads have the right types. They may be missing."""
    if not isinstance(found, dict):
        return False
    spec, metadata = found.get("spec"), found.get("metadata")
    if not isinstance(spec, dict) or not isinstance(metadata, dict):
        return False
    lock_s, annotations = spec.get("leaseDurationSeconds"), metadata.get("annotations")
    return isinstance(lock_s, int | float | None) and isinstance(annotations, dict | None)


def _leadership(lease: dict[str, Any]) -> Leadership | None:
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
