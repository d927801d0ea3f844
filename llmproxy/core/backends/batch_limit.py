"""The batch limit of an engine, which vLLM does not publish: given by the configuration, or learned from its gauges."""

from __future__ import annotations

from collections import deque
from math import ceil, floor
from typing import Protocol

PLATEAU_READINGS = 3
"""Waiting must persist this long to be a queue: a request that arrived between two steps waits for one reading."""
PROVEN_READINGS = 2
"""The same where nothing but the batch can be what is waited for."""
UNPUBLISHED = 256
"""The limit of a backend that publishes no numbers to learn from: the batch limit that vLLM itself starts with."""
CALM_READINGS_MIN = 5
CALM_READINGS_MAX = 160
"""Readings without anybody waiting before a known plateau is tried again. Doubled each time that it proves the same."""


KEPT_FROM = 4
"""The least batch limit of which a slot is kept on each backend; of smaller ones, one is kept in the whole pool."""


def slots_under(limit: int, ceiling: float, look_ahead: int, highest: float = 1.0) -> int:
    """How many sequences a band of this ceiling may bring a backend to; `highest` is that of the highest band in use.

    The look-ahead belongs to bands that may fill a backend; a band that must leave room gets none. Rounding to the
    nearest keeps small batches usable, and would give two bands the same slots: whoever is below the highest band has
    at least one less, of four or more.
    """
    if ceiling >= 1.0:
        return limit + look_ahead
    slots = max(1, floor(limit * ceiling + 0.5))
    if ceiling < highest and limit >= KEPT_FROM:
        return max(1, min(slots, slots_under(limit, highest, 0) - 1))
    return slots


class Twins(Protocol):
    """What is known of the other engines of a pool, see `core.exploration`."""

    def bound(self, of: BatchLimit) -> int | None:
        """How far a limit may grow; None while no other engine is being tried."""

    def end_of_a_twin(self, of: BatchLimit) -> int | None:
        """Where another limit was proven, taken for this one's end until a calm of five readings; None for none."""


class BatchLimit:
    """How many sequences an engine runs at once, as far as is known.

    Starts at `start` and doubles while the engine follows and shows nobody waiting; settles on the number running once
    requests keep waiting while that number no longer rises, and grows by a quarter from then on. A plateau once met is
    tried again after a calm that doubles each time it proves the same, since what made it (long prompts, a full
    KV-cache) may have passed. A trial lets in one more than the plateau, and ends with the first reading that shows
    somebody waiting behind no more than the known number: what it lets in stands in the engine's own queue, before
    everything that comes after it, a critical request included. `fixed` caps the limit for good: an operator's word
    bounds what is tried, and the engine's own queue may still prove it too high.

    "Used" means filled to `lowest_ceiling`: traffic of low bands alone never fills a backend further than that, and
    must be able to teach its limit all the same. A plateau that nothing but the batch explains is the engine's own
    limit, which no calm changes: it is tried after the longest calm alone, and only by those who may fill it. The
    reading itself must bear all that out: the gauges of a frozen engine stay as they were, and "nobody waits" is then
    no invitation to send more.
    """

    def __init__(self, fixed: int | None, start: int, lowest_ceiling: float = 1.0) -> None:
        self._cap = fixed
        self._start = start
        self.lowest_ceiling = lowest_ceiling
        self._waited: deque[int] = deque(maxlen=PLATEAU_READINGS)
        self.forget()

    def forget(self) -> None:
        """Another engine is behind it: begin anew."""
        self._plateau: int | None = None
        self._proven = False
        self._settled = self._ran_most = self._ran_freely = self._calm = 0
        self._told = False
        self._beginning: tuple[int, bool] | None = None
        self._deadlines = CALM_READINGS_MIN
        self._waited.clear()
        self.value = self._cap if self._cap is not None else self._start

    def restarted(self) -> None:
        """A new process of the same engine, which may run less: what the old one ran proves nothing of it."""
        self._ran_most = 0
        self._waited.clear()

    def begin_at(self, limit: int, *, settled: bool) -> None:
        """Start from what is known from elsewhere; nothing where an operator gave a limit, or this engine's own gauges.

        `settled`: that is all that it runs. The gauges may prove either wrong, as they may what they have taught.
        """
        if self._cap is not None:
            self._beginning = limit, settled
        if self._cap is not None or (self._settled and not self._told):
            return
        if settled:
            self._settle(limit, proven=True)
            self._told = True
        else:
            self._ran_freely = limit
            self._set(max(self.value, limit))

    @property
    def sure(self) -> int:
        """How many it was seen to run while nobody waited, or is said to; at most its limit."""
        if self._cap is not None:
            return self.value
        return min(self.value, self._plateau or max(self._start, self._ran_freely))

    @property
    def settled(self) -> bool:
        """It has met an end of what it runs, if only for now."""
        return self._cap is not None or self._plateau is not None

    @property
    def proven(self) -> bool:
        """That end is the batch itself, or an operator's word."""
        return self._cap is not None or (self._plateau is not None and self._proven)

    @property
    def known(self) -> tuple[int, bool] | None:
        """What `begin_at` may be told of this engine one day; None where there is nothing but the start."""
        if self._cap is not None or (not self._settled and self.value <= self._start):
            return None
        return (self._plateau, True) if self._plateau is not None and self._proven else (self.value, False)

    def cap(self, fixed: int | None) -> None:
        """Go by another configured limit; what was learned stays where it does not contradict it."""
        if fixed == self._cap:
            return
        self._cap = fixed
        if fixed is None and self._plateau is None:
            # An operator's word that was taken back is nothing that was learned.
            self.value = max(self._start, self._ran_most)
            if self._beginning is not None:
                self.begin_at(self._beginning[0], settled=self._beginning[1])
        elif fixed is not None:
            if self._plateau is not None and self._plateau > fixed:
                self._plateau = None
            self.value = self._plateau or fixed

    def observe(
        self, running: int, waiting: int, load: int, *, proven: bool = False, pool: Twins | None = None
    ) -> None:
        """Learn from one reading; `load` is how many sequences are thought to be at the engine.

        `proven`: those that wait can wait for nothing but a place in the batch. `pool` is asked when it is to grow.
        """
        self._ran_most = max(self._ran_most, running)
        if waiting > 0:
            self._calm = 0
            if self._plateau is not None and running <= self._plateau < self.value:
                self._settle(self._plateau, self._proven)
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
        """The backend lives with so much and publishes no numbers: a low guess would stay for ever.

        So would what it once refused; more is tried after a calm, and another refusal makes the next calm longer.
        """
        if self._plateau is None:
            if self._cap is None:
                self._set(max(self.value, UNPUBLISHED))
                self._ran_freely = self.value
        elif load >= self._used_from():
            self._calm += 1
            if self._calm >= self._deadlines:
                self._calm = 0
                self._set(min(self.value + max(1, self.value // 4), max(self.value, UNPUBLISHED)))

    def refused(self, load: int) -> None:
        """The engine turned a request away as busy while `load` sequences were at it."""
        self._calm = 0
        self._settle(max(1, min(self.value, load - 1)), proven=False)

    def _used_from(self) -> int:
        """From how many on it is filled: to the brim where its limit is proven, else as far as any band may."""
        if self._proven or self.lowest_ceiling >= 1.0:
            return self.value
        return max(1, min(slots_under(self.value, self.lowest_ceiling, 0), self.value - 1))

    def _grow(self, running: int, load: int, pool: Twins | None) -> None:
        bound = None
        if pool is not None and not self.settled:
            if (end := pool.end_of_a_twin(self)) is not None:
                self._settle(end, proven=False)
                return
            bound = pool.bound(self)
        if self._plateau is not None and running > self._plateau:
            self._plateau, self._proven = None, False
        if self._plateau is None or self.value < self._plateau:
            quarter = self.value + max(1, self.value // 4)
            filled = min(self.value, ceil(running / self.lowest_ceiling))
            grown = quarter if self._settled else max(quarter, 2 * filled)
            self._set(grown if bound is None else max(self.value, min(grown, bound)))
            return
        self._calm += 1
        if self._calm >= self._deadlines:
            self._calm = 0
            # Whoever fills it to `load` now fills it to one more than the plateau then.
            self._set(max(self._plateau + 1, ceil(self._plateau * (self._plateau + 1) / load)))

    def _settle(self, plateau: int, proven: bool) -> None:
        same = abs(plateau - self._settled) <= max(1, plateau // 10)
        if same and self._proven and not proven:
            # What is known for certain is not given up for what may be a moment between two steps.
            plateau, proven = self._plateau or plateau, True
        if plateau != self.value or self._plateau is None:
            self._deadlines = min(CALM_READINGS_MAX, 2 * self._deadlines) if same else CALM_READINGS_MIN
        if proven:
            self._deadlines = CALM_READINGS_MAX
        self._plateau = self._settled = plateau
        self._told = False
        self._proven = proven
        self._set(plateau)

    def _set(self, value: int) -> None:
        self.value = max(1, value if self._cap is None else min(value, self._cap))
