"""Leader side: the sessions of all members of a shard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import structlog

from llmproxy.lifecycle.background import spawned
from llmproxy.remote.cluster.channel import Sender
from llmproxy.remote.cluster.hand_over import HandOver
from llmproxy.remote.cluster.member_session import MemberCallbacks, MemberSession
from llmproxy.remote.cluster.protocol import Hello, Members, NotLeader, Welcome
from llmproxy.remote.workers import protocol
from llmproxy.remote.workers.protocol import Message
from llmproxy.remote.workers.session import SchedulerContext


class MemberSessions:
    """The members of a shard, while this member leads it.

    `me` returns the Hello of this member. `on_resumed` is called after the `Resumed` of each member.
    """

    def __init__(
        self, me: Callable[[], Hello], context: SchedulerContext, callbacks: MemberCallbacks, hand_over: HandOver,
        log: structlog.typing.FilteringBoundLogger, on_resumed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._me = me
        self._context = context
        self._callbacks = callbacks
        self._hand_over = hand_over
        self._log = log
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
            session = self.by_name[hello.name] = MemberSession(self._context, hello, self._on_resumed)
            spawned(self._until_gone(session), f"member {hello.name}")
            if hello.config != me.config and hello.name not in self._differing:
                self._differing.add(hello.name)
                self._log.warning("cluster_config_differs", member=hello.name, version=hello.version)
        session.attach(sender)
        session.send(Welcome(me.epoch, me.name, me.version, me.config))
        session.send(self._callbacks.drained())
        for message in self._hand_over.full_state(asyncio.get_running_loop().time()):
            session.send(message)
        # Any number fits, because the channel splits frames.
        for owner in () if sender.local else self._callbacks.stored_responses():
            session.send(owner)
        self._announce_members()
        return session

    async def _until_gone(self, session: MemberSession) -> None:
        await session.gone.wait()
        if self.by_name.get(session.hello.name) is session:
            del self.by_name[session.hello.name]
            self._differing.discard(session.hello.name)
            self._log.info("cluster_member_gone", member=session.hello.name)
            self._announce_members()

    def _announce_members(self) -> None:
        self.send_all(Members(tuple(sorted(self.by_name))))

    def have_resumed(self, expected: Collection[str]) -> bool:
        """Whether all these members have reported their requests and leases."""
        return all(name in self.by_name and self.by_name[name].resumed for name in expected)

    def candidates(self) -> list[str]:
        """Returns the connected members that could lead in place of this member."""
        mine = self._me().name
        sessions = self.by_name.items()
        return [name for name, other in sessions if other.connected and other.hello.candidate and name != mine]

    def stored(self, stored: protocol.ResponseStored, by: object) -> None:
        """Record a stored response that the session `by` reported, and announce it to the other members."""
        recorded = self._callbacks.record_stored(stored)
        for session in self.by_name.values():
            if session is not by or recorded != stored:
                session.send(recorded)

    def changed(self) -> None:
        """Announce the drained backends, if they have changed."""
        if (drained := self._callbacks.drained()) != self._drained:
            self._drained = drained
            self.send_all(drained)

    def send_all(self, message: Message) -> None:
        """Send a message to all members."""
        for session in self.by_name.values():
            session.send(message)

    def end(self, why: str) -> None:
        """End all sessions, because this member does not lead any more."""
        sessions, self.by_name = self.by_name, {}
        for session in sessions.values():
            session.send(NotLeader(why))
            session.end(requests_continue=True)
