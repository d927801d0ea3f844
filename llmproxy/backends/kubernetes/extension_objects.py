"""Watches the Gateway API Inference Extension's objects for the InferencePools that are backends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from llmproxy.backends.kubernetes.api import KubernetesApi
from llmproxy.backends.kubernetes.extension import OBJECTIVE, REWRITE, entries_of
from llmproxy.backends.kubernetes.objects import CustomObject
from llmproxy.backends.kubernetes.source import GATHER_S
from llmproxy.backends.kubernetes.watched import Watched
from llmproxy.config import Config, Entries
from llmproxy.config.pods_url import INFERENCE_POOL, KUBERNETES, PodsUrl
from llmproxy.lifecycle.background import supervised

RESOURCES = {OBJECTIVE: "inferenceobjectives", REWRITE: "inferencemodelrewrites"}
GROUPS = ("llm-d.ai", "inference.networking.x-k8s.io")
"""The API groups to watch. If an object is in both groups, the object in the first group counts."""
PATH = "/apis/{}/v1alpha2/namespaces/{}/{}"
NEVER = (401, 403, 404)
"""If a collection was answered with one of these HTTP statuses, its objects are no longer awaited."""

Pools = frozenset[tuple[str | None, str]]
"""InferencePools as (namespace, name). The namespace is None for the namespace of the proxy."""
_log = structlog.get_logger()


@dataclass(slots=True)
class _Collection:
    """The objects of one kind in one group and namespace."""

    kind: str
    group: str
    namespace: str
    watched: Watched[CustomObject]

    @property
    def absent(self) -> bool:
        """Whether the cluster lacks this kind of object. The extension is optional."""
        return self.watched.status == 404

    @property
    def name(self) -> str:
        return f"{RESOURCES[self.kind]}.{self.group} in {self.namespace}"


class ExtensionObjects:
    """Watches the extension's objects until `close`, and passes their configuration entries to `take` at every change.

    `awaited` is True while objects that were not read yet may define model names. `on_answer` is called when `awaited`
    may have changed. `answered` is set once each collection was read or has failed, and cleared when the pools change.
    """

    def __init__(self, take: Callable[[Entries], None], on_answer: Callable[[], None]) -> None:
        self.awaited = False
        self.answered = asyncio.Event()
        self.answered.set()
        self._take = take
        self._on_answer = on_answer
        self._definition: tuple[str | None, Pools] = (None, frozenset())
        self._taken = Entries()
        self._keeps = False
        self._absent: set[tuple[str, str]] = set()
        self._said: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def reconfigure(self, config: Config) -> None:
        """Watches the objects of the configured pools. The old entries stay in use until the new objects are read."""
        urls = (PodsUrl.of(backend.url) for backend in config.backends if backend.url.startswith(KUBERNETES))
        pools = frozenset((url.namespace, url.name) for url in urls if url.kind == INFERENCE_POOL)
        definition = config.discovery.kubernetes_api, pools
        if definition == self._definition or (not pools and not self._definition[1]):
            return
        self._definition = definition
        if self._task is not None:
            self._task.cancel()
        self.awaited = bool(pools)
        # The entries of former pools stay in use while the API server is away.
        self._keeps = self._taken != Entries()
        self.answered.clear()
        self._task = supervised(partial(self._follow, *definition), "follow the inference extension")

    async def _follow(self, url: str | None, wanted: Pools) -> None:
        api, changed = KubernetesApi(url), asyncio.Event()
        pools = {(namespace or api.namespace, name) for namespace, name in wanted}
        collections = [
            _Collection(
                kind, group, namespace,
                Watched(api, PATH.format(group, namespace, resource), {}, CustomObject, changed.set),
            )
            for namespace in sorted({namespace for namespace, _ in pools})
            for group in GROUPS
            for kind, resource in RESOURCES.items()
        ]  # fmt: skip
        tasks = [supervised(one.watched.run, f"watch {one.name}") for one in collections]
        try:
            while True:
                try:
                    self._read(collections, pools)
                except Exception as bug:  # noqa: BLE001 - the next change may be readable
                    _log.error("discovery_failed", source="objects", why=repr(bug), exc_info=bug)
                await changed.wait()
                await asyncio.sleep(GATHER_S)
                changed.clear()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await api.close()

    def _read(self, collections: Sequence[_Collection], pools: Collection[tuple[str, str]]) -> None:
        self._log_troubles(collections)
        self._log_absent(collections)
        if any(one.watched.objects is None and one.watched.trouble is None for one in collections):
            return
        objects = (
            (one.kind, found) for one in collections if not one.absent for found in (one.watched.objects or {}).values()
        )
        self.awaited = any(one.watched.objects is None and one.watched.status not in NEVER for one in collections)
        self._keeps = self._keeps and self.awaited
        entries = entries_of(objects, pools)
        if entries != self._taken and not self._keeps:
            self._taken = entries
            self._take(entries)
        self.answered.set()
        self._on_answer()

    def _log_troubles(self, collections: Sequence[_Collection]) -> None:
        now = {one.name: one.watched.trouble for one in collections if one.watched.trouble and not one.absent}
        for why in dict.fromkeys(now.values()):
            new = [name for name, trouble in now.items() if trouble == why != self._said.get(name)]
            if new:
                _log.warning("discovery_failed", source=", ".join(new), why=why)
        if over := [name for name in self._said if name not in now]:
            _log.info("discovery_recovered", source=", ".join(over))
        self._said = now

    def _log_absent(self, collections: Sequence[_Collection]) -> None:
        by_kind: dict[tuple[str, str], list[bool]] = {}
        for one in collections:
            by_kind.setdefault((one.kind, one.namespace), []).append(one.absent)
        absent = {key for key, groups in by_kind.items() if all(groups)}
        for kind, namespace in sorted(absent - self._absent):
            _log.info("no_such_objects", objects=RESOURCES[kind], namespace=namespace, groups=", ".join(GROUPS))
        self._absent = absent

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
