"""The batch limit of an engine, which vLLM does not publish: configured, or learned from the engine's gauges."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from math import ceil, floor
from typing import Protocol

PLATEAU_READINGS = 3
"""Readings with waiting sequences that make a queue: a request that came between two steps waits for one reading."""
PROVEN_READINGS = 2
"""The same where sequences can wait for nothing but a place in the batch."""
UNPUBLISHED = 256
"""Limit of a backend that publishes no numbers: vLLM's own default batch limit."""
CALM_READINGS_MIN = 5
CALM_READINGS_MAX = 160
"""Readings without a queue before a known plateau is tried again. Doubled each time that the plateau is the same."""
FALLEN = 0.8
"""Refusals below this share of the last plateau are no echo of its trial."""
KEPT_FROM = 4
"""From this batch limit on, bands below the highest leave one slot free on each backend."""


@lru_cache(maxsize=1_024)
def slots_under(limit: int, ceiling: float, look_ahead: int, highest: float = 1.0) -> int:
    """How many sequences a band of this ceiling may fill a backend to; `highest` is the ceiling of the highest band.

    Only bands that may fill a backend get the look-ahead. Rounding to the nearest keeps small batches usable, but could
    give two bands the same slots. So with `KEPT_FROM` or more a band below the highest gets at least one less.
    """
    if ceiling >= 1.0:
        return limit + look_ahead
    slots = max(1, floor(limit * ceiling + 0.5))
    if ceiling < highest and limit >= KEPT_FROM:
        return max(1, min(slots, slots_under(limit, highest, 0) - 1))
    return slots


class BatchLimit:
    """How many sequences an engine runs at once, as far as is known.

    The limit starts at `start` and doubles while the engine runs all of them and none waits. It settles on a plateau
    once sequences keep waiting while the number of running ones no longer rises, and grows by a quarter from then on.
    The cause of a plateau (long prompts, a full KV-cache) may pass, so it is tried again after a calm, which doubles
    each time that the plateau is the same. A trial lets in one more than the plateau. It ends with the first reading
    that shows a queue at no more than the known number, because the extra sequence is in the engine's own queue, before
    everything that comes later, critical requests included. `fixed` is a configured cap. It bounds what is tried, and
    the engine's queue may still prove it too high.

    A limit counts as used when it is filled to `lowest_ceiling`, because traffic of low bands alone fills a backend no
    further and must be able to teach its limit. A plateau that only the batch explains is the engine's own limit
    ("proven"): it is tried after the longest calm only, and only by bands that may fill it. The running sequences of a
    reading must confirm the load, because the gauges of a frozen engine keep saying that none waits.
    """

    def __init__(self, fixed: int | None, start: int, lowest_ceiling: float = 1.0) -> None:
        self._cap = fixed
        self._start = start
        self.lowest_ceiling = lowest_ceiling
        self._waited: deque[int] = deque(maxlen=PLATEAU_READINGS)
        self.forget()

    def forget(self) -> None:
        """Another engine has the backend's name: start again."""
        self._plateau: int | None = None
        self._proven = False
        self._settled = self._ran_most = self._ran_freely = self._calm = self._proofs = 0
        self._given = False
        self._beginning: tuple[int, bool] | None = None
        self._calm_needed = CALM_READINGS_MIN
        self._waited.clear()
        self.value = self._cap if self._cap is not None else self._start

    def restarted(self) -> None:
        """The engine is a new process, which may run less than the old one did, or more."""
        self._ran_most = self._calm = 0
        self._calm_needed = CALM_READINGS_MIN
        self._proven, self._proofs = False, 0
        self._waited.clear()

    def begin_at(self, limit: int, *, settled: bool) -> None:
        """Start from a limit known from elsewhere, unless one is configured or this engine's gauges have taught one.

        `settled`: the engine runs no more than that. The gauges may correct it later.
        """
        if self._cap is not None:
            self._beginning = limit, settled
        if self._cap is not None or (self._settled and not self._given):
            return
        if settled:
            self._settle(limit, proven=True)
            self._given = True
        else:
            self._ran_freely = limit
            self._set(max(self.value, limit))

    @property
    def sure(self) -> int:
        """How many it was seen to run while none waited, or is configured to run; at most its limit."""
        if self._cap is not None:
            return self.value
        return min(self.value, self._plateau or max(self._start, self._ran_freely))

    @property
    def settled(self) -> bool:
        """It has met its limit, perhaps only for now."""
        return self._cap is not None or self._plateau is not None

    @property
    def proven(self) -> bool:
        """That limit is the engine's own, or configured."""
        return self._cap is not None or (self._plateau is not None and self._proven)

    @property
    def known(self) -> tuple[int, bool] | None:
        """The arguments of a later `begin_at` for this engine; None where nothing was learned."""
        if self._cap is not None or (not self._settled and self.value <= self._start):
            return None
        return (self._plateau, True) if self._plateau is not None and self._proven else (self.value, False)

    def cap(self, fixed: int | None) -> None:
        """Set another configured limit. What was learned is kept where it does not contradict it."""
        if fixed == self._cap:
            return
        self._cap = fixed
        if fixed is None and self._plateau is None:
            # A configured limit that was removed is not a learned one.
            self.value = max(self._start, self._ran_most)
            if self._beginning is not None:
                self.begin_at(self._beginning[0], settled=self._beginning[1])
        elif fixed is not None:
            if self._plateau is not None and self._plateau > fixed:
                self._plateau = None
            self.value = self._plateau or fixed

    def observe(
        self, running: int, waiting: int, load: int, *, proven: bool = False, pool: Exploration | None = None
    ) -> None:
        """Learn from one reading, while about `load` sequences are at the engine.

        `proven`: the waiting ones can wait for nothing but a place in the batch. `pool` bounds the growth.
        """
        self._ran_most = max(self._ran_most, running)
        if waiting > 0:
            self._calm = 0
            if self._plateau is not None and running <= self._plateau < self.value:
                # The reading that ends a trial may show a request that came between two steps.
                self._proofs = self._proofs + 1 if proven and running == self._plateau else 0
                self._settle(self._plateau, self._proven or self._proofs >= PLATEAU_READINGS)
                return
            self._waited.append(running)
            proven = proven and running >= self._ran_most
            last = list(self._waited)[-PROVEN_READINGS if proven else -PLATEAU_READINGS :]
            steady = max(last) - min(last) <= (0 if proven else max(1, running // 10))
            if len(last) == (PROVEN_READINGS if proven else PLATEAU_READINGS) and steady and running > 0:
                self._settle(max(last), proven)
            return
        self._waited.clear()
        self._ran_freely = max(self._ran_freely, running)
        if running > self.value:
            self._set(running)
        used_from = self._used_from()
        # Half, because short requests spend much of their time outside the batch, on their way in and out.
        if load >= used_from and 2 * running >= used_from:
            self._grow(running, load, pool)

    def unpublished(self, load: int) -> None:
        """The backend is healthy with `load` sequences and publishes no numbers, so a low guess would stay for ever.

        After a refusal the limit grows as that of an engine with gauges. All that is in flight counts as running.
        """
        if not self._settled:
            if self._cap is None:
                self._set(max(self.value, UNPUBLISHED))
                self._ran_freely = self.value
        elif load >= self._used_from():
            self._grow(load, load, None, UNPUBLISHED)

    def refused(self, held: int) -> None:
        """The engine turned a request away as busy while it held `held` other sequences.

        A burst may have several refusals, of which the last ones show the least. Where no trial was running, the engine
        takes less than it did, perhaps for a moment: the next trial comes after the shortest calm. From there the limit
        doubles up to the old plateau, as the congestion window of TCP does up to its threshold (slow start, RFC 5681).
        """
        self._calm = 0
        plateau = max(1, min(self.value, held))
        self._proven = self._given = False
        if self._plateau != self.value:
            self._settle(plateau, proven=False)
        elif plateau < self.value:
            self._plateau = self.value = plateau
            if plateau < FALLEN * self._settled:
                self._calm_needed = CALM_READINGS_MIN

    def _used_from(self) -> int:
        """The load from which the limit is used: all of it where it is proven, else what the lowest band may fill."""
        if self._proven or self.lowest_ceiling >= 1.0:
            return self.value
        return max(1, min(slots_under(self.value, self.lowest_ceiling, 0), self.value - 1))

    def _grow(self, running: int, load: int, pool: Exploration | None, bound: int | None = None) -> None:
        if pool is not None and not self.settled:
            if (end := pool.proven_elsewhere(self)) is not None:
                self._settle(end, proven=False)
                return
            bound = pool.bound(self)
        if self._plateau is not None and running > self._plateau:
            self._plateau, self._proven = None, False
        if self._plateau is None or self.value < self._plateau:
            quarter = self.value + max(1, self.value // 4)
            filled = min(self.value, ceil(running / self.lowest_ceiling))
            grown = max(quarter, min(2 * filled, self._settled) if self._settled else 2 * filled)
            self._set(grown if bound is None else max(self.value, min(grown, bound)))
            return
        self._calm += 1
        if self._calm >= self._calm_needed:
            self._calm = 0
            # Traffic that fills it to `load` now will fill it to one more than the plateau then.
            self._set(max(self._plateau + 1, ceil(self._plateau * (self._plateau + 1) / load)))

    def _settle(self, plateau: int, proven: bool) -> None:
        same = abs(plateau - self._settled) <= max(1, plateau // 10)
        if same and self._proven and not proven:
            # A proven limit is not given up for what may be a moment between two steps.
            plateau, proven = self._plateau or plateau, True
        if plateau != self.value or self._plateau is None:
            self._calm_needed = min(CALM_READINGS_MAX, 2 * self._calm_needed) if same else CALM_READINGS_MIN
        if proven:
            self._calm_needed = CALM_READINGS_MAX
        if plateau != self._plateau:
            self._proofs = 0
        self._plateau = self._settled = plateau
        self._given = False
        self._proven = proven
        self._set(plateau)

    def _set(self, value: int) -> None:
        self.value = max(1, value if self._cap is None else min(value, self._cap))


class PoolMember(Protocol):
    """What `Exploration` needs of a backend."""

    @property
    def up(self) -> bool: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def limit(self) -> BatchLimit: ...


class Exploration:
    """Decides which engine of a pool is tried beyond the batch that is known to run: one at a time.

    The engines are assumed to be equal until they prove otherwise. A batch that one of them has run may be given to the
    others as well, and where one has met its limit, theirs is believed to be. Beyond that only one engine is tried at a
    time, because sequences above its limit wait inside it, before everything that comes later. Meanwhile requests that
    must not wait find room at the others.
    """

    def __init__(self) -> None:
        self.members: dict[str, PoolMember] = {}
        self.sure = 0
        """The largest batch that any of them was seen to run."""
        self._largest: BatchLimit | None = None

    def learned(self, limit: BatchLimit) -> None:
        """One of the limits may have changed."""
        if limit.sure >= self.sure:
            self.sure, self._largest = limit.sure, limit
        elif limit is self._largest:
            self.refresh()

    def refresh(self) -> None:
        """Members came or left, or a limit was lowered."""
        self._largest = max((member.limit for member in self.members.values()), key=lambda one: one.sure, default=None)
        self.sure = 0 if self._largest is None else self._largest.sure

    def bound(self, of: BatchLimit) -> int | None:
        """How far the limit of a member may grow; None while no other is being tried."""
        others = (one for one in self.members.values() if one.limit is not of and one.up)
        # What is sent ahead of a limit tries nothing: it is there for all of them once they are full.
        tried = any(min(one.in_flight, one.limit.value) > max(self.sure, one.limit.sure) for one in others)
        return self.sure if tried else None

    def proven_elsewhere(self, of: BatchLimit) -> int | None:
        """The lowest proven limit of another engine, at least as large as what `of` was seen to run; None for none."""
        ends = (one.limit.sure for one in self.members.values() if one.limit is not of and one.limit.proven)
        return min((end for end in ends if end >= of.sure), default=None)
