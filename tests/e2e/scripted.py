"""A backend whose answers to requests are scripted byte by byte. Polls get the pages of a small vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any

from tests.e2e.proxies import ProxyUnderTest, serving
from tests.upstream.raw_server import Peer

Script = Callable[[Peer, bytes], Awaitable[None]]
"""Is given the connection and the bytes of one request, head and body; a connection that it closes is closed."""

_MODELS = json.dumps({"object": "list", "data": [{"id": "base", "object": "model", "parent": None}]}).encode()


def whole(body: bytes, status: str = "200 OK", content_type: str = "application/json", extra: bytes = b"") -> bytes:
    """An answer with its length."""
    head = f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + extra + b"\r\n" + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Scripted:
    """Runs `script` for every request that is no poll, and keeps the bytes of those requests."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[bytes] = []
        self.connections = 0
        self.cuts = 0
        self.polls: dict[bytes, Script] = {}
        self.answering = 0
        self.url = ""
        self.server: asyncio.Server | None = None
        self._pollers: set[asyncio.StreamWriter] = set()

    def hang(self) -> None:
        """Refuse connections from now on and leave open requests as they are."""
        assert self.server is not None
        self.server.close()
        for writer in self._pollers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        asked = False
        try:
            while not writer.is_closing():
                request = await peer.request()
                target = request.split(b" ", 2)[1]
                if request.startswith(b"GET "):
                    self._pollers.add(writer)
                    poll = self.polls.get(target.partition(b"?")[0].rstrip(b"/"))
                    if poll is not None:
                        await poll(peer, request)
                    else:
                        await peer.send(_poll_answer(target))
                    continue
                self.connections += not asked
                asked = True
                self.requests.append(request)
                await self._answer(peer, request)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._pollers.discard(writer)
            writer.close()

    async def _answer(self, peer: Peer, request: bytes) -> None:
        """Play the script, and note whether the proxy closed the connection meanwhile."""
        self.answering += 1
        try:
            await self.script(peer, request)
        except ConnectionError:
            self.cuts += 1
            raise
        finally:
            self.answering -= 1
        self.cuts += peer.reader.at_eof() and not peer.writer.is_closing()


def _poll_answer(target: bytes) -> bytes:
    if target == b"/v1/models":
        return whole(_MODELS)
    return whole(b"") if target == b"/health" else whole(b"", "404 Not Found")


@asynccontextmanager
async def scripted(script: Script, tls: SSLContext | None = None) -> AsyncIterator[Scripted]:
    """Listen on a free port for the length of the block, by https with `tls`."""
    backend = Scripted(script)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(backend.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = backend.server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    backend.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield backend
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def serving_script(script: Script, **config: Any) -> AsyncIterator[tuple[ProxyUnderTest, Scripted]]:
    """A proxy whose only backend runs `script`."""
    async with scripted(script) as backend, serving(extra=[backend.url], **config) as proxy:
        yield proxy, backend


def answering(*pieces: bytes) -> Script:
    """Answer every request with the same pieces."""

    async def script(peer: Peer, _: bytes) -> None:
        for piece in pieces:
            await peer.send(piece)

    return script


def breaking(*pieces: bytes, reset: bool = False) -> Script:
    """Answer every request with the same pieces, and close the connection behind them, with RST to `reset` it."""

    async def script(peer: Peer, _: bytes) -> None:
        for piece in pieces:
            await peer.send(piece)
        if reset:
            peer.reset()
        else:
            peer.writer.close()

    return script
