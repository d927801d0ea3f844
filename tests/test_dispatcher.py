"""The async shell on a virtual clock: no sockets, no sleeping, and every turn of the loop always the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from llmproxy.core import scheduler
from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import CRITICAL, DEFAULT, SHEDDABLE, Entry, Outcome, Reading, Refused, Trouble, Usage, Verdict
from llmproxy.core.placement import make
from llmproxy.core.pools import Pools
from llmproxy.core.queueing.fairness.fair_share import FairShare
from llmproxy.core.settings import QueueSettings, Settings
from llmproxy.dispatcher import Dispatcher
from tests.core.make import listing, request
from tests.dispatching import SETTINGS, Client, Passes, dispatcher, empty, now, turns, virtual

# --- admit and grant --------------------------------------------------------------------------------------------------


@virtual
async def test_a_request_is_lent_a_backend_and_gives_it_back() -> None:
    one = dispatcher(a=1)
    async with one.admit(request()) as lease:
        assert lease.backend == "a"
        assert one.leases == 1
        assert one.pools.views(now())["a"].load == 1
        lease.started()
        lease.progress(5)
        lease.verdict, lease.usage = Verdict.SERVED, Usage(10, 5)
    await turns()
    empty(one)


@virtual
async def test_one_waits_until_another_leaves() -> None:
    one = dispatcher(a=1)
    first, second = Client(one), Client(one)
    await turns()
    assert (first.holds(), second.holds()) == ("a", None)
    await asyncio.sleep(5.0)
    await first.done()
    await turns()
    assert second.lease is not None
    assert second.lease.grant.at_s == 5.0
    await second.done()
    await turns()
    empty(one)


@virtual
async def test_the_higher_band_goes_first_however_late_it_came() -> None:
    one = dispatcher(a=1)
    holder = Client(one)
    await turns()
    late = Client(one, band=DEFAULT)
    await asyncio.sleep(1.0)
    critical = Client(one, band=CRITICAL)
    await turns()
    await holder.done()
    await turns()
    assert critical.lease is not None
    assert late.lease is None
    await critical.done()
    await late.done()
    await turns()
    empty(one)


@virtual
async def test_a_refusal_at_the_door_leaves_nothing_behind() -> None:
    one = dispatcher(settings=Settings(queue=QueueSettings(hold_s=0.0)), a=1)
    one.troubled("a", Trouble.UNHEALTHY, "503")
    with pytest.raises(Refused) as caught:
        async with one.admit(request()):
            pytest.fail("it was let in")
    assert caught.value.outcome is Outcome.REJECTED_NO_BACKENDS
    await turns()
    empty(one)


@virtual
async def test_a_backend_that_failed_is_excluded_on_the_next_lap() -> None:
    one = dispatcher(a=4, b=4)
    asked = request()
    async with one.admit(asked) as first:
        first.verdict = Verdict.FAILED
    async with one.admit(asked, frozenset({first.backend}), Entry.RETRY) as second:
        assert {first.backend, second.backend} == {"a", "b"}
    await turns()
    empty(one)


# --- time -------------------------------------------------------------------------------------------------------------


@virtual
async def test_a_deadline_ends_the_wait_at_its_instant() -> None:
    one = dispatcher(a=1)
    holder = Client(one)
    await turns()
    with pytest.raises(Refused) as caught:
        async with one.admit(request(deadline_s=7.25)):
            pytest.fail("it was let in")
    assert now() == 7.25
    assert caught.value.outcome is Outcome.EXPIRED
    assert caught.value.retry_after_s is not None
    await holder.done()
    await turns()
    empty(one)


@virtual
async def test_a_request_that_expires_with_no_backend_up_says_so() -> None:
    one = dispatcher(a=1)
    holder, waiting = Client(one), Client(one)
    await turns()
    one.troubled("a", Trouble.UNHEALTHY, "503")
    await asyncio.sleep(30.0)
    await turns()
    assert waiting.refused is not None
    assert waiting.refused.outcome is Outcome.EXPIRED_NO_BACKENDS
    assert "No backend of `base` came up" in waiting.refused.message
    await holder.done()
    await turns()
    empty(one)


@virtual
async def test_a_rest_after_failures_ends_by_itself() -> None:
    one = dispatcher(a=1)
    async with one.admit(request()) as lease:
        lease.verdict = Verdict.CONNECT_FAILED
    async with one.admit(request()) as lease:
        assert now() == 1.0
        lease.verdict = Verdict.SERVED
    await turns()
    empty(one)


@virtual
async def test_an_empty_room_sets_no_timer() -> None:
    one = dispatcher(a=1)
    async with one.admit(request()) as lease:
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
    clients = [Client(one) for _ in range(3 * scheduler.PASS_MAX)]
    await turns()
    assert one.leases == 0
    one.answered("a")
    await asyncio.sleep(0)
    assert one.leases == scheduler.PASS_MAX
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
async def test_a_backend_that_appears_takes_what_waits() -> None:
    one = Dispatcher(Pools(SETTINGS, {"a": 1, "b": 1}, {}, partial(make, "blend", Random(0))))
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


@virtual
async def test_a_dead_backend_revokes_its_leases_and_no_others() -> None:
    one = dispatcher(a=1, b=1)
    clients = [Client(one), Client(one)]
    await turns()
    told: list[str] = []
    for client in clients:
        assert client.lease is not None
        client.lease.on_cut = lambda backend=client.lease.backend: told.append(backend)
    one.troubled("a", Trouble.REFUSED, "refused")
    await turns()
    assert told == []
    one.troubled("a", Trouble.REFUSED, "refused")
    await turns()
    assert told == ["a"]
    assert {client.lease.backend: client.lease.revoked for client in clients if client.lease} == {"a": True, "b": False}
    assert one.leases == 2, "the block still has to be left"
    for client in clients:
        await client.done()
    await turns()
    empty(one)


@virtual
async def test_a_lease_revoked_before_anybody_listens_says_so() -> None:
    one = dispatcher(a=1)
    client = Client(one)
    await turns()
    for _ in range(2):
        one.troubled("a", Trouble.REFUSED, "refused")
    await turns()
    assert client.lease is not None
    assert client.lease.revoked
    await client.done()
    await turns()
    empty(one)


@virtual
async def test_a_preempted_lease_is_cut_and_its_request_comes_back_first() -> None:
    one = dispatcher(a=1)
    batch = Client(one, stream=True, band=SHEDDABLE)
    await turns()
    other = Client(one, stream=True, band=SHEDDABLE)
    urgent = Client(one, band=CRITICAL)
    assert batch.lease is not None
    told: list[bool] = []
    batch.lease.on_cut = lambda: told.append(batch.lease is not None and batch.lease.preempted)
    await turns()
    assert told == [True]
    assert not batch.lease.revoked
    batch.verdict = Verdict.PREEMPTED
    await batch.done()
    again = Client(one, batch.request, entry=Entry.PREEMPTED)
    await turns()
    assert [client.holds() for client in (urgent, again, other)] == ["a", None, None]
    await urgent.done()
    await turns()
    assert [client.holds() for client in (again, other)] == ["a", None]
    await again.done()
    await other.done()
    await turns()
    empty(one)


# --- names that no backend serves yet ---------------------------------------------------------------------------------


def unread() -> Dispatcher:
    """A dispatcher whose only backend was configured and never read."""
    return Dispatcher(Pools(SETTINGS, {"a": 1}, {}, partial(make, "blend", Random(0))))


@virtual
async def test_a_name_is_waited_for_until_the_first_listing_knows_it() -> None:
    one = unread()
    task = asyncio.create_task(one.resolve("base", 5.0, 1))
    await asyncio.sleep(3.0)
    assert not task.done()
    one.answered("a")
    one.listed("a", listing())
    assert (await task).pool == "base"
    assert now() == 3.0


@virtual
async def test_a_name_is_waited_for_as_long_as_allowed() -> None:
    one = unread()
    with pytest.raises(Refused) as caught:
        await one.resolve("base", 5.0, 1)
    assert caught.value.outcome is Outcome.REJECTED_NO_BACKENDS
    assert now() == 5.0
    with pytest.raises(Refused):
        await one.resolve("base", 0.0, 1)
    assert now() == 5.0


@virtual
async def test_a_name_is_waited_for_less_before_any_backend_answered() -> None:
    settings = replace(SETTINGS, queue=replace(SETTINGS.queue, first_hold_s=2.0))
    one = Dispatcher(Pools(settings, {"a": 1, "b": 1}, {}, partial(make, "blend", Random(0))))
    with pytest.raises(Refused, match="No backend has answered since the start, so `other` is not known") as caught:
        await one.resolve("other", 5.0, 1)
    assert (caught.value.outcome, now()) == (Outcome.REJECTED_NO_BACKENDS, 2.0)
    assert caught.value.retry_after_s
    with pytest.raises(Refused):
        await one.resolve("other", 1.0, 1)
    assert now() == 3.0
    # The other one may still load what is asked for.
    one.answered("a")
    one.listed("a", listing())
    with pytest.raises(Refused, match="1 of 2 backends never answered so far"):
        await one.resolve("other", 5.0, 1)
    assert now() == 8.0


@virtual
async def test_a_drain_ends_the_wait_for_a_name() -> None:
    one = unread()
    task = asyncio.create_task(one.resolve("base", 5.0, 1))
    await turns()
    one.drain()
    with pytest.raises(Refused) as caught:
        await task
    assert caught.value.outcome is Outcome.DRAINING
    assert now() == 0.0


def looks(one: Dispatcher) -> list[str | None]:
    """The names that are looked up from now on."""
    seen: list[str | None] = []
    resolve = one.pools.catalogue.resolve

    def spy(name: str | None) -> Target:
        seen.append(name)
        return resolve(name)

    one.pools.catalogue.resolve = spy  # type: ignore[method-assign]
    return seen


@virtual
async def test_a_listing_wakes_only_requests_for_its_names() -> None:
    one = unread()
    one.pools.add_backend("b", 1)
    names: list[str | None] = ["base", "base", None, *(f"nobody-{i % 10}" for i in range(50))]
    tasks = [asyncio.create_task(one.resolve(name, 30.0, 1)) for name in names]
    await turns()
    seen = looks(one)
    one.expects_backends(False)
    one.reconsider()
    await turns()
    assert seen == [], "nothing has turned up"
    one.listed("a", listing())
    await turns()
    assert sorted(map(str, seen)) == ["None", "base", "base"]
    assert [(await task).pool for task in tasks[:3]] == ["base"] * 3
    for _ in range(3):
        one.listed("a", listing())
        await turns()
    assert len(seen) == 3, "nor does a listing that says nothing new"
    one.listed("b", listing())
    await turns()
    assert len(seen) == 53, "every backend was read: no name is going to turn up any more"
    for task in tasks[3:]:
        with pytest.raises(Refused, match="does not exist"):
            await task
    empty(one)


@virtual
async def test_a_promised_name_is_waited_for() -> None:
    one = unread()
    one.pools.catalogue.promised = frozenset({"sql"})
    task = asyncio.create_task(one.resolve("sql", 30.0, 1))
    await turns()
    seen = looks(one)
    for _ in range(3):
        one.listed("a", listing())
        await turns()
    assert seen == []
    one.listed("a", listing("sql"))
    assert (await task).adapter == "sql"
    empty(one)


@virtual
async def test_a_promise_that_is_taken_back_is_not_waited_for() -> None:
    one = unread()
    one.pools.catalogue.promised = frozenset({"sql"})
    one.listed("a", listing())
    task = asyncio.create_task(one.resolve("sql", 30.0, 1))
    await turns()
    one.pools.catalogue.promised = frozenset()
    one.reconsider()
    with pytest.raises(Refused, match="does not exist"):
        await task
    assert now() == 0.0


@virtual
async def test_only_so_many_names_are_waited_for() -> None:
    await names_waited_for(QueueSettings(requests_max=1))


@virtual
async def test_only_so_many_bytes_are_held_for_names() -> None:
    await names_waited_for(QueueSettings(bytes_max=1))


async def names_waited_for(bounds: QueueSettings) -> None:
    """One that may wait, and one that is too many."""
    settings = Settings(queue=bounds)
    one = Dispatcher(Pools(settings, {"a": 1}, {}, partial(make, "blend", Random(0))))
    first = asyncio.create_task(one.resolve("base", 5.0, 1))
    await turns()
    with pytest.raises(Refused):
        await one.resolve("base", 5.0, 1)
    assert now() == 0.0
    with pytest.raises(Refused):
        await first
    empty(one)


# --- drain ------------------------------------------------------------------------------------------------------------


@virtual
async def test_drain_refuses_requests_and_lets_leases_end() -> None:
    one = dispatcher(a=1)
    holder, waiting, leaving = Client(one), Client(one), Client(one)
    await turns()
    leaving.task.cancel()
    one.drain()
    assert one.draining
    late = Client(one)
    await turns()
    for client in (waiting, late):
        assert client.refused is not None
        assert client.refused.outcome is Outcome.DRAINING
        assert client.refused.retry_after_s
    assert leaving.task.cancelled()
    assert holder.lease is not None
    assert one.leases == 1
    await holder.done()
    await turns()
    empty(one)


@virtual
async def test_a_drain_may_serve_waiting_requests_until_called_again() -> None:
    one = dispatcher(a=1)
    holder, first, second = Client(one), Client(one), Client(one)
    await turns()
    one.drain(finish_waiting=True)
    late = Client(one)
    await turns()
    assert late.refused is not None
    assert late.refused.outcome is Outcome.DRAINING
    await holder.done()
    await turns()
    assert first.lease is not None
    one.drain()
    await turns()
    assert second.refused is not None
    await first.done()
    await turns()
    empty(one)


@virtual
async def test_drain_in_the_turn_of_a_grant_lets_the_grant_stand() -> None:
    one = dispatcher(a=1)
    client = Client(one)
    await asyncio.sleep(0)
    one._decide()
    one.drain()
    await turns()
    assert client.lease is not None
    await client.done()
    await turns()
    empty(one)


@virtual
async def test_a_policy_that_raises_leaves_no_request_waiting() -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    one = dispatcher(a=1)
    faults = iter([True, False, True])
    charge = FairShare.charge

    def faulty(self: FairShare, flow: str, cost: float) -> None:
        if next(faults, False):
            raise ValueError("a plugin's bug")
        charge(self, flow, cost)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FairShare, "charge", faulty)
        clients = [Client(one) for _ in range(3)]
        for client in clients:
            async with asyncio.timeout(5.0):
                while client.holds() is None:  # noqa: ASYNC110 - on a virtual clock
                    await asyncio.sleep(0.1)
            client.leave.set()
            await client.task
    assert [type(error) for error in told] == [ValueError], "the second one a moment later is counted alone"
    empty(one)


# --- past the waiting room --------------------------------------------------------------------------------------------


@virtual
async def test_what_goes_past_the_waiting_room_is_in_flight_and_no_load() -> None:
    one = dispatcher(a=1)
    cuts: list[str] = []
    with one.direct("a", lambda: cuts.append("first")), one.direct("a", lambda: cuts.append("second")):
        assert (one.in_flight("a"), one.pools.views(now())["a"].load) == (2, 0)
        async with one.admit(request()) as lease:
            assert (lease.backend, one.in_flight("a")) == ("a", 3), "it has taken nobody's place"
            lease.verdict = Verdict.SERVED
        emptied = asyncio.create_task(one.emptied("a"))
        await turns()
        assert not emptied.done()
        one.troubled("a", Trouble.TIMEOUT, "silence")
        assert cuts == [], "one that does not answer may still speak"
        for _ in range(2):
            one.troubled("a", Trouble.REFUSED, "nobody there")
        assert sorted(cuts) == ["first", "second"]
    await emptied
    assert one.in_flight("a") == 0
    await turns()
    empty(one)


@virtual
async def test_direct_requests_need_a_backend_and_no_drain() -> None:
    one = dispatcher(a=1)
    with one.direct("a", lambda: None):
        one.drain(finish_waiting=True)
        with pytest.raises(Refused) as refused, one.direct("a", lambda: None):
            raise AssertionError("it was let in")
        assert (refused.value.outcome, one.in_flight("a")) == (Outcome.DRAINING, 1)
    with pytest.raises(Refused, match="removed"), dispatcher(a=1).direct("b", lambda: None):
        raise AssertionError("it was let in")
