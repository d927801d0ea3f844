"""Real processes on loopback: a store, simulated replicas, members of a cluster, and a network between them to cut."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fleet import Process, free_port, ready, start, value_of

SERVERS = ("valkey-server", "redis-server")
REPLICAS = 2
PLACES = 8
"""`max_in_flight` of each replica."""
REPLICA_FLAGS = ("--model", "sim", "--max-num-seqs", "64", "--speed", "0.5")
SEEN_S = 0.02
"""How often replicas are asked how many requests they have."""


class Forwarder:
    """A port that passes bytes to that of a member, until directions are cut.

    Then it keeps them, and the ends of connections, as a network that drops packets which are sent again.
    """

    def __init__(self, to_port: int) -> None:
        self.port = 0
        self.passed = {"in": 0, "out": 0}
        self._to_port = to_port
        self._cut: tuple[frozenset[str], str | None] = frozenset(), None
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self, *ways: str, of: str | None = None) -> None:
        """Cut these directions, `in` and `out`, and no others: for all other members, or for the one of this name."""
        async with self._changed:
            self._cut = frozenset(ways), of
            self._changed.notify_all()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            first = await reader.read(1 << 16)
            # Who connects says its name first.
            name = next((found.decode() for found in re.findall(rb"m\d+", first)), "")
            # A connection is made by both sides, so that either cut prevents one.
            await self._passes(name, "in")
            await self._passes(name, "out")
            there, back = await asyncio.open_connection("127.0.0.1", self._to_port)
            back.write(first)
            await asyncio.gather(self._pass(reader, back, name, "in"), self._pass(there, writer, name, "out"))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, way: str) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self._passes(name, way)
                self.passed[way] += len(data)
                writer.write(data)
                await writer.drain()
        await self._passes(name, way)
        writer.close()

    async def _passes(self, name: str, way: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: way not in self._cut[0] or self._cut[1] not in (None, name))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(slots=True)
class Member:
    """One `llmproxy serve`, which is started again on its port."""

    name: str
    port: int
    cluster_port: int
    forwarder: Forwarder
    flags: Sequence[str]
    folder: Path
    tree: Path | None = None
    """The checkout whose program it is at its next start; this one if None."""
    process: Process | None = None
    starts: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.child.pid

    async def start(self) -> None:
        self.starts += 1
        self.process = await start(
            ["serve", *self.flags], self.folder / f"{self.name}-{self.starts}.log", tree=self.tree
        )
        await ready(self.url, self.process)

    async def start_again(self) -> None:
        """After it has ended."""
        assert self.process is not None
        await self.process.child.wait()
        await self.start()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.child.send_signal(number)


@dataclass(slots=True)
class Rig:
    """What runs. `over` are the looks at a replica that found it with more than it may have: (when, how many)."""

    members: list[Member]
    replica_urls: list[str]
    session: aiohttp.ClientSession
    store_port: int
    folder: Path
    store: Process | None = None
    over: list[tuple[float, float]] = field(default_factory=list)
    looks: int = 0

    @property
    def lock(self) -> str:
        """`cluster.lock` of the members."""
        return f"valkey://127.0.0.1:{self.store_port}"

    async def start_store(self) -> None:
        """Start the store, which keeps nothing on a disk."""
        program = next((found for name in SERVERS if (found := shutil.which(name))), None)
        if program is None:
            raise SystemExit("the store is missing: install valkey-server or redis-server")
        child = await asyncio.create_subprocess_exec(
            program, "--port", str(self.store_port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            cwd=self.folder, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self.store = Process(child, self.folder / "store.log")

    async def status(self, member: Member) -> dict[str, Any] | None:
        """`/admin/cluster` of a member; None where it does not answer."""
        try:
            timeout = aiohttp.ClientTimeout(total=2.0)
            async with self.session.get(f"{member.url}/admin/cluster", timeout=timeout) as answer:
                found: dict[str, Any] = await answer.json()
                return found
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def waiting(self, members: Sequence[Member]) -> int:
        """Requests of these members that wait."""
        return sum([found["waiting"] for one in members if (found := await self.status(one))])

    async def metric(self, member: Member, series: str) -> float:
        async with self.session.get(f"{member.url}/metrics") as answer:
            return value_of(await answer.text(), series) or 0.0

    async def leader(self, among: Sequence[Member] | None = None) -> Member:
        """The one of `among` that leads, once the others of these follow it."""
        members = list(self.members if among is None else among)
        known = {one.name for one in members}
        async with asyncio.timeout(30.0):
            while True:
                found = [await self.status(one) for one in members]
                names = {one["leader"] if one else None for one in found}
                if len(names) == 1 and (name := names.pop()) in known:
                    return next(one for one in self.members if one.name == name)
                await asyncio.sleep(0.05)

    async def together(self) -> None:
        """Wait until the leader knows all members, and all follow it."""
        leader = await self.leader()
        async with asyncio.timeout(60.0):
            while not (page := await self.status(leader)) or len(page["members"]) < len(self.members):
                await asyncio.sleep(0.05)
                leader = await self.leader()

    async def watch_replicas(self) -> None:
        """Look how many requests each replica has, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            for url in self.replica_urls:
                async with self.session.get(f"{url}/metrics") as answer:
                    lines = (await answer.text()).splitlines()
                names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
                has = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))
                self.looks += 1
                if has > PLACES:
                    self.over.append((loop.time(), has - PLACES))
            await asyncio.sleep(SEEN_S)


@asynccontextmanager
async def rig(
    members: int, *flags: str, clustered: bool = True, more: str = "", replica_flags: Sequence[str] = REPLICA_FLAGS,
    replicas: Sequence[str] = (), places: int = PLACES, forwarded: bool = True,
    tree: Path | None = None,
) -> AsyncIterator[Rig]:  # fmt: skip
    """So many members over two simulated replicas, or over `replicas`. `more` is configuration beside the backends.

    Where they are not `clustered`, they know nothing of each other. `forwarded`: connections between them can be cut.
    `tree` is the checkout whose program the members are; this one if None.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmproxy-cluster-")))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        made = Rig([], [], session, free_port(), folder)
        processes: list[Process] = []
        try:
            await made.start_store()
            made.replica_urls.extend(replicas)
            for number in range(0 if replicas else REPLICAS):
                port = free_port()
                processes.append(
                    await start(["replica", "--port", str(port), *replica_flags], folder / f"r{number}.log")
                )
                made.replica_urls.append(f"http://127.0.0.1:{port}")
            urls = made.replica_urls
            backends = folder / "proxy.yaml"
            listed = "".join(f"  - {{url: {url!r}, max_in_flight: {places}}}\n" for url in urls)
            backends.write_text(f"backends:\n{listed}{more}")
            for number in range(members):
                member = await _member(made, f"m{number}", [*flags, "--config", str(backends)], clustered, forwarded)
                member.tree = tree
                made.members.append(member)
            await asyncio.gather(*(one.start() for one in made.members))
            if clustered:
                await made.leader()
            yield made
        finally:
            for member in made.members:
                await member.forwarder.close()
                if member.process is not None:
                    await member.process.stop(signal.SIGKILL)
            for process in [*processes, *([made.store] if made.store else [])]:
                await process.stop(signal.SIGKILL)


async def _member(made: Rig, name: str, flags: Sequence[str], clustered: bool, forwarded: bool) -> Member:
    port, cluster_port = free_port(), free_port()
    forwarder = Forwarder(cluster_port)
    await forwarder.open()
    given = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--log-format",
        "json",
        "--state-file",
        "none",
        "--scheduling-look-ahead",
        "0",
        *flags,
    ]
    if clustered:
        advertised = forwarder.port if forwarded else cluster_port
        given += [
            "--cluster-listen", f"127.0.0.1:{cluster_port}", "--cluster-advertise", f"127.0.0.1:{advertised}",
            "--cluster-lock", made.lock, "--cluster-member", name,
        ]  # fmt: skip
    return Member(name, port, cluster_port, forwarder, given, made.folder)
