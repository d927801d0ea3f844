"""The batch limit of an engine: configured, published, or learned, because vLLM rarely publishes it."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from math import ceil, floor
from typing import Protocol

PLATEAU_READINGS = 3  # So many consecutive readings with waiting sequences prove a plateau. A single one may be chance.
PROVEN_READINGS = 2  # Enough readings for a plateau if sequences can wait only because the batch is full.
UNPUBLISHED = 256  # Limit of a backend without metrics: vLLM's default batch limit on most GPUs.
CALM_READINGS_MIN, CALM_READINGS_MAX = 5, 160
"""A larger limit is tried after this many readings of the full engine without a queue: at first the minimum, doubled
after each trial that finds the same plateau."""
FALLEN = 0.8  # A refusal at a load below this share of the last plateau is not the result of a trial.
RESERVE_FROM = 4  # From this batch limit on, bands below the highest leave one slot free on each backend.


@lru_cache(maxsize=1_024)
def slots_under(limit: int, ceiling: float, look_ahead: int, highest: float = 1.0) -> int:
    """Returns the number of sequences up to which a band with `ceiling` may fill a backend.

    `highest` is the ceiling of the highest band. Only bands with ceiling 1.0 get the look-ahead. Rounding to the
    nearest integer keeps small batches usable, but could give two bands the same number. So from a limit of
    RESERVE_FROM on, a band below the highest gets at least one slot less.
    """
    if ceiling >= 1.0:
        return limit + look_ahead
    slots = max(1, floor(limit * ceiling + 0.5))
    if ceiling < highest and limit >= RESERVE_FROM:
        return max(1, min(slots, slots_under(limit, highest, 0) - 1))
    return slots


class BatchLimit:
    """Learns the number of sequences that an engine runs at once.

    Growth: the limit starts at `start`, and doubles while it is used and no sequence waits.

    Convergence: if sequences keep waiting while the number of running sequences no longer increases, this number is a
    *plateau*, and becomes the limit. If a later trial runs more sequences, the plateau is discarded, and the limit
    grows again, by at least a quarter.

    Trials: the cause of a plateau (long prompts, a full KV cache) may pass. So after some scrapes without waiting
    sequences, one sequence more than the plateau is tried. The number of scrapes doubles while trials find the same
    plateau. A trial ends with the first scrape that shows a waiting sequence and not more running ones than the
    plateau. Otherwise the extra sequence would wait in the engine ahead of all later requests, critical ones included.

    No evidence: if the KV cache has room, an engine that ran `load` sequences at once does so again. A sequence that
    waits then has come between two steps. Without this rule, short answers would lower the limit one by one.

    Cap: `fixed` is a configured maximum. Waiting sequences may prove a lower limit.

    The limit counts as used when the engine is filled to `lowest_ceiling`, because traffic of low bands alone fills it
    no further. If nothing but the size of the batch explains a plateau, the plateau is *proven* to be the engine's own
    limit. A larger limit is then tried only after the longest pause, and only by bands that may fill the proven limit.
    The limit grows only after a scrape that shows running sequences, because a frozen engine also shows none waiting.
    """

    def __init__(self, fixed: int | None, start: int, lowest_ceiling: float = 1.0) -> None:
        self._cap = fixed
        self._start = start
        self.lowest_ceiling = lowest_ceiling
        self._waited: deque[int] = deque(maxlen=PLATEAU_READINGS)
        self.forget()

    def forget(self) -> None:
        """Forgets everything, because another engine has the backend's name."""
        self._plateau: int | None = None
        self._proven = False
        self._converged_at = self._ran_most = self._ran_freely = self._calm = self._proofs = 0
        self._given = False
        self._beginning: tuple[int, bool] | None = None
        self._calm_needed = CALM_READINGS_MIN
        self._waited.clear()
        self.value = self._cap if self._cap is not None else self._start

    def restarted(self) -> None:
        """Discards the evidence about the old process, because a new process may run fewer or more sequences."""
        self._ran_most = self._calm = 0
        self._calm_needed = CALM_READINGS_MIN
        self._proven, self._proofs = False, 0
        self._waited.clear()

    def begin_at(self, limit: int, *, converged: bool) -> None:
        """Sets a published or restored limit, unless a limit is configured or was learned from metrics.

        `converged`: the engine is known to run no more than `limit`. The metrics may correct the limit later.
        """
        if self._cap is not None:
            self._beginning = limit, converged
        if self._cap is not None or (self._converged_at and not self._given):
            return
        if converged:
            self._converge(limit, proven=True)
            self._given = True
        else:
            self._ran_freely = limit
            self._set(max(self.value, limit))

    @property
    def proven_load(self) -> int:
        """The number of sequences that the engine certainly runs at once; at most the limit.

        It is the configured limit or the plateau. Before both, it is the start value, or a larger number that ran while
        none waited.
        """
        if self._cap is not None:
            return self.value
        return min(self.value, self._plateau or max(self._start, self._ran_freely))

    def proven_with(self, elsewhere: int) -> int:
        """Returns a number of sequences that the engine can certainly run at once.

        Until the engine has reached its own limit, the number that another engine of its pool has run (`elsewhere`)
        counts too.
        """
        if self._cap is not None or self._plateau is not None:
            return self.proven_load
        return min(self.value, max(self._start, self._ran_freely, elsewhere))

    @property
    def converged(self) -> bool:
        """Whether a plateau or a configured limit is known. A plateau may be temporary."""
        return self._cap is not None or self._plateau is not None

    @property
    def proven(self) -> bool:
        """Whether the limit is configured, or proven to be the engine's own limit."""
        return self._cap is not None or (self._plateau is not None and self._proven)

    @property
    def known(self) -> tuple[int, bool] | None:
        """Returns the arguments of `begin_at` for the next process with this engine; None if nothing was learned."""
        if self._cap is not None or (not self._converged_at and self.value <= self._start):
            return None
        return (self._plateau, True) if self._plateau is not None and self._proven else (self.value, False)

    def cap(self, fixed: int | None) -> None:
        """Changes the configured limit; None removes it. A plateau that does not exceed the new limit stays in force.

        Without a plateau, the limit becomes `fixed`. After a removal, it becomes the published or restored limit, else
        the larger of the start value and the most sequences that ran at once.
        """
        if fixed == self._cap:
            return
        self._cap = fixed
        if fixed is None and self._plateau is None:
            # A removed configured limit is not a learned limit.
            self.value = max(self._start, self._ran_most)
            if self._beginning is not None:
                self.begin_at(self._beginning[0], converged=self._beginning[1])
        elif fixed is not None:
            if self._plateau is not None and self._plateau > fixed:
                self._plateau = None
            self.value = self._plateau or fixed

    def start_at(self, start: int) -> None:
        """Changes the start value. A limit that was not learned yet follows it."""
        if self._cap is None and not self._converged_at:
            self.value = max(start, self._ran_freely if self.value == self._start else self.value)
        self._start = start

    def observe(
        self,
        running: int,
        waiting: int,
        load: int,
        *,
        proven: bool = False,
        kv_room: bool = False,
        pool: Exploration | None = None,
    ) -> None:
        """Learns from a scrape, with about `load` sequences in flight. The pool bounds the growth.

        `proven`: nothing but the size of the batch explains why sequences wait. `kv_room`: the KV cache is known to
        have room for each waiting prompt.
        """
        self._ran_most = max(self._ran_most, running)
        if waiting > 0:
            self._calm = 0
            if kv_room and load <= self._ran_most:
                return
            if self._plateau is not None and running <= self._plateau < self.value:
                # The reading that ends a trial may show a request that came between two steps.
                self._proofs = self._proofs + 1 if proven and running == self._plateau else 0
                self._converge(self._plateau, self._proven or self._proofs >= PLATEAU_READINGS)
                return
            self._waited.append(running)
            proven = proven and running >= self._ran_most
            last = list(self._waited)[-PROVEN_READINGS if proven else -PLATEAU_READINGS :]
            steady = max(last) - min(last) <= (0 if proven else max(1, running // 10))
            if len(last) == (PROVEN_READINGS if proven else PLATEAU_READINGS) and steady and running > 0:
                self._converge(max(last), proven)
            return
        self._waited.clear()
        self._ran_freely = max(self._ran_freely, running)
        if running > self.value:
            self._set(running)
        used_from = self._used_from()
        # Half, because short requests spend much of their time in transit, outside the batch.
        if load >= used_from and 2 * running >= used_from:
            self._grow(running, load, pool)

    def unpublished(self, load: int) -> None:
        """Raises the limit of a healthy backend without metrics, because its initial limit would otherwise never grow.

        After a refusal the limit grows as it does with metrics. All `load` sequences in flight count as running.
        """
        if not self._converged_at:
            if self._cap is None:
                self._set(max(self.value, UNPUBLISHED))
                self._ran_freely = self.value
        elif load >= self._used_from():
            self._grow(load, load, None, UNPUBLISHED)

    def refused(self, load: int) -> None:
        """Lowers the limit after the engine refused a request as busy, with `load` other sequences in flight.

        A refusal far below the plateau (FALLEN) shows that the engine accepts less than before, perhaps for a moment.
        So the next trial comes after the shortest pause. Then the limit doubles up to the old plateau, as TCP's
        congestion window does up to its threshold (slow start, RFC 5681). In a burst, each refusal finds a lower load.
        """
        self._calm = 0
        plateau = max(1, min(self.value, load))
        self._proven = self._given = False
        if self._plateau != self.value:
            self._converge(plateau, proven=False)
        elif plateau < self.value:
            self._plateau = self.value = plateau
            if plateau < FALLEN * self._converged_at:
                self._calm_needed = CALM_READINGS_MIN

    def _used_from(self) -> int:
        """Returns the load from which the limit counts as used: a proven limit itself, else the lowest band's slots."""
        if self._proven or self.lowest_ceiling >= 1.0:
            return self.value
        return max(1, min(slots_under(self.value, self.lowest_ceiling, 0), self.value - 1))

    def _grow(self, running: int, load: int, pool: Exploration | None, bound: int | None = None) -> None:
        if pool is not None and not self.converged:
            if (end := pool.proven_elsewhere(self)) is not None:
                self._converge(end, proven=False)
                return
            bound = pool.bound(self)
        if self._plateau is not None and running > self._plateau:
            self._plateau, self._proven = None, False
        if self._plateau is None or self.value < self._plateau:
            quarter = self.value + max(1, self.value // 4)
            filled = min(self.value, ceil(running / self.lowest_ceiling))
            grown = max(quarter, min(2 * filled, self._converged_at) if self._converged_at else 2 * filled)
            self._set(grown if bound is None else max(self.value, min(grown, bound)))
            return
        self._calm += 1
        if self._calm >= self._calm_needed:
            self._calm = 0
            # Traffic that fills the backend to `load` now fills the new limit to one more than the plateau.
            self._set(max(self._plateau + 1, ceil(self._plateau * (self._plateau + 1) / load)))

    def _converge(self, plateau: int, proven: bool) -> None:
        same = abs(plateau - self._converged_at) <= max(1, plateau // 10)
        if same and self._proven and not proven:
            # A single reading between two steps does not replace a proven limit.
            plateau, proven = self._plateau or plateau, True
        if plateau != self.value or self._plateau is None:
            self._calm_needed = min(CALM_READINGS_MAX, 2 * self._calm_needed) if same else CALM_READINGS_MIN
        if proven:
            self._calm_needed = CALM_READINGS_MAX
        if plateau != self._plateau:
            self._proofs = 0
        self._plateau = self._converged_at = plateau
        self._given = False
        self._proven = proven
        self._set(plateau)

    def _set(self, value: int) -> None:
        self.value = max(1, value if self._cap is None else min(value, self._cap))


class PoolMember(Protocol):
    """The properties of a backend that `Exploration` reads."""

    @property
    def up(self) -> bool: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def limit(self) -> BatchLimit: ...


class Exploration:
    """Ensures that only one engine of a pool at a time tries a batch that is larger than any batch that ran.

    The engines are assumed to be equal until they prove otherwise. A batch size that ran on one engine may be used on
    all, and a limit proven on one engine applies to all. Only one engine tries a larger batch, because the extra
    sequences wait in that engine ahead of all later requests. Meanwhile urgent requests find slots on the other
    engines.
    """

    def __init__(self) -> None:
        self.members: dict[str, PoolMember] = {}
        self.proven_load = 0  # The largest `BatchLimit.proven_load` of the members.
        self._largest: BatchLimit | None = None

    def learned(self, limit: BatchLimit) -> None:
        """Updates the state of the pool after a possible change of `limit`."""
        if limit.proven_load >= self.proven_load:
            self.proven_load, self._largest = limit.proven_load, limit
        elif limit is self._largest:
            self.refresh()

    def refresh(self) -> None:
        """Recomputes the state after backends have joined or left, or after a limit was lowered."""
        self._largest = max(
            (member.limit for member in self.members.values()), key=lambda one: one.proven_load, default=None
        )
        self.proven_load = 0 if self._largest is None else self._largest.proven_load

    def bound(self, limit: BatchLimit) -> int | None:
        """Returns the maximum for the limit of a member; None while no other member tries a larger batch."""
        others = (one for one in self.members.values() if one.limit is not limit and one.up)
        # Requests in the look-ahead are no trial, because all full members have them.
        tried = any(
            min(one.in_flight, one.limit.value) > max(self.proven_load, one.limit.proven_load) for one in others
        )
        return self.proven_load if tried else None

    def proven_elsewhere(self, limit: BatchLimit) -> int | None:
        """Returns the lowest proven limit of other members that is not below `limit.proven_load`; None without any."""
        ends = (one.limit.proven_load for one in self.members.values() if one.limit is not limit and one.limit.proven)
        return min((end for end in ends if end >= limit.proven_load), default=None)
