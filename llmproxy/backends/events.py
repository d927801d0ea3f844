"""Passes the results of polls to the dispatcher first, then to all observers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import structlog

from llmproxy.core.backends.health import Ejected, EjectionEvent, EjectionSkipped
from llmproxy.core.domain import Listing, Reading, Trouble
from llmproxy.core.pools import Pools
from llmproxy.observe.metrics import Metrics
from llmproxy.scheduling.dispatcher import Dispatcher

_log = structlog.get_logger()


class BackendObserver:
    """The base class of observers of backends. Each method does nothing by default.

    The methods must be quick: they run on the event loop, after the dispatcher has handled the same event. The events
    of one poll come in the order of its requests.
    """

    def listed(self, backend: str, listing: Listing) -> None:
        """Handles a new model list of a backend."""

    def observe(self, backend: str, reading: Reading) -> None:
        """Handles the metrics of a scrape that shows the load of an engine. Called before `answered`."""

    def published(self, backend: str, limit: int) -> None:
        """Handles the batch limit that a backend publishes: the number of sequences that it runs at once."""

    def unread(self, backend: str, trouble: Trouble, detail: str) -> None:
        """Handles metrics that could not be read, which do not count as a failed poll.

        `answered` or `troubled` follows. `detail` describes the request and its result for people.
        """

    def answered(self, backend: str) -> None:
        """Handles the end of a poll that found the backend healthy, whether or not its metrics were readable."""

    def timed_out(self, backend: str) -> None:
        """Handles a request of a poll that got no answer within `poll.timeout_s`. `unread` or `troubled` follows."""

    def troubled(self, backend: str, trouble: Trouble, detail: str) -> None:
        """Handles a failed poll. `detail` describes the request and its result for people."""

    def removed(self, backend: str) -> None:
        """Forgets the state of a removed backend."""


class BackendEvents(BackendObserver):
    """Passes events to the dispatcher, then to `observers`. Observers may be added until the first backend joins."""

    def __init__(self, dispatcher: Dispatcher, observers: Sequence[BackendObserver] = ()) -> None:
        self._dispatcher = dispatcher
        self._pools: Pools = dispatcher.pools
        self.observers = list(observers)

    def listed(self, backend: str, listing: Listing) -> None:
        if backend not in self._pools.backends:
            # The backend was removed during a read of its models that followed a change of adapters.
            return
        self._dispatcher.listed(backend, listing)
        for observer in self.observers:
            observer.listed(backend, listing)

    def observe(self, backend: str, reading: Reading) -> None:
        self._dispatcher.observe(backend, reading)
        for observer in self.observers:
            observer.observe(backend, reading)

    def published(self, backend: str, limit: int) -> None:
        self._dispatcher.published(backend, limit)
        for observer in self.observers:
            observer.published(backend, limit)

    def unread(self, backend: str, trouble: Trouble, detail: str) -> None:
        self._pools.backends[backend].unread()
        for observer in self.observers:
            observer.unread(backend, trouble, detail)

    def answered(self, backend: str) -> None:
        self._dispatcher.answered(backend)
        for observer in self.observers:
            observer.answered(backend)

    def timed_out(self, backend: str) -> None:
        self._dispatcher.timed_out(backend)
        for observer in self.observers:
            observer.timed_out(backend)

    def troubled(self, backend: str, trouble: Trouble, detail: str) -> None:
        self._dispatcher.troubled(backend, trouble, detail)
        for observer in self.observers:
            observer.troubled(backend, trouble, detail)

    def removed(self, backend: str) -> None:
        for observer in self.observers:
            observer.removed(backend)


class PollCounter(BackendObserver):
    """Counts failed polls and unreadable metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def unread(self, backend: str, trouble: Trouble, detail: str) -> None:
        del detail
        self._metrics.poll_failed(backend, trouble)

    troubled = unread


class BackendLog(BackendObserver):
    """Logs changes of backends, and sets `all_polled`."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._up: dict[str, bool] = {}
        self._serves: dict[str, tuple[str, ...]] = {}
        self._unread: set[str] = set()
        self._unpolled: set[str] = set()
        # Set when every backend of `expect` has answered a poll, failed a poll, or was removed.
        self.all_polled = asyncio.Event()

    def expect(self, backends: Iterable[str]) -> None:
        """Adds backends that are known at the start. `all_polled` waits for the first poll of each."""
        self._unpolled.update(backends)
        if not self._unpolled:
            self.all_polled.set()

    def answered(self, backend: str) -> None:
        self._log_health(backend, "")
        self._polled(backend)

    def observe(self, backend: str, reading: Reading) -> None:
        del reading
        self._unread.discard(backend)

    def published(self, backend: str, limit: int) -> None:
        _log.info("backend_publishes_limit", backend=backend, limit=limit)

    def unread(self, backend: str, trouble: Trouble, detail: str) -> None:
        if backend not in self._unread:
            self._unread.add(backend)
            _log.warning("backend_metrics_unreadable", backend=backend, why=f"{trouble}: {detail}")

    def listed(self, backend: str, listing: Listing) -> None:
        names = tuple(card.name for card in listing.cards)
        if self._serves.get(backend) != names:
            self._serves[backend] = names
            _log.info("backend_serves", backend=backend, models=list(names[:20]), count=len(names))

    def troubled(self, backend: str, trouble: Trouble, detail: str) -> None:
        self._log_health(backend, f"{trouble}: {detail}")
        self._polled(backend)

    def removed(self, backend: str) -> None:
        self._up.pop(backend, None)
        self._serves.pop(backend, None)
        self._unread.discard(backend)
        self._polled(backend)

    def health_changed(self, backend: str, event: EjectionEvent) -> None:
        """Logs the start or the end of an ejection, or an ejection that was skipped."""
        if isinstance(event, Ejected):
            _log.warning("backend_ejected", backend=backend, why=event.why, pause_s=event.pause_s)
        elif isinstance(event, EjectionSkipped):
            _log.warning("backend_not_ejected", backend=backend, why=event.why, hint="health.ejected_ratio_max")
        else:
            _log.info("backend_back", backend=backend, after_s=round(event.after_s, 3))

    def _polled(self, backend: str) -> None:
        self._unpolled.discard(backend)
        if self._unpolled or self.all_polled.is_set():
            return
        self.all_polled.set()
        if self._up and not any(self._up.values()):
            queue = self._pools.settings.queue
            _log.warning(
                "no_backend_up",
                backends=list(self._up)[:20],
                held_s=min(queue.no_backend_wait_s, queue.startup_wait_s),
                hint="backend_down names each failed poll; while no backend is up, requests wait held_s and get 503",
            )

    def _log_health(self, backend: str, why: str) -> None:
        up = not self._pools.backends[backend].health.down
        if self._up.get(backend) is up:
            return
        self._up[backend] = up
        if up:
            _log.info("backend_up", backend=backend)
        else:
            _log.warning("backend_down", backend=backend, why=why)
