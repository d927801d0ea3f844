"""Accepting many connections in a turn of the loop, on uvloop as in production, and again after a shortage."""

from __future__ import annotations

import asyncio
import errno
import itertools
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from structlog.testing import capture_logs

from llmproxy.lifecycle import accepting
from llmproxy.lifecycle.accepting import Acceptor

BURST = 200


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}


class Echo(asyncio.Protocol):
    """Answers every byte, and counts the connections that are there."""

    def __init__(self, made: list[Echo]) -> None:
        self.made = made
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.made.append(self)

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


def opened() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=4096)


def clients(listening: socket.socket, count: int) -> list[socket.socket]:
    return [socket.create_connection(listening.getsockname()) for _ in range(count)]


def close(*ones: socket.socket) -> None:
    for one in ones:
        one.close()


async def turns_until(condition: Callable[[], bool]) -> int:
    """How many turns of the loop pass until then."""
    turns = 0
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)
            turns += 1
    return turns


async def test_a_burst_is_accepted_in_a_few_turns() -> None:
    made: list[Echo] = []
    listening = opened()
    found = clients(listening, BURST)
    acceptor = Acceptor([listening], lambda: Echo(made))
    assert await turns_until(lambda: len(made) == BURST) < BURST / 10
    loop = asyncio.get_running_loop()
    for one in (found[0], found[-1]):
        one.setblocking(False)
        await loop.sock_sendall(one, b"x")
        assert await loop.sock_recv(one, 10) == b"x"
    acceptor.close()
    close(*found)


async def test_a_turn_accepts_a_bounded_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "ACCEPTS_MAX", 7)
    made: list[Echo] = []
    listening = opened()
    found = clients(listening, BURST)
    acceptor = Acceptor([listening], lambda: Echo(made))
    counts = [0]
    async with asyncio.timeout(10):
        while len(made) < BURST:
            await asyncio.sleep(0)
            counts.append(len(made))
    assert max(after - before for before, after in itertools.pairwise(counts)) == 7
    acceptor.close()
    close(*found)


async def test_open_connections_stay_when_no_more_are_accepted() -> None:
    made: list[Echo] = []
    listening = opened()
    address = listening.getsockname()
    acceptor = Acceptor([listening], lambda: Echo(made))
    [one] = clients(listening, 1)
    await turns_until(lambda: bool(made))
    acceptor.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    one.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(one, b"x")
    assert await asyncio.get_running_loop().sock_recv(one, 10) == b"x"
    close(one)


class Lacking(socket.socket):
    """Has no descriptors for this many more connections."""

    lacks = 3
    asked = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.asked += 1
        if self.lacks:
            self.lacks -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_without_descriptors_it_pauses_says_so_once_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "RETRY_S", 0.001)
    made: list[Echo] = []
    plain = opened()
    listening = Lacking(fileno=plain.detach())
    [one] = clients(listening, 1)
    with capture_logs() as lines:
        acceptor = Acceptor([listening], lambda: Echo(made))
        await turns_until(lambda: bool(made))
    assert [(line["event"], line["why"]) for line in lines] == [
        ("connections_not_accepted", "Too many open files (the limit is LimitNOFILE= of the unit, or ulimit -n)")
    ]
    assert listening.asked <= 5, "it does not ask in each turn"
    acceptor.close()
    close(one)


async def test_acceptor_may_be_closed_while_it_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "RETRY_S", 0.001)
    plain = opened()
    listening = Lacking(fileno=plain.detach())
    [one] = clients(listening, 1)
    with capture_logs() as lines:
        acceptor = Acceptor([listening], lambda: Echo([]))
        await turns_until(lambda: bool(lines))
        acceptor.close()
        await asyncio.sleep(0.01)
    assert listening.asked == 1
    close(one)


async def test_a_client_that_left_hides_no_other_one() -> None:
    made: list[Echo] = []
    listening = opened()
    gone, *found = clients(listening, 3)
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    gone.close()
    acceptor = Acceptor([listening], lambda: Echo(made))
    await turns_until(lambda: len(made) >= len(found))
    acceptor.close()
    close(*found)
