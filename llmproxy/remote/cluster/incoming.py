"""Connections that other processes open to this member. Before its Hello, the peer may be any process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from llmproxy.remote.cluster.compatibility import FROM_MEMBER
from llmproxy.remote.cluster.election import EPOCH_MAX
from llmproxy.remote.cluster.sessions import MemberSession
from llmproxy.remote.link import Link
from llmproxy.remote.messages import PROTOCOL, FromMember, Hello, NotLeader, Ping

if TYPE_CHECKING:
    from llmproxy.remote.cluster.cluster import Cluster

MEMBERS_MAX = 256
CLAIMED_EPOCH_MAX = EPOCH_MAX // 2
"""Limit of the epoch that a member may claim in its Hello. It leaves half of all epochs for future elections."""

_log = structlog.get_logger()


class IncomingConnection:
    """A connection that another process opened to this member of `cluster`."""

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
            self._end("there was a later election than that of this leader")
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
