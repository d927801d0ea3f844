"""Members of a cluster in virtual time: wires instead of sockets, a lock in memory, and no engines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from llmproxy.core.domain import Request
from llmproxy.core.settings import Settings
from llmproxy.remote import messages
from llmproxy.remote.cluster.cluster import Cluster
from llmproxy.remote.cluster.hand_over import MemberCallbacks
from llmproxy.remote.cluster.leasing import ClusterLeasing, LeaderConnection
from llmproxy.remote.cluster.pages import bounded
from llmproxy.remote.cluster.sessions import MemberSession
from llmproxy.remote.messages import PROTOCOL, Drained, Hello, Learned
from llmproxy.remote.server import LeaseServer
from llmproxy.scheduling.dispatcher import Dispatcher
from tests.dispatching import SETTINGS, Client, dispatcher, empty
from tests.remote.cluster.elections import LOCK_S, Store
from tests.remote.workers.link import RecordedEvents

LATENCY_S = 0.001
GONE_S = 15.0
"""Longer than a leader keeps the leases of a disconnected member."""


class Wire(asyncio.Transport):
    """A direction of a connection. Written bytes arrive at the other end in order, unless the connection is cut."""

    def __init__(self, net: Net, ends: frozenset[str], to: asyncio.Protocol) -> None:
        super().__init__()
        self._net = net
        self.ends = ends
        self._to = to
        self._loop = asyncio.get_running_loop()
        self.back: Wire | None = None
        self.over = self._closing = False
        self.unread = 0
        self._under_way: deque[bytes] = deque()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_closing(), "written after the end of the connection"
        self._under_way.append(bytes(data))
        # Timers of one moment come in any order, and bytes do not.
        self._loop.call_later(LATENCY_S, self._deliver)

    def _deliver(self) -> None:
        data = self._under_way.popleft()
        if not self.over and self.ends not in self._net.cut:
            self._to.data_received(data)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("virtual", 0) if name == "peername" else default

    def is_closing(self) -> bool:
        return self._closing or (self.back is not None and self.back.over)

    def close(self) -> None:
        self._closing = True
        self._loop.call_later(2 * LATENCY_S, self._end)

    def abort(self) -> None:
        self._closing = True
        self._loop.call_soon(self._end)

    def _end(self) -> None:
        """Both ends hear of it, and the other one later; not if the wire is cut, which nobody hears of."""
        assert self.back is not None
        self.back.hear_end()
        if self.ends not in self._net.cut:
            self._loop.call_later(LATENCY_S, self.hear_end)

    def hear_end(self) -> None:
        if not self.over:
            self.over = True
            self._to.connection_lost(None)


class Net:
    """The network between members. `cut` has pairs of names between which bytes are silently dropped."""

    def __init__(self) -> None:
        self.listening: dict[str, Callable[[], asyncio.Protocol]] = {}
        self.cut: set[frozenset[str]] = set()
        self.wires: list[Wire] = []
        self.connects = 0

    def connect(self, one: str, other: str, made: asyncio.Protocol, accepted: asyncio.Protocol) -> None:
        self.connects += 1
        up, down = (Wire(self, frozenset({one, other}), to) for to in (accepted, made))
        up.back, down.back = down, up
        self.wires.append(up)
        made.connection_made(up)
        accepted.connection_made(down)


class VirtualNetwork:
    """`Network` of one member, at the address that is its name."""

    def __init__(self, net: Net, name: str) -> None:
        self._net = net
        self._name = name
        self.trusting = True

    async def listen(self, accepted: Callable[[], asyncio.Protocol]) -> str:
        self._net.listening[self._name] = accepted
        return self._name

    async def connect(self, address: str, connected: Callable[[], asyncio.Protocol]) -> None:
        await asyncio.sleep(LATENCY_S)
        if frozenset({self._name, address}) in self._net.cut:
            await asyncio.sleep(1000.0)
        if address not in self._net.listening:
            raise ConnectionRefusedError("refused")
        self._net.connect(self._name, address, connected(), self._net.listening[address]())

    def trusts(self, transport: asyncio.BaseTransport) -> bool:
        del transport
        return self.trusting

    def identified(self, transport: asyncio.BaseTransport) -> None:
        """No wire is cut for silence."""

    def close(self) -> None:
        self._net.listening.pop(self._name, None)

    def fail(self) -> None:
        """All connections end in this moment."""
        self.close()
        for wire in [*self._net.wires]:
            if self._name in wire.ends and wire.back is not None:
                wire.hear_end()
                wire.back.hear_end()


class VirtualMember:
    """A member of the virtual cluster."""

    def __init__(self, world: World, name: str, incarnation: str = "1", backends: Iterable[str] = "a") -> None:
        self.name = name
        self.dispatcher: Dispatcher = dispatcher(None, world.settings, **dict.fromkeys(world.backends, world.seats))
        self.events = RecordedEvents()
        self.backends = set(backends)
        self.drained: frozenset[str] = frozenset()
        self.learned = Learned({}, {})
        self.restored: list[tuple[Learned, float]] = []
        self.responses: dict[str, messages.ResponseStored] = {}
        self.leasing = ClusterLeasing(self.dispatcher, self.backends)
        self.network = VirtualNetwork(world.net, name)
        self.clients: list[Client] = []
        hello = Hello(PROTOCOL, "0", name, incarnation, "", "config", 0)
        shared = MemberCallbacks(
            lambda one: self.responses.setdefault(one.response_id, one),
            lambda one: self.responses.update({one.response_id: one}),
            lambda: tuple(self.responses.values()),
            lambda: Drained(self.drained),
            self._drain,
            lambda: self.learned,
            lambda *told: self.restored.append(told),
        )
        services = self.events.services(self.dispatcher)

        def stored(one: messages.ResponseStored, by: LeaseServer) -> None:
            services.stored(one, by)
            self.cluster.stored(one, by)

        self.cluster = Cluster(
            hello, LOCK_S, world.store, self.dispatcher, self.leasing,
            replace(services, stored=stored), shared, self.network,
        )  # fmt: skip

    @property
    def link(self) -> LeaderConnection | None:
        """The connection to the leader."""
        return self.cluster._connection

    def campaign(self, campaigns: bool) -> None:
        """Sets whether the member asks for free locks."""
        assert self.cluster._election is not None
        self.cluster._election.campaigning = campaigns

    @property
    def sessions(self) -> dict[str, MemberSession]:
        """The sessions of a leader by member name."""
        return {} if self.cluster.sessions is None else self.cluster.sessions.by_name

    @property
    def differing(self) -> set[str]:
        return set() if self.cluster.sessions is None else self.cluster.sessions._differing

    def _drain(self, told: Drained) -> None:
        self.drained = told.backends

    async def start(self, known: Awaitable[object] | None = None) -> None:
        async def page(asked: messages.PageRequest) -> messages.PageResponse:
            return messages.PageResponse(asked.call, 200, "OK", (), asked.request)

        await self.cluster.start(bounded(page), known)

    def store(self, response_id: str) -> None:
        """A client has a response stored, which the gateway notes and tells."""
        self.responses[response_id] = messages.ResponseStored(response_id, "a", "tenant")
        self.leasing.response_stored(response_id, "a", "tenant")

    def client(self, asked: Request | None = None, **facts: Any) -> Client:
        self.clients.append(Client(self.leasing, asked, **facts))
        return self.clients[-1]

    async def die(self) -> None:
        """The process is killed: its connections end, and nothing more is said."""
        self.network.fail()
        assert self.cluster._election is not None
        # Nobody frees its lock.
        self.cluster._election._may_hold_lock = self.cluster._election._is_leader = False
        for client in self.clients:
            client.task.cancel()
        await self.cluster.close()

    def check(self) -> None:
        """Nothing is left."""
        assert (self.leasing.waiting, self.leasing.running) == (0, 0)
        for session in self.sessions.values():
            assert (session.server.open_requests, session.server.leases, session.server.waiting) == (0, 0, 0)
        empty(self.dispatcher)


class World:
    """Everything that members have in common. Every backend has so many `seats`."""

    def __init__(
        self,
        seats: int = 1,
        backends: Iterable[str] = "a",
        settings: Settings = SETTINGS,
    ) -> None:
        self.net = Net()
        self.settings = settings
        self.store = Store()
        self.seats = seats
        self.backends = tuple(backends)
        self.members: list[VirtualMember] = []

    async def member(self, name: str, known: Awaitable[object] | None = None, **given: Any) -> VirtualMember:
        one = VirtualMember(self, name, **{"backends": self.backends} | given)
        self.members.append(one)
        await one.start(known)
        return one

    @property
    def leader(self) -> VirtualMember:
        [leader] = [one for one in self.members if one.cluster.is_leader]
        return leader

    @property
    def followers(self) -> list[VirtualMember]:
        return [one for one in self.members if not one.cluster.is_leader]

    def cut(self, one: VirtualMember, other: VirtualMember) -> None:
        self.net.cut.add(frozenset({one.name, other.name}))

    def heal(self) -> None:
        self.net.cut.clear()

    def break_connections(self) -> None:
        """All sockets are reset."""
        for wire in [*self.net.wires]:
            if not wire.over:
                wire.abort()

    async def settled(self) -> None:
        """All clients leave, and everybody has the time to hear of it."""
        for one in self.members:
            for client in one.clients:
                await client.done()
                one.leasing.ended(client.request, None)
        await asyncio.sleep(GONE_S)


@asynccontextmanager
async def world(
    count: int, seats: int = 1, backends: Iterable[str] = "a", settings: Settings = SETTINGS,
) -> AsyncIterator[World]:  # fmt: skip
    """So many members m0, m1, ..., who follow one of them. Nothing may stay behind in any, nor any task."""
    before = asyncio.all_tasks()
    found = World(seats, backends, settings)
    for number in range(count):
        await found.member(f"m{number}")
    await asyncio.sleep(1.0)
    yield found
    await found.settled()
    for one in found.members:
        one.check()
    for one in found.members:
        await one.cluster.close()
    await asyncio.sleep(1.0)
    left = asyncio.all_tasks() - before
    assert not left, left
    for one in found.members:
        assert not one.cluster.incoming
