"""Leader side: the sessions of the members. The leases of a member survive a lost connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import structlog

from llmproxy.lifecycle.background import spawned
from llmproxy.remote import messages
from llmproxy.remote.cluster.hand_over import HandOver, MemberCallbacks
from llmproxy.remote.link import Sender
from llmproxy.remote.messages import FromMember, FromWorker, Hello, Members, Message, NotLeader, Resumed, Welcome
from llmproxy.remote.server import LeaseServer, Services

GRACE_S = 10.0
"""How long the leases of a member stay booked after its connection was lost. Their responses continue meanwhile."""

_log = structlog.get_logger()


class MemberSession:
    """Serves one member over successive connections, until the member is gone.

    `on_resumed` is called after the `Resumed` of the member.
    """

    def __init__(self, services: Services, hello: Hello, on_resumed: Callable[[], None]) -> None:
        self._pools = services.dispatcher.pools
        self._loop = asyncio.get_running_loop()
        self._on_resumed = on_resumed
        self._grace: asyncio.TimerHandle | None = None
        self.hello = hello
        self.server = LeaseServer(services, self._handle)
        self.over = False
        """Whether the session has ended; a reconnecting member then gets a new session."""
        self.gone = asyncio.Event()
        """Set when the session has ended and none of its requests is left."""

    @property
    def connected(self) -> bool:
        """Whether the member has a connection."""
        return self.server.link is not None

    def attach(self, link: Sender) -> None:
        """Use a new connection of the member, on which it will report its requests and leases."""
        self.server.attach(link)
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def detach(self, link: Sender) -> None:
        """Note a lost connection. The leases of the member stay booked for GRACE_S."""
        if self.server.link is link:
            self.server.detach()
            self._grace = self._loop.call_later(GRACE_S, self.end)

    def end(self, *, requests_continue: bool = False) -> None:
        """End the session. `requests_continue`: the member goes on, and another leader takes its requests over."""
        if self._grace is not None:
            self._grace.cancel()
        if not self.over:
            self.over = True
            self.server.end()
            self._loop.call_soon(self._end_requests, requests_continue)

    def _end_requests(self, requests_continue: bool) -> None:
        """Forget the requests, which the member itself logs. Their leases have been returned by now."""
        for request in list(self.server.requests.values()):
            if requests_continue:
                self._pools.goes_on_elsewhere(request, self._loop.time())
            self.server.forget(request.id)
        self.gone.set()

    def _handle(self, message: FromWorker | FromMember) -> None:
        """Handle a message that does not concern leases."""
        if isinstance(message, Hello):
            # The member has reloaded its configuration. Its session is found by its name, which must not change.
            self.hello = message if message.name == self.hello.name else self.hello
        elif isinstance(message, Resumed):
            self._on_resumed()


class MemberSessions:
    """The members, while this member leads.

    `me` returns the Hello of this member. `on_resumed` is called after the `Resumed` of each member.
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
        """Attach a member that has connected or reconnected, and send it the state of the leader."""
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
        session.server.send(self._callbacks.drained())
        for message in self._hand_over.full_state(asyncio.get_running_loop().time()):
            session.server.send(message)
        # Any number fits, because the channel splits frames.
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
        """Whether all these members have reported their requests and leases."""
        return all(name in self.by_name and self.by_name[name].server.resumed for name in expected)

    def candidates(self) -> list[str]:
        """Returns the connected members that could lead in place of this member."""
        mine = self._me().name
        sessions = self.by_name.items()
        return [name for name, other in sessions if other.connected and other.hello.candidate and name != mine]

    def stored(self, stored: messages.ResponseStored, by: object) -> None:
        """Record a stored response that the session `by` reported, and announce it to the other members."""
        recorded = self._callbacks.record_stored(stored)
        for session in self.by_name.values():
            if session.server is not by or recorded != stored:
                session.server.send(recorded)

    def changed(self) -> None:
        """Announce the drained backends, if they have changed."""
        if (drained := self._callbacks.drained()) != self._drained:
            self._drained = drained
            self.send_all(drained)

    def send_all(self, message: Message) -> None:
        """Send a message to all members."""
        for session in self.by_name.values():
            session.server.send(message)

    def end(self, why: str) -> None:
        """End all sessions, because this member does not lead any more."""
        sessions, self.by_name = self.by_name, {}
        for session in sessions.values():
            session.server.send(NotLeader(why))
            session.end(requests_continue=True)
