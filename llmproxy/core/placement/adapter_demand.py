"""Which LoRA adapters a backend has to load, and what has to go and come back for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from math import exp

from llmproxy.core.backends.view import View
from llmproxy.core.placement.rates import TIERS, LoadTimes

WINDOW_S = 60.0
"""How far back it is looked how often an adapter is asked for, and how often a backend loads one."""
ADAPTERS_MAX = 1_024
"""Adapters whose last use is remembered, and how often they are asked for."""


class Frequency:
    """How often something happens, per second: exponential forgetting over `WINDOW_S`."""

    def __init__(self) -> None:
        self._per_s = self._at_s = 0.0

    def add(self, now: float) -> None:
        self._per_s, self._at_s = self.at(now) + 1.0 / WINDOW_S, now

    def at(self, now: float) -> float:
        return self._per_s * exp((self._at_s - now) / WINDOW_S)


class Slots:
    """The adapter slots of one backend: `users` counts the requests in flight of each adapter, `deferred` are those
    that wait for a slot, as all `size` of them (None: unknown) serve others; `turnover` is how often it loads one.
    """

    def __init__(self) -> None:
        self.size: int | None = None
        self.users: Counter[str] = Counter()
        self.deferred: set[str] = set()
        self.turnover = Frequency()
        self._loads = 0
        self._uses = 0
        self._used: dict[str, tuple[int, int]] = {}

    @property
    def taken(self) -> bool:
        """Every slot serves somebody: one more waits inside the engine until one of them has nobody left."""
        return self.size is not None and len(self.users) >= self.size

    def tier(self, adapter: str) -> int:
        """How cold an adapter is that is not resident; see `LoadTimes`."""
        used = self._used.get(adapter)
        return TIERS - 1 if used is None else min(TIERS - 1, (self._loads - used[1]).bit_length())

    def displaced(self, resident: Set[str]) -> str | None:
        """Which of the residents has to go for another: the least recently used, of those that serve nobody first."""
        return min(resident, key=lambda x: (x in self.users, self._used.get(x, (0, 0)), x), default=None)

    def book(self, adapter: str, cold: bool, now: float) -> int | None:
        """A request of an adapter was sent there; the tier of what is loaded for it, None where nothing is."""
        tier = None
        if cold and adapter not in self.users:
            tier = self.tier(adapter)
            self._loads += 1
            self.turnover.add(now)
            if self.taken:
                self.deferred.add(adapter)
        self.users[adapter] += 1
        self._touch(adapter)
        return tier

    def started(self, adapter: str) -> None:
        """A first byte of one of its requests came."""
        self.deferred.discard(adapter)

    def release(self, adapter: str) -> None:
        """One of its requests ended."""
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


class Demand:
    """How often the adapters of a pool are asked for, and what one that has to go for another is therefore worth."""

    def __init__(self, loads: LoadTimes) -> None:
        self._loads = loads
        self._asked: dict[str, Frequency] = {}

    def add(self, adapter: str, now: float) -> None:
        """It is asked for once more."""
        asked = self._asked.pop(adapter, None) or Frequency()
        asked.add(now)
        self._asked[adapter] = asked
        if len(self._asked) > ADAPTERS_MAX:
            del self._asked[next(iter(self._asked))]

    def again_s(
        self, adapter: str, view: View, slots: Slots, able: Sequence[View], least_s: float, now: float
    ) -> float:
        """Seconds of loading what has to go for `adapter` again, by the chance that it is asked for before it would
        have had to go anyway (as two Poisson processes race). A load takes `least_s` at least.

        It costs nothing where another backend has it, too. A free slot costs nothing either, but for a second copy
        where the adapters that are nowhere are enough to fill all free slots.
        """
        if view.max_adapters is None:
            return 0.0
        if len(view.resident) < view.max_adapters:
            somewhere = set().union(*[one.resident for one in able])
            free = sum([max(0, (one.max_adapters or 0) - len(one.resident)) for one in able])
            # One name is that of the base model.
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
