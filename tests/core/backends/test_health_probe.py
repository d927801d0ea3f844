"""An ejected backend gets one probe at a time, whatever its price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any

import pytest

from llmproxy.core.backends.adapter_loads import LongestLoad
from llmproxy.core.backends.view import View
from llmproxy.core.domain import (
    CRITICAL,
    DEFAULT,
    SHEDDABLE,
    AdmissionKind,
    Grant,
    Listing,
    ModelCard,
    NoCapacity,
    NoMatch,
    Placed,
    Request,
    Revoke,
    Verdict,
)
from llmproxy.core.lease_events import Progress, Returned, Started
from llmproxy.core.placement.policy import FilteredPlacement, presets
from llmproxy.core.pools import Pools
from tests.core.make import BASE, DEFAULTS, grants, listing, pools, reading, request, submit

SETTINGS = replace(DEFAULTS, placement="round_robin", ceilings={})
NO_LOOK_AHEAD = replace(SETTINGS, capacity=replace(SETTINGS.capacity, look_ahead=0))
SERIAL = count()


class LastByName(FilteredPlacement):
    """Chooses the last backend by name, so `a` is never chosen while another one has room."""

    def __init__(self) -> None:
        super().__init__(lambda _, views: Placed(max(view.backend for view in views), 0.0, (), len(views)))


def ejected(of: Pools, name: str = "a") -> Pools:
    """A pool whose backend "a" had a failed connection at 1.0; its ejection ends at 2.0."""
    return with_verdict(of, name, Verdict.CONNECT_FAILED)


def with_verdict(of: Pools, name: str, verdict: Verdict) -> Pools:
    while not of.backends[name].health.ejected:
        others = frozenset(of.backends) - {name}
        of.submit(ask(), 1.0, others)
        [grant] = grants(of, 1.0)
        of.apply(Returned(grant.lease, verdict), 1.0)
    return of


def hung(of: Pools, name: str = "a") -> Pools:
    """A pool whose backend "a" hangs since 1.0 and is ejected; its ejection ends before 4.0."""
    for excluded in (frozenset(of.backends) - {name}, frozenset({name})):
        of.submit(ask(), 1.0, excluded)
    first, second = grants(of, 1.0)
    for tenths in range(11, 30):
        if tenths == 11:
            of.apply(Started(second.lease), 1.1)
        else:
            of.apply(Progress(second.lease, tenths), tenths / 10)
        for decision in of.decide(tenths / 10):
            assert isinstance(decision, Revoke)
            assert decision.lease == first.lease
            of.apply(Returned(first.lease, Verdict.LOST), tenths / 10)
    of.apply(Returned(second.lease, Verdict.SERVED), 3.0)
    assert of.backends[name].health.ejected
    return of


def ask(stream: bool = True, **given: Any) -> Request:
    return request(id=f"p{next(SERIAL)}", stream=stream, **given)


def sent(of: Pools, now: float, *asked: Request, excluded: frozenset[str] = frozenset()) -> list[str]:
    """Returns the backends of simultaneous requests."""
    for one in asked:
        of.submit(one, now, excluded)
    return [grant.placed.backend for grant in grants(of, now)]


def last_by_name() -> Pools:
    return pools(dict.fromkeys("abc", 20), SETTINGS, placements=LastByName)


def test_half_open_backend_gets_one_probe_at_a_time() -> None:
    of = ejected(last_by_name())
    assert sent(of, 1.9, ask()) == ["c"], "its pause is not over"
    of.submit(ask(), 2.0)
    [probe] = grants(of, 2.0)
    assert probe.placed.backend == "a"
    assert sent(of, 2.0, ask(), ask()) == ["c", "c"], "one at a time"
    of.apply(Started(probe.lease), 2.1)
    assert sent(of, 2.2, ask()) == ["c"], "the case is closed, and it is as dear as ever"


@pytest.mark.parametrize("placement", sorted(presets.names()))
def test_half_open_backend_gets_one_probe_under_every_placement(placement: str) -> None:
    of = ejected(pools(dict.fromkeys("abc", 20), replace(SETTINGS, placement=placement)))
    # Its requests in flight make it the most expensive backend for placements by load, prompts or cache.
    assert sent(of, 2.0, *(ask(prompt_tokens=500) for _ in range(6))).count("a") == 1


def test_probe_is_a_request_of_the_lowest_granted_band() -> None:
    of = ejected(last_by_name())
    critical, default, sheddable = (ask(band=band) for band in (CRITICAL, DEFAULT, SHEDDABLE))
    submit(of, critical, default, sheddable, now=2.0)
    assert {grant.request.id: grant.placed.backend for grant in grants(of, 2.0)} == {
        critical.id: "c",
        default.id: "c",
        sheddable.id: "a",
    }
    of = ejected(last_by_name())
    assert sent(of, 2.0, critical) == ["a"], "where nobody else goes"


def test_hung_backend_is_probed_with_a_stream_if_others_have_room() -> None:
    of = hung(last_by_name())
    assert sent(of, 4.0, ask(stream=False)) == ["c"]
    assert sent(of, 4.0, ask()) == ["a"]
    of = hung(pools({"a": 1, "b": 1}, NO_LOOK_AHEAD, placements=LastByName))
    assert sent(of, 4.0, *(ask(stream=False) for _ in range(2))) == ["b", "a"], "nobody waits for a better one"


def test_slow_backend_is_probed_with_a_stream_and_a_failed_one_not() -> None:
    of = last_by_name()
    health = of.backends["a"].health
    of.backends["a"].eject_slow("slow", 1.0)
    assert sent(of, 2.0, ask(stream=False)) == ["c"]
    of.submit(ask(), 2.0)
    [probe] = grants(of, 2.0)
    of.apply(Started(probe.lease), 2.1)
    health.measured(probe.lease, True, 3.0)
    of.apply(Returned(probe.lease, Verdict.SERVED), 3.0)
    assert sent(of, 3.5, ask()) == ["c"], "it is well again, and as dear as ever"
    health.finished(99, Verdict.CONNECT_FAILED, 4.0)
    of.backends["a"].drained = False
    assert sent(of, 5.0, ask(stream=False)) == ["a"]


def test_fast_stream_from_before_ends_only_the_pause() -> None:
    of = last_by_name()
    of.submit(ask(), 0.5, frozenset("bc"))
    [before] = grants(of, 0.5)
    health = of.backends["a"].health
    of.backends["a"].eject_slow("slow", 1.0)
    of.backends["a"].measured(before.lease, True, 1.2)
    assert health.ejected
    assert sent(of, 1.3, ask(), ask()) == ["a", "c"]


def test_probe_is_no_request_that_the_backend_failed_before() -> None:
    of = ejected(last_by_name())
    assert sent(of, 2.0, ask(), excluded=frozenset({"a"})) == ["c"]
    assert sent(of, 2.0, ask()) == ["a"]


def test_probe_is_no_request_that_the_backend_cannot_serve() -> None:
    of = last_by_name()
    of.listed("a", listing(max_model_len=100))
    of.listed("b", listing("x"))
    ejected(of)
    assert sent(of, 2.0, ask(prompt_tokens=500)) == ["c"], "the other backends have the same context length"
    assert sent(of, 2.0, ask(model="x", adapter="x")) == ["b"]
    assert sent(of, 2.0, ask()) == ["a"]


def test_two_half_open_backends_get_one_probe_each() -> None:
    of = ejected(ejected(last_by_name()), "b")
    assert sorted(sent(of, 2.0, *(ask() for _ in range(4)))) == ["a", "b", "c", "c"]


class Waiting(LastByName):
    """Lets all requests wait for a full backend."""

    def place(
        self, request: Request, views: Sequence[View], ceiling: float, excluded: frozenset[str], now: float
    ) -> Placed | NoCapacity | NoMatch:
        if any(view.available and not view.has_room(ceiling) for view in views):
            return NoMatch(whole_model=False, later="a")
        return super().place(request, views, ceiling, excluded, now)


def test_a_probe_is_named_in_its_decision() -> None:
    of = ejected(last_by_name())
    for _ in range(4):
        of.submit(ask(), 2.0)
    assert {one.placed.backend: one.why.probe for one in grants(of, 2.0)} == {"a": True, "c": False}
    of.submit(ask(backend="a"), 2.0)
    assert not any(one.why.probe for one in grants(of, 2.0)), "there is one probe at a time"


def test_probe_is_sent_although_the_placement_would_wait() -> None:
    of = ejected(pools({"a": 9, "b": 1}, NO_LOOK_AHEAD, placements=Waiting))
    assert sent(of, 1.5, ask()) == ["b"]
    assert sent(of, 2.0, ask(), ask()) == ["a"], "the first finds out; the second may wait"


# --- probes without a result ------------------------------------------------------------------------------------------


def probing(of: Pools) -> Grant:
    of.submit(ask(), 4.0)
    [probe] = grants(of, 4.0)
    assert probe.placed.backend == "a"
    return probe


def test_silent_probe_is_revoked_without_any_other_event() -> None:
    of = hung(last_by_name())
    probe = probing(of)
    due_s = 4.0 + SETTINGS.health.hung_s
    assert of.next_wakeup(4.0) == pytest.approx(due_s)
    assert of.decide(due_s - 0.3) == []
    assert of.next_wakeup(due_s - 0.3) == pytest.approx(due_s)
    [revoke] = of.decide(due_s)
    assert isinstance(revoke, Revoke)
    assert revoke.lease == probe.lease
    of.apply(Returned(probe.lease, Verdict.LOST), due_s)
    of.submit(revoke.request, due_s, frozenset({"a"}), AdmissionKind.RETRY)
    assert [grant.placed.backend for grant in grants(of, due_s)] == ["c"], "its client has lost nothing"
    assert sent(of, due_s + 1.9, ask()) == ["c"], "a pause twice as long"
    assert sent(of, due_s + 2.0, ask()) == ["a"]
    of.check(due_s + 2.0)


def test_probe_is_not_revoked_without_another_backend() -> None:
    of = hung(last_by_name())
    for name in "bc":
        with_verdict(of, name, Verdict.CONNECT_FAILED)
    of.submit(ask(), 4.0, frozenset("bc"))
    assert len(grants(of, 4.0)) == 1
    assert of.decide(9.0) == []


def test_engine_that_has_not_begun_its_probe_gets_more_time() -> None:
    of = hung(last_by_name())
    probe = probing(of)
    now = 4.0
    while not (decided := of.decide(now)) and now < 20.0:
        now += 0.25
        of.backends["a"].observe(reading(now, running=0))
    assert [decision.lease for decision in decided if isinstance(decision, Revoke)] == [probe.lease]
    assert now - 4.0 == pytest.approx(LongestLoad().explained_s(1), abs=0.5)


# --- while requests wait ----------------------------------------------------------------------------------------------


def long_ejected(of: Pools, *, slow: bool = False, share: bool = False) -> Pools:
    """A pool with "a" ejected six times in a row. Its last pause is from 32.0 to 62.0.

    The reason is that it failed, that it is `slow`, or that it failed a `share` of its requests.
    """
    if share:
        for number in range(32):
            of.backends["b"].health.finished(99, Verdict.SERVED, 0.0)
            of.backends["a"].health.finished(99, Verdict.FAILED if number % 2 else Verdict.SERVED, 0.0)
        assert of.backends["a"].health.ejected
    for at_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0):
        if slow:
            of.backends["a"].eject_slow("slow", at_s)
        else:
            of.backends["a"].health.finished(99, Verdict.CONNECT_FAILED, at_s)
    of.backends["a"].drained = False
    return of


def probed_s(of: Pools, now: float) -> float:
    """When "a" gets a probe, if nothing but time passes; infinite if not while requests wait."""
    while (due_s := of.next_wakeup(now)) is not None and due_s < 90.0:
        now = due_s
        for decision in of.decide(now):
            if isinstance(decision, Grant):
                assert decision.placed.backend == "a"
                return now
    return inf


@pytest.mark.parametrize("names", ["ab", "abc"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_pause_is_short_while_requests_wait(names: str, stream: bool) -> None:
    """Also where the wait begins late in it. While none waits, nobody is delayed by a probe that fails."""
    of = long_ejected(pools(dict.fromkeys(names, 1), NO_LOOK_AHEAD, placements=LastByName))
    assert sent(of, 33.0, *(ask(stream, deadline_s=200.0) for _ in names[1:])) == list(names[:0:-1])
    assert sent(of, 40.0) == []
    assert sent(of, 45.0, ask(stream, deadline_s=200.0)) == []
    assert probed_s(of, 45.0) == pytest.approx(49.0)


@pytest.mark.parametrize(
    ("room", "given"),
    [(2, {}), (1, {"slow": True}), (1, {"share": True})],
    ids=["no request waits", "a probe delays its request for long", "most probes succeed"],
)
def test_a_pause_is_as_long_as_ever_where(room: int, given: dict[str, bool]) -> None:
    of = long_ejected(pools({"a": 1, "b": room}, NO_LOOK_AHEAD, placements=LastByName), **given)
    asked = [ask(deadline_s=200.0) for _ in "ab"]
    assert sent(of, 34.0, *asked) == ["b"] * room
    assert not of.backends["a"].view(61.9).available
    assert of.backends["a"].view(62.0).available


def test_a_pause_is_short_while_others_have_room_for_other_models_alone() -> None:
    two = Listing(0.0, (ModelCard(BASE, None, 4096), ModelCard("x", None, 4096)))
    of = pools(
        dict.fromkeys("abc", 1), NO_LOOK_AHEAD, listings={"a": two, "b": listing(base="x")}, placements=LastByName
    )
    long_ejected(of)
    asked = [ask(pool="x", model="x", deadline_s=200.0) for _ in "bx"]
    assert sent(of, 40.0, *asked) == ["b"]
    assert of.backends["c"].view(40.0).has_room(1.0)
    assert probed_s(of, 40.0) == pytest.approx(44.0)


def test_a_pause_is_short_for_a_request_that_one_backend_alone_may_serve() -> None:
    of = long_ejected(last_by_name())
    assert sent(of, 40.0, ask(backend="a", deadline_s=200.0)) == []
    assert probed_s(of, 40.0) == pytest.approx(44.0)
