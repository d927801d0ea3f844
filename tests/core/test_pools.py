from __future__ import annotations

from functools import partial
from random import Random

import pytest

from llmproxy.core.domain import CRITICAL, Grant, Outcome, Refused, Revoke, Trouble, Verdict
from llmproxy.core.placement import make
from llmproxy.core.pools import Pools
from llmproxy.core.settings import CapacitySettings, QueueSettings, Settings
from tests.core.make import listing, pools, request

TIGHT = Settings(capacity=CapacitySettings(look_ahead=0))


def two_pools(settings: Settings = TIGHT) -> Pools:
    return pools({"a": 1, "b": 1}, settings, listings={"a": listing(), "b": listing(base="other")})


def granted(of: Pools, now: float = 0.0) -> list[str]:
    decisions = of.decide(now)
    of.check(now)
    return [decision.request.pool for decision in decisions if isinstance(decision, Grant)]


def test_a_saturated_model_does_not_hold_up_another() -> None:
    one = two_pools()
    for _ in range(3):
        one.submit(request(band=CRITICAL), 0.0)
    one.submit(request(pool="other", model="other"), 0.0)
    assert sorted(granted(one)) == ["base", "other"]


def test_queue_limits_count_over_all_pools() -> None:
    one = two_pools(Settings(queue=QueueSettings(requests_max=2)))
    one.submit(request(), 0.0)
    one.submit(request(pool="other", model="other"), 0.0)
    with pytest.raises(Refused, match="requests_max"):
        one.submit(request(), 0.0)


def test_a_backend_joins_a_pool_with_its_first_listing() -> None:
    one = Pools(TIGHT, {"a": 1, "late": 1}, {}, partial(make, TIGHT.placement, Random(0)))
    for name in ("a", "late"):
        one.answered(name, 0.0)
    assert not one.ready(0.0), "up, but nothing is known of what it serves"
    one.listed("a", listing())
    assert one.ready(0.0)
    one.submit(request(), 0.0)
    one.submit(request(), 0.0)
    assert granted(one) == ["base"]
    one.listed("late", listing())
    assert granted(one) == ["base"]


def test_a_backend_that_changes_its_model_changes_its_pool_and_its_leases_run_on() -> None:
    one = pools({"a": 4}, TIGHT)
    one.submit(request(), 0.0)
    (grant,) = one.decide(0.0)
    assert isinstance(grant, Grant)
    one.listed("a", listing(base="new"))
    one.check(0.0)
    one.submit(request(pool="new", model="new"), 0.0)
    assert granted(one) == ["new"]
    one.finish(grant, Verdict.SERVED, 1.0)
    one.check(0.0)
    assert one.views(1.0)["a"].load == 1


def test_leases_of_a_pool_that_was_left_are_revoked_when_the_backend_dies() -> None:
    one = pools({"a": 4}, TIGHT)
    one.submit(request(), 0.0)
    (grant,) = one.decide(0.0)
    one.listed("a", listing(base="new"))
    for _ in range(2):
        one.troubled("a", Trouble.REFUSED)
    (revoked,) = one.decide(0.0)
    assert isinstance(grant, Grant)
    assert isinstance(revoked, Revoke)
    assert revoked.lease == grant.lease


def test_a_request_for_a_pool_that_went_meanwhile_is_refused_and_may_come_again() -> None:
    one = pools({"a": 4}, TIGHT)
    target = one.resolve("base")
    one.listed("a", listing(base="new"))
    with pytest.raises(Refused) as caught:
        one.submit(request(pool=target.pool), 0.0)
    assert caught.value.outcome is Outcome.REJECTED_NO_BACKENDS
    assert caught.value.retry_after_s


def test_names_are_remembered_while_their_backend_is_down() -> None:
    no_hold = Settings(queue=QueueSettings(hold_s=0.0))
    one = pools({"a": 4}, no_hold, listings={"a": listing("lora")}, aliases={"fast": "lora"})
    for _ in range(2):
        one.troubled("a", Trouble.REFUSED)
    assert not one.ready(0.0)
    assert one.resolve("fast").model == "lora"
    assert [entry["id"] for entry in one.models()] == ["base", "lora", "fast"]
    with pytest.raises(Refused) as caught:
        one.submit(request(adapter="lora"), 0.0)
    assert caught.value.outcome is Outcome.REJECTED_NO_BACKENDS
    one.answered("a", 0.0)
    one.submit(request(adapter="lora"), 0.0)
    assert granted(one) == ["base"]


def test_ready_means_that_some_backend_takes_requests_now() -> None:
    one = pools({"a": 4}, TIGHT)
    assert one.ready(0.0)
    one.submit(request(), 0.0)
    (grant,) = one.decide(0.0)
    assert isinstance(grant, Grant)
    one.finish(grant, Verdict.CONNECT_FAILED, 0.0)
    assert not one.ready(0.5)
    assert one.ready(1.0)


def test_a_backend_in_no_pool_may_fail_its_polls() -> None:
    one = Pools(TIGHT, {"a": None}, {}, partial(make, TIGHT.placement, Random(0)))
    one.troubled("a", Trouble.REFUSED)
    one.troubled("a", Trouble.REFUSED)
    assert one.decide(0.0) == []
    assert one.next_wakeup(0.0) is None
    with pytest.raises(Refused) as caught:
        one.resolve("base")
    assert caught.value.outcome is Outcome.REJECTED_NO_BACKENDS
