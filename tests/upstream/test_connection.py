"""An exchange with a raw server: failures, cut connections, and the passing on of its bytes."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from contextlib import suppress
from typing import cast

import pytest

from llmproxy.lifecycle.paced import CALLS
from llmproxy.upstream import connection as connection_module
from llmproxy.upstream.client import HttpUpstream
from llmproxy.upstream.connection import ConnectionDropped, HttpExchange
from llmproxy.upstream.port import InvalidResponse, UpstreamBroken

from . import raw_server
from .raw_server import (
    CHUNKED,
    OK,
    WAIT_MAX_S,
    Peer,
    RawServer,
    answer_to,
    answering,
    gone,
    in_two,
    post,
    read_all,
    streaming,
)


@pytest.mark.parametrize("rst", [False, True])
async def test_a_connection_lost_before_the_head_is_broken(
    upstream: HttpUpstream, server: RawServer, rst: bool
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        if rst:
            peer.reset()

    server.script = script
    with pytest.raises(UpstreamBroken) as caught:
        await post(upstream, server.url)
    assert not isinstance(caught.value, ConnectionDropped)
    assert len(server.peers) == 1


async def test_exchanges_that_break_together_end_in_many_turns(upstream: HttpUpstream, server: RawServer) -> None:
    server.script = streaming
    exchanges = [await post(upstream, server.url) for _ in range(10 * CALLS)]
    broken = [0]

    async def read(exchange: HttpExchange) -> None:
        with pytest.raises(UpstreamBroken):
            await read_all(exchange)
        broken[-1] += 1

    async with asyncio.TaskGroup() as readers:
        for exchange in exchanges:
            readers.create_task(read(exchange))
        await asyncio.sleep(0)
        for peer in server.peers:
            peer.reset()
        while sum(broken) < len(exchanges):
            broken.append(0)
            await asyncio.sleep(0)
    assert max(broken) <= CALLS


@pytest.mark.parametrize(
    ("said", "why"),
    [(b"SSH-2.0-OpenSSH\r\n\r\n", "Expected HTTP/")]
    + [(b"HTTP/1.1 %b X\r\ncontent-length: 2\r\n\r\n{}" % one, f"{one.decode()} is no status")
       for one in (b"000", b"001", b"099")],
)  # fmt: skip
async def test_an_answer_that_is_not_http_is_broken_at_once(
    upstream: HttpUpstream, server: RawServer, said: bytes, why: str
) -> None:
    server.script = answering(said)
    with pytest.raises(UpstreamBroken, match=why) as caught:
        await post(upstream, server.url)
    assert type(caught.value) is InvalidResponse, "it is the answer to this request"
    await gone(server)


@pytest.mark.parametrize("kept", [False, True], ids=["a fresh connection", "a kept one"])
async def test_an_invalid_chunk_size_is_noticed_on_an_open_connection(
    upstream: HttpUpstream, server: RawServer, kept: bool
) -> None:
    garbage = asyncio.Event()

    async def script(peer: Peer) -> None:
        if kept:
            await peer.request()
            await peer.send(OK)
        await peer.request()
        await peer.send(CHUNKED + b"5\r\nhello\r\n")
        await garbage.wait()
        await peer.send(b"zz\r\n")
        await peer.until_eof()

    server.script = script
    if kept:
        await answer_to(upstream, server)
    exchange = await post(upstream, server.url)
    assert (exchange.reused, await exchange.chunk()) == (kept, b"hello")
    waiting = asyncio.ensure_future(exchange.chunk())
    await asyncio.sleep(0)
    garbage.set()
    async with asyncio.timeout(10):
        with pytest.raises(UpstreamBroken):
            await waiting
    assert len(server.peers) == 1


LONGER = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhello"
UNTIL_THE_END = b"HTTP/1.1 200 OK\r\n\r\nhello"


@pytest.mark.parametrize(
    ("head", "rst"),
    [(CHUNKED + b"5\r\nhello\r\n", False), (CHUNKED + b"5\r\nhello\r\n", True), (LONGER, False), (LONGER, True),
     (UNTIL_THE_END, True)],
)  # fmt: skip
async def test_a_cut_body_is_broken(upstream: HttpUpstream, server: RawServer, head: bytes, rst: bool) -> None:
    cut = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(head)
        await cut.wait()
        if rst:
            peer.reset()

    server.script = script
    exchange = await post(upstream, server.url)
    assert await exchange.chunk() == b"hello"
    cut.set()
    with pytest.raises(UpstreamBroken):
        await read_all(exchange)


# --- who cuts the connection ------------------------------------------------------------------------------------------


async def test_close_cuts_the_connection_and_wakes_its_reader(stream: HttpExchange, server: RawServer) -> None:
    waiting = asyncio.create_task(stream.chunk())
    await asyncio.sleep(0)
    stream.close()
    stream.close()
    with pytest.raises(UpstreamBroken):
        await waiting
    await gone(server)


async def test_closing_the_client_wakes_the_reader_of_an_open_exchange(server: RawServer) -> None:
    server.script = streaming
    async with HttpUpstream() as upstream:
        stream = await post(upstream, server.url)
        assert await stream.chunk() == b"hello"
        waiting = asyncio.create_task(stream.chunk())
        await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_MAX_S):
        with pytest.raises(UpstreamBroken):
            await waiting


async def test_cancelling_a_slow_head_cuts_the_connection(upstream: HttpUpstream, server: RawServer) -> None:
    task = asyncio.create_task(post(upstream, server.url))
    async with asyncio.timeout(WAIT_MAX_S):
        await (await server.arrived.get()).asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.peers[0].gone.wait()


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize("sliced", [False, True])
async def test_cancel_drops_bytes_that_a_stuck_server_has_not_read(
    upstream: HttpUpstream, server: RawServer, sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sliced:
        # Far larger than real, because on loopback the kernel alone takes a megabyte or two.
        monkeypatch.setattr(connection_module, "WHOLE_BODY_BYTES_MAX", 1 << 30)
    received = 0
    cancelled = asyncio.Event()

    async def script(peer: Peer) -> None:
        nonlocal received
        transport = cast(asyncio.Transport, peer.writer.transport)
        transport.pause_reading()
        peer.asked.set()
        await cancelled.wait()
        transport.resume_reading()
        while piece := await peer.reader.read(65536):
            received += len(piece)

    server.script = script
    body = bytes(32 << 20)
    task = asyncio.create_task(post(upstream, server.url, body))
    async with asyncio.timeout(WAIT_MAX_S):
        peer = await server.arrived.get()
        await peer.asked.wait()
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()
        await peer.gone.wait()
    # Bytes already in the kernel's buffers arrive. Bytes that still waited in this process must not.
    assert received < len(body)


async def test_cancelling_a_reader_and_closing_cuts_the_connection(stream: HttpExchange, server: RawServer) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.chunk(), 0.01)
    stream.close()
    await gone(server)


# --- bytes that are handed on as they arrive --------------------------------------------------------------------------


async def test_a_flow_passes_held_bytes_and_then_each_piece(upstream: HttpUpstream, server: RawServer) -> None:
    go_on = asyncio.Event()
    server.script = in_two(CHUNKED + b"3\r\none\r\n", go_on, b"3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n")
    exchange = await post(upstream, server.url)
    got: list[bytes] = []

    def sink(data: bytes) -> None:
        got.append(data)
        go_on.set()

    async with asyncio.timeout(WAIT_MAX_S):
        await exchange.flow(sink)
    assert (got[0], b"".join(got), exchange.ended) == (b"one", b"onetwothree", True)


async def test_a_sink_that_halts_leaves_the_rest_to_be_pulled(upstream: HttpUpstream, server: RawServer) -> None:
    go_on = asyncio.Event()
    server.script = in_two(CHUNKED + b"3\r\none\r\n", go_on, b"3\r\ntwo\r\n0\r\n\r\n")
    exchange = await post(upstream, server.url)
    got: list[bytes] = []

    def sink(data: bytes) -> None:
        got.append(data)
        exchange.halt()

    async with asyncio.timeout(WAIT_MAX_S):
        await exchange.flow(sink)
        assert (got, exchange.ended) == ([b"one"], False)
        go_on.set()
        assert await exchange.chunk() == b"two"
        assert await exchange.chunk() == b""
    assert got == [b"one"]


async def test_a_sink_that_fails_cuts_the_connection_and_is_reported(upstream: HttpUpstream, server: RawServer) -> None:
    server.script = raw_server.streaming
    exchange = await post(upstream, server.url)

    def sink(_: bytes) -> None:
        raise ConnectionResetError("the client left")

    with pytest.raises(ConnectionResetError, match="the client left"):
        await exchange.flow(sink)
    exchange.close()
    await gone(server)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_failed_sinks_leave_nothing_to_the_garbage_collector(
    upstream: HttpUpstream, server: RawServer, cancelled: bool
) -> None:
    class LeftError(ConnectionResetError):
        pass

    go_on = asyncio.Event()
    server.script = in_two(CHUNKED, go_on, b"3\r\none\r\n")
    exchange = await post(upstream, server.url)
    raised: list[weakref.ref[LeftError]] = []

    def sink(_: bytes) -> None:
        if cancelled:
            tasks[0].cancel()
        error = LeftError()
        raised.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    tasks = [asyncio.create_task(exchange.flow(sink))]
    await asyncio.sleep(0)
    gc.disable()
    try:
        go_on.set()
        with suppress(LeftError, asyncio.CancelledError):
            await tasks[0]
        tasks.clear()
        await asyncio.sleep(0)
        assert [ref() for ref in raised] == [None]
    finally:
        gc.enable()


async def test_broken_flow_passes_earlier_bytes_on(upstream: HttpUpstream, server: RawServer) -> None:
    server.script = raw_server.answering_once(CHUNKED + b"5\r\nhello\r\n", b"zz\r\n")
    exchange = await post(upstream, server.url)
    got: list[bytes] = []
    with pytest.raises(UpstreamBroken):
        await exchange.flow(got.append)
    assert got == [b"hello"]


@pytest.mark.parametrize("how", ["pulled", "paused"])
async def test_a_backend_waits_until_its_bytes_are_taken(upstream: HttpUpstream, server: RawServer, how: str) -> None:
    blocked = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\nx" % (len(flood) + 1))
        transport = cast(asyncio.Transport, peer.writer.transport)
        transport.write(flood)
        while transport.get_write_buffer_size() != (size := await settled(transport)):
            pass
        assert size
        blocked.set()
        await peer.until_eof()

    flood = bytes(64 << 20)
    server.script = script
    exchange = await post(upstream, server.url)
    got = 0

    def sink(data: bytes) -> None:
        nonlocal got
        got += len(data)
        if not blocked.is_set():
            exchange.pause()

    flowing = asyncio.create_task(exchange.flow(sink)) if how == "paused" else None
    async with asyncio.timeout(WAIT_MAX_S):
        await blocked.wait()
        assert got < len(flood) // 4
        exchange.resume()
        await (flowing if flowing is not None else exchange.flow(sink))
    assert got == len(flood) + 1


async def settled(transport: asyncio.Transport) -> int:
    """Returns the bytes in the write buffer once it no longer shrinks."""
    before = -1
    while before != (size := transport.get_write_buffer_size()):
        before = size
        await asyncio.sleep(0.02)
    return before


async def test_small_writes_go_out_at_once(upstream: HttpUpstream, stream: HttpExchange) -> None:
    (connection,) = upstream._connections
    assert connection._transport is not None
    sock = connection._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    stream.close()


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/", [("x-a", "b\r\nx-evil: c")]), ("/", [("x-a", "b\nc")]), ("/ HTTP/1.1\r\nx: ", []), ("/a b", [])],
)
async def test_nothing_smuggles_a_line_into_the_head(
    upstream: HttpUpstream, server: RawServer, path: str, headers: list[tuple[str, str]]
) -> None:
    with pytest.raises(ValueError, match=r"a line break|a space"):
        await upstream.open(server.url, "POST", path, headers, [], 5.0)
    assert not server.peers


async def test_the_head_of_an_answer_has_an_end(upstream: HttpUpstream, server: RawServer) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            await peer.send(b"x-a: %b\r\n" % (b"a" * 4096))

    server.script = script
    with pytest.raises(UpstreamBroken, match="longer than"):
        await post(upstream, server.url)


async def test_an_answer_to_a_large_body_may_come_early(upstream: HttpUpstream, server: RawServer) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\nno")
        await peer.until_eof()

    server.script = script
    exchange = await post(upstream, server.url, bytes(32 << 20))
    assert (exchange.status, await read_all(exchange)) == (413, b"no")
    async with asyncio.timeout(WAIT_MAX_S):
        # The rest of the request must not be taken for the next request.
        await server.peers[0].gone.wait()
