"""The processes of the demo and the ports that they listen on."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

HOST = "127.0.0.1"
STOP_TIMEOUT_S = 10.0

Result = TypeVar("Result")


class DemoError(Exception):
    """The demo cannot start or continue. The text is for the user."""


@contextmanager
def reserved_port(port: int) -> Iterator[int]:
    """Reserves a port for a process of the demo; 0: a free port. Raises DemoError.

    Otherwise an outgoing connection could take the port of a replica that is down.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((HOST, port))
        except OSError as error:
            reason = error.strerror.lower() if error.strerror else error
            raise DemoError(f"port {port} cannot be used ({reason}); try another one with --port") from None
        yield int(holder.getsockname()[1])


@dataclass(frozen=True, slots=True)
class DemoReplica:
    name: str
    port: int
    adapters: tuple[str, ...]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


class _Process:
    def __init__(self, name: str, handle: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
        self.name = name
        self.on_line = on_line
        self.handle = handle
        self.wanted = True
        self.tail: deque[str] = deque(maxlen=20)
        self.life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        """Reads the output until the process ends, so that the process never blocks on a full pipe."""
        assert self.handle.stdout is not None
        async for line in self.handle.stdout:
            self.tail.append(line.decode(errors="replace").rstrip("\r\n"))
            self.on_line(self.tail[-1])
        await self.handle.wait()

    def last_lines(self) -> str:
        lines = "\n".join(f"  {line}" for line in self.tail) or "  (nothing)"
        return f"{self.name} ended with exit code {self.handle.returncode}; its last lines:\n{lines}"


class Processes:
    """The processes of the demo. Leaving the block ends the proxy, and then the replicas."""

    def __init__(self) -> None:
        self.on_line: Callable[[str], None] = lambda _: None  # Gets each output line of every process.
        self._running: dict[str, _Process] = {}
        self._first_to_die: asyncio.Future[_Process] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        replicas = list(self._running.values())
        proxy = self._running.get("proxy")
        await self._end([proxy] if proxy else [])
        await self._end(replicas)

    async def start(self, name: str, *arguments: str, module: str = "llmproxy.cli.child") -> None:
        """Starts `python -m MODULE ARGUMENTS` under a name. A killed process can be started again."""
        # LLMPROXY_ variables of the user's shell are for their own proxy.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LLMPROXY_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            limit=1 << 20,
            # In the terminal's process group they would all get Ctrl-C; the demo ends them itself, in order.
            start_new_session=True,
        )
        started = self._running[name] = _Process(name, process, lambda line: self.on_line(line))
        started.life.add_done_callback(lambda _: self._ended(started))

    def _ended(self, process: _Process) -> None:
        if process.wanted and not self._first_to_die.done():
            self._first_to_die.set_result(process)

    async def kill(self, name: str) -> None:
        process = self._running[name]
        process.wanted = False
        process.handle.kill()
        await process.life

    async def unless_one_dies(self, work: Awaitable[Result]) -> Result:
        """Returns the result of `work`. Raises DemoError if a process ends first without `kill`."""
        task = asyncio.ensure_future(work)
        either: list[asyncio.Future[Any]] = [task, self._first_to_die]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._first_to_die.done():
                raise DemoError(self._first_to_die.result().last_lines())
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])

    @staticmethod
    async def _end(processes: list[_Process]) -> None:
        for process in processes:
            process.wanted = False
            if process.handle.returncode is None:
                process.handle.terminate()
        if processes:
            _, alive = await asyncio.wait([process.life for process in processes], timeout=STOP_TIMEOUT_S)
            for process in processes:
                if process.life in alive:
                    process.handle.kill()
                await process.life
