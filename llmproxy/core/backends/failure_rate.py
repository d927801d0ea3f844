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
"""So rarely a backend that fails no more than the others may be taken for one that does, at each failure."""


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
        """Why the backend is an outlier among its pool, None where it is none.

        A backend that fails the share of the others fails so many of its answers with a probability below `CHANCE`
        (binomial test). The others count with one failure more (Laplace's rule of succession), so that a few good
        answers of theirs prove little.
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
