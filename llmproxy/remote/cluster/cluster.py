"""This process as a member of a cluster: its address, its shards, and the connections of other members."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace as replace_field
from math import inf

import structlog
from msgspec.structs import replace

from llmproxy.core.shards import DEFAULT
from llmproxy.lifecycle.background import spawned, supervised
from llmproxy.observe.metrics import ShardState
from llmproxy.remote import messages
from llmproxy.remote.cluster.compatibility import FROM_MEMBER
from llmproxy.remote.cluster.election import EPOCH_MAX, SEEK_S, LockStore
from llmproxy.remote.cluster.hand_over import MemberCallbacks
from llmproxy.remote.cluster.leasing import ClusterLeasing
from llmproxy.remote.cluster.network import Network
from llmproxy.remote.cluster.sessions import MemberSession
from llmproxy.remote.cluster.shard import Shard
from llmproxy.remote.link import Link
from llmproxy.remote.messages import PROTOCOL, FromMember, Hello, NotLeader, Ping
from llmproxy.remote.server import LeaseServer, Page, Services
from llmproxy.scheduling.dispatcher import Dispatcher

MEMBERS_MAX = 256
CLAIMED_EPOCH_MAX = EPOCH_MAX // 2
"""Limit of the epoch that a member may claim in its Hello. It leaves half of all epochs for future elections."""
DEFER_S = 2 * SEEK_S
"""For each shard that a member leads, it waits this much longer before it takes another free lock."""
DEFER_MAX_S = 1.0
"""The longest wait before a member takes a free lock: requests are refused some seconds after a leader is gone.
A member that has handed a shard over also waits this long before it campaigns for the shard again."""
BALANCE_S = 5.0
"""Interval of balancing: a leader may hand a shard over to a member that leads fewer shards."""
STAYS_S = 60.0
"""How long after a hand-over this member does not hand over the same shard again."""

_log = structlog.get_logger()


class Cluster:
    """A member of a cluster, from `start` to `close`."""

    def __init__(
        self, me: Hello, lock_s: float, stores: Mapping[str, LockStore], dispatcher: Dispatcher,
        leasing: ClusterLeasing, services: Services, callbacks: Callable[[str], MemberCallbacks],
        network: Network, standalone_after_s: float = inf,
    ) -> None:  # fmt: skip
        """`stores` has the lock of each shard. `callbacks` returns the callbacks of a shard."""
        self.me = me
        self.leasing = leasing
        self.network = network
        self._pools = dispatcher.pools
        self._services = services
        self.shards = {
            name: Shard(
                name,
                self,
                lock_s,
                stores[name],
                dispatcher,
                leasing.by_shard[name],
                callbacks(name),
                standalone_after_s,
            )
            for name in self._pools.shards.names
        }
        self.default = self.shards[DEFAULT]
        self.leaving = False
        """Whether the member is shutting down and should not lead."""
        self.incoming: set[IncomingConnection] = set()
        self.refused: dict[str, str] = {}
        """Host -> reason of its last refused connection, so that each reason is logged once."""
        self._handed_over_s: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        dispatcher.on_change = self._changed

    @property
    def id(self) -> str:
        """The unique name of this process: member name and incarnation."""
        return f"{self.me.name}/{self.me.incarnation}"

    def shard_for_pool(self, pool: str | None) -> Shard:
        """Returns the shard of a pool; for None, the default shard."""
        return self.shards[self._pools.shards.for_pool(pool)]

    def shard_for_backend(self, backend: str) -> Shard:
        """Returns the shard of a backend."""
        return self.shards[self._pools.shard_for_backend(backend)]

    # --- start and end ------------------------------------------------------------------------------------------------

    async def start(self, page: Page, known: Awaitable[object] | None = None) -> None:
        """Listen for other members, and take part in the election of each shard.

        The member campaigns only after `known`: a leader without backends would refuse the requests of all members.

        Args:
            page: Answers requests for pages that other members forward to the leader.
            known: Completes when this process knows its backends. None: it already does.

        Raises:
            OSError, ConfigError: The address cannot be used.
        """
        self.me = replace(self.me, address=await self.network.listen(lambda: IncomingConnection(self).link))
        services = replace_field(self._services, page=page)
        for shard in self.shards.values():
            shard.start(services, campaign=known is None)
        if known is not None:
            self._tasks.append(spawned(self._campaign(known), "campaign"))
        if len(self.shards) > 1:
            self._tasks.append(supervised(self._balance, "balance"))

    async def _campaign(self, known: Awaitable[object]) -> None:
        await known
        for shard in self.shards.values():
            shard.campaign()

    def reconfigured(self, config: str) -> None:
        """Announce the hash of a new configuration."""
        self.me = replace(self.me, config=config)
        for shard in self.shards.values():
            shard.send_hello()

    def begin_shutdown(self) -> None:
        """Let other members lead, if there are any. Requests of this member continue."""
        self.leaving = True
        for shard in self.shards.values():
            shard.leave()

    async def close(self) -> None:
        """Leave the cluster."""
        self.network.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(shard.close() for shard in self.shards.values()))
        for connection in [*self.incoming]:
            connection.link.close()

    def stored(self, stored: messages.ResponseStored, by: LeaseServer) -> None:
        """See `MemberSessions.stored`. Does nothing unless this member leads the default shard."""
        if self.default.sessions is not None:
            self.default.sessions.stored(stored, by)

    def _changed(self) -> None:
        for shard in self.shards.values():
            if shard.sessions is not None:
                shard.sessions.changed()

    # --- balance of leadership ----------------------------------------------------------------------------------------

    @property
    def defer_s(self) -> float:
        """See `Candidate.defer_s`. It grows with the number of shards that this member leads."""
        leads = sum(shard.is_leader for shard in self.shards.values())
        return leads * min(DEFER_S, DEFER_MAX_S / len(self.shards))

    async def _balance(self) -> None:
        """Hand over one shard at a time, while another member leads at least two shards fewer. Runs until cancelled."""
        while True:
            await asyncio.sleep(BALANCE_S)
            for shard, to in self._to_hand_over():
                self._handed_over_s[shard.name] = asyncio.get_running_loop().time()
                await shard.hand_over(f"{to} leads fewer pools", DEFER_MAX_S)
                break

    def _to_hand_over(self) -> list[tuple[Shard, str]]:
        """Returns shards that this member should hand over, each with the member that should lead it."""
        now = asyncio.get_running_loop().time()
        led = Counter(shard.leader for shard in self.shards.values())
        mine = [(shard, shard.sessions) for shard in self.shards.values() if shard.sessions is not None]
        proposals = []
        for shard, sessions in reversed(mine):
            to = min(sessions.candidates(), key=lambda name: led[name], default=None)
            stays = now < self._handed_over_s.get(shard.name, -inf) + STAYS_S
            if to is not None and led[to] <= len(mine) - 2 and not stays:
                proposals.append((shard, to))
        return proposals

    # --- for pages and metrics ----------------------------------------------------------------------------------------

    @property
    def is_refusing(self) -> bool:
        """Whether this member refuses all requests, because every shard has been without a leader for too long."""
        return all(shard.is_refusing for shard in self.shards.values())

    def state(self) -> tuple[ShardState, ...]:
        """The state of each shard, for the metrics."""
        return tuple(shard.state() for shard in self.shards.values())


class IncomingConnection:
    """A connection that another process opened. Before its Hello, the peer may be any process."""

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
        cluster, shard = self._cluster, self._cluster.shards.get(hello.shard)
        if shard is None:
            self._refuse(f"the pool {hello.shard} has no lock of its own here: give all members the same cluster.pools")
            return
        members = {} if shard.sessions is None else shard.sessions.by_name
        other = members.get(hello.name)
        if hello.protocol != PROTOCOL:
            self._refuse(f"it speaks version {hello.protocol} of the protocol, and not {PROTOCOL}")
        elif not cluster.network.trusts(self.link.transport):
            self._refuse("its certificate holds another name")
        elif not 0 <= hello.epoch <= CLAIMED_EPOCH_MAX:
            self._refuse("it claims a leader epoch that no election can have reached")
        elif not shard.is_leader:
            self._end("this member does not lead")
        elif hello.epoch > shard.epoch:
            shard.raise_epoch(hello.epoch)
            self._end("there was a later election than that of this leader")
        elif other is not None and other.connected and other.hello.incarnation != hello.incarnation:
            self._refuse(f"another member has its name, {hello.name}: give each a cluster.member of its own")
        elif len(members) >= MEMBERS_MAX and other is None:
            self._refuse(f"there are {MEMBERS_MAX} members")
        else:
            self.link.identified()
            cluster.network.identified(self.link.transport)
            self._session = shard.join(hello, self.link)

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
