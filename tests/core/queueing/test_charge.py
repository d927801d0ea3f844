from __future__ import annotations

import pytest

from llmproxy.core.domain import Usage
from llmproxy.core.queueing.charge import HELD_S, charges
from llmproxy.core.settings import Settings
from tests.core.make import request


def test_tokens_are_weighted_uncached_prompt_and_output_tokens() -> None:
    charge = charges.get("tokens")(Settings(input_weight=3.0, output_weight=5.0))
    one = request(prompt_tokens=100, output_tokens=50)
    assert charge.estimate(one) == 3 * 100 + 5 * 50, "nothing is known to be cached yet"
    assert charge.so_far(one, 20, held_s=9.0) == 3 * 100 + 5 * 20
    assert charge.final(one, Usage(110, 30), held_s=9.0) == 3 * 110 + 5 * 30
    assert charge.final(one, Usage(110, 30, cached_tokens=96), held_s=9.0) == 3 * 14 + 5 * 30


def test_more_tokens_cached_than_the_prompt_has_are_no_gift() -> None:
    charge = charges.get("tokens")(Settings())
    assert charge.final(request(), Usage(10, 0, cached_tokens=99), held_s=1.0) == 0.0


def test_requests_cost_one_each() -> None:
    charge = charges.get("requests")(Settings())
    one = request(prompt_tokens=9999)
    assert charge.estimate(one) == charge.so_far(one, 500, 2.0) == charge.final(one, Usage(1, 1), 2.0) == 1.0


def test_kv_seconds_are_cached_tokens_times_holding_time() -> None:
    charge = charges.get("kv_seconds")(Settings())
    one = request(prompt_tokens=100, output_tokens=50)
    assert charge.so_far(one, 20, held_s=2.0) == 2.0 * (100 + 10)
    assert charge.final(one, Usage(110, 40), held_s=4.0) == 4.0 * (110 + 20)
    steps = 40
    held = sum((110 + answered + 0.5) * (4.0 / steps) for answered in range(steps))
    assert charge.final(one, Usage(110, 40), held_s=4.0) == pytest.approx(held), "the integral, token by token"


def test_kv_seconds_count_cached_tokens_too_as_they_occupy_the_cache() -> None:
    charge = charges.get("kv_seconds")(Settings())
    assert charge.final(request(), Usage(100, 0, cached_tokens=96), held_s=1.0) == 100.0


def test_kv_seconds_are_estimated_from_earlier_holding_times() -> None:
    charge = charges.get("kv_seconds")(Settings())
    one = request(prompt_tokens=100, output_tokens=50)
    assert charge.estimate(one) == HELD_S * 125
    charge.final(one, Usage(100, 50), held_s=20.0)
    assert charge.estimate(one) == pytest.approx(20.0 * 125), "the guess is forgotten at the first end"
    for _ in range(200):
        charge.final(one, Usage(100, 50), held_s=2.0)
    assert charge.estimate(one) == pytest.approx(2.0 * 125, rel=0.01), "and an old pace after a while"
    charge.final(one, Usage(100, 50), held_s=60.0)
    assert charge.estimate(one) < 6.0 * 125, "one that took long does not change much"
