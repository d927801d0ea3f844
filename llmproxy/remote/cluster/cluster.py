"""One member of a cluster: its name and address, the shards for which it may lead, and who connects to it."""

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
from llmproxy.remote.cluster.channel import HELLO_BYTES_MAX, MemberChannel
from llmproxy.remote.cluster.election import EPOCH_MAX, SEEK_S, LockStore
from llmproxy.remote.cluster.network import Network
from llmproxy.remote.cluster.protocol import FROM_MEMBER, PROTOCOL, FromMember, Hello, NotLeader, Ping
from llmproxy.remote.cluster.relays import Relays
from llmproxy.remote.cluster.session import MemberSession, Shared
from llmproxy.remote.cluster.shard import Shard
from llmproxy.remote.workers import protocol
from llmproxy.remote.workers.remote import Calls
from llmproxy.remote.workers.session import SchedulerContext
from llmproxy.scheduling.dispatcher import Dispatcher

MEMBERS_MAX = 256
CLAIMED_EPOCH_MAX = EPOCH_MAX // 2
"""Members are believed up to here about turns that the store has forgotten: it leaves as many for those to come."""
PATIENCE_S = 2 * SEEK_S
"""A free lock is left to others for so long by a member, for each shard that it leads already."""
PATIENCE_MAX_S = 1.0
"""However many it leads: what waits is refused some seconds after its leader is gone. Who hands a shard over leaves it
to others for so long before it stands for it again."""
BALANCE_S = 5.0
"""How often a member looks whether another one leads fewer shards, and one may be handed over."""
STAYS_S = 60.0
"""A shard that was handed over, and came back, is not handed over again for so long."""

Page = Callable[[protocol.PageRequest], Awaitable[protocol.PageResponse]]
_log = structlog.get_logger()


class Cluster:
    """A member, from `start` to `close`."""

    def __init__(
        self, me: Hello, held_s: float, stores: Mapping[str, LockStore], dispatcher: Dispatcher, relays: Relays,
        context: SchedulerContext, shared: Callable[[str], Shared], network: Network, alone_after_s: float = inf,
    ) -> None:  # fmt: skip
        """`stores` have the lock of each shard of the dispatcher, and `shared` is what its members share."""
        self.me = me
        self.relays = relays
        self.network = network
        self._pools = dispatcher.pools
        self._context = context
        self.shards = {
            name: Shard(
                name, self, held_s, stores[name], dispatcher, relays.by_shard[name], shared(name), alone_after_s
            )
            for name in self._pools.shards.names
        }
        self.default = self.shards[DEFAULT]
        self.leaving = False
        self.incoming: set[Incoming] = set()
        self.refused: dict[str, str] = {}
        """By host, why somebody was refused last."""
        self._handed_over_s: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        dispatcher.on_change = self._changed

    @property
    def id(self) -> str:
        """The name of this process, which no other process has."""
        return f"{self.me.name}/{self.me.incarnation}"

    def shard_of(self, pool: str | None) -> Shard:
        """The shard of a pool, or of what belongs to none."""
        return self.shards[self._pools.shards.of(pool)]

    def shard_of_backend(self, backend: str) -> Shard:
        """The shard of a backend."""
        return self.shards[self._pools.shard_of(backend)]

    # --- start and end ------------------------------------------------------------------------------------------------

    async def start(self, page: Page, known: Awaitable[object] | None = None) -> None:
        """Accept other members, and stand for election. `page` answers what their clients ask of the leader.

        It stands when `known` is over: a leader that knows no backend yet would refuse what waits at the others. Raises
        OSError, ConfigError.
        """
        self.me = replace(self.me, address=await self.network.listen(lambda: Incoming(self).channel))
        context = replace_field(self._context, page=page)
        for shard in self.shards.values():
            shard.start(context, stands=known is None)
        if known is not None:
            self._tasks.append(spawned(self._stand(known), "stand"))
        if len(self.shards) > 1:
            self._tasks.append(supervised(self._balance, "balance"))

    async def _stand(self, known: Awaitable[object]) -> None:
        await known
        for shard in self.shards.values():
            shard.stand()

    def reconfigured(self, config: str) -> None:
        """The configuration of this member is another one by now, with this hash."""
        self.me = replace(self.me, config=config)
        for shard in self.shards.values():
            shard.introduce()

    def begin_shutdown(self) -> None:
        """Let other members lead, where there are any. Requests of this member go on."""
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
        for one in [*self.incoming]:
            one.channel.close()

    def stored(self, stored: protocol.ResponseStored, by: object) -> None:
        """See `Sessions.stored`. Only a leader has sessions that call it."""
        if self.default.sessions is not None:
            self.default.sessions.stored(stored, by)

    def _changed(self) -> None:
        for shard in self.shards.values():
            if shard.sessions is not None:
                shard.sessions.changed()

    # --- who leads what -----------------------------------------------------------------------------------------------

    @property
    def patience_s(self) -> float:
        """How long a lock that is free is left to other members, which may lead fewer shards."""
        leads = sum(shard.leads for shard in self.shards.values())
        return leads * min(PATIENCE_S, PATIENCE_MAX_S / len(self.shards))

    async def _balance(self) -> None:
        """Hand one shard over at a time, until no member leads two more than another one."""
        while True:
            await asyncio.sleep(BALANCE_S)
            for shard, to in self._to_hand_over():
                self._handed_over_s[shard.name] = asyncio.get_running_loop().time()
                await shard.hand_over(f"{to} leads fewer pools", PATIENCE_MAX_S)
                break

    def _to_hand_over(self) -> list[tuple[Shard, str]]:
        """The shards that this member leads, and who should lead one of them in its place."""
        now = asyncio.get_running_loop().time()
        led = Counter(shard.leader for shard in self.shards.values())
        mine = [(shard, shard.sessions) for shard in self.shards.values() if shard.sessions is not None]
        found = []
        for shard, sessions in reversed(mine):
            to = min(sessions.that_would_lead(), key=lambda name: led[name], default=None)
            stays = now < self._handed_over_s.get(shard.name, -inf) + STAYS_S
            if to is not None and led[to] <= len(mine) - 2 and not stays:
                found.append((shard, to))
        return found

    # --- for clients and those who run the proxy ----------------------------------------------------------------------

    @property
    def refuses(self) -> bool:
        """Whether this member has had no leader of any shard for so long that it refuses all requests."""
        return all(shard.refuses for shard in self.shards.values())

    @property
    def calls(self) -> Calls | None:
        """Calls of the leader of the default shard; None where this member leads it, or nobody does."""
        return self.default.calls

    def state(self) -> tuple[ShardState, ...]:
        """What metrics show."""
        return tuple(shard.state() for shard in self.shards.values())


class Incoming:
    """A connection that another member opened. Before its first message it may be anybody's."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._session: MemberSession | None = None
        self._refused = False
        self.channel: MemberChannel[FromMember] = MemberChannel(
            FROM_MEMBER, self._take, self._lost, HELLO_BYTES_MAX, self._broken
        )
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
        elif not 0 <= hello.epoch <= CLAIMED_EPOCH_MAX:
            self._refuse("it knows of a turn that nobody can have had")
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
            self.channel.introduced()
            cluster.network.introduced(self.channel.transport)
            self._session = shard.join(hello, self.channel)

    def _refuse(self, why: str) -> None:
        peer, refused = self.channel.peer, self._cluster.refused
        host = str(peer[0]) if isinstance(peer, tuple) else ""
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

    def _broken(self, why: str) -> None:
        # Who is no member may send anything: its text is logged nowhere, and its address once.
        del why
        self._refuse("it sent what is no frame of a member")

    def _lost(self) -> None:
        self._cluster.incoming.discard(self)
        if self._session is not None:
            self._session.detach(self.channel)
