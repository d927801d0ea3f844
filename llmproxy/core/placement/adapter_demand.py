"""Computes which LoRA adapters a backend must load for a request, and which adapters these loads evict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from functools import cached_property

from llmproxy.core.backends.view import View
from llmproxy.core.estimates.learning import DecayingRate
from llmproxy.core.placement.rates import TIERS, LoadTimesByTier

WINDOW_S = 60.0  # Window over which the requests of each adapter and the loads of each backend are counted.
ADAPTERS_MAX = 1_024  # Bound of the remembered adapters, per backend and per pool.


class Slots:
    """The adapter slots of one backend: the requests that use them, and the history of their adapters."""

    def __init__(self) -> None:
        self.size: int | None = None  # Number of slots, None if unknown.
        self.users: Counter[str] = Counter()  # Adapter -> requests in flight.
        # Adapters that wait for a slot because requests of other adapters use all slots.
        self.deferred: set[str] = set()
        self.turnover = DecayingRate(WINDOW_S)  # Loads per second.
        self._loads = 0
        self._uses = 0
        # Adapter -> (`_uses`, `_loads`) at its last use, the most recent last.
        self._used: dict[str, tuple[int, int]] = {}

    @property
    def taken(self) -> bool:
        """Whether every slot is in use, so that another adapter waits inside the engine."""
        return self.size is not None and len(self.users) >= self.size

    def tier(self, adapter: str) -> int:
        """Returns the tier of an adapter that is not loaded: k after fewer than 2**k loads since its last use."""
        used = self._used.get(adapter)
        return TIERS - 1 if used is None else min(TIERS - 1, (self._loads - used[1]).bit_length())

    def displaced(self, resident: Set[str]) -> str | None:
        """Returns the adapter of `resident` that a new adapter evicts; None if `resident` is empty.

        Adapters without a request in flight are evicted first, the least recently used before the others.
        """
        return min(resident, key=lambda x: (x in self.users, self._used.get(x, (0, 0)), x), default=None)

    def book(self, adapter: str, cold: bool, now: float) -> int | None:
        """Records a request of `adapter`. Returns the tier of the load that it causes; None if it causes none."""
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
        """Records the first byte of an answer of `adapter`."""
        self.deferred.discard(adapter)

    def release(self, adapter: str) -> None:
        """Records the end of a request of `adapter`."""
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


class LoadedAdapters:
    """The adapters that `views` have loaded. They are counted at the first use, because most prices need no count."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = views

    @cached_property
    def copies(self) -> Counter[str]:
        """Adapter -> number of backends that have it."""
        return Counter(name for view in self._views for name in view.resident)

    @cached_property
    def free(self) -> int:
        """The number of free slots."""
        return sum(max(0, (view.max_adapters or 0) - len(view.resident)) for view in self._views)


class AdapterDemand:
    """Request rates of the adapters of a pool, and the cost of evicting an adapter."""

    def __init__(self, loads: LoadTimesByTier) -> None:
        self._loads = loads
        self._asked: dict[str, DecayingRate] = {}

    def add(self, adapter: str, now: float) -> None:
        asked = self._asked.pop(adapter, None) or DecayingRate(WINDOW_S)
        asked.add(1.0, now)
        self._asked[adapter] = asked
        if len(self._asked) > ADAPTERS_MAX:
            del self._asked[next(iter(self._asked))]

    def reload_s(
        self, adapter: str, view: View, slots: Slots, loaded: LoadedAdapters, least_s: float, now: float
    ) -> float:
        """Returns the expected seconds to reload the adapter that `adapter` evicts; a load takes at least `least_s`.

        The evicted adapter must be loaded again if a request for it arrives before it would have been evicted anyway.
        Requests and evictions are taken as two Poisson processes. The cost is 0 if another backend has the evicted
        adapter. A free slot costs nothing, unless this is a second copy of `adapter` in the pool and the adapters that
        no backend has loaded would fill all free slots. `loaded` counts `view` too.
        """
        if view.max_adapters is None:
            return 0.0
        if len(view.resident) < view.max_adapters:
            # The served names include the base model.
            if adapter not in loaded.copies or len(view.served) - 1 - len(loaded.copies) < loaded.free:
                return 0.0
            return max(least_s, self._loads.at(slots.tier(adapter)))
        displaced = slots.displaced(view.resident)
        if displaced is None or displaced not in self._asked:
            return 0.0
        if loaded.copies[displaced] > 1:
            return 0.0
        asked = self._asked[displaced].at(now)
        chance = asked / (asked + slots.turnover.at(now) / view.max_adapters)
        return chance * max(least_s, self._loads.at(slots.tier(displaced)))
