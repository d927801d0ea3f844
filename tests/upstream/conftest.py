"""Fixtures of the upstream tests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from llmproxy.upstream.client import HttpUpstream
from llmproxy.upstream.connection import HttpExchange

from .raw_server import WAIT_MAX_S, RawServer, post, streaming


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Runs the tests on uvloop too, because closed transports behave differently there."""
    both = item.path.name in ("test_client.py", "test_connection.py")
    return {"asyncio": asyncio.new_event_loop} | ({"uvloop": uvloop.new_event_loop} if both else {})


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    raw = RawServer()
    sock = socket.socket()
    # A small window, so that a server that does not read soon stops the sender.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.bind(("127.0.0.1", 0))
    listener = await asyncio.start_server(raw.serve, sock=sock)
    raw.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    yield raw
    listener.close()
    for peer in raw.peers:
        peer.writer.transport.abort()
    async with asyncio.timeout(WAIT_MAX_S):
        for peer in raw.peers:
            await peer.gone.wait()


@pytest.fixture
async def upstream() -> AsyncIterator[HttpUpstream]:
    async with HttpUpstream() as client:
        yield client


@pytest.fixture
async def stream(upstream: HttpUpstream, server: RawServer) -> HttpExchange:
    """A stream that hangs after its first chunk, which was read."""
    server.script = streaming
    exchange = await post(upstream, server.url)
    assert await exchange.chunk() == b"hello"
    return exchange
