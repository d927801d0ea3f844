"""Detection of backends that fail a larger share of their requests than the rest of their pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import comb

ANSWERS = 32  # Number of recent results considered per backend.
FAILURES_MIN = 5  # Minimum number of failures among the last ANSWERS results for an ejection.
CHANCE = 1e-5  # Maximum probability, per failure, of ejecting a backend that fails no more often than the others.


class FailureRate:
    """The last ANSWERS results of one backend that count: served requests, and failures that are the backend's fault.

    They are cleared when the rate ejects the backend, or when it comes up after it was down.
    """

    __slots__ = ("_failed",)

    def __init__(self) -> None:
        self._failed: deque[bool] = deque(maxlen=ANSWERS)

    @property
    def failures(self) -> int:
        return sum(self._failed)

    @property
    def low(self) -> bool:
        """Whether ANSWERS results are known and fewer than FAILURES_MIN of them are failures."""
        return len(self._failed) == ANSWERS and self.failures < FAILURES_MIN

    def add(self, failed: bool) -> None:
        self._failed.append(failed)

    def forgive(self) -> None:
        """Removes one failure, because the request and not the backend caused it."""
        if True in self._failed:
            self._failed.remove(True)

    def clear(self) -> None:
        self._failed.clear()

    def outlier(self, others: Iterable[FailureRate]) -> str | None:
        """Returns why the backend is an outlier of its pool; None if it is not.

        A binomial test: suppose that the backend failed at the rate of the other backends. It is an outlier if the
        probability of as many failures, or more, is then below CHANCE. A failure and a success are added to the counts
        of the others (Laplace's rule of succession), because a few successful answers prove little.
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
