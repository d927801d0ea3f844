"""This process as a member of a cluster: its election, and its sessions if it leads, or else its link to the leader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace as replace_field
from math import inf

import structlog
from msgspec.structs import replace

from llmproxy.lifecycle.background import spawned, supervised
from llmproxy.observe.metrics import ClusterState
from llmproxy.remote import messages
from llmproxy.remote.cluster.election import SEEK_S, Election, Leadership, LockStore
from llmproxy.remote.cluster.hand_over import HandOver, MemberCallbacks
from llmproxy.remote.cluster.leasing import ClusterLeasing, Dialer, LeaderConnection
from llmproxy.remote.cluster.network import Network
from llmproxy.remote.cluster.sessions import IncomingConnection, MemberSessions
from llmproxy.remote.link import LocalLink
from llmproxy.remote.messages import Hello, Message, NotLeader, ToMember, Welcome
from llmproxy.remote.server import LeaseServer, Page, Services
from llmproxy.scheduling.dispatcher import Dispatcher

RESUME_WAIT_S = 0.3  # Maximum wait of a new leader for members to report their requests and leases, before it decides.
WITHOUT_LEADER_S = 5.0  # Without a leader, requests are refused after `lock_s` plus this number of seconds.


_log = structlog.get_logger()


class Cluster:
    """A member of a cluster, from `start` to `close`. It is the `ElectionMember` of its election."""

    def __init__(
        self, me: Hello, lock_s: float, store: LockStore, dispatcher: Dispatcher, leasing: ClusterLeasing,
        services: Services, callbacks: MemberCallbacks, network: Network,
    ) -> None:  # fmt: skip
        self.me = me
        self.leasing = leasing
        self.network = network
        self._lock_s = lock_s
        self.store = store
        self._dispatcher = dispatcher
        self._services = services
        self._callbacks = callbacks
        self.incoming: set[IncomingConnection] = set()
        # Host of a refused member -> the last logged reason, so that each reason is logged once.
        self.refused: dict[str, str] = {}
        self._loop = asyncio.get_running_loop()
        self.epoch = 0
        self.leadership: Leadership | None = None
        self.members: tuple[str, ...] = ()  # Names of all members, as the leader last announced them.
        self.sessions: MemberSessions | None = (
            None  # The sessions of all members; None while this member does not lead.
        )
        self.lock_error: str | None = None  # Why the lock store cannot be reached; None if the last call succeeded.
        self.leader_changes = 0  # How often this member began to lead or to follow a leader.
        self.last_gap_s: float | None = None  # How long this member had no leader before the current leader.
        # Names of members that a new leader waits for. They report their requests and leases before it grants a lease.
        self._expected: frozenset[str] = frozenset()
        self._until_s = -inf
        self._resume_timer: asyncio.TimerHandle | None = None  # Set while a new leader waits for members to report.
        self._leader_lost_s = self._loop.time()
        self._connection: LeaderConnection | None = None
        self._dialer = Dialer(network, lambda: self._hello, self.handle, self.lost)
        self._leaving = False  # The process shuts down, and resigns when another member can lead.
        self._resigned = False
        self._tasks: list[asyncio.Task[None]] = []
        self._election: Election | None = None
        self._hand_over = HandOver(dispatcher.pools, callbacks)
        dispatcher.on_change.append(self._changed)
        dispatcher.decide_until(-inf)

    @property
    def id(self) -> str:
        """The unique name of this process: member name and incarnation."""
        return f"{self.me.name}/{self.me.incarnation}"

    @property
    def is_leader(self) -> bool:
        return self.sessions is not None

    @property
    def _hello(self) -> Hello:
        """The Hello that introduces this member to a leader, with its present state."""
        election = self._election
        candidate = not self._resigned and self.lock_error is None and election is not None and election.campaigning
        return replace(self.me, epoch=self.epoch, candidate=candidate)

    # --- start and end ------------------------------------------------------------------------------------------------

    async def start(self, page: Page, known: Awaitable[object] | None = None) -> None:
        """Listens for other members, and joins the election. `page` answers requests that members forward.

        The member campaigns once `known` completes (None: at once), because a leader that does not know its backends
        would refuse the requests of all members. Raises OSError or ConfigError if the address cannot be used.
        """
        self.me = replace(self.me, address=await self.network.listen(lambda: IncomingConnection(self).link))
        self._services = replace_field(self._services, page=page)
        self._election = Election(
            self.store, self.id, self.me.address, self._lock_s, self, self._set_lock_error, campaign=known is None
        )
        self._tasks = [supervised(self._election.run, "election"), supervised(self._watch, "watch the leader")]
        if known is not None:
            self._tasks.append(spawned(self._campaign(known), "campaign"))

    async def _campaign(self, known: Awaitable[object]) -> None:
        await known
        assert self._election is not None
        if not self._resigned:
            self._election.campaign()
            self._send_hello()

    def reconfigured(self, config: str) -> None:
        """Announces the hash of a new configuration (`config_hash`) to the leader, for its page `/admin/cluster`."""
        self.me = replace(self.me, config=config)
        self._send_hello()

    def _send_hello(self) -> None:
        """Sends a new Hello to the leader, because its content has changed."""
        if self.sessions is not None:
            self.sessions.by_name[self.me.name].hello = self._hello
        if self._connection is not None:
            self._connection.link.send(self._hello)

    @property
    def has_leader(self) -> bool:
        """Whether this member leads or follows a leader."""
        return self.leasing.link is not None

    @property
    def leader(self) -> str | None:
        """The name of the leader; None without one."""
        return None if self.leadership is None or not self.has_leader else self.leadership.holder.rpartition("/")[0]

    @property
    def is_refusing(self) -> bool:
        """Whether this member refuses requests, because it has been without a leader for too long."""
        return not self.has_leader and self._loop.time() >= self._refusing_from_s

    @property
    def _refusing_from_s(self) -> float:
        return self._leader_lost_s + self._lock_s + WITHOUT_LEADER_S

    @property
    def leader_error(self) -> str | None:
        """Why the holder of the lock cannot be reached; None while there is a leader."""
        return None if self.has_leader or self._dialer.failure is None else self._dialer.failure[1]

    def begin_shutdown(self) -> None:
        """Begins to leave the cluster: a leader resigns as soon as another member can lead.

        Requests of this member continue, under the new leader.
        """
        self._leaving = True
        self._leave()

    def _leave(self) -> None:
        if not self._resigned and (self.sessions is None or self.sessions.candidates()):
            self._resigned = True
            self._send_hello()
            self._tasks.append(spawned(self._resign(), "resign"))

    async def _resign(self) -> None:
        if self._election is not None:
            await self._election.resign()

    async def close(self) -> None:
        """Leaves the cluster: frees the lock if this member leads, and closes all connections to other members."""
        self.network.close()
        self._resigned = True
        await self._resign()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.is_leader:
            self._stop_leading("the leader ends")
        await self._dialer.close()
        if (connection := self._connection) is not None:
            self._disconnect(connection)
            connection.link.close()
        await self.store.close()
        for incoming in [*self.incoming]:
            incoming.link.close()

    async def _watch(self) -> None:
        """Announces state while this member leads. Without a leader, refuses requests that have waited too long."""
        while True:
            await asyncio.sleep(SEEK_S)
            if self._leaving:
                self._leave()
            # A leader that still waits for reports has not restored the announced state yet.
            if self.sessions is not None and self._resume_timer is None:
                for message in self._hand_over.deltas(self._loop.time()):
                    self.sessions.send_all(message)
            if not self.has_leader:
                self.leasing.refuse_waiting(self._refusing_from_s)

    def state(self) -> ClusterState:
        return ClusterState(
            self.is_leader, self.has_leader, self.epoch, len(self.members), self.leader_changes, self.last_gap_s,
            self.lock_error is not None,
        )  # fmt: skip

    # --- ElectionMember -----------------------------------------------------------------------------------------------

    def lead(self, epoch: int, until_s: float) -> None:
        if self.is_leader and epoch != self.epoch:
            self._stop_leading("its lock was lost and taken again")
        self._until_s = until_s
        if not self.is_leader:
            self._begin_to_lead(epoch)
        elif self._resume_timer is None:
            self._dispatcher.decide_until(until_s)

    def follow(self, leadership: Leadership | None) -> None:
        if self.is_leader:
            self._stop_leading("another member leads" if leadership else "its lock was not renewed, or is given up")
        if leadership is None or leadership.holder == self.id:
            return
        if self._connection is not None and self._connection.leadership == leadership:
            return
        self._dialer.dial(leadership)

    def _begin_to_lead(self, epoch: int) -> None:
        if self._connection is not None:
            self._connection.link.abort()
            self._disconnect(self._connection)
        self.epoch = epoch
        self.leadership = Leadership(self.id, self.me.address, epoch)
        self._expected = frozenset(self.members)
        self.sessions = MemberSessions(
            lambda: self._hello, self._services, self._callbacks, self._hand_over, self._resumed
        )
        self._resume_timer = self._loop.call_later(RESUME_WAIT_S, self._start_deciding)
        gap_s = self._note_new_leader()
        expected = len(self._expected)
        _log.info("cluster_leads", epoch=epoch, without_leader_s=gap_s, settle_s=RESUME_WAIT_S, expected=expected)
        ours = LocalLink(self._handle_as_member)
        session = self.sessions.join(self._hello, ours)
        self.leasing.follow(LocalLink(session.server.handle))

    def _stop_leading(self, why: str) -> None:
        _log.warning("cluster_stepped_down", epoch=self.epoch, why=why)
        sessions, self.sessions = self.sessions, None
        self._cancel_resume_timer()
        self._dispatcher.decide_until(-inf)
        self.leasing.detach()
        self._leader_lost_s = self._loop.time()
        assert sessions is not None
        sessions.end(why)

    def _note_new_leader(self) -> float:
        """Counts a change of leader. Returns the seconds without a leader before it."""
        self.last_gap_s = round(self._loop.time() - self._leader_lost_s, 3)
        self.leader_changes += 1
        return self.last_gap_s

    # --- leader side --------------------------------------------------------------------------------------------------

    def _resumed(self) -> None:
        """Begins to grant leases once all previously known members have reported, if any were known."""
        if self._resume_timer is None or self.sessions is None or not self._expected:
            return
        if self.sessions.have_resumed(self._expected):
            self._start_deciding()

    def _start_deciding(self) -> None:
        """Restores the announced state and begins to decide: the members have reported, or RESUME_WAIT_S is over."""
        self._cancel_resume_timer()
        self._hand_over.restore(self._loop.time())
        self._dispatcher.decide_until(self._until_s)

    def _cancel_resume_timer(self) -> None:
        if self._resume_timer is not None:
            self._resume_timer.cancel()
            self._resume_timer = None

    def stored(self, stored: messages.ResponseStored, by: LeaseServer) -> None:
        """Records the owner of a stored response and announces it to all members, if this member leads."""
        if self.sessions is not None:
            self.sessions.stored(stored, by)

    def _changed(self) -> None:
        if self.sessions is not None:
            self.sessions.changed()

    def raise_epoch(self, epoch: int) -> None:
        """Makes this member take the lock again with an epoch above `epoch`.

        Called when a member knows a higher epoch than this leader, because the store has lost its data.
        """
        assert self._election is not None
        self._election.raise_epoch(epoch)

    # --- member side --------------------------------------------------------------------------------------------------

    def welcomed(self, connection: LeaderConnection, welcome: Welcome) -> None:
        """Follows the leader at the other end of `connection`, which has accepted this member."""
        if welcome.epoch < self.epoch or self.is_leader:
            # A former leader that has not noticed its successor yet.
            connection.set_refusal("another member leads by now")
            return
        if self._connection is not None and self._connection is not connection:
            self._connection.link.abort()
            self._disconnect(self._connection)
        self._connection, self.epoch, self.leadership = connection, welcome.epoch, connection.leadership
        self._dialer.failure = None
        connection.set_refusal(None)
        _log.info("cluster_follows", epoch=welcome.epoch, without_leader_s=self._note_new_leader(), leader=welcome.name)
        if welcome.config != self.me.config:
            _log.warning("cluster_config_differs", member=welcome.name, version=welcome.version)
        self.leasing.follow(connection.link)
        # The Hello may have changed while connecting.
        self._send_hello()

    def _disconnect(self, connection: LeaderConnection) -> None:
        self.leasing.detach(connection.link)
        if self._connection is connection:
            self._connection, self._leader_lost_s = None, self._loop.time()

    def lost(self, connection: LeaderConnection, why: str) -> None:
        """Handles the end of a connection to a leader. If this member follows that leader, it looks for a new one."""
        connection.set_refusal(why)
        if self._connection is connection:
            _log.warning("cluster_leader_lost", leader=connection.leadership.holder, epoch=self.epoch, why=why)
            self._disconnect(connection)
            assert self._election is not None
            self._election.check_soon()

    def _handle_as_member(self, message: Message) -> None:
        """Handles a message of the leader, local or remote."""
        match message:
            case messages.Answer():
                self.leasing.handle(message)
            case messages.ResponseStored():
                self._callbacks.record_owner(message)
            case messages.Members(names):
                self.members = names
            case messages.Balances() | messages.RateDebts() | messages.Learned() if not self.is_leader:
                self._hand_over.record(message, self._loop.time())
            case messages.Drained() if not self.is_leader:
                self._callbacks.apply_drained(message)
            case _:
                pass

    def handle(self, connection: LeaderConnection, message: ToMember) -> None:
        """Handles a message of a leader in another process."""
        match message:
            case Welcome():
                self.welcomed(connection, message)
            case NotLeader(why):
                self.lost(connection, why)
                connection.link.abort()
            case _ if connection is self._connection:
                self._handle_as_member(message)
            case _:
                pass

    # --- lock store ---------------------------------------------------------------------------------------------------

    def _set_lock_error(self, why: str | None) -> None:
        before, self.lock_error = self.lock_error, why
        if (why is None) is (before is None):
            return
        if why is None:
            _log.info("cluster_lock_reachable")
        else:
            _log.warning("cluster_lock_unreachable", why=why)
        self._send_hello()
