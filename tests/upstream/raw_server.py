"""A server below HTTP: a test scripts the bytes of each accepted connection."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import weakref
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import ClassVar

import pytest

from llmproxy.upstream.client import HttpUpstream
from llmproxy.upstream.connection import HttpExchange
from llmproxy.upstream.port import Exchange

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
WAIT_MAX_S = 10.0


class RawServer:
    """Accepts connections and runs `script` on each. Records the bytes of requests and the ends of connections."""

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
        self.inode = os.fstat(self.fileno).st_ino
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


async def post(upstream: HttpUpstream, url: str, body: bytes = b"{}") -> HttpExchange:
    async with asyncio.timeout(WAIT_MAX_S):
        return await upstream.open(url, "POST", "/v1/completions", [("content-type", "application/json")], [body], 5.0)


async def read_all(exchange: Exchange) -> bytes:
    whole = b""
    async with asyncio.timeout(WAIT_MAX_S):
        while piece := await exchange.chunk():
            whole += piece
    return whole


async def answer_to(upstream: HttpUpstream, server: RawServer) -> tuple[bool, bytes]:
    """Send another request. Returns whether it used an idle connection, and the body of its response."""
    exchange = await post(upstream, server.url)
    return exchange.reused, await read_all(exchange)


async def gone(server: RawServer) -> None:
    """Wait until the first connection was cut."""
    async with asyncio.timeout(WAIT_MAX_S):
        await server.peers[0].gone.wait()


def in_two(first: bytes, go_on: asyncio.Event, then: bytes, *, rst: bool = False) -> Callable[[Peer], Awaitable[None]]:
    """Answer one request with `first` and, after `go_on`, `then`; reset the connection or wait for its end."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(first)
        await go_on.wait()
        await peer.send(then)
        if rst:
            peer.reset()
        else:
            await peer.until_eof()

    return script


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def refuse_sockets(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make opening sockets fail with this errno from now on."""

    def lacking(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("aiohappyeyeballs.impl.socket", SimpleNamespace(**vars(socket) | {"socket": lacking}))


async def streaming(peer: Peer) -> None:
    await peer.request()
    await peer.send(CHUNKED + b"5\r\nhello\r\n")
    await peer.until_eof()
