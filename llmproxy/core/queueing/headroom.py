"""Ceilings: the saturation up to which each band may fill a backend, so that slots stay free for higher bands."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

from msgspec.structs import replace

from llmproxy.core.backends.view import View
from llmproxy.core.domain import DEFAULT, IDLE
from llmproxy.core.settings import BELOW_HIGHEST, Settings


class Headroom:
    """The ceilings of one pool. The slots above a ceiling are for higher bands.

    A band is in use for `headroom_s` after its last request. No slots are reserved for a band that is not in use: the
    ceiling of a band is the highest of its own ceiling and the ceilings of the unused bands above it, up to the next
    band in use. The next request of an unused band restores the ceilings. If all backends are full at that moment, this
    request waits for the end of at most one answer.

    Bands below the highest band in use must always leave a slot free: on each backend with at least four sequences
    (`View.slots`), or in the whole pool if all backends are smaller (`keeps_slot`), except in a pool of a single slot.
    """

    def __init__(self, settings: Settings) -> None:
        self._used_s: dict[int, float] = {}  # Band -> arrival of its last request.
        self._most = -inf  # No band above this one is in use.
        self.reconfigure(settings)

    def reconfigure(self, settings: Settings) -> None:
        self._settings = settings
        self._levels = sorted(settings.ceilings)
        self._own: dict[int, float] = {}
        self._highest = settings.ceiling_range[1]
        self._count_used()

    def used(self, band: int, now: float) -> None:
        """Records that a request of `band` arrived, so that the band is in use from now on."""
        if band not in self._used_s:
            self._used_s = {other: used_s for other, used_s in self._used_s.items() if self._lasts(used_s, now)}
            self._used_s[band] = now
            self._count_used()
        self._used_s[band] = now

    def inherit(self, other: Headroom) -> None:
        """Takes over the bands in use of another pool, which becomes part of this one."""
        for band, used_s in other._used_s.items():
            self._used_s[band] = max(used_s, self._used_s.get(band, -inf))
        self._count_used()

    def _count_used(self) -> None:
        all_used = self._settings.headroom_s == inf
        self._most = max((*self._used_s, *(self._levels if all_used else ())), default=-inf)

    def ceiling(self, band: int, now: float) -> float:
        """Returns the saturation (0..1] from which requests of `band` must wait."""
        ceiling = self._own.get(band)
        if ceiling is None:
            ceiling = self._own[band] = self._settings.ceiling(band)
        above = self._next_above(band, now) if band < self._most else None
        if above is not None and band <= IDLE:
            return ceiling  # The band `idle` gets no slots of unused bands while a higher band is in use.
        # A band without a configured ceiling has the ceiling of the next level below it.
        end = len(self._levels) if above is None else bisect_right(self._levels, above) - 1
        for level in self._levels[bisect_right(self._levels, band) : end]:
            ceiling = max(ceiling, self._settings.ceilings[level])
        return ceiling if above is None else min(ceiling, BELOW_HIGHEST * self._highest)

    def keeps_slot(self, band: int, views: Sequence[View], now: float) -> bool:
        """Returns whether `band` must leave the last free slot of the pool to a higher band that is in use.

        An idle pool keeps no slot, because a pool with a single slot must serve lower bands too.
        """
        if band >= self._most or self._next_above(band, now) is None:
            return False
        free, idle = 0, True
        for view in views:
            if view.available:
                idle = idle and not view.load
                if view.has_room(self._highest):
                    free += max(0, min(view.limit, view.slots(self._highest)) - view.load)
                if free > 1:
                    return False
        return not idle

    def places(self, band: int, views: Sequence[View], now: float) -> int:
        """Returns how many sequences of `band` and lower bands fit on `views` in sum, whatever their KV caches."""
        ceiling = self.ceiling(band, now)
        able = [view for view in views if view.available]
        places = sum(view.slots(ceiling) for view in able)
        if not able or not self.used_above(band, now):
            return places
        # See `keeps_slot`.
        return max(1, min(places, sum(min(view.limit, view.slots(self._highest)) for view in able) - 1))

    def used_above(self, band: int, now: float) -> bool:
        """Returns whether a band above `band` is in use."""
        return self._next_above(band, now) is not None

    def views_for(self, band: int, views: Sequence[View], now: float) -> Sequence[View]:
        """Returns `views`, some of them closed to `band` because requests wait inside their engines.

        While a higher band is in use, a band below `default` may not send to such a backend: requests of the higher
        band would wait behind its requests in the engine. A band above `default` may send only up to the load that the
        engine was seen to run (`doubtful`), because beyond it the request would wait in the engine behind earlier
        requests. A backend that needs a probe is not closed.
        """
        if band == DEFAULT or not any(view.waiting for view in views):
            return views
        used_above = self.used_above(band, now)
        return [
            replace(view, available=False)
            if view.waiting and not view.probed and (used_above if band < DEFAULT else view.doubtful)
            else view
            for view in views
        ]

    def changes_at(self, now: float) -> float | None:
        """Returns when the next band is no longer in use; None if no ceiling changes without an event."""
        ends_s = [used_s + self._settings.headroom_s for used_s in self._used_s.values()]
        return min((end_s for end_s in ends_s if now < end_s < inf), default=None)

    def _next_above(self, band: int, now: float) -> int | None:
        """Returns the lowest band above `band` that is in use."""
        found: int | None = None
        if self._settings.headroom_s == inf:
            found = next((level for level in self._levels if level > band), None)
        if self._levels:
            for other, used_s in self._used_s.items():
                if other > band and (found is None or other < found) and self._lasts(used_s, now):
                    found = other
        return found

    def _lasts(self, used_s: float, now: float) -> bool:
        return now < used_s + self._settings.headroom_s
