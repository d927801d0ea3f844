"""Waiting requests and running leases survive lost connections and changes of leader."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from llmproxy.core.domain import Outcome, Verdict
from llmproxy.core.lease_events import Progress, Started
from llmproxy.remote import messages
from llmproxy.remote.client import DISCOVERY_LAG_S, DISCOVERY_RETRY_S, NO_LEADER_RETRY_S, UNSENT_MAX
from llmproxy.remote.cluster.cluster import WITHOUT_LEADER_S
from llmproxy.remote.cluster.sessions import GRACE_S
from llmproxy.remote.link import SILENCE_S
from tests.core.make import request
from tests.dispatching import now, turns, virtual
from tests.remote.cluster.elections import LOCK_S
from tests.remote.cluster.virtual import World, world
from tests.remote.workers.link import finished

SOON_S = 0.05


# --- connections that break -------------------------------------------------------------------------------------------


@virtual
async def test_a_lease_lives_on_over_a_broken_connection() -> None:
    async with world(3) as found:
        client = found.followers[0].client()
        await asyncio.sleep(SOON_S)
        ends, lease = finished(found.leader.dispatcher), client.lease
        assert lease is not None
        lease.apply(Started(lease.grant.lease), now())
        found.break_connections()
        await asyncio.sleep(GRACE_S + 1.0)
        lease.apply(Progress(lease.grant.lease, 7), now())
        assert found.leader.dispatcher.leases == 1
        assert client.lease is lease
        await client.done()
        await asyncio.sleep(SOON_S)
        assert ends == [(Verdict.SERVED, None)]
        assert found.leader.dispatcher.leases == 0


@virtual
async def test_a_grant_that_was_lost_is_sent_again() -> None:
    async with world(3) as found:
        one, leader = found.followers[0], found.leader
        client = one.client()
        await asyncio.sleep(0.0015)
        assert leader.dispatcher.leases == 1
        assert client.lease is None
        found.cut(one, leader)
        found.break_connections()
        await asyncio.sleep(SOON_S)
        assert client.lease is None
        found.heal()
        await asyncio.sleep(5.0)
        assert client.holds() == "a"
        assert leader.dispatcher.leases == 1
        assert leader.dispatcher.granted.total() == 1


@virtual
async def test_a_grant_that_a_lost_member_did_not_hear_is_free_for_others() -> None:
    """It was made before anybody knew that the member hears nothing."""
    async with world(3) as found:
        leader, (deaf, other) = found.leader, found.followers
        holder = other.client()
        await asyncio.sleep(SOON_S)
        waits = deaf.client()
        await asyncio.sleep(SOON_S)
        later = other.client()
        await asyncio.sleep(SOON_S)
        found.cut(deaf, leader)
        await holder.done()
        await asyncio.sleep(1.0)
        assert leader.sessions[deaf.name].server.leases == 1
        assert later.holds() is None
        await asyncio.sleep(SILENCE_S)
        assert not leader.sessions[deaf.name].connected
        assert later.holds() == "a"
        assert waits.holds() is None
        found.heal()
        await asyncio.sleep(3.0)
        await later.done()
        await asyncio.sleep(SOON_S)
        assert waits.holds() == "a"


@virtual
async def test_lease_reported_late_stays_over_the_next_cut() -> None:
    async with world(3) as found:
        one, leader = found.followers[0], found.leader
        client = one.client()
        await asyncio.sleep(0.0025)
        assert client.holds() == "a"
        found.cut(one, leader)
        found.break_connections()
        await asyncio.sleep(SOON_S)
        found.heal()
        await asyncio.sleep(2.0)
        session = leader.sessions[one.name]
        assert session.connected
        found.cut(one, leader)
        await asyncio.sleep(SILENCE_S + 2.0)
        assert not leader.sessions[one.name].connected
        assert session.server.leases == 1


@virtual
async def test_a_lost_member_is_granted_nothing_until_it_is_back_and_has_its_turn_then() -> None:
    async with world(3) as found:
        leader, (lost, other) = found.leader, found.followers
        holder = other.client()
        await asyncio.sleep(SOON_S)
        waits = lost.client()
        await asyncio.sleep(SOON_S)
        found.cut(lost, leader)
        await asyncio.sleep(SILENCE_S + 2.0)
        assert not leader.sessions[lost.name].connected
        second, third = other.client(), other.client()
        await asyncio.sleep(SOON_S)
        await holder.done()
        await asyncio.sleep(SOON_S)
        assert second.holds() == "a"
        found.heal()
        await asyncio.sleep(3.0)
        await second.done()
        await asyncio.sleep(SOON_S)
        assert waits.holds() == "a", "it arrived before the third"
        assert third.holds() is None


@virtual
async def test_a_lease_that_was_given_back_during_a_cut_is_given_back_after() -> None:
    async with world(3) as found:
        one, leader = found.followers[0], found.leader
        client = one.client()
        await asyncio.sleep(SOON_S)
        ends = finished(leader.dispatcher)
        found.cut(one, leader)
        await asyncio.sleep(5.0)
        assert not one.cluster.has_leader
        await client.done()
        await asyncio.sleep(1.0)
        assert ends == []
        found.heal()
        await asyncio.sleep(3.0)
        assert ends == [(Verdict.SERVED, None)]


@virtual
async def test_messages_lost_with_a_connection_do_not_hold_a_lease_for_ever() -> None:
    """The ends of a lease and of its request were sent before the loss of the connection was known."""
    async with world(3) as found:
        one, leader = found.followers[0], found.leader
        client = one.client()
        await asyncio.sleep(SOON_S)
        found.cut(one, leader)
        await client.done()
        one.leasing.ended(client.request, True)
        one.clients.clear()
        await asyncio.sleep(5.0)
        found.heal()
        await asyncio.sleep(2.0)
        session = leader.sessions[one.name]
        assert session.connected
        assert (session.server.leases, session.server.open_requests) == (0, 0)


@virtual
async def test_a_cut_that_could_not_be_said_is_said_again() -> None:
    async with world(3) as found:
        one, leader = found.followers[0], found.leader
        client = one.client()
        await asyncio.sleep(SOON_S)
        assert client.lease is not None
        cuts: list[float] = []
        client.lease.on_cut = lambda: cuts.append(now())
        found.cut(one, leader)
        [lent] = leader.sessions[one.name].server._lent.values()
        lent.lease.cut(revoked=True)
        await asyncio.sleep(5.0)
        assert not cuts
        found.heal()
        await asyncio.sleep(3.0)
        assert client.lease.revoked
        found.break_connections()
        await asyncio.sleep(3.0)
        assert len(cuts) == 1, "it is not cut a second time"


@virtual
async def test_a_client_may_leave_while_its_member_is_cut_off() -> None:
    async with world(3) as found:
        one, leader = found.followers[0], found.leader
        holder, waiting = one.client(), one.client()
        await asyncio.sleep(SOON_S)
        found.cut(one, leader)
        await asyncio.sleep(5.0)
        for client in (holder, waiting):
            client.task.cancel()
        await asyncio.sleep(1.0)
        found.heal()
        await asyncio.sleep(3.0)
        assert leader.dispatcher.leases == 0


@pytest.mark.sampled(7)
@pytest.mark.parametrize("at_ms", [x / 4 for x in range(24)])
@pytest.mark.parametrize("what", ["leaves", "breaks", "both"])
@virtual
async def test_a_grant_may_meet_anything_in_any_turn(at_ms: float, what: str) -> None:
    """The client leaves, the connection breaks, or both, in every moment on the way to a lease and after it."""
    async with world(2) as found:
        one = found.followers[0]
        client = one.client()
        await asyncio.sleep(at_ms / 1000)
        if what != "leaves":
            found.break_connections()
        if what != "breaks":
            client.task.cancel()
        await asyncio.sleep(2.0)
        assert client.task.cancelled() or client.holds() == "a"
        assert found.leader.dispatcher.leases == one.leasing.running
        next_one = one.client()
        await client.done()
        await asyncio.sleep(1.0)
        assert next_one.holds() == "a"


@virtual
async def test_member_that_is_gone_for_good_frees_its_leases() -> None:
    async with world(3, seats=2) as found:
        gone, other = found.followers
        for _ in range(3):
            gone.client()
        await asyncio.sleep(SOON_S)
        waits = other.client()
        found.members.remove(gone)
        died_s = now()
        await gone.die()
        await asyncio.sleep(GRACE_S - 1.0)
        assert waits.holds() is None, "its answers may go on for all that is known"
        await asyncio.sleep(2.0)
        assert waits.holds() == "a"
        assert waits.lease is not None
        assert waits.lease.grant.at_s == pytest.approx(died_s + GRACE_S, abs=0.1)
        assert gone.name not in found.leader.sessions
        assert found.leader.dispatcher.leases == 1


@virtual
async def test_returning_member_reports_its_running_leases() -> None:
    async with world(3) as found:
        one, leader = found.followers[0], found.leader
        client = one.client()
        await asyncio.sleep(SOON_S)
        found.cut(one, leader)
        await asyncio.sleep(GRACE_S + 5.0)
        assert leader.dispatcher.leases == 0
        found.heal()
        await asyncio.sleep(3.0)
        assert client.holds() == "a"
        assert leader.dispatcher.leases == 1


# --- another leader ---------------------------------------------------------------------------------------------------


@virtual
async def test_next_leader_books_running_and_grants_waiting_requests() -> None:
    async with world(3, seats=2) as found:
        old = found.leader
        one, other = found.followers
        runs = [one.client(), old.client()]
        await asyncio.sleep(SOON_S)
        late = other.client()
        await asyncio.sleep(SOON_S)
        later = one.client()
        await asyncio.sleep(SOON_S)
        arrived = late.request.arrived_s
        old.cluster.begin_shutdown()
        await asyncio.sleep(2.0)
        new = found.leader
        assert new is not old
        assert new.dispatcher.leases == 2
        assert len(new.dispatcher.pools.backends["a"].bookings) == 2
        assert old.dispatcher.leases == 0
        asked, _ = new.dispatcher._waiting[late.request.id]
        assert asked.arrived_s == pytest.approx(arrived, abs=0.05)
        assert (late.lease, later.lease) == (None, None)
        await runs[0].done()
        await asyncio.sleep(SOON_S)
        assert late.holds() == "a"
        assert later.lease is None
        assert runs[1].holds() == "a"
        await runs[1].done()


@virtual
async def test_a_leader_that_dies_takes_nothing_with_it() -> None:
    async with world(3) as found:
        dead = found.leader
        one, other = found.followers
        runs = one.client()
        await asyncio.sleep(SOON_S)
        waits = other.client()
        await asyncio.sleep(SOON_S)
        found.members.remove(dead)
        await dead.die()
        await asyncio.sleep(LOCK_S + 1.0)
        assert found.leader.cluster.last_gap_s == pytest.approx(LOCK_S, abs=1.0)
        assert runs.holds() == "a"
        assert waits.lease is None, "no grant beyond the seats"
        await runs.done()
        await asyncio.sleep(SOON_S)
        assert waits.holds() == "a"


@virtual
async def test_new_leader_waits_for_all_expected_members() -> None:
    """The last member to report has the only seat."""
    async with world(3) as found:
        old, (one, other) = found.leader, found.followers
        runs, waits = one.client(), other.client()
        await asyncio.sleep(SOON_S)
        found.cut(one, other)
        old.cluster.begin_shutdown()
        await asyncio.sleep(0.35)
        led = now()
        new = found.leader
        assert new in (one, other)
        assert waits.lease is None or new is one
        found.heal()
        await asyncio.sleep(5.0)
        assert runs.holds() == "a"
        assert led


@virtual
async def test_new_leader_waits_for_unknown_members() -> None:
    """As where a process is killed and started again before its lock has ended."""
    async with world(2) as found:
        dead, [other] = found.leader, found.followers
        runs = other.client()
        await asyncio.sleep(0.1)
        assert runs.holds() == "a"
        other.cluster.begin_shutdown()
        found.members.remove(dead)
        await dead.die()
        again = await found.member(dead.name, incarnation="2")
        waits = again.client()
        await asyncio.sleep(LOCK_S + 1.0)
        assert found.leader is again
        assert (waits.holds(), len(again.dispatcher.pools.backends["a"].bookings)) == (None, 1)


@virtual
async def test_a_grant_by_a_leader_of_the_past_is_ignored() -> None:
    async with world(3) as found:
        old, (one, _) = found.leader, found.followers
        link = one.link
        assert link is not None
        seat = old.client()
        await asyncio.sleep(SOON_S)
        client = one.client()
        await asyncio.sleep(SOON_S)
        old.cluster.begin_shutdown()
        await asyncio.sleep(2.0)
        assert one.cluster.is_leader or one.link is not link
        [call] = one.leasing._waiting
        session = found.leader.sessions[old.name]
        [lent] = session.server._lent.values()
        grant = lent.lease.grant
        late = messages.LeaseGranted(call, client.request.stage, grant.placed, 0.0, 0, grant.why, 0.0)
        one.cluster.handle(link, late)
        assert client.lease is None
        await seat.done()


@virtual
async def test_unsent_events_go_to_the_next_leader() -> None:
    async with world(2) as found:
        one = found.followers[0]
        found.cut(one, found.leader)
        await asyncio.sleep(5.0)
        for number in range(UNSENT_MAX + 50):
            one.leasing.response_stored(f"r{number}", "a", "t")
        assert len(one.leasing._unsent) == UNSENT_MAX
        found.heal()
        await asyncio.sleep(3.0)
        assert len(found.leader.events.made) == UNSENT_MAX
        assert len(one.leasing._unsent) == 0


# --- without a leader -------------------------------------------------------------------------------------------------


def nobody_leads(found: World) -> None:
    found.store.away = True


@virtual
async def test_without_a_leader_requests_are_held_and_then_refused() -> None:
    async with world(2) as found:
        nobody_leads(found)
        await asyncio.sleep(LOCK_S)
        assert not found.members[0].cluster.has_leader
        unled_s = found.members[0].cluster._leader_lost_s
        client = found.members[0].client()
        await asyncio.sleep(WITHOUT_LEADER_S - 1.0)
        assert found.members[0].leasing.waiting == 1
        await asyncio.sleep(LOCK_S + 2.0)
        assert client.refused is not None
        assert client.refused.outcome is Outcome.REJECTED_NO_BACKENDS
        assert client.refused.retry_after_s == NO_LEADER_RETRY_S
        assert now() > unled_s + LOCK_S + WITHOUT_LEADER_S
        late = found.members[0].client()
        await asyncio.sleep(0.2)
        assert late.refused is not None, "nobody waits for long any more"
        found.store.away = False
        await asyncio.sleep(1.0)
        again = found.members[0].client()
        await asyncio.sleep(1.0)
        assert again.holds() == "a"


@virtual
async def test_a_deadline_without_a_leader_is_kept() -> None:
    async with world(2) as found:
        nobody_leads(found)
        await asyncio.sleep(LOCK_S)
        client = found.members[0].client(request(arrived_s=now(), deadline_s=now() + 1.0))
        await asyncio.sleep(1.2)
        assert client.refused is not None
        assert client.refused.outcome is Outcome.EXPIRED


@virtual
async def test_member_that_drains_without_a_leader_refuses_waiting_requests() -> None:
    async with world(2) as found:
        one = found.followers[0]
        nobody_leads(found)
        await asyncio.sleep(LOCK_S)
        client = one.client()
        await turns()
        one.leasing.drain()
        await turns()
        assert client.refused is not None
        assert client.refused.outcome is Outcome.DRAINING
        late = one.client()
        await turns()
        assert late.refused is not None
        found.store.away = False


@virtual
async def test_a_leader_that_drains_admits_requests_of_other_members() -> None:
    async with world(2) as found:
        found.leader.leasing.drain(finish_waiting=True)
        own, other = found.leader.client(), found.followers[0].client()
        await asyncio.sleep(SOON_S)
        assert own.refused is not None
        assert other.holds() == "a"


@virtual
async def test_member_that_finishes_waiting_requests_gets_no_new_ones() -> None:
    async with world(2) as found:
        one = found.followers[0]
        seat, waits = found.leader.client(), one.client()
        await asyncio.sleep(SOON_S)
        one.leasing.drain(finish_waiting=True)
        late = one.client()
        await asyncio.sleep(SOON_S)
        assert late.refused is not None
        await seat.done()
        await asyncio.sleep(SOON_S)
        assert waits.holds() == "a"


# --- backends that not everybody knows --------------------------------------------------------------------------------


@virtual
async def test_a_grant_for_an_unknown_backend_is_asked_for_again_without_it() -> None:
    async with world(2, seats=2, backends="ab") as found:
        one = found.followers[0]
        one.backends.discard("a")
        clients = [one.client(), one.client()]
        await asyncio.sleep(SOON_S)
        assert [client.holds() for client in clients] == ["b", "b"]
        assert found.leader.dispatcher.leases == 2


@virtual
@pytest.mark.parametrize("found_s", [1.0, None])
async def test_a_grant_for_the_only_backend_waits_until_this_member_has_found_it(found_s: float | None) -> None:
    async with world(2) as found:
        one = found.followers[0]
        one.backends.discard("a")
        client = one.client()
        await asyncio.sleep(found_s or DISCOVERY_LAG_S + 1.0)
        if found_s is None:
            assert client.refused is not None
        else:
            assert (client.holds(), client.refused) == (None, None)
        one.backends.add("a")
        await asyncio.sleep(DISCOVERY_RETRY_S + SOON_S)
        assert client.holds() == (None if found_s is None else "a")


@virtual
async def test_client_may_leave_while_its_request_is_asked_again() -> None:
    async with world(2, backends="ab") as found:
        one = found.followers[0]
        one.backends.clear()
        client = one.client()
        for _ in range(12):
            await asyncio.sleep(0.0005)
        client.task.cancel()
        await asyncio.sleep(SOON_S)
        assert found.leader.dispatcher.leases == 0
        one.backends.update("ab")


@virtual
async def test_answers_for_unknown_calls_are_ignored() -> None:
    async with world(2) as found:
        leasing = found.followers[0].leasing
        client = found.followers[0].client()
        await asyncio.sleep(SOON_S)
        [run] = leasing._runs.values()
        grant: Any = run.lease.grant
        leasing.handle(messages.LeaseGranted(99, grant.request.stage, grant.placed, 0.0, 0, grant.why, 0.0))
        leasing.handle(messages.CallRefused(98, Outcome.EXPIRED, "", None))
        leasing.handle(messages.LeaseCut(97, revoked=True))
        await turns()
        assert leasing.running == 1
        assert client.holds() == "a"


@virtual
async def test_a_grant_that_comes_twice_in_one_turn_is_one() -> None:
    async with world(2) as found:
        one = found.followers[0]
        seat, client = found.leader.client(), one.client()
        await asyncio.sleep(SOON_S)
        assert seat.lease is not None
        [call], grant = one.leasing._waiting, seat.lease.grant
        granted = messages.LeaseGranted(call, client.request.stage, grant.placed, 0.0, 0, grant.why, 0.0)
        for _ in range(2):
            one.leasing.handle(granted)
        await turns()
        assert client.holds() == "a"
        await seat.done()


@virtual
async def test_a_new_leader_that_does_not_know_a_backend_lets_its_answers_go_on() -> None:
    async with world(2) as found:
        old = found.leader
        new = found.followers[0]
        client = old.client()
        await asyncio.sleep(SOON_S)
        new.dispatcher.pools.remove_backend("a")
        old.cluster.begin_shutdown()
        await asyncio.sleep(2.0)
        assert new.cluster.is_leader
        assert new.dispatcher.leases == 0
        assert client.lease is not None
        client.lease.apply(Started(client.lease.grant.lease), now())
        client.lease.apply(Progress(client.lease.grant.lease, 3), now())
        await client.done()
        await asyncio.sleep(1.0)
        assert new.dispatcher.leases == 0
