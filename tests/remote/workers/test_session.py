"""Sessions of workers: clients that disconnect, leases that are revoked, and workers that die."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, Outcome, Trouble, Usage, Verdict
from llmproxy.core.settings import UsageLimit
from llmproxy.scheduling.dispatcher import Dispatcher
from tests.core.make import DEFAULTS, request
from tests.dispatching import SETTINGS, Client, dispatcher, holding, now, turns, virtual
from tests.remote.workers.link import ENOUGH, WorkerLink, finished, leased, linked, nothing_left, refused

# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(12))
@linked
async def test_a_client_may_leave_in_any_turn(one: Dispatcher, line: WorkerLink, after: int) -> None:
    """From before its request is heard of until it holds a lease: every turn of the loop on the way is tried."""
    client = line.client()
    await turns(after)
    client.task.cancel()
    with suppress(asyncio.CancelledError):
        await client.task
    await nothing_left(one, line)
    assert not line.events.exits


@linked
async def test_a_client_that_waits_and_leaves_is_not_granted_anything(one: Dispatcher, line: WorkerLink) -> None:
    ends = finished(one)
    holder, waiting = line.client(), line.client()
    await turns(ENOUGH)
    waiting.task.cancel()
    await turns(ENOUGH)
    assert one.pools.queued().get(DEFAULT, (0, 0)) == (0, 0)
    await holder.done()
    await nothing_left(one, line)
    assert ends == [(Verdict.SERVED, None)]


@linked
async def test_a_cancelled_lease_counts_as_left_by_its_client(one: Dispatcher, line: WorkerLink) -> None:
    ends = finished(one)
    client = line.client()
    await turns(ENOUGH)
    client.task.cancel()
    await nothing_left(one, line)
    assert ends == [(Verdict.CLIENT_GONE, None)]


@virtual
async def test_a_request_ends_after_its_lease() -> None:
    """A limit counts expected tokens until the lease reports the used ones. In the other order it would lose them."""
    limit = UsageLimit(tokens_per_min=1_000.0)
    one = dispatcher(settings=replace(DEFAULTS, capacity=SETTINGS.capacity, limits={"tenant:t": limit}), a=1)
    line = WorkerLink(one)
    asked = request(limits=("tenant:t",), prompt_tokens=100, output_tokens=100)
    async with holding(line.remote, asked) as lease:
        lease.verdict, lease.usage = Verdict.SERVED, Usage(300, 200)
    line.remote.ended(asked, None)
    await nothing_left(one, line)
    assert one.pools.snapshot(now()).limits[0].tokens_left == pytest.approx(500.0, abs=1.0)


# --- withdrawn requests -----------------------------------------------------------------------------------------------


@linked
async def test_a_backend_that_is_gone_cuts_the_lease_in_its_worker(one: Dispatcher, line: WorkerLink) -> None:
    cuts = list[bool]()
    client = line.client()
    lease = await leased(client)
    lease.on_cut = lambda: cuts.append(lease.revoked)
    for _ in range(2):
        one.troubled("a", Trouble.REFUSED, "nobody listens")
    await turns(ENOUGH)
    assert cuts == [True]
    assert (lease.revoked, lease.preempted) == (True, False)


@linked
async def test_a_preemption_is_reported_as_one(one: Dispatcher, line: WorkerLink) -> None:
    client = line.client(stream=True, band=SHEDDABLE)
    await turns(ENOUGH)
    critical = Client(one, band=CRITICAL)
    lease = await leased(client)
    assert (lease.revoked, lease.preempted) == (False, True)
    client.verdict = Verdict.PREEMPTED
    await client.done()
    await turns(ENOUGH)
    assert critical.holds() == "a"
    await critical.done()


@linked
async def test_a_drain_is_reported_and_cuts_nothing(one: Dispatcher, line: WorkerLink) -> None:
    client = line.client(stream=True)
    lease = await leased(client)
    one.leaves("a")
    await turns(ENOUGH)
    assert (lease.leaving, lease.hung, lease.revoked, lease.preempted) == (True, False, False, False)
    [held] = one._leases.values()
    held.cut(hung=True)
    await turns(ENOUGH)
    assert (lease.leaving, lease.hung, lease.revoked, lease.preempted) == (True, True, False, False)
    await client.done()


@linked
async def test_a_cut_that_comes_before_its_grant_is_known_is_not_lost(one: Dispatcher, line: WorkerLink) -> None:
    before, client = Client(one), line.client()
    await turns(ENOUGH)
    assert (before.holds(), client.holds()) == ("a", None)
    before.leave.set()
    while list(one._leases.values()) in ([], [before.lease]):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)
    # Granted in this turn: neither the task of the session nor the worker knows it.
    assert not line.session.server.leases
    [held] = one._leases.values()
    held.cut(revoked=True)
    assert (await leased(client)).revoked


# --- ends that nobody planned -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(12))
@virtual
async def test_a_worker_may_die_in_any_turn(after: int) -> None:
    """Whatever its requests were about to do: all that they held is free, and they are reported."""
    one = dispatcher(a=1)
    line, other = WorkerLink(one), WorkerLink(one)
    for _ in range(2):
        line.client()
    await turns(after)
    line.die()
    await turns(ENOUGH)
    assert line.session.gone.is_set()
    assert len(line.events.exits) == line.session.cut
    assert {ended.outcome for ended in line.events.exits} <= {Outcome.INTERNAL}
    assert (await leased(other.client())).backend == "a"
    await nothing_left(one, line, other)


@linked
async def test_requests_of_a_dead_worker_are_recorded_once(one: Dispatcher, line: WorkerLink) -> None:
    for i in range(3):
        line.client(label=f"r{i}", band=CRITICAL)
    await turns(ENOUGH)
    assert (line.session.server.open_requests, one.leases) == (3, 1)
    line.die()
    await turns(ENOUGH)
    exits = [(ended.request_id, ended.outcome, ended.band) for ended in line.events.exits]
    assert exits == [(f"r{i}", Outcome.INTERNAL, "critical") for i in range(3)]
    assert line.session.cut == 3


@linked
async def test_without_a_scheduler_every_request_is_refused(one: Dispatcher, line: WorkerLink) -> None:
    waiting = [line.client(), line.client()][1]
    await turns(ENOUGH)
    assert one.leases == 1
    line.down.abort()
    assert await refused(waiting) is Outcome.DRAINING
    assert await refused(line.client()) is Outcome.DRAINING
    assert (line.remote.draining, line.remote.granting) == (True, False)


@virtual
async def test_a_prompt_is_indexed_after_more_short_leases_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    one = dispatcher(a=2)
    line = WorkerLink(one)
    monkeypatch.setattr("llmproxy.remote.server.RETURNED_MAX", 2)
    cached: list[int] = []
    monkeypatch.setattr(one.pools, "cached", lambda _, number, *__: cached.append(number))
    long = line.client()
    grant = (await leased(long)).grant
    for _ in range(4):
        short = line.client()
        await leased(short)
        await short.done()
        await turns(ENOUGH)
    line.remote.cached(grant.request.pool, grant.lease, grant.placed.backend, (1, 2))
    await turns(ENOUGH)
    assert len(cached) == 1
    await nothing_left(one, line)


@virtual
async def test_a_lease_is_returned_if_its_client_cannot_be_updated() -> None:
    one, broken = dispatcher(a=1), [True]

    def update() -> None:
        if broken.pop():
            raise RuntimeError("a bug")

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    line = WorkerLink(one, settle=lambda: update() if broken else None)
    assert await refused(line.client()) is Outcome.INTERNAL
    assert (await leased(line.client())).backend == "a"
    await nothing_left(one, line)
