"""A server below HTTP: a test scripts, byte by byte, what each accepted connection does."""

from __future__ import annotations

import asyncio
import socket
import struct
import weakref
from collections.abc import Awaitable, Callable
from typing import ClassVar


class RawServer:
    """Accepts connections and runs `script` on each; the bytes of every request and the ends of all are kept."""

    def __init__(self) -> None:
        self.script: Callable[[Peer], Awaitable[None]] = answer_nothing
        self.peers: list[Peer] = []
        self.arrived: asyncio.Queue[Peer] = asyncio.Queue()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self.peers.append(peer)
        self.arrived.put_nowait(peer)
        try:
            await self.script(peer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            peer.gone.set()


class Peer:
    all: ClassVar[weakref.WeakSet[Peer]] = weakref.WeakSet()

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.all.add(self)
        self.reader = reader
        self.writer = writer
        self.fileno: int = writer.get_extra_info("socket").fileno()
        self.requests: list[bytes] = []
        self.asked = asyncio.Event()
        self.gone = asyncio.Event()

    async def request(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        self.requests.append(head + await self.reader.readexactly(length))
        self.asked.set()
        return self.requests[-1]

    async def send(self, data: bytes) -> None:
        if self.writer.is_closing():
            raise ConnectionResetError("the connection was closed meanwhile")
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def until_eof(self) -> None:
        while await self.reader.read(65536):
            pass


async def answer_nothing(peer: Peer) -> None:
    await peer.request()
    await peer.until_eof()


def answering(*pieces: bytes) -> Callable[[Peer], Awaitable[None]]:
    """Answer every request on the connection with `pieces`, and keep the connection open."""

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            for piece in pieces:
                await peer.send(piece)

    return script


def answering_once(*pieces: bytes) -> Callable[[Peer], Awaitable[None]]:
    """Answer one request with `pieces`, then close the connection."""

    async def script(peer: Peer) -> None:
        await peer.request()
        for piece in pieces:
            await peer.send(piece)

    return script
