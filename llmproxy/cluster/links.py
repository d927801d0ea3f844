"""Both ends of a connection between two members, until each knows who the other is."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING

import structlog

from llmproxy.cluster.channel import MemberChannel
from llmproxy.cluster.election import Leadership
from llmproxy.cluster.protocol import FROM_MEMBER, PROTOCOL, TO_MEMBER, FromMember, Hello, NotLeader, Ping, ToMember
from llmproxy.cluster.session import MemberSession
from llmproxy.workers.remote import Calls

if TYPE_CHECKING:
    from llmproxy.cluster.cluster import Cluster
    from llmproxy.cluster.shard import Shard

MEMBERS_MAX = 256
CONNECT_S = 2.0
"""How long a member that connects, or is connected to, may take to say who it is."""

_log = structlog.get_logger()


class LeaderLink:
    """The connection of this member to the leader of a shard."""

    def __init__(self, shard: Shard, leadership: Leadership) -> None:
        self.leadership = leadership
        self.channel: MemberChannel[ToMember] = MemberChannel(
            TO_MEMBER, lambda message: shard.take(self, message), lambda: shard.lost(self, self._ended())
        )
        self.calls = Calls(self.channel, count(-1, -1))
        self.answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """None once the leader took this member in, or why it did not."""

    def _ended(self) -> str:
        if self.answer.done():
            return "the connection ended"
        return "the connection ended before an answer, as where only one of two members uses TLS"

    def answered(self, why: str | None) -> None:
        if not self.answer.done():
            self.answer.set_result(why)


class Incoming:
    """A connection that another member opened. Before its first message it may be anybody's."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._session: MemberSession | None = None
        self._refused = False
        self.channel: MemberChannel[FromMember] = MemberChannel(FROM_MEMBER, self._take, self._lost)
        self._silent = asyncio.get_running_loop().call_later(CONNECT_S, self.channel.abort)
        cluster.incoming.add(self)

    def _take(self, message: FromMember) -> None:
        if self._session is not None:
            if self._session.hears(self.channel):
                self._session.take(message)
            else:
                self.channel.abort()
        elif self._refused:
            pass
        elif isinstance(message, Hello):
            self._join(message)
        elif not isinstance(message, Ping):
            self._refuse("the first message is no Hello")

    def _join(self, hello: Hello) -> None:
        cluster, shard = self._cluster, self._cluster.shards.get(hello.shard)
        if shard is None:
            self._refuse(f"the pool {hello.shard} has no lock of its own here: give all members the same cluster.pools")
            return
        members = {} if shard.sessions is None else shard.sessions.by_name
        other = members.get(hello.name)
        if hello.protocol != PROTOCOL:
            self._refuse(f"it speaks version {hello.protocol} of the protocol, and not {PROTOCOL}")
        elif not cluster.network.trusts(self.channel.transport):
            self._refuse("its certificate holds another name")
        elif not shard.leads:
            self._end("this member does not lead")
        elif hello.epoch > shard.epoch:
            shard.outbid(hello.epoch)
            self._end("there was a later turn than that of this leader")
        elif other is not None and other.connected and other.hello.incarnation != hello.incarnation:
            self._refuse(f"another member has its name, {hello.name}: give each a cluster.member of its own")
        elif len(members) >= MEMBERS_MAX and other is None:
            self._refuse(f"there are {MEMBERS_MAX} members")
        else:
            self._silent.cancel()
            self._session = shard.join(hello, self.channel)

    def _refuse(self, why: str) -> None:
        peer, refused = self.channel.transport.get_extra_info("peername"), self._cluster.refused
        host = str(peer[0]) if peer else ""
        # It tries again several times a second.
        if refused.get(host) != why:
            if len(refused) >= MEMBERS_MAX:
                refused.clear()
            refused[host] = why
            _log.warning("cluster_member_refused", peer=str(peer), why=why)
        self._end(why)

    def _end(self, why: str) -> None:
        self._refused = True
        self.channel.send(NotLeader(why))
        self.channel.close()

    def _lost(self) -> None:
        self._silent.cancel()
        self._cluster.incoming.discard(self)
        if self._session is not None:
            self._session.detach(self.channel)
