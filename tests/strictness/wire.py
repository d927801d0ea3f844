"""A raw connection that does not lose received bytes if it is reset at the same moment."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast


class Wire(asyncio.Protocol):
    """A raw connection, made by `connected`. `ended`: the peer closed or reset it. `reset`: the peer reset it."""

    def __init__(self) -> None:
        self.ended = self.reset = False
        self._received = b""
        self._changed = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended, self.reset = True, exc is not None
        self._changed.set()

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(data)

    def abort(self) -> None:
        assert self._transport is not None
        self._transport.abort()

    async def all(self) -> bytes:
        """Return all bytes until the end of the connection."""
        while not self.ended:
            self._changed.clear()
            await self._changed.wait()
        return self._received

    async def answer(self) -> tuple[int, bytes] | None:
        """Return status and body of the next answer, which must have a length unless it is interim. None at the end."""
        while True:
            head, mark, rest = self._received.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            size = int(length[1]) if length is not None else 0
            if mark and len(rest) >= size:
                self._received = rest[size:]
                return int(head.split(b" ", 2)[1]), rest[:size]
            if self.ended:
                return None
            self._changed.clear()
            await self._changed.wait()

    async def all_of(self, then: bytes) -> bytes:
        """Return all bytes until the end of the connection. Sends `then` after the first bytes have come."""
        while not self.ended:
            if self._received:
                self.write(then)
                then = b""
            self._changed.clear()
            await self._changed.wait()
        return self._received


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Wire]:
    """A connection to a proxy on this machine; it is cut on leaving."""
    port = int(url.rpartition(":")[2])
    _, wire = await asyncio.get_running_loop().create_connection(Wire, "127.0.0.1", port)
    try:
        yield wire
    finally:
        wire.abort()
