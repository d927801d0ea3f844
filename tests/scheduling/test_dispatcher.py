"""The async shell on a virtual clock: no sockets, no sleeping, and every turn of the loop always the same."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from llmproxy.core import scheduling_pass
from llmproxy.core.domain import CRITICAL, SHEDDABLE, AdmissionKind, Outcome, Reading, Refused, Trouble, Usage, Verdict
from llmproxy.core.lease_events import Progress, Started
from llmproxy.core.placement.policy import make
from llmproxy.core.pools import Pools
from llmproxy.lifecycle.paced import CALLS
from llmproxy.scheduling.dispatcher import Dispatcher
from tests.core.make import DEFAULTS, listing, request
from tests.dispatching import SETTINGS, Client, Passes, dispatcher, emptied, empty, holding, now, turns, virtual

# --- admit and grant --------------------------------------------------------------------------------------------------


@emptied(a=1)
async def test_a_request_is_lent_a_backend_and_gives_it_back(one: Dispatcher) -> None:
    async with holding(one, request()) as lease:
        assert lease.backend == "a"
        assert one.leases == 1
        assert one.pools.views(now())["a"].load == 1
        lease.apply(Started(lease.grant.lease), now())
        lease.apply(Progress(lease.grant.lease, 5), now())
        lease.verdict, lease.usage = Verdict.SERVED, Usage(10, 5)


@emptied(a=1)
async def test_one_waits_until_another_leaves(one: Dispatcher) -> None:
    first, second = Client(one), Client(one)
    await turns()
    assert (first.holds(), second.holds()) == ("a", None)
    await asyncio.sleep(5.0)
    await first.done()
    await turns()
    assert second.lease is not None
    assert second.lease.grant.at_s == 5.0
    await second.done()


@emptied(replace(DEFAULTS, queue=replace(DEFAULTS.queue, no_backend_wait_s=0.0)), a=1)
async def test_a_refusal_at_the_door_leaves_nothing_behind(one: Dispatcher) -> None:
    one.troubled("a", Trouble.UNHEALTHY, "503")
    with pytest.raises(Refused) as caught:
        async with holding(one, request()):
            pytest.fail("it was admitted")
    assert caught.value.outcome is Outcome.REJECTED_NO_BACKENDS


# --- time -------------------------------------------------------------------------------------------------------------


@emptied(a=1)
async def test_a_deadline_ends_the_wait_at_its_instant(one: Dispatcher) -> None:
    holder = Client(one)
    await turns()
    with pytest.raises(Refused) as caught:
        async with holding(one, request(deadline_s=7.25)):
            pytest.fail("it was admitted")
    assert now() == 7.25
    assert caught.value.outcome is Outcome.EXPIRED
    assert caught.value.retry_after_s is not None
    await holder.done()


@emptied(a=1)
async def test_a_request_that_expires_with_no_backend_up_says_so(one: Dispatcher) -> None:
    holder, waiting = Client(one), Client(one)
    await turns()
    one.troubled("a", Trouble.UNHEALTHY, "503")
    await asyncio.sleep(30.0)
    await turns()
    assert waiting.refused is not None
    assert waiting.refused.outcome is Outcome.EXPIRED_NO_BACKENDS
    assert "No backend of `base` came up" in waiting.refused.message
    await holder.done()


@virtual
async def test_an_empty_room_sets_no_timer() -> None:
    one = dispatcher(a=1)
    async with holding(one, request()) as lease:
        lease.verdict = Verdict.SERVED
    one.observe("a", Reading(now()))
    await turns()
    assert one._timer is None
    empty(one)


@virtual
async def test_closing_stops_the_timer() -> None:
    one = dispatcher(a=1)
    holder, waiting = Client(one), Client(one)
    await turns()
    timer = one._timer
    assert timer is not None
    one.close()
    assert timer.cancelled()
    waiting.task.cancel()
    await holder.done()


@virtual
async def test_a_first_token_lets_the_next_prompt_go_without_any_other_event() -> None:
    one = dispatcher(None, DEFAULTS, a=64)
    client = partial(Client, one, stream=True, prompt_tokens=8_000)
    first = client()
    await turns()
    assert first.lease is not None
    await asyncio.sleep(0.5)
    first.lease.apply(Started(first.lease.grant.lease), now())
    second, third = client(), client()
    await turns()
    assert (second.holds(), third.holds()) == ("a", None)
    assert second.lease is not None
    await asyncio.sleep(0.01)
    second.lease.apply(Started(second.lease.grant.lease), now())
    await turns()
    assert third.holds() == "a"
    for each in (first, second, third):
        await each.done()
    await turns()
    empty(one)


# --- coalescing -------------------------------------------------------------------------------------------------------


@virtual
async def test_the_events_of_one_turn_are_one_decision() -> None:
    passes = Passes()
    one = dispatcher(passes, a=50)
    await turns()
    passes.count = 0
    clients = [Client(one) for _ in range(40)]
    one.observe("a", Reading(now()))
    one.answered("a")
    await turns()
    assert all(client.lease is not None for client in clients)
    assert passes.count == 1
    passes.count = 0
    for client in clients:
        client.leave.set()
    await turns()
    assert passes.count == 1
    empty(one)


@virtual
async def test_a_mass_release_is_spread_over_turns() -> None:
    passes = Passes()
    one = dispatcher(passes, a=1000)
    one.troubled("a", Trouble.UNHEALTHY, "503")
    clients = [Client(one) for _ in range(3 * scheduling_pass.PASS_MAX)]
    await turns()
    assert one.leases == 0
    one.answered("a")
    await asyncio.sleep(0)
    assert one.leases == scheduling_pass.PASS_MAX
    await turns()
    assert one.leases == len(clients)
    assert now() == 0.0
    for client in clients:
        client.leave.set()
    await turns()
    empty(one)


@virtual
async def test_a_lone_request_with_room_waits_for_no_turn() -> None:
    one = dispatcher(a=2)
    alone = Client(one)
    await asyncio.sleep(0)
    assert alone.holds() == "a"
    # Where others are decided about in this turn, all of them are decided about together: the higher band goes first.
    low, high = Client(one), Client(one, band=CRITICAL)
    await asyncio.sleep(0)
    await turns()
    assert (low.holds(), high.holds()) == ("a", None)
    later_low, later_high = Client(one), Client(one, band=CRITICAL)
    await turns()
    await low.done()
    await turns()
    assert (later_low.holds(), high.holds(), later_high.holds()) == (None, "a", None)
    for client in (alone, high, later_high, later_low):
        await client.done()
    empty(one)


# --- polls ------------------------------------------------------------------------------------------------------------


@virtual
async def test_new_backend_takes_waiting_requests() -> None:
    one = Dispatcher(Pools(SETTINGS, {"a": 1, "b": 1}, {}, partial(make, "least_request", Random(0))))
    one.answered("a")
    one.listed("a", listing())
    holder, waiting = Client(one), Client(one)
    await turns()
    assert waiting.holds() is None
    one.answered("b")
    one.listed("b", listing())
    await turns()
    assert waiting.holds() == "b"
    await holder.done()
    await waiting.done()
    await turns()
    empty(one)


@emptied(a=1, b=1)
async def test_a_dead_backend_revokes_its_leases_and_no_others(one: Dispatcher) -> None:
    clients = [Client(one), Client(one)]
    await turns()
    cut: list[str] = []
    for client in clients:
        assert client.lease is not None
        client.lease.on_cut = lambda backend=client.lease.backend: cut.append(backend)
    one.troubled("a", Trouble.REFUSED, "refused")
    await turns()
    assert cut == []
    one.troubled("a", Trouble.REFUSED, "refused")
    await turns()
    assert cut == ["a"]
    assert {client.lease.backend: client.lease.revoked for client in clients if client.lease} == {"a": True, "b": False}
    assert one.leases == 2, "the block still has to be left"
    for client in clients:
        await client.done()


@emptied(a=10 * CALLS)
async def test_the_leases_of_a_dead_backend_end_in_many_turns(one: Dispatcher) -> None:
    clients = [Client(one) for _ in range(10 * CALLS)]
    await turns()
    cut: list[Client] = []
    for client in clients:
        assert client.lease is not None
        client.lease.on_cut = partial(cut.append, client)
    for _ in range(2):
        one.troubled("a", Trouble.REFUSED, "refused")
    ended = [0]
    while ended[-1] < len(clients):
        await asyncio.sleep(0)
        ended.append(len(cut))
    assert max(after - before for before, after in itertools.pairwise(ended)) <= CALLS
    for client in clients:
        await client.done()


@emptied(a=1)
async def test_a_lease_revoked_before_anybody_listens_says_so(one: Dispatcher) -> None:
    client = Client(one)
    await turns()
    for _ in range(2):
        one.troubled("a", Trouble.REFUSED, "refused")
    await turns()
    assert client.lease is not None
    assert client.lease.revoked
    await client.done()


@emptied(a=1)
async def test_a_preempted_lease_is_cut_and_its_request_comes_back_first(one: Dispatcher) -> None:
    batch = Client(one, stream=True, band=SHEDDABLE)
    await turns()
    other = Client(one, stream=True, band=SHEDDABLE)
    urgent = Client(one, band=CRITICAL)
    assert batch.lease is not None
    cut: list[bool] = []
    batch.lease.on_cut = lambda: cut.append(batch.lease is not None and batch.lease.preempted)
    await turns()
    assert cut == [True]
    assert not batch.lease.revoked
    batch.verdict = Verdict.PREEMPTED
    await batch.done()
    again = Client(one, batch.request, entry=AdmissionKind.PREEMPTED)
    await turns()
    assert [client.holds() for client in (urgent, again, other)] == ["a", None, None]
    await urgent.done()
    await turns()
    assert [client.holds() for client in (again, other)] == ["a", None]
    await again.done()
    await other.done()
