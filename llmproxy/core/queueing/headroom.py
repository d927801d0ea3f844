"""How far each band may fill a backend: its ceiling keeps room for the bands above it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import inf

from msgspec.structs import replace

from llmproxy.core.backends.view import View
from llmproxy.core.domain import DEFAULT
from llmproxy.core.settings import BELOW_HIGHEST, Settings


class Headroom:
    """The ceilings of one pool.

    What a ceiling keeps free is for the bands above it. A band is in use for `headroom_s` after its last request. No
    room is kept for a band that is not in use: a lower band gets the highest ceiling of the bands below the next one
    that is in use. Its next request restores the ceilings, and waits for one release at most if all were full.

    Below the highest band in use one slot is always kept: of each backend of four sequences or more (`View.slots`), and
    of the whole pool where all are smaller (`keeps_slot`), but for a pool of a single slot.
    """

    def __init__(self, settings: Settings) -> None:
        self._used_s: dict[int, float] = {}
        self.reconfigure(settings)

    def reconfigure(self, settings: Settings) -> None:
        self._settings = settings
        self._levels = sorted(settings.ceilings)
        self._own: dict[int, float] = {}
        self._highest = settings.ceiling_range[1]

    def used(self, band: int, now: float) -> None:
        """A request of `band` came."""
        if band not in self._used_s:
            self._used_s = {other: used_s for other, used_s in self._used_s.items() if self._lasts(used_s, now)}
        self._used_s[band] = now

    def inherit(self, other: Headroom) -> None:
        """The bands that are in use in another pool are in use here from now on."""
        for band, used_s in other._used_s.items():
            self._used_s[band] = max(used_s, self._used_s.get(band, -inf))

    def ceiling(self, band: int, now: float) -> float:
        """The saturation (0..1] at which `band` waits now."""
        ceiling = self._own.get(band)
        if ceiling is None:
            ceiling = self._own[band] = self._settings.ceiling(band)
        above = min(self._above(band, now), default=None)
        # The next band in use has the ceiling of the level at or below it.
        end = len(self._levels) if above is None else bisect_right(self._levels, above) - 1
        for level in self._levels[bisect_right(self._levels, band) : end]:
            ceiling = max(ceiling, self._settings.ceilings[level])
        return ceiling if above is None else min(ceiling, BELOW_HIGHEST * self._highest)

    def keeps_slot(self, band: int, views: Sequence[View], now: float) -> bool:
        """Whether one slot is all that the pool has left, and is kept for a band above `band`."""
        if not self.used_above(band, now):
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
        """How many sequences of `band` and the bands below it fill `views`, the KV-cache aside."""
        ceiling = self.ceiling(band, now)
        able = [view for view in views if view.available]
        places = sum(view.slots(ceiling) for view in able)
        if not able or not self.used_above(band, now):
            return places
        # See `keeps_slot`.
        return max(1, min(places, sum(min(view.limit, view.slots(self._highest)) for view in able) - 1))

    def used_above(self, band: int, now: float) -> bool:
        """A band above `band` is in use."""
        return next(self._above(band, now), None) is not None

    def views_for(self, band: int, views: Sequence[View], now: float) -> Sequence[View]:
        """`views` without room where `band` is not sent any more, because requests wait inside the engine.

        A band below `default` is not while a higher band is in use, which would wait behind it in the engine. A band
        above `default` is not beyond the load that the engine was seen to run, because it would wait there behind
        others, while it is first here.
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
        """When a band will have been out of use for long enough; None where time alone changes nothing."""
        ends_s = [used_s + self._settings.headroom_s for used_s in self._used_s.values()]
        return min((end_s for end_s in ends_s if now < end_s < inf), default=None)

    def _above(self, band: int, now: float) -> Iterator[int]:
        """The bands above `band` that are in use."""
        if self._settings.headroom_s == inf:
            yield from (level for level in self._levels if level > band)
        if self._levels:
            yield from (other for other, used_s in self._used_s.items() if other > band and self._lasts(used_s, now))

    def _lasts(self, used_s: float, now: float) -> bool:
        return now < used_s + self._settings.headroom_s
