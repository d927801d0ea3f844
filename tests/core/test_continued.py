"""The rest of a stream that broke goes before the other requests of its band, and is charged for its output only."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import pytest
from msgspec import structs

from llmproxy.core.domain import (
    CRITICAL,
    DEFAULT,
    SHEDDABLE,
    AdmissionKind,
    Drop,
    Grant,
    Outcome,
    Preempt,
    Request,
    Usage,
    Verdict,
)
from llmproxy.core.lease_events import Progress, Returned, Started
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.admission import refusal
from llmproxy.core.queueing.charge import charges
from llmproxy.core.queueing.fairness import policies
from llmproxy.core.queueing.ordering import orderings
from llmproxy.core.scaling.mix import size_class
from llmproxy.core.settings import UsageLimit
from tests.core.make import (
    BASE,
    DEFAULTS,
    grants,
    kill,
    names,
    one_by_one,
    only_drop,
    only_grant,
    pools,
    request,
    submit,
    tight,
)


def rest(of: Request, got: int, **given: Any) -> Request:
    """Returns the request for the rest of a stream after `got` tokens."""
    facts = {"prompt_tokens": of.prompt_tokens + got, "output_tokens": of.output_tokens - got, "continued": True}
    return structs.replace(of, **(facts | given))


def break_off(of: Pools, held: Grant, got: int, now: float) -> Request:
    """Breaks the stream of `held` after `got` tokens, and submits its rest."""
    usage = Usage(held.request.prompt_tokens, got)
    of.apply(Returned(held.lease, Verdict.FAILED, usage), now)
    again = rest(held.request, got)
    of.submit(again, now, frozenset(), AdmissionKind.CONTINUED)
    return again


# --- the order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordering", sorted(orderings.names()))
@pytest.mark.parametrize("fairness", sorted(policies.names()))
def test_the_rest_goes_first_in_its_band_and_changes_nothing_for_the_others(fairness: str, ordering: str) -> None:
    orders = []
    for continued in (False, True):
        of = pools({"a": 1}, tight(fairness=fairness, ordering=ordering))
        submit(of, request(id="broken", flow="f", arrived_s=0.0, stream=True))
        held = only_grant(of, 0.0)
        flows = ("f", "g", "f", "g", "h", "f")
        submit(of, *(request(id=f"{flow}{at}", flow=flow, arrived_s=0.0) for at, flow in enumerate(flows)), now=0.5)
        submit(of, request(id="critical", flow="c", band=CRITICAL, arrived_s=0.6), now=0.6)
        if continued:
            break_off(of, held, 4, 1.0)
            of.check(1.0)
            critical = only_grant(of, 1.0)
            assert critical.request.id == "critical"
            of.apply(Returned(critical.lease, Verdict.SERVED), 1.0)
            held = only_grant(of, 1.0)
            assert held.request.id == "broken"
            orders.append(one_by_one(of, held, 1.0))
        else:
            orders.append(one_by_one(of, held, 1.0))
            assert orders[0].pop(0) == "critical"
    assert orders[0] == orders[1]


def test_rests_go_in_the_order_of_their_arrival() -> None:
    of = pools({"a": 3}, tight())
    submit(of, *(request(id=f"r{at}", flow=f"f{at}", arrived_s=float(at), stream=True) for at in range(3)))
    held = grants(of, 3.0)
    submit(of, request(id="new", flow="f0"), now=3.0)
    of.backends["a"].drained = True
    for one in reversed(held):
        break_off(of, one, 1, 4.0)
    of.backends["a"].drained = False
    assert names(grants(of, 5.0)) == ["r0", "r1", "r2"]


def test_a_preempted_rest_is_the_first_again() -> None:
    of = pools({"a": 1}, tight())
    submit(of, request(id="broken", band=SHEDDABLE, stream=True))
    again = break_off(of, only_grant(of, 0.0), 4, 1.0)
    held = only_grant(of, 1.0)
    submit(of, request(id="old", band=SHEDDABLE, arrived_s=-1.0), request(id="critical", band=CRITICAL), now=2.0)
    (preempt,) = of.decide(2.0)
    assert isinstance(preempt, Preempt)
    of.apply(Returned(held.lease, Verdict.PREEMPTED), 2.0)
    of.submit(again, 2.0, frozenset(), AdmissionKind.PREEMPTED)
    assert one_by_one(of, only_grant(of, 2.0), 3.0) == ["broken", "old"]


def test_a_rest_waits_for_its_usage_limit_before_the_others() -> None:
    limit = {"tenant:t": UsageLimit(in_flight=1)}
    of = pools({"a": 2}, tight(limits=limit))
    submit(of, *(request(id=f"r{at}", limits=("tenant:t",), arrived_s=float(at), stream=True) for at in (1, 2, 3)))
    first = only_grant(of, 3.0)
    of.apply(Returned(first.lease, Verdict.FAILED, Usage(10, 4)), 3.0)
    second = only_grant(of, 3.0)
    assert second.request.id == "r2"
    of.submit(rest(first.request, 4), 3.0, frozenset(), AdmissionKind.CONTINUED)
    submit(of, request(id="r0", limits=("tenant:t",), arrived_s=0.0), now=4.0)
    assert grants(of, 4.0) == []
    assert one_by_one(of, second, 6.0) == ["r1", "r0", "r3"]


def test_a_rest_is_shed_last() -> None:
    of = pools({"a": 1}, tight(queue=replace(DEFAULTS.queue, requests_max=2)))
    submit(of, request(id="broken", band=SHEDDABLE, arrived_s=5.0, stream=True), now=5.0)
    held = only_grant(of, 5.0)
    submit(of, request(id="old", band=SHEDDABLE, arrived_s=1.0), now=6.0)
    break_off(of, held, 4, 7.0)
    submit(of, request(id="high", band=DEFAULT, arrived_s=8.0), now=8.0)
    (drop,) = [decision for decision in of.decide(8.0) if isinstance(decision, Drop)]
    assert (drop.request.id, drop.outcome) == ("old", Outcome.SHED)


def test_operators_see_waiting_rests() -> None:
    of = pools({"a": 1}, tight())
    submit(of, request(id="broken", stream=True))
    held = only_grant(of, 0.0)
    submit(of, *(request(flow=flow) for flow in ("f", "g")), now=1.0)
    of.backends["a"].drained = True
    break_off(of, held, 4, 2.0)
    (band,) = [one for one in of.snapshot(3.0).pools[0].bands if one.level == DEFAULT]
    assert (band.waiting, band.continued, band.flows, [flow.waiting for flow in band.shown]) == (3, 1, 2, [1, 1])
    position = of.position("broken", 3.0)
    assert position is not None
    assert position.ahead_in_flow == 0


# --- the only other backend -------------------------------------------------------------------------------------------


def waiting_rest(hold_s: float = 30.0) -> tuple[Pools, Grant]:
    """Returns pools in which a stream broke at one backend, and its rest waits for the place of the other one."""
    of = pools({"a": 1, "b": 1}, tight(queue=replace(DEFAULTS.queue, no_backend_wait_s=hold_s)))
    submit(of, request(id="broken", stream=True, deadline_s=600.0), request(id="seat"))
    held, seat = grants(of)
    of.apply(Returned(held.lease, Verdict.LOCAL_FAILURE, Usage(10, 4)), 1.0)
    of.submit(rest(held.request, 4), 1.0, frozenset({held.placed.backend}), AdmissionKind.CONTINUED)
    assert of.decide(1.0) == []
    return of, seat


@pytest.mark.parametrize("drained", [True, False])
def test_a_rest_is_held_while_the_only_other_backend_is_not_up(drained: bool) -> None:
    of, seat = waiting_rest()
    if drained:
        of.backends[seat.placed.backend].drained = True
    else:
        kill(of, seat.placed.backend)
    assert not any(isinstance(decision, Grant | Drop) for decision in of.decide(2.0))
    of.check(2.0)
    assert not any(isinstance(decision, Grant | Drop) for decision in of.decide(31.9))
    assert only_drop(of, 32.1).outcome is Outcome.EXPIRED_NO_BACKENDS


def test_a_rest_goes_on_at_the_only_other_backend_after_it_was_down() -> None:
    of, seat = waiting_rest()
    kill(of, seat.placed.backend)
    of.decide(2.0)
    of.apply(Returned(seat.lease, Verdict.LOST), 2.0)
    of.backends[seat.placed.backend].answered(3.0)
    assert only_grant(of, 9.0).placed.backend == seat.placed.backend


def test_a_rest_ends_with_the_only_other_backend() -> None:
    of, seat = waiting_rest()
    of.backends[seat.placed.backend].drained = True
    assert of.decide(2.0) == []
    of.apply(Returned(seat.lease, Verdict.SERVED), 3.0)
    of.remove_backend(seat.placed.backend)
    refused = refusal(only_drop(of, 3.0))
    assert refused.outcome is Outcome.REJECTED_NO_BACKENDS
    assert refused.message == "Every backend of `base` that is up has failed this request."


def test_all_rests_end_with_their_last_backend() -> None:
    of = pools({"a": 9, "b": 1}, tight(queue=replace(DEFAULTS.queue, no_backend_wait_s=0.0)))
    submit(of, *(request(id=f"r{at}", stream=True) for at in range(9)))
    of.backends["b"].drained = True
    held = grants(of)
    for one in held:
        of.apply(Returned(one.lease, Verdict.LOCAL_FAILURE, Usage(10, 4)), 1.0)
    of.backends["b"].drained = False
    submit(of, request(id="seat"), now=1.0)
    of.backends["a"].drained = True
    assert only_grant(of, 1.0).placed.backend == "b"
    of.backends["a"].drained = False
    for one in held:
        of.submit(rest(one.request, 4), 1.0, frozenset({"a"}), AdmissionKind.CONTINUED)
    assert of.decide(1.0) == []
    of.backends["b"].drained = True
    drops = of.decide(2.0)
    assert sorted(drop.request.id for drop in drops) == sorted(one.request.id for one in held)
    of.check(2.0)


def test_a_rest_ends_when_the_only_other_backend_is_down_and_nothing_is_held() -> None:
    of, seat = waiting_rest(hold_s=0.0)
    of.backends[seat.placed.backend].drained = True
    assert only_drop(of, 2.0).outcome is Outcome.REJECTED_NO_BACKENDS


# --- the charge -------------------------------------------------------------------------------------------------------


REQUESTS = pytest.mark.parametrize("requests", [60, pytest.param(300, marks=pytest.mark.slow)])
"""With 300 requests, streams break at least 500 times."""


def _asked(rng: Random, requests: int) -> list[Any]:
    """Returns requests as (flow, prompt tokens, tokens of the answer, where its stream breaks, cached tokens of the
    prompt, whether the rest fails once before its first byte).
    """
    return [
        (
            rng.choice("fgh"),
            rng.randint(1, 400),
            rng.randint(1, 400),
            [rng.randint(0, 100) for _ in range(rng.randint(0, 4))],
            rng.choice((None, 0, 7)),
            rng.random() < 0.3,
        )
        for _ in range(requests)
    ]


def _run(asked: list[Any], settings: Any, *, broken: bool) -> Pools:
    """Serves the requests one after the other, in one piece or in parts."""
    # This failure says nothing about a backend, so none is ejected.
    failed = Verdict.LOCAL_FAILURE
    of = pools({"a": None, "b": None}, settings)
    for at, (flow, prompt, output, parts, cached, reports) in enumerate(asked):
        now, weight = float(at), 2.0 if flow == "f" else 1.0
        one = request(
            id=f"r{at}", flow=flow, prompt_tokens=prompt, output_tokens=output, stream=True, weight=weight,
            limits=("tenant:t",), arrived_s=now, deadline_s=now + 60.0,
        )  # fmt: skip
        of.submit(one, now)
        held = only_grant(of, now)
        cuts = sorted({part for part in parts if part < output}) if broken else []
        for begin, end in pairwise([0, *cuts, output]):
            of.apply(Started(held.lease), now)
            of.apply(Progress(held.lease, end - begin), now)
            # The whole prompt of a rest may be cached or not; it is not charged.
            tokens = (cached or 0) if begin == 0 else None
            usage = Usage(held.request.prompt_tokens, end - begin, min(tokens, prompt) if tokens is not None else None)
            if end < output:
                of.apply(Returned(held.lease, failed, usage), now)
                again = rest(one, end)
                of.submit(again, now, frozenset(), AdmissionKind.CONTINUED)
                held = only_grant(of, now)
                assert held.request == again
                if reports:
                    # An attempt at the rest that fails before its first byte costs nothing.
                    of.apply(Returned(held.lease, failed), now)
                    of.submit(again, now, frozenset(), AdmissionKind.RETRY)
                    held = only_grant(of, now)
            else:
                of.apply(Returned(held.lease, Verdict.SERVED, usage), now)
        of.ended(one, None, now)
        of.check(now)
    return of


@REQUESTS
@pytest.mark.parametrize("fairness", sorted(policies.names()))
@pytest.mark.parametrize("cost", sorted(charges.names()))
def test_a_stream_in_parts_costs_as_much_as_in_one_piece(cost: str, fairness: str, requests: int) -> None:
    asked = _asked(Random(1), requests)
    assert sum(part < output for _, _, output, parts, *_ in asked for part in set(parts)) >= requests * 5 / 3
    limits = {"tenant:t": UsageLimit(in_flight=9, requests_per_min=1e6, tokens_per_min=1e6)}
    settings = tight(fairness=fairness, fairness_cost=cost, limits=limits)
    whole, parts = (_run(asked, settings, broken=broken) for broken in (False, True))
    for (key, ours), (same, theirs) in zip(parts.balances().items(), whole.balances().items(), strict=True):
        assert key == same
        assert ours == pytest.approx(theirs)
    assert parts.snapshot(float(requests)).limits == whole.snapshot(float(requests)).limits


@REQUESTS
def test_a_usage_limit_counts_the_prompt_once_and_all_tokens_of_the_answer(requests: int) -> None:
    asked = _asked(Random(2), requests)
    settings = tight(limits={"tenant:t": UsageLimit(tokens_per_min=1e6, requests_per_min=1e6)})
    of = _run(asked, settings, broken=True)
    now = float(len(asked) - 1)
    debts = of.limits.rates.debts(now)
    used = list(accumulate((prompt + output for _, prompt, output, *_ in asked), initial=0))
    # The bucket refills while the requests come.
    level = 0.0
    for before, after in pairwise(used):
        level = max(0.0, level - 1e6 / 60.0) + after - before
    assert debts.get(("tenant:t", "tokens"), 0.0) * 1e6 / 60.0 == pytest.approx(level, abs=0.1)


def test_a_minimum_share_earns_nothing_from_a_rest() -> None:
    orders = []
    for breaks in (0, 6):
        of = pools({"a": 1}, tight(min_shares={SHEDDABLE: 0.2}))
        submit(of, request(id="broken", stream=True, output_tokens=90))
        held = only_grant(of, 0.0)
        submit(of, *(request(id=f"low{at}", band=SHEDDABLE, output_tokens=1) for at in range(5)), now=1.0)
        submit(of, *(request(id=f"high{at}") for at in range(9)), now=1.0)
        # Uses up the credit of the first grant, which is the same with and without breaks.
        order = []
        for _ in range(breaks):
            break_off(of, held, 1, 2.0)
            held = only_grant(of, 2.0)
            while held.request.id != "broken":
                order.append(held.request.id)
                of.apply(Returned(held.lease, Verdict.SERVED), 2.0)
                held = only_grant(of, 2.0)
        orders.append(order + one_by_one(of, held, 3.0))
    assert orders[0] == orders[1]


def test_scaling_learns_no_sizes_from_a_rest() -> None:
    of = pools({"a": None}, tight())
    submit(of, request(id="broken", prompt_tokens=64, output_tokens=64, stream=True))
    again = break_off(of, only_grant(of, 0.0), 32, 1.0)
    held = only_grant(of, 2.0)
    pool = of.scaling.pools[BASE]
    of.apply(Returned(held.lease, Verdict.SERVED, Usage(again.prompt_tokens, 32)), 3.0)
    assert size_class(again.prompt_tokens) not in pool.mix.sizes
    submit(of, request(id="whole", prompt_tokens=96), now=4.0)
    of.apply(Returned(only_grant(of, 4.0).lease, Verdict.SERVED, Usage(96, 10)), 5.0)
    assert pool.mix.sizes[size_class(96)].output_tokens == 10
