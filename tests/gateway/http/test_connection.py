"""The end of connections, on uvloop as in production."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import uvloop
from aiohttp import web

from llmproxy.config import ClientsConfig
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.connection import ClientServer
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.proxying.response_writer import ResponseWriter
from llmproxy.lifecycle.accepting import Acceptor
from llmproxy.lifecycle.paced import CALLS

CLIENTS = 10 * CALLS


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}


class Waiting:
    """A handler that answers only probes. It counts all running requests, and those `ahead` of a probe."""

    def __init__(self) -> None:
        self.clients = ClientLimits(ClientsConfig())
        self.running = 0
        self.ahead: int | None = None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            self.ahead = self.running
            return web.Response()
        self.running += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.running -= 1
        return web.Response()

    def refuse(self, request: web.BaseRequest, failure: Failure) -> web.Response:
        del request
        raise failure

    def reject(self, failure: Failure) -> bytes:
        raise failure


async def test_clients_that_leave_together_take_a_little_of_many_turns() -> None:
    handler = Waiting()
    factory = ClientServer(handler, ClientsConfig())
    server = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0, backlog=CLIENTS)
    clients = [socket.create_connection(server.sockets[0].getsockname()) for _ in range(CLIENTS)]
    for client in clients:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    async with asyncio.timeout(10):
        while handler.running < CLIENTS:  # noqa: ASYNC110 - each pass is one turn of the loop
            await asyncio.sleep(0)
        for client in clients:
            client.close()
        ended: list[int] = []
        before = CLIENTS
        while before:
            await asyncio.sleep(0)
            ended.append(before - handler.running)
            before = handler.running
    server.close()
    assert 0 < max(ended) <= CALLS


async def test_clients_that_left_before_their_turn_begin_no_request() -> None:
    handler = Waiting()
    factory = ClientServer(handler, ClientsConfig())
    made: list[asyncio.BaseProtocol] = []
    began = 0

    def connection() -> asyncio.BaseProtocol:
        made.append(factory())
        return made[-1]

    listening = socket.create_server(("127.0.0.1", 0), backlog=CLIENTS)
    for _ in range(CLIENTS):
        with socket.create_connection(listening.getsockname()) as client:
            client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\na")
    acceptor = Acceptor([listening], connection)
    async with asyncio.timeout(10):
        while len(made) < CLIENTS or factory.connections:
            await asyncio.sleep(0)
            began = max(began, handler.running)
    acceptor.close()
    # Requests of the first turn began before the proxy read that their clients had left.
    assert began <= CALLS


async def test_bytes_for_a_client_that_left_are_dropped_until_its_handler_is_cancelled() -> None:
    """Otherwise the next bytes of thousands of clients would end as many handlers in one turn."""
    ends: list[str] = []
    writers: list[ResponseWriter] = []
    paused: list[bool] = []

    class Source:
        def pause(self) -> None:
            paused.append(True)

        def resume(self) -> None:
            raise AssertionError("a client that left reads nothing")

    class Streaming(Waiting):
        async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
            writer = ResponseWriter(request, {}, Mock(shutting_down=False))
            writer.commit(200, "OK", [])
            writer.write(b"x")
            writer.source = Source()
            writers.append(writer)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                writer.write(b"y")
                try:
                    await writer.end()
                except ConnectionResetError as error:
                    ends.append(str(error))
                raise
            return web.Response()

    factory = ClientServer(Streaming(), ClientsConfig())
    server = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(10):
            while not writers:  # noqa: ASYNC110 - each pass is one turn of the loop
                await asyncio.sleep(0)
    async with asyncio.timeout(10):
        while not ends:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
    server.close()
    assert (ends, bool(paused)) == (["its connection is closed"], True)


async def test_nothing_is_written_after_the_end_of_an_answer() -> None:
    said: list[object] = []

    class Ended(Waiting):
        async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
            writer = ResponseWriter(request, {}, Mock(shutting_down=False))
            writer.comment(b": a\n\n")
            await writer.end()
            said.append(writer.comment(b": b\n\n"))
            with pytest.raises(RuntimeError, match="has ended"):
                writer.write(b"c")
            with pytest.raises(RuntimeError, match="has ended"):
                await writer.end()
            said.append(writer.only_comments)
            assert writer.response is not None
            return writer.response

    factory = ClientServer(Ended(), ClientsConfig())
    server = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    assert answer.endswith(b"\r\n\r\n5\r\n: a\n\n\r\n0\r\n\r\n")
    assert said == [False, False]
    writer.close()
    server.close()


async def test_clients_that_come_together_begin_in_many_turns_and_probes_before_them() -> None:
    handler = Waiting()
    listening = socket.create_server(("127.0.0.1", 0), backlog=CLIENTS)
    clients = [socket.create_connection(listening.getsockname()) for _ in range(CLIENTS + 1)]
    for client in clients[:-1]:
        client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx")
    clients[-1].sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    acceptor = Acceptor([listening], ClientServer(handler, ClientsConfig()))
    begun = [0]
    async with asyncio.timeout(10):
        while handler.running < CLIENTS:
            await asyncio.sleep(0)
            begun.append(handler.running)
    assert max(after - before for before, after in itertools.pairwise(begun)) <= CALLS
    assert handler.ahead is not None
    assert handler.ahead <= 3 * CALLS
    acceptor.close()
    for client in clients:
        client.close()
