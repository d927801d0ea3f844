"""Preemption: takes back leases that have no first byte yet, to free slots for requests of higher bands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from msgspec.structs import replace

from llmproxy.core.backends.backend import Backend
from llmproxy.core.domain import DECODE, DEFAULT, Preempt
from llmproxy.core.lease_events import LeaseEvent
from llmproxy.core.leases import LeaseObserver, LeaseRecord
from llmproxy.core.placement.first_fit import Unmatched
from llmproxy.core.placement.policy import NO_MATCH, could_serve
from llmproxy.core.queueing.headroom import Headroom
from llmproxy.core.queueing.queue import Queued
from llmproxy.core.settings import Settings

PREEMPT_MAX = 4  # Maximum number of simultaneous preemptions, so that a burst does not empty the engines.
LOOK_MAX = 64  # Maximum number of requests in the flows of a band that a pass examines, and of leases per request.


class Preemption(LeaseObserver):
    """Chooses leases to preempt, among the leases of bands up to `default` without a first byte.

    The lowest band is preempted first, and in it the newest lease, because the engine has spent the least work on it.
    The scheduling pass after the release decides which request gets the slot. A lease of band `default` is preempted
    only while a scrape proves that the request waits in the engine.
    """

    def __init__(self, settings: Settings, headroom: Headroom) -> None:
        self._settings = settings
        self._headroom = headroom
        self.open: dict[int, LeaseRecord] = {}  # The leases that may be preempted, by number.
        self._by_band: dict[int, dict[int, None]] = {}
        self._pending: dict[int, Backend] = {}
        self._urgent: dict[int, Backend] = {}

    def reconfigure(self, settings: Settings) -> None:
        self._settings = settings

    def booked(self, lease: LeaseRecord, now: float) -> None:
        if lease.guaranteed:
            # Higher bands must not preempt the minimum share of a band.
            return
        if lease.request.band <= DEFAULT:
            if lease.request.stage is DECODE:
                # The KV blocks of its prompt can be fetched only once.
                return
            self.open[lease.number] = lease
            self._by_band.setdefault(lease.request.band, {})[lease.number] = None
        else:
            self._urgent[lease.number] = lease.backend

    def started(self, lease: LeaseRecord, event: LeaseEvent, now: float) -> None:
        """Removes a lease that has a first byte or has ended, so that it is not preempted."""
        number = lease.number
        if number in self.open:
            del self._by_band[self.open.pop(number).request.band][number]
        self._pending.pop(number, None)
        self._urgent.pop(number, None)

    committed = returned = started

    def clear(self, backends: Iterable[Backend], now: float) -> Iterable[Preempt]:
        """Yields leases to preempt among the requests that wait inside engines, while a band above `default` is in use.

        An engine with waiting requests has fewer slots than expected, and serves them in order of arrival. So a lease
        is preempted if it is ahead of a lease above `default`, or beyond a batch limit that was learned later.
        """
        if not self.open or not self._settings.preemption or not self._headroom.used_above(DEFAULT, now):
            return
        behind = {backend.name: lease for lease, backend in self._urgent.items()}
        for backend in backends:
            last, beyond = behind.get(backend.name, -1), self._beyond(backend, now)
            if last < 0 and beyond <= 0:
                continue
            queued = [x for x in backend.queued(now) if x in self.open and backend.unstarted(x)]
            for lease in sorted(queued, key=lambda lease: self.open[lease].request.band):
                if len(self._pending) >= PREEMPT_MAX:
                    return
                if lease not in self._pending and (lease < last or beyond > 0):
                    beyond -= self.open[lease].request.sequences
                    yield self._preempt(lease)

    def _beyond(self, backend: Backend, now: float) -> int:
        """Returns how many sequences exceed limit and look-ahead, without leases that are being preempted."""
        if backend.reading is None or not backend.reading.waiting:
            return 0
        view = backend.view(now)
        leaving = sum(self.open[x].request.sequences for x, owner in self._pending.items() if owner is backend)
        return view.load - leaving - view.limit - view.look_ahead

    def choose(self, waiting: Iterable[Queued], now: float) -> Iterator[Preempt]:
        """Yields leases to preempt so that the requests `waiting`, all in one band, find slots.

        Each request needs a lease on a backend that can serve it. Leases that are already being preempted count.
        """
        if not self._settings.preemption:
            return
        leaving, hopeless = dict(self._pending), Unmatched()
        for queued in waiting:
            if len(self._pending) >= PREEMPT_MAX:
                return
            found = (x for x in leaving if could_serve(queued.request, queued.excluded, self._freed_on(x).view(now)))
            if (lease := next(found, None)) is not None:
                del leaving[lease]
                continue
            if queued.request.backend is None and hopeless.covers(queued):
                continue
            # Each search starts from the newest lease, because an earlier preemption may have freed the missing room.
            lease = next((x for x in self._newest() if self._makes_room(x, queued, now)), None)
            if lease is not None:
                yield self._preempt(lease)
            elif queued.request.backend is None:
                hopeless.add(queued, NO_MATCH)

    def _preempt(self, lease: int) -> Preempt:
        record = self.open[lease]
        self._pending[lease] = record.backend
        return Preempt(lease, record.request, record.backend.name)

    def _newest(self) -> Iterator[int]:
        below = (band for band in sorted(self._by_band) if band < DEFAULT)
        lowest_first = (lease for band in below for lease in reversed(self._by_band[band]))
        return (lease for lease in islice(lowest_first, LOOK_MAX) if lease not in self._pending)

    def _freed_on(self, lease: int) -> Backend:
        """Returns the backend on which the end of a lease frees a slot; the decode backend of a prefill stage."""
        record = self.open[lease]
        return record.answers_on or record.backend

    def _makes_room(self, lease: int, queued: Queued, now: float) -> bool:
        backend = self._freed_on(lease)
        if not could_serve(queued.request, queued.excluded, backend.view(now)):
            return False
        if not self.open[lease].backend.unstarted(lease):
            return False
        leaving = [self.open[x] for x in (*self._pending, lease)]
        view = backend.view_without([one.number for one in leaving if one.backend is backend], now)
        reserved = sum(one.request.sequences for one in leaving if one.answers_on is backend)
        view = replace(view, load=view.load - reserved)
        return view.has_room(self._headroom.ceiling(queued.request.band, now))

    @property
    def pending(self) -> int:
        return len(self._pending)
