"""Clients that wait for permission to send their body: `Expect: 100-continue`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.proxying.response_writer import read_body

BYTES_MAX = 8
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def connection() -> AsyncIterator[Streams]:
    """A raw connection to a server that answers with the body it read, or with the status of a failure."""

    async def handle(request: web.BaseRequest) -> web.Response:
        try:
            return web.Response(body=await read_body(request, BYTES_MAX))
        except Failure as failure:
            return web.Response(status=failure.status)

    listening = await asyncio.get_running_loop().create_server(
        server := web.Server(handle, lingering_time=0.0), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
    yield reader, writer
    writer.close()
    await writer.wait_closed()
    listening.close()
    await server.shutdown()


def head(length_bytes: int) -> bytes:
    return f"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-Continue\r\ncontent-length: {length_bytes}\r\n\r\n".encode()


async def test_100_continue_is_sent_before_the_body_is_read(connection: Streams) -> None:
    reader, writer = connection
    writer.write(head(4))
    async with asyncio.timeout(10.0):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"body")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert await reader.readexactly(4) == b"body"


async def test_a_too_large_body_is_refused_before_it_is_sent(connection: Streams) -> None:
    reader, writer = connection
    writer.write(head(BYTES_MAX + 1))
    async with asyncio.timeout(10.0):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
