"""Connections through a shadow: every byte, end and reset arrives as without it, whatever its watcher does."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trustme

from llmproxy.tools.shadow.pipe import Pipe, Router

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WAIT_S = 10.0


class Watching:
    """A watcher that keeps all bytes, or raises at each call."""

    busy = False

    def __init__(self, raises: bool = False) -> None:
        self.raises = raises
        self.requests, self.answers = bytearray(), bytearray()
        self.ends: list[bool] = []
        self.forgotten = False

    def asked(self, data: bytes) -> None:
        self.requests += data
        self._raise()

    def answered(self, data: bytes) -> None:
        self.answers += data
        self._raise()

    def closed(self, by_client: bool) -> None:
        self.ends.append(by_client)
        self._raise()

    def forget(self) -> None:
        self.forgotten = True

    def _raise(self) -> None:
        if self.raises:
            raise RuntimeError("a bug")


class Rig:
    """A shadow in front of one router."""

    def __init__(self, port: int, watch: Callable[[str], Watching]) -> None:
        self.port = port
        self.unreachable = 0
        self.failures: list[Exception] = []
        self.pipes: set[Pipe] = set()
        self.ended = asyncio.Event()
        self._watch = watch

    def accept(self, router: Router) -> asyncio.Protocol:
        pipe = Pipe(router, self._watch, self.failures.append, self._count, self._end)
        self.pipes.add(pipe)
        return pipe.client

    def _count(self) -> None:
        self.unreachable += 1

    def _end(self, pipe: Pipe) -> None:
        self.pipes.remove(pipe)
        self.ended.set()


class Certified:
    """The two sides of TLS to a router."""

    def __init__(self, trusted: bool = True) -> None:
        authority = trustme.CA()
        self.of_router, self.of_shadow = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
        authority.issue_cert("127.0.0.1").configure_cert(self.of_router)
        if trusted:
            authority.configure_trust(self.of_shadow)


tls_too = pytest.mark.parametrize("tls", [None, Certified()], ids=["http", "https"])


@asynccontextmanager
async def shadowed(
    handler: Handler | None, watch: Callable[[str], Watching] | None = None, tls: Certified | None = None
) -> AsyncIterator[Rig]:
    """A shadow in front of a router that runs `handler` for each connection; None for a router that is not there."""
    loop = asyncio.get_running_loop()
    there = await asyncio.start_server(handler or _nothing, "127.0.0.1", 0, ssl=tls.of_router if tls else None)
    at = there.sockets[0].getsockname()[1]
    if handler is None:
        there.close()
        await there.wait_closed()
    watching = Watching()
    rig = Rig(0, watch or (lambda _: watching))
    router = Router(f"http://127.0.0.1:{at}", "127.0.0.1", at, tls.of_shadow if tls else None)
    server = await loop.create_server(lambda: rig.accept(router), "127.0.0.1", 0)
    rig.port = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(WAIT_S):
            yield rig
    finally:
        server.close()
        there.close()
        for pipe in list(rig.pipes):
            pipe.close()


async def _nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


@tls_too
async def test_every_byte_passes_both_ways(tls: Certified | None) -> None:
    rng = random.Random(1)
    question, answer = rng.randbytes(3 << 20), rng.randbytes(3 << 20)
    got = bytearray()

    async def router(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.readexactly(len(question)))
        writer.write(answer)
        await writer.drain()
        writer.close()

    watching = Watching()
    async with shadowed(router, lambda _: watching, tls) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(question)
        assert await reader.read(-1) == answer
        writer.close()
        await rig.ended.wait()
    assert bytes(got) == question
    assert (bytes(watching.requests), bytes(watching.answers)) == (question, answer)
    assert watching.ends == [False]


@pytest.mark.parametrize("how", ["at once", "in each call"])
async def test_a_watcher_that_raises_costs_no_byte(how: str) -> None:
    def watch(_: str) -> Watching:
        if how == "at once":
            raise RuntimeError("a bug")
        return Watching(raises=True)

    async with shadowed(_echo, watch) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        for _ in range(3):
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
        writer.close()
        await rig.ended.wait()
    assert len(rig.failures) == 1


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


async def test_a_client_that_has_sent_all_still_gets_the_answer() -> None:
    async def router(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"you said " + await reader.read(-1))
        writer.close()

    async with shadowed(router) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"hello")
        writer.write_eof()
        assert await reader.read(-1) == b"you said hello"
        writer.close()


@tls_too
async def test_a_client_that_leaves_ends_the_connection_to_the_router(tls: Certified | None) -> None:
    left = asyncio.Event()

    async def router(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"first")
        assert await reader.read(-1) == b""
        left.set()
        writer.close()

    watching = Watching()
    async with shadowed(router, lambda _: watching, tls) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        assert await reader.readexactly(5) == b"first"
        writer.close()
        await left.wait()
        await rig.ended.wait()
    assert watching.ends == [True]


@tls_too
async def test_a_reset_of_the_router_is_a_reset_for_the_client(tls: Certified | None) -> None:
    async def router(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"first")
        await reader.readexactly(2)
        _reset(writer)

    async with shadowed(router, tls=tls) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        assert await reader.readexactly(5) == b"first"
        writer.write(b"go")
        with pytest.raises(ConnectionResetError):
            await reader.read(-1)
        await rig.ended.wait()
        writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def test_a_router_that_is_not_there_is_named() -> None:
    async with shadowed(None) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n1")
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        writer.close()
        await rig.ended.wait()
    assert head.startswith(b"HTTP/1.1 502 Bad Gateway")
    error = json.loads(body)["error"]
    assert error["code"] == 502
    assert "cannot reach your router at http://127.0.0.1:" in error["message"]
    assert rig.unreachable == 1


async def test_a_router_whose_certificate_is_not_trusted_is_named() -> None:
    async with shadowed(_echo, tls=Certified(trusted=False)) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await reader.read(-1)
        writer.close()
        await rig.ended.wait()
    assert answer.startswith(b"HTTP/1.1 502 Bad Gateway")
    assert b"certificate verify failed" in answer
    assert b"--to-ca" in answer
    assert rig.unreachable == 1


async def test_a_router_with_tls_that_closes_ends_the_connection() -> None:
    async def router(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"all")
        writer.close()

    watching = Watching()
    async with shadowed(router, lambda _: watching, Certified()) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        assert await reader.read(-1) == b"all"
        writer.close()
        await rig.ended.wait()
    assert watching.ends == [False]


@tls_too
async def test_a_slow_reader_slows_the_router(tls: Certified | None) -> None:
    sent = 0
    stuck = asyncio.Event()

    async def router(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while sent < 64 << 20:
            writer.write(bytes(1 << 16))
            try:
                async with asyncio.timeout(0.2):
                    await writer.drain()
            except TimeoutError:
                break
            sent += 1 << 16
        stuck.set()
        writer.transport.abort()

    async with shadowed(router, tls=tls) as rig:
        _, writer = await asyncio.open_connection("127.0.0.1", rig.port, limit=1 << 10)
        await stuck.wait()
        writer.transport.abort()
    assert sent < 64 << 20


@tls_too
async def test_closing_an_idle_connection_ends_both_sides(tls: Certified | None) -> None:
    async with shadowed(_echo, tls=tls) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        (pipe,) = rig.pipes
        assert not pipe.busy
        pipe.close()
        assert await reader.read(-1) == b""
        writer.close()
        await rig.ended.wait()


class OfEcho(Watching):
    """Knows that an answer is as long as its request."""

    @property
    def busy(self) -> bool:  # type: ignore[override]
        return len(self.requests) > len(self.answers)


@tls_too
async def test_a_busy_connection_ends_after_the_answer_to_its_open_request(tls: Certified | None) -> None:
    async with shadowed(_echo, lambda _: OfEcho(), tls) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        (pipe,) = rig.pipes
        pipe.end()
        writer.write(b"he")
        assert await reader.readexactly(2) == b"he"
        assert await reader.read(-1) == b""
        writer.close()
        await rig.ended.wait()
