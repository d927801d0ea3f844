"""What a proxy makes of a store that answers, is slow, is away or comes back; on a virtual clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from llmproxy.core.domain import Entry, Outcome, Request
from llmproxy.core.settings import UsageLimit
from llmproxy.dispatcher import Dispatcher
from llmproxy.lab.run.virtual_time import run
from llmproxy.shared.gcra import SCRIPT
from llmproxy.shared.limits import ANSWER_S, ASKS_MAX, CORRECT_S, LOOK_S, RETRY_S, SharedLimits
from llmproxy.shared.valkey import StoreError
from tests.core.make import request
from tests.dispatching import SETTINGS, dispatcher, now, refusal_of, turns, virtual

ACME = "tenant:acme"
LIMITS = {ACME: UsageLimit(requests_per_min=6, tokens_per_min=600), "tenant:waits": UsageLimit(in_flight=1)}
REQUESTS, TOKENS = f"llmproxy:{{llmproxy}}:requests:{ACME}", f"llmproxy:{{llmproxy}}:tokens:{ACME}"


class MemoryStore:
    """The script, in memory. `answer_s` is how long it takes, `broken` what it says of itself."""

    def __init__(self) -> None:
        self.back: dict[str, float] = {}
        self.answer_s = 0.001
        self.broken: Exception | None = None
        self.breaks_once = False
        self.calls: list[Any] = []
        self.closed = False

    async def run(self, script: str, keys: Sequence[str | bytes], *given: str | bytes | float) -> object:
        asked, minute = json.loads(str(given[0], "utf-8") if isinstance(given[0], bytes) else ""), float(given[1])
        self.calls.append(asked)
        assert script == SCRIPT
        if self.broken is not None:
            broken, self.broken = self.broken, None if self.breaks_once else self.broken
            raise broken
        names = ["", *(str(key, "utf-8", "surrogatepass") if isinstance(key, bytes) else key for key in keys)]
        for i, seconds in asked["corrections"]:
            self.back[names[i]] = max(now(), self._back(names[i]) + seconds)
        said = []
        for ask in asked["asks"]:
            waits = [min(cost, minute) - minute + self._back(names[i]) - now() for i, cost in ask]
            longest = max(range(len(ask)), key=waits.__getitem__)
            refused = waits[longest] > 1e-6
            said += [round(1000 * waits[longest]), longest + 1] if refused else [0, 0]
            for i, cost in [] if refused else ask:
                self.back[names[i]] = self._back(names[i]) + cost
        await asyncio.sleep(self.answer_s)
        return said

    def _back(self, name: str) -> float:
        return max(now(), self.back.get(name, 0.0))

    def taken_s(self, name: str) -> float:
        """Seconds until all that was taken is back."""
        return self._back(name) - now()

    async def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def sharing(
    store: MemoryStore, proxies: int | None = None, limits: dict[str, UsageLimit] = LIMITS
) -> AsyncIterator[SharedLimits]:
    shared = SharedLimits(store, "llmproxy", limits, proxies)
    await shared.connect()
    task = asyncio.create_task(shared.run())
    try:
        yield shared
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await shared.close()
        assert store.closed
        assert not shared._charges
        assert shared._alone is None or not shared._alone.accounts


def theirs(tokens: int = 10, name: str = ACME) -> Request:
    return request(limits=(name,), prompt_tokens=tokens, output_tokens=0)


async def admitted(shared: SharedLimits, one: Request) -> None:
    await shared.reserve(one)
    shared.admit(one, now())


async def served(shared: SharedLimits, one: Request, used: int | None = None) -> None:
    await admitted(shared, one)
    if used is not None:
        shared.used(one, used, now())
    shared.ended(one, now())


# --- a store that answers ---------------------------------------------------------------------------------------------


@virtual
async def test_two_proxies_together_let_one_limit_pass() -> None:
    store = MemoryStore()
    async with sharing(store) as one, sharing(store) as two:
        for number in range(6):
            await served((one, two)[number % 2], theirs(), 10)
        for shared in (one, two):
            refused = await refusal_of(shared.reserve(theirs()))
            assert refused.outcome is Outcome.RATE_LIMITED
            assert (
                refused.message
                == "The limit of 6 requests per minute of the tenant `acme` is used up. Try again later."
            )
            assert refused.retry_after_s == pytest.approx(10.0, abs=0.1)


@virtual
async def test_a_client_is_told_the_limit_for_which_it_waits_longest() -> None:
    store = MemoryStore()
    async with sharing(store) as shared:
        await served(shared, theirs(600), 600)
        assert "600 tokens per minute" in (await refusal_of(shared.reserve(theirs(300)))).message


@virtual
async def test_tokens_are_trued_up_once_they_are_counted() -> None:
    store = MemoryStore()
    async with sharing(store) as shared:
        one = theirs(500)
        await admitted(shared, one)
        for used in (100, 50):
            shared.used(one, used, now())
        shared.ended(one, now())
        await asyncio.sleep(2 * CORRECT_S)
        assert store.taken_s(TOKENS) == pytest.approx(15.0, abs=0.5), "100 and 50 tokens, of 10 a second"
        assert store.taken_s(REQUESTS) == pytest.approx(10.0, abs=0.5)


@virtual
async def test_tokens_of_a_request_that_was_never_answered_are_given_back() -> None:
    store = MemoryStore()
    async with sharing(store) as shared:
        await served(shared, theirs(500))
        await asyncio.sleep(2 * CORRECT_S)
        assert store.taken_s(TOKENS) == 0.0
        assert store.taken_s(REQUESTS) == pytest.approx(10.0, abs=0.5)


@virtual
async def test_what_the_waiting_room_did_not_take_costs_nothing() -> None:
    store = MemoryStore()
    async with sharing(store) as shared:
        one = theirs(500)
        await shared.reserve(one)
        shared.ended(one, now())
        await asyncio.sleep(2 * CORRECT_S)
        assert (store.taken_s(TOKENS), store.taken_s(REQUESTS)) == (0.0, 0.0)


@virtual
async def test_a_client_that_leaves_while_the_store_is_asked_costs_nothing() -> None:
    store = MemoryStore()
    async with sharing(store) as shared:
        await asyncio.sleep(LOOK_S / 2)
        one = theirs(500)
        waiting = asyncio.create_task(shared.reserve(one))
        await turns()
        waiting.cancel()
        shared.ended(one, now())
        await asyncio.sleep(2 * CORRECT_S)
        assert len(store.calls) == 3, "the first look, the question, and what is given back"
        assert (store.taken_s(TOKENS), store.taken_s(REQUESTS)) == (0.0, 0.0)


@virtual
async def test_a_client_that_leaves_in_the_turn_of_its_answer_costs_nothing() -> None:
    store = MemoryStore()
    async with sharing(store) as shared:
        await asyncio.sleep(LOOK_S / 2)
        one = theirs(500)
        store.answer_s = 0.0
        waiting = asyncio.create_task(shared.reserve(one))
        while not shared._charges:  # noqa: ASYNC110 - the very turn in which the answer is there
            await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        shared.ended(one, now())
        await asyncio.sleep(2 * CORRECT_S)
        assert (store.taken_s(TOKENS), store.taken_s(REQUESTS)) == (0.0, 0.0)


@virtual
async def test_what_is_owed_is_given_back_at_the_end() -> None:
    store = MemoryStore()
    async with sharing(store) as shared:
        await served(shared, theirs(500), 0)
    assert store.taken_s(TOKENS) == 0.0


@virtual
async def test_requests_without_a_rate_are_not_asked_for() -> None:
    store = MemoryStore()
    async with sharing(store) as shared:
        await asyncio.sleep(1.0)
        store.broken = StoreError("gone")
        for one in (request(), theirs(name="tenant:waits"), theirs(name="tenant:unknown")):
            await served(shared, one, 10)
        assert len(store.calls) == 1


@virtual
async def test_many_requests_go_in_one_question() -> None:
    store = MemoryStore()
    async with sharing(store, limits={ACME: UsageLimit(requests_per_min=10_000)}) as shared:
        await asyncio.sleep(1.0)
        many = [theirs() for _ in range(ASKS_MAX + 10)]
        await asyncio.gather(*(admitted(shared, one) for one in many))
        assert [len(call["asks"]) for call in store.calls] == [0, ASKS_MAX, 10]
        for one in many:
            shared.ended(one, now())


@virtual
async def test_names_of_tenants_cannot_name_keys_of_others() -> None:
    """Whatever a name holds, it is the last part of its key, and outside of the braces."""
    names = ["a", "a:b", "}:tokens:tenant:a", "{x}", "a\r\nFLUSHALL\r\n", "\x00", "*", "ä", "\ud800", " ", "a" * 512]
    limits = {f"tenant:{name}": UsageLimit(requests_per_min=1, tokens_per_min=600) for name in names}
    store = MemoryStore()
    async with sharing(store, limits=limits) as shared:
        for name in names:
            await served(shared, theirs(name=f"tenant:{name}"), 10)
            assert (await refusal_of(shared.reserve(theirs(name=f"tenant:{name}")))).outcome is Outcome.RATE_LIMITED
    assert len(store.back) == 2 * len(names)
    assert all(key.startswith((REQUESTS[: -len("acme")], TOKENS[: -len("acme")])) for key in store.back)


@virtual
async def test_a_limit_that_changes_keeps_what_was_taken_as_a_part_of_a_minute() -> None:
    store = MemoryStore()
    async with sharing(store) as shared:
        runs = theirs(300)
        await admitted(shared, runs)
        shared.reconfigure({ACME: UsageLimit(tokens_per_min=6000)}, now())
        assert "6000 tokens per minute" in (await refusal_of(shared.reserve(theirs(6000)))).message
        shared.used(runs, 0, now())
        shared.ended(runs, now())
        await asyncio.sleep(2 * CORRECT_S)
        assert store.taken_s(TOKENS) == 0.0, "it is given back by the rate by which it was taken"
        shared.reconfigure({}, now())
        await served(shared, theirs(10**9))


# --- a store that is away ---------------------------------------------------------------------------------------------


@virtual
async def test_closed_refuses_while_the_store_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    store = MemoryStore()
    store.broken = StoreError("valkey:6379 cannot be asked: no")
    async with sharing(store) as shared:
        for _ in range(2):
            refused = await refusal_of(served(shared, theirs()))
            assert refused.outcome is Outcome.REJECTED_LIMITS_AWAY
            assert refused.retry_after_s == RETRY_S
        assert shared.away == "valkey:6379 cannot be asked: no"
        await served(shared, request())
        await asyncio.sleep(10 * RETRY_S)
        store.broken = None
        await asyncio.sleep(RETRY_S + 0.1)
        assert not shared.away
        await served(shared, theirs())
    said = capsys.readouterr().out
    assert [said.count(event) for event in ("limits_store_away", "limits_store_back")] == [1, 1]


@virtual
async def test_a_connection_that_was_lost_is_made_again_at_once() -> None:
    store = MemoryStore()
    async with sharing(store) as shared:
        store.broken, store.breaks_once = StoreError("the connection was lost"), True
        assert (await refusal_of(shared.reserve(theirs()))).outcome is Outcome.REJECTED_LIMITS_AWAY
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
    """One was taken from the store and ends while that is away; one from the share, and ends when the store is back."""
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
async def test_nobody_waits_long_for_a_store_that_is_slow() -> None:
    store = MemoryStore()
    async with sharing(store) as shared:
        await asyncio.sleep(1.0)
        store.answer_s = 2.0
        asked_s = now()
        first = await asyncio.gather(*(refusal_of(shared.reserve(theirs())) for _ in range(ASKS_MAX + 1)))
        assert {one.outcome for one in first} == {Outcome.REJECTED_LIMITS_AWAY}
        assert now() == pytest.approx(asked_s + ANSWER_S)
        assert shared.away == "it does not answer within 0.5 s"
        await refusal_of(shared.reserve(theirs()))
        assert now() == pytest.approx(asked_s + ANSWER_S), "nobody waits for a store that is known to be away"
        before = len(store.calls)
        await asyncio.sleep(30.0)
        assert len(store.calls) - before <= 30.0


@virtual
async def test_a_store_that_stays_slow_is_not_back(capsys: pytest.CaptureFixture[str]) -> None:
    """It answers within the time for a connection, but never within that for a request."""
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
    assert capsys.readouterr().out.count("limits_store_away") == 1


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
async def test_what_was_not_answered_is_never_given_back_twice() -> None:
    """The store may have done it already. So refunds are lost, and charges stay owed."""
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
    assert [one.outcome for one in await asyncio.gather(*waiting)] == [Outcome.REJECTED_LIMITS_AWAY] * 2


# --- the dispatcher ---------------------------------------------------------------------------------------------------


def reserving(shared: SharedLimits) -> Dispatcher:
    made = dispatcher(None, SETTINGS, a=1)
    made.reserve = shared.reserve
    made.pools._limits.rates = shared
    return made


def with_dispatcher(test: Any) -> Any:
    async def body() -> None:
        store = MemoryStore()
        async with sharing(store) as shared:
            await test(store, reserving(shared))

    def sync() -> None:
        run(body())

    sync.__name__ = test.__name__
    return sync


@with_dispatcher
async def test_a_further_attempt_is_not_asked_for(store: MemoryStore, one: Dispatcher) -> None:
    again = theirs()
    async with one.admit(again):
        pass
    async with one.admit(again, frozenset(), Entry.RETRY):
        pass
    one.ended(again, None)
    assert sum(len(call["asks"]) for call in store.calls) == 1


@with_dispatcher
async def test_a_drain_that_begins_while_the_store_is_asked_refuses(store: MemoryStore, one: Dispatcher) -> None:
    store.answer_s = 0.1
    late = theirs(500)

    async def come() -> None:
        async with one.admit(late):
            pass

    waiting = asyncio.create_task(refusal_of(come()))
    await turns()
    one.drain()
    assert (await waiting).outcome is Outcome.DRAINING
    one.ended(late, None)
    await asyncio.sleep(1.0)
    assert store.taken_s(TOKENS) == 0.0


@with_dispatcher
async def test_a_request_of_an_unknown_pool_costs_nothing(store: MemoryStore, one: Dispatcher) -> None:
    lost = request(limits=(ACME,), pool="nowhere")

    async def come() -> None:
        async with one.admit(lost):
            pass

    assert (await refusal_of(come())).outcome is Outcome.REJECTED_NO_BACKENDS
    one.ended(lost, None)
    await asyncio.sleep(1.0)
    assert (store.taken_s(TOKENS), store.taken_s(REQUESTS)) == (0.0, 0.0)
