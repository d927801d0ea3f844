"""The leader side: the sessions of the members. A member's leases survive a lost connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import structlog

from llmproxy.lifecycle.background import spawned
from llmproxy.remote import messages
from llmproxy.remote.cluster.election import EPOCH_MAX
from llmproxy.remote.cluster.hand_over import HandOver, MemberCallbacks
from llmproxy.remote.link import FROM_MEMBER, Link, Sender
from llmproxy.remote.messages import (
    PROTOCOL,
    FromMember,
    FromWorker,
    Hello,
    Members,
    Message,
    NotLeader,
    Ping,
    Resumed,
    Welcome,
)
from llmproxy.remote.server import LeaseServer, Services

if TYPE_CHECKING:
    from llmproxy.remote.cluster.cluster import Cluster

GRACE_S = 10.0  # A member's leases stay booked for this time after its connection was lost.
MEMBERS_MAX = 256
CLAIMED_EPOCH_MAX = EPOCH_MAX // 2  # Highest accepted epoch in a Hello. Higher epochs are left for elections.

_log = structlog.get_logger()


class MemberSession:
    """Serves one member over successive connections. `on_resumed` is called after each `Resumed` of the member."""

    def __init__(self, services: Services, hello: Hello, on_resumed: Callable[[], None]) -> None:
        self._pools = services.dispatcher.pools
        self._loop = asyncio.get_running_loop()
        self._on_resumed = on_resumed
        self._grace: asyncio.TimerHandle | None = None
        self.hello = hello
        self.server = LeaseServer(services, self._handle)
        self.over = False  # Whether the session has ended; a reconnecting member then gets a new session.
        self.gone = asyncio.Event()  # Set when the session has ended and none of its requests is left.

    @property
    def connected(self) -> bool:
        return self.server.link is not None

    def attach(self, link: Sender) -> None:
        """Uses a new connection of the member, on which it will report its requests and leases."""
        self.server.attach(link)
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def detach(self, link: Sender) -> None:
        """Handles a lost connection. The member's leases stay booked for GRACE_S."""
        if self.server.link is link:
            self.server.detach()
            self._grace = self._loop.call_later(GRACE_S, self.end)

    def end(self, *, requests_continue: bool = False) -> None:
        """Ends the session. `requests_continue`: the member goes on, and another leader takes over its requests."""
        if self._grace is not None:
            self._grace.cancel()
        if not self.over:
            self.over = True
            self.server.end()
            self._loop.call_soon(self._end_requests, requests_continue)

    def _end_requests(self, requests_continue: bool) -> None:
        """Forgets the requests, which the member itself logs. Their leases are already returned."""
        for request in list(self.server.requests.values()):
            if requests_continue:
                self._pools.goes_on_elsewhere(request, self._loop.time())
            self.server.forget(request.id)
        self.gone.set()

    def _handle(self, message: FromWorker | FromMember) -> None:
        """Handles `Resumed`, and a message that `LeaseServer` does not handle."""
        if isinstance(message, Hello):
            # A field of the Hello has changed. The session is found by the member's name, which must not change.
            self.hello = message if message.name == self.hello.name else self.hello
        elif isinstance(message, Resumed):
            self._on_resumed()


class MemberSessions:
    """The sessions of all members while this member leads. `me` returns the Hello of this member.

    `on_resumed` is called after each `Resumed` of a member.
    """

    def __init__(
        self, me: Callable[[], Hello], services: Services, callbacks: MemberCallbacks, hand_over: HandOver,
        on_resumed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._me = me
        self._services = services
        self._callbacks = callbacks
        self._hand_over = hand_over
        self._on_resumed = on_resumed
        self.by_name: dict[str, MemberSession] = {}
        self._drained = callbacks.drained()
        self._differing: set[str] = set()

    def join(self, hello: Hello, sender: Sender) -> MemberSession:
        """Opens or resumes the session of a member that has connected, and sends the leader's state to the member."""
        me, session = self._me(), self.by_name.get(hello.name)
        if session is not None and session.hello.incarnation != hello.incarnation:
            session.end()
        if session is None or session.over:
            session = self.by_name[hello.name] = MemberSession(self._services, hello, self._on_resumed)
            spawned(self._until_gone(session), f"member {hello.name}")
            if hello.config != me.config and hello.name not in self._differing:
                self._differing.add(hello.name)
                _log.warning("cluster_config_differs", member=hello.name, version=hello.version)
        session.attach(sender)
        session.server.send(Welcome(me.epoch, me.name, me.version, me.config))
        now = asyncio.get_running_loop().time()
        session.server.send(self._callbacks.drained().in_message(now))
        for message in self._hand_over.full_state(now):
            session.server.send(message)
        # Any number fits, because the link splits frames.
        for owner in () if sender.local else self._callbacks.stored_responses():
            session.server.send(owner)
        self._announce_members()
        return session

    async def _until_gone(self, session: MemberSession) -> None:
        await session.gone.wait()
        if self.by_name.get(session.hello.name) is session:
            del self.by_name[session.hello.name]
            self._differing.discard(session.hello.name)
            _log.info("cluster_member_gone", member=session.hello.name)
            self._announce_members()

    def _announce_members(self) -> None:
        self.send_all(Members(tuple(sorted(self.by_name))))

    def have_resumed(self, expected: Collection[str]) -> bool:
        """Returns whether all members with these names have connected and reported their requests and leases."""
        return all(name in self.by_name and self.by_name[name].server.resumed for name in expected)

    def candidates(self) -> list[str]:
        """Returns the names of connected members that could lead instead of this member."""
        mine = self._me().name
        sessions = self.by_name.items()
        return [name for name, other in sessions if other.connected and other.hello.candidate and name != mine]

    def stored(self, stored: messages.ResponseStored, by: object) -> None:
        """Records a stored response that the client of `by` reported, and announces it to the other members.

        If the response already has another owner, announces this owner to the client too.
        """
        recorded = self._callbacks.record_stored(stored)
        for session in self.by_name.values():
            if session.server is not by or recorded != stored:
                session.server.send(recorded)

    def changed(self) -> None:
        """Announces the drained backends, if they have changed."""
        if (drained := self._callbacks.drained()) != self._drained:
            self._drained = drained
            self.send_all(drained.in_message(asyncio.get_running_loop().time()))

    def send_all(self, message: Message) -> None:
        for session in self.by_name.values():
            session.server.send(message)

    def end(self, why: str) -> None:
        """Ends all sessions, because this member no longer leads."""
        sessions, self.by_name = self.by_name, {}
        for session in sessions.values():
            session.server.send(NotLeader(why))
            session.end(requests_continue=True)


class IncomingConnection:
    """A connection that another process opened to this member of `cluster`. The process is unknown until its Hello."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._session: MemberSession | None = None
        self._refused = False
        self.link: Link[FromMember] = Link(FROM_MEMBER, self._handle, self._lost, local=False, on_broken=self._broken)
        cluster.incoming.add(self)

    def _handle(self, message: FromMember) -> None:
        if self._session is not None:
            if self._session.server.link is self.link:
                self._session.server.handle(message)
            else:
                self.link.abort()
        elif self._refused:
            pass
        elif isinstance(message, Hello):
            self._join(message)
        elif not isinstance(message, Ping):
            self._refuse("the first message is no Hello")

    def _join(self, hello: Hello) -> None:
        cluster = self._cluster
        members = {} if cluster.sessions is None else cluster.sessions.by_name
        other = members.get(hello.name)
        if hello.protocol != PROTOCOL:
            self._refuse(f"it speaks version {hello.protocol} of the protocol, and not {PROTOCOL}")
        elif not cluster.network.trusts(self.link.transport):
            self._refuse("its certificate holds another name")
        elif not 0 <= hello.epoch <= CLAIMED_EPOCH_MAX:
            self._refuse("it claims a leader epoch that no election can have reached")
        elif cluster.sessions is None:
            self._end("this member does not lead")
        elif hello.epoch > cluster.epoch:
            cluster.raise_epoch(hello.epoch)
            self._end("a later leader was elected")
        elif other is not None and other.connected and other.hello.incarnation != hello.incarnation:
            self._refuse(f"another member has its name, {hello.name}: give each a cluster.member of its own")
        elif len(members) >= MEMBERS_MAX and other is None:
            self._refuse(f"there are {MEMBERS_MAX} members")
        else:
            self.link.identified()
            cluster.network.identified(self.link.transport)
            self._session = cluster.sessions.join(hello, self.link)

    def _refuse(self, why: str) -> None:
        peer, refused = self.link.peer, self._cluster.refused
        host = str(peer[0]) if isinstance(peer, tuple) else ""
        # The peer retries several times a second.
        if refused.get(host) != why:
            if len(refused) >= MEMBERS_MAX:
                refused.clear()
            refused[host] = why
            _log.warning("cluster_member_refused", peer=str(peer), why=why)
        self._end(why)

    def _end(self, why: str) -> None:
        self._refused = True
        self.link.send(NotLeader(why))
        self.link.close()

    def _broken(self, why: str) -> None:
        # The peer is not identified and may send anything: log its address once, and none of its bytes.
        del why
        self._refuse("it sent an invalid frame")

    def _lost(self) -> None:
        self._cluster.incoming.discard(self)
        if self._session is not None:
            self._session.detach(self.link)
