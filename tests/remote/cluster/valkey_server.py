"""A Valkey or Redis server of a test, as Debian's valkey-server or redis-server."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(BINARY is None, reason="neither valkey-server nor redis-server is installed")


class Server:
    """A server of one test, at the same port after a restart."""

    def __init__(self, folder: Path, password: str = "") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._folder = folder
        self._password = password
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        access = f":{self._password}@" if self._password else ""
        return f"valkey://{access}127.0.0.1:{self.port}"

    async def start(self) -> None:
        assert BINARY is not None
        access = ["--requirepass", self._password] if self._password else []
        self._process = await asyncio.create_subprocess_exec(
            BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder), *access,
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        async with asyncio.timeout(20):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.01)
                else:
                    writer.close()
                    await writer.wait_closed()
                    return

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    async def kill(self) -> None:
        if self._process is not None:
            self.send(signal.SIGKILL)
            await self._process.wait()
            self._process = None


@asynccontextmanager
async def serving_store(server: Server) -> AsyncIterator[Server]:
    await server.start()
    try:
        yield server
    finally:
        await server.kill()
