"""The upstream port against raw servers, because what matters here is what happens to the connection."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import cast

import pytest

from llmproxy.config import BackendTlsConfig
from llmproxy.upstream import connection as connection_module
from llmproxy.upstream.client import HttpUpstream
from llmproxy.upstream.connection import ConnectionDropped, HttpExchange
from llmproxy.upstream.endpoints import Endpoints
from llmproxy.upstream.port import ConnectFailed, Exchange, InvalidResponse, LocalFailure, UpstreamBroken
from llmproxy.upstream.resolver import Address, Resolver
from llmproxy.upstream.tls import PeerTls

from .raw_server import Peer, RawServer, answering, answering_once

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
PATIENCE_S = 10.0


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
    async with asyncio.timeout(PATIENCE_S):
        for peer in raw.peers:
            await peer.gone.wait()


@pytest.fixture
async def upstream() -> AsyncIterator[HttpUpstream]:
    async with HttpUpstream() as client:
        yield client


async def post(upstream: HttpUpstream, url: str, body: bytes = b"{}") -> HttpExchange:
    async with asyncio.timeout(PATIENCE_S):
        return await upstream.open(url, "POST", "/v1/completions", [("content-type", "application/json")], [body], 5.0)


async def read_all(exchange: Exchange) -> bytes:
    whole = b""
    async with asyncio.timeout(PATIENCE_S):
        while piece := await exchange.chunk():
            whole += piece
    return whole


async def answer_to(upstream: HttpUpstream, server: RawServer) -> tuple[bool, bytes]:
    """Whether one more request went out on a kept connection, and the body of its answer."""
    exchange = await post(upstream, server.url)
    return exchange.reused, await read_all(exchange)


async def gone(server: RawServer) -> None:
    """Wait until the first connection was cut."""
    async with asyncio.timeout(PATIENCE_S):
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


# --- what goes out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b'{"a": 1}', bytes(range(256)) * (20 << 10)], ids=["small", "large"])
async def test_sends_exactly_the_path_the_headers_and_the_body(
    upstream: HttpUpstream, server: RawServer, body: bytes
) -> None:
    server.script = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    path = "/v1/a%2fb/../c;d?x=%7e&name[]=a:b&y=a+b%20c"
    headers = [("Host", "me"), ("X-Two", "1"), ("content-length", "999"), ("x-two", "2"), ("Cookie", "a=b")]
    exchange = await upstream.open(server.url, "POST", path, headers, [body], 5.0)
    assert await read_all(exchange) == b""
    assert server.peers[0].requests == [
        b"POST " + path.encode() + b" HTTP/1.1\r\nHost: me\r\nX-Two: 1\r\nx-two: 2\r\nCookie: a=b\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    ]


# --- what comes back --------------------------------------------------------------------------------------------------


async def test_gives_a_redirect_as_it_came(upstream: HttpUpstream, server: RawServer) -> None:
    server.script = answering(
        b"HTTP/1.1 307 Not Here\r\nlocation: /elsewhere\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\n"
        b"content-encoding: gzip\r\nx-name: caf\xc3\xa9\r\ncontent-length: 3\r\n\r\nabc"
    )
    exchange = await post(upstream, server.url)
    assert (exchange.status, exchange.reason, exchange.reused) == (307, "Not Here", False)
    assert exchange.headers == [
        ("location", "/elsewhere"), ("Set-Cookie", "a=1"), ("set-cookie", "b=2"), ("content-encoding", "gzip"),
        ("x-name", "café"), ("content-length", "3"),
    ]  # fmt: skip
    assert await read_all(exchange) == b"abc"
    assert len(server.peers[0].requests) == 1, "it is not followed"


async def test_gives_each_piece_as_soon_as_it_arrives(upstream: HttpUpstream, server: RawServer) -> None:
    go_on = asyncio.Event()
    server.script = in_two(CHUNKED + b"3\r\none\r\n", go_on, b"3\r\ntwo\r\n0\r\n\r\n")
    exchange = await post(upstream, server.url)
    assert await exchange.chunk() == b"one"
    go_on.set()
    assert await read_all(exchange) == b"two"
    assert await exchange.chunk() == b""


async def test_a_close_delimited_body_ends_with_the_connection(upstream: HttpUpstream, server: RawServer) -> None:
    server.script = answering_once(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", b"all of it")
    assert await read_all(await post(upstream, server.url)) == b"all of it"


async def test_reuses_a_connection_whose_body_was_read_and_says_so(upstream: HttpUpstream, server: RawServer) -> None:
    server.script = answering(OK)
    for reused in (False, True):
        exchange = await post(upstream, server.url)
        assert exchange.reused is reused
        assert await read_all(exchange) == b"ok"
        exchange.close()
    assert len(server.peers) == 1


# --- what breaks ------------------------------------------------------------------------------------------------------


async def test_a_refused_connection_is_a_failed_connect(upstream: HttpUpstream) -> None:
    with pytest.raises(ConnectFailed, match=r"http://127\.0\.0\.1:"):
        await post(upstream, f"http://127.0.0.1:{closed_port()}")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ECONNREFUSED])
async def test_a_failure_of_this_machine_is_no_failure_of_the_backend(
    upstream: HttpUpstream, server: RawServer, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("aiohappyeyeballs.impl.socket", SimpleNamespace(**vars(socket) | {"socket": lacking}))
    with pytest.raises(ConnectFailed, match=os.strerror(number)) as caught:
        await post(upstream, server.url)
    assert server.url in str(caught.value)
    assert isinstance(caught.value, LocalFailure) is (number != errno.ECONNREFUSED)
    if isinstance(caught.value, LocalFailure):
        assert os.strerror(number) in caught.value.message
        assert "127.0.0.1" not in caught.value.message


async def test_an_unresolved_name_is_no_failure_of_the_backend(server: RawServer) -> None:
    server.script = answering(OK)
    known: dict[str, list[Address]] = {}

    async def look_up(host: str) -> list[Address]:
        if host not in known:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return known[host]

    url = server.url.replace("127.0.0.1", "gpu.test")
    async with HttpUpstream(Endpoints(Resolver(look_up))) as upstream:
        with pytest.raises(LocalFailure, match=r"the name gpu\.test does not resolve: Temporary failure") as caught:
            await post(upstream, url)
        assert "gpu.test" not in caught.value.message
        known["gpu.test"] = [(socket.AF_INET, ("127.0.0.1", 0))]
        assert await read_all(await post(upstream, url)) == b"ok"
    assert b"\r\nHost: gpu.test:" in server.peers[0].requests[0], "it is asked for by its name"


async def test_a_connect_timeout_is_a_failed_connect(upstream: HttpUpstream) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        # Two connections that nobody accepts fill the backlog, and Linux then drops further ones without a word.
        fillers = [socket.create_connection(sock.getsockname()), socket.socket()]
        fillers[1].setblocking(False)
        fillers[1].connect_ex(sock.getsockname())
        try:
            with pytest.raises(ConnectFailed):
                await upstream.open(f"http://127.0.0.1:{sock.getsockname()[1]}", "POST", "/", [], [], 0.05)
        finally:
            for filler in fillers:
                filler.close()


async def test_tls_to_a_server_without_it_is_a_failed_connect(upstream: HttpUpstream, server: RawServer) -> None:
    server.script = lambda peer: peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ConnectFailed):
        await post(upstream, server.url.replace("http:", "https:"))


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


@pytest.mark.parametrize(
    ("soon_s", "said", "rst", "answers", "requests"),
    [
        pytest.param(PATIENCE_S, b"", False, True, [2, 1], id="closed: it goes out on a new one"),
        pytest.param(PATIENCE_S, b"", True, True, [2, 1], id="reset: it goes out on a new one"),
        pytest.param(PATIENCE_S, b"", False, False, [2, 1], id="a new one is no reason for another one"),
        pytest.param(-1.0, b"", False, True, [2], id="later: it may have arrived"),
        pytest.param(PATIENCE_S, b"HTTP/1.1 20", False, True, [2], id="a word: it has arrived"),
    ],
)
async def test_a_request_on_a_kept_connection_that_is_dropped(
    upstream: HttpUpstream, server: RawServer, monkeypatch: pytest.MonkeyPatch,
    soon_s: float, said: bytes, rst: bool, answers: bool, requests: list[int],
) -> None:  # fmt: skip
    async def script(peer: Peer) -> None:
        await peer.request()
        if peer is server.peers[0]:
            await peer.send(OK)
            await peer.request()
            await peer.send(said)
            if rst:
                peer.reset()
        elif answers:
            await peer.send(OK)

    server.script = script
    monkeypatch.setattr("llmproxy.upstream.client.IDLE_DROP_S", soon_s)
    await answer_to(upstream, server)
    if answers and len(requests) == 2:
        assert await answer_to(upstream, server) == (False, b"ok")
    else:
        with pytest.raises(UpstreamBroken):
            await post(upstream, server.url)
    assert [len(peer.requests) for peer in server.peers] == requests


async def test_get_on_a_dropped_connection_is_sent_again_however_late_it_broke(
    upstream: HttpUpstream, server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await peer.request()

    server.script = script
    monkeypatch.setattr("llmproxy.upstream.client.IDLE_DROP_S", -1.0)
    for _ in range(2):
        async with asyncio.timeout(PATIENCE_S):
            exchange = await upstream.open(server.url, "GET", "/health", [], (), 5.0)
        assert (exchange.reused, await read_all(exchange)) == (False, b"ok")
    assert [len(peer.requests) for peer in server.peers] == [2, 1]


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


async def streaming(peer: Peer) -> None:
    await peer.request()
    await peer.send(CHUNKED + b"5\r\nhello\r\n")
    await peer.until_eof()


@pytest.fixture
async def stream(upstream: HttpUpstream, server: RawServer) -> HttpExchange:
    """A stream whose first chunk was read; nothing more comes."""
    server.script = streaming
    exchange = await post(upstream, server.url)
    assert await exchange.chunk() == b"hello"
    return exchange


async def test_close_cuts_the_connection_and_wakes_its_reader(stream: HttpExchange, server: RawServer) -> None:
    waiting = asyncio.create_task(stream.chunk())
    await asyncio.sleep(0)
    stream.close()
    stream.close()
    with pytest.raises(UpstreamBroken):
        await waiting
    await gone(server)


async def test_cancelling_a_slow_head_cuts_the_connection(upstream: HttpUpstream, server: RawServer) -> None:
    task = asyncio.create_task(post(upstream, server.url))
    async with asyncio.timeout(PATIENCE_S):
        await (await server.arrived.get()).asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.peers[0].gone.wait()


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize("sliced", [False, True])
async def test_cancelling_drops_what_a_stuck_server_has_not_read(
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
    async with asyncio.timeout(PATIENCE_S):
        peer = await server.arrived.get()
        await peer.asked.wait()
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()
        await peer.gone.wait()
    # What the kernels had taken arrives; what still waited on our side must not.
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

    async with asyncio.timeout(PATIENCE_S):
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

    async with asyncio.timeout(PATIENCE_S):
        await exchange.flow(sink)
        assert (got, exchange.ended) == ([b"one"], False)
        go_on.set()
        assert await exchange.chunk() == b"two"
        assert await exchange.chunk() == b""
    assert got == [b"one"]


async def test_a_sink_that_fails_cuts_the_connection_and_is_told_of(upstream: HttpUpstream, server: RawServer) -> None:
    server.script = streaming
    exchange = await post(upstream, server.url)

    def sink(_: bytes) -> None:
        raise ConnectionResetError("the client left")

    with pytest.raises(ConnectionResetError, match="the client left"):
        await exchange.flow(sink)
    exchange.close()
    await gone(server)


async def test_a_flow_that_breaks_hands_on_what_came_before(upstream: HttpUpstream, server: RawServer) -> None:
    server.script = answering_once(CHUNKED + b"5\r\nhello\r\n", b"zz\r\n")
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
    async with asyncio.timeout(PATIENCE_S):
        await blocked.wait()
        assert got < len(flood) // 4
        exchange.resume()
        await (flowing if flowing is not None else exchange.flow(sink))
    assert got == len(flood) + 1


async def settled(transport: asyncio.Transport) -> int:
    """How much is still to be written when nothing was for a while."""
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


# --- connections that are kept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [b"connection: close\r\n", b""], ids=["it says close", "it is of HTTP/1.0"])
async def test_a_connection_that_may_not_be_used_again_is_not(
    upstream: HttpUpstream, server: RawServer, head: bytes
) -> None:
    version = b"1.1" if head else b"1.0"
    server.script = answering(b"HTTP/" + version + b" 200 OK\r\ncontent-length: 2\r\n" + head + b"\r\nok")
    for _ in range(2):
        assert await answer_to(upstream, server) == (False, b"ok")
    assert len(server.peers) == 2


@pytest.mark.parametrize(
    "behind",
    [
        b"HTTP/1.1 500 Bad\r\nx-bad: 1\r\ncontent-length: 3\r\n\r\nbad",
        b"HTTP/1.1 200 Bad\r\nx-bad: 1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nbad\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Bad\r\nx-bad: 1\r\n\r\nHTTP/1.1 204 Bad\r\n\r\n",
        b"HTTP/1.1 000 Bad\r\n\r\n",
        b"HTTP/1.1 101 Bad\r\nupgrade: bad\r\nconnection: upgrade\r\n\r\nbad",
        b"HTTP/1.1 200 Ba",
        b"H",
        b"\r\nzz",
        b"\0",
    ],
    ids=["with a length", "chunked", "two more", "status 000", "101", "begun", "one byte", "garbage", "a control byte"],
)
@pytest.mark.parametrize(
    ("first", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nx-own: 1\r\ncontent-length: 2\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.1 200 OK\r\nx-own: 1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200, b"ok"),
        (b"HTTP/1.1 200 OK\r\nx-own: 1\r\ncontent-length: 0\r\n\r\n", 200, b""),
        (b"HTTP/1.1 204 OK\r\nx-own: 1\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 OK\r\nx-own: 1\r\ncontent-length: 2\r\n\r\n", 304, b""),
    ],
    ids=["a length", "chunks", "no body", "204", "304"],
)
async def test_bytes_behind_an_answer_belong_to_no_request(
    upstream: HttpUpstream, server: RawServer, first: bytes, status: int, body: bytes, behind: bytes
) -> None:
    server.script = answering(first + behind)
    for _ in range(2):
        exchange = await post(upstream, server.url)
        assert (exchange.status, exchange.reason, exchange.headers[0]) == (status, "OK", ("x-own", "1"))
        assert "x-bad" not in dict(exchange.headers)
        assert (exchange.reused, await read_all(exchange)) == (False, body)
    assert len(server.peers) == 2


async def test_unread_bytes_end_a_kept_connection(upstream: HttpUpstream, server: RawServer) -> None:
    server.script = answering(OK)
    await answer_to(upstream, server)
    # To the kernel, in the very turn of the loop in which the next request is made.
    os.write(server.peers[0].fileno, b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad")
    assert await answer_to(upstream, server) == (False, b"ok")
    assert [len(peer.requests) for peer in server.peers] == [1, 1]


async def test_unrequested_bytes_end_a_kept_connection(upstream: HttpUpstream, server: RawServer) -> None:
    speak = asyncio.Event()
    server.script = in_two(OK, speak, b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad")
    await answer_to(upstream, server)
    speak.set()
    await gone(server)
    assert await answer_to(upstream, server) == (False, b"ok")


async def test_old_connections_are_dropped(
    upstream: HttpUpstream, server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmproxy.upstream.client.IDLE_MAX_S", 0.01)
    server.script = answering(OK)
    await answer_to(upstream, server)
    await gone(server)
    assert not upstream._idle


async def test_idle_connections_make_room_the_oldest_first(server: RawServer) -> None:
    server.script = answering(OK)
    urls = [f"{server.url}/{i}" for i in range(3)]
    async with HttpUpstream(connections_max=2) as upstream, asyncio.timeout(PATIENCE_S):
        for url in urls:
            await read_all(await post(upstream, url))
        await server.peers[0].gone.wait()
        reused = [(await post(upstream, url)).reused for url in urls[1:]]
    assert (reused, len(server.peers)) == ([True, True], 3)


async def test_a_kept_connection_is_not_used_after_a_change_of_trust(server: RawServer) -> None:
    server.script = answering(OK)
    endpoints = Endpoints()
    async with HttpUpstream(endpoints) as upstream:
        for connections in (1, 2, 3):
            for reused in (False, True):
                assert await answer_to(upstream, server) == (reused, b"ok")
                assert len(server.peers) == connections
            endpoints.tls[server.url] = PeerTls(ssl.create_default_context(), BackendTlsConfig(), None)


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
    async with asyncio.timeout(PATIENCE_S):
        # What is left of the request must not be taken for the next one.
        await server.peers[0].gone.wait()
