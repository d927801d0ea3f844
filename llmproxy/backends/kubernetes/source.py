"""A source of backends: the pods of a Service, a label selector or an InferencePool."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llmproxy.backends.kubernetes.api import KubernetesApi
from llmproxy.backends.kubernetes.endpoints import (
    Builder,
    UnclearPortError,
    pod_backends,
    pool_backends,
    service_backends,
)
from llmproxy.backends.kubernetes.objects import EndpointSlice, InferencePool, Pod
from llmproxy.backends.kubernetes.watched import Watched
from llmproxy.backends.source import BACKENDS_MAX, RefusedLog, SourceFailedError
from llmproxy.config import BackendConfig
from llmproxy.config.pods_url import PODS, SERVICE, PodsUrl
from llmproxy.lifecycle.background import supervised

REPEAT_S = 1.0  # Time until backends that could not be used are returned again.
GATHER_S = 0.05  # How long changes are gathered before they are read, because a rollout brings many at once.
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
PODS_PATH = "/api/v1/namespaces/{}/pods"


class KubernetesSource:
    """Watches the pods of a Kubernetes URL until `close`. `query` waits for the next change and returns all pods."""

    interval_s = GATHER_S

    def __init__(self, template: BackendConfig, api: KubernetesApi) -> None:
        self._api = api
        self._url = url = PodsUrl.of(template.url)
        self._namespace = url.namespace or api.namespace
        foreign = url.namespace is not None and url.namespace != api.namespace
        self._builder = Builder(template, url.scheme, url.port, f".{url.namespace}" if foreign else "")
        self._changed = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slices: Watched[EndpointSlice] | None = None
        self._pool: Watched[InferencePool] | None = None
        self._pods: Watched[Pod] | None = None
        self._selector = ""
        self._refused = RefusedLog()

    async def query(self) -> Sequence[BackendConfig]:
        if not self._tasks:
            self._start()
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._follow_selector()
            watched = [one for one in (self._slices, self._pool, self._pods) if one is not None]
            for one in watched:
                if one.trouble is not None:
                    raise SourceFailedError(one.trouble)
            if all(one.objects is not None for one in watched):
                return self._backends()

    def repeat(self) -> None:
        asyncio.get_running_loop().call_later(REPEAT_S, self._changed.set)

    def _start(self) -> None:
        if self._url.kind == SERVICE:
            self._slices = self._follow(
                "slices", SLICES, EndpointSlice, {"labelSelector": f"kubernetes.io/service-name={self._url.name}"}
            )
        elif self._url.kind == PODS:
            self._pods = self._follow("pods", PODS_PATH, Pod, {"labelSelector": self._url.name})
        else:
            query = {"fieldSelector": f"metadata.name={self._url.name}"}
            self._pool = self._follow("pool", POOLS, InferencePool, query)

    def _follow(self, name: str, path: str, kind: type[Any], query: dict[str, str]) -> Watched[Any]:
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()
        watched = Watched(self._api, path.format(self._namespace), query, kind, self._changed.set)
        self._tasks[name] = supervised(watched.run, f"watch {name} of {self._url.text}")
        return watched

    def _follow_selector(self) -> None:
        """Watches the pods that the InferencePool's selector matches now."""
        if (pool := self._the_pool()) is not None:
            selector = ",".join(f"{key}={value}" for key, value in sorted(pool.spec.selector.match_labels.items()))
            if selector != self._selector:
                self._selector = selector
                self._pods = self._follow("pods", PODS_PATH, Pod, {"labelSelector": selector})

    def _the_pool(self) -> InferencePool | None:
        return next(iter((self._pool.objects or {}).values()), None) if self._pool is not None else None

    def _backends(self) -> Sequence[BackendConfig]:
        pods = (self._pods.objects or {}).values() if self._pods is not None else ()
        refused: dict[str, str] = {}
        try:
            if self._slices is not None:
                found = service_backends(self._builder, (self._slices.objects or {}).values(), refused.__setitem__)
            elif self._pool is None:
                found = pod_backends(self._builder, pods, refused.__setitem__)
            else:
                pool = self._the_pool()
                if pool is None and self._pool.refused:
                    raise SourceFailedError(f"the InferencePool is invalid: {next(iter(self._pool.refused.values()))}")
                found = pool_backends(self._builder, pool, pods, refused.__setitem__) if pool is not None else []
        except UnclearPortError as error:
            raise SourceFailedError(str(error)) from None
        self._refused.log(self._url.text, refused)
        if len(found) > BACKENDS_MAX:
            raise SourceFailedError(f"there are {len(found)} pods, and {BACKENDS_MAX} are the most")
        return found

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._api.close()
