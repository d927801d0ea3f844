from __future__ import annotations

from dataclasses import replace

import pytest

from llmproxy.core.backends.backend import STARTED_AFTER_S, UNREAD_MAX, Backend
from llmproxy.core.backends.batch_limit import UNPUBLISHED
from llmproxy.core.backends.bookings import GAUGE_LAG_S, RESIDENT_ADAPTERS_MAX
from llmproxy.core.domain import Reading, Role, Trouble, Verdict
from tests.core.make import DEFAULTS, listing, pools, reading, request, view


def backend(*adapters: str, max_in_flight: int | None = 8, **capacity: object) -> Backend:
    made = Backend("a", replace(DEFAULTS.capacity, **capacity), DEFAULTS.health, max_in_flight)  # type: ignore[arg-type]
    made.answered(0.0)
    made.listed(listing(*adapters))
    return made


# --- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "ceiling", "room"),
    [(11, 1.0, True), (12, 1.0, False), (8, 0.85, True), (9, 0.85, False), (8, 0.95, True), (9, 0.95, False)],
)
def test_room_ends_at_the_ceiling_and_look_ahead_needs_a_full_one(load: int, ceiling: float, room: bool) -> None:
    assert view(limit=10, load=load, look_ahead=2).has_room(ceiling) is room


@pytest.mark.parametrize(("kv_used", "ceiling", "room"), [(0.94, 1.0, True), (0.95, 1.0, False), (0.81, 0.85, False)])
def test_a_full_cache_is_no_room_however_small_the_batch(kv_used: float, ceiling: float, room: bool) -> None:
    assert view(load=1, kv_used=kv_used).has_room(ceiling) is room


def test_idle_backend_takes_anything_and_unavailable_one_nothing() -> None:
    assert view(load=0, limit=1, kv_used=1.0).has_room(0.1)
    assert not view(load=0, available=False).has_room(1.0)


# --- own counters -----------------------------------------------------------------------------------------------------


def test_bookings_count_at_once_and_come_back_whole() -> None:
    one = backend()
    one.book(1, request(sequences=3), 0.0)
    one.book(2, request(), 0.0)
    assert one.view(0.0).load == 4
    one.release(1, Verdict.SERVED, 1.0)
    one.release(2, Verdict.CLIENT_GONE, 1.0)
    assert one.view(1.0).load == 0
    assert not one.bookings
    one.check()


def test_prompts_are_debited_until_a_reading_can_contain_them() -> None:
    one = backend()
    one.observe(reading(0.0, kv_used=0.5, kv_tokens=1000))
    one.book(1, request(prompt_tokens=200), 1.0)
    assert one.view(1.0).kv_used == pytest.approx(0.7)
    one.observe(reading(1.0 + GAUGE_LAG_S / 2, running=1, kv_used=0.5, kv_tokens=1000))
    assert one.view(1.1).kv_used == pytest.approx(0.7), "the gauges lag behind: it cannot be in them yet"
    one.observe(reading(1.1, running=1, kv_used=0.65, kv_tokens=1000))
    assert one.view(1.2).kv_used == pytest.approx(0.65)
    one.check()


def test_held_tokens_of_a_prompt_take_no_new_room() -> None:
    one = backend()
    one.observe(reading(0.0, kv_used=0.5, kv_tokens=1000))
    one.book(1, request(prompt_tokens=200), 1.0, held_tokens=150)
    assert one.view(1.0).kv_used == pytest.approx(0.55)
    one.check()
    one.release(1, Verdict.SERVED, 2.0)
    assert one.view(2.0).kv_used == 0.5


# --- readings ---------------------------------------------------------------------------------------------------------


def test_other_clients_load_is_the_smaller_of_two_readings() -> None:
    one = backend()
    one.book(1, request(), 0.0)
    one.observe(reading(1.0, running=4, waiting=1))
    assert one.view(1.0).load == 1, "one reading may count what just finished"
    one.observe(reading(2.0, running=3, waiting=0))
    assert one.view(2.0).load == 1 + 2
    one.observe(reading(3.0, running=1))
    assert one.view(3.0).load == 1


def test_ended_work_in_a_gauge_is_not_other_clients_load() -> None:
    one = backend()
    for lease in range(5):
        one.book(lease, request(), 0.0)
    one.observe(reading(1.0, running=5))
    for lease in range(5):
        one.release(lease, Verdict.SERVED, 1.1)
    one.observe(reading(1.2, running=5))
    one.observe(reading(1.4, running=0))
    assert one.view(1.4).load == 0


def test_a_stale_reading_is_not_believed_and_stops_nothing() -> None:
    one = backend(stale_after_s=5.0)
    for at_s in (1.0, 2.0):
        one.observe(reading(at_s, running=9, waiting=9, kv_used=1.0, kv_tokens=1000))
    one.book(1, request(), 2.0)
    fresh = one.view(6.9)
    assert (fresh.load, fresh.waiting) == (1 + 18, 9)
    assert not fresh.has_room(1.0)
    assert one.changes_at(6.9) == 7.0
    stale = one.view(7.0)
    assert (stale.load, stale.waiting, stale.kv_used) == (1, 0, 0.0)
    assert stale.has_room(1.0)
    assert one.changes_at(7.0) is None


def test_an_older_reading_that_arrives_late_changes_nothing() -> None:
    one = backend()
    one.observe(reading(2.0, waiting=3))
    one.observe(reading(1.0, waiting=9))
    assert one.view(2.0).waiting == 3


def test_a_backend_that_publishes_nothing_is_used_by_our_own_counters() -> None:
    one = backend(max_in_flight=2, look_ahead=0)
    one.book(1, request(), 0.0)
    assert one.view(0.0).has_room(1.0)
    one.book(2, request(), 0.0)
    assert not one.view(0.0).has_room(1.0)


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_residency_is_an_lru_list_as_long_as_the_engines_slots() -> None:
    one = backend("x", "y", "z")
    one.observe(reading(0.0, max_adapters=2))
    for lease, adapter in enumerate(("x", "y", "x", "z")):
        one.book(lease, request(adapter=adapter), 0.0)
    assert one.view(0.0).resident == {"x", "z"}


def test_a_reading_corrects_residency() -> None:
    one = backend("x", "y", "z")
    for lease, adapter in enumerate(("x", "y", "z")):
        one.book(lease, request(adapter=adapter), 0.0)
    assert one.view(0.0).resident == {"x", "y", "z"}, "how many it holds is not known yet"
    one.observe(reading(1.0, max_adapters=2))
    assert one.view(1.0).resident == {"y", "z"}
    one.observe(reading(2.0, max_adapters=2, running_adapters=frozenset({"x", "unlisted"})))
    assert one.view(2.0).resident == {"x", "z"}


def test_an_unloaded_adapter_is_resident_no_more() -> None:
    one = backend("x", "y")
    one.book(1, request(adapter="x"), 0.0)
    one.listed(listing("y"))
    assert one.view(0.0).resident == frozenset()
    assert one.view(0.0).served == {"base", "y"}
    assert "x" not in one.served


def test_residency_is_bounded_where_the_engine_does_not_say() -> None:
    one = backend()
    for lease in range(RESIDENT_ADAPTERS_MAX + 10):
        one.book(lease, request(adapter=f"lora-{lease}"), 0.0)
    assert len(one.view(0.0).resident) == RESIDENT_ADAPTERS_MAX
    one.check()


def test_waiting_for_an_adapter_slot_teaches_no_batch_limit() -> None:
    def watched(adapter: str) -> int:
        one = backend("x", "y", max_in_flight=None, initial_batch_limit=UNPUBLISHED)
        one.book(1, request(adapter=adapter), 0.0)
        for at_s in range(1, 6):
            full = frozenset({"x"})
            one.observe(reading(float(at_s), running=3, waiting=2, max_adapters=1, running_adapters=full))
        return one.limit.value

    assert watched("y") == UNPUBLISHED
    assert watched("x") == 3


@pytest.mark.parametrize(("begun", "limit"), [(4, 8), (1, 4)])
def test_streams_that_began_raise_the_limit_where_readings_are_old(begun: int, limit: int) -> None:
    one = Backend("a", replace(DEFAULTS.capacity, initial_batch_limit=4), DEFAULTS.health, None)
    for lease in range(4):
        one.book(lease, request(stream=True), 0.0)
    for lease in range(begun):
        one.started(lease, 0.5)
        one.started(lease, 0.6)
    one.observe(reading(1.0, running=0))
    assert one.view(1.0).limit == limit
    for lease in range(4):
        one.release(lease, Verdict.SERVED, 2.0)
    one.check()


def test_backend_without_numbers_gets_the_default_limit() -> None:
    assert backend(max_in_flight=None, initial_batch_limit=32).limit.value == UNPUBLISHED
    assert backend(max_in_flight=8).limit.value == 8, "an operator's setting has precedence"
    busy = backend(max_in_flight=None)
    for lease in range(10):
        busy.book(lease, request(), 0.0)
    busy.release(9, Verdict.BUSY, 0.1)
    busy.answered(1.0)
    assert busy.limit.value == 9, "the limit learned from a refusal is kept"


def test_unread_backend_begins_small_and_only_for_some_polls() -> None:
    one = Backend("a", replace(DEFAULTS.capacity, initial_batch_limit=4), DEFAULTS.health)
    one.unread()
    one.answered(0.0)
    assert one.limit.value == 4, "the next reading may come at once"
    one.observe(reading(1.0, running=4))
    one.answered(1.0)
    assert one.limit.value == 4
    assert [one.troubled(Trouble.REFUSED) for _ in range(2)] == [False, True]
    one.unread()
    for at_s in range(UNREAD_MAX):
        one.answered(2.0 + at_s)
    assert one.limit.value == 4
    one.answered(20.0)
    assert one.limit.value == UNPUBLISHED


def test_a_refusal_counts_others_that_the_engine_serves() -> None:
    one = backend(max_in_flight=None, initial_batch_limit=64)
    one.observe(reading(1.0, running=40))
    one.observe(reading(2.0, running=40))
    one.book(1, request(), 2.0)
    one.release(1, Verdict.BUSY, 2.1)
    assert one.limit.value == 40


# --- a process that is gone -------------------------------------------------------------------------------------------


def test_a_process_that_is_gone_takes_its_numbers_along() -> None:
    one = backend("x")
    one.book(1, request(adapter="x"), 0.0)
    for at_s in (1.0, 2.0):
        one.observe(reading(at_s, running=9, waiting=3))
    assert not one.troubled(Trouble.REFUSED)
    assert one.view(2.0).load == 12
    assert one.troubled(Trouble.REFUSED)
    dead = one.view(2.0)
    assert (dead.available, dead.load, dead.waiting, dead.resident) == (False, 1, 0, frozenset())


def test_a_poll_that_timed_out_keeps_them() -> None:
    one = backend()
    one.observe(reading(1.0, waiting=3))
    for _ in range(5):
        assert not one.troubled(Trouble.TIMEOUT)
    assert one.view(2.0).waiting == 3


# --- started requests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "started"),
    [
        (reading(0.5, running=1), True),
        (reading(0.5, running=1, waiting=1), False),
        (reading(0.5, running=0), False),
        (reading(GAUGE_LAG_S / 2, running=1), False),
        (reading(STARTED_AFTER_S, running=0, waiting=1), False),
    ],
)
def test_answer_without_a_stream_starts_when_the_counters_say_so(seen: Reading, started: bool) -> None:
    one = backend()
    one.book(1, request(stream=False), 0.0)
    one.book(2, request(stream=True), 0.0)
    one.observe(seen)
    assert one.bookings[1].started is started
    assert not one.bookings[2].started, "a stream starts with its first byte alone"


def test_answer_without_a_stream_starts_after_a_second_without_numbers() -> None:
    one = backend()
    one.book(1, request(), 0.0)
    one.release(1, Verdict.CONNECT_FAILED, 0.0)
    one.book(2, request(stream=False), 2.0)
    one.answered(2.0 + STARTED_AFTER_S / 2)
    assert [booking.started for booking in one.bookings.values()] == [False]
    one.answered(2.0 + STARTED_AFTER_S)
    assert [booking.started for booking in one.bookings.values()] == [True]
    assert one.view(2.0 + STARTED_AFTER_S).available, "the probe's case is closed, however long its answer takes"


@pytest.mark.parametrize(
    ("before", "generated", "well"), [(None, None, True), (7, 8, True), (7, 7, False)], ids=["gauge", "works", "frozen"]
)
def test_a_start_seen_by_the_poller_closes_the_case_of_a_probe(
    before: int | None, generated: int | None, well: bool
) -> None:
    one = backend()
    one.observe(reading(0.0, running=1, generated=before))
    one.book(1, request(), 0.0)
    one.release(1, Verdict.CONNECT_FAILED, 0.0)
    one.book(2, request(stream=False), 2.0)
    assert not one.view(2.0).available
    one.observe(reading(2.5, running=1, generated=generated))
    one.answered(2.0 + STARTED_AFTER_S)
    assert one.view(3.0).available is well


def test_views_of_backends_have_their_prompt_range() -> None:
    of = pools({"a": 1, "b": 1}, replace(DEFAULTS, prompt_ranges={"b": (10, 20)}))
    assert {name: one.prompt_range for name, one in of.views(0.0).items()} == {"a": None, "b": (10, 20)}


def test_views_of_backends_have_their_role() -> None:
    of = pools({"a": 1, "b": 1}, replace(DEFAULTS, roles={"b": Role.PREFILL}))
    assert {name: one.role for name, one in of.views(0.0).items()} == {"a": Role.BOTH, "b": Role.PREFILL}
    of.backends["b"].set_limits_and_role(1, role=Role.DECODE)
    assert of.views(0.0)["b"].role is Role.DECODE


@pytest.mark.parametrize(
    ("others", "running", "ejected"), [(0, None, True), (0, 0, True), (1, 0, False), (0, 1, False)]
)
def test_a_backend_that_turns_all_away_is_ejected_unless_it_has_work(
    others: int, running: int | None, ejected: bool
) -> None:
    one = backend()
    if running is not None:
        one.observe(reading(0.0, running=running))
    for lease in range(others):
        one.book(lease, request(), 0.0)
    for lease in range(10, 20):
        one.book(lease, request(), 0.0)
        one.release(lease, Verdict.BUSY, 0.0)
    assert one.health.ejected is ejected
