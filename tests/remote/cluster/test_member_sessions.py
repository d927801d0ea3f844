"""Members that join, are refused, reconnect, join late, or leave while they lead."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from llmproxy.core.domain import AdmissionKind, KnownCapacity, KnownLimit, Outcome, Refused
from llmproxy.core.lease_events import Progress, Returned, Started
from llmproxy.remote import messages
from llmproxy.remote.cluster import leasing, sessions
from llmproxy.remote.cluster.cluster import RESUME_WAIT_S
from llmproxy.remote.cluster.election import SEEK_S
from llmproxy.remote.cluster.hand_over import LEARNED_S
from llmproxy.remote.cluster.pages import PAGE_BYTES_MAX, cluster_status
from llmproxy.remote.cluster.sessions import CLAIMED_EPOCH_MAX, MemberSession, MemberSessions
from llmproxy.remote.link import (
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    SILENCE_S,
    TO_MEMBER,
    UNSENT_BYTES_MAX,
    Link,
    LocalLink,
    frame,
)
from llmproxy.remote.messages import (
    PROTOCOL,
    Hello,
    Learned,
    NotLeader,
    Ping,
    Resume,
    Resumed,
    Welcome,
    relative_to,
)
from llmproxy.scheduling.dispatcher import Dispatcher
from tests.core.make import request
from tests.dispatching import virtual
from tests.remote.cluster.elections import LOCK_S
from tests.remote.cluster.virtual import LATENCY_S, VirtualMember, World, world


class Stranger:
    """A connection to the leader without a member behind it. It records the received messages."""

    def __init__(self, found: World, name: str = "stranger") -> None:
        self.name = name
        self.heard: list[Any] = []
        self.lost = False
        self.link: Link[Any] = Link(TO_MEMBER, self.heard.append, self._lost, local=False)
        found.net.connect(name, found.leader.name, self.link, found.net.listening[found.leader.name]())

    def _lost(self) -> None:
        self.lost = True

    def hello(self, **given: Any) -> None:
        facts: dict[str, Any] = {"protocol": PROTOCOL, "version": "0", "name": self.name, "incarnation": "1",
                                 "address": "", "config": "config", "epoch": 0}  # fmt: skip
        self.link.send(Hello(**(facts | given)))

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def refused(self) -> str:
        await asyncio.sleep(0.1)
        [refusal] = self.of(NotLeader)
        assert not self.of(Welcome)
        assert self.lost
        return str(refusal.why)

    async def end(self) -> None:
        self.link.abort()
        await asyncio.sleep(0.1)


# --- handshakes -------------------------------------------------------------------------------------------------------


@virtual
async def test_hello_is_answered_with_welcome() -> None:
    async with world(2) as found:
        one = Stranger(found)
        one.hello()
        await asyncio.sleep(0.1)
        [welcome] = one.of(Welcome)
        assert welcome == Welcome(found.leader.cluster.epoch, found.leader.name, "0", "config")
        assert found.leader.cluster.members == ("m0", "m1", "stranger")
        await one.end()


@virtual
async def test_connection_that_begins_without_hello_is_refused_once() -> None:
    async with world(2) as found:
        one = Stranger(found)
        with capture_logs() as logs:
            for _ in range(5):
                one.link.send(Resumed())
            assert await one.refused() == "the first message is no Hello"
        assert [line["event"] for line in logs] == ["cluster_member_refused"]


@virtual
async def test_repeated_refusals_are_logged_once_for_each_reason() -> None:
    async with world(2) as found:
        with capture_logs() as logs:
            for protocol_version in (PROTOCOL + 1, PROTOCOL + 1, PROTOCOL + 2, PROTOCOL + 2):
                one = Stranger(found)
                one.hello(protocol=protocol_version)
                await one.refused()
        assert [f"version {PROTOCOL + more} " in line["why"] for more, line in enumerate(logs, 1)] == [True, True]


@virtual
async def test_unknown_values_of_a_later_release_are_tolerated() -> None:
    async with world(2) as found:
        one = Stranger(found)
        one.hello()
        one.link.send(Resume(frozenset(), frozenset()))
        one.link.send(Resumed())
        one.link.send(messages.Admit(1, relative_to(request(deadline_s=60.0), 0.0), frozenset(), "in a new way"))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        assert [granted.call for granted in one.of(messages.LeaseGranted)] == [1]
        assert found.leader.dispatcher.leases == 1
        one.link.send(Returned(1, "for a new reason", None))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        assert found.leader.dispatcher.leases == 0
        assert not one.lost
        await one.end()


@virtual
async def test_a_refusal_with_a_new_outcome_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> None:
        raise Refused("a new one", "No.", None)  # type: ignore[arg-type]

    async with world(2) as found:
        one = found.followers[0]
        holds = one.client()
        await asyncio.sleep(0.05)
        monkeypatch.setattr(Dispatcher, "admit", refuse)
        refused = one.client()
        await asyncio.sleep(0.05)
        assert refused.refused is not None
        assert (refused.refused.outcome, refused.refused.message) == (Outcome.REJECTED_NO_BACKENDS, "No.")
        assert holds.holds() == "a"
        assert one.cluster.leader_changes == 1, "the connection was not replaced"


@virtual
async def test_connection_without_a_members_certificate_is_refused() -> None:
    async with world(2) as found:
        found.leader.network.trusting = False
        one = Stranger(found)
        one.hello()
        assert "another name" in await one.refused()


@pytest.mark.parametrize("name", ["m0", "m1"])
@virtual
async def test_a_name_that_another_process_has_is_refused(name: str) -> None:
    """Otherwise each would drive the other out, again and again."""
    async with world(2) as found:
        one = Stranger(found)
        one.hello(name=name, incarnation="2")
        assert "cluster.member" in await one.refused()
        assert all(member.cluster.has_leader for member in found.members)


@virtual
async def test_restarted_process_replaces_the_lost_one() -> None:
    async with world(3) as found:
        dead = found.followers[0]
        dead.client()
        await asyncio.sleep(0.05)
        found.members.remove(dead)
        await dead.die()
        new = await found.member(dead.name, incarnation="2")
        await asyncio.sleep(0.5)
        assert new.cluster.has_leader
        assert found.leader.dispatcher.leases == 0, "the leases of the old process have ended"


@virtual
async def test_no_more_members_than_the_limit() -> None:
    async with world(2) as found:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sessions, "MEMBERS_MAX", 3)
            ones = [Stranger(found, f"s{number}") for number in range(2)]
            for one in ones:
                one.hello()
                await asyncio.sleep(0.01)
            assert "3 members" in await ones[1].refused()
            assert ones[0].of(Welcome)
            found.break_connections()
            await asyncio.sleep(0.5)
            assert all(one.cluster.has_leader for one in found.members), "present members may reconnect"
            await ones[0].end()


@virtual
async def test_refused_member_logs_the_reason_once() -> None:
    async with world(2) as found:
        late = await found.member("late")
        late.cluster.me = Hello(PROTOCOL + 1, "0", "late", "1", "late", "config", 0)
        with capture_logs() as logs:
            await asyncio.sleep(3.0)
        said = [line for line in logs if line["event"] == "cluster_leader_unreachable"]
        assert [line["error"] for line in said] == [
            f"it speaks version {PROTOCOL + 1} of the protocol, and not {PROTOCOL}"
        ]
        assert cluster_status(late.cluster)["leader_away"] == said[0]["error"]


# --- bytes ------------------------------------------------------------------------------------------------------------


def reports() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


DEEP = b"\x91" * 5_000
GARBAGE = (
    b"\xff\xff\xff\xff", b"\x01\x00\x00\x01", b"\x00\x00\x00\x01\xc1", b"GET / HTTP/1.1\r\n\r\n",
    len(DEEP).to_bytes(4, "big") + DEEP,
)  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("data", GARBAGE, ids=lambda data: repr(data[:20]))
@pytest.mark.parametrize("member", [False, True])
@virtual
async def test_garbage_ends_its_connection_alone(data: bytes, member: bool) -> None:
    reported = reports()
    async with world(2) as found:
        client = found.followers[0].client()
        one = Stranger(found)
        if member:
            one.hello()
        await asyncio.sleep(0.1)
        with capture_logs() as lines:
            one.link.transport.write(data)
            await asyncio.sleep(0.1)
        assert one.lost
        assert reported == [], "it is no bug of this program"
        said = [line["event"] for line in lines if line["event"] in ("broken_frame", "cluster_member_refused")]
        assert said == ["broken_frame" if member else "cluster_member_refused"]
        assert client.holds() == "a"
        assert all(each.cluster.has_leader for each in found.members)


@virtual
async def test_before_its_hello_a_member_sends_small_frames_alone() -> None:
    async with world(2) as found:
        one = Stranger(found)
        one.link.transport.write((HELLO_BYTES_MAX + 1).to_bytes(4, "big"))
        await asyncio.sleep(0.1)
        assert one.lost
        other = Stranger(found)
        other.hello()
        await asyncio.sleep(0.1)
        other.link.transport.write((HELLO_BYTES_MAX + 1).to_bytes(4, "big"))
        await asyncio.sleep(0.1)
        assert not other.lost
        await other.end()


@pytest.mark.parametrize("epoch", [1 << 62, CLAIMED_EPOCH_MAX + 1, -1])
@virtual
async def test_an_epoch_that_no_election_can_have_reached_moves_no_leader(epoch: int) -> None:
    async with world(2) as found:
        leader, turn = found.leader.name, found.leader.cluster.epoch
        one = Stranger(found)
        one.hello(epoch=epoch)
        assert "epoch that no election can have reached" in await one.refused()
        await asyncio.sleep(5.0)
        assert (found.leader.name, found.leader.cluster.epoch) == (leader, turn)


@virtual
async def test_a_frame_that_is_cut_is_nothing() -> None:
    async with world(2) as found:
        one = Stranger(found)
        one.link.transport.write(frame([Ping()])[:-1])
        await one.end()


@virtual
async def test_a_message_that_makes_no_sense_is_skipped() -> None:
    """A member is trusted, but its bugs are not to spread."""
    reported = reports()
    async with world(2) as found:
        one = Stranger(found)
        one.hello()
        for message in (
            Returned(77, "served", None),  # type: ignore[arg-type]
            Started(78), Progress(79, 5), messages.CancelCall(80),
            messages.RequestEnded("unknown", None), Resume(frozenset({1}), frozenset({2})),
        ):  # fmt: skip
            one.link.send(message)
        one.link.send(messages.Admit(5, request(pool="no such pool", model="none"), frozenset(), AdmissionKind.NEW))
        await asyncio.sleep(0.1)
        [refused] = one.of(messages.CallRefused)
        assert refused.call == 5
        assert not reported
        one.link.send(messages.RequestEnded(next(iter(found.leader.sessions["stranger"].server.requests)), None))
        await asyncio.sleep(0.1)
        await one.end()


# --- connections that are no more -------------------------------------------------------------------------------------


@virtual
async def test_silence_ends_a_connection_on_both_sides() -> None:
    async with world(2) as found:
        leader, one = found.leader, found.followers[0]
        found.cut(leader, one)
        await asyncio.sleep(SILENCE_S - 0.5)
        assert one.leasing.is_remote
        await asyncio.sleep(1.6)
        assert not one.cluster.has_leader
        assert not leader.sessions[one.name].connected
        found.heal()
        await asyncio.sleep(3.0)
        assert one.cluster.has_leader


@virtual
async def test_paused_process_reads_before_it_gives_up() -> None:
    async with world(2) as found:
        link = found.followers[0].link
        assert link is not None
        loop: Any = asyncio.get_running_loop()
        loop._now_s += 2.9
        await asyncio.sleep(2.0)
        assert found.followers[0].link is link


@virtual
async def test_a_peer_that_takes_nothing_is_lost() -> None:
    async with world(2) as found:
        one, wire = found.followers[0], found.net.wires[-1]
        wire.unread = UNSENT_BYTES_MAX + 1
        link = one.link
        await asyncio.sleep(2.0)
        assert one.link is not link
        assert one.cluster.has_leader


@virtual
async def test_messages_of_an_older_connection_are_ignored() -> None:
    """A member connects again, and bytes of its first connection arrive after bytes of the second."""
    async with world(2) as found:
        old, new = Stranger(found), Stranger(found)
        old.hello()
        await asyncio.sleep(0.1)
        new.hello()
        await asyncio.sleep(0.1)
        assert new.of(Welcome)
        old.link.send(messages.Admit(5, request(), frozenset(), AdmissionKind.NEW))
        await asyncio.sleep(0.1)
        assert found.leader.dispatcher.leases == 0
        assert old.lost
        assert not new.lost
        assert found.leader.sessions["stranger"].connected
        await new.end()


@virtual
async def test_request_to_a_resigned_leader_waits_nowhere() -> None:
    async with world(2) as found:
        old, one = found.leader, found.followers[0]
        seat = old.client()
        await asyncio.sleep(0.05)
        waits = one.client()
        await asyncio.sleep(LATENCY_S / 2)
        old.cluster.begin_shutdown()
        await asyncio.sleep(0.2)
        assert not old.dispatcher._waiting
        await asyncio.sleep(2.0)
        await seat.done()
        await asyncio.sleep(0.1)
        assert waits.holds() == "a"


# --- leaders ----------------------------------------------------------------------------------------------------------


@virtual
async def test_a_member_that_knows_of_a_later_turn_makes_the_leader_take_one_beyond() -> None:
    """The store was emptied, and a process that had just started took the lock: nobody else would follow it."""
    async with world(3) as found:
        for one in found.members:
            one.cluster.epoch = 9
            one.cluster._election._epoch = 9  # type: ignore[union-attr]
        found.members.remove(dead := found.leader)
        await dead.die()
        # The others have just read the lock, so the new member reads it first.
        await asyncio.sleep(SEEK_S / 2)
        found.store.forget()
        new = await found.member("new")
        await asyncio.sleep(3.0)
        assert found.leader is new
        assert new.cluster.epoch == 10
        assert all(one.cluster.has_leader for one in found.members)


@virtual
async def test_a_welcome_of_an_earlier_turn_is_refused() -> None:
    async with world(2) as found:
        one = found.followers[0]
        link = one.link
        assert link is not None
        one.cluster.epoch = 5
        other = leasing.LeaderConnection(link.leadership, one.cluster.handle, one.cluster.lost)
        one.cluster.welcomed(other, Welcome(4, "old", "0", "config"))
        assert one.link is link
        assert one.cluster.epoch == 5
        one.cluster.epoch = 1


@virtual
async def test_a_leader_that_cannot_be_connected_to_is_logged_once() -> None:
    async with world(3) as found:
        cut, leader = found.followers[0], found.leader
        found.cut(cut, leader)
        with capture_logs() as logs:
            await asyncio.sleep(20.0)
        said = [line["event"] for line in logs if line["event"] == "cluster_leader_unreachable"]
        assert len(said) == 1
        found.heal()
        assert cluster_status(cut.cluster)["leader_away"] is not None
        await asyncio.sleep(3.0)
        assert cut.cluster.has_leader
        assert cluster_status(cut.cluster)["leader_away"] is None


@virtual
async def test_a_leader_that_ends_a_connection_without_an_answer_may_want_tls() -> None:
    async with world(2) as found:
        one = found.followers[0].cluster
        assert one.leadership is not None
        link = leasing.LeaderConnection(one.leadership, one.handle, one.lost)
        link.link.connection_lost(None)
        assert (await link.refusal or "").endswith("as where only one of two members uses TLS")


@virtual
async def test_an_address_that_is_none_is_no_end() -> None:
    async with world(2) as found:
        one = found.followers[0]
        connect = one.network.connect

        async def fails(address: str, connected: Any) -> None:
            del address, connected
            raise ValueError("no address")

        one.network.connect = fails  # type: ignore[method-assign]
        with capture_logs() as lines:
            found.break_connections()
            await asyncio.sleep(2.0)
        assert not one.cluster.has_leader
        events = [line["event"] for line in lines]
        assert "cluster_leader_unreachable" in events
        assert "task_failed" not in events
        one.network.connect = connect  # type: ignore[method-assign]
        await asyncio.sleep(2.0)
        assert one.cluster.has_leader


@virtual
async def test_a_connection_that_ends_at_once_is_not_made_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    join = MemberSessions.join

    def end(self: MemberSessions, hello: Hello, sender: Any) -> MemberSession:
        session = join(self, hello, sender)
        if not sender.local:
            asyncio.get_running_loop().call_later(2 * LATENCY_S, sender.abort)
        return session

    async with world(2) as found:
        with monkeypatch.context() as patch:
            patch.setattr(MemberSessions, "join", end)
            found.break_connections()
            before = found.net.connects
            await asyncio.sleep(10.0)
            assert 50 <= found.net.connects - before <= 10.0 / SEEK_S + 1
        await asyncio.sleep(1.0)
        assert found.followers[0].cluster.has_leader


@virtual
async def test_members_leave_a_dead_leader_for_the_next_one() -> None:
    """Its machine is gone, so that nothing answers: not even that nobody listens."""
    async with world(3) as found:
        dead = found.leader
        one, other = found.followers
        for alive in (one, other):
            found.cut(dead, alive)
        await asyncio.sleep(5.5)
        dead.campaign(False)
        found.store.held = None
        async with asyncio.timeout(0.8):
            while not all(alive.cluster.has_leader and alive.cluster.epoch == 2 for alive in (one, other)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        found.heal()
        await asyncio.sleep(5.0)


@virtual
async def test_a_slow_leader_gets_one_connection_of_each_member() -> None:
    async with world(2) as found:
        one, leader = found.followers[0], found.leader
        accepted = found.net.listening[leader.name]
        held: list[Any] = []

        def slow() -> asyncio.Protocol:
            protocol_of_it: Any = accepted()
            take = protocol_of_it.data_received
            protocol_of_it.data_received = lambda data: asyncio.get_running_loop().call_later(0.7, take, data)
            held.append(protocol_of_it)
            return protocol_of_it  # type: ignore[no-any-return]

        found.net.listening[leader.name] = slow
        found.break_connections()
        await asyncio.sleep(3.0)
        assert len(held) == 1
        assert one.cluster.has_leader
        found.net.listening[leader.name] = accepted
        found.break_connections()
        await asyncio.sleep(1.0)


@virtual
async def test_last_member_leads_until_another_joins() -> None:
    async with world(1) as found:
        [old] = found.members
        client = old.client()
        old.cluster.begin_shutdown()
        await asyncio.sleep(1.0)
        assert old.cluster.is_leader
        new = await found.member("new")
        await asyncio.sleep(2.0)
        assert new.cluster.is_leader
        assert client.holds() == "a"
        assert new.dispatcher.leases == 1


@virtual
async def test_last_willing_member_leads_until_its_end() -> None:
    """The other member is leaving too, and only finishes its own requests."""
    async with world(2) as found:
        [leaves], last = found.followers, found.leader
        runs = leaves.client()
        await asyncio.sleep(0.1)
        waits = [one.client() for one in (leaves, last)]
        leaves.cluster.begin_shutdown()
        await asyncio.sleep(1.0)
        last.cluster.begin_shutdown()
        await asyncio.sleep(2 * LOCK_S)
        assert found.leader is last
        for client in (runs, *reversed(waits)):
            assert client.holds() == "a"
            await client.done()
            await asyncio.sleep(0.1)
        known = asyncio.Event()
        late = await found.member("late", known.wait())
        await asyncio.sleep(1.0)
        assert found.leader is last
        known.set()
        await asyncio.sleep(1.0)
        assert found.leader is late


@virtual
async def test_a_leader_that_resigned_while_a_member_joins() -> None:
    async with world(2) as found:
        late = await found.member("late")
        await asyncio.sleep(1.5 * LATENCY_S)
        found.leader.cluster.begin_shutdown()
        await asyncio.sleep(2.0)
        assert late.cluster.has_leader
        assert len({one.cluster.epoch for one in found.members}) == 1


@virtual
async def test_hand_drained_backends_stay_so_under_another_leader() -> None:
    async with world(3) as found:
        old = found.leader
        old.drained = frozenset({"a"})
        old.dispatcher.reconsider()
        await asyncio.sleep(0.1)
        assert all(one.drained == {"a"} for one in found.members)
        old.cluster.begin_shutdown()
        await asyncio.sleep(2.0)
        new = found.leader
        assert new is not old
        new.drained = frozenset()
        new.dispatcher.reconsider()
        late = await found.member("late")
        await asyncio.sleep(0.5)
        assert all(one.drained == frozenset() for one in [*found.members, late])


@virtual
async def test_next_leader_knows_the_charges_of_flows() -> None:
    async with world(2, seats=2) as found:
        old, new = found.leader, found.followers[0]
        clients = [old.client(flow="big", prompt_tokens=3000), old.client(flow="small")]
        await asyncio.sleep(1.5)
        known = {key: dict(flows) for key, flows in new.cluster._hand_over.balances.latest.items()}
        assert any(known.values())
        restored: list[Any] = []
        restore = new.dispatcher.pools.restore

        def spy(pool: str, band: int, flows: Any) -> None:
            restored.append(((pool, band), dict(flows)))
            restore(pool, band, flows)

        new.dispatcher.pools.restore = spy  # type: ignore[method-assign, assignment]
        found.cut(old, new)
        found.store.held = None
        old.campaign(False)
        await asyncio.sleep(LOCK_S + RESUME_WAIT_S)
        assert new.cluster.is_leader
        assert dict(restored) == known
        found.heal()
        await asyncio.sleep(5.0)
        for client in clients:
            await client.done()


@virtual
async def test_learned_numbers_reach_the_next_leader_and_late_members() -> None:
    async with world(2) as found:
        old = found.leader
        old.learned = Learned({"http://a": KnownLimit(32, True, ("base",))}, {"base": KnownCapacity((1.0,), ())})
        await asyncio.sleep(LEARNED_S + 1.0)
        late = await found.member("late")
        await asyncio.sleep(1.0)
        for one in (*found.followers, late):
            assert one.restored == [], "only who leads needs it"
        assert late.cluster._hand_over.learned == old.learned
        old.cluster.begin_shutdown()
        await asyncio.sleep(2.0)
        assert found.leader is not old
        assert [told for told, _ in found.leader.restored] == [old.learned]


@virtual
async def test_learned_numbers_keep_their_age_across_leaders() -> None:
    async with world(2) as found:
        loop = asyncio.get_running_loop()
        old, new = found.leader, found.followers[0]
        old.learned = new.learned = Learned({}, {"base": KnownCapacity((1.0,), ())})
        await asyncio.sleep(LEARNED_S + 1.0)
        told_s = loop.time()
        await hand_over(found, old, new)
        await hand_over(found, new, old)
        [(told, at_s)] = old.restored
        assert (told, at_s < told_s) == (old.learned, True)
        await hand_over(found, old, new)
        new.learned, later_s = Learned({}, {"base": KnownCapacity((2.0,), ())}), loop.time()
        await asyncio.sleep(LEARNED_S + 1.0)
        await hand_over(found, new, old)
        told, at_s = old.restored[-1]
        assert (told, at_s > later_s) == (new.learned, True)


@virtual
async def test_new_leader_passes_received_numbers_on() -> None:
    """As where all members are restarted one after the other."""
    async with world(3) as found:
        old, [between, new] = found.leader, found.followers
        old.learned = Learned({}, {"base": KnownCapacity((1.0,), ()), "gone": KnownCapacity((2.0,), ())})
        await asyncio.sleep(LEARNED_S + 1.0)
        new.campaign(False)
        await hand_over(found, old, between)
        await asyncio.sleep(LEARNED_S + 1.0)
        between.campaign(False)
        old.campaign(False)
        await hand_over(found, between, new)
        assert new.restored[-1][0] == Learned({}, {"base": KnownCapacity((1.0,), ())}), "of the pools that are there"


async def hand_over(found: World, one: VirtualMember, other: VirtualMember) -> None:
    """Hand the leadership over from `one` to `other`."""
    one.campaign(False)
    other.campaign(True)
    found.store.held = None
    await asyncio.sleep(LOCK_S + RESUME_WAIT_S)
    assert other.cluster.is_leader
    one.campaign(True)


@virtual
async def test_a_configuration_that_was_read_again_is_known_to_the_leader() -> None:
    async with world(3) as found:
        one, leader = found.followers[0], found.leader
        one.cluster.reconfigured("other")
        await asyncio.sleep(0.1)
        assert leader.sessions[one.name].hello.config == "other"
        leader.cluster.reconfigured("other")
        assert leader.cluster.me.config == "other"
        found.break_connections()
        await asyncio.sleep(1.0)
        assert leader.sessions[one.name].hello.config == "other"


# --- pages, and frames that are too long ------------------------------------------------------------------------------


@virtual
async def test_a_page_that_is_too_long_is_refused_and_breaks_nothing() -> None:
    async with world(2) as found:
        one = found.followers[0]
        leader, link = one.leasing, one.link
        long_ago = b"x" * (PAGE_BYTES_MAX + 1)
        answer = await leader.answer(lambda call: messages.PageRequest(call, long_ago, ""))
        assert isinstance(answer, messages.PageResponse)
        assert answer.status == 502
        assert one.link is link
        answers = await asyncio.gather(
            *(leader.answer(lambda call: messages.PageRequest(call, long_ago[:-1], "")) for _ in range(3))
        )
        assert {one.status for one in answers if isinstance(one, messages.PageResponse)} == {200}
        assert one.link is link


@virtual
async def test_a_message_that_is_too_long_is_not_sent() -> None:
    reported = reports()
    async with world(2) as found:
        one = found.followers[0]
        assert one.link is not None
        one.link.link.send(messages.PageRequest(-99, b"x" * FRAME_BYTES_MAX, ""))
        one.link.link.send(Ping())
        await asyncio.sleep(0.5)
        assert [report["message"][:17] for report in reported] == ["too long to send:"]
        assert one.cluster.has_leader


# --- nothing grows ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@virtual
async def test_a_thousand_broken_connections_leave_nothing() -> None:
    async with world(3) as found:
        client = found.followers[0].client()
        for _ in range(1000):
            found.break_connections()
            await asyncio.sleep(0.25)
        assert client.holds() == "a"
        for one in found.members:
            assert len(one.cluster._tasks) == 2
            assert len(one.cluster.incoming) <= 2
            assert len(one.differing) == 0
        assert len(asyncio.all_tasks()) < 30


@virtual
async def test_a_call_of_the_next_connection_may_have_the_number_of_one_of_the_last() -> None:
    """The leader has not noticed yet that the last connection is lost, and cancels its calls in the same turn."""
    async with world(1) as found:
        leader = found.leader
        leader.dispatcher.expects_backends({"file"})
        hello = Hello(PROTOCOL, "0", "m1", "1", "", "config", 0)
        assert leader.cluster.sessions is not None
        session = leader.cluster.sessions.join(hello, LocalLink(lambda _: None))
        for _ in range(2):
            session.server.handle(Resume(frozenset(), frozenset()))
            session.server.handle(messages.Resolve(-1, "later", 60.0, 1))
            session.server.handle(Resumed())
            await asyncio.sleep(0.01)
        assert leader.dispatcher.nameless == 1
        session.server.handle(messages.CancelCall(-1))
        await asyncio.sleep(0.01)
        assert leader.dispatcher.nameless == 0
        session.end()


@virtual
async def test_a_member_that_changes_its_name_leaves_nothing() -> None:
    async with world(2) as found:
        stranger = Stranger(found)
        stranger.hello()
        await asyncio.sleep(0.1)
        stranger.hello(name="other", incarnation="9")
        await asyncio.sleep(0.1)
        stranger.link.abort()
        await asyncio.sleep(30.0)
        assert found.leader.cluster.sessions is not None
        assert not {"stranger", "other"} & found.leader.cluster.sessions.by_name.keys()
