"""Elections: at most one member decides at any time, whatever the store and the processes do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from llmproxy.lab.run.virtual_time import run
from tests.dispatching import virtual
from tests.remote.cluster.elections import FENCE_S, LOCK_S, RENEW_S, SEEK_S, Member, Store, Turn, check, now
from tests.sizes import examples

# --- the course of things ---------------------------------------------------------------------------------------------


@virtual
async def test_the_first_one_leads_and_the_others_follow() -> None:
    store = Store()
    a, b = Member(store, "a"), Member(store, "b")
    await asyncio.sleep(0.05)
    assert a.turns == [Turn("a", 1, 0.0, FENCE_S)]
    assert b.leader == "a"


@virtual
async def test_a_leader_renews_four_times_in_the_time_of_its_lock() -> None:
    store = Store()
    a = Member(store, "a")
    await asyncio.sleep(3.5)
    assert store.asked == [0.0, RENEW_S, 2 * RENEW_S, 3 * RENEW_S]
    assert a.turns == [Turn("a", 1, 0.0, 3 * RENEW_S + FENCE_S)]


@virtual
async def test_an_answer_counts_from_when_it_was_asked_for() -> None:
    store = Store(before_s=0.5, after_s=1.5)
    a = Member(store, "a")
    await asyncio.sleep(2.01)
    assert a.turns == [Turn("a", 1, 2.0, FENCE_S)]
    await asyncio.sleep(20.0)
    assert {turn.epoch for turn in check(a)} == {1}
    assert not a.followed, "it only pauses until it is answered"


@virtual
async def test_a_store_that_takes_half_the_fence_makes_no_pause() -> None:
    store = Store(before_s=0.5, after_s=0.9)
    a = Member(store, "a")
    await asyncio.sleep(20.0)
    [turn] = check(a)
    assert turn.from_s == 1.4
    assert a.is_leader


@virtual
async def test_a_leader_without_its_store_ends_its_turn_before_its_lock_ends() -> None:
    store = Store()
    a = Member(store, "a")
    await asyncio.sleep(2.5)
    store.away = True
    await asyncio.sleep(10.0)
    [turn] = a.turns
    assert turn.until_s == 2 * RENEW_S + FENCE_S < store.ends_s
    ended_s, leader = a.followed[0]
    assert turn.until_s <= ended_s < turn.until_s + 2 * SEEK_S
    assert leader is None
    store.away = False
    await asyncio.sleep(1.0)
    assert a.is_leader
    assert a.away[-1] is None
    check(a)


@virtual
async def test_a_store_that_never_answers_ends_a_turn_too() -> None:
    store = Store()
    a = Member(store, "a")
    await asyncio.sleep(0.5)
    store.before_s = 1000.0
    await asyncio.sleep(10.0)
    assert not a.is_leader
    assert a.away[-1] == "it does not answer"
    assert a.followed[0] == (RENEW_S + FENCE_S, None)


@virtual
async def test_followers_keep_their_leader_while_the_store_is_away() -> None:
    store = Store()
    a, b = Member(store, "a"), Member(store, "b")
    await asyncio.sleep(0.5)
    store.away = True
    await asyncio.sleep(2.0)
    assert a.is_leader
    assert b.leader == "a"


@virtual
async def test_a_leader_that_dies_is_followed_when_its_lock_ends() -> None:
    store = Store()
    a, b = Member(store, "a"), Member(store, "b")
    await asyncio.sleep(2.5)
    await a.end()
    b.reachable = False
    b.election.check_soon()
    await asyncio.sleep(LOCK_S)
    [dead, next_one] = check(a, b)
    assert next_one.from_s == pytest.approx(2 * RENEW_S + LOCK_S, abs=2 * SEEK_S)
    assert (dead.epoch, next_one.epoch) == (1, 2)


@virtual
async def test_member_with_a_leader_asks_less_often() -> None:
    store = Store()
    Member(store, "a")
    await asyncio.sleep(0.01)
    b = Member(store, "b")
    await asyncio.sleep(2.99)
    assert len(store.asked) == 3 + 3
    b.reachable = False
    b.election.check_soon()
    await asyncio.sleep(0.99)
    assert len(store.asked) == pytest.approx(6 + 1 + 10, abs=2)


@pytest.mark.parametrize(("before_s", "check_s", "asked_s"), [(0.0, 0.3, 0.3), (0.2, 0.1, 0.2)])
@virtual
async def test_check_soon_asks_at_once_or_after_the_question_under_way(
    before_s: float, check_s: float, asked_s: float
) -> None:
    store = Store(before_s=before_s)
    a = Member(store, "a")
    await asyncio.sleep(check_s)
    a.election.check_soon()
    await asyncio.sleep(0.2)
    assert store.asked == [0.0, asked_s]


@virtual
async def test_a_store_that_forgot_everything_gives_higher_epochs_still() -> None:
    store = Store()
    a = Member(store, "a")
    for _ in range(5):
        await asyncio.sleep(RENEW_S)
        store.forget()
    await asyncio.sleep(RENEW_S)
    assert [turn.epoch for turn in check(a)] == [1, 2, 3, 4, 5, 6]


@virtual
async def test_a_leader_that_is_outbid_takes_a_turn_beyond() -> None:
    """A new process took the lock of a store that had forgotten all, and another one knows of a later turn."""
    store = Store()
    a = Member(store, "a")
    await asyncio.sleep(0.5)
    a.election.raise_epoch(7)
    await asyncio.sleep(0.01)
    assert [turn.epoch for turn in check(a)] == [1, 8]
    assert a.is_leader


@virtual
async def test_a_lock_that_was_taken_by_hand_is_followed() -> None:
    """Another process of the same name, before a restart, is another holder."""
    store = Store()
    old = Member(store, "a/1")
    await asyncio.sleep(0.5)
    await old.end()
    new = Member(store, "a/2")
    await asyncio.sleep(1.0)
    assert new.leader == "a/1"
    await asyncio.sleep(LOCK_S)
    assert new.is_leader
    check(old, new)


# --- the end ----------------------------------------------------------------------------------------------------------


@virtual
async def test_resigned_leader_is_replaced_at_once_and_follows() -> None:
    store = Store()
    a, b = Member(store, "a"), Member(store, "b")
    await asyncio.sleep(0.5)
    b.reachable = False
    b.election.check_soon()
    await a.election.resign()
    await asyncio.sleep(2 * SEEK_S)
    assert b.is_leader
    assert a.leader == "b"
    await asyncio.sleep(2 * LOCK_S)
    assert not a.is_leader
    check(a, b)


@virtual
async def test_resigned_leader_decides_no_more_before_its_lock_is_free() -> None:
    store = Store(after_s=1.0)
    a, b = Member(store, "a"), Member(store, "b")
    await asyncio.sleep(1.5)
    resigning = asyncio.create_task(a.election.resign())
    await asyncio.sleep(0.0)
    b.reachable = False
    b.election.check_soon()
    await resigning
    await asyncio.sleep(3.0)
    assert b.is_leader
    check(a, b)


@pytest.mark.parametrize("asked_s", [0.0, RENEW_S])
@virtual
async def test_a_question_under_way_does_not_take_the_lock_again(asked_s: float) -> None:
    """Neither the first one, nor a renewal."""
    store = Store(before_s=0.2, after_s=0.2)
    a = Member(store, "a")
    await asyncio.sleep(asked_s + 0.1)
    store.before_s = 0.0
    await a.election.resign()
    assert store.held is None
    await asyncio.sleep(2 * LOCK_S)
    assert store.held is None
    assert not a.is_leader


@virtual
async def test_a_lock_that_was_taken_without_an_answer_is_given_up() -> None:
    store = Store(after_s=1000.0)
    a = Member(store, "a")
    await asyncio.sleep(FENCE_S + 0.05)
    assert store.held is not None
    store.after_s = 0.0
    await a.election.resign()
    assert store._holder() is None


@virtual
async def test_a_lock_of_an_epoch_that_is_unknown_is_given_up() -> None:
    """Other members have led since, and the member took the lock without an answer."""
    store = Store()
    a = Member(store, "a")
    await asyncio.sleep(0.5)
    store.forget()
    store.after_s, store.epoch = 1000.0, 5
    await asyncio.sleep(RENEW_S + FENCE_S)
    assert store.held is not None
    store.after_s = 0.0
    await a.election.resign()
    assert store._holder() is None


@virtual
async def test_member_without_the_lock_asks_for_no_release() -> None:
    store = Store()
    Member(store, "a")
    b = Member(store, "b")
    await asyncio.sleep(0.5)
    store.before_s = 100.0
    await b.election.resign()
    assert now() == 0.5
    store.before_s = 0.0


@virtual
async def test_resigning_ends_though_the_store_does_not_answer() -> None:
    store = Store()
    a = Member(store, "a")
    await asyncio.sleep(0.5)
    store.before_s = 1000.0
    await a.election.resign()
    assert now() == 0.5 + FENCE_S
    assert not a.is_leader


# --- failures ---------------------------------------------------------------------------------------------------------


def reports() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


@virtual
async def test_a_bug_of_a_store_ends_no_election() -> None:
    reported, store = reports(), Store(broken=TypeError("no number"))
    a = Member(store, "a")
    await asyncio.sleep(1.0)
    assert a.away[-1] == "TypeError: no number"
    assert len(reported) == 1, "it is reported once, and not ten times a second"
    store.broken = None
    await asyncio.sleep(0.2)
    assert a.is_leader


@virtual
async def test_a_bug_of_who_leads_ends_no_election() -> None:
    reported, store = reports(), Store()
    a = Member(store, "a")
    a.fails = KeyError("a bug")
    await asyncio.sleep(0.5)
    assert len(reported) == 1
    a.fails = None
    await asyncio.sleep(0.5)
    assert a.is_leader


@pytest.mark.parametrize("stopped_s", [10.0, FENCE_S, 3.5, 2.9])
@virtual
async def test_a_paused_process_does_not_lead_by_an_old_answer(stopped_s: float) -> None:
    """Its question was answered during the pause. The answer is too old when the process reads it."""
    store = Store(before_s=0.1)
    a = Member(store, "a")
    await asyncio.sleep(0.05)
    a.stop(stopped_s)
    b = Member(store, "b")
    await asyncio.sleep(20.0)
    assert all(turn.until_s > turn.from_s for turn in a.turns), "it began a turn that was over"
    check(a, b)


@virtual
async def test_process_paused_while_it_reads_its_answer_does_not_lead() -> None:
    store = Store()
    a = Member(store, "a")
    await asyncio.sleep(0.5)
    store.answers_cost_s = 10.0
    await asyncio.sleep(1.0)
    store.answers_cost_s = 0.0
    assert a.turns[-1].until_s == FENCE_S
    assert a.followed[0] == (RENEW_S + 10.0, None)
    await asyncio.sleep(0.5)
    assert a.is_leader
    check(a)


# --- whatever happens -------------------------------------------------------------------------------------------------

NAMES = ("a", "b", "c")
TIMES = st.floats(0.0, 40.0)
SPANS = st.floats(0.01, 12.0)
DELAYS = st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.4, 2.0, 2.9, 5.0])


@settings(max_examples=examples(150), phases=[Phase.reuse, Phase.generate])
@given(
    delays=st.lists(st.tuples(TIMES, DELAYS, DELAYS), max_size=6),
    outages=st.lists(st.tuples(TIMES, SPANS), max_size=3),
    stops=st.lists(st.tuples(TIMES, st.sampled_from(NAMES), SPANS), max_size=6),
    unreachable=st.lists(st.tuples(TIMES, st.sampled_from(NAMES)), max_size=3),
    resigns=st.lists(st.tuples(TIMES, st.sampled_from(NAMES)), max_size=2),
    rate=st.floats(0.85, 1.2),
)
def test_two_never_decide_at_once(
    delays: list[tuple[float, float, float]],
    outages: list[tuple[float, float]],
    stops: list[tuple[float, str, float]],
    unreachable: list[tuple[float, str]],
    resigns: list[tuple[float, str]],
    rate: float,
) -> None:
    """The clock of the store may even go wrong by a fifth."""

    async def main() -> None:
        store = Store(rate=rate)
        members = {name: Member(store, name) for name in NAMES}
        loop = asyncio.get_running_loop()

        def slow(before_s: float, after_s: float) -> None:
            store.before_s, store.after_s = before_s, after_s

        def away(whether: bool) -> None:
            store.away = whether

        def loses(name: str) -> None:
            members[name].reachable = False
            members[name].election.check_soon()

        resigning: dict[str, asyncio.Task[None]] = {}

        def resign(name: str) -> None:
            # A paused member does not resign either.
            if members[name].stands_still_until_s <= now():
                resigning[name] = asyncio.create_task(members[name].election.resign())

        for at_s, before_s, after_s in delays:
            loop.call_at(at_s, slow, before_s, after_s)
        for at_s, for_s in outages:
            loop.call_at(at_s, away, True)
            loop.call_at(at_s + for_s, away, False)
        for at_s, name, for_s in stops:
            loop.call_at(at_s, members[name].stop, for_s)
        for at_s, name in unreachable:
            loop.call_at(at_s, loses, name)
        for at_s, name in resigns:
            loop.call_at(at_s, resign, name)
        await asyncio.sleep(53.0)
        slow(0.0, 0.0)
        away(False)
        await asyncio.sleep(4 * LOCK_S)
        check(*members.values())
        could = set(NAMES) - resigning.keys()
        assert sum(members[name].is_leader for name in NAMES) == bool(could), "nobody leads, though somebody could"

    run(main())
