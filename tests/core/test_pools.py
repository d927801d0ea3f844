from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count
from random import Random
from typing import Any

import pytest

from llmproxy.core.domain import (
    CRITICAL,
    DEFAULT,
    Grant,
    GrantReason,
    Outcome,
    Placed,
    Predicted,
    Revoke,
    Usage,
    Verdict,
)
from llmproxy.core.lease_events import Progress, Returned, Started
from llmproxy.core.placement.cost import CostPlacement
from llmproxy.core.placement.policy import Placement, make
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.charge import Tokens
from llmproxy.core.queueing.fairness import policies
from llmproxy.core.queueing.fairness.fair_share import FairShare
from llmproxy.core.scheduler import FAULT_RETRY_S
from llmproxy.core.settings import Settings, UsageLimit
from tests.core.machine.account import assert_nothing_left
from tests.core.make import (
    DEFAULTS,
    cached,
    grants,
    kill,
    listing,
    names,
    only_grant,
    pools,
    refusal,
    request,
    submit,
    tight,
)

TIGHT = tight()
ONE = UsageLimit(in_flight=1)
LIMITED = tight(limits=dict.fromkeys(("tenant:t", "tenant:u"), ONE))


def two_pools(settings: Settings = TIGHT) -> Pools:
    return pools({"a": 1, "b": 1}, settings, listings={"a": listing(), "b": listing(base="other")})


def granted(of: Pools, now: float = 0.0) -> list[str]:
    return [grant.request.pool for grant in grants(of, now)]


def test_a_saturated_model_does_not_hold_up_another() -> None:
    one = two_pools()
    submit(one, *(request(band=CRITICAL) for _ in range(3)), request(pool="other", model="other"))
    assert sorted(granted(one)) == ["base", "other"]


@pytest.mark.parametrize(
    ("named", "no_backend_wait_s", "ready"), [((), 30.0, False), (("base",), 30.0, True), (("base",), 0.0, False)]
)
def test_named_pools_that_hold_requests_need_no_backend_to_be_ready(
    named: tuple[str, ...], no_backend_wait_s: float, ready: bool
) -> None:
    settings = replace(
        DEFAULTS,
        scaling=replace(DEFAULTS.scaling, pools=named, min=0),
        queue=replace(DEFAULTS.queue, no_backend_wait_s=no_backend_wait_s),
    )
    one = pools({}, settings)
    assert one.ready(0.0) is ready
    one.add_backend("a", 1)
    assert one.ready(0.0) is ready, "while the first replica starts"
    one.listed("a", listing())
    one.backends["a"].answered(0.0)
    assert one.ready(0.0)
    kill(one, "a")
    assert one.ready(0.0) is ready
    one.reconfigure(DEFAULTS, {}, 0.0)
    assert not one.ready(0.0)


def test_a_placement_that_raises_in_one_pool_spares_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    one = pools({"a": 3, "b": 3}, TIGHT, listings={"a": listing(), "b": listing(base="other")})
    placement = one.schedulers["base"]._placement
    place, asked = placement.place, count(1)

    def faulty(*args: Any) -> Any:
        if next(asked) == 2:
            raise ValueError("a plugin's bug")
        return place(*args)

    monkeypatch.setattr(placement, "place", faulty)
    submit(one, *(request() for _ in range(2)), request(pool="other", model="other"))
    decisions = one.decide(0.0)
    assert [x.request.pool for x in decisions if isinstance(x, Grant)] == ["base", "other"], "one before the fault"
    assert [(str(fault), omitted) for fault, omitted in one.faults.take(0.0)] == [("a plugin's bug", 0)]
    one.check(0.0)
    assert one.decide(0.5) == [], "it rests"
    assert one.next_wakeup(0.5) == FAULT_RETRY_S
    assert granted(one, FAULT_RETRY_S) == ["base"]


def test_a_pool_that_could_not_be_made_is_made_with_the_next_listing() -> None:
    raised = count(1)

    def make_placement() -> Placement:
        if next(raised) <= 2:
            raise ValueError("a plugin's bug")
        return make("least_request", Random(0))

    one = Pools(TIGHT, {"a": 1, "b": 1}, {}, make_placement)
    for backend in ("a", "b"):
        one.backends[backend].answered(0.0)
        with pytest.raises(ValueError, match="a plugin's bug"):
            one.listed(backend, listing())
    refusal(one.submit, request(), 0.0)
    for backend in ("a", "b"):
        one.listed(backend, listing())
    submit(one, *(request() for _ in range(2)))
    assert granted(one) == ["base", "base"], "on either"


def test_no_request_is_shed_for_a_band_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    one = pools({"a": 1}, tight(queue=replace(DEFAULTS.queue, requests_max=1)))
    one.submit(request(), 0.0)
    assert granted(one) == ["base"]
    one.submit(request(id="waits"), 0.0)

    def faulty(_: str) -> Any:
        raise ValueError("a plugin's bug")

    with monkeypatch.context() as patched:
        patched.setattr(policies, "get", faulty)
        with pytest.raises(ValueError, match="a plugin's bug"):
            one.submit(request(band=CRITICAL), 0.0)
    assert one.position("waits", 0.0) is not None
    assert one.decide(0.0) == []
    one.check(0.0)


def test_queue_limits_count_over_all_pools() -> None:
    one = two_pools(replace(DEFAULTS, queue=replace(DEFAULTS.queue, requests_max=2)))
    submit(one, request(), request(pool="other", model="other"))
    assert "requests_max" in refusal(one.submit, request(), 0.0).message


@pytest.mark.parametrize("turned", [False, True])
def test_a_limit_over_two_pools_lets_go_whoever_has_waited_longest(turned: bool) -> None:
    one = two_pools(LIMITED)
    names = ("other", "base") if turned else ("base", "other")
    for at in range(8):
        limited(one, names[at % 2], float(at), CRITICAL)
    served: list[str] = []
    while found := grants(one, 8.0):
        (grant,) = found
        served.append(grant.request.id)
        one.apply(Returned(grant.lease, Verdict.SERVED), 8.0)
    # In the first pass no request was blocked yet, and the first pool got the slot.
    assert served[0] in ("0.0", "1.0")
    assert served[1:] == sorted({f"{at}.0" for at in range(8)} - {served[0]})


def test_a_limit_over_two_pools_lets_the_higher_band_go_first() -> None:
    one = two_pools(LIMITED)
    limited(one, "base", 0.0)
    (held,) = grants(one, 0.0)
    limited(one, "base", 1.0)
    limited(one, "other", 2.0, CRITICAL)
    assert grants(one, 2.0) == []
    one.apply(Returned(held.lease, Verdict.SERVED), 3.0)
    assert names(grants(one, 3.0)) == ["2.0"]


def test_the_oldest_blocked_request_without_room_leaves_a_limit_to_others() -> None:
    one = two_pools(LIMITED)
    limited(one, "other", 0.0)
    (held,) = grants(one, 0.0)
    limited(one, "base", 1.0)
    limited(one, "other", 2.0)
    assert grants(one, 2.0) == []
    one.submit(request(), 3.0)
    (full,) = grants(one, 3.0)
    assert full.request.pool == "base"
    one.apply(Returned(held.lease, Verdict.SERVED), 4.0)
    assert names(grants(one, 4.0)) == ["2.0"]


def test_limit_filled_by_another_pool_lets_others_pass_at_once() -> None:
    settings = replace(LIMITED, ceilings={CRITICAL: 0.25, DEFAULT: 1.0})
    one = pools({"a": 4, "b": 1}, settings, listings={"a": listing(), "b": listing(base="other")})
    submit(one, request(band=CRITICAL))
    grants(one)
    # It has no room, and lower bands wait, until its limit is the reason why it waits.
    limited(one, "base", 1.0, CRITICAL)
    submit(one, request(id="behind", arrived_s=1.0), now=1.0)
    limited(one, "other", 2.0)
    assert names(grants(one, 2.0)) == ["2.0", "behind"]
    assert one.decide(2.0) == []


def test_a_request_blocked_by_one_limit_does_not_block_another() -> None:
    one = pools({"a": 4, "b": 4}, LIMITED, listings={"a": listing(), "b": listing(base="other")})
    limited(one, "base", 0.0)
    limited(one, "base", 0.5, limit="tenant:u")
    _, held = grants(one, 0.5)
    limited(one, "base", 1.0)
    limited(one, "other", 2.0, limit="tenant:u")
    limited(one, "base", 3.0, limit="tenant:u")
    assert grants(one, 3.0) == []
    one.apply(Returned(held.lease, Verdict.SERVED), 4.0)
    assert names(grants(one, 4.0)) == ["2.0"]


def limited(of: Pools, pool: str, at_s: float, band: int = DEFAULT, limit: str = "tenant:t") -> None:
    """Submits a request named by its arrival, under a usage limit of 1 in flight over all pools."""
    one = request(id=str(at_s), pool=pool, model=pool, band=band, arrived_s=at_s, limits=(limit,))
    of.submit(one, at_s)


def test_a_backend_joins_a_pool_with_its_first_listing() -> None:
    one = Pools(TIGHT, {"a": 1, "late": 1}, {}, partial(make, TIGHT.placement, Random(0)))
    for name in ("a", "late"):
        one.backends[name].answered(0.0)
    assert not one.ready(0.0), "up, but without a listing"
    one.listed("a", listing())
    assert one.ready(0.0)
    submit(one, request(), request())
    assert granted(one) == ["base"]
    one.listed("late", listing())
    assert granted(one) == ["base"]


def test_a_backend_that_changes_its_model_moves_and_its_leases_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    one = pools({"a": 4}, TIGHT)
    lost: list[str] = []
    # The old pool's placement forgets the backend.
    monkeypatch.setattr(one.schedulers["base"]._placement.observer, "lost", lost.append)
    one.submit(request(), 0.0)
    grant = only_grant(one, 0.0)
    one.listed("a", listing(base="new"))
    one.check(0.0)
    assert lost == ["a"]
    one.submit(request(pool="new", model="new"), 0.0)
    assert granted(one) == ["new"]
    one.apply(Returned(grant.lease, Verdict.SERVED), 1.0)
    one.check(0.0)
    assert one.views(1.0)["a"].load == 1


def test_leases_in_a_former_pool_are_revoked_when_the_backend_dies() -> None:
    one = pools({"a": 4}, TIGHT)
    one.submit(request(), 0.0)
    (grant,) = one.decide(0.0)
    one.listed("a", listing(base="new"))
    kill(one, "a")
    (revoked,) = one.decide(0.0)
    assert isinstance(grant, Grant)
    assert isinstance(revoked, Revoke)
    assert revoked.lease == grant.lease


def test_a_request_for_a_pool_that_has_gone_is_refused() -> None:
    one = pools({"a": 4}, TIGHT)
    target = one.catalogue.resolve("base")
    one.listed("a", listing(base="new"))
    caught = refusal(one.submit, request(pool=target.pool), 0.0)
    assert caught.outcome is Outcome.REJECTED_NO_BACKENDS
    assert caught.retry_after_s


def test_names_are_remembered_while_their_backend_is_down() -> None:
    no_hold = replace(DEFAULTS, queue=replace(DEFAULTS.queue, no_backend_wait_s=0.0))
    one = pools({"a": 4}, no_hold, listings={"a": listing("lora")}, aliases={"fast": "lora"})
    kill(one, "a")
    assert not one.ready(0.0)
    assert one.catalogue.resolve("fast").model == "lora"
    assert [entry["id"] for entry in one.catalogue.models()] == ["base", "lora", "fast"]
    assert refusal(one.submit, request(adapter="lora"), 0.0).outcome is Outcome.REJECTED_NO_BACKENDS
    one.backends["a"].answered(0.0)
    one.submit(request(adapter="lora"), 0.0)
    assert granted(one) == ["base"]


def test_ready_means_that_some_backend_takes_requests_now() -> None:
    one = pools({"a": 4}, TIGHT)
    assert one.ready(0.0)
    one.submit(request(), 0.0)
    grant = only_grant(one, 0.0)
    one.apply(Returned(grant.lease, Verdict.CONNECT_FAILED), 0.0)
    assert not one.ready(0.5)
    assert one.ready(1.0)


def test_a_backend_in_no_pool_may_fail_its_polls() -> None:
    one = Pools(TIGHT, {"a": None}, {}, partial(make, TIGHT.placement, Random(0)))
    kill(one, "a")
    assert one.decide(0.0) == []
    assert one.next_wakeup(0.0) is None
    assert refusal(one.catalogue.resolve, "base").outcome is Outcome.REJECTED_NO_BACKENDS


HOOKS = [
    *[("placement", name) for name in ("booked", "started", "finished", "cached", "lost")],
    *[("fairness", name) for name in ("entered", "backlogged", "emptied", "dispatched", "charge", "started", "ended")],
    *[("charge", name) for name in ("estimate", "so_far", "final")],
]


@pytest.mark.parametrize(("kind", "hook"), HOOKS)
def test_a_policy_that_raises_leaves_every_account_settled(
    kind: str, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tight(limits={"tenant:t": UsageLimit(in_flight=2)})
    hearing = {"placement": CostPlacement, "fairness": FairShare, "charge": Tokens}
    raised = count(1)

    hear = getattr(hearing[kind], hook)

    def faulty(*event: Any) -> None:
        hear(*event)
        next(raised)
        raise ValueError("a plugin's bug")

    monkeypatch.setattr(hearing[kind], hook, faulty)
    one = pools({"a": 2}, settings)
    submit(one, *(request(id=str(at), stream=True, limits=("tenant:t",)) for at in range(3)))
    granted = [decision for decision in one.decide(0.0) if isinstance(decision, Grant)]
    assert [grant.request.id for grant in granted] == ["0", "1"]
    for grant in granted:
        one.apply(Started(grant.lease), 1.0)
        one.apply(Progress(grant.lease, 500), 2.0)
        one.apply(Returned(grant.lease, Verdict.SERVED, Usage(10, 500)), 3.0)
        cached(one, grant, (1, 2))
        one.ended(grant.request, None, 3.0)
    kill(one, "a")
    one.backends["a"].answered(3.0)
    last = only_grant(one, 3.0)
    one.apply(Returned(last.lease, Verdict.CLIENT_GONE), 4.0)
    one.ended(last.request, None, 4.0)
    assert len(one.faults.take(4.0)) == 1
    assert next(raised) > 1
    one.check(4.0)
    assert_nothing_left(one, 4.0)
    assert one.snapshot(4.0).limits[0].in_flight == 0


# --- after another process --------------------------------------------------------------------------------------------


def test_grant_of_another_process_is_booked_but_charged_by_it_alone() -> None:
    one = pools({"a": 2}, tight())
    known = request(id="r", flow="f", prompt_tokens=30, output_tokens=10, stream=True)
    placed = Placed("a", 0.0, (), 1, ttft=Predicted(0.1, 0.2), tpot=Predicted(0.01, 0.02))
    one.restore(known.pool, known.band, {"f": 5.0})
    lease = one.resume(known, placed, -3.0)
    assert lease is not None
    assert one.views(0.0)["a"].load == 1
    assert one.balances()[known.pool, known.band]["f"] == 5.0
    grant = Grant(lease, known, placed, -3.0, 0, GrantReason((), 0, (), 0))
    one.apply(Started(grant.lease), -2.0)
    one.apply(Returned(grant.lease, Verdict.SERVED, Usage(30, 12)), 1.0)
    one.ended(known, None, 1.0)
    # Only the tokens beyond the estimate are charged here.
    assert one.balances()[known.pool, known.band]["f"] == 5.0 + 2.0 * DEFAULTS.output_weight
    assert one.views(1.0)["a"].load == 0
    one.check(1.0)


def test_a_lease_on_a_backend_that_is_not_known_is_not_booked() -> None:
    one = pools({"a": 2}, tight())
    assert one.resume(request(), Placed("b", 0.0, (), 1), 0.0) is None
    assert one.resume(request(pool="other"), Placed("a", 0.0, (), 1), 0.0) is None
    one.check(0.0)
