"""Minimum shares, early refusal of requests that would be late, and properties of every policy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from llmproxy.core.domain import (
    CRITICAL,
    DEFAULT,
    SHEDDABLE,
    AdmissionKind,
    Drop,
    Grant,
    Outcome,
    Preempt,
    Refused,
    Slo,
    Usage,
    Verdict,
)
from llmproxy.core.lease_events import Returned, Started
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.min_share import CREDIT_GRANTS, MinShares
from llmproxy.core.settings import QueueSettings, UsageLimit
from tests.core.make import DEFAULTS, granted, kill, listing, pools, refusal, request, submit, tight


def overload(shares: dict[int, float], at_a_time: int, waiting: tuple[int, ...], rounds: int = 600) -> Counter[int]:
    """Returns the tokens granted by band while all bands of `waiting` always have requests.

    `at_a_time` requests end together.
    """
    settings = tight(min_shares=shares, queue=replace(DEFAULTS.queue, no_backend_wait_s=0.0))
    of = pools({"a": 20}, settings)
    held: list[Grant] = []
    tokens: Counter[int] = Counter()
    queued: Counter[int] = Counter()
    for step in range(rounds):
        now = step / 10
        for band in waiting:
            while queued[band] < 40:
                size = 10 if band == CRITICAL else 40
                of.submit(request(band=band, flow=str(band), deadline_s=1e9, output_tokens=size, stream=True), now)
                queued[band] += 1
        for grant in granted(of, now):
            of.apply(Started(grant.lease), now)
            tokens[grant.request.band] += grant.request.prompt_tokens + 2 * grant.request.output_tokens
            queued[grant.request.band] -= 1
            held.append(grant)
        for _ in range(min(at_a_time, len(held))):
            grant = held.pop(0)
            of.apply(Returned(grant.lease, Verdict.SERVED, Usage(10, grant.request.output_tokens)), now)
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("at_a_time", [1, 15])
def test_a_band_gets_its_minimum_share_however_much_waits_above_it(at_a_time: int) -> None:
    tokens = overload({SHEDDABLE: 0.1, DEFAULT: 0.25}, at_a_time, (CRITICAL, DEFAULT, SHEDDABLE))
    total = tokens.total()
    assert tokens[SHEDDABLE] / total == pytest.approx(0.1, abs=0.02)
    assert tokens[DEFAULT] / total == pytest.approx(0.25, abs=0.02)
    assert tokens[CRITICAL] / total == pytest.approx(0.65, abs=0.03)


def test_without_shares_priority_is_strict() -> None:
    assert set(overload({}, 3, (CRITICAL, DEFAULT, SHEDDABLE), rounds=50)) == {CRITICAL}


def test_a_share_does_not_matter_while_its_band_waits_for_nothing() -> None:
    of = pools({"a": 1}, tight(min_shares={SHEDDABLE: 0.5}))
    of.submit(request(id="first"), 0.0)
    (held,) = granted(of)
    for number in range(30):
        of.submit(request(id=f"d{number}"), 0.0)
        of.apply(Returned(held.lease, Verdict.SERVED), 0.0)
        (held,) = granted(of)
        assert not held.why.guaranteed
    submit(of, request(id="waits"), request(band=SHEDDABLE))
    of.apply(Returned(held.lease, Verdict.SERVED), 1.0)
    (held,) = granted(of, 1.0)
    assert held.request.id == "waits", "credit does not pile up while nothing waits"


def test_a_share_does_not_lift_the_ceiling_of_the_highest_band_that_waits() -> None:
    settings = tight(min_shares={SHEDDABLE: 0.5}, ceilings={SHEDDABLE: 0.5, DEFAULT: 1.0})
    of = pools({"a": 10}, settings)
    submit(of, *(request(id=f"fills {number}") for number in range(5)))
    assert len(granted(of)) == 5
    submit(of, request(id="next"), request(band=SHEDDABLE), now=1.0)
    (last,) = granted(of, 1.0)
    assert last.request.id == "next", "the credit that it brought is of no use once nobody else waits"


def test_a_band_whose_requests_fit_nowhere_saves_up_a_few_grants_at_most() -> None:
    shares = MinShares({SHEDDABLE: 0.5})
    for _ in range(100):
        shares.granted(DEFAULT, 10.0, [DEFAULT, SHEDDABLE])
    grants = 0
    while shares.due([SHEDDABLE]):
        shares.granted(SHEDDABLE, 10.0, [])
        grants += 1
    assert grants == CREDIT_GRANTS


def test_a_band_that_was_granted_much_owes_a_few_grants_at_most() -> None:
    shares = MinShares({SHEDDABLE: 0.5})
    for _ in range(100):
        shares.granted(SHEDDABLE, 10.0, [SHEDDABLE])
    others = 0
    while not shares.due([SHEDDABLE]):
        shares.granted(DEFAULT, 10.0, [DEFAULT, SHEDDABLE])
        others += 1
    assert others <= 2 * CREDIT_GRANTS + 1, "each grant of others pays half a grant"


def test_a_guaranteed_grant_says_so_and_is_not_taken_back() -> None:
    settings = tight(min_shares={SHEDDABLE: 0.4}, ceilings={DEFAULT: 1.0})
    of = pools({"a": 1}, settings)
    submit(of, request(band=SHEDDABLE, stream=True), *(request(band=CRITICAL, deadline_s=1e9) for _ in range(6)))
    grants: list[Grant] = []
    for step in range(4):
        (grant,) = granted(of, float(step))
        assert of.decide(float(step)) == [], "a guaranteed grant was preempted"
        grants.append(grant)
        of.apply(Returned(grant.lease, Verdict.SERVED, Usage(10, 10)), float(step))
    by_band = {grant.request.band: grant.why.guaranteed for grant in grants}
    assert by_band == {CRITICAL: False, SHEDDABLE: True}


@pytest.mark.parametrize(
    ("verdict", "usage"), [(Verdict.FAILED, None), (Verdict.BUSY, Usage(0, 0)), (Verdict.LOST, None)]
)
@pytest.mark.parametrize("charged", ["tokens", "requests"])
def test_failed_attempt_does_not_use_up_a_share(verdict: Verdict, usage: Usage | None, charged: str) -> None:
    of, low = owed(charged)
    of.apply(Returned(low.lease, verdict, usage), 1.0)
    of.submit(low.request, 1.0, entry=AdmissionKind.RETRY)
    (again,) = granted(of, 2.0)
    assert (again.request.id, again.why.guaranteed) == ("low", True)


def test_answer_cut_short_uses_up_its_share() -> None:
    of, low = owed("tokens")
    of.apply(Returned(low.lease, Verdict.CLIENT_GONE, Usage(10, 1)), 1.0)
    of.submit(request(band=SHEDDABLE, flow="low"), 1.0)
    (other,) = granted(of, 2.0)
    assert other.request.band == CRITICAL


def owed(charged: str) -> tuple[Pools, Grant]:
    """A pool whose single slot serves the sheddable request "low", by the share that a critical grant earned."""
    settings = tight(min_shares={SHEDDABLE: 0.4}, fairness_cost=charged, preemption=False)
    of = pools({"a": 1}, settings)
    submit(of, request(id="low", band=SHEDDABLE, flow="low"), *(request(band=CRITICAL) for _ in range(6)))
    (first,) = granted(of)
    of.apply(Returned(first.lease, Verdict.SERVED), 0.0)
    (low,) = granted(of)
    assert (low.request.id, low.why.guaranteed) == ("low", True)
    return of, low


def test_a_higher_band_back_from_a_limit_does_not_delay_a_minimum_share() -> None:
    settings = replace(
        DEFAULTS,
        min_shares={DEFAULT: 0.4},
        capacity=replace(DEFAULTS.capacity, look_ahead=1),
        limits={"model:m": UsageLimit(in_flight=1)},
    )
    of = pools({"a": 2}, settings)

    def enter(count: int = 1, **given: Any) -> list[Grant]:
        of.submit(request(**given), 0.0)
        grants = granted(of)
        assert len(grants) == count
        return grants

    # Two slots for all bands, and a third for critical requests and minimum shares.
    enter(id="uses the share up")
    (first,) = enter(band=CRITICAL, limits=("model:m",))
    enter(0, band=SHEDDABLE, limits=("model:m",))
    enter(0, id="owed")
    (filler,) = enter(band=CRITICAL)
    of.apply(Returned(first.lease, Verdict.SERVED), 0.0)
    assert granted(of) == [], "the sheddable one came back from the limit, and has no room"
    (second,) = enter(band=CRITICAL, limits=("model:m",))
    enter(0, band=7, limits=("model:m",))
    of.apply(Returned(filler.lease, Verdict.SERVED), 0.0)
    enter(band=CRITICAL, output_tokens=100)
    of.apply(Returned(second.lease, Verdict.SERVED), 0.0)
    (owed,) = granted(of)
    assert (owed.request.id, owed.why.guaranteed) == ("owed", True)


def test_share_goes_to_a_request_that_returns_late_from_a_limit() -> None:
    limits = {"tenant:t": UsageLimit(in_flight=1)}
    settings = replace(
        DEFAULTS, min_shares={DEFAULT: 0.4}, capacity=replace(DEFAULTS.capacity, look_ahead=1), limits=limits
    )
    of = pools({"a": 2, "b": 1}, settings, listings={"a": listing(), "b": listing("y")})

    def enter(count: int, **given: Any) -> list[Grant]:
        of.submit(request(**given), 0.0)
        grants = granted(of)
        assert len(grants) == count
        return grants

    for _ in range(2):
        enter(1, band=CRITICAL, adapter="y")
    (first,) = enter(1, band=CRITICAL, limits=("tenant:t",))
    # The band has a request that fits nowhere, and two at the limit. The first of these is bound to a full backend.
    enter(0, adapter="y")
    enter(0, backend="b", limits=("tenant:t",))
    enter(0, id="owed", limits=("tenant:t",))
    for _ in range(2):
        enter(1, band=CRITICAL)
    enter(0, band=CRITICAL, adapter="y")
    of.apply(Returned(first.lease, Verdict.SERVED), 0.0)
    (owed,) = granted(of)
    assert (owed.request.id, owed.why.guaranteed) == ("owed", True)


def test_failed_attempt_earns_no_share_for_others() -> None:
    of = pools({"a": 1}, tight(min_shares={SHEDDABLE: 0.4}))
    submit(of, request(id="high", band=CRITICAL), request(band=SHEDDABLE))
    (high,) = granted(of)
    of.apply(Returned(high.lease, Verdict.FAILED), 1.0)
    of.submit(high.request, 1.0, entry=AdmissionKind.RETRY)
    (again,) = granted(of, 1.0)
    assert again.request.id == "high"


def test_shares_given_back_are_no_more_than_may_be_gathered() -> None:
    shares = MinShares({SHEDDABLE: 0.5})
    changes = []
    for _ in range(20):
        shares.granted(CRITICAL, 2.0, (CRITICAL, SHEDDABLE))
        changes.append(shares.granted(SHEDDABLE, 1.0, (CRITICAL, SHEDDABLE)))
    for change in changes:
        shares.undone(change, 1.0)
    for _ in range(int(CREDIT_GRANTS)):
        assert shares.due((SHEDDABLE,)) == [SHEDDABLE]
        shares.granted(SHEDDABLE, 1.0, ())
    assert not shares.due((SHEDDABLE,))


# --- refused early ----------------------------------------------------------------------------------------------------


def late(**given: Any) -> Pools:
    settings = tight(refuse_late=True, **given)
    of = pools({"a": 1}, settings)
    first_token = of.schedulers["base"]._first_token
    for tokens in 500 * (100, 200):
        first_token.learn(tokens, tokens / 100)
    return of


def test_request_that_would_be_late_even_if_next_is_refused() -> None:
    of = late()
    of.submit(request(prompt_tokens=100, slo=Slo(ttft_s=1.5)), 0.0)
    caught = refusal(of.submit, request(prompt_tokens=300, slo=Slo(ttft_s=1.5)), 0.0)
    assert caught.outcome is Outcome.REJECTED_DEADLINE
    assert "1.50 s late" in caught.message
    assert caught.retry_after_s
    submit(of, request(prompt_tokens=300), request(prompt_tokens=300, slo=Slo(tpot_s=0.001)))


def test_time_waited_before_and_time_until_there_is_room_count() -> None:
    of = late()
    refusal(of.submit, request(prompt_tokens=100, arrived_s=0.0, slo=Slo(ttft_s=1.5)), 0.6)
    held = None
    for step in range(5):
        of.submit(request(prompt_tokens=100, arrived_s=float(step), deadline_s=1e9), float(step))
        (held,) = granted(of, float(step))
        if step < 4:
            of.apply(Returned(held.lease, Verdict.SERVED), float(step) + 0.5)
    refusal(of.submit, request(prompt_tokens=100, arrived_s=4.0, slo=Slo(ttft_s=1.5)), 4.0)
    assert held is not None
    of.apply(Returned(held.lease, Verdict.SERVED), 4.0)
    of.submit(request(prompt_tokens=100, arrived_s=4.0, slo=Slo(ttft_s=1.5)), 4.0)


def test_early_refusal_is_off_by_default() -> None:
    of = pools({"a": 1})
    of.schedulers["base"]._first_token.learn(100, 100.0)
    of.submit(request(prompt_tokens=100, slo=Slo(ttft_s=0.1)), 0.0)


# --- examples for people ----------------------------------------------------------------------------------------------


def test_the_30_acu_example() -> None:
    """Two classes of 40 units each ask of a capacity of 100, which drops by 30: all 10 surplus units are the lower's.

    10 of them wait, or get neither a slot nor a place to wait. No request of the critical class waits.
    """
    waits = replace(DEFAULTS.queue, band_requests_max=4)
    settings = tight(ceilings={SHEDDABLE: 1.0}, queue=waits)
    of = pools({"a": 70, "b": 30}, settings)
    kill(of, "b")
    running: Counter[int] = Counter()
    refused: Counter[int] = Counter()
    leases: dict[int, Grant] = {}
    for number in range(80):
        # The critical ones come last in each turn, and still go first.
        band = CRITICAL if number % 2 else SHEDDABLE
        try:
            of.submit(request(band=band, flow=str(band), arrived_s=number / 100, stream=True), 1.0)
        except Refused as refusal:
            refused[band] += refusal.outcome is Outcome.REJECTED_CAPACITY
        if number % 4 == 3:
            preempted = decide_and_obey(of, running, leases)
            assert preempted <= 4
    queued = {band: requests for band, (requests, _) in of.queued().items()}
    assert running == {CRITICAL: 40, SHEDDABLE: 30}
    assert queued[CRITICAL] == refused[CRITICAL] == 0
    assert queued[SHEDDABLE] + refused[SHEDDABLE] == 10
    assert refused[SHEDDABLE] > 0


def decide_and_obey(of: Pools, running: Counter[int], leases: dict[int, Grant]) -> int:
    """Run passes until the scheduler decides nothing. Returns the number of preempted leases."""
    preempted = 0
    while decisions := of.decide(1.0):
        for decision in decisions:
            band = decision.request.band
            if isinstance(decision, Grant):
                running[band] += 1
                leases[decision.lease] = decision
            elif isinstance(decision, Preempt):
                preempted += 1
                running[band] -= 1
                of.apply(Returned(leases.pop(decision.lease).lease, Verdict.PREEMPTED), 1.0)
                of.submit(decision.request, 1.0, entry=AdmissionKind.PREEMPTED)
    return preempted


def test_grant_reports_waiting_bands_and_the_standing_of_its_flow() -> None:
    of = pools({"a": 2}, tight())
    for band, flow in ((CRITICAL, "f"), (CRITICAL, "f"), (CRITICAL, "g"), (SHEDDABLE, "h")):
        of.submit(request(band=band, flow=flow), 0.0)
    first, second = granted(of)
    assert first.why.waiting == ((CRITICAL, 3), (SHEDDABLE, 1))
    assert (first.why.flows, dict(first.why.standing)) == (2, {"counter": 0.0})
    assert second.request.flow == "g"
    assert second.why.waiting == ((CRITICAL, 2), (SHEDDABLE, 1))
    assert (first.why.passed_over, first.why.guaranteed) == (0, False)


def test_a_grant_says_how_many_fitted_nowhere_before_it() -> None:
    of = pools({"a": 2, "b": 1}, tight())
    for number in range(2):
        of.submit(request(arrived_s=number / 10), 0.5, frozenset({"a"}))
    granted(of, 0.5)
    of.submit(request(arrived_s=0.6), 0.6)
    (grant,) = granted(of, 0.6)
    assert grant.placed.backend == "a"
    assert grant.why.passed_over == 1


# --- a full waiting room ----------------------------------------------------------------------------------------------


def busy(queue: QueueSettings) -> Pools:
    """A pool whose one slot is taken."""
    of = pools({"a": 1}, tight(queue=queue))
    of.submit(request(), 0.0)
    granted(of)
    return of


def test_large_request_sheds_only_as_many_as_it_needs() -> None:
    of = busy(replace(DEFAULTS.queue, bytes_max=500))
    submit(of, *(request(id=f"low{at}", band=SHEDDABLE, arrived_s=float(at)) for at in range(1, 5)), now=5.0)
    assert "bytes_max" in refusal(of.submit, request(band=CRITICAL, body_bytes=501), 5.0).message
    assert of.queued()[SHEDDABLE][0] == 4, "nobody was shed for a request that fits nowhere"
    of.submit(request(band=CRITICAL, body_bytes=300), 5.0)
    dropped = [decision for decision in of.decide(5.0) if isinstance(decision, Drop)]
    assert [(drop.request.id, drop.outcome) for drop in dropped] == [("low4", Outcome.SHED), ("low3", Outcome.SHED)]
    of.check(5.0)


def test_the_lowest_band_makes_room_first() -> None:
    of = busy(replace(DEFAULTS.queue, requests_max=2))
    of.submit(request(id="low", band=SHEDDABLE, arrived_s=0.1), 0.1)
    of.submit(request(id="mid", band=DEFAULT, arrived_s=0.2), 0.2)
    for expected in ("low", "mid"):
        of.submit(request(band=CRITICAL), 0.3)
        (drop,) = of.decide(0.3)
        assert drop.request.id == expected
    refusal(of.submit, request(band=CRITICAL), 0.4)
