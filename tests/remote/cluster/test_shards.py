"""Shards: each has its own leader, and leadership spreads over the members."""

from __future__ import annotations

import asyncio
from collections import Counter
from math import inf
from typing import Any

import pytest

from llmproxy.app import running
from llmproxy.config import Config, hash_of
from llmproxy.core.domain import Outcome
from llmproxy.core.shards import DEFAULT
from llmproxy.lab.simulator.replica import ReplicaOptions
from llmproxy.remote.cluster import cluster
from llmproxy.remote.cluster.cluster import BALANCE_S, DEFER_MAX_S, STAYS_S
from llmproxy.remote.cluster.pages import cluster_status
from llmproxy.remote.cluster.stores import lock_name
from tests.core.make import BASE
from tests.dispatching import Client, virtual
from tests.e2e.proxies import FAST, HELLO, merged_with, until
from tests.remote.cluster.elections import LOCK_S, RENEW_S, Member, Store, check
from tests.remote.cluster.fleet import cluster_of, members, shard_of
from tests.remote.cluster.virtual import VirtualMember, World, world

POOLS = {"b": "big", "c": "code"}
CODE = ReplicaOptions(model="code", profile="tiny", noise=False)
SPREAD_S = 4 * BALANCE_S
SOON_S = 0.1


def led(found: World) -> Counter[str]:
    """How many shards each member leads."""
    return Counter(found.leader_of(pool).name for pool in found.stores)


def asked(one: VirtualMember, pool: str, **facts: Any) -> Client:
    return one.client(pool=pool, model=pool, **facts)


@virtual
async def test_leaders_spread_over_the_members() -> None:
    async with world(3, backends="abc", pools=POOLS) as found:
        await asyncio.sleep(SPREAD_S)
        assert led(found) == {"m0": 1, "m1": 1, "m2": 1}
        for one in found.members:
            assert all(shard.has_leader for shard in one.cluster.shards.values())


@virtual
async def test_each_pool_is_decided_about_by_its_leader_whoever_is_asked() -> None:
    async with world(2, backends="abc", pools=POOLS) as found:
        await asyncio.sleep(SPREAD_S)
        for one in found.members:
            clients = [asked(one, pool) for pool in (BASE, "big", "code")]
            await asyncio.sleep(SOON_S)
            assert [client.holds() for client in clients] == ["a", "b", "c"]
            for pool, backend in ((DEFAULT, "a"), ("big", "b"), ("code", "c")):
                for other in found.members:
                    leads = other is found.leader_of(pool)
                    assert len(other.dispatcher.pools.backends[backend].bookings) == leads
            for client in clients:
                await client.done()
            await asyncio.sleep(SOON_S)


@virtual
async def test_when_a_leader_dies_only_its_pools_pause() -> None:
    async with world(3, backends="abc", pools=POOLS) as found:
        await asyncio.sleep(SPREAD_S)
        dead = found.leader_of("big")
        found.members.remove(dead)
        await dead.die()
        asks = found.members[0]
        big, code = asked(asks, "big"), asked(asks, "code")
        await asyncio.sleep(SOON_S)
        assert (big.holds(), code.holds()) == (None, "c")
        await asyncio.sleep(LOCK_S + 1.0)
        assert big.holds() == "b"
        assert sorted(led(found).values()) == [1, 2]


@pytest.mark.slow
@virtual
async def test_leader_of_many_shards_takes_free_locks_in_time() -> None:
    """Before requests that wait are refused, which is some seconds after the lock has ended."""
    pools = {name: name * 3 for name in "bcdefghijklmnopqrstuvwxyz"}
    async with world(2, backends="".join(["a", *pools]), pools=pools) as found:
        await asyncio.sleep(16.5 * BALANCE_S)
        assert sorted(led(found).values()) == [13, 13]
        dead, [stays] = found.leader, [one for one in found.members if one is not found.leader]
        found.members.remove(dead)
        await dead.die()
        await asyncio.sleep(2 * LOCK_S)
        assert led(found) == {stays.name: 26}
        gaps_s = [shard.last_gap_s or 0.0 for shard in stays.cluster.shards.values()]
        assert max(gaps_s) < LOCK_S + 1.5


@virtual
async def test_member_with_fewer_shards_takes_a_free_lock_first() -> None:
    """A member that leads something leaves a free lock to the others for a moment, and takes it where nobody does."""
    store = Store()
    busy, idle = Member(store, "busy"), Member(store, "idle")
    await asyncio.sleep(0.05)
    idle.defer_s, busy.defer_s = 0.4, 0.4
    await busy.end()
    await asyncio.sleep(LOCK_S + 0.3)
    assert check(idle) == [], "it leaves the lock to others"
    await asyncio.sleep(0.5)
    assert len(check(idle)) == 1
    busy = Member(store, "busy")
    busy.defer_s, idle.defer_s = 0.0, 0.4
    # Shortly before the next read of the lock by `busy`, so that it comes within the time that `idle` waits.
    await asyncio.sleep(RENEW_S - 0.1)
    await idle.election.resign()
    idle.election.campaign()
    await asyncio.sleep(1.0)
    assert busy.is_leader
    check(busy, idle)


@virtual
async def test_nothing_is_handed_over_again_and_again() -> None:
    """A member that says it would lead, and takes nothing, is offered a shard once a minute."""
    async with world(1, backends="abc", pools=POOLS) as found:
        idle = await found.member("idle")
        await asyncio.sleep(SOON_S)
        for shard in idle.cluster.shards.values():
            assert shard._election is not None
            shard._election.campaigning = False
        await asyncio.sleep(STAYS_S)
        one = found.members[0]
        assert led(found) == {"m0": 3}
        assert [shard.leader_changes for shard in one.cluster.shards.values()] == [2, 2, 2]
        await asyncio.sleep(0.9 * STAYS_S)
        assert sum(shard.leader_changes for shard in one.cluster.shards.values()) <= 9


@virtual
@pytest.mark.parametrize("why", ["leaves", "cannot ask for the lock", "does not know backends yet"])
async def test_no_shard_is_handed_to_a_member_that_would_not_lead(why: str) -> None:
    async with world(1, backends="abc", pools=POOLS) as found:
        known = asyncio.Event()
        other = await found.member("other", known.wait() if "backends" in why else None)
        await asyncio.sleep(SOON_S)
        if why == "leaves":
            other.cluster.begin_shutdown()
        elif why == "cannot ask for the lock":
            for shard in other.cluster.shards.values():
                shard._set_lock_error("away")
                shard._election._on_store_error = lambda _: None  # type: ignore[union-attr]
        await asyncio.sleep(2 * STAYS_S)
        assert led(found) == {"m0": 3}
        assert [shard.leader_changes for shard in found.members[0].cluster.shards.values()] == [1, 1, 1]
        known.set()
        if "backends" in why:
            await asyncio.sleep(SPREAD_S)
            assert led(found) == {"m0": 2, "other": 1}


@virtual
async def test_handed_over_shard_goes_to_another_member() -> None:
    async with world(2, backends="abc", pools=POOLS) as found:
        await asyncio.sleep(SPREAD_S)
        gives = max(found.members, key=lambda one: led(found)[one.name])
        shard = next(shard for shard in gives.cluster.shards.values() if shard.is_leader)
        await shard.hand_over("a test", DEFER_MAX_S)
        await asyncio.sleep(SOON_S)
        assert found.leader_of(shard.name) is not gives


@virtual
async def test_a_shard_that_could_not_be_given_up_is_led_again() -> None:
    async with world(2, backends="abc", pools=POOLS) as found:
        await asyncio.sleep(SPREAD_S)
        for store in found.stores.values():
            store.broken = RuntimeError("a bug")
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        for one in found.members:
            for shard in one.cluster.shards.values():
                if shard.is_leader:
                    await shard.hand_over("a test", SOON_S)
        for store in found.stores.values():
            store.broken = None
        await asyncio.sleep(LOCK_S + 2.0)
        assert sum(led(found).values()) == 3
        assert told


@virtual
async def test_hand_over_keeps_running_and_waiting_requests() -> None:
    async with world(1, backends="abc", pools=POOLS) as found:
        one = found.members[0]
        runs = asked(one, "code")
        await asyncio.sleep(SOON_S)
        waits = asked(one, "code")
        other = await found.member("other")
        await asyncio.sleep(SPREAD_S)
        assert found.leader_of("code") is other
        assert (runs.holds(), waits.holds()) == ("c", None)
        assert len(other.dispatcher.pools.backends["c"].bookings) == 1
        await runs.done()
        await asyncio.sleep(SOON_S)
        assert waits.holds() == "c"


@virtual
async def test_leaders_send_only_facts_of_their_own_pools() -> None:
    async with world(2, backends="abc", pools=POOLS) as found:
        await asyncio.sleep(SPREAD_S)
        for pool, flow in ((BASE, "x"), ("big", "y"), ("code", "z")):
            for one in found.members:
                client = asked(one, pool, flow=flow)
                await asyncio.sleep(SOON_S)
                await client.done()
        await asyncio.sleep(3.0)
        for one in found.members:
            for name, shard in one.cluster.shards.items():
                known = {pool for pool, _ in shard._hand_over.balances.latest}
                assert known == {name or BASE}


@virtual
async def test_standalone_member_splits_only_shards_without_a_leader() -> None:
    async with world(2, seats=6, backends="ab", pools={"b": "big"}, standalone_after_s=LOCK_S + 1.0) as found:
        await asyncio.sleep(SPREAD_S)
        big, rest = found.leader_of("big"), found.leader
        assert big is not rest
        # The leader of the pool cannot be reached any more, and its lock is held.
        found.stores["big"].away = True
        await asyncio.sleep(LOCK_S + 1.0)
        await asyncio.sleep(LOCK_S + 2.0)
        assert [one.cluster.shards["big"].limit_divisor for one in found.members] == [2, 2]
        assert [one.shard.limit_divisor for one in found.members] == [0, 0]
        parts = {name: backend.limit_divisor for name, backend in rest.dispatcher.pools.backends.items()}
        assert parts == {"a": 1, "b": 2}
        clients = [asked(rest, pool) for pool in ["big"] * 5 + [BASE] * 6]
        await asyncio.sleep(SOON_S)
        assert [client.holds() for client in clients] == ["b"] * 3 + [None] * 2 + ["a"] * 6


@virtual
async def test_member_with_other_pools_is_refused_with_the_reason() -> None:
    """Otherwise its requests would wait forever, because no leader schedules the pool that it expects."""
    async with world(1, backends="ab", pools={"b": "big"}) as found:
        old = World(backends="ab", pools={})
        old.net, old.store, old.stores = found.net, found.store, found.stores
        other = await old.member("old")
        await asyncio.sleep(1.0)
        served, refused = asked(other, BASE), asked(other, "big")
        await asyncio.sleep(SOON_S)
        assert served.holds() == "a"
        assert refused.refused is not None
        assert refused.refused.outcome is Outcome.REJECTED_NO_BACKENDS
        assert "cluster.pools" in refused.refused.message
        await old.settled()
        await other.cluster.close()


def test_locks_have_names_that_a_lease_may_have() -> None:
    assert lock_name("llmproxy", DEFAULT) == "llmproxy"
    one, other = lock_name("llmproxy", "meta-llama/Llama-3.3-70B"), lock_name("llmproxy", "meta-llama/Llama.3.3.70B")
    assert one.startswith("llmproxy-meta-llama-llama-3-3-70b-")
    assert one != other
    assert lock_name("llmproxy", "模型").startswith("llmproxy-")
    assert len(lock_name("llmproxy", 300 * "x")) < 63


async def test_pages_come_from_the_leader_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "BALANCE_S", 0.2)
    async with members(2, FAST, CODE, cluster={"pools": ["code"]}) as found:
        await until(
            lambda: all(sum(shard.is_leader for shard in cluster_of(one).shards.values()) == 1 for one in found)
        )
        await until(lambda: all(shard_of(one, "code").has_leader and shard_of(one).has_leader for one in found))
        for one in found:
            assert (await one.chat(HELLO | {"model": "code"})).status == 200
            assert (await one.chat(HELLO)).status == 200
            pools = (await one.get("/scale")).json["pools"]
            assert [pool["pool"] for pool in pools] == ["base", "code"]
            assert (await one.get("/scale/code")).json["pool"] == "code"
            listed = (await one.get("/admin/backends")).json["backends"]
            assert [backend["backend"] for backend in listed] == ["b0", "b1"]
            for query, shown in (("", "base"), ("?pool=code", "code")):
                live = (await one.get(f"/debug/live{query}")).json
                assert [pool["pool"] for pool in live["pools"]] == [shown]
                assert [backend["pool"] for backend in live["backends"]] == [shown]
                requests = (await one.get(f"/debug/requests{query}")).json["requests"]
                assert {request["model"] for request in requests} == {shown}
            told = (await one.get("/admin/cluster")).json
            assert told["leader"] != told["pools"]["code"]["leader"]
        led = {one: [name for name, shard in cluster_of(one).shards.items() if shard.is_leader] for one in found}
        for one, (name,) in led.items():
            metrics = (await one.get("/metrics")).body.decode()
            assert f'llmproxy_cluster_leader{{pool="{name}"}} 1.0' in metrics
            assert ('llmproxy_scale_need_replicas{pool="code"}' in metrics) is (name == "code")
        assert cluster_status(cluster_of(found[0]))["pools"]["code"]["members"] == ["m0", "m1"]


async def test_a_backend_is_drained_where_it_is_led() -> None:
    async with members(2, FAST, CODE, cluster={"pools": ["code"]}, admin_key=hash_of("k")) as found:
        await until(lambda: all(shard_of(one, "code").has_leader for one in found))
        headers = {"Authorization": "Bearer k"}

        def drained() -> list[set[str]]:
            return [one.app.registry.drained() for one in found]

        for name in ("b0", "b1"):
            assert (await found[0].post(f"/admin/backends/{name}/drain", {}, headers=headers)).status == 200
            await until(lambda: drained() == [{name}, {name}])  # noqa: B023 - it is over before the next one
            assert (await found[1].post(f"/admin/backends/{name}/undrain", {}, headers=headers)).status == 200
            await until(lambda: drained() == [set(), set()])


async def test_a_drained_backend_stays_so_at_a_member_that_does_not_know_its_pool_yet() -> None:
    """It takes the backend for a member of the common shard, whose leader does not mention it."""
    async with members(2, FAST, CODE, cluster={"pools": ["code"]}, admin_key=hash_of("k")) as found:
        await until(lambda: all(shard_of(one, "code").has_leader for one in found))
        headers = {"Authorization": "Bearer k"}
        assert (await found[0].post("/admin/backends/b1/drain", {}, headers=headers)).status == 200
        await until(lambda: all(one.app.registry.drained() == {"b1"} for one in found))
        await found[0].replica("b1")._stop()
        late = merged_with(found[0].config_data, {"cluster": {"member": "late"}})
        async with running(Config.model_validate(late)) as app:
            assert app.cluster is not None
            shards = app.cluster.shards.values()
            await until(lambda: all(len(shard.members) == 3 for shard in shards))
            assert (await found[0].post("/admin/backends/b0/drain", {}, headers=headers)).status == 200
            await until(lambda: "b0" in app.registry.drained())
            assert app.registry.drained() == {"b0", "b1"}


async def test_a_page_is_not_passed_on_for_ever_where_members_differ_about_whose_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "BALANCE_S", 0.2)
    async with members(2, FAST, CODE, cluster={"pools": ["code"]}, admin_key=hash_of("k")) as found:
        await until(
            lambda: all(sum(shard.is_leader for shard in cluster_of(one).shards.values()) == 1 for one in found)
        )
        await until(lambda: all(shard_of(one, "code").has_leader and shard_of(one).has_leader for one in found))
        unaware = next(one for one in found if shard_of(one, "code").is_leader)
        monkeypatch.setattr(unaware.app.pools, "shard_for_backend", lambda _: DEFAULT)
        for one in found:
            answer = await one.post("/admin/backends/b1/drain", {}, headers={"Authorization": "Bearer k"})
            assert (answer.status, answer.headers["retry-after"]) == (503, "5")
            assert "forwarded the request twice" in answer.json["error"]["message"]


@pytest.mark.slow
async def test_scale_says_nothing_where_a_pool_has_no_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "BALANCE_S", inf)
    async with members(2, FAST, CODE, cluster={"pools": ["code"]}) as found:
        await until(lambda: all(shard_of(one, "code").has_leader for one in found))
        found.locks["code"].away = {"m0", "m1"}
        await until(lambda: not any(shard_of(one, "code").has_leader for one in found))
        for one in found:
            assert (await one.get("/scale")).status == 503
            assert (await one.get("/scale/code")).status == 503
            assert (await one.get("/scale/base")).status == 200
            assert (await one.get("/ready")).status == 200
            listed = (await one.get("/admin/backends")).json["backends"]
            assert [backend["backend"] for backend in listed] == ["b0", "b1"]


async def test_scale_has_the_others_where_nobody_serves_a_pool_with_a_lock_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "BALANCE_S", 0.2)
    async with members(2, FAST, cluster={"pools": ["misspelt"]}) as found:
        await until(
            lambda: all(sum(shard.is_leader for shard in cluster_of(one).shards.values()) == 1 for one in found)
        )
        await until(lambda: all(shard_of(one, "misspelt").has_leader and shard_of(one).has_leader for one in found))
        for one in found:
            answer = await one.get("/scale")
            assert (answer.status, [pool["pool"] for pool in answer.json["pools"]]) == (200, ["base"])
