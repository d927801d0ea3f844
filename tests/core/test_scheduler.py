from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import inf
from random import Random

import pytest
from msgspec.structs import replace

from llmproxy.core import scheduling_pass
from llmproxy.core.domain import (
    CRITICAL,
    DEFAULT,
    SHEDDABLE,
    AdmissionKind,
    Drop,
    Grant,
    Outcome,
    Revoke,
    Trouble,
    Verdict,
)
from llmproxy.core.lease_events import Returned
from llmproxy.core.placement.policy import Placement, make
from llmproxy.core.queueing.admission import RETRY_EMPTY_S
from tests.core.make import (
    DEFAULTS,
    cached,
    granted,
    grants,
    kill,
    listing,
    names,
    only_drop,
    pools,
    reading,
    refusal,
    request,
    submit,
    tight,
)

# --- grants -----------------------------------------------------------------------------------------------------------


def test_a_grant_books_at_once_so_a_burst_cannot_overshoot() -> None:
    one = pools(
        {"a": 4, "b": 2}, dataclasses.replace(DEFAULTS, capacity=dataclasses.replace(DEFAULTS.capacity, look_ahead=2))
    )
    submit(one, *(request(band=CRITICAL) for _ in range(20)))
    by_backend = [grant.placed.backend for grant in grants(one)]
    assert sorted(by_backend) == ["a"] * (4 + 2) + ["b"] * (2 + 2)
    assert one.decide(0.0) == []
    assert one.queued() == {CRITICAL: (10, 1000)}


def test_higher_bands_go_first_and_lower_ones_leave_them_room() -> None:
    one = pools({"a": 20}, tight())
    for band in (SHEDDABLE, DEFAULT, CRITICAL):
        submit(one, *(request(band=band, flow=str(band)) for _ in range(30)))
    first = [grant.request.band for grant in grants(one)]
    assert first == [CRITICAL] * 20
    idle = pools({"a": 20}, tight(headroom_s=inf))
    submit(idle, *(request(band=SHEDDABLE) for _ in range(30)))
    assert len(grants(idle)) == 17
    submit(idle, *(request(band=DEFAULT) for _ in range(30)))
    assert len(grants(idle)) == 2
    submit(idle, *(request(band=CRITICAL) for _ in range(30)))
    assert len(grants(idle)) == 1


def test_blocked_band_stops_lower_bands() -> None:
    one = pools({"a": 4}, tight())
    submit(one, *(request(band=CRITICAL) for _ in range(5)), *(request(band=SHEDDABLE) for _ in range(5)))
    held = grants(one)
    assert len(held) == 4
    one.apply(Returned(held[0].lease, Verdict.SERVED), 1.0)
    (next_one,) = grants(one, 1.0)
    assert next_one.request.band == CRITICAL


def test_strictness_does_not_rest_on_ceilings_that_fall() -> None:
    rising = tight(ceilings={CRITICAL: 0.5, SHEDDABLE: 1.0})
    one = pools({"a": 4}, rising)
    submit(one, *(request(band=CRITICAL) for _ in range(3)), *(request(band=SHEDDABLE) for _ in range(3)))
    assert [grant.request.band for grant in grants(one)] == [CRITICAL] * 2


def test_a_flow_that_fits_nowhere_lets_the_next_one_go() -> None:
    one = pools({"a": 4, "b": 4}, listings={"a": listing("x"), "b": listing()})
    submit(one, *(request(adapter="x", flow="x", band=CRITICAL) for _ in range(9)))
    assert {grant.placed.backend for grant in grants(one)} == {"a"}
    submit(one, request(flow="base", band=SHEDDABLE))
    (lower,) = grants(one)
    assert lower.placed.backend == "b", "there is room, but not for what waits above it"


def test_a_head_that_fits_nowhere_does_not_hold_up_its_own_flow() -> None:
    one = pools(
        {"short": 4, "long": 1},
        dataclasses.replace(DEFAULTS, capacity=dataclasses.replace(DEFAULTS.capacity, look_ahead=2)),
        listings={"short": listing(max_model_len=100), "long": listing(max_model_len=1000)},
    )
    submit(one, *(request(prompt_tokens=500, band=CRITICAL) for _ in range(3)))
    assert [grant.placed.backend for grant in grants(one)] == ["long"] * 3
    submit(one, request(id="head", prompt_tokens=500, arrived_s=1.0, band=CRITICAL))
    submit(one, request(id="behind", prompt_tokens=50, arrived_s=2.0, band=CRITICAL))
    submit(one, request(id="lower", prompt_tokens=50, arrived_s=0.0, band=SHEDDABLE))
    assert names(grants(one, 2.0)) == ["behind", "lower"]


def test_retry_avoids_its_failed_backend_and_delays_nobody() -> None:
    one = pools({"a": 1, "b": 1}, tight())
    submit(one, request(id="first"), request(id="second"))
    by_backend = {grant.placed.backend: grant for grant in grants(one)}
    failed = by_backend["a"]
    one.apply(Returned(failed.lease, Verdict.FAILED), 1.0)
    one.submit(failed.request, 1.0, frozenset({"a"}), AdmissionKind.RETRY)
    submit(one, request(id="third", arrived_s=0.5))
    (other,) = grants(one, 1.0)
    assert (other.request.id, other.placed.backend) == ("third", "a")
    one.apply(Returned(by_backend["b"].lease, Verdict.SERVED), 2.0)
    (again,) = grants(one, 2.0)
    assert (again.request.id, again.placed.backend) == (failed.request.id, "b")


def test_one_wide_request_may_overshoot_but_only_one() -> None:
    one = pools({"a": 4}, tight())
    submit(one, request(band=CRITICAL), request(band=CRITICAL, sequences=9), request(band=CRITICAL))
    assert [grant.request.sequences for grant in grants(one)] == [1, 9]
    assert one.views(0.0)["a"].load == 10


def test_a_grant_says_why_and_how_many_were_passed() -> None:
    one = pools({"a": 1}, tight())
    submit(one, request(), request(), request())
    (grant,) = grants(one, 3.0)
    assert grant.at_s == 3.0
    assert grant.queued_ahead == 2
    assert dict(grant.placed.terms).keys() == {"queue", "prefill", "stream", "harm", "eviction"}


# --- the pass ---------------------------------------------------------------------------------------------------------


def test_a_pass_is_capped_and_asks_to_be_woken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling_pass, "PASS_MAX", 5)
    one = pools({"a": 100})
    submit(one, *(request() for _ in range(12)))
    sizes = []
    while one.queued()[DEFAULT][0]:
        sizes.append(len(grants(one)))
        assert one.next_wakeup(0.0) == (0.0 if one.queued()[DEFAULT][0] else None)
    assert sizes == [5, 5, 2]
    assert one.decide(0.0) == []


def test_a_mass_expiry_is_capped_too_and_grants_wait_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling_pass, "PASS_MAX", 5)
    one = pools({"a": 100})
    submit(one, *(request(deadline_s=5.0) for _ in range(7)), request(band=CRITICAL))
    assert [type(decision) for decision in one.decide(5.0)] == [Drop] * 5
    assert one.next_wakeup(5.0) == 5.0
    assert [type(decision) for decision in one.decide(5.0)] == [Drop, Drop, Grant]
    assert one.next_wakeup(5.0) is None


# --- refusals ---------------------------------------------------------------------------------------------------------


NO_HOLD = dataclasses.replace(DEFAULTS, queue=dataclasses.replace(DEFAULTS.queue, no_backend_wait_s=0.0))


def test_a_request_without_backends_or_holding_is_refused_at_once() -> None:
    one = pools({"a": 4}, NO_HOLD)
    one.troubled("a", Trouble.UNHEALTHY)
    refused = refusal(one.submit, request(), 0.0)
    assert (refused.outcome, refused.retry_after_s) == (Outcome.REJECTED_NO_BACKENDS, RETRY_EMPTY_S)
    one.check(0.0)


def test_a_name_that_only_a_dead_backend_serves_is_refused_at_once() -> None:
    one = pools({"a": 4, "b": 4}, NO_HOLD, listings={"a": listing("x"), "b": listing()})
    one.troubled("a", Trouble.UNHEALTHY)
    assert one.catalogue.resolve("x").adapter == "x", "it is remembered"
    refused = refusal(one.submit, request(adapter="x"), 0.0)
    assert refused.outcome is Outcome.REJECTED_NO_BACKENDS
    assert "`x`" in refused.message
    one.check(0.0)
    submit(one, request())


def test_a_retry_that_every_backend_has_failed_is_refused() -> None:
    one = pools({"a": 4, "b": 4}, NO_HOLD)
    one.troubled("b", Trouble.UNHEALTHY)
    refused = refusal(one.submit, request(), 0.0, frozenset({"a"}))
    assert refused.outcome is Outcome.REJECTED_NO_BACKENDS
    assert "has failed this request" in refused.message
    one.check(0.0)
    one.submit(request(), 0.0, frozenset({"b"}))


def test_request_refused_as_busy_waits_for_another_backend() -> None:
    of = pools({"a": 1, "b": 1}, tight())
    submit(of, request(), request())
    first = {grant.placed.backend: grant for grant in grants(of)}
    of.apply(Returned(first["a"].lease, Verdict.BUSY), 0.0)
    of.submit(replace(first["a"].request, avoid="a"), 0.0, entry=AdmissionKind.RETRY)
    assert grants(of, 1.0) == [], "a has room again, but only b may take it"
    of.apply(Returned(first["b"].lease, Verdict.SERVED), 1.0)
    assert [grant.placed.backend for grant in grants(of, 1.0)] == ["b"]


def test_a_request_goes_back_to_a_busy_backend_where_no_other_is_up() -> None:
    of = pools({"a": 1, "b": 1}, NO_HOLD)
    of.troubled("b", Trouble.UNHEALTHY)
    of.submit(request(avoid="a"), 0.0, entry=AdmissionKind.RETRY)
    assert [grant.placed.backend for grant in grants(of)] == ["a"]


def test_a_backend_that_rests_after_failures_is_waited_for() -> None:
    one = pools({"a": 4})
    submit(one, request())
    (grant,) = grants(one)
    one.apply(Returned(grant.lease, Verdict.CONNECT_FAILED), 0.0)
    submit(one, request())
    assert grants(one, 0.5) == []
    assert one.next_wakeup(0.5) == 1.0
    assert len(grants(one, 1.0)) == 1


def test_a_full_queue_refuses_with_the_name_and_a_measured_wait() -> None:
    one = pools({"a": 1}, tight(queue=dataclasses.replace(DEFAULTS.queue, band_requests_max=2)))
    submit(one, request())
    grants(one)
    submit(one, request(), request(), now=10.0)
    refused = refusal(one.submit, request(), 10.0)
    assert refused.outcome is Outcome.REJECTED_CAPACITY
    assert "queue.band_requests_max" in refused.message
    assert refused.retry_after_s == 30.0, "one grant in ten seconds, and two are ahead"
    one.check(10.0)
    submit(one, request(band=CRITICAL), now=10.0)


# --- drops ------------------------------------------------------------------------------------------------------------


def test_nothing_is_granted_after_it_was_cancelled() -> None:
    one = pools({"a": 4})
    gone, here = request(), request()
    submit(one, gone, here)
    one.cancel(gone)
    assert [grant.request for grant in grants(one)] == [here]


def test_a_deadline_is_a_drop_at_its_instant_even_with_room() -> None:
    one = pools({"a": 4})
    submit(one, request(deadline_s=5.0))
    assert only_drop(one, 5.0).outcome is Outcome.EXPIRED
    assert one.decide(5.0) == []
    assert one.next_wakeup(5.0) is None


def test_request_that_expires_while_all_backends_are_down_says_so() -> None:
    one = pools({"a": 1}, tight(queue=dataclasses.replace(DEFAULTS.queue, no_backend_wait_s=0.0)))
    submit(one, request(), request(deadline_s=5.0))
    grants(one)
    assert one.next_wakeup(0.0) == 5.0
    one.troubled("a", Trouble.UNHEALTHY)
    assert only_drop(one, 5.0).outcome is Outcome.EXPIRED_NO_BACKENDS


def test_a_request_that_waits_again_after_a_failure_expires_once() -> None:
    one = pools({"a": 1, "b": 1}, tight())
    submit(one, request(id="retried", deadline_s=5.0), request())
    (retried, _) = grants(one)
    one.apply(Returned(retried.lease, Verdict.FAILED), 1.0)
    one.submit(retried.request, 1.0, frozenset({retried.placed.backend}), AdmissionKind.RETRY)
    assert [decision.request.id for decision in one.decide(5.0)] == ["retried"]
    one.check(0.0)


# --- wakeups ----------------------------------------------------------------------------------------------------------


def test_an_empty_room_needs_no_waking() -> None:
    one = pools({"a": 4})
    one.backends["a"].observe(reading(0.0))
    assert one.next_wakeup(0.0) is None


def test_room_that_time_alone_opens_is_woken_for() -> None:
    one = pools(
        {"a": 4}, dataclasses.replace(DEFAULTS, capacity=dataclasses.replace(DEFAULTS.capacity, stale_after_s=5.0))
    )
    submit(one, request())
    grants(one)
    one.backends["a"].observe(reading(0.0, kv_used=1.0, kv_tokens=1000))
    submit(one, request())
    assert grants(one, 1.0) == []
    wakeup_s = one.next_wakeup(1.0)
    assert wakeup_s == 5.0, "the reading that says full will be stale by then"
    assert len(grants(one, wakeup_s)) == 1


# --- lost backends ----------------------------------------------------------------------------------------------------


def test_leases_of_a_lost_process_are_revoked_once_and_still_returned() -> None:
    one = pools({"a": 4, "b": 4})
    submit(one, *(request() for _ in range(6)))
    held = grants(one)
    mine = {grant.lease for grant in held if grant.placed.backend == "a"}
    one.troubled("a", Trouble.REFUSED)
    assert one.decide(0.0) == []
    one.troubled("a", Trouble.REFUSED)
    revoked = one.decide(0.0)
    assert all(isinstance(decision, Revoke) and decision.backend == "a" for decision in revoked)
    assert {decision.lease for decision in revoked if isinstance(decision, Revoke)} == mine
    assert one.decide(0.0) == []
    for grant in held:
        one.apply(Returned(grant.lease, Verdict.LOST), 1.0)
    one.check(0.0)
    assert one.views(1.0)["a"].load == 0


def test_a_lease_that_ended_before_the_pass_is_not_revoked() -> None:
    one = pools({"a": 4})
    submit(one, request())
    (grant,) = grants(one)
    kill(one, "a")
    one.apply(Returned(grant.lease, Verdict.FAILED), 0.0)
    assert one.decide(0.0) == []
    one.check(0.0)


def test_answers_of_a_lost_process_are_cached_nowhere() -> None:
    notified: list[tuple[str, tuple[int, ...]]] = []

    class Recording(Placement):
        place = staticmethod(make("least_request", Random(0)).place)

        def cached(self, backend: str, hashes: Sequence[int]) -> None:
            notified.append((backend, tuple(hashes)))

    one = pools({"a": 4, "b": 4}, placements=Recording)
    submit(one, *(request() for _ in range(2)))
    old = {grant.placed.backend: grant for grant in grants(one)}
    for grant in old.values():
        one.apply(Returned(grant.lease, Verdict.SERVED), 1.0)
    cached(one, old["a"], (1, 2))
    kill(one, "a")
    # The answers were read before the process was known to be gone, and are reported after it.
    cached(one, old["a"], (3, 4))
    cached(one, old["b"], (3, 4))
    one.backends["a"].answered(2.0)
    submit(one, *(request(arrived_s=2.0, deadline_s=62.0) for _ in range(2)), now=2.0)
    new = {grant.placed.backend: grant for grant in grants(one, 2.0)}
    for grant in new.values():
        one.apply(Returned(grant.lease, Verdict.SERVED), 3.0)
    cached(one, new["a"], (5, 6))
    assert notified == [("a", (1, 2)), ("b", (3, 4)), ("a", (5, 6))]


# --- a full waiting room ----------------------------------------------------------------------------------------------

FULL = tight(queue=dataclasses.replace(DEFAULTS.queue, requests_max=2))


def test_a_higher_band_sheds_the_newest_of_the_lowest_band() -> None:
    of = pools({"a": 1}, FULL)
    submit(of, request(id="runs"))
    of.decide(0.0)
    submit(of, request(id="old", band=SHEDDABLE, arrived_s=0.1), request(id="new", band=SHEDDABLE, arrived_s=0.2))
    submit(of, request(id="urgent", band=CRITICAL, arrived_s=0.3))
    drop = only_drop(of, 0.3)
    assert (drop.request.id, drop.outcome) == ("new", Outcome.SHED)
    assert "requests_max" in refusal(of.submit, request(id="late", band=SHEDDABLE), 0.4).message
    of.check(0.0)


def test_a_client_that_leaves_while_it_is_shed_leaves_nothing_behind() -> None:
    of = pools({"a": 1}, FULL)
    submit(of, request(id="runs"))
    of.decide(0.0)
    first, second = request(id="first", band=SHEDDABLE), request(id="second", band=SHEDDABLE, arrived_s=0.1)
    submit(of, first, second, request(id="urgent", band=CRITICAL, arrived_s=0.2))
    of.cancel(second)
    assert of.decide(0.2) == []
    of.check(0.0)


def test_a_new_attempt_is_not_turned_away_by_a_full_queue() -> None:
    of = pools({"a": 1, "b": 1}, FULL)
    submit(of, request(id="one"), request(id="two"))
    grant = next(d for d in of.decide(0.0) if isinstance(d, Grant))
    submit(of, request(id="three"), request(id="four"))
    of.apply(Returned(grant.lease, Verdict.CONNECT_FAILED), 0.1)
    of.submit(grant.request, 0.1, frozenset({grant.placed.backend}), AdmissionKind.RETRY)
    assert of.queued()[grant.request.band][0] == 3


@pytest.mark.parametrize("entry", [AdmissionKind.NEW, AdmissionKind.RESUMED])
def test_request_admitted_elsewhere_is_an_arrival_here(entry: AdmissionKind) -> None:
    """Lower bands leave headroom for its band, as for any other."""
    of = pools({"a": 8}, tight())
    of.submit(request(id="c", band=CRITICAL), 0.0, entry=entry)
    assert names(granted(of)) == ["c"]
    submit(of, *(request(band=SHEDDABLE) for _ in range(8)))
    assert len(granted(of)) < 7
