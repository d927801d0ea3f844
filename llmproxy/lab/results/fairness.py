"""Fairness between backlogged tenants, and the share of their requests that meet their objectives."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from itertools import combinations

LOOK_EVERY_S = 1.0
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Weights of prompt and output tokens in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024)."""
TENANTS_MAX = 40  # Maximum number of backlogged tenants that are compared: the number of pairs grows with its square.
WINDOW_S = 60.0  # Length of the windows in which the index of Jain is computed.
ADHERENCE_S = 300.0
ADHERENCE_PARTS = 60
ADHERENCE_LEAST = 20  # Fewer requests of a tenant in a window give no meaningful adherence.


class ServiceDifference:
    """The largest difference of weighted service between two tenants while both were backlogged.

    The bound of `bounds.vtc_bound_tokens` limits the range of this difference for each pair of tenants.
    """

    def __init__(self) -> None:
        self._ended: dict[str, float] = {}
        self._spans: dict[tuple[str, str], tuple[float, float]] = {}
        self._followed: dict[str, None] = {}
        self.largest: float | None = None
        self.windows = EvenWindows()

    def ended(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """Adds the service of an ended request of `tenant`."""
        if tenant not in self._followed:
            # This tenant was never backlogged, so no difference with it counts.
            return
        service = PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        self._ended[tenant] = self._ended.get(tenant, 0.0) + service

    def look(self, under_way: Mapping[str, float], backlogged: Mapping[str, None]) -> None:
        """Compares the backlogged tenants. Call it every `LOOK_EVERY_S`.

        `under_way` maps tenants to the service of their unfinished requests. The keys of `backlogged` are the
        backlogged tenants.
        """
        for tenant in backlogged:
            if len(self._followed) < TENANTS_MAX:
                self._followed.setdefault(tenant)
        served = {
            tenant: self._ended.get(tenant, 0.0) + under_way.get(tenant, 0.0)
            for tenant in self._followed
            if tenant in backlogged
        }
        spans: dict[tuple[str, str], tuple[float, float]] = {}
        for a, b in combinations(served, 2):
            difference = served[a] - served[b]
            low, high = self._spans.get((a, b), (difference, difference))
            spans[a, b] = low, high = min(low, difference), max(high, difference)
            self.largest = max(self.largest or 0.0, high - low)
        # A pair starts again when one of its tenants was not backlogged.
        self._spans = spans
        self.windows.look(served)


def jain(shares: Collection[float]) -> float:
    """Returns the fairness index of Jain, Chiu and Hawe (1984): 1 for equal shares, 1/n if one tenant has all."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


class EvenWindows:
    """The lowest Jain index of any window, over the tenants that were backlogged during the whole window."""

    def __init__(self) -> None:
        self._looks = round(WINDOW_S / LOOK_EVERY_S)
        self._served: deque[Mapping[str, float]] = deque(maxlen=self._looks + 1)
        self._in_a_row: Counter[str] = Counter()
        self.least: float | None = None

    def look(self, served: Mapping[str, float]) -> None:
        """Records the service so far of each tenant that is now backlogged."""
        self._served.append(served)
        self._in_a_row = Counter({tenant: self._in_a_row[tenant] + 1 for tenant in served})
        lasting = [tenant for tenant, looks in self._in_a_row.items() if looks > self._looks]
        if len(lasting) > 1:
            index = jain([served[tenant] - self._served[0][tenant] for tenant in lasting])
            self.least = index if self.least is None else min(self.least, index)


class Adherence:
    """Adherence to objectives in a rolling window.

    `least` is the smallest share of one tenant's ended requests that met their objectives. `most` is the largest number
    of requests that ended in a window, over all tenants.
    """

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._part_s = ADHERENCE_S / ADHERENCE_PARTS
        self._parts: deque[tuple[int, Counter[str], Counter[str]]] = deque()
        self._counted: Counter[str] = Counter()
        self._met: Counter[str] = Counter()
        self._began: int | None = None
        self.least: float | None = None
        self.most = 0

    def ended(self, tenant: str, met: bool, at_s: float) -> None:
        """Counts an ended request. Call it in the order of the ends. Ends after `until_s` do not count."""
        part = int(at_s / self._part_s)
        if at_s > self._until_s:
            return
        self._began = part if self._began is None else self._began
        if not self._parts or self._parts[-1][0] != part:
            self._look(part)
            self._parts.append((part, Counter(), Counter()))
        for counts in (self._parts[-1][1], self._counted):
            counts[tenant] += 1
        for counts in (self._parts[-1][2], self._met):
            counts[tenant] += met

    def _look(self, part: int) -> None:
        while self._parts and self._parts[0][0] < part - ADHERENCE_PARTS:
            _, counted, met = self._parts.popleft()
            self._counted -= counted
            self._met.subtract(met)
        if self._began is None or part - self._began < ADHERENCE_PARTS:
            return
        self.most = max(self.most, self._counted.total())
        for tenant, requests in self._counted.items():
            if requests >= ADHERENCE_LEAST:
                share = self._met[tenant] / requests
                self.least = share if self.least is None else min(self.least, share)
