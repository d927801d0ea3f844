"""Counts the requests of each API key, to show unused keys. Optional, because each key is a series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from llmproxy.observe.exit import RequestExit
from llmproxy.observe.series import Counts


class KeyMetrics(Collector):
    """Counts the requests of each API key. `keys` returns the tenant and the name of each configured key."""

    def __init__(self, registry: CollectorRegistry, keys: Callable[[], Iterable[tuple[str, str]]]) -> None:
        self._keys = keys
        self._requests = Counts("llmproxy_key_requests_total", "Requests ended, by key.", ("tenant", "key"))
        registry.register(self)

    def record(self, ended: RequestExit) -> None:
        if ended.key is not None:
            self._requests[ended.tenant, ended.key] += 1

    def collect(self) -> Iterator[Metric]:
        """Yields a counter with a series for each configured key, also for unused keys, and for no other key."""
        known = set(self._keys())
        for gone in self._requests.keys() - known:
            del self._requests[gone]
        for key in known:
            self._requests[key] += 0
        yield self._requests.family()

    def describe(self) -> Iterator[Metric]:
        yield self._requests.family()
