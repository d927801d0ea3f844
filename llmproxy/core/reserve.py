"""How far each band may fill a backend: its ceiling, while somebody above it might need the rest."""

from __future__ import annotations

from bisect import bisect_right
from math import inf

from llmproxy.core.settings import Settings


class Reserve:
    """The ceilings of one pool.

    What a ceiling keeps free is for the bands above it. A band that had no request for `reserve_s` is not waited for:
    those below it may fill backends as far as it may, up to the next band that is in use. Its next request brings the
    ceilings back, and waits for one release at most where everything was full.
    """

    def __init__(self, settings: Settings) -> None:
        self._used_s: dict[int, float] = {}
        self.reconfigure(settings)

    def reconfigure(self, settings: Settings) -> None:
        """Keep room by other ceilings from now on."""
        self._settings = settings
        self._levels = sorted(settings.ceilings)
        self._own: dict[int, float] = {}
        self._used_s = {level: used_s for level, used_s in self._used_s.items() if level in settings.ceilings}

    def used(self, band: int, now: float) -> None:
        """A request of `band` came."""
        at = bisect_right(self._levels, band)
        if at:
            self._used_s[self._levels[at - 1]] = now

    def ceiling(self, band: int, now: float) -> float:
        """The saturation (0..1] at which `band` waits now."""
        ceiling = self._own.get(band)
        if ceiling is None:
            ceiling = self._own[band] = self._settings.ceiling(band)
        for level in self._levels:
            if level > band:
                if self._in_use(level, now):
                    break
                ceiling = max(ceiling, self._settings.ceilings[level])
        return ceiling

    def changes_at(self, now: float) -> float | None:
        """When a band will have been out of use for long enough; None where time alone changes nothing."""
        ends_s = [used_s + self._settings.reserve_s for used_s in self._used_s.values()]
        return min((end_s for end_s in ends_s if now < end_s < inf), default=None)

    def _in_use(self, level: int, now: float) -> bool:
        if self._settings.reserve_s == inf:
            return True
        return now < self._used_s.get(level, -inf) + self._settings.reserve_s
