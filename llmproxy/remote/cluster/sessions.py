"""The members for which one of them schedules while it leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import structlog

from llmproxy.lifecycle.background import spawned
from llmproxy.remote.cluster.channel import Sender
from llmproxy.remote.cluster.hand_over import HandOver
from llmproxy.remote.cluster.protocol import Hello, Members, NotLeader, Welcome
from llmproxy.remote.cluster.session import MemberSession, Shared
from llmproxy.remote.workers import protocol
from llmproxy.remote.workers.protocol import Message
from llmproxy.remote.workers.session import SchedulerContext


class Sessions:
    """`me` says who leads. `on_resumed` is called when a member has said what it has."""

    def __init__(
        self, me: Callable[[], Hello], context: SchedulerContext, shared: Shared, hand_over: HandOver,
        log: structlog.typing.FilteringBoundLogger, on_resumed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._me = me
        self._context = context
        self._shared = shared
        self._hand_over = hand_over
        self._log = log
        self._on_resumed = on_resumed
        self.by_name: dict[str, MemberSession] = {}
        self._drained = shared.drained()
        self._differing: set[str] = set()

    def join(self, hello: Hello, sender: Sender) -> MemberSession:
        """A member is there, perhaps again, and is reached by `sender`."""
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
        session.send(self._shared.drained())
        for told in self._hand_over.all(asyncio.get_running_loop().time()):
            session.send(told)
        # Frames are split, so that there may be as many as are kept.
        for owner in () if sender.local else self._shared.owners():
            session.send(owner)
        self._tell_members()
        return session

    async def _until_gone(self, session: MemberSession) -> None:
        await session.gone.wait()
        if self.by_name.get(session.hello.name) is session:
            del self.by_name[session.hello.name]
            self._differing.discard(session.hello.name)
            self._log.info("cluster_member_gone", member=session.hello.name)
            self._tell_members()

    def _tell_members(self) -> None:
        self.send_all(Members(tuple(sorted(self.by_name))))

    def have_resumed(self, expected: Collection[str]) -> bool:
        """Whether all of these members said what they have."""
        return all(name in self.by_name and self.by_name[name].resumed for name in expected)

    def that_would_lead(self) -> list[str]:
        """The other members that are there, and would lead in the place of this one."""
        mine = self._me().name
        return [name for name, one in self.by_name.items() if one.connected and one.hello.stands and name != mine]

    def stored(self, stored: protocol.ResponseStored, by: object) -> None:
        """A response was stored for a client of the member of the session `by`: every other member is told."""
        holds = self._shared.stored(stored)
        for session in self.by_name.values():
            if session is not by or holds != stored:
                session.send(holds)

    def changed(self) -> None:
        """Backends, or what was done to them, may have changed."""
        if (drained := self._shared.drained()) != self._drained:
            self._drained = drained
            self.send_all(drained)

    def send_all(self, message: Message) -> None:
        """Tell all members."""
        for session in self.by_name.values():
            session.send(message)

    def end(self, why: str) -> None:
        """Another process schedules, or none."""
        sessions, self.by_name = self.by_name, {}
        for session in sessions.values():
            session.send(NotLeader(why))
            session.end(goes_on=True)
