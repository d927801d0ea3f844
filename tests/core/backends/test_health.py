from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from llmproxy.core.backends.health import Ejected, EjectionEvent, EjectionSkipped, Hang, Health, Peers, Unejected
from llmproxy.core.domain import Trouble, Verdict
from tests.core.make import DEFAULTS

SETTINGS = replace(
    DEFAULTS.health, failures_before_ejection=3, ejection_s=1.0, ejection_max_s=8.0, misses_before_down=2
)


def healthy() -> Health:
    health = Health(SETTINGS)
    health.poll_succeeded(0.0)
    return health


def fail(health: Health, times: int, now: float = 0.0, verdict: Verdict = Verdict.FAILED) -> None:
    for lease in range(times):
        health.booked(lease)
        health.finished(lease, verdict, now)


def ejected_for_s(health: Health, now: float) -> float:
    until_s = health.changes_at(now)
    return 0.0 if until_s is None else until_s - now


def test_a_backend_is_down_until_a_poll_finds_it() -> None:
    health = Health(SETTINGS)
    assert not health.available(0.0)
    health.poll_succeeded(0.0)
    assert health.available(0.0)


def test_failures_in_a_row_eject_and_a_success_resets_the_count() -> None:
    health = healthy()
    fail(health, 2)
    health.finished(9, Verdict.SERVED, 0.0)
    fail(health, 2)
    assert health.available(0.0)
    health.first_byte(7, 0.0)
    fail(health, 2)
    assert health.available(0.0)
    fail(health, 1)
    assert not health.available(0.0)
    assert health.changes_at(0.0) == 1.0


@pytest.mark.parametrize("verdict", [Verdict.CLIENT_GONE, Verdict.LOST, Verdict.LOCAL_FAILURE, Verdict.SERVED])
def test_ends_without_fault_of_the_backend_never_eject(verdict: Verdict) -> None:
    health = healthy()
    fail(health, 50, verdict=verdict)
    assert health.available(0.0)


def test_busy_engine_pauses_and_an_idle_busy_one_fails() -> None:
    health = healthy()
    fail(health, 50, verdict=Verdict.BUSY)
    assert (health.ejected_times, ejected_for_s(health, 0.0)) == (0, 0.25)
    for _ in range(3):
        health.finished(1, Verdict.BUSY, 1.0, idle=True)
    assert (health.ejected_times, ejected_for_s(health, 1.0)) == (1, 1.0)
    pauses_s = []
    for probe, now in enumerate((2.0, 5.0, 10.0, 15.0)):
        health.booked(probe)
        health.finished(probe, Verdict.BUSY, now, idle=True)
        pauses_s.append(ejected_for_s(health, now))
    assert pauses_s == [2.0, 4.0, 4.0, 4.0], "it is back soon after it takes requests again"


@pytest.mark.parametrize("drained", [False, True])
def test_last_backend_that_is_busy_while_idle_only_pauses(drained: bool) -> None:
    one, other = pool(2, ejected_ratio_max=0.5)
    other.drained = drained
    if not drained:
        other.poll_failed(Trouble.UNHEALTHY)
    for _ in range(50):
        one.finished(1, Verdict.BUSY, 1.0, idle=True)
    assert (one.ejected_times, ejected_for_s(one, 1.0)) == (0, 0.25)
    other.drained = False
    other.poll_succeeded(2.0)
    for _ in range(3):
        one.finished(1, Verdict.BUSY, 3.0, idle=True)
    assert one.ejected_times == 1


def test_probe_after_an_ejection_ends_it_with_its_first_byte() -> None:
    health = healthy()
    fail(health, 3)
    assert health.available(1.0)
    health.booked(100)
    assert not health.available(1.0), "one probe at a time"
    health.first_byte(99, 0.0)
    assert not health.available(1.0), "an older stream that speaks proves nothing of new ones"
    health.first_byte(100, 0.0)
    assert health.available(1.0)
    health.booked(101)
    assert health.available(1.0), "the case is closed: no more probes"
    fail(health, 3, now=5.0)
    assert ejected_for_s(health, 5.0) == 1.0, "and the backoff starts from its beginning"


def test_a_probe_that_fails_doubles_the_pause_up_to_its_maximum() -> None:
    health = healthy()
    fail(health, 3)
    now, pauses = 0.0, []
    for _ in range(5):
        pause_s = ejected_for_s(health, now)
        pauses.append(pause_s)
        now += pause_s
        assert health.available(now)
        fail(health, 1, now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_probe_whose_client_leaves_hands_the_probe_on() -> None:
    health = healthy()
    fail(health, 3)
    health.booked(100)
    health.finished(100, Verdict.CLIENT_GONE, 1.5)
    assert health.available(1.5)
    health.booked(101)
    assert not health.available(1.5), "it is still half open"


REFUSED, TIMEOUT = (Trouble.REFUSED, False, True), (Trouble.TIMEOUT, False, False)


@pytest.mark.parametrize(
    "polls",
    [
        pytest.param([REFUSED, (Trouble.REFUSED, True, False)], id="once may be a full backlog"),
        pytest.param([(Trouble.TIMEOUT, False, True), *[TIMEOUT] * 9], id="late answers prove nothing of its streams"),
        pytest.param([REFUSED, (None, False, True), REFUSED, TIMEOUT, (Trouble.REFUSED, False, False)], id="in a row"),
        pytest.param([(Trouble.UNHEALTHY, False, False)], id="a bad answer takes it down at once"),
        pytest.param([(Trouble.GARBAGE, False, True)] * 10, id="garbage never"),
        pytest.param([(Trouble.KEY, False, True)] * 10, id="a wrong key never"),
        pytest.param([(Trouble.LOCAL_FAILURE, False, True)] * 10, id="nor a failure of this machine"),
    ],
)
def test_polls_take_a_backend_down_or_prove_it_gone(polls: list[tuple[Trouble | None, bool, bool]]) -> None:
    health = healthy()
    for trouble, gone, available in polls:
        if trouble is None:
            health.poll_succeeded(0.0)
        else:
            assert health.poll_failed(trouble) is gone
        assert health.available(0.0) is available


def test_coming_back_up_wipes_the_record() -> None:
    health = healthy()
    fail(health, 3)
    health.poll_failed(Trouble.REFUSED)
    health.poll_failed(Trouble.REFUSED)
    assert health.changes_at(0.0) is None, "time alone does not bring it up"
    health.poll_succeeded(0.0)
    assert health.available(0.0)
    health.booked(50)
    assert health.available(0.0)


# --- pools ------------------------------------------------------------------------------------------------------------


def pool(count: int, ejected_ratio_max: float) -> list[Health]:
    peers = Peers(ejected_ratio_max)
    members = [Health(SETTINGS) for _ in range(count)]
    for number, health in enumerate(members):
        health.poll_succeeded(-100.0)
        health.peers = peers
        peers.members[str(number)] = health
    return members


@pytest.mark.parametrize(
    ("count", "ejected_ratio_max", "most"), [(8, 0.5, 4), (3, 0.5, 1), (2, 1.0, 1), (1, 0.5, 0), (4, 0.0, 1)]
)
def test_failing_requests_eject_at_most_a_share_at_least_one_and_never_the_last(
    count: int, ejected_ratio_max: float, most: int
) -> None:
    members = pool(count, ejected_ratio_max)
    for health in members:
        fail(health, 5)
    assert [health.available(0.0) for health in members] == [False] * most + [True] * (count - most)


@pytest.mark.parametrize("eject", [
    lambda one: fail(one, 3), lambda one: one.eject_hung(Hang(0.0, 1, 0), 0.0), lambda one: one.eject_slow("slow", 0.0),
    lambda one: one.blame(Verdict.UNAUTHORIZED, 0.0),
])  # fmt: skip
def test_last_backend_that_serves_a_model_is_not_ejected_though_its_pool_has_others(
    eject: Callable[[Health], object],
) -> None:
    both, one, other = pool(3, 1.0)
    both.models, one.models, other.models = frozenset("xy"), frozenset("x"), frozenset("x")
    events: list[EjectionEvent] = []
    both.on_event = one.on_event = events.append
    eject(both)
    assert [type(event) for event in events] == [EjectionSkipped]
    eject(one)
    assert type(events[1]) is Ejected
    other.models = frozenset("xy")
    eject(both)
    assert type(events[2]) is Ejected


def test_unejected_backend_lets_another_be_ejected() -> None:
    first, second, third = pool(3, 0.5)
    fail(first, 3)
    fail(second, 3)
    assert second.available(0.0)
    fail(second, 1, now=1.0)
    assert second.available(1.0), "half open still is ejected"
    first.booked(100)
    first.first_byte(100, 1.2)
    fail(second, 1, now=1.3)
    assert not second.available(1.3), "the skipped ejection is remembered"
    assert third.available(1.3)


def test_backend_that_is_down_counts_neither_as_ejected_nor_as_up() -> None:
    first, second, third, fourth = pool(4, 0.5)
    for health in (first, second):
        fail(health, 3)
        health.poll_failed(Trouble.UNHEALTHY)
    fail(third, 3)
    fail(fourth, 3)
    assert not third.available(0.0)
    assert fourth.available(0.0)


@pytest.mark.parametrize("verdict", [Verdict.CONNECT_FAILED, Verdict.DRAINING])
def test_connect_failures_eject_beyond_the_share(verdict: Verdict) -> None:
    members = pool(4, 0.5)
    for health in members:
        fail(health, 1, verdict=verdict)
    assert not any(health.available(0.0) for health in members), "whoever were sent there would fail"


def test_a_probe_that_fails_is_ejected_again_whatever_the_share() -> None:
    first, second = pool(2, 0.5)
    fail(first, 3)
    fail(second, 3)
    fail(first, 1, now=1.0)
    assert ejected_for_s(first, 1.0) == 2.0


# --- slow start -------------------------------------------------------------------------------------------------------


def test_slow_start_goes_in_steps_and_tells_the_next_one() -> None:
    health = Health(replace(SETTINGS, slow_start_s=10.0))
    health.poll_succeeded(100.0)
    seen = {}
    now: float | None = 100.0
    while now is not None:
        seen[round(now, 3)] = round(health.warmth(now), 3)
        now = health.warmer_at(now)
    assert seen == {100.0: 0.1, **{100.0 + k: round(0.1 * k, 3) for k in range(2, 11)}}
    health.poll_succeeded(120.0)
    assert health.warmth(120.0) == 1.0, "it was up all along"


def test_end_of_an_ejection_is_a_slow_start_too() -> None:
    health = healthy()
    assert health.warmth(50.0) == 1.0
    fail(health, 3, now=50.0)
    health.booked(100)
    health.first_byte(100, 52.0)
    assert health.warmth(52.0) == pytest.approx(0.1)
    assert health.warmth(52.0 + SETTINGS.slow_start_s) == 1.0


def test_without_a_slow_start_all_is_given_at_once() -> None:
    health = Health(replace(SETTINGS, slow_start_s=0.0))
    health.poll_succeeded(0.0)
    assert health.warmth(0.0) == 1.0
    assert health.warmer_at(0.0) is None


# --- events -----------------------------------------------------------------------------------------------


def with_events() -> tuple[Health, list[EjectionEvent]]:
    health, events = healthy(), list[EjectionEvent]()
    health.on_event = events.append
    return health, events


def test_ejection_events_give_reason_pause_and_total_time() -> None:
    health, events = with_events()
    fail(health, 3)
    assert events == [Ejected("3 failures in a row", 1.0)]
    health.booked(10)
    health.finished(10, Verdict.FAILED, 1.0)
    assert events[1:] == [Ejected("its probe failed", 2.0)]
    health.booked(11)
    health.first_byte(11, 3.5)
    assert events[2:] == [Unejected(3.5)]
    health.finished(11, Verdict.SERVED, 4.0)
    assert len(events) == 3, "it is back once"


@pytest.mark.parametrize(
    ("verdict", "why"), [(Verdict.CONNECT_FAILED, "no connection"), (Verdict.DRAINING, "it is shutting down")]
)
def test_many_equal_failures_are_one_event(verdict: Verdict, why: str) -> None:
    health, events = with_events()
    fail(health, 5, verdict=verdict)
    assert events == [Ejected(why, 1.0)]


def test_slow_probe_ejects_again_and_a_fresh_start_unejects() -> None:
    health, events = with_events()
    assert health.eject_slow("slow: 6.2 times as slow as usual", 0.0)
    health.measured(7, False, 1.0)
    assert events == [
        Ejected("slow: 6.2 times as slow as usual", 1.0), Ejected("slow: its probe was as slow", 2.0),
    ]  # fmt: skip
    health.poll_failed(Trouble.UNHEALTHY)
    health.poll_succeeded(2.0)
    assert events[2:] == [Unejected(2.0)]


def test_skipped_ejections_in_a_row_are_one_event() -> None:
    health, events = with_events()
    health.peers = Peers(0.5)
    health.peers.members = {"a": health, "b": healthy()}
    health.peers.members["b"].try_eject("hung", 0.0)
    row_s = [0.0, 1.0, SETTINGS.ejection_max_s, 1.9 * SETTINGS.ejection_max_s]
    for now in row_s:
        assert not health.try_eject("3 failures in a row", now)
    assert events == [EjectionSkipped("3 failures in a row")]
    assert not health.try_eject("hung", row_s[-1] + SETTINGS.ejection_max_s)
    assert events[1:] == [EjectionSkipped("hung")]


# --- failure rates, refusals and blame -----------------------------------------------------------------------------


def share(health: Health, lease: int, now: float) -> None:
    """A third of its answers fail."""
    health.booked(lease)
    health.finished(lease, Verdict.FAILED if lease % 3 == 0 else Verdict.SERVED, now)


def test_a_third_of_failures_ejects_beside_a_pool_that_has_none() -> None:
    bad, good = pool(2, 0.5)
    events: list[EjectionEvent] = []
    bad.on_event = events.append
    for lease in range(1, 31):
        share(bad, lease, 0.0)
        good.finished(lease, Verdict.SERVED, 0.0)
        if events:
            break
    assert events == [Ejected("8 of its last 24 answers failed, 0 of 23 of the others", 1.0)]


def test_a_pool_that_fails_as_a_whole_has_no_outlier() -> None:
    members = pool(3, 0.5)
    for lease in range(1, 100):
        for health in members:
            share(health, lease, 0.0)
    assert not any(health.ejected_times for health in members)


def test_pauses_grow_while_a_share_fails_although_each_probe_passes() -> None:
    bad, good = pool(2, 0.5)
    for lease in range(100):
        good.finished(lease, Verdict.SERVED, 0.0)
    now, pauses = 0.0, []
    for _ in range(3):
        lease = 0
        while bad.available(now):
            lease += 1
            share(bad, lease, now)
        pauses.append(ejected_for_s(bad, now))
        now += pauses[-1]
        bad.booked(100)
        bad.first_byte(100, now)
        bad.finished(100, Verdict.SERVED, now)
    assert pauses == [1.0, 2.0, 4.0]
    for lease in range(100, 200):
        bad.finished(lease, Verdict.SERVED, now)
    fail(bad, 3, now)
    assert ejected_for_s(bad, now) == 1.0, "a whole window of good answers begins anew"


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        (Verdict.UNAUTHORIZED, "it refuses the key that the proxy sends"),
        (Verdict.NOT_SERVED, "it does not serve a model that it lists"),
    ],
)
def test_a_refusal_is_a_rest_until_another_backend_has_served_the_request(verdict: Verdict, why: str) -> None:
    bad, _ = pool(2, 0.5)
    events: list[EjectionEvent] = []
    bad.on_event = events.append
    fail(bad, 1, 0.0, verdict)
    assert (events, ejected_for_s(bad, 0.0)) == ([], 1.0)
    bad.blame(verdict, 0.2)
    assert events == [Ejected(why, 1.0)]
    bad.booked(100)
    bad.finished(100, verdict, 1.5)
    assert events[1:] == [Ejected(why, 2.0)]


def test_a_refusal_that_all_share_or_of_the_last_backend_is_said_and_changes_nothing() -> None:
    one, other = pool(2, 0.5)
    events: list[EjectionEvent] = []
    other.on_event = events.append
    fail(one, 1, 0.0, Verdict.UNAUTHORIZED)
    other.finished(1, Verdict.UNAUTHORIZED, 0.0, excused=True)
    one.forgive(Verdict.UNAUTHORIZED, 0.0)
    one.poll_failed(Trouble.UNHEALTHY)
    fail(other, 5, 1.0, Verdict.UNAUTHORIZED)
    assert other.available(1.0)
    assert events == [EjectionSkipped("it refuses the key that the proxy sends")]
    one.poll_succeeded(2.0)
    assert one.available(2.0)


def test_a_dead_engine_is_a_fact() -> None:
    health, events = with_events()
    fail(health, 1, verdict=Verdict.ENGINE_DEAD)
    assert events == [Ejected("its engine died", 1.0)]


def test_an_excused_failure_does_not_count_and_a_forgiven_one_counts_no_more() -> None:
    health = healthy()
    for lease in range(50):
        health.finished(lease, Verdict.FAILED, 0.0, excused=True)
    assert health.available(0.0)
    fail(health, 3)
    assert not health.available(0.0)
    health.forgive(Verdict.FAILED, 0.0)
    assert health.available(0.0)
    assert not health.ejected
    fail(health, 1)
    assert not health.ejected, "one of three was taken back and the count begins with the ejection"
