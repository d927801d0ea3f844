"""Quantiles of a stream in constant memory: DDSketch (Masson, Rim and Lee, VLDB 2019).

Values are counted in buckets whose bounds grow by a constant factor, so that any value of a bucket stands for all of
them within a known relative error. Two sketches of equal accuracy merge without losing any.
"""

from __future__ import annotations

import math

ACCURACY = 0.005
BUCKETS_MAX = 2_048
"""About nine decades at the accuracy above. Beyond it the lowest buckets become one, and only low quantiles suffer."""
ZERO = 1e-9
"""What is not above it counts as zero, which no bucket of a logarithmic scale could hold."""


class Sketch:
    """Counts of values >= 0, within `accuracy` of each value (relative)."""

    def __init__(self, accuracy: float = ACCURACY, buckets_max: int = BUCKETS_MAX) -> None:
        """Raises ValueError unless 0 < accuracy < 1 and buckets_max >= 1."""
        if not 0.0 < accuracy < 1.0 or buckets_max < 1:
            raise ValueError(f"a sketch cannot have accuracy {accuracy} and {buckets_max} buckets")
        self.accuracy = accuracy
        self.count = 0
        self._gamma = (1.0 + accuracy) / (1.0 - accuracy)
        self._scale = 1.0 / math.log(self._gamma)
        self._buckets_max = buckets_max
        self._buckets: dict[int, int] = {}
        self._zeros = 0
        self._sum = 0.0
        self._min = math.inf
        self._max = 0.0

    def add(self, value: float) -> None:
        """Count one value. Raises ValueError for one that is negative, infinite or not a number."""
        if not 0.0 <= value < math.inf:
            raise ValueError(f"a sketch counts finite values from 0 on, not {value}")
        self.count += 1
        self._sum += value
        self._min = min(self._min, value)
        self._max = max(self._max, value)
        if value <= ZERO:
            self._zeros += 1
            return
        bucket = math.ceil(math.log(value) * self._scale)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        if len(self._buckets) > self._buckets_max:
            self._collapse()

    def merge(self, other: Sketch) -> None:
        """Count all that `other` counted. Raises ValueError when their accuracies differ."""
        if other.accuracy != self.accuracy:
            raise ValueError(f"sketches of accuracy {self.accuracy} and {other.accuracy} cannot be merged")
        self.count += other.count
        self._sum += other._sum
        self._min = min(self._min, other._min)
        self._max = max(self._max, other._max)
        self._zeros += other._zeros
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self._collapse()

    @property
    def mean(self) -> float | None:
        """Exact, None without values."""
        return self._sum / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """The nearest-rank quantile: the value of rank ceil(q * count), at least the first; None without values.

        Raises ValueError unless 0 <= q <= 1.
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"a quantile is asked for with a share from 0 to 1, not {q}")
        return self._at_ranks([self._rank(q)])[0] if self.count else None

    def cdf(self, points: int) -> list[tuple[float, float]] | None:
        """The distribution as at most `points` (>= 2) pairs (value, share of all values that are not above it).

        The pairs are evenly spaced in the share, and both ends are among them. None without values.
        """
        if not self.count:
            return None
        ranks = [self._rank(i / (points - 1)) for i in range(points)]
        highest = dict(zip(self._at_ranks(ranks), ranks, strict=True))
        return [(value, rank / self.count) for value, rank in highest.items()]

    def _rank(self, share: float) -> int:
        # A product such as 0.07 * 100 lies a hair above its true value and must not count as the next rank.
        return max(1, math.ceil(share * self.count - 1e-9))

    def _at_ranks(self, ranks: list[int]) -> list[float]:
        """The value at each of the ascending `ranks`, in one pass over the buckets."""
        values: list[float] = []
        buckets = iter(sorted(self._buckets.items()))
        seen, value = self._zeros, 0.0
        for rank in ranks:
            while seen < rank:
                bucket, count = next(buckets)
                seen += count
                value = 2.0 * self._gamma**bucket / (self._gamma + 1.0)
            values.append(min(max(value, self._min), self._max))
        return values

    def _collapse(self) -> None:
        """Make the lowest buckets one until there are few enough."""
        excess = len(self._buckets) - self._buckets_max
        if excess <= 0:
            return
        lowest = sorted(self._buckets)[: excess + 1]
        self._buckets[lowest[-1]] += sum(self._buckets.pop(bucket) for bucket in lowest[:-1])
