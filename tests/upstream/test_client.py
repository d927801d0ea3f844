"""The upstream port against raw servers: opening, keeping and reusing connections."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl

import pytest

from llmproxy.config import BackendTlsConfig
from llmproxy.upstream.client import HttpUpstream
from llmproxy.upstream.endpoints import Endpoints
from llmproxy.upstream.port import ConnectFailed, LocalFailure, UpstreamBroken
from llmproxy.upstream.resolver import Address, Resolver
from llmproxy.upstream.tls import PeerTls

from . import raw_server
from .raw_server import CHUNKED, OK, WAIT_MAX_S, Peer, RawServer, answer_to, answering, gone, in_two, post, read_all

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


# --- responses --------------------------------------------------------------------------------------------------------


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
    server.script = raw_server.answering_once(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", b"all of it")
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
        await post(upstream, f"http://127.0.0.1:{raw_server.closed_port()}")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ECONNREFUSED])
async def test_a_failure_of_this_machine_is_no_failure_of_the_backend(
    upstream: HttpUpstream, server: RawServer, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_server.refuse_sockets(monkeypatch, number)
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


@pytest.mark.parametrize(
    ("soon_s", "said", "rst", "answers", "requests"),
    [
        pytest.param(WAIT_MAX_S, b"", False, True, [2, 1], id="closed: it goes out on a new one"),
        pytest.param(WAIT_MAX_S, b"", True, True, [2, 1], id="reset: it goes out on a new one"),
        pytest.param(WAIT_MAX_S, b"", False, False, [2, 1], id="a new one is no reason for another one"),
        pytest.param(-1.0, b"", False, True, [2], id="later: it may have arrived"),
        pytest.param(WAIT_MAX_S, b"HTTP/1.1 20", False, True, [2], id="a word: it has arrived"),
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
        async with asyncio.timeout(WAIT_MAX_S):
            exchange = await upstream.open(server.url, "GET", "/health", [], (), 5.0)
        assert (exchange.reused, await read_all(exchange)) == (False, b"ok")
    assert [len(peer.requests) for peer in server.peers] == [2, 1]


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


@pytest.mark.sampled(7)
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
    async with HttpUpstream(connections_max=2) as upstream, asyncio.timeout(WAIT_MAX_S):
        for url in urls:
            await read_all(await post(upstream, url))
        await server.peers[0].gone.wait()
        reused = [(await post(upstream, url)).reused for url in urls[1:]]
    assert (reused, len(server.peers)) == ([True, True], 3)


@pytest.mark.parametrize(("then", "reused"), [(["127.0.0.2", "127.0.0.1"], True), (["127.0.0.2"], False)])
async def test_a_kept_connection_is_used_while_its_name_has_the_address(
    then: list[str], reused: bool, server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmproxy.upstream.resolver.REFRESH_S", 0.001)
    server.script = answering(OK)
    places, changed, asked = ["127.0.0.1"], asyncio.Event(), asyncio.Semaphore(0)

    async def look_up(_: str) -> list[Address]:
        if changed.is_set():
            asked.release()
        return [(socket.AF_INET, (place, 0)) for place in places]

    resolver, url = Resolver(look_up), server.url.replace("127.0.0.1", "gpu.test")
    resolver.follow([url])
    async with HttpUpstream(Endpoints(resolver)) as upstream, asyncio.timeout(WAIT_MAX_S):
        await read_all(await post(upstream, url))
        places[:] = then
        changed.set()
        # The second look-up comes after the answer to the first.
        for _ in range(2):
            await asked.acquire()
        if reused:
            assert (await post(upstream, url)).reused
        else:
            with pytest.raises(ConnectFailed):
                await post(upstream, url)
            await gone(server)
    await resolver.close()


@pytest.mark.parametrize("idle", [2, 3])
async def test_each_connection_of_a_burst_makes_room(idle: int, server: RawServer) -> None:
    server.script = answering(OK)
    urls = [f"{server.url}/{i}" for i in range(6)]
    async with HttpUpstream(connections_max=3) as upstream, asyncio.timeout(WAIT_MAX_S):
        for url in urls[:idle]:
            await read_all(await post(upstream, url))
        burst = await asyncio.gather(*(post(upstream, url) for url in urls[3:]))
        assert len(server.peers) == idle + len(burst)
        assert [(await post(upstream, url)).reused for url in reversed(urls[:idle])] == [False] * idle


async def test_a_kept_connection_is_not_used_after_a_change_of_trust(server: RawServer) -> None:
    server.script = answering(OK)
    endpoints = Endpoints()
    async with HttpUpstream(endpoints) as upstream:
        for connections in (1, 2, 3):
            for reused in (False, True):
                assert await answer_to(upstream, server) == (reused, b"ok")
                assert len(server.peers) == connections
            endpoints.tls[server.url] = PeerTls(ssl.create_default_context(), BackendTlsConfig(), None)
