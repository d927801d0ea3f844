"""Rate limits of a cluster are the same as of a single proxy, also after a change of leader."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from llmproxy.core.domain import Outcome, Usage
from llmproxy.core.queueing.rate_limits import REQUESTS, TOKENS
from llmproxy.core.settings import Settings, UsageLimit
from llmproxy.remote.cluster.hand_over import RATES_KNOWN_MAX, RATES_MAX, AnnouncedRateDebts
from tests.dispatching import SETTINGS, Client, virtual
from tests.remote.cluster.virtual import VirtualMember, World, world

SOON_S = 0.05
TENANT = "tenant:t"
A, B = (TENANT, REQUESTS), (TENANT, TOKENS)


def limited(**limit: float) -> Settings:
    return replace(SETTINGS, limits={TENANT: UsageLimit(**limit)})  # type: ignore[arg-type]


def ask(one: VirtualMember, **facts: Any) -> Client:
    return one.client(limits=(TENANT,), **facts)


async def another_leads(found: World) -> None:
    old = found.leader
    old.cluster.begin_shutdown()
    await asyncio.sleep(2.0)
    assert found.leader is not old


@virtual
async def test_taken_tokens_count_at_the_next_leader() -> None:
    async with world(3, seats=9, settings=limited(requests_per_min=6.0)) as found:
        one = found.followers[0]
        served = [ask(one) for _ in range(5)]
        await asyncio.sleep(1.5)
        assert [client.holds() for client in served] == ["a"] * 5
        await another_leads(found)
        more = [ask(one) for _ in range(3)]
        await asyncio.sleep(SOON_S)
        assert [client.holds() for client in more] == ["a", None, None]
        assert [client.refused and client.refused.outcome for client in more] == [None, *[Outcome.RATE_LIMITED] * 2]


@virtual
async def test_a_member_that_joined_late_knows_it_too() -> None:
    async with world(1, seats=9, settings=limited(requests_per_min=2.0)) as found:
        [first] = found.members
        for _ in range(2):
            ask(first)
        await asyncio.sleep(1.5)
        late = await found.member("late")
        await asyncio.sleep(0.5)
        await another_leads(found)
        assert found.leader is late
        refused = ask(late)
        await asyncio.sleep(SOON_S)
        assert refused.refused is not None


@virtual
async def test_waiting_request_counts_once_at_the_next_leader() -> None:
    async with world(3, settings=limited(requests_per_min=2.0, tokens_per_min=40.0)) as found:
        one, other = found.followers
        holder = other.client()
        await asyncio.sleep(SOON_S)
        waits = [ask(one) for _ in range(2)]
        await asyncio.sleep(1.5)
        await another_leads(found)
        assert [client.refused for client in waits] == [None, None]
        await holder.done()
        await asyncio.sleep(SOON_S)
        assert waits[0].holds() == "a"
        [left] = found.leader.dispatcher.pools.snapshot(asyncio.get_running_loop().time()).limits
        assert left.requests_left == pytest.approx(0.0, abs=0.2)
        assert left.tokens_left == pytest.approx(0.0, abs=4.0)


@virtual
async def test_the_next_leader_charges_the_real_tokens_of_running_requests() -> None:
    async with world(3, settings=limited(tokens_per_min=6_000.0)) as found:
        running = ask(found.followers[0], prompt_tokens=10, output_tokens=10)
        await asyncio.sleep(1.5)
        await another_leads(found)
        assert running.lease is not None
        running.lease.usage = Usage(10, 4_000)
        await running.done()
        await asyncio.sleep(SOON_S)
        [left] = found.leader.dispatcher.pools.snapshot(asyncio.get_running_loop().time()).limits
        assert left.tokens_left == pytest.approx(6_000 - 4_010, abs=50.0)


@virtual
async def test_waiting_request_of_a_late_member_is_not_refused() -> None:
    """The next leader has restored all taken tokens by then, also of waiting requests."""
    async with world(3, settings=limited(requests_per_min=2.0)) as found:
        one, other = found.followers
        holder = found.leader.client()
        await asyncio.sleep(SOON_S)
        waits = [ask(one), ask(other)]
        await asyncio.sleep(1.5)
        found.cut(one, other)
        await another_leads(found)
        found.heal()
        await asyncio.sleep(3.0)
        assert [client.refused for client in waits] == [None, None]
        for client in (holder, *waits):
            await client.done()


@virtual
async def test_waiting_request_counts_once_over_a_broken_connection() -> None:
    async with world(2, settings=limited(requests_per_min=3.0)) as found:
        [one], leader = found.followers, found.leader
        holder = leader.client()
        await asyncio.sleep(SOON_S)
        waits = ask(one)
        await asyncio.sleep(SOON_S)
        found.break_connections()
        await asyncio.sleep(1.0)
        assert leader.sessions[one.name].connected
        [left] = leader.dispatcher.pools.snapshot(asyncio.get_running_loop().time()).limits
        assert left.requests_left == pytest.approx(2.0, abs=0.1)
        await holder.done()
        await asyncio.sleep(SOON_S)
        assert waits.holds() == "a"


# --- messages ---------------------------------------------------------------------------------------------------------


def told(one: AnnouncedRateDebts, debts: dict[tuple[str, str], float], now: float) -> dict[tuple[str, str], float]:
    return {(limit, kind): debt_s for part in one.deltas(debts, now) for limit, kind, debt_s in part.debts}


def test_only_changes_of_rates_are_sent() -> None:
    one = AnnouncedRateDebts()
    assert told(one, {A: 10.0, B: 5.0}, 0.0) == {A: 10.0, B: 5.0}
    assert told(one, {A: 9.0, B: 4.0}, 1.0) == {}
    assert told(one, {A: 12.0, B: 3.0}, 2.0) == {A: 12.0}
    assert told(one, {A: 11.0}, 3.0) == {B: 0.0}, "it was given back before its time"
    assert told(one, {}, 15.0) == {}


def test_member_knows_the_rest_of_a_rate() -> None:
    teller, hearer = AnnouncedRateDebts(), AnnouncedRateDebts()
    for debts, now in (({A: 10.0, B: 5.0}, 0.0), ({A: 20.0}, 1.0)):
        for part in teller.deltas(debts, now):
            hearer.record(part, now + 100.0)
    assert hearer.remaining(101.0) == teller.remaining(1.0) == {A: 20.0}
    assert hearer.remaining(111.0) == {A: 10.0}
    assert hearer.remaining(121.0) == {}
    [late] = teller.full_state(6.0)
    assert late.debts == ((*A, 15.0),)


def test_messages_and_memory_are_bounded() -> None:
    teller, hearer = AnnouncedRateDebts(), AnnouncedRateDebts()
    many = {(f"tenant:{number}", REQUESTS): 50.0 for number in range(RATES_KNOWN_MAX + 10)}
    parts = list(teller.deltas(many, 0.0))
    assert max(len(part.debts) for part in parts) == RATES_MAX
    for part in parts:
        hearer.record(part, 0.0)
    assert len(hearer.remaining(1.0)) == RATES_KNOWN_MAX
    assert ("tenant:0", REQUESTS) not in hearer.remaining(1.0)
