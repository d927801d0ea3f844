"""Our own series are counted and shown as the library's are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, disable_created_metrics, generate_latest

from llmproxy.observe.series import SeriesCollector

BOUNDS = (0.00001, 0.5, 1.0, 60.0)
LABELS = st.tuples(st.sampled_from(["a", 'b"\n\\', "é"]), st.sampled_from(["", "x"]))
VALUES = st.one_of(st.sampled_from([0.0, *BOUNDS]), st.floats(0.0, 1e6))


@pytest.fixture(autouse=True, scope="module")
def without_times_of_creation() -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]


def _page(fill: Callable[[CollectorRegistry], None]) -> str:
    registry = CollectorRegistry()
    fill(registry)
    return generate_latest(registry).decode()


@given(st.lists(st.tuples(LABELS, VALUES)))
@example([(("a", "x"), bound) for bound in BOUNDS])
@example([(("a", ""), 60.1)])
def test_series_equal_the_librarys(observed: list[tuple[tuple[str, str], float]]) -> None:
    def ours(registry: CollectorRegistry) -> None:
        series = SeriesCollector()
        counts = series.counter("c_total", "Counted.", "one", "two")
        histogram = series.distribution("h", "Times.", BOUNDS, "one", "two")
        summary = series.distribution("s", "Ratios.", (), "one", "two")
        alone, bare = series.counter("d_total", "Alone."), series.distribution("b", "Bare.", BOUNDS)
        registry.register(series)
        for labels, value in observed:
            counts[labels] += value
            histogram[labels].observe(value)
            summary[labels].observe(value)
            alone[()] += 1
            bare[()].observe(value)

    def theirs(registry: CollectorRegistry) -> None:
        names = ("one", "two")
        counts = Counter("c_total", "Counted.", names, registry=registry)
        histogram = Histogram("h", "Times.", names, registry=registry, buckets=BOUNDS)
        summary = Summary("s", "Ratios.", names, registry=registry)
        alone = Counter("d_total", "Alone.", registry=registry)
        bare = Histogram("b", "Bare.", registry=registry, buckets=BOUNDS)
        for labels, value in observed:
            counts.labels(*labels).inc(value)
            histogram.labels(*labels).observe(value)
            summary.labels(*labels).observe(value)
            alone.inc()
            bare.observe(value)

    assert _page(ours) == _page(theirs)


def test_a_name_cannot_be_taken_twice() -> None:
    registry, series = CollectorRegistry(), SeriesCollector()
    series.counter("c_total", "Counted.")
    registry.register(series)
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(series)
