"""Clients and operators see the same cluster through every member."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from llmproxy.config import Config, hash_of
from llmproxy.gateway.proxying.stored import IDS_MAX
from llmproxy.remote.link import SILENCE_S
from tests.dispatching import virtual
from tests.e2e.proxies import CHAT, FAST, HELLO, all_of, until
from tests.e2e.scheduling.test_stored_responses import RESPONSES, go_on, made
from tests.remote.cluster.elections import LOCK_S
from tests.remote.cluster.fleet import cluster_of, members, sessions_of
from tests.remote.cluster.virtual import world

ADMIN: dict[str, Any] = {"admin_key": hash_of("k"), "trust_headers": "all"}
KEY = {"authorization": "Bearer k"}


async def test_a_response_is_gone_on_with_through_any_member() -> None:
    async with members(3, FAST, FAST, FAST, scheduling={"placement": "round_robin"}) as found:
        for one in found:
            first = await made(one)
            for other in found:
                then = await go_on(other, first)
                assert (then.status, then.backend) == (200, first.backend)


async def test_rejoining_member_knows_the_makers_of_stored_responses() -> None:
    async with members(2, FAST, FAST) as found:
        first = await made(found.leader)
        [late] = found.followers
        path = f"{RESPONSES}/{first.json['id']}"
        assert (await late.get(path)).status == 200
        late.app.gateway.stored._made_by.clear()
        late.app.gateway.stored._ids_of.clear()
        assert (await late.get(path)).status == 404
        link = cluster_of(late)._connection
        assert link is not None
        link.link.abort()
        await until(lambda: cluster_of(late)._connection not in (None, link) and found.together())
        await until(lambda: len(late.app.gateway.stored.made_by) > 0)
        assert (await late.get(path)).status == 200


@virtual
async def test_joining_member_learns_the_makers_of_stored_responses() -> None:
    async with world(2) as found:
        for number in range(IDS_MAX):
            found.leader.store(f"resp_{number:0256}")
        await asyncio.sleep(0.1)
        late = await found.member("late")
        await asyncio.sleep(0.5)
        assert late.cluster.has_leader
        assert list(late.responses.values()) == list(found.leader.responses.values())
        assert len(late.responses) == IDS_MAX


@virtual
async def test_stored_responses_are_sent_when_a_member_returns() -> None:
    async with world(3) as found:
        leader, one = found.leader, found.followers[0]
        found.cut(leader, one)
        await asyncio.sleep(2 * SILENCE_S)
        leader.store("resp_1")
        await asyncio.sleep(0.1)
        assert [len(member.responses) for member in found.followers] == [0, 1]
        found.heal()
        await asyncio.sleep(5.0)
        assert one.cluster.has_leader
        assert set(one.responses) == {"resp_1"}


@virtual
async def test_stored_responses_without_a_leader_are_sent_to_the_next() -> None:
    async with world(3) as found:
        dead = found.leader
        found.store.away = True
        found.members.remove(dead)
        await dead.die()
        await asyncio.sleep(3 * LOCK_S)
        assert not any(one.cluster.has_leader for one in found.members)
        for one in found.members:
            one.store(f"resp_{one.name}")
        await asyncio.sleep(0.1)
        assert [len(one.responses) for one in found.members] == [1, 1]
        found.store.away = False
        await asyncio.sleep(3.0)
        late = await found.member("late")
        await asyncio.sleep(1.0)
        for one in found.members:
            assert one.responses.keys() == {f"resp_{other.name}" for other in found.members if other is not late}


@pytest.mark.parametrize("path", ["/scale", "/debug/queue", "/debug/explain"])
async def test_pages_about_decisions_come_from_the_leader(path: str) -> None:
    async with members(3, FAST, **ADMIN) as found:
        for one in found:
            assert (await one.chat()).status == 200
        pages = [await one.get(path, headers=KEY) for one in found]
        assert [page.status for page in pages] == [200] * 3
        if path == "/debug/explain":
            assert [len(page.json["pools"][0]["choices"]) for page in pages] == [3] * 3


async def test_a_backend_that_is_drained_at_any_member_stays_so_under_the_next_leader() -> None:
    async with members(3, FAST, FAST, **ADMIN) as found:
        follower = found.followers[0]
        wrong = {"authorization": "Bearer wrong"}
        assert (await follower.post("/admin/backends/b0/drain", {}, headers=wrong)).status == 401
        assert (await follower.post("/admin/backends/b0/drain", {}, headers=KEY)).status == 200
        await until(lambda: all(one.app.registry.drained() == {"b0"} for one in found))
        old = found.leader
        cluster_of(old).begin_shutdown()
        await until(lambda: not cluster_of(old).is_leader)
        await until(found.together)
        for one in found:
            for _ in range(3):
                assert (await one.chat()).backend == "b1"
        assert (await old.post("/admin/backends/b0/undrain", {}, headers=KEY)).status == 200
        await until(lambda: not any(one.app.registry.drained() for one in found))


async def test_nothing_is_drained_without_a_leader_as_the_next_one_would_not_know_of_it() -> None:
    async with members(2, FAST, FAST, **ADMIN) as found:
        found.lock.away = {"m0", "m1"}
        await until(lambda: not any(cluster_of(one).has_leader for one in found))
        for one in found:
            answer = await one.post("/admin/backends/b0/drain", {}, headers=KEY)
            assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        found.lock.away = set()
        await until(found.together)
        assert (await found[0].post("/admin/backends/b0/drain", {}, headers=KEY)).status == 200
        await until(lambda: all(one.app.registry.drained() == {"b0"} for one in found))


async def test_the_admin_port_of_a_member_asks_the_leader_too() -> None:
    async with members(2, FAST, admin={"port": 0}, **ADMIN) as found:
        for one in found:
            assert one.app.admin_url is not None
            assert (await one.get("/debug/queue", headers=KEY)).status == 404
            assert (await one.get(one.app.admin_url + "/debug/queue", headers=KEY)).status == 200
            assert (await one.get(one.app.admin_url + "/admin/cluster", headers=KEY)).json["leader"] == "m0"


async def test_a_lock_with_a_password_is_on_no_page() -> None:
    lock = "valkey://:s3cret@127.0.0.1:6379"
    async with members(2, FAST, cluster={"lock": lock}, **ADMIN) as found:
        for one in found:
            for path in ("/admin/cluster", "/debug/queue", "/debug/explain", "/metrics", "/scale"):
                assert b"s3cret" not in (await one.get(path, headers=KEY)).body
            assert "s3cret" not in repr(one.app.config)


async def test_a_reload_at_a_follower_and_at_the_leader() -> None:
    """Each member reads its own files: until all have, they differ, and that is shown."""
    async with members(2, FAST, **ADMIN) as found:
        leader, follower = found.leader, found.followers[0]

        def same() -> list[bool]:
            return [one.hello.config == cluster_of(leader).me.config for one in sessions_of(leader).values()]

        other = Config.model_validate({**follower.config_data, "body_bytes_max": 12345})
        assert all(same())
        follower.app.reconfigure(other)
        await until(lambda: not all(same()))
        leader.app.reconfigure(Config.model_validate({**leader.config_data, "body_bytes_max": 12345}))
        assert (await follower.chat()).status == 200
        await until(lambda: all(same()))


@virtual
async def test_member_without_backends_does_not_lead() -> None:
    """It would refuse what waits at all others, because it knows no model."""
    async with world(2) as found:
        old, one = found.leader, found.followers[0]
        seat = one.client()
        await asyncio.sleep(0.05)
        waits = one.client()
        await asyncio.sleep(0.05)
        polled = asyncio.Event()
        new = await found.member("new", known=polled.wait())
        one.campaign(False)
        old.cluster.begin_shutdown()
        await asyncio.sleep(3.0)
        assert not new.cluster.has_leader
        polled.set()
        await asyncio.sleep(1.0)
        assert new.cluster.is_leader
        assert seat.holds() == "a"
        assert waits.refused is None


@virtual
async def test_member_that_leaves_before_it_knows_backends_does_not_lead() -> None:
    async with world(1) as found:
        polled = asyncio.Event()
        new = await found.member("new", known=polled.wait())
        await asyncio.sleep(1.0)
        new.cluster.begin_shutdown()
        polled.set()
        old = found.leader
        old.campaign(False)
        found.store.held = None
        await asyncio.sleep(10.0)
        assert not new.cluster.is_leader


@pytest.mark.slow
async def test_requests_that_wait_outlive_a_leader_that_is_cut_off_from_its_lock() -> None:
    async with members(3, FAST, fixed_limit=1, scheduling={"look_ahead": 0}) as found:
        old = found.leader
        async with found.followers[0].stream() as seat:
            await seat.content.readany()
            waiting = [one.waiting(HELLO) for one in found]
            await until(lambda: old.queued == 3)
            found.lock.away = {cluster_of(old).me.name}
            others = [one for one in found if one is not old]
            await until(lambda: not cluster_of(old).is_leader)
            await until(lambda: any(cluster_of(one).is_leader for one in others))
            await until(lambda: all(cluster_of(one).has_leader for one in others))
            assert not any(one.done() for one in waiting)
            found.lock.away = set()
            await until(found.together)
            assert found.leader is not old
            await until(lambda: found.leader.queued == 3)
        assert [(await one).status for one in waiting] == [200] * 3


@pytest.mark.slow
@pytest.mark.parametrize("deadline_s", [0.1, 4.0])
async def test_the_next_leader_moves_the_streams_at_the_deadline_of_a_drain(deadline_s: float) -> None:
    """The next leader decides after the shorter and before the longer deadline."""
    body = HELLO | {"stream": True, "ignore_eos": True, "max_tokens": 400}
    slow = replace(FAST, speed=0.005)
    async with members(3, slow, FAST, cluster={"lock_s": 1.0}, scheduling={"placement": "round_robin"}) as found:
        old, kept = found.leader, found.followers[0]
        streams = [await kept.http.post(kept.url + CHAT, json=body) for _ in range(2)]
        try:
            old.app.registry.drain("b0", 60.0)
            await until(lambda: kept.app.registry.moves_s().keys() == {"b0"})
            old.app.registry.drain("b0")
            await until(lambda: not kept.app.registry.moves_s())
            old.app.registry.drain("b0", deadline_s)
            await until(lambda: kept.app.registry.moves_s().keys() == {"b0"})
            cluster_of(old).begin_shutdown()
            await until(lambda: kept.replicas[0].in_flight == 0)
            ended = [await all_of(stream) for stream in streams]
        finally:
            for stream in streams:
                stream.close()
        assert sorted(b": continued" in answer for answer in ended) == [False, True]
        assert not cluster_of(old).is_leader
