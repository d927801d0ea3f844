"""One shard at one member: it stands for election, schedules for all while it leads, and relays in any case."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from math import inf
from typing import Protocol

import structlog
from msgspec.structs import replace

from llmproxy.core.domain import Refused
from llmproxy.lifecycle.background import spawned, supervised
from llmproxy.observe.metrics import ShardState
from llmproxy.remote.cluster.alone import Alone
from llmproxy.remote.cluster.channel import LocalChannel, Sender
from llmproxy.remote.cluster.election import SEEK_S, Election, Leadership, LockStore
from llmproxy.remote.cluster.hand_over import HandOver
from llmproxy.remote.cluster.leader_link import LeaderLink
from llmproxy.remote.cluster.network import Network
from llmproxy.remote.cluster.protocol import (
    Balances,
    Drained,
    Hello,
    Learned,
    Members,
    NotLeader,
    RateDebts,
    ToMember,
    Welcome,
)
from llmproxy.remote.cluster.relay import RelayDispatcher
from llmproxy.remote.cluster.session import MemberSession, Shared
from llmproxy.remote.cluster.sessions import Sessions
from llmproxy.remote.workers import protocol
from llmproxy.remote.workers.protocol import Message
from llmproxy.remote.workers.remote import Calls
from llmproxy.remote.workers.session import SchedulerContext
from llmproxy.scheduling.dispatcher import Dispatcher

SETTLE_S = 0.3
"""A new leader decides nothing before all members said what they have, or so long."""
WITHOUT_LEADER_S = 5.0
"""Without any leader, requests are held for the time of the lock and this one more, and then refused."""


_log = structlog.get_logger()


class Process(Protocol):
    """This member, which all of its shards have in common. `leaving`: it should lead nothing any more."""

    me: Hello
    network: Network
    leaving: bool

    @property
    def id(self) -> str:
        """The name of the process, which no other one has."""

    @property
    def patience_s(self) -> float:
        """See `Candidate.patience_s`."""


class Shard:
    """One shard at one member, from `start` to `close`. It is the `Candidate` of its own election."""

    def __init__(
        self, name: str, process: Process, held_s: float, store: LockStore, dispatcher: Dispatcher,
        relay: RelayDispatcher, shared: Shared, alone_after_s: float,
    ) -> None:  # fmt: skip
        """`name` is that of its pool, or the default one."""
        self.name = name
        self._process = process
        self._held_s = held_s
        self._store = store
        self._dispatcher = dispatcher
        self.relay = relay
        self._shared = shared
        self._alone = Alone(dispatcher, relay, name)
        self._alone_after_s = alone_after_s
        self._loop = asyncio.get_running_loop()
        self._log = _log.bind(pool=name) if name else _log
        self.epoch = 0
        self.leadership: Leadership | None = None
        self.members: tuple[str, ...] = ()
        """Who is there, by what the leader said last."""
        self.sessions: Sessions | None = None
        """The members for which this one schedules, itself included; None while it does not lead."""
        self.store_away: str | None = None
        self.changes = 0
        """How often another leader was followed, or this member began to lead."""
        self.last_gap_s: float | None = None
        """How long there was no leader before the one that is there now."""
        self._expected: frozenset[str] = frozenset()
        self._until_s = -inf
        self._settling: asyncio.TimerHandle | None = None
        self._unled_s = self._loop.time()
        self._link: LeaderLink | None = None
        self._linking: asyncio.Task[None] | None = None
        self._linking_to: Leadership | None = None
        self._unreachable: tuple[str, str] | None = None
        self._resigns = False
        self._tasks: list[asyncio.Task[None]] = []
        self._context: SchedulerContext | None = None
        self._election: Election | None = None
        self._hand_over = HandOver(dispatcher.pools, shared, name)
        relay.calls = lambda: self.calls
        dispatcher.decide_until(-inf, name)

    @property
    def leads(self) -> bool:
        """Whether this member schedules."""
        return self.sessions is not None

    @property
    def _me(self) -> Hello:
        """This member, as it says to others who it is."""
        stands = not self._resigns and self.store_away is None and self._election is not None and self._election.stands
        return replace(self._process.me, epoch=self.epoch, shard=self.name, stands=stands)

    # --- start and end ------------------------------------------------------------------------------------------------

    def start(self, context: SchedulerContext, *, stands: bool) -> None:
        """Stand for election, or only follow until `stand`."""
        self._context = context
        me = self._process.me
        self._election = Election(
            self._store, self._process.id, me.address, self._held_s, self, self._store_away, stands=stands
        )
        self._tasks = [
            supervised(self._election.run, "election"),
            supervised(self._watch, "shard"),
        ]

    def stand(self) -> None:
        """Stand for election from now on."""
        if self._election is not None and not self._resigns:
            self._election.stand()
            self.introduce()

    def introduce(self) -> None:
        """Tell the leader anew who this member is, because that has changed."""
        if self.sessions is not None:
            self.sessions.by_name[self._me.name].hello = self._me
        if self._link is not None:
            self._link.channel.send(self._me)

    @property
    def led(self) -> bool:
        """Whether there is a leader that this member can ask."""
        return self.relay.led and not self.parts

    @property
    def lock(self) -> str:
        """The name of its lock."""
        return self._store.name

    @property
    def leader(self) -> str | None:
        """The name of the member that leads; None while this one can ask nobody."""
        return None if self.leadership is None or not self.led else self.leadership.holder.rpartition("/")[0]

    @property
    def parts(self) -> int:
        """Of how many members this is one that decides alone; 0 while it does not."""
        return self._alone.parts

    @property
    def refuses(self) -> bool:
        """Whether this member has had no leader for so long that it refuses requests."""
        return not self.relay.led and self._loop.time() >= self._refuses_from_s

    @property
    def _refuses_from_s(self) -> float:
        return self._unled_s + self._held_s + WITHOUT_LEADER_S

    @property
    def leader_away(self) -> str | None:
        """Why the member that has the lock could not be followed; None where one is."""
        return None if self.led or self._unreachable is None else self._unreachable[1]

    def leave(self) -> None:
        """Let another member lead, if there is one that would. Requests of this member go on."""
        if not self._resigns and (self.sessions is None or self.sessions.that_would_lead()):
            self._resigns = True
            self.introduce()
            self._tasks.append(spawned(self._resign(), "resign"))

    async def _resign(self) -> None:
        if self._election is not None:
            await self._election.resign()

    async def hand_over(self, why: str, for_s: float) -> None:
        """Let another member lead. This one leads again if no other one takes the lock for so long."""
        self._log.info("cluster_hands_over", epoch=self.epoch, why=why)
        await self._resign()
        await asyncio.sleep(for_s)
        self.stand()

    async def close(self) -> None:
        """Leave the cluster."""
        self._resigns = True
        await self._resign()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._alone.end()
        if self.leads:
            self._stop_leading("the leader ends")
        if self._linking is not None:
            self._linking.cancel()
            await asyncio.gather(self._linking, return_exceptions=True)
        if (link := self._link) is not None:
            self._unlink(link)
            link.channel.close()
        await self._store.close()

    async def _watch(self) -> None:
        """Refuse what waits for too long while nobody leads; tell members what they need to lead."""
        while True:
            await asyncio.sleep(SEEK_S)
            if self._process.leaving:
                self.leave()
            # While it settles, it still is to restore what the last leader told.
            if self.sessions is not None and self._settling is None:
                for told in self._hand_over.news(self._loop.time()):
                    self.sessions.send_all(told)
            if not self.relay.led:
                self.relay.refuse_waiting(self._refuses_from_s)
                # One that never met the others does not know how many they are.
                if self.members and self._loop.time() >= self._unled_s + self._alone_after_s:
                    assert self._context is not None
                    unled_s = self._loop.time() - self._unled_s
                    self._alone.begin(self._context, self._me, len(self.members), unled_s)
                    self._hand_over.restore(self._loop.time())

    def state(self) -> ShardState:
        """What metrics show."""
        return ShardState(
            self.name, self.leads, self.led, self.epoch, len(self.members), self.changes, self.last_gap_s,
            self.store_away is not None,
        )  # fmt: skip

    # --- the candidate ------------------------------------------------------------------------------------------------

    @property
    def seeking(self) -> bool:
        return not self.led

    @property
    def patience_s(self) -> float:
        return self._process.patience_s

    def lead(self, epoch: int, until_s: float) -> None:
        if self.leads and epoch != self.epoch:
            self._stop_leading("its lock was lost and taken again")
        self._until_s = until_s
        if not self.leads:
            self._begin_to_lead(epoch)
        elif self._settling is None:
            self._dispatcher.decide_until(until_s, self.name)

    def follow(self, leadership: Leadership | None) -> None:
        if self.leads:
            self._stop_leading("another member leads" if leadership else "its lock was not renewed, or is given up")
        if leadership is None or leadership.holder == self._process.id:
            return
        if self._link is not None and self._link.leadership == leadership:
            return
        if self._linking is not None and not self._linking.done():
            if self._linking_to == leadership:
                return
            self._linking.cancel()
        self._linking_to = leadership
        self._linking = spawned(self._connect(leadership), "connect")

    def _begin_to_lead(self, epoch: int) -> None:
        self._alone.end()
        if self._link is not None:
            self._link.channel.abort()
            self._unlink(self._link)
        self.epoch = epoch
        self.leadership = Leadership(self._process.id, self._me.address, epoch)
        self._expected = frozenset(self.members)
        assert self._context is not None
        self.sessions = Sessions(
            lambda: self._me, self._context, self._shared, self._hand_over, self._log, self._resumed
        )
        self._settling = self._loop.call_later(SETTLE_S, self._settled)
        gap_s = self._found_leader()
        expected = len(self._expected)
        self._log.info("cluster_leads", epoch=epoch, without_leader_s=gap_s, settle_s=SETTLE_S, expected=expected)
        ours = LocalChannel(self._take_as_relay)
        session = self.join(self._me, ours)
        self.relay.follow(LocalChannel(session.take))

    def _stop_leading(self, why: str) -> None:
        self._log.warning("cluster_leads_no_more", epoch=self.epoch, why=why)
        sessions, self.sessions = self.sessions, None
        self._end_settling()
        self._dispatcher.decide_until(-inf, self.name)
        self.relay.detach()
        self._unled_s = self._loop.time()
        assert sessions is not None
        sessions.end(why)

    def _found_leader(self) -> float:
        """Count a leader; returns the seconds for which there was none."""
        self.last_gap_s = round(self._loop.time() - self._unled_s, 3)
        self.changes += 1
        return self.last_gap_s

    # --- members, for the leader --------------------------------------------------------------------------------------

    def join(self, hello: Hello, sender: Sender) -> MemberSession:
        """See `Sessions.join`."""
        assert self.sessions is not None
        return self.sessions.join(hello, sender)

    def _resumed(self) -> None:
        """Decide at once when all that are expected said what they have.

        A member that never met the others, as one that was just started, does not know who is to be expected.
        """
        if self._settling is None or self.sessions is None or not self._expected:
            return
        if self.sessions.have_resumed(self._expected):
            self._settled()

    def _settled(self) -> None:
        """Decide from now on: what waits is known, and the shares of flows are those that the last leader knew."""
        self._end_settling()
        self._hand_over.restore(self._loop.time())
        self._dispatcher.decide_until(self._until_s, self.name)

    def _end_settling(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None

    def outbid(self, epoch: int) -> None:
        """A member knows of a later turn: another one leads, or the store has forgotten the turns that were."""
        assert self._election is not None
        self._election.outbid(epoch)

    # --- the leader, for members --------------------------------------------------------------------------------------

    async def _connect(self, leadership: Leadership) -> None:
        """Connect to a leader, which then is followed as soon as it welcomes this member."""
        link = LeaderLink(leadership, self.take, self.lost)
        try:
            why = await link.open(self._process.network, self._me)
        finally:
            if self._link is not link:
                link.channel.abort()
        if why is not None and (leadership.holder, why) != self._unreachable:
            self._log.warning(
                "cluster_leader_unreachable", leader=leadership.holder, address=leadership.address, error=why
            )
            self._unreachable = leadership.holder, why

    def welcomed(self, link: LeaderLink, welcome: Welcome) -> None:
        """A leader took this member in."""
        if welcome.epoch < self.epoch or self.leads:
            # It was a leader, and does not know yet that another one is.
            link.answered("another member leads by now")
            return
        if self._link is not None and self._link is not link:
            self._link.channel.abort()
            self._unlink(self._link)
        self._link, self.epoch, self.leadership = link, welcome.epoch, link.leadership
        self._unreachable = None
        link.answered(None)
        self._alone.end()
        self._log.info(
            "cluster_follows", epoch=welcome.epoch, without_leader_s=self._found_leader(), leader=welcome.name
        )
        if welcome.config != self._me.config:
            self._log.warning("cluster_config_differs", member=welcome.name, version=welcome.version)
        self.relay.follow(link.channel)
        # Who it is may have changed since it connected.
        self.introduce()

    def _unlink(self, link: LeaderLink) -> None:
        link.calls.lost()
        self.relay.detach(link.channel)
        if self._link is link:
            self._link, self._unled_s = None, self._loop.time()

    def lost(self, link: LeaderLink, why: str) -> None:
        """The connection to a leader ended, or it leads no more."""
        link.answered(why)
        if self._link is link:
            self._log.warning("cluster_leader_lost", leader=link.leadership.holder, epoch=self.epoch, why=why)
            self._unlink(link)
            assert self._election is not None
            self._election.look()

    @property
    def calls(self) -> Calls | None:
        """Calls of the leader beside those for leases; None where this member leads, or nobody does."""
        return None if self._link is None else self._link.calls

    async def caught_up(self) -> None:
        """Wait until this member knows what the leader knows now. Messages arrive in order, before the answer."""
        if self._link is not None:
            with suppress(Refused):
                await self._link.calls.answer(lambda call: protocol.Resolve(call, None, 0.0, 0))

    def _take_as_relay(self, message: Message) -> None:
        """A message of the leader to this member, whichever it is."""
        match message:
            case protocol.LeaseGranted() | protocol.CallRefused() | protocol.LeaseCut():
                self.relay.take(message)
            case protocol.ResponseStored():
                self._shared.settle(message)
            case Members(names):
                self.members = names
            case Balances() | RateDebts() | Learned() if not self.leads:
                self._hand_over.take(message, self._loop.time())
            case Drained() if not self.leads:
                self._shared.drain(message)
            case _:
                pass

    def take(self, link: LeaderLink, message: ToMember) -> None:
        """A message of a leader over the network."""
        match message:
            case Welcome():
                self.welcomed(link, message)
            case NotLeader(why):
                self.lost(link, why)
                link.channel.abort()
            case protocol.PageResponse() | protocol.NameResolved():
                link.calls.answered(message)
            case protocol.CallRefused(call) if call < 0:
                link.calls.answered(message)
            case _ if link is self._link:
                self._take_as_relay(message)
            case _:
                pass

    # --- the store ----------------------------------------------------------------------------------------------------

    def _store_away(self, why: str | None) -> None:
        before, self.store_away = self.store_away, why
        if (why is None) is (before is None):
            return
        if why is None:
            self._log.info("cluster_lock_back")
        else:
            self._log.warning("cluster_lock_away", why=why)
        self.introduce()
