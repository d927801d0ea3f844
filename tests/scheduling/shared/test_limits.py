"""The calls of a proxy to a reachable store, and the charges of requests there, on a virtual clock."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from llmproxy.core.domain import AdmissionKind, Outcome
from llmproxy.core.settings import UsageLimit
from llmproxy.lab.run.virtual_time import run
from llmproxy.scheduling.dispatcher import Dispatcher
from llmproxy.scheduling.shared_limits import ASKS_MAX, CORRECT_S, LOOK_S, SharedLimits
from llmproxy.scheduling.valkey import StoreError
from tests.core.make import request
from tests.dispatching import SETTINGS, dispatcher, holding, now, refusal_of, turns, virtual
from tests.scheduling.shared.memory import ACME, REQUESTS, TOKENS, MemoryStore, admitted, served, sharing, theirs


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
async def test_refusal_names_the_limit_with_the_longest_wait() -> None:
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
async def test_request_refused_by_the_queue_costs_nothing() -> None:
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
        assert len(store.calls) == 3, "the first check, the charge, and the refund"
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
async def test_unused_tokens_are_given_back_at_the_end() -> None:
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
async def test_changed_limit_keeps_the_taken_part_of_a_minute() -> None:
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


# --- the dispatcher ---------------------------------------------------------------------------------------------------


def reserving(shared: SharedLimits) -> Dispatcher:
    made = dispatcher(None, SETTINGS, a=1)
    made.reserve = shared.reserve
    made.pools.limits.rates = shared
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
    async with holding(one, again):
        pass
    for entry in (AdmissionKind.RETRY, AdmissionKind.CONTINUED):
        async with holding(one, again, frozenset(), entry):
            pass
    one.ended(again, None)
    assert sum(len(call["asks"]) for call in store.calls) == 1


@with_dispatcher
async def test_a_drain_that_begins_while_the_store_is_asked_refuses(store: MemoryStore, one: Dispatcher) -> None:
    store.answer_s = 0.1
    late = theirs(500)

    async def come() -> None:
        async with holding(one, late):
            pass

    waiting = asyncio.create_task(refusal_of(come()))
    await turns()
    one.drain()
    assert (await waiting).outcome is Outcome.DRAINING
    one.ended(late, None)
    await asyncio.sleep(1.0)
    assert store.taken_s(TOKENS) == 0.0


@with_dispatcher
async def test_a_request_for_an_unknown_model_costs_nothing(store: MemoryStore, one: Dispatcher) -> None:
    lost = request(limits=(ACME,), pool="nowhere", model="nowhere")

    async def come() -> None:
        async with holding(one, lost):
            pass

    assert (await refusal_of(come())).outcome is Outcome.REJECTED_NO_BACKENDS
    one.ended(lost, None)
    await asyncio.sleep(1.0)
    assert (store.taken_s(TOKENS), store.taken_s(REQUESTS)) == (0.0, 0.0)
