"""Whether a backend fails a larger share of its requests than the rest of its pool does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import comb

ANSWERS = 32
"""How many answers of a backend are remembered."""
FAILURES_MIN = 5
"""Fewer failures among them prove nothing."""
CHANCE = 1e-5
"""Highest probability, at each failure, to eject a backend that fails no more often than the others."""


class FailureRate:
    """The last `ANSWERS` of one backend, true for each that failed."""

    __slots__ = ("_failed",)

    def __init__(self) -> None:
        self._failed: deque[bool] = deque(maxlen=ANSWERS)

    @property
    def failures(self) -> int:
        return sum(self._failed)

    @property
    def settled(self) -> bool:
        """Enough answers are known, and next to none failed."""
        return len(self._failed) == ANSWERS and self.failures < FAILURES_MIN

    def add(self, failed: bool) -> None:
        self._failed.append(failed)

    def forgive(self) -> None:
        """The last failure was its request's own."""
        if True in self._failed:
            self._failed.remove(True)

    def clear(self) -> None:
        self._failed.clear()

    def outlier(self, others: Iterable[FailureRate]) -> str | None:
        """Return why the backend is an outlier of its pool, None if it is not.

        It is an outlier if a backend with the failure rate of the others had so many failures with a probability below
        `CHANCE` (binomial test). One failure and one success are added to those of the others (Laplace's rule of
        succession), because a few good answers prove little.
        """
        answers, failures = len(self._failed), self.failures
        if failures < FAILURES_MIN:
            return None
        answers_others = failures_others = 0
        for other in others:
            answers_others += len(other._failed)
            failures_others += other.failures
        share = (failures_others + 1) / (answers_others + 2)
        at_least = range(failures, answers + 1)
        if sum(comb(answers, n) * share**n * (1.0 - share) ** (answers - n) for n in at_least) >= CHANCE:
            return None
        return f"{failures} of its last {answers} answers failed, {failures_others} of {answers_others} of the others"
