"""Standalone mode: members without a leader decide for themselves, with a share of every limit."""

from __future__ import annotations

import asyncio

import pytest

from llmproxy.remote.cluster.pages import cluster_status
from tests.dispatching import virtual
from tests.remote.cluster.elections import LOCK_S
from tests.remote.cluster.virtual import World, world

ALONE_S = LOCK_S + 1.0
SOON_S = 0.05


async def without_leader(found: World) -> None:
    """The leader dies, and the store answers nobody."""
    dead = found.leader
    found.store.away = True
    found.members.remove(dead)
    await dead.die()
    await asyncio.sleep(2 * ALONE_S)


@virtual
async def test_each_member_decides_with_its_part() -> None:
    async with world(3, seats=6, standalone_after_s=ALONE_S) as found:
        await without_leader(found)
        one, other = found.members
        clients = [one.client() for _ in range(5)] + [other.client() for _ in range(5)]
        await asyncio.sleep(SOON_S)
        assert [client.holds() for client in clients] == [*"aa", None, None, None] * 2, "a third of six for each"
        assert cluster_status(one.cluster)["alone"]
        assert cluster_status(one.cluster)["leader"] is None
        assert not one.cluster.state().led
        await clients[0].done()
        await asyncio.sleep(SOON_S)
        assert clients[2].holds() == "a"


@virtual
async def test_waiting_requests_are_scheduled_in_standalone_mode() -> None:
    async with world(3, seats=6, standalone_after_s=ALONE_S) as found:
        one = found.followers[0]
        held = [found.leader.client() for _ in range(6)]
        await asyncio.sleep(SOON_S)
        waits = one.client()
        await asyncio.sleep(SOON_S)
        assert waits.holds() is None
        await without_leader(found)
        assert waits.holds() == "a"
        assert len(held) == 6


@virtual
async def test_new_leader_ends_standalone_mode_and_knows_running_requests() -> None:
    async with world(3, seats=3, standalone_after_s=ALONE_S) as found:
        await without_leader(found)
        one, other = found.members
        runs = [one.client(), other.client()]
        waits = one.client()
        await asyncio.sleep(SOON_S)
        assert [client.holds() for client in (*runs, waits)] == ["a", "a", None]
        found.store.away = False
        await asyncio.sleep(3.0)
        assert [client.holds() for client in (*runs, waits)] == ["a", "a", "a"], "limits are whole again"
        assert found.leader.dispatcher.leases == 3
        assert sum(one.dispatcher.leases for one in found.followers) == 0
        assert [one.cluster.limit_divisor for one in found.members] == [0, 0]
        more = other.client()
        await asyncio.sleep(SOON_S)
        assert more.holds() is None
        await runs[0].done()
        await asyncio.sleep(SOON_S)
        assert more.holds() == "a"


@virtual
async def test_member_that_never_met_others_schedules_nothing() -> None:
    """It cannot know its part, and all of a limit at each of them would be too much."""
    async with world(1, seats=6, standalone_after_s=ALONE_S) as found:
        found.store.away = True
        late = await found.member("late")
        client = late.client()
        await asyncio.sleep(2 * ALONE_S)
        assert late.cluster.limit_divisor == 0
        assert not late.leasing.has_leader
        assert client.lease is None
        found.store.away = False


@virtual
async def test_without_the_setting_nobody_decides_alone() -> None:
    async with world(3, seats=6) as found:
        await without_leader(found)
        assert [one.cluster.limit_divisor for one in found.members] == [0, 0]
        client = found.members[0].client()
        await asyncio.sleep(SOON_S)
        assert client.lease is None


@virtual
async def test_the_leader_that_lost_its_lock_decides_alone_and_leads_again() -> None:
    async with world(2, seats=4, standalone_after_s=ALONE_S) as found:
        leader = found.leader
        runs = [leader.client() for _ in range(3)]
        await asyncio.sleep(SOON_S)
        found.store.away = True
        await asyncio.sleep(3 * ALONE_S)
        assert [one.cluster.limit_divisor for one in found.members] == [2, 2]
        assert leader.dispatcher.leases == 3, "what ran runs on, although it is more than its part"
        waits = leader.client()
        await runs[0].done()
        await asyncio.sleep(SOON_S)
        assert waits.holds() is None
        await runs[1].done()
        await asyncio.sleep(SOON_S)
        assert waits.holds() == "a"
        found.store.away = False
        await asyncio.sleep(3.0)
        assert found.leader.dispatcher.leases == 2


@virtual
async def test_member_that_shuts_down_schedules_nothing() -> None:
    async with world(2, standalone_after_s=ALONE_S) as found:
        await without_leader(found)
        [one] = found.members
        assert one.cluster.limit_divisor == 2
        found.store.away = False
        await one.cluster.close()
        assert one.cluster.limit_divisor == 0
        assert not one.leasing.has_leader


@virtual
async def test_earlier_charges_of_flows_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(2, seats=2, standalone_after_s=ALONE_S) as found:
        one = found.followers[0]
        found.leader.client(flow="big", prompt_tokens=3000)
        found.leader.client(flow="small")
        await asyncio.sleep(1.5)
        known = {key: dict(flows) for key, flows in one.cluster._hand_over.balances.latest.items()}
        assert any(known.values())
        restored: dict[tuple[str, int], dict[str, float]] = {}
        monkeypatch.setattr(
            one.dispatcher.pools, "restore", lambda pool, band, flows: restored.setdefault((pool, band), dict(flows))
        )
        await without_leader(found)
        assert restored == known
