from __future__ import annotations

from llmproxy.core.domain import Grant, Usage, Verdict
from llmproxy.core.pools import Pools
from llmproxy.core.settings import Settings
from tests.core.make import only_grant, pools, request


def account(of: Pools, flow: str = "flow", band: int = 0) -> float:
    policy = of.schedulers["base"]._room.band(band).fairness
    return dict(policy.standing(flow))["counter"]


def granted(of: Pools, now: float = 0.0, weight: float = 1.0) -> Grant:
    of.submit(request(prompt_tokens=100, output_tokens=50, stream=True, weight=weight), now)
    return only_grant(of, now)


def test_a_weight_divides_the_estimate_and_its_correction_alike() -> None:
    one = pools({"a": 4})
    grant = granted(one, weight=4.0)
    assert account(one) == (100 + 2 * 50) / 4
    one.finish(grant, Verdict.SERVED, 1.0, Usage(80, 10))
    assert account(one) == (80 + 2 * 10) / 4


def test_requests_of_one_flow_may_have_weights_of_their_own() -> None:
    one = pools({"a": 4})
    paid, free = granted(one, weight=4.0), granted(one, weight=1.0)
    for grant in (free, paid):
        one.finish(grant, Verdict.SERVED, 1.0, Usage(0, 0))
    assert account(one) == 0, "each is given back with the weight with which it was charged"


def test_requests_can_be_what_is_shared_out() -> None:
    one = pools({"a": 4}, Settings(charged="requests"))
    grant = granted(one)
    one.progress(grant, 10_000, 5.0)
    one.finish(grant, Verdict.SERVED, 9.0, Usage(9, 10_000))
    assert account(one) == 1.0


def test_cache_held_over_time_can_be_what_is_shared_out() -> None:
    one = pools({"a": 4}, Settings(charged="kv_seconds"))
    grant = granted(one, now=1.0)
    one.progress(grant, 50, 11.0)
    assert account(one) == 10.0 * (100 + 25)
    one.finish(grant, Verdict.SERVED, 21.0, Usage(100, 90, cached_tokens=64))
    assert account(one) == 20.0 * (100 + 45)
