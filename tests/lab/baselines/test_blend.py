"""The scores of `blend`, and the draw between near ties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from llmproxy.core.backends.view import View
from llmproxy.core.domain import Placed
from llmproxy.core.placement.policy import Placement
from llmproxy.lab.baselines.blend import blend
from tests.core.make import request, view


def placed(by: Placement, views: Sequence[View], **facts: Any) -> Placed:
    found = by.place(request(**facts), views, 1.0, frozenset(), 0.0)
    assert isinstance(found, Placed), found
    return found


def chosen(views: Sequence[View], times: int, **facts: Any) -> Counter[str]:
    placement = blend(Random(7))
    return Counter(placed(placement, views, **facts).backend for _ in range(times))


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (view("a", load=1), view("b", load=5)),
        (view("a", waiting=0), view("b", waiting=2)),
        (view("a", kv_used=0.1), view("b", kv_used=0.8)),
        (view("a", load=5, limit=100), view("b", load=5, limit=10)),
        (view("a", kv_tokens=100_000), view("b", kv_tokens=100)),
    ],
)
def test_blend_prefers_short_queue_empty_cache_and_small_batch(better: View, worse: View) -> None:
    assert chosen([worse, better], times=10, prompt_tokens=50) == {"a": 10}


def test_blend_prefers_resident_adapter_then_free_slot_then_eviction() -> None:
    served = frozenset({"base", "lora"})
    has = view("has", served=served, resident=frozenset({"lora"}), max_adapters=1)
    free = view("free", served=served, resident=frozenset({"x"}), max_adapters=2)
    evicts = view("evicts", served=served, resident=frozenset({"x"}), max_adapters=1)
    placement = blend(Random(0))
    for views, best in [([evicts, free, has], "has"), ([evicts, free], "free"), ([evicts], "evicts")]:
        assert placed(placement, views, adapter="lora").backend == best


def test_blend_leaves_a_warm_backend_that_is_busy() -> None:
    served = frozenset({"base", "lora"})
    warm = view("warm", served=served, resident=frozenset({"lora"}), max_adapters=2, load=9, waiting=3)
    cold = view("cold", served=served, max_adapters=2)
    assert placed(blend(Random(0)), [warm, cold], adapter="lora").backend == "cold"


def test_blend_says_why() -> None:
    found = placed(blend(Random(0)), [view("a", load=5, waiting=1, kv_used=0.25)])
    assert dict(found.terms) == {"queue": 0.5, "kv": 0.75, "load": 0.5, "lora": 1.0}
    assert (found.score, found.candidates) == (2 * 0.5 + 0.75 + 2 * 0.5 + 1.0, 1)


def test_blend_draws_between_near_ties() -> None:
    found = chosen([view("a", kv_used=0.1), view("b", kv_used=0.1001)], times=400)
    assert min(found["a"], found["b"]) > 100
