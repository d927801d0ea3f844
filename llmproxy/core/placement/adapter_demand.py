"""Which LoRA adapters a backend has to load, and which one an adapter displaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from llmproxy.core.backends.view import View
from llmproxy.core.estimates.learning import DecayingRate
from llmproxy.core.placement.rates import TIERS, LoadTimesByTier

WINDOW_S = 60.0
"""Window over which requests for an adapter, and loads of a backend, are counted."""
ADAPTERS_MAX = 1_024
"""Bound of the remembered adapters, per backend and per pool."""


class Slots:
    """The adapter slots of one backend.

    `size` is the number of slots, None where unknown. `users` counts the requests in flight of each adapter. `deferred`
    are adapters that wait for a slot because all slots serve others. `turnover` is loads per second.
    """

    def __init__(self) -> None:
        self.size: int | None = None
        self.users: Counter[str] = Counter()
        self.deferred: set[str] = set()
        self.turnover = DecayingRate(WINDOW_S)
        self._loads = 0
        self._uses = 0
        self._used: dict[str, tuple[int, int]] = {}

    @property
    def taken(self) -> bool:
        """Every slot is in use: a further adapter waits inside the engine until one becomes unused."""
        return self.size is not None and len(self.users) >= self.size

    def tier(self, adapter: str) -> int:
        """The tier of an adapter that is not resident; see `rates.TIERS`."""
        used = self._used.get(adapter)
        return TIERS - 1 if used is None else min(TIERS - 1, (self._loads - used[1]).bit_length())

    def displaced(self, resident: Set[str]) -> str | None:
        """The resident adapter that a new one evicts: an unused one first, then the least recently used."""
        return min(resident, key=lambda x: (x in self.users, self._used.get(x, (0, 0)), x), default=None)

    def book(self, adapter: str, cold: bool, now: float) -> int | None:
        """A request of `adapter` was sent. Answers the tier of the load that it causes, None where it causes none."""
        tier = None
        if cold and adapter not in self.users:
            tier = self.tier(adapter)
            self._loads += 1
            self.turnover.add(1.0, now)
            if self.taken:
                self.deferred.add(adapter)
        self.users[adapter] += 1
        self._touch(adapter)
        return tier

    def started(self, adapter: str) -> None:
        """The first byte of a request of `adapter` came."""
        self.deferred.discard(adapter)

    def release(self, adapter: str) -> None:
        """A request of `adapter` ended."""
        self.users[adapter] -= 1
        if not self.users[adapter]:
            del self.users[adapter]
            self.deferred.discard(adapter)
        self._touch(adapter)

    def _touch(self, adapter: str) -> None:
        self._uses += 1
        self._used.pop(adapter, None)
        self._used[adapter] = self._uses, self._loads
        if len(self._used) > ADAPTERS_MAX:
            del self._used[next(iter(self._used))]


class AdapterDemand:
    """How often the adapters of a pool are requested, and what the eviction of one therefore costs."""

    def __init__(self, loads: LoadTimesByTier) -> None:
        self._loads = loads
        self._asked: dict[str, DecayingRate] = {}

    def add(self, adapter: str, now: float) -> None:
        """`adapter` was requested once more."""
        asked = self._asked.pop(adapter, None) or DecayingRate(WINDOW_S)
        asked.add(1.0, now)
        self._asked[adapter] = asked
        if len(self._asked) > ADAPTERS_MAX:
            del self._asked[next(iter(self._asked))]

    def again_s(
        self, adapter: str, view: View, slots: Slots, able: Sequence[View], least_s: float, now: float
    ) -> float:
        """Expected seconds to load the displaced adapter again; a load takes at least `least_s`.

        The chance that it is requested before it would have been evicted anyway is that of a race of two Poisson
        processes. The cost is 0 where another backend has the displaced adapter too. A free slot costs nothing, unless
        it takes a second copy while the adapters that are nowhere would fill all free slots.
        """
        if view.max_adapters is None:
            return 0.0
        if len(view.resident) < view.max_adapters:
            somewhere = set().union(*[one.resident for one in able])
            free = sum([max(0, (one.max_adapters or 0) - len(one.resident)) for one in able])
            # One of the served names is the base model.
            if adapter not in somewhere or len(view.served) - 1 - len(somewhere) < free:
                return 0.0
            return max(least_s, self._loads.at(slots.tier(adapter)))
        displaced = slots.displaced(view.resident)
        if displaced is None or displaced not in self._asked:
            return 0.0
        if any(displaced in other.resident for other in able if other is not view):
            return 0.0
        asked = self._asked[displaced].at(now)
        chance = asked / (asked + slots.turnover.at(now) / view.max_adapters)
        return chance * max(least_s, self._loads.at(slots.tier(displaced)))
