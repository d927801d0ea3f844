from __future__ import annotations

from random import Random

import pytest

from llmproxy.core.domain import Grant, Request, Slo, Verdict
from llmproxy.core.pools import Pools
from tests.core.make import one_by_one, only_grant, pools, request, tight


def one_slot(ordering: str, **given: float) -> tuple[Pools, Grant]:
    """A pool whose single slot is taken, so that further requests wait."""
    settings = tight(ordering=ordering, **given)
    of = pools({"a": 1}, settings)
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


def test_edf_uses_the_objective_or_the_time_to_wait() -> None:
    waiting = [
        request(id="patient", arrived_s=0.0, deadline_s=50.0),
        request(id="hurried", arrived_s=1.0, deadline_s=20.0),
        request(id="objective", arrived_s=2.0, deadline_s=60.0, slo=Slo(ttft_s=9.0)),
        request(id="pace only", arrived_s=3.0, deadline_s=15.0, slo=Slo(tpot_s=0.1)),
    ]
    assert served(*one_slot("edf"), *waiting) == ["objective", "pace only", "hurried", "patient"]


def test_least_slack_orders_by_latest_start_and_the_late_by_age() -> None:
    of, held = one_slot("least_slack")
    first_token = of.schedulers["base"]._first_token
    for tokens in 500 * (100, 200):
        first_token.learn(tokens, tokens / 100)
    waiting = [
        request(id="none", arrived_s=0.0, prompt_tokens=100),
        request(id="late", arrived_s=0.5, prompt_tokens=100, slo=Slo(ttft_s=10.0)),
        request(id="late for long", arrived_s=-48.0, deadline_s=60.0, prompt_tokens=100, slo=Slo(ttft_s=1.0)),
        request(id="any time", arrived_s=1.0, prompt_tokens=100, slo=Slo(ttft_s=1e12)),
        request(id="long prompt", arrived_s=1.0, prompt_tokens=800, slo=Slo(ttft_s=18.0)),
        request(id="short prompt", arrived_s=1.0, prompt_tokens=100, slo=Slo(ttft_s=14.0)),
    ]
    # The requests with an objective must start by 9.5 (too late), 11, 14 and 1e12 s.
    order = ["long prompt", "late for long", "short prompt", "none", "late", "any time"]
    assert served(of, held, *waiting) == order


def test_shortest_goes_by_the_estimated_work() -> None:
    waiting = [
        request(id="prompt", arrived_s=0.0, prompt_tokens=1000, output_tokens=10),
        request(id="answer", arrived_s=1.0, prompt_tokens=10, output_tokens=600),
        request(id="short", arrived_s=2.0, prompt_tokens=10, output_tokens=10),
    ]
    assert served(*one_slot("shortest"), *waiting) == ["short", "prompt", "answer"]


@pytest.mark.parametrize("seed", range(3))
def test_a_request_past_the_ageing_bound_is_not_overtaken(seed: int) -> None:
    rng, now, ageing_s = Random(seed), 0.0, 5.0
    of, held = one_slot("shortest", ageing_s=ageing_s)
    waiting: dict[str, Request] = {}
    overtaken = 0
    for _ in range(400):
        now += rng.choice((0.1, 0.4))
        for _ in range(rng.choice((0, 1, 2))):
            one = request(arrived_s=now, deadline_s=now + 1e6, prompt_tokens=rng.choice((5, 100, 3000)))
            of.submit(one, now)
            waiting[one.id] = one
        if waiting:
            of.finish(held, Verdict.SERVED, now)
            held = only_grant(of, now)
            del waiting[held.request.id]
            older = [one for one in waiting.values() if one.arrived_s < held.request.arrived_s]
            overtaken += bool(older)
            assert all(now - one.arrived_s < ageing_s for one in older)
    assert overtaken > 20, "nobody was overtaken, so nothing was tested"
