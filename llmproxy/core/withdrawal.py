"""Which leases may be taken back for a request of a higher band, while nothing is lost by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice

from llmproxy.core.capacity import slots_under
from llmproxy.core.domain import DEFAULT, Request, Withdraw
from llmproxy.core.fleet import Backend
from llmproxy.core.placement import context_tokens
from llmproxy.core.settings import Settings

WITHDRAW_MAX = 4
"""Leases being taken back at a time, so that one burst does not empty the engines of all that they have begun."""
LOOK_MAX = 64
"""Leases looked at by one pass."""


class Withdrawal:
    """Leases that have not answered a byte. The lowest band is taken back first, of it the newest: it had least done.

    Taken back are those of bands below `default`; and of any lower band what its backend would not be given now: a
    batch limit that was thought larger than it is leaves the surplus in the engine's own queue, before all that comes
    later. Whoever is granted the room decides the pass that follows the release.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: dict[int, tuple[Request, Backend]] = {}
        self._by_band: dict[int, dict[int, None]] = {}
        self._pending: dict[int, Backend] = {}

    def booked(self, lease: int, request: Request, backend: Backend) -> None:
        self._open[lease] = (request, backend)
        self._by_band.setdefault(request.band, {})[lease] = None

    def closed(self, lease: int) -> None:
        """The lease spoke or ended: there is nothing to take back any more."""
        if lease in self._open:
            del self._by_band[self._open.pop(lease)[0].band][lease]
        self._pending.pop(lease, None)

    def choose(self, head: Request, excluded: frozenset[str], waiting: int, now: float) -> Iterable[Withdraw]:
        """What to take back so that `head`, and with it `waiting` requests of its band, find room."""
        if head.band <= DEFAULT or not self._settings.withdrawal:
            return
        while len(self._pending) < min(WITHDRAW_MAX, waiting):
            # Each is looked for anew, as one that is taken back may be what the room for a newer one was short of; but
            # a surplus is counted once and not for each lease, as that made a pass of some hundred bookings take ms.
            surplus = cache(self._surplus)
            helps = (x for x in self._newest(head.band) if self._helps(x, head, excluded, surplus, now))
            lease = next(helps, None)
            if lease is None:
                return
            request, backend = self._open[lease]
            self._pending[lease] = backend
            yield Withdraw(lease, request, backend.name)

    def _newest(self, below: int) -> Iterator[int]:
        lower = (lease for band in sorted(self._by_band) if band < below for lease in reversed(self._by_band[band]))
        return (lease for lease in islice(lower, LOOK_MAX) if lease not in self._pending)

    def _helps(
        self, lease: int, head: Request, excluded: frozenset[str], surplus: Callable[[Backend, int], bool], now: float
    ) -> bool:
        request, backend = self._open[lease]
        if backend.name in excluded or not backend.serves(head.model) or not backend.unstarted(lease):
            return False
        if request.band >= DEFAULT:
            # Several of a surplus may have to go before there is room; none of them should be where it is.
            return surplus(backend, request.band)
        view = backend.view_without([*(x for x, owner in self._pending.items() if owner is backend), lease], now)
        fits = view.max_model_len is None or view.max_model_len >= context_tokens(head)
        return fits and view.has_room(self._settings.ceiling(head.band))

    def _surplus(self, backend: Backend, band: int) -> bool:
        """Whether `band` and those below it hold more of `backend` than they would be given now."""
        held = sum(
            booking.request.sequences
            for lease, booking in backend.bookings.items()
            if booking.request.band <= band and lease not in self._pending
        )
        return held > slots_under(backend.limit.value, self._settings.ceiling(band), self._settings.capacity.look_ahead)

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def open(self) -> int:
        return len(self._open)
