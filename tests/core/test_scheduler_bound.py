"""Requests bound to one backend: they wait for it without blocking others, and are dropped with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
    Trouble,
)
from llmproxy.core.placement.policy import presets
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.queue import FLOW_LOOK_MAX
from tests.core.make import DEFAULTS, listing, one_by_one, only_drop, pools, reading, refusal, request, submit, tight

ROOMY = tight()


def grants(decided: Sequence[object]) -> dict[str, str]:
    return {one.request.id: one.placed.backend for one in decided if isinstance(one, Grant)}


def fill(of: Pools, backend: str, now: float = 0.0) -> Grant:
    """Takes the only slot of a backend."""
    of.submit(request(id=f"on {backend}", backend=backend), now)
    (grant,) = (one for one in of.decide(now) if isinstance(one, Grant))
    assert grant.placed.backend == backend
    return grant


@pytest.mark.parametrize("placement", sorted(presets.names()))
def test_every_placement_sends_it_to_its_own_backend(placement: str) -> None:
    of = pools(dict.fromkeys("abc", 8), replace(DEFAULTS, placement=placement))
    for n, backend in enumerate("abcbbacca"):
        of.submit(request(id=str(n), backend=backend, prefix=(1, 2, 3), prefix_tokens=16.0, session="s"), 0.0)
    sent = grants(of.decide(0.0))
    assert "".join(sent[str(n)] for n in range(9)) == "abcbbacca"


@pytest.mark.parametrize("fairness", ["fcfs", "fair_share", "round_robin"])
def test_any_number_of_them_hides_nobody_behind_it(fairness: str) -> None:
    of = pools({"a": 1, "b": 4}, replace(DEFAULTS, fairness=fairness, capacity=ROOMY.capacity))
    held = fill(of, "a")
    many = [f"bound {n}" for n in range(3 * FLOW_LOOK_MAX)]
    submit(of, *(request(id=name, backend="a") for name in many), now=1.0)
    of.submit(request(id="free", arrived_s=2.0), 2.0)
    assert grants(of.decide(2.0)) == {"free": "b"}
    assert one_by_one(of, held, 3.0) == many
    assert of.queued() == {DEFAULT: (0, 0)}


def test_the_higher_band_has_its_backend_first() -> None:
    of = pools({"a": 1, "b": 1}, ROOMY)
    held = fill(of, "a")
    for name, band in (("low", SHEDDABLE), ("middle", DEFAULT), ("high", CRITICAL)):
        of.submit(request(id=name, band=band, backend="a"), 1.0)
    assert grants(of.decide(1.0)) == {}
    assert one_by_one(of, held, 2.0) == ["high", "middle", "low"]


def test_only_requests_of_its_own_backend_are_preempted_for_it() -> None:
    of = pools({"a": 1, "b": 1}, replace(DEFAULTS, capacity=ROOMY.capacity, preemption=True))
    submit(of, *(request(id=f"low on {name}", band=SHEDDABLE, backend=name, stream=True) for name in "ab"))
    assert len(grants(of.decide(0.0))) == 2
    of.submit(request(id="high", band=CRITICAL, backend="a"), 1.0)
    assert [one.backend for one in of.decide(1.0) if isinstance(one, Preempt)] == ["a"]


def test_a_bound_request_is_held_while_its_backend_is_down_or_drained() -> None:
    of = pools({"a": 4, "b": 4}, replace(DEFAULTS, queue=replace(DEFAULTS.queue, no_backend_wait_s=10.0)))
    of.backends["a"].drained = True
    of.submit(request(id="held", backend="a", deadline_s=100.0), 0.0)
    assert of.decide(0.0) == []
    of.backends["a"].drained = False
    assert grants(of.decide(1.0)) == {"held": "a"}
    for _ in range(3):
        of.troubled("a", Trouble.TIMEOUT)
    of.submit(request(id="late", backend="a", deadline_s=100.0), 2.0)
    assert of.decide(11.0) == []
    drop = only_drop(of, 12.0)
    assert (drop.request.id, drop.outcome) == ("late", Outcome.EXPIRED_NO_BACKENDS)


def test_without_holding_it_is_answered_at_once() -> None:
    of = pools({"a": 4, "b": 4}, replace(DEFAULTS, queue=replace(DEFAULTS.queue, no_backend_wait_s=0.0)))
    of.backends["a"].drained = True
    refused = refusal(of.submit, request(backend="a"), 0.0)
    assert (refused.outcome, refused.retry_after_s) == (Outcome.REJECTED_NO_BACKENDS, 2.0)


def gone(of: Pools) -> None:
    for _ in range(3):
        of.troubled("a", Trouble.REFUSED)


def moved(of: Pools) -> None:
    of.listed("a", listing(base="other"))


def another_process(of: Pools) -> None:
    of.replace_process("a")


def removed(of: Pools) -> None:
    of.remove_backend("a")


@pytest.mark.parametrize("loses", [gone, moved, another_process, removed])
def test_request_bound_to_a_backend_is_dropped_with_it(loses: object) -> None:
    of = pools({"a": 4, "b": 4}, replace(DEFAULTS, queue=replace(DEFAULTS.queue, no_backend_wait_s=10.0)))
    of.backends["a"].drained = True
    of.submit(request(id="bound", backend="a"), 0.0)
    of.submit(request(id="free", arrived_s=0.5), 0.5)
    assert callable(loses)
    loses(of)
    decided = of.decide(1.0)
    assert grants(decided) == {"free": "b"}
    assert [(one.request.id, one.outcome) for one in decided if isinstance(one, Drop)] == [
        ("bound", Outcome.BAD_REQUEST)
    ]
    of.check(1.0)


@pytest.mark.parametrize("entry", [AdmissionKind.NEW, AdmissionKind.RETRY])
@pytest.mark.parametrize("loses", [gone, moved, removed])
def test_request_for_a_lost_backend_is_refused(loses: object, entry: AdmissionKind) -> None:
    of = pools({"a": 4, "b": 4}, replace(DEFAULTS, queue=replace(DEFAULTS.queue, no_backend_wait_s=10.0)))
    assert callable(loses)
    loses(of)
    refused = refusal(of.submit, request(backend="a"), 0.0, entry=entry)
    assert "no backend of `base` stores it any more" in refused.message
    assert refused.outcome is Outcome.BAD_REQUEST


def test_request_for_a_backend_without_the_model_is_refused() -> None:
    of = pools({"a": 4, "b": 4}, listings={"b": listing("x")})
    assert refusal(of.submit, request(adapter="x", backend="a"), 0.0).outcome is Outcome.BAD_REQUEST


def test_a_band_barred_from_an_engines_queue_waits_until_it_is_empty() -> None:
    of = pools({"a": 20, "b": 20})
    of.submit(request(band=CRITICAL, backend="a"), 1.0)
    of.decide(1.0)
    of.backends["a"].observe(reading(1.0, running=4, waiting=1))
    of.backends["b"].observe(reading(1.0, running=5))
    of.submit(request(id="bound", band=SHEDDABLE, backend="a", arrived_s=1.1), 1.1)
    of.submit(request(id="free", band=SHEDDABLE, arrived_s=1.2), 1.1)
    assert grants(of.decide(1.1)) == {"free": "b"}
    assert of.next_wakeup(1.1) != 1.1, "it asks for pass after pass, and nothing has changed"
    of.backends["a"].observe(reading(1.2, running=5))
    assert grants(of.decide(1.2)) == {"bound": "a"}
