"""The lock as a Lease of Kubernetes, by the rules of its own leader election: nobody compares clocks of two machines.

A Lease that another one holds is free when it was not renewed for its duration on the clock of who looks. Two that take
it at once differ in the version that they name, and the API server refuses the second.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from math import ceil
from typing import Any

from llmproxy.backends.kubernetes.api import ApiError, KubernetesApi
from llmproxy.remote.cluster.election import EPOCH_MAX, Leadership
from llmproxy.scheduling.valkey import StoreError

ADDRESS = "llmproxy/address"
"""The annotation with the address of the holder."""
CONFLICT, MISSING, FORBIDDEN = 409, 404, 403
TRIES = 5
"""Each conflict of two members lets one of them have the Lease, so that more are a fault of the API server."""


class KubernetesLock:
    """The Lease `name` in the namespace of this process. `api_url` is that of the API server, None inside a cluster."""

    def __init__(self, api_url: str | None, name: str) -> None:
        self._api = KubernetesApi(api_url)
        self.name = name
        self._seen: tuple[str, float] = "", 0.0

    async def take(self, wanted: Leadership, held_s: float) -> Leadership:
        """See `LockStore.take`."""
        for _ in range(TRIES):
            lease = await self._read()
            found = None if lease is None else _leadership(lease)
            if lease is not None and found is not None and found.holder != wanted.holder and not self._over(lease):
                return found
            try:
                return await self._write(lease, found, wanted, held_s)
            except ApiError as error:
                # Somebody else was quicker; who that is, is seen by reading again.
                if error.status != CONFLICT:
                    raise self._refused(error) from None
        raise StoreError("the API server refuses each change of the Lease as a conflict")

    async def holder(self) -> Leadership | None:
        """See `LockStore.holder`."""
        lease = await self._read()
        return None if lease is None or self._over(lease) else _leadership(lease)

    async def release(self, holder: str) -> None:
        """See `LockStore.release`."""
        lease = await self._read()
        if lease is None or lease["spec"].get("holderIdentity") != holder:
            return
        # As client-go does: a second is the least that the API allows.
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
            raise StoreError("the API server answers with something that is no Lease")
        return lease  # type: ignore[no-any-return] # it was looked at

    def _refused(self, error: ApiError) -> StoreError:
        rights = (
            f": the service account needs the verbs get and update for the lease {self.name}, and create for leases"
        )
        return StoreError(f"{error}{rights if error.status == FORBIDDEN else ''}")

    async def _write(
        self, lease: dict[str, Any] | None, found: Leadership | None, wanted: Leadership, held_s: float
    ) -> Leadership:
        """Take or renew. Raises ApiError, with CONFLICT where the Lease has changed meanwhile."""
        spec = {} if lease is None else lease["spec"]
        now = _time()
        if found is not None and found.holder == wanted.holder and found.epoch >= wanted.epoch:
            taken, times = Leadership(wanted.holder, wanted.address, found.epoch), {"renewTime": now}
        else:
            epoch = max(_epoch(spec), wanted.epoch) + 1
            taken = Leadership(wanted.holder, wanted.address, epoch)
            times = {"renewTime": now, "acquireTime": now}
        spec |= times | {
            "holderIdentity": taken.holder, "leaseDurationSeconds": ceil(held_s), "leaseTransitions": taken.epoch,
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
        """Whether it was not renewed for its duration since it was first seen so."""
        spec, now = lease["spec"], asyncio.get_running_loop().time()
        version = str(lease["metadata"].get("resourceVersion"))
        if self._seen[0] != version:
            self._seen = version, now
        return now - self._seen[1] >= float(spec.get("leaseDurationSeconds") or 0)

    def _path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._api.namespace}/leases/{self.name}"


def _is_lease(found: object) -> bool:
    """Whether it is an object whose parts have the types that are relied on here; a Lease may be empty."""
    if not isinstance(found, dict):
        return False
    spec, metadata = found.get("spec"), found.get("metadata")
    if not isinstance(spec, dict) or not isinstance(metadata, dict):
        return False
    held_s, annotations = spec.get("leaseDurationSeconds"), metadata.get("annotations")
    return isinstance(held_s, int | float | None) and isinstance(annotations, dict | None)


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
