"""A cluster of proxies in virtual time: production election, frames and sessions over a simulated network."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmproxy.lab.run.proxy import LabProxy
from llmproxy.observe import logs
from llmproxy.remote import messages
from llmproxy.remote.cluster.cluster import Cluster
from llmproxy.remote.cluster.election import Leadership, StoreError
from llmproxy.remote.cluster.hand_over import MemberCallbacks
from llmproxy.remote.cluster.leasing import ClusterLeasing
from llmproxy.remote.messages import PROTOCOL, Drained, Hello, Learned
from llmproxy.remote.server import Services

LOCK_S = 4.0  # The default of `cluster.lock_s`.


class _Pipe(asyncio.Transport):
    """An end of a connection. Bytes arrive at the other end after `delay_s`, if that end is still open."""

    def __init__(self, protocol: asyncio.Protocol, delay_s: float) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._delay_s = delay_s
        self.other: _Pipe
        self._open = True
        self._under_way: deque[bytes] = deque()

    def write(self, data: Any) -> None:
        if self._open:
            # Timers of one moment run in any order; the queue keeps the order of the bytes.
            self._under_way.append(bytes(data))
            self._loop.call_later(self._delay_s, self._arrives)

    def _arrives(self) -> None:
        self.other._arrived(self._under_way.popleft())

    def is_closing(self) -> bool:
        return not self._open

    def _arrived(self, data: bytes) -> None:
        if self._open:
            self._protocol.data_received(data)

    def close(self) -> None:
        if self._open:
            self._loop.call_later(self._delay_s, self.other._ended)
            self._ended()

    abort = close

    def _ended(self) -> None:
        if self._open:
            self._open = False
            self._loop.call_soon(self._protocol.connection_lost, None)

    def get_write_buffer_size(self) -> int:
        return 0


class VirtualNetwork:
    """The connections of one member. All members share `listening`, which maps addresses to their networks."""

    def __init__(self, address: str, rtt_s: float, listening: dict[str, VirtualNetwork]) -> None:
        self.address = address
        self._rtt_s = rtt_s
        self._listening = listening
        self._accepted: Callable[[], asyncio.Protocol] | None = None
        self._pipes: list[_Pipe] = []

    async def listen(self, accepted: Callable[[], asyncio.Protocol]) -> str:
        self._accepted = accepted
        self._listening[self.address] = self
        return self.address

    async def connect(self, address: str, connected: Callable[[], asyncio.Protocol]) -> None:
        await asyncio.sleep(self._rtt_s)
        there = self._listening.get(address)
        if there is None or there._accepted is None:
            raise ConnectionRefusedError(address)
        ends = [(self, connected()), (there, there._accepted())]
        pipes = [_Pipe(protocol, self._rtt_s / 2) for _, protocol in ends]
        pipes[0].other, pipes[1].other = pipes[1], pipes[0]
        for (network, end), pipe in zip(ends, pipes, strict=True):
            network._pipes.append(pipe)
            end.connection_made(pipe)

    def trusts(self, transport: asyncio.BaseTransport) -> bool:
        del transport
        return True

    def identified(self, transport: asyncio.BaseTransport) -> None:
        """Does nothing: all connections are trusted."""

    def close(self) -> None:
        self._listening.pop(self.address, None)

    def die(self) -> None:
        """Ends all connections of this member and refuses new ones."""
        self.close()
        for pipe in self._pipes:
            pipe.close()


class VirtualLock:
    """The leader lock of all members. A request to the lock takes `rtt_s`."""

    name = "virtual"

    def __init__(self, rtt_s: float) -> None:
        self._rtt_s = rtt_s
        self._held: Leadership | None = None
        self._until_s = 0.0
        self._epoch = 0
        self.dead: set[str] = set()

    async def take(self, wanted: Leadership, lock_s: float) -> Leadership:
        if wanted.holder in self.dead:
            raise StoreError("this member is dead")
        held = await self.holder()
        now = asyncio.get_running_loop().time()
        if held is None:
            self._epoch = max(self._epoch, wanted.epoch) + 1
            held = self._held = Leadership(wanted.holder, wanted.address, self._epoch)
        if held.holder == wanted.holder:
            self._until_s = now + lock_s
        await asyncio.sleep(self._rtt_s / 2)
        return held

    async def holder(self) -> Leadership | None:
        await asyncio.sleep(self._rtt_s / 2)
        if asyncio.get_running_loop().time() >= self._until_s:
            self._held = None
        return self._held

    async def release(self, holder: str) -> None:
        if self._held is not None and self._held.holder == holder:
            self._held = None

    async def close(self) -> None:
        """Does nothing, because no connection is open."""


@dataclass(slots=True)
class LabMember:
    """A proxy with its membership and its connections."""

    proxy: LabProxy
    cluster: Cluster
    network: VirtualNetwork


class LabCluster:
    """A cluster of these proxies, over a network with the round-trip time `rtt_s`."""

    def __init__(self, proxies: Sequence[LabProxy], rtt_s: float) -> None:
        self._lock = VirtualLock(rtt_s)
        listening: dict[str, VirtualNetwork] = {}
        self.members: list[LabMember] = []
        for number, proxy in enumerate(proxies):
            network = VirtualNetwork(f"m{number}:1", rtt_s, listening)
            self.members.append(LabMember(proxy, self._member(f"m{number}", proxy, network), network))

    def _member(self, name: str, proxy: LabProxy, network: VirtualNetwork) -> Cluster:
        proxy.leasing = leasing = ClusterLeasing(proxy.dispatcher, proxy.pools.backends)
        services = Services(proxy.dispatcher, proxy.dispatcher, _no_page, lambda _: None, lambda *_: None)
        pools = proxy.pools

        def restore(known: Learned, told_s: float) -> None:
            for name, limit in known.limits.items():
                pools.backends[name].restore(limit)
            pools.scaling.restore(known.capacities, told_s)

        shared = MemberCallbacks(
            lambda stored: stored, lambda _: None, tuple, lambda: Drained(frozenset()), lambda _: None,
            lambda: Learned(pools.known_limits(), pools.scaling.known_capacities()), restore,
        )  # fmt: skip
        me = Hello(PROTOCOL, "", name, "0", "", "", 0)
        return Cluster(me, LOCK_S, self._lock, proxy.dispatcher, leasing, services, shared, network)

    async def start(self) -> None:
        """Starts all members. The first member leads."""
        # A replay has hundreds of elections, whose log lines would hide its table.
        logs.configure("text", "error")
        for member in self.members:
            await member.cluster.start(_no_page)
            while not member.cluster.has_leader:  # noqa: ASYNC110 - it costs no time
                await asyncio.sleep(0.05)

    @property
    def leader(self) -> LabMember | None:
        """The living leader; None during an election."""
        return next(
            (one for one in self.members if one.cluster.is_leader and one.cluster.id not in self._lock.dead), None
        )

    def kill(self, member: LabMember) -> None:
        """Ends a member like kill -9: the other members notice only its closed connections."""
        self._lock.dead.add(member.cluster.id)
        member.network.die()

    async def close(self) -> None:
        for member in self.members:
            await member.cluster.close()


async def _no_page(page: messages.PageRequest) -> messages.PageResponse:
    return messages.PageResponse(page.call, 404, "", (), b"")
