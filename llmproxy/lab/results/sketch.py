"""Quantiles of a stream in constant memory: DDSketch (Masson, Rim and Lee, VLDB 2019).

The bounds of its buckets grow by a constant factor. So all values of a bucket are equal within a known relative error.
"""

from __future__ import annotations

import math
from collections import Counter

ACCURACY = 0.005  # Relative error of a quantile.
BUCKETS_MAX = 2_048
"""About nine decades at this accuracy. Beyond it the lowest buckets are merged, which affects low quantiles only."""
ZERO = 1e-9  # Smaller values count as zero, which has no place on a logarithmic scale.
_GAMMA = (1.0 + ACCURACY) / (1.0 - ACCURACY)
_SCALE = 1.0 / math.log(_GAMMA)


class Sketch:
    """Counts of values >= 0, each within `ACCURACY`. The mean is exact."""

    def __init__(self) -> None:
        self.count = 0
        self._buckets: Counter[int] = Counter()
        self._zeros = 0
        self._sum = 0.0
        self._min = math.inf
        self._max = 0.0

    def add(self, value: float) -> None:
        """Counts a value. Raises ValueError if it is negative, infinite or not a number."""
        if not 0.0 <= value < math.inf:
            raise ValueError(f"a sketch counts finite values from 0 on, not {value}")
        self.count += 1
        self._sum += value
        self._min = min(self._min, value)
        self._max = max(self._max, value)
        if value <= ZERO:
            self._zeros += 1
        else:
            self._buckets[math.ceil(math.log(value) * _SCALE)] += 1
            self._collapse()

    def merge(self, other: Sketch) -> None:
        self.count += other.count
        self._sum += other._sum
        self._min = min(self._min, other._min)
        self._max = max(self._max, other._max)
        self._zeros += other._zeros
        self._buckets.update(other._buckets)
        self._collapse()

    @property
    def mean(self) -> float | None:
        return self._sum / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """Returns the nearest-rank quantile for q in 0..1, of rank max(1, ceil(q * count)); None without values."""
        return self._at_rank(self._rank(q)) if self.count else None

    def _rank(self, share: float) -> int:
        # A product such as 0.07 * 100 is slightly above its true value and must not count as the next rank.
        return max(1, math.ceil(share * self.count - 1e-9))

    def _at_rank(self, rank: int) -> float:
        buckets = iter(sorted(self._buckets.items()))
        seen, value = self._zeros, 0.0
        while seen < rank:
            bucket, count = next(buckets)
            seen += count
            value = 2.0 * _GAMMA**bucket / (_GAMMA + 1.0)
        return min(max(value, self._min), self._max)

    def _collapse(self) -> None:
        """Merges the lowest buckets until there are `BUCKETS_MAX`."""
        excess = len(self._buckets) - BUCKETS_MAX
        if excess > 0:
            lowest = sorted(self._buckets)[: excess + 1]
            self._buckets[lowest[-1]] += sum(self._buckets.pop(bucket) for bucket in lowest[:-1])
