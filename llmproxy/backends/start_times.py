"""Measures how long new replicas take to start: from the first failed poll to the first model list."""

from __future__ import annotations

from collections.abc import Callable

from llmproxy.backends.events import BackendObserver
from llmproxy.core.domain import Listing, Trouble
from llmproxy.core.pools import Pools

LEAST_S = 2.0  # A start that took less time is not counted: the backend was running, and only a connection failed.


class StartTimes(BackendObserver):
    """Reports how long each new backend took to start: to the scaling of its pool, and to `on_start` (pool, seconds).

    A backend that answers its first poll was already running, so it is not measured.
    """

    def __init__(self, pools: Pools, clock: Callable[[], float], on_start: Callable[[str, float], None]) -> None:
        self._pools = pools
        self._clock = clock
        self._on_start = on_start
        self._since_s: dict[str, float | None] = {}

    def troubled(self, backend: str, trouble: Trouble, detail: str) -> None:
        del trouble, detail
        self._since_s.setdefault(backend, self._clock())

    def listed(self, backend: str, listing: Listing) -> None:
        del listing
        since_s, self._since_s[backend] = self._since_s.get(backend), None
        pool = self._pools.pool_of(backend)
        if since_s is None or pool is None:
            return
        took_s = self._clock() - since_s
        if took_s >= LEAST_S:
            self._pools.scaling.pool(pool).replica_started(took_s)
            self._on_start(pool, took_s)

    def removed(self, backend: str) -> None:
        self._since_s.pop(backend, None)
