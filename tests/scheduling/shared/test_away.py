"""A proxy with a store that is slow, away or back again, on a virtual clock."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from llmproxy.core.domain import Outcome
from llmproxy.lab.run.virtual_time import run
from llmproxy.scheduling.shared_limits import ANSWER_S, ASKS_MAX, LOOK_S, RETRY_S, SharedLimits
from llmproxy.scheduling.valkey import StoreError
from tests.core.make import request
from tests.dispatching import now, refusal_of, turns, virtual
from tests.scheduling.shared.memory import ACME, LIMITS, TOKENS, MemoryStore, admitted, served, sharing, theirs


@virtual
async def test_closed_refuses_while_the_store_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    store = MemoryStore()
    store.broken = StoreError("a request to valkey:6379 failed: no")
    async with sharing(store) as shared:
        for _ in range(2):
            refused = await refusal_of(served(shared, theirs()))
            assert refused.outcome is Outcome.REJECTED_LIMITS_UNAVAILABLE
            assert refused.retry_after_s == RETRY_S
        assert shared.away == "a request to valkey:6379 failed: no"
        await served(shared, request())
        await asyncio.sleep(10 * RETRY_S)
        store.broken = None
        await asyncio.sleep(RETRY_S + 0.1)
        assert not shared.away
        await served(shared, theirs())
    said = capsys.readouterr().out
    assert [said.count(event) for event in ("limits_store_unreachable", "limits_store_reachable")] == [1, 1]


@virtual
async def test_a_connection_that_was_lost_is_made_again_at_once() -> None:
    store = MemoryStore()
    async with sharing(store) as shared:
        store.broken, store.breaks_once = StoreError("the connection was lost"), True
        assert (await refusal_of(shared.reserve(theirs()))).outcome is Outcome.REJECTED_LIMITS_UNAVAILABLE
        await asyncio.sleep(RETRY_S / 2)
        assert shared.away is None


@virtual
async def test_a_share_passes_while_the_store_is_away_and_never_more() -> None:
    store = MemoryStore()
    store.broken = StoreError("no")
    async with sharing(store, 3) as one, sharing(store, 3) as two:
        for shared in (one, two):
            for _ in range(2):
                await served(shared, theirs(), 10)
            refused = await refusal_of(served(shared, theirs()))
            assert refused.message.startswith("The limit of 2 requests per minute of the tenant `acme`")
            assert refused.retry_after_s == pytest.approx(30.0, abs=0.5)


@virtual
async def test_a_store_that_comes_and_goes_fills_no_share_again() -> None:
    store = MemoryStore()
    async with sharing(store, 3) as shared:
        passed = 0
        for _ in range(5):
            store.broken = StoreError("no")
            await asyncio.sleep(LOOK_S)
            with suppress(Exception):
                while True:
                    await served(shared, theirs(), 10)
                    passed += 1
            store.broken = None
            await asyncio.sleep(2 * RETRY_S)
            assert shared.away is None
        assert passed <= 4, "two at once, and two a minute"


@virtual
async def test_requests_are_settled_where_they_were_counted() -> None:
    """A request charged in the store ends while the store is away; a request charged to the share ends after that."""
    store = MemoryStore()
    async with sharing(store, 2) as shared:
        early, late = theirs(200), theirs(200)
        await admitted(shared, early)
        store.broken = StoreError("no")
        await asyncio.sleep(2 * LOOK_S)
        shared.used(early, 100, now())
        shared.ended(early, now())
        await admitted(shared, late)
        store.broken, taken_s = None, store.taken_s(TOKENS)
        await asyncio.sleep(2 * RETRY_S)
        shared.used(late, 100, now())
        shared.ended(late, now())
        await asyncio.sleep(1.0)
        assert store.taken_s(TOKENS) < taken_s
        assert shared._alone is not None
        left = shared._alone.left_per_min(ACME, now())[1]
        assert left is not None
        assert left == pytest.approx(300 - 100 + 5 * 3, abs=5.0)


@virtual
async def test_requests_do_not_wait_long_for_a_slow_store() -> None:
    store = MemoryStore()
    async with sharing(store) as shared:
        await asyncio.sleep(1.0)
        store.answer_s = 2.0
        asked_s = now()
        first = await asyncio.gather(*(refusal_of(shared.reserve(theirs())) for _ in range(ASKS_MAX + 1)))
        assert {one.outcome for one in first} == {Outcome.REJECTED_LIMITS_UNAVAILABLE}
        assert now() == pytest.approx(asked_s + ANSWER_S)
        assert shared.away == "it does not answer within 0.5 s"
        await refusal_of(shared.reserve(theirs()))
        assert now() == pytest.approx(asked_s + ANSWER_S), "nobody waits for a store that is known to be away"
        before = len(store.calls)
        await asyncio.sleep(30.0)
        assert len(store.calls) - before <= 30.0


@virtual
async def test_a_store_that_stays_slow_is_not_back(capsys: pytest.CaptureFixture[str]) -> None:
    """The store answers within the connect timeout, but never within the timeout of a request."""
    store = MemoryStore()
    async with sharing(store) as shared:
        store.answer_s = 2.0
        await asyncio.sleep(60.0)
        assert shared.away
        await refusal_of(shared.reserve(theirs()))
        store.answer_s = 0.4
        await asyncio.sleep(5.0)
        assert not shared.away
        store.answer_s = 0.0
    assert capsys.readouterr().out.count("limits_store_unreachable") == 1


@virtual
async def test_a_connection_may_take_longer_than_an_answer() -> None:
    store = MemoryStore()
    store.answer_s = 2.0
    shared = SharedLimits(store, "llmproxy", LIMITS, None)
    connecting = asyncio.create_task(shared.connect())
    await asyncio.sleep(1.0)
    store.answer_s = 0.1
    await connecting
    assert shared.away is None
    assert len(store.calls) == 2


@virtual
async def test_unanswered_correction_is_never_given_back_twice() -> None:
    """The store may have applied the lost call. So refunds are dropped, and charges are sent again."""
    store = MemoryStore()
    async with sharing(store) as shared:
        less, more = theirs(300), theirs(10)
        await admitted(shared, less)
        await admitted(shared, more)
        store.answer_s = 5.0
        shared.used(less, 0, now())
        shared.ended(less, now())
        await asyncio.sleep(4.0)
        assert shared._owed == {}
        shared.used(more, 40, now())
        shared.ended(more, now())
        await asyncio.sleep(4.0)
        assert shared._owed == {TOKENS.encode(): pytest.approx(3.0)}
        store.answer_s = 0.0


@virtual
async def test_a_store_that_nobody_needs_is_looked_at() -> None:
    store = MemoryStore()
    async with sharing(store) as shared:
        await asyncio.sleep(1.0)
        store.broken = StoreError("no")
        await asyncio.sleep(LOOK_S)
        assert shared.away == "no"


@pytest.mark.parametrize("broken", [RuntimeError("a bug"), OSError("no")])
def test_a_bug_ends_no_request_and_not_the_questions(broken: Exception) -> None:
    async def test() -> None:
        store = MemoryStore()
        store.broken = broken
        async with sharing(store) as shared:
            await refusal_of(shared.reserve(theirs()))
            store.broken = None
            await asyncio.sleep(2 * RETRY_S)
            await served(shared, theirs(), 10)

    run(test())


@virtual
async def test_an_end_answers_whoever_waits() -> None:
    store = MemoryStore()
    store.answer_s = 0.4
    async with sharing(store) as shared:
        waiting = [asyncio.create_task(refusal_of(shared.reserve(theirs()))) for _ in range(2)]
        await turns()
    assert [one.outcome for one in await asyncio.gather(*waiting)] == [Outcome.REJECTED_LIMITS_UNAVAILABLE] * 2
