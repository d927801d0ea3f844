"""The reason why a request waited: the last blocking rule and the flows that were granted first."""

from __future__ import annotations

from dataclasses import replace

from llmproxy.core.domain import (
    CRITICAL,
    DEFAULT,
    SHEDDABLE,
    Grant,
    NoMatch,
    Outcome,
    Request,
    Trouble,
    Verdict,
    Waited,
    WaitReason,
)
from llmproxy.core.lease_events import Returned
from llmproxy.core.placement.policy import Placement
from llmproxy.core.pools import Pools
from llmproxy.core.settings import UsageLimit
from tests.core.make import DEFAULTS, grants, only_drop, only_grant, pools, request, submit, tight


def served(of: Pools, held: Grant, now: float) -> Grant:
    """Returns the next grant after `held` is served."""
    of.apply(Returned(held.lease, Verdict.SERVED), now)
    return only_grant(of, now)


def test_a_request_that_is_granted_at_once_waited_for_nothing() -> None:
    of = pools({"a": 1}, tight())
    submit(of, request(flow="f"))
    why = only_grant(of, 0.0).why
    assert why.waited is None


def test_a_full_backend_held_it_back_and_others_went_first() -> None:
    of = pools({"a": 1}, tight(fairness="fcfs"))
    submit(of, request(flow="f"))
    held = only_grant(of, 0.0)
    submit(of, *(request(flow=flow, arrived_s=1.0 + at / 10) for at, flow in enumerate("ffgh")), now=1.0)
    assert grants(of, 1.5) == []
    for now in (2.0, 3.0, 4.0):
        held = served(of, held, now)
    last = served(of, held, 5.0)
    assert last.why.waited == Waited(WaitReason.FULL, ((DEFAULT, "f", 2), (DEFAULT, "g", 1)))


def test_a_higher_band_held_it_back() -> None:
    of = pools({"a": 1}, tight())
    submit(of, request())
    held = only_grant(of, 0.0)
    submit(of, request(band=CRITICAL, flow="c", arrived_s=1.0), request(flow="d", arrived_s=1.0), now=1.0)
    assert grants(of, 1.0) == []
    critical = served(of, held, 2.0)
    assert critical.why.waited == Waited(WaitReason.FULL)
    late = served(of, critical, 3.0)
    assert late.why.waited == Waited(WaitReason.FULL, ((CRITICAL, "c", 1),))


def test_the_room_that_is_kept_for_higher_bands_held_it_back() -> None:
    of = pools({"a": 4}, tight(ceilings={SHEDDABLE: 0.5}))
    submit(of, *(request(band=SHEDDABLE) for _ in range(3)))
    first, _ = grants(of, 0.0)
    assert served(of, first, 1.0).why.waited == Waited(WaitReason.CEILING)


def test_a_usage_limit_held_it_back_by_its_name() -> None:
    of = pools({"a": 8}, tight(limits={"tenant acme": UsageLimit(in_flight=1)}))
    submit(of, *(request(limits=("tenant acme",)) for _ in range(2)))
    (first,) = grants(of, 0.0)
    assert served(of, first, 1.0).why.waited == Waited("the limit tenant acme is used up")


def test_request_returned_late_has_not_waited_before_its_return() -> None:
    of = pools({"a": 1}, tight())
    submit(of, request())
    held = only_grant(of, 0.0)
    submit(of, request(arrived_s=1.0), now=1.0)
    assert grants(of, 1.0) == []
    of.apply(Returned(served(of, held, 2.0).lease, Verdict.SERVED), 3.0)
    # Its head arrived at 1 s, and its body took two seconds.
    submit(of, request(arrived_s=1.0), now=3.0)
    assert only_grant(of, 3.0).why.waited is None


def test_no_backend_was_up() -> None:
    of = pools({"a": 1}, tight())
    of.troubled("a", Trouble.UNHEALTHY)
    submit(of, request())
    assert grants(of, 0.0) == []
    of.backends["a"].answered(1.0)
    assert only_grant(of, 1.0).why.waited == Waited(WaitReason.NO_BACKEND)


def test_the_backend_that_alone_can_serve_it_held_it_back() -> None:
    of = pools({"a": 1, "b": 1}, tight())
    submit(of, request(backend="a"))
    held = only_grant(of, 0.0)
    submit(of, request(id="bound", backend="a", arrived_s=1.0), now=1.0)
    assert grants(of, 1.0) == []
    assert served(of, held, 2.0).why.waited == Waited("a, which alone can serve it, has no room")


def test_the_full_backend_is_named_that_was_worth_waiting_for() -> None:
    class Waits(Placement):
        def place(self, *_: object) -> NoMatch:
            return NoMatch(whole_model=False, later="a")

    of = pools({"a": 1}, tight(), placements=Waits)
    submit(of, request(deadline_s=2.0))
    assert grants(of, 0.0) == []
    assert only_drop(of, 2.0).waited == Waited(f"{WaitReason.LATER}: a")


def test_request_without_a_backend_waits_for_none_if_others_wait_for_a_full_one() -> None:
    class Chooses(Placement):
        def place(self, request: Request, *_: object) -> NoMatch:
            return NoMatch(whole_model=False, later="" if request.id == "none" else "a")

    of = pools({"a": 1}, tight(), placements=Chooses)
    submit(of, request(flow="f", deadline_s=9.0), request(id="none", flow="g", deadline_s=2.0))
    assert grants(of, 0.0) == []
    assert only_drop(of, 2.0).waited == Waited(WaitReason.NO_MATCH)


# --- requests without a backend -------------------------------------------------------------------------------------


def full() -> Pools:
    """A pool in which a request waits behind a request of another flow."""
    of = pools({"a": 1}, tight(queue=replace(DEFAULTS.queue, requests_max=2), ordering="fcfs", ceilings={}))
    submit(of, request(flow="f"))
    held = only_grant(of, 0.0)
    submit(of, request(flow="f", arrived_s=1.0), now=1.0)
    submit(of, request(id="late", band=SHEDDABLE, deadline_s=9.0, arrived_s=1.0), now=1.0)
    assert grants(of, 1.0) == []
    served(of, held, 2.0)
    assert grants(of, 2.5) == []
    return of


BEHIND_F = Waited(WaitReason.FULL, ((DEFAULT, "f", 1),))


def test_one_whose_time_is_over() -> None:
    drop = only_drop(full(), 9.0)
    assert (drop.outcome, drop.waited) == (Outcome.EXPIRED, BEHIND_F)


def test_shed_request_waited_for_a_higher_band() -> None:
    of = full()
    submit(of, *(request(band=CRITICAL, arrived_s=3.0) for _ in range(2)), now=3.0)
    drop = only_drop(of, 3.0)
    assert (drop.outcome, drop.waited) == (Outcome.SHED, BEHIND_F)


def test_request_left_by_its_client_while_shed() -> None:
    of = full()
    assert of.cancel(request(id="late")) == BEHIND_F
    assert of.cancel(request(id="late")) is None
    of = full()
    submit(of, *(request(band=CRITICAL, arrived_s=3.0) for _ in range(2)), now=3.0)
    assert of.cancel(request(id="late")) == BEHIND_F
    assert of.decide(3.0) == []


def test_reason_of_a_waiting_request() -> None:
    position = full().position("late", 2.0)
    assert position is not None
    assert position.waited == BEHIND_F
