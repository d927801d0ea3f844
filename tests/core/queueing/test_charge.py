from __future__ import annotations

from dataclasses import replace

from llmproxy.core.domain import Grant, Usage, Verdict
from llmproxy.core.lease_events import Progress, Returned
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.charge import charges
from tests.core.conftest import Ledger
from tests.core.make import DEFAULTS, only_grant, pools, request


def test_tokens_are_weighted_uncached_prompt_and_output_tokens() -> None:
    charge = charges.get("tokens")(replace(DEFAULTS, input_weight=3.0, output_weight=5.0))
    one = request(prompt_tokens=100, output_tokens=50)
    assert charge.estimate(one) == 3 * 100 + 5 * 50, "nothing is known to be cached yet"
    assert charge.so_far(one, 20) == 3 * 100 + 5 * 20
    assert charge.final(one, Usage(110, 30)) == 3 * 110 + 5 * 30
    assert charge.final(one, Usage(110, 30, cached_tokens=96)) == 3 * 14 + 5 * 30


def test_more_tokens_cached_than_the_prompt_has_are_no_gift() -> None:
    charge = charges.get("tokens")(DEFAULTS)
    assert charge.final(request(), Usage(10, 0, cached_tokens=99)) == 0.0


def test_requests_cost_one_each() -> None:
    charge = charges.get("requests")(DEFAULTS)
    one = request(prompt_tokens=9999)
    assert charge.estimate(one) == charge.so_far(one, 500) == charge.final(one, Usage(1, 1)) == 1.0


# --- what flows are charged -------------------------------------------------------------------------------------------


def granted(of: Pools, now: float = 0.0, weight: float = 1.0) -> Grant:
    of.submit(request(prompt_tokens=100, output_tokens=50, stream=True, weight=weight), now)
    return only_grant(of, now)


def test_a_weight_divides_the_estimate_and_its_correction_alike(ledger: type[Ledger]) -> None:
    one = pools({"a": 4})
    grant = granted(one, weight=4.0)
    assert ledger.last.charged == (100 + 2 * 50) / 4
    one.apply(Returned(grant.lease, Verdict.SERVED, Usage(80, 10)), 1.0)
    assert ledger.last.charged == (80 + 2 * 10) / 4


def test_requests_of_one_flow_may_have_weights_of_their_own(ledger: type[Ledger]) -> None:
    one = pools({"a": 4})
    paid, free = granted(one, weight=4.0), granted(one, weight=1.0)
    for grant in (free, paid):
        one.apply(Returned(grant.lease, Verdict.SERVED, Usage(0, 0)), 1.0)
    assert ledger.last.charged == 0, "each is given back with the weight with which it was charged"


def test_requests_can_be_shared_instead_of_tokens(ledger: type[Ledger]) -> None:
    one = pools({"a": 4}, replace(DEFAULTS, fairness_cost="requests"))
    grant = granted(one, now=1.0)
    one.apply(Progress(grant.lease, 50), 11.0)
    assert ledger.last.charged == 1.0
    one.apply(Returned(grant.lease, Verdict.SERVED, Usage(100, 90, cached_tokens=64)), 21.0)
    assert ledger.last.charged == 1.0
