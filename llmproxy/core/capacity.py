"""The batch limit of an engine, which vLLM does not publish: given by the configuration, or learned from its gauges."""

from __future__ import annotations

from collections import deque

PLATEAU_READINGS = 3
"""Waiting must persist this long to be a queue: a request that arrived between two steps waits for one reading."""


class BatchLimit:
    """How many sequences an engine runs at once, as far as is known.

    Starts at `start` and grows by a quarter while the engine is used up to the limit and shows nobody waiting; settles
    on the number running once requests keep waiting while that number no longer rises. Above a plateau once met it
    probes in small steps. `fixed` caps it for good: an operator's word bounds what is tried, and the engine's own
    queue may still prove it too high.
    """

    def __init__(self, fixed: int | None, start: int, probe_step: int) -> None:
        self._cap = fixed
        self._probe_step = max(1, probe_step)
        self._plateau: int | None = None
        self._waited: deque[int] = deque(maxlen=PLATEAU_READINGS)
        self.value = fixed if fixed is not None else start

    @property
    def backlogged(self) -> bool:
        """Requests have been waiting inside the engine for several readings in a row."""
        return len(self._waited) == PLATEAU_READINGS

    def observe(self, running: int, waiting: int, load: int) -> None:
        """Learn from one reading; `load` is how many sequences are thought to be at the engine."""
        if waiting > 0:
            self._waited.append(running)
            spread = max(1, running // 10)
            if self.backlogged and max(self._waited) - min(self._waited) <= spread and running > 0:
                self._plateau = max(self._waited)
                self._set(self._plateau)
            return
        self._waited.clear()
        if running > self.value:
            self._set(running)
        elif load >= self.value:
            beyond = self._plateau is not None and self.value >= self._plateau
            self._set(self.value + (self._probe_step if beyond else max(1, self.value // 4)))

    def refused(self, load: int) -> None:
        """The engine turned a request away as busy while `load` sequences were at it."""
        self._plateau = max(1, load - 1)
        self._set(min(self.value, self._plateau))

    def _set(self, value: int) -> None:
        self.value = max(1, value if self._cap is None else min(value, self._cap))
