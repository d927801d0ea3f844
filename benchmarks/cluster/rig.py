"""Real processes on loopback: a store, simulated replicas, and the members of a cluster.

The connections between members can be cut.
"""

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

from benchmarks.fleet import Process, free_port, free_url, ready, start, start_replica

SERVERS = ("valkey-server", "redis-server")
REPLICAS = 2
PLACES = 8  # The `max_in_flight` of each replica.
REPLICA_FLAGS = ("--model", "sim", "--max-num-seqs", "64", "--speed", "0.5")
PROXY_FLAGS = ("--host", "127.0.0.1", "--log-format", "json", "--state-file", "none", "--scheduling-look-ahead", "0")
LOOK_EVERY_S = 0.02


class Forwarder:
    """A port that passes bytes to the port of a member, until a direction is cut.

    It keeps the bytes and the ends of connections while a direction is cut, like a network that drops packets which are
    sent again.
    """

    def __init__(self, to_port: int) -> None:
        self.port = 0
        self._to_port = to_port
        self._cut: tuple[frozenset[str], str | None] = frozenset(), None
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self, *ways: str, of: str | None = None) -> None:
        """Cuts the directions `ways` (`in`, `out`), and opens the other directions.

        `of` is the name of the member that is cut off; None for all.
        """
        async with self._changed:
            self._cut = frozenset(ways), of
            self._changed.notify_all()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            first = await reader.read(1 << 16)
            # A member sends its name first.
            name = next((found.decode() for found in re.findall(rb"m\d+", first)), "")
            # A handshake needs both directions, so that either cut prevents a connection.
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
    """A `llmproxy serve` that keeps its port when it is restarted."""

    name: str
    port: int
    forwarder: Forwarder
    flags: Sequence[str]
    folder: Path
    tree: Path | None = None
    """The checkout for the next start; None for this checkout."""
    process: Process | None = None
    starts: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.starts += 1
        log = self.folder / f"{self.name}-{self.starts}.log"
        self.process = await start(["serve", *self.flags], log, tree=self.tree)
        await ready(self.url, self.process)

    async def start_again(self) -> None:
        """Waits until the process has ended, and starts the next process."""
        assert self.process is not None
        await self.process.child.wait()
        await self.start()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.child.send_signal(number)


@dataclass(slots=True)
class Rig:
    """All processes of a cluster."""

    members: list[Member]
    replica_urls: list[str]
    session: aiohttp.ClientSession
    store_port: int
    folder: Path
    store: Process | None = None
    over: list[tuple[float, float]] = field(default_factory=list)
    """When a replica was seen with more requests than its limit, and how many more."""
    looks: int = 0

    async def start_store(self) -> None:
        """Starts the store, which writes nothing to a disk."""
        program = next((found for name in SERVERS if (found := shutil.which(name))), None)
        if program is None:
            raise SystemExit("the store is missing: install valkey-server or redis-server")
        child = await asyncio.create_subprocess_exec(
            program, "--port", str(self.store_port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            cwd=self.folder, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self.store = Process(child, self.folder / "store.log")

    async def status(self, member: Member) -> dict[str, Any] | None:
        """Returns `/admin/cluster` of a member; None if the member does not answer."""
        try:
            timeout = aiohttp.ClientTimeout(total=2.0)
            async with self.session.get(f"{member.url}/admin/cluster", timeout=timeout) as answer:
                page: dict[str, Any] = await answer.json()
                return page
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def waiting(self, members: Sequence[Member]) -> int:
        """Returns the number of waiting requests of these members."""
        return sum([page["waiting"] for one in members if (page := await self.status(one))])

    async def leader(self, among: Sequence[Member] | None = None) -> Member:
        """Waits until the members of `among` (None: all) follow one of them, and returns that member."""
        members = list(self.members if among is None else among)
        async with asyncio.timeout(30.0):
            while True:
                pages = [await self.status(one) for one in members]
                names = {page["leader"] if page else None for page in pages}
                name = names.pop()
                if not names and (leader := next((one for one in members if one.name == name), None)):
                    return leader
                await asyncio.sleep(0.05)

    async def together(self) -> None:
        """Waits until the leader knows all members, and all members follow it."""
        leader = await self.leader()
        async with asyncio.timeout(60.0):
            while not (page := await self.status(leader)) or len(page["members"]) < len(self.members):
                await asyncio.sleep(0.05)
                leader = await self.leader()

    async def watch_replicas(self) -> None:
        """Counts the requests on each replica again and again, until the task is cancelled."""
        loop = asyncio.get_running_loop()
        names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        while True:
            for url in self.replica_urls:
                async with self.session.get(f"{url}/metrics") as answer:
                    lines = (await answer.text()).splitlines()
                has = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))
                self.looks += 1
                if has > PLACES:
                    self.over.append((loop.time(), has - PLACES))
            await asyncio.sleep(LOOK_EVERY_S)


@asynccontextmanager
async def rig(
    members: int,
    *flags: str,
    tree: Path | None = None,
) -> AsyncIterator[Rig]:
    """Runs members over two simulated replicas during the block.

    Args:
        members: The number of members.
        flags: Further flags of each member.
        tree: The checkout with the code of the members; None for this checkout.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmproxy-cluster-")))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        made = Rig([], [], session, free_port(), folder)
        processes: list[Process] = []
        try:
            await made.start_store()
            for number in range(REPLICAS):
                made.replica_urls.append(free_url())
                log = folder / f"replica-{number}.log"
                processes.append(await start_replica(made.replica_urls[-1], REPLICA_FLAGS, log))
            config = folder / "proxy.yaml"
            listed = "".join(f"  - {{url: {url!r}, max_in_flight: {PLACES}}}\n" for url in made.replica_urls)
            config.write_text(f"backends:\n{listed}")
            for number in range(members):
                member = await _member(made, f"m{number}", [*flags, "--config", str(config)])
                member.tree = tree
                made.members.append(member)
            await asyncio.gather(*(one.start() for one in made.members))
            await made.leader()
            yield made
        finally:
            for member in made.members:
                await member.forwarder.close()
                if member.process is not None:
                    await member.process.stop(signal.SIGKILL)
            for process in [*processes, *([made.store] if made.store else [])]:
                await process.stop(signal.SIGKILL)


async def _member(made: Rig, name: str, flags: Sequence[str]) -> Member:
    port, cluster_port = free_port(), free_port()
    forwarder = Forwarder(cluster_port)
    await forwarder.open()
    given = [
        *PROXY_FLAGS, "--port", str(port), *flags,
        "--cluster-listen", f"127.0.0.1:{cluster_port}", "--cluster-advertise", f"127.0.0.1:{forwarder.port}",
        "--cluster-lock", f"valkey://127.0.0.1:{made.store_port}", "--cluster-member", name,
    ]  # fmt: skip
    return Member(name, port, forwarder, given, made.folder)
