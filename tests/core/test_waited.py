"""A grant says which rule held its request back, and whose requests went first."""

from __future__ import annotations

from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, Grant, Verdict
from llmproxy.core.pools import Pools
from llmproxy.core.settings import UsageLimit
from llmproxy.core.snapshot import Reason
from tests.core.make import grants, only_grant, pools, request, submit, tight


def served(of: Pools, held: Grant, now: float) -> Grant:
    """The next grant, once `held` is served."""
    of.finish(held, Verdict.SERVED, now)
    return only_grant(of, now)


def test_a_request_that_is_granted_at_once_waited_for_nothing() -> None:
    of = pools({"a": 1}, tight())
    submit(of, request(flow="f"))
    why = only_grant(of, 0.0).why
    assert (why.waited_for, why.went_first) == ("", ())


def test_a_full_backend_held_it_back_and_others_went_first() -> None:
    of = pools({"a": 1}, tight(fairness="fcfs"))
    submit(of, request(flow="f"))
    held = only_grant(of, 0.0)
    submit(of, *(request(flow=flow, arrived_s=1.0 + at / 10) for at, flow in enumerate("ffgh")), now=1.0)
    assert grants(of, 1.5) == []
    for now in (2.0, 3.0, 4.0):
        held = served(of, held, now)
    last = served(of, held, 5.0)
    assert last.why.waited_for == Reason.FULL
    assert last.why.went_first == ((DEFAULT, "f", 2), (DEFAULT, "g", 1))


def test_a_higher_band_held_it_back() -> None:
    of = pools({"a": 1}, tight())
    submit(of, request())
    held = only_grant(of, 0.0)
    submit(of, request(band=CRITICAL, flow="c", arrived_s=1.0), request(flow="d", arrived_s=1.0), now=1.0)
    assert grants(of, 1.0) == []
    critical = served(of, held, 2.0)
    assert critical.why.waited_for == Reason.FULL
    late = served(of, critical, 3.0)
    assert (late.why.waited_for, late.why.went_first) == (Reason.FULL, ((CRITICAL, "c", 1),))


def test_the_room_that_is_kept_for_higher_bands_held_it_back() -> None:
    of = pools({"a": 4}, tight(ceilings={SHEDDABLE: 0.5}))
    submit(of, *(request(band=SHEDDABLE) for _ in range(3)))
    first, _ = grants(of, 0.0)
    assert served(of, first, 1.0).why.waited_for == Reason.CEILING


def test_a_usage_limit_held_it_back_by_its_name() -> None:
    of = pools({"a": 8}, tight(limits={"tenant acme": UsageLimit(in_flight=1)}))
    submit(of, *(request(limits=("tenant acme",)) for _ in range(2)))
    (first,) = grants(of, 0.0)
    assert served(of, first, 1.0).why.waited_for == "tenant acme"
