"""Several members decide as a single proxy, for clients of every member and under every leader."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from llmproxy.config import BackendConfig, hash_of
from llmproxy.gateway.http.headers import OBJECTIVE_HEADERS
from llmproxy.lab.simulator.replica import Replica
from llmproxy.remote.cluster import cluster
from llmproxy.remote.cluster.build import config_hash as config_hash
from llmproxy.remote.cluster.pages import PASSED_ON_MAX
from llmproxy.remote.pages import PASSED_ON
from tests.e2e.proxies import FAST, HELLO, STREAM, until
from tests.remote.cluster.fleet import Members, cluster_of, members


def waits(found: Members, requests: int) -> bool:
    return found.leader.queued == requests


async def test_every_member_answers() -> None:
    async with members(3, FAST, FAST) as found:
        for one in found:
            answer = await one.chat(STREAM)
            assert answer.status == 200
            assert answer.events[-1] == b"data: [DONE]"


async def test_one_waiting_room_for_all() -> None:
    """A critical request at one member precedes earlier requests at other members."""
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


async def test_a_leader_that_resigned_cuts_nothing() -> None:
    async with members(3, FAST, fixed_limit=3) as found:
        old = found.leader
        streams = [one.stream() for one in found]
        opened = [await stream.__aenter__() for stream in streams]
        for one in opened:
            await one.content.readany()
        waiting = [one.waiting(HELLO) for one in found]
        await until(lambda: old.queued == 3)
        cluster_of(old).begin_shutdown()
        await until(lambda: not cluster_of(old).is_leader)
        await until(found.together)
        assert found.leader is not old
        await until(lambda: found.leader.queued == 3)
        assert found.leader.app.dispatcher.leases == 3
        for one in opened:
            assert await one.content.readany()
        for stream in streams:
            await stream.__aexit__(None, None, None)
        assert [(await one).status for one in waiting] == [200] * 3


async def test_leader_shows_results_of_all_members() -> None:
    async with members(2, FAST) as found:
        (follower,) = found.followers
        await follower.chat(HELLO, headers={"x-request-id": "mine"})
        recent = found.leader.app.recorder.recent.newest_first
        await until(lambda: [one.request_id for one in recent()] == ["mine"])
        (seen,) = recent()
        now = asyncio.get_running_loop().time()
        assert seen.arrived_s is not None
        assert now - 5.0 < seen.arrived_s < now
        # Each member counts its own.
        assert (found.leader.outcomes(), follower.outcomes()) == ({}, {"completed": 1})


async def test_only_the_leader_says_what_is_left_of_a_rate() -> None:
    keys = [{"name": "acme", "keys": [hash_of("acme-1")], "limits": {"requests_per_min": 5, "requests_per_day": 9}}]
    headers = {"authorization": "Bearer acme-1"}
    async with members(2, FAST, tenants=keys) as found:
        for one in found:
            assert (await one.chat(headers=headers)).status == 200
        pages = [
            (await one.get("/v1/usage", headers=headers)).json["limits"] for one in (found.leader, *found.followers)
        ]
        assert [page.get("requests_per_min_left") for page in pages] == [3, None]
        assert all("requests_per_day_left" in page for page in pages)


async def test_only_the_leader_has_metrics_of_the_need() -> None:
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
        await until(lambda: not any(cluster_of(one).has_leader for one in found))
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


async def held_anywhere(found: Members) -> list[asyncio.Task[Any]]:
    """A request at each member, for a model that has no replica yet. The leader asks for one replica."""
    asked = [asyncio.create_task(one.chat(HELLO | {"model": "late"})) for one in found]
    await until(lambda: found.leader.app.dispatcher.nameless == len(found))
    for one in found:
        scale = (await one.get("/scale/late")).json
        assert (scale["desired"], scale["waiting"]["requests"]) == (1, len(found))
    return asked


async def test_leader_knows_held_requests_of_all_members() -> None:
    async with members(3, FAST, scaling={"pools": ["late"], "min": 0}, queue={"no_backend_wait_s": 60.0}) as found:
        asked = await held_anywhere(found)
        async with Replica(replace(FAST, model="late")) as replica:
            # Members find backends at different times, and a leader may be the last.
            for one in [*found.followers, found.leader]:
                await asyncio.sleep(0.1)
                assert not any(task.done() for task in asked)
                one.app.registry.update("late", [BackendConfig(url=replica.url, name="late-0")])
            assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 3
            for one in found:
                one.app.registry.remove_source("late")
            await until(lambda: all("late-0" not in one.app.registry.backends for one in found))


async def test_next_leader_knows_held_requests() -> None:
    async with members(3, FAST, scaling={"pools": ["late"], "min": 0}, queue={"no_backend_wait_s": 60.0}) as found:
        asked = await held_anywhere(found)
        old = found.leader
        cluster_of(old).begin_shutdown()
        await until(lambda: not cluster_of(old).is_leader)
        await until(found.together)
        await until(lambda: found.leader.app.dispatcher.nameless == 3)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: found.leader.app.dispatcher.nameless == 0)


async def test_a_member_without_a_leader_has_no_number_for_an_autoscaler() -> None:
    """It sees only a part of the work, and a low number would remove replicas."""
    async with members(2, FAST) as found:
        (follower,) = found.followers
        assert (await follower.get("/scale/base")).json["replicas"]["up"] == 1
        found.lock.away = {"m0", "m1"}
        await until(lambda: not any(cluster_of(one).has_leader for one in found))
        for one in found:
            for path in ("/scale", "/scale/base"):
                answer = await one.get(path)
                assert answer.status == 503
                assert answer.headers["retry-after"]
            assert b"llmproxy_scale_need_replicas{" not in (await one.get("/metrics")).body
        found.lock.away = set()
        await until(found.together)
        assert (await follower.get("/scale/base")).json["replicas"]["up"] == 1


async def test_a_page_is_forwarded_at_most_twice() -> None:
    """A member that two others take for the leader is a follower itself: the request would go round for ever."""
    async with members(2, FAST, admin_key=hash_of("k")) as found:
        asked = make_mocked_request("GET", "/admin/backends", headers={"Authorization": "Bearer k"})
        asked[PASSED_ON] = PASSED_ON_MAX
        answer = await found.followers[0].app.pages.administer("/admin/backends", asked, on_admin_port=False)
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
