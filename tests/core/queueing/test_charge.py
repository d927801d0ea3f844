from __future__ import annotations

import pytest

from llmproxy.core.domain import Grant, Usage, Verdict
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.charge import USUAL_S, charges
from llmproxy.core.settings import Settings
from tests.core.conftest import Ledger
from tests.core.make import only_grant, pools, request


def test_tokens_are_weighted_uncached_prompt_and_output_tokens() -> None:
    charge = charges.get("tokens")(Settings(input_weight=3.0, output_weight=5.0))
    one = request(prompt_tokens=100, output_tokens=50)
    assert charge.estimate(one) == 3 * 100 + 5 * 50, "nothing is known to be cached yet"
    assert charge.so_far(one, 20, elapsed_s=9.0) == 3 * 100 + 5 * 20
    assert charge.final(one, Usage(110, 30), elapsed_s=9.0) == 3 * 110 + 5 * 30
    assert charge.final(one, Usage(110, 30, cached_tokens=96), elapsed_s=9.0) == 3 * 14 + 5 * 30


@pytest.mark.parametrize(
    ("unit", "usage", "cost"),
    [
        pytest.param("tokens", Usage(10, 0, cached_tokens=99), 0.0, id="more cached tokens than the prompt has"),
        pytest.param("kv_seconds", Usage(100, 0, cached_tokens=96), 100.0, id="cached tokens occupy the cache too"),
    ],
)
def test_cached_tokens_count_by_what_they_use(unit: str, usage: Usage, cost: float) -> None:
    assert charges.get(unit)(Settings()).final(request(), usage, elapsed_s=1.0) == cost


def test_requests_cost_one_each() -> None:
    charge = charges.get("requests")(Settings())
    one = request(prompt_tokens=9999)
    assert charge.estimate(one) == charge.so_far(one, 500, 2.0) == charge.final(one, Usage(1, 1), 2.0) == 1.0


def test_kv_seconds_are_cached_tokens_times_holding_time() -> None:
    charge = charges.get("kv_seconds")(Settings())
    one = request(prompt_tokens=100, output_tokens=50)
    assert charge.so_far(one, 20, elapsed_s=2.0) == 2.0 * (100 + 10)
    assert charge.final(one, Usage(110, 40), elapsed_s=4.0) == 4.0 * (110 + 20)
    steps = 40
    held = sum((110 + answered + 0.5) * (4.0 / steps) for answered in range(steps))
    assert charge.final(one, Usage(110, 40), elapsed_s=4.0) == pytest.approx(held), "the integral, token by token"


def test_kv_seconds_are_estimated_from_earlier_holding_times() -> None:
    charge = charges.get("kv_seconds")(Settings())
    one = request(prompt_tokens=100, output_tokens=50)
    assert charge.estimate(one) == USUAL_S * 125
    charge.final(one, Usage(100, 50), elapsed_s=20.0)
    assert charge.estimate(one) == pytest.approx(20.0 * 125), "the guess is forgotten at the first end"
    for _ in range(200):
        charge.final(one, Usage(100, 50), elapsed_s=2.0)
    assert charge.estimate(one) == pytest.approx(2.0 * 125, rel=0.01), "and an old pace after a while"
    charge.final(one, Usage(100, 50), elapsed_s=60.0)
    assert charge.estimate(one) < 6.0 * 125, "a single long request does not change much"


# --- what flows are charged -------------------------------------------------------------------------------------------


def granted(of: Pools, now: float = 0.0, weight: float = 1.0) -> Grant:
    of.submit(request(prompt_tokens=100, output_tokens=50, stream=True, weight=weight), now)
    return only_grant(of, now)


def test_a_weight_divides_the_estimate_and_its_correction_alike(ledger: type[Ledger]) -> None:
    one = pools({"a": 4})
    grant = granted(one, weight=4.0)
    assert ledger.last.charged == (100 + 2 * 50) / 4
    one.finish(grant, Verdict.SERVED, 1.0, Usage(80, 10))
    assert ledger.last.charged == (80 + 2 * 10) / 4


def test_requests_of_one_flow_may_have_weights_of_their_own(ledger: type[Ledger]) -> None:
    one = pools({"a": 4})
    paid, free = granted(one, weight=4.0), granted(one, weight=1.0)
    for grant in (free, paid):
        one.finish(grant, Verdict.SERVED, 1.0, Usage(0, 0))
    assert ledger.last.charged == 0, "each is given back with the weight with which it was charged"


@pytest.mark.parametrize(("unit", "running", "ended"), [("requests", 1.0, 1.0), ("kv_seconds", 1_250.0, 2_900.0)])
def test_requests_or_cache_time_can_be_shared_instead_of_tokens(
    unit: str, running: float, ended: float, ledger: type[Ledger]
) -> None:
    one = pools({"a": 4}, Settings(fairness_cost=unit))
    grant = granted(one, now=1.0)
    one.progress(grant, 50, 11.0)
    assert ledger.last.charged == running
    one.finish(grant, Verdict.SERVED, 21.0, Usage(100, 90, cached_tokens=64))
    assert ledger.last.charged == ended
