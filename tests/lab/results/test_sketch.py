"""The quantile sketch against exact quantiles."""

from __future__ import annotations

import math
from random import Random

import pytest

from llmproxy.lab.results import sketch as sketch_module
from llmproxy.lab.results.sketch import ACCURACY, Sketch


def filled(values: list[float]) -> Sketch:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    return sketch


def nearest_rank(values: list[float], q: float) -> float:
    return sorted(values)[max(1, math.ceil(round(q * len(values), 6))) - 1]


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1_000])
def test_every_quantile_is_within_the_promised_error(count: int) -> None:
    rng = Random(count)
    values = [rng.lognormvariate(-2.0, 2.5) for _ in range(count)]
    sketch = filled(values)
    for q in (0.0, 0.01, 0.07, 0.5, 0.9, 0.99, 1.0):
        assert sketch.quantile(q) == pytest.approx(nearest_rank(values, q), rel=ACCURACY * 1.001)
    assert sketch.mean == pytest.approx(sum(values) / count)


def test_an_empty_sketch_has_no_figures() -> None:
    sketch = Sketch()
    assert (sketch.count, sketch.mean, sketch.quantile(0.5)) == (0, None, None)


def test_zero_and_a_single_value_are_exact() -> None:
    sketch = filled([0.0, 0.0, 0.0, 5.0])
    assert sketch.quantile(0.75) == 0.0
    assert sketch.quantile(0.76) == pytest.approx(5.0, rel=ACCURACY)
    assert [filled([0.123456]).quantile(q) for q in (0.0, 0.5, 1.0)] == [0.123456] * 3


def test_merging_counts_as_if_one_had_seen_all() -> None:
    rng = Random(1)
    values = [rng.expovariate(1.0) for _ in range(500)] + [0.0]
    merged, together = filled(values[:100]), filled(values)
    merged.merge(filled(values[100:]))
    merged.merge(Sketch())
    shares = [i / 50 for i in range(51)]
    assert [merged.quantile(share) for share in shares] == [together.quantile(share) for share in shares]
    assert merged.count == together.count
    assert merged.mean == pytest.approx(together.mean)


def test_too_many_buckets_collapse_from_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_module, "BUCKETS_MAX", 50)
    values = [1.1**i for i in range(200)]
    sketch = filled(values)
    assert len(sketch._buckets) == 50
    assert sketch.count == 200
    assert sketch.quantile(0.9) == pytest.approx(nearest_rank(values, 0.9), rel=ACCURACY)
    assert (sketch.quantile(0.1) or 0.0) > nearest_rank(values, 0.1)
    merged = filled([1.1**i for i in range(40)])
    merged.merge(filled([1.1**i for i in range(100, 140)]))
    assert len(merged._buckets) == 50
    assert merged.quantile(1.0) == pytest.approx(1.1**139, rel=ACCURACY)


@pytest.mark.parametrize("value", [-1e-12, math.inf, math.nan])
def test_a_value_that_cannot_be_counted_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite values from 0 on"):
        Sketch().add(value)
