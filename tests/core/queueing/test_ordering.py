from __future__ import annotations

from llmproxy.core.domain import Grant, Request, Slo
from llmproxy.core.pools import Pools
from tests.core.make import one_by_one, only_grant, pools, request, tight


def one_slot(ordering: str) -> tuple[Pools, Grant]:
    """A pool whose single slot is taken, so that further requests wait."""
    of = pools({"a": 1}, tight(ordering=ordering))
    of.submit(request(id="first"), 0.0)
    return of, only_grant(of, 0.0)


def served(of: Pools, held: Grant, *waiting: Request) -> list[str]:
    """The order in which `waiting` are granted at 10 s, one slot at a time."""
    for one in waiting:
        of.submit(one, one.arrived_s)
    return one_by_one(of, held, 10.0)


def test_fcfs_goes_by_arrival() -> None:
    waiting = [request(id=name, arrived_s=at) for name, at in (("c", 3.0), ("a", 1.0), ("b", 2.0))]
    assert served(*one_slot("fcfs"), *waiting) == ["a", "b", "c"]


def test_least_slack_orders_by_latest_start_and_the_late_by_age() -> None:
    of, held = one_slot("least_slack")
    first_token = of.schedulers["base"]._first_token
    for tokens in 500 * (100, 200):
        first_token.learn(tokens, tokens / 100)
    waiting = [
        request(id="none", arrived_s=0.0, prompt_tokens=100),
        request(id="late", arrived_s=0.5, prompt_tokens=100, slo=Slo(ttft_s=10.0)),
        request(id="late for long", arrived_s=-48.0, deadline_s=60.0, prompt_tokens=100, slo=Slo(ttft_s=1.0)),
        request(id="late after 70 s", arrived_s=-65.0, deadline_s=60.0, prompt_tokens=100, slo=Slo(ttft_s=70.0)),
        request(id="any time", arrived_s=1.0, prompt_tokens=100, slo=Slo(ttft_s=1e12)),
        request(id="long prompt", arrived_s=1.0, prompt_tokens=800, slo=Slo(ttft_s=18.0)),
        request(id="short prompt", arrived_s=1.0, prompt_tokens=100, slo=Slo(ttft_s=14.0)),
    ]
    # The requests with an objective must start by 9.5, -48 and 4 (too late), 11, 14 and 1e12 s.
    order = ["long prompt", "late for long", "short prompt", "none", "late after 70 s", "late", "any time"]
    assert served(of, held, *waiting) == order


def test_a_late_request_that_waited_alone_goes_behind_the_next_one_at_once() -> None:
    of, _ = one_slot("least_slack")
    of.submit(request(id="late", arrived_s=0.0, slo=Slo(ttft_s=1.0)), 0.0)
    of.decide(5.0)
    of.submit(request(id="in time", arrived_s=5.0, slo=Slo(ttft_s=9.0)), 5.0)
    (band,) = [band for band in of.snapshot(5.0).pools[0].bands if band.waiting]
    assert band.shown[0].head is not None
    assert band.shown[0].head.id == "in time"
