"""Several members decide as one: whichever a client comes by, and whoever leads."""

from __future__ import annotations

import asyncio
from functools import partial
from math import inf

import pytest

from llmproxy.cluster import cluster
from llmproxy.gateway.http.headers import OBJECTIVE_HEADERS
from tests.cluster.fleet import Members, cluster_of, members
from tests.e2e.proxies import FAST, HELLO, STREAM, until


def waits(found: Members, requests: int) -> bool:
    return found.leader.queued == requests


async def test_every_member_answers() -> None:
    async with members(3, FAST, FAST) as found:
        for one in found:
            answer = await one.chat(STREAM)
            assert answer.status == 200
            assert answer.events[-1] == b"data: [DONE]"


async def test_one_waiting_room_for_all() -> None:
    """A critical request at one member goes before those that wait at others, whoever came first."""
    async with members(3, FAST, fixed_limit=1, scheduling={"look_ahead": 0}) as found:
        async with found[0].stream() as seat:
            await seat.content.readany()
            order: list[str] = []

            async def ask(member: int, objective: str) -> None:
                headers = {OBJECTIVE_HEADERS[0]: objective}
                assert (await found[member].chat(HELLO, headers=headers)).status == 200
                order.append(objective)

            tasks = []
            for number, (member, objective) in enumerate([(0, "sheddable"), (1, "default"), (2, "critical")]):
                tasks.append(asyncio.create_task(ask(member, objective)))
                await until(partial(waits, found, number + 1))
        await asyncio.gather(*tasks)
        assert order == ["critical", "default", "sheddable"]


async def test_a_leader_that_resigns_cuts_nothing() -> None:
    async with members(3, FAST, fixed_limit=3) as found:
        old = found.leader
        streams = [one.stream() for one in found]
        opened = [await stream.__aenter__() for stream in streams]
        for one in opened:
            await one.content.readany()
        waiting = [one.waiting(HELLO) for one in found]
        await until(lambda: old.queued == 3)
        cluster_of(old).begin_shutdown()
        await until(lambda: not cluster_of(old).leads)
        await until(found.together)
        assert found.leader is not old
        await until(lambda: found.leader.queued == 3)
        assert found.leader.app.dispatcher.leases == 3
        for one in opened:
            assert await one.content.readany()
        for stream in streams:
            await stream.__aexit__(None, None, None)
        assert [(await one).status for one in waiting] == [200] * 3


async def test_the_leader_shows_what_came_of_requests_of_others() -> None:
    async with members(2, FAST) as found:
        (follower,) = found.followers
        await follower.chat(HELLO, headers={"x-request-id": "mine"})
        recent = found.leader.app.recorder.recent.newest_first
        await until(lambda: [one.input.request_id for one in recent()] == ["mine"])
        (seen,) = recent()
        now = asyncio.get_running_loop().time()
        assert seen.input.arrived_s is not None
        assert now - 5.0 < seen.input.arrived_s < now
        # Each member counts its own.
        assert (found.leader.outcomes(), follower.outcomes()) == ({}, {"completed": 1})


async def test_only_the_leader_has_metrics_of_what_work_needs() -> None:
    """A member that follows knows no work: it would say for ever that what there is, is needed."""
    async with members(2, FAST, FAST) as found:
        (follower,) = found.followers
        for one, has in ((found.leader, True), (follower, False)):
            assert (b"llmproxy_scale_need_replicas{" in (await one.get("/metrics")).body) is has
            assert (await one.get("/scale/base")).json["replicas"]["up"] == 2, "whoever is asked, the leader answers"


async def test_a_member_without_a_leader_is_not_ready_once_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async with members(2, FAST) as found:
        (follower,) = found.followers
        monkeypatch.setattr(cluster, "WITHOUT_LEADER_S", inf)
        found.lock.away = {"m0", "m1"}
        await until(lambda: not any(cluster_of(one).led for one in found))
        assert (await follower.get("/ready")).status == 200, "its requests are held"
        summary = (await follower.get("/debug/live")).json["summary"]
        assert (summary["level"], summary["text"].partition(":")[0]) == (
            "bad",
            "This member of the cluster has no leader",
        )
        monkeypatch.setattr(cluster, "WITHOUT_LEADER_S", -inf)
        assert (await follower.get("/ready")).json["reason"] == "this member of the cluster has no leader"
        found.lock.away = set()
        await until(found.together)
        assert (await follower.get("/ready")).status == 200
