"""Relay workers of cluster members: their requests reach the leader through their own member."""

from __future__ import annotations

import asyncio

import pytest

from llmproxy.core.domain import CRITICAL, Usage, Verdict
from llmproxy.core.lease_events import Committed, Started
from tests.core.make import BASE
from tests.dispatching import now, virtual
from tests.e2e.proxies import FAST, HELLO, STREAM
from tests.remote.cluster.elections import LOCK_S
from tests.remote.cluster.fleet import members
from tests.remote.cluster.virtual import GONE_S, VirtualMember, world
from tests.remote.workers.link import WorkerLink

SOON_S = 0.05


def worker_of(member: VirtualMember) -> WorkerLink:
    return WorkerLink(member.dispatcher, leasing=member.leasing)


async def closed(*workers: WorkerLink) -> None:
    """All clients of these workers leave. Nothing is left of them."""
    for worker in workers:
        for client in worker.clients:
            await client.done()
            worker.remote.ended(client.request, None)
    await asyncio.sleep(GONE_S)
    for worker in workers:
        worker.check()


@virtual
async def test_workers_of_all_members_share_one_queue() -> None:
    async with world(3) as found:
        workers = [worker_of(one) for one in found.members]
        holder = workers[0].client()
        await asyncio.sleep(SOON_S)
        assert holder.holds() == "a"
        late = [worker.client(band=band) for worker, band in zip(workers, (0, 1, CRITICAL), strict=True)]
        await asyncio.sleep(SOON_S)
        assert [client.holds() for client in late] == [None] * 3
        await holder.done()
        await asyncio.sleep(SOON_S)
        assert [client.holds() for client in late] == [None, None, "a"]
        await closed(*workers)


@virtual
async def test_usage_and_cached_prompts_reach_the_leader() -> None:
    async with world(2) as found:
        [follower], leader = found.followers, found.leader
        worker = worker_of(follower)
        client = worker.client(prefix=tuple(range(10)))
        await asyncio.sleep(SOON_S)
        assert client.lease is not None
        grant = client.lease.grant
        client.lease.apply(Started(grant.lease), now())
        client.verdict, client.lease.usage = Verdict.SERVED, Usage(300, 200)
        await client.done()
        answered = tuple(range(12))
        worker.remote.cached(grant.request.pool, grant.lease, grant.placed.backend, answered)
        await asyncio.sleep(SOON_S)
        placement = leader.dispatcher.pools.schedulers[BASE]._placement
        assert placement.inner._index.match(answered) == {"a": 12}  # type: ignore[attr-defined]
        await closed(worker)


@virtual
async def test_leases_of_a_dead_worker_are_returned_to_the_leader() -> None:
    async with world(2) as found:
        [follower] = found.followers
        dying, other = worker_of(follower), worker_of(follower)
        first = dying.client()
        await asyncio.sleep(SOON_S)
        waiting = other.client()
        await asyncio.sleep(SOON_S)
        assert (first.holds(), waiting.holds()) == ("a", None)
        dying.die()
        await asyncio.sleep(SOON_S)
        assert waiting.holds() == "a"
        assert len(dying.events.exits) == dying.session.cut == 1
        await closed(dying, other)


@virtual
async def test_requests_of_workers_survive_the_death_of_the_leader() -> None:
    async with world(3) as found:
        dead = found.leader
        workers = [worker_of(one) for one in found.followers]
        running = workers[0].client()
        await asyncio.sleep(SOON_S)
        waiting = workers[1].client()
        await asyncio.sleep(SOON_S)
        assert (running.holds(), waiting.holds()) == ("a", None)
        assert running.lease is not None
        running.lease.apply(Started(running.lease.grant.lease), now())
        running.lease.apply(Committed(running.lease.grant.lease), now())
        found.members.remove(dead)
        await dead.die()
        await asyncio.sleep(2 * LOCK_S)
        assert found.leader is not dead
        assert (running.holds(), waiting.holds()) == ("a", None), "the new leader knows of the running lease"
        await running.done()
        await asyncio.sleep(SOON_S)
        assert waiting.holds() == "a"
        await closed(*workers)


@pytest.mark.slow
async def test_members_with_worker_processes_answer() -> None:
    async with members(2, FAST, workers=2, fixed_limit=1) as found:
        answers = await asyncio.gather(*(one.chat(body) for one in found for body in (HELLO, STREAM) * 4))
        assert [answer.status for answer in answers] == [200] * 16
        assert all(one.app.supervisor is not None for one in found)
