"""Fast counters and histograms for one thread, exported as metrics of prometheus_client.

The metrics of prometheus_client take a lock for each addition and search their buckets from the first, which would be
half the cost of counting a request. Here, an addition changes a number in a dict. Scrapes must run on the same thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Set
from itertools import accumulate
from math import inf

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]


class Counts(defaultdict[Labels, float]):
    """A counter: label values -> count.

    A series appears with its first addition. A counter without labels appears at once, as 0.
    """

    def __init__(self, name: str, text: str, labels: Labels) -> None:
        super().__init__(float)
        self._family, self.labels = (name, text), labels
        if not labels:
            self[()] = 0.0

    def family(self) -> Metric:
        family = CounterMetricFamily(*self._family, labels=self.labels)
        for values, value in self.items():
            family.add_metric(values, value)
        return family


class Distribution:
    """A series of a histogram: the number of values in each bucket (upper bound included), and the sum of all."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class Distributions(dict[Labels, Distribution]):
    """A histogram: label values -> series. Without `bounds`, a summary of count and sum.

    `bounds` are the ascending upper bounds of the buckets, without infinity.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], labels: Labels) -> None:
        super().__init__()
        self._family, self.labels = (name, text), labels
        self._bounds = bounds
        self._ends = [floatToGoString(bound) for bound in (*bounds, inf)]  # type: ignore[no-untyped-call]
        if not labels:
            self[()] = Distribution(bounds)

    def __missing__(self, values: Labels) -> Distribution:
        made = self[values] = Distribution(self._bounds)
        return made

    def family(self) -> Metric:
        if not self._bounds:
            summary = SummaryMetricFamily(*self._family, labels=self.labels)
            for values, one in self.items():
                summary.add_metric(values, sum(one.counts), one.sum)
            return summary
        histogram = HistogramMetricFamily(*self._family, labels=self.labels)
        for values, one in self.items():
            up_to = map(float, accumulate(one.counts))
            histogram.add_metric(values, list(zip(self._ends, up_to, strict=True)), one.sum)
        return histogram


class SeriesCollector(Collector):
    """Makes counters and histograms, and exports all of them at a scrape."""

    def __init__(self) -> None:
        self._series: list[Counts | Distributions] = []

    def counter(self, name: str, text: str, *labels: str) -> Counts:
        self._series.append(made := Counts(name, text, labels))
        return made

    def distribution(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Distributions:
        self._series.append(made := Distributions(name, text, bounds, labels))
        return made

    def keep(self, label: str, values: Set[str]) -> None:
        """Drops the series with a first label `label` whose value is not in `values`."""
        for series in self._series:
            if series.labels[:1] == (label,):
                for gone in [labels for labels in series if labels[0] not in values]:
                    del series[gone]

    def collect(self) -> Iterator[Metric]:
        for series in self._series:
            yield series.family()

    def describe(self) -> Iterator[Metric]:
        # The registry reads the names from this at registration.
        return self.collect()
