from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from typing import Any

import pytest

from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, Outcome, Request, Usage, Verdict
from llmproxy.core.lease_events import Returned
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.rate_limits import RateLimits
from llmproxy.core.queueing.usage_limits import UsageLimits
from llmproxy.core.settings import QueueSettings, UsageLimit
from tests.core.make import DEFAULTS, granted, listing, names, only_drop, pools, refusal, request, submit, tight

TENANT = "tenant:acme"


def limited(fleet: dict[str, int | None], queue: QueueSettings | None = None, **given: Any) -> Pools:
    limits = {TENANT: UsageLimit(**given)}
    return pools(fleet, tight(limits=limits, queue=queue or DEFAULTS.queue))


def theirs(**given: Any) -> Request:
    return request(**{"limits": (TENANT,)} | given)


# --- requests in flight -----------------------------------------------------------------------------------------------


def test_a_tenant_at_its_limit_in_flight_waits_and_others_pass() -> None:
    of = limited({"a": 9}, in_flight=1)
    submit(of, theirs(id="t1"), theirs(id="t2"), theirs(id="t3"), request(id="free"))
    first = granted(of)
    assert names(first) == ["t1", "free"]
    assert of.queued() == {DEFAULT: (2, 200)}
    of.apply(Returned(first[0].lease, Verdict.SERVED), 1.0)
    assert names(granted(of, 1.0)) == ["t2"]


def test_lower_bands_pass_a_band_that_only_waits_for_a_limit() -> None:
    of = limited({"a": 9}, in_flight=1)
    submit(of, theirs(band=CRITICAL), theirs(band=CRITICAL), request(id="low", band=SHEDDABLE))
    assert names(granted(of))[1:] == ["low"]


def test_blocked_requests_return_by_band_then_by_arrival() -> None:
    of = limited({"a": 9}, in_flight=2)
    running = [theirs(id="r1", arrived_s=0.0), theirs(id="r2", arrived_s=0.1)]
    bands = {"low": (SHEDDABLE, 0.2), "late": (DEFAULT, 0.9), "soon": (DEFAULT, 0.3), "urgent": (CRITICAL, 0.8)}
    submit(of, *running, now=1.0)
    (one, two) = granted(of, 1.0)
    submit(of, *(theirs(id=name, band=band, arrived_s=at, flow=name) for name, (band, at) in bands.items()), now=1.0)
    assert granted(of, 1.0) == []
    of.apply(Returned(one.lease, Verdict.SERVED), 2.0)
    (urgent,) = granted(of, 2.0)
    of.apply(Returned(urgent.lease, Verdict.SERVED), 3.0)
    of.apply(Returned(two.lease, Verdict.FAILED), 3.0)
    assert [urgent.request.id, *names(granted(of, 3.0))] == ["urgent", "soon", "late"]


def test_next_blocked_request_replaces_a_request_without_a_fitting_backend() -> None:
    settings = tight(limits={TENANT: UsageLimit(in_flight=1)})
    of = pools({"a": 2, "x": 1}, settings, listings={"a": listing(), "x": listing("lora")})
    of.submit(request(id="on x", adapter="lora"), 0.0)
    held = {grant.request.id: grant for grant in granted(of)}
    of.submit(theirs(id="runs"), 0.0)
    held |= {grant.request.id: grant for grant in granted(of)}
    assert {name: grant.placed.backend for name, grant in held.items()} == {"on x": "x", "runs": "a"}
    of.submit(theirs(id="needs x", adapter="lora", arrived_s=0.1, flow="f"), 0.1)
    of.submit(theirs(id="any", arrived_s=0.2, flow="g"), 0.2)
    assert granted(of, 0.3) == []
    of.apply(Returned(held["runs"].lease, Verdict.SERVED), 1.0)
    assert names(granted(of, 1.0)) == ["any"]


def test_no_more_requests_return_while_returned_requests_wait() -> None:
    of = limited({"a": 2}, in_flight=1)
    of.submit(theirs(id="runs"), 0.0)
    (runs,) = granted(of)
    submit(of, *(theirs(id=f"blocked {number}", arrived_s=0.1 + number / 100) for number in range(4)), now=0.2)
    of.submit(request(id="fills"), 0.2)
    assert names(granted(of, 0.2)) == ["fills"]
    assert of.blocked() == {TENANT: 4}
    of.apply(Returned(runs.lease, Verdict.SERVED), 1.0)
    of.submit(request(id="urgent", band=CRITICAL), 1.0)
    assert names(granted(of, 1.0)) == ["urgent"]
    for second in range(2, 6):
        assert granted(of, float(second)) == []
        assert of.blocked() == {TENANT: 3}, "one came back, and only one has room under the limit"


def test_every_blocked_request_has_its_turn_before_later_arrivals() -> None:
    settings = tight(limits={TENANT: UsageLimit(in_flight=1)}, fairness="fcfs")
    of = pools({"a": 2}, settings)
    submit(of, *(theirs(id=f"t{number}", arrived_s=number / 10) for number in range(3)), now=0.3)
    (running,) = granted(of, 0.3)
    of.submit(request(id="fills", arrived_s=0.4), 0.4)
    granted(of, 0.4)
    for number in (1, 2):
        of.submit(request(id=f"later {number}", arrived_s=number), float(number))
        of.apply(Returned(running.lease, Verdict.SERVED), float(number))
        (running,) = granted(of, float(number))
        assert running.request.id == f"t{number}"


def test_blocked_requests_leave_expire_and_are_shed_like_others() -> None:
    of = limited({"a": 9}, replace(DEFAULTS.queue, requests_max=3), in_flight=1)
    of.submit(theirs(id="runs"), 0.0)
    granted(of)
    blocked = [theirs(id=name, band=SHEDDABLE, arrived_s=at, deadline_s=9.0) for name, at in (("p", 0.1), ("q", 0.2))]
    submit(of, *blocked, theirs(id="r", band=SHEDDABLE, arrived_s=0.3), now=0.3)
    assert granted(of, 0.3) == []
    of.submit(theirs(id="urgent", band=CRITICAL, arrived_s=0.4), 0.4)
    shed = only_drop(of, 0.4)
    assert (shed.request.id, shed.outcome) == ("r", Outcome.SHED)
    of.cancel(blocked[0])
    of.check(0.4)
    expired = only_drop(of, 9.0)
    assert (expired.request.id, expired.outcome) == ("q", Outcome.EXPIRED)
    assert of.queued()[CRITICAL][0] == 1
    of.check(9.0)


def test_a_request_under_two_limits_waits_for_both() -> None:
    limits = {TENANT: UsageLimit(in_flight=2), "model:m": UsageLimit(in_flight=1)}
    of = pools({"a": 9}, tight(limits=limits))
    of.submit(request(id="m", limits=("model:m",)), 0.0)
    (model,) = granted(of)
    both = {"limits": (TENANT, "model:m")}
    submit(of, request(id="both", **both), theirs(id="t"))
    (tenant,) = granted(of)
    assert tenant.request.id == "t"
    of.apply(Returned(model.lease, Verdict.SERVED), 1.0)
    assert names(granted(of, 1.0)) == ["both"]


def test_removed_limit_is_forgotten_once_nothing_is_in_flight() -> None:
    limits, running = UsageLimits({TENANT: UsageLimit(in_flight=1)}), theirs()
    limits.booked(running)
    limits.reconfigure({}, 0.0)
    assert limits.in_flight() == {TENANT: 1}
    limits.released(running, None, 0.0)
    assert limits.in_flight() == {}


# --- rates ------------------------------------------------------------------------------------------------------------


def accounts(limits: UsageLimits) -> Sized:
    return limits.rates.accounts


def serve(limits: UsageLimits, one: Request, tokens: int) -> None:
    limits.booked(one)
    limits.released(one, tokens, 0.0)
    limits.ended(one, 0.0)


def test_a_tenant_at_its_rate_is_refused_until_the_next_is_due() -> None:
    limits = UsageLimits({TENANT: UsageLimit(requests_per_min=6)})
    for _ in range(6):
        limits.admit(theirs(), 0.0)
    refused = refusal(limits.admit, theirs(), 2.0)
    assert refused.outcome is Outcome.RATE_LIMITED
    assert refused.retry_after_s == pytest.approx(8.0)
    assert "6 requests per minute of the tenant `acme`" in refused.message
    refusal(limits.admit, theirs(), 9.99)
    limits.admit(theirs(), 10.0)
    refusal(limits.admit, theirs(), 10.0)


def test_a_refused_request_uses_nothing_up() -> None:
    limits = UsageLimits({TENANT: UsageLimit(requests_per_min=6, tokens_per_min=20)})
    limits.admit(theirs(), 0.0)
    assert refusal(limits.admit, theirs(), 0.0).retry_after_s == pytest.approx(60.0)
    for _ in range(10):
        refusal(limits.admit, theirs(), 30.0)
    limits.admit(theirs(), 60.0)
    assert len(accounts(limits)) == 2


def test_a_tenant_beyond_its_day_takes_no_rate_of_others() -> None:
    limits = UsageLimits({TENANT: UsageLimit(requests_per_day=1), "model:m": UsageLimit(requests_per_min=2)})
    limits.admit(request(id="a", limits=(TENANT, "model:m")), 0.0)
    for number in range(10):
        refused = refusal(limits.admit, request(id=f"b{number}", limits=(TENANT, "model:m")), 0.0)
        assert "per day" in refused.message
    limits.admit(request(id="c", limits=("model:m",)), 0.0)


def test_a_request_beyond_a_rate_reserves_no_budget() -> None:
    limits = UsageLimits({TENANT: UsageLimit(requests_per_day=2), "model:m": UsageLimit(requests_per_min=1)})
    limits.admit(request(id="a", limits=(TENANT, "model:m")), 0.0)
    for number in range(10):
        assert "per minute" in refusal(limits.admit, request(id=f"b{number}", limits=(TENANT, "model:m")), 0.0).message
    assert limits.days.left(TENANT, 0.0) == (1.0, None)


def test_nothing_is_shed_for_a_request_beyond_its_rate() -> None:
    of = limited({"a": 1}, replace(DEFAULTS.queue, requests_max=1), requests_per_min=1)
    of.submit(theirs(id="runs"), 0.0)
    granted(of)
    of.submit(request(id="waits", band=SHEDDABLE), 0.0)
    assert refusal(of.submit, theirs(band=CRITICAL), 0.0).outcome is Outcome.RATE_LIMITED
    assert of.queued()[SHEDDABLE][0] == 1
    assert of.decide(0.0) == []


@pytest.mark.parametrize("names", [("model:m", TENANT), (TENANT, "model:m")])
def test_a_client_is_given_the_longest_of_its_waits(names: tuple[str, str]) -> None:
    limits = UsageLimits({TENANT: UsageLimit(requests_per_min=1), "model:m": UsageLimit(tokens_per_min=20)})
    limits.admit(request(limits=("model:m",)), 0.0)
    limits.admit(theirs(), 40.0)
    refused = refusal(limits.admit, request(prompt_tokens=20, limits=names), 50.0)
    assert refused.retry_after_s == pytest.approx(50.0), "50 s for a request, 10 s for the tokens"


def test_tokens_are_trued_up_once_they_are_counted() -> None:
    limits = UsageLimits({TENANT: UsageLimit(tokens_per_min=100)})
    cheap, dear = theirs(prompt_tokens=40, output_tokens=40), theirs()
    limits.admit(cheap, 0.0)
    refusal(limits.admit, theirs(prompt_tokens=60, output_tokens=0), 0.0)
    serve(limits, cheap, 10)
    assert limits.rates.left_per_min(TENANT, 0.0)[1] == pytest.approx(90.0)
    limits.admit(dear, 0.0)
    serve(limits, dear, 150)
    assert refusal(limits.admit, theirs(prompt_tokens=1, output_tokens=0), 0.0).retry_after_s == pytest.approx(36.6)
    assert not accounts(limits)
    assert limits.in_flight() == {TENANT: 0}


def test_unused_expected_tokens_are_given_back() -> None:
    limits = UsageLimits({TENANT: UsageLimit(tokens_per_min=100)})
    gone = theirs(prompt_tokens=50, output_tokens=50)
    limits.admit(gone, 0.0)
    refusal(limits.admit, theirs(), 0.0)
    limits.ended(gone, 0.0)
    limits.ended(gone, 0.0)
    assert limits.rates.left_per_min(TENANT, 0.0)[1] == 100.0
    assert not accounts(limits)


def test_a_second_attempt_is_counted_beside_the_first() -> None:
    limits = UsageLimits({TENANT: UsageLimit(tokens_per_min=1000)})
    retried = theirs()
    limits.admit(retried, 0.0)
    for used in (None, 30, 50):
        limits.booked(retried)
        limits.released(retried, used, 0.0)
    limits.ended(retried, 0.0)
    assert limits.rates.left_per_min(TENANT, 0.0)[1] == pytest.approx(920.0)


def test_an_answer_of_unknown_length_is_counted_as_expected() -> None:
    of = limited({"a": 1}, tokens_per_min=100)
    one = theirs(prompt_tokens=40, output_tokens=40)
    of.submit(one, 0.0)
    (grant,) = granted(of)
    of.apply(Returned(grant.lease, Verdict.SERVED), 0.0)
    of.ended(one, None, 0.0)
    assert "tokens per minute" in refusal(of.submit, theirs(prompt_tokens=40), 0.0).message


@pytest.mark.parametrize("verdict", Verdict)
@pytest.mark.parametrize("usage", [None, Usage(10, 10)])
def test_nothing_stays_open_however_an_attempt_ends(verdict: Verdict, usage: Usage | None) -> None:
    of = limited({"a": 1}, in_flight=1, requests_per_min=60, tokens_per_min=1000)
    one = theirs()
    of.submit(one, 0.0)
    (grant,) = granted(of)
    of.apply(Returned(grant.lease, verdict, usage), 0.0)
    of.ended(one, None, 0.0)
    assert not accounts(of.limits)
    assert of.limits.in_flight() == {TENANT: 0}


# --- another process counts on ----------------------------------------------------------------------------------------


def test_restored_debts_are_the_taken_tokens() -> None:
    limits = {TENANT: UsageLimit(requests_per_min=6.0, tokens_per_min=600.0)}
    one, other = RateLimits(limits), RateLimits(limits)
    for _ in range(3):
        one.admit(theirs(prompt_tokens=50, output_tokens=50), 0.0)
    debts = one.debts(5.0)
    assert debts == {(TENANT, "requests"): pytest.approx(25.0), (TENANT, "tokens"): pytest.approx(25.0)}
    other.restore(debts | {("tenant:gone", "requests"): 9.0}, 105.0)
    assert other.left_per_min(TENANT, 105.0) == one.left_per_min(TENANT, 5.0)
    other.restore(debts, 105.0)
    assert other.left_per_min(TENANT, 105.0) == one.left_per_min(TENANT, 5.0), "it counts once"
    assert one.debts(61.0) == {}


def test_a_request_that_is_asked_for_again_is_counted_once() -> None:
    one = RateLimits({TENANT: UsageLimit(requests_per_min=1.0)})
    asked = theirs()
    one.admit(asked, 0.0)
    one.admit(asked, 0.0)
    assert one.left_per_min(TENANT, 0.0) == (0.0, None)
