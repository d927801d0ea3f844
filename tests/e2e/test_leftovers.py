"""The check at the end of a proxy finds leftovers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from tests.e2e.leftovers import nothing_left, sockets
from tests.e2e.proxies import FAST, serving
from tests.upstream.raw_server import Peer

kept: list[object] = []


async def a_task(_: str) -> None:
    # A coroutine of a library, as tasks of tests are not looked at.
    kept.append(asyncio.create_task(asyncio.Event().wait()))


async def a_socket(url: str) -> None:
    session = aiohttp.ClientSession()
    kept.append(session)
    await (await session.get(url + "/health")).read()


async def a_timer(_: str) -> None:
    asyncio.get_running_loop().call_later(60, print)


@pytest.mark.parametrize("leak", [a_task, a_socket, a_timer])
async def test_leftovers_are_found(leak: Callable[[str], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.e2e.leftovers.LIMIT_S", 0.05)
    async with serving(FAST) as proxy:
        with pytest.raises(AssertionError, match="left behind"):
            async with nothing_left():
                await leak(proxy.url)
        for each in kept:
            if isinstance(each, asyncio.Task):
                each.cancel()
            elif isinstance(each, aiohttp.ClientSession):
                await each.close()
        kept.clear()
        timers = getattr(asyncio.get_running_loop(), "timers", ())
        for handle in timers:
            if "print" in repr(handle):
                handle.cancel()


async def test_a_socket_is_seen_that_has_the_descriptor_of_a_closed_scripted_one() -> None:
    accepted: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(Peer(reader, writer))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        _, client = await asyncio.open_connection(*server.sockets[0].getsockname())
        peer = await accepted
        for writer in (client, peer.writer):
            writer.close()
            await writer.wait_closed()
        before = sockets()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            os.dup2(listener.fileno(), peer.fileno)
        try:
            assert len(sockets() - before) == 1
        finally:
            os.close(peer.fileno)


async def test_an_exception_that_was_never_retrieved_is_found() -> None:
    async def fails() -> None:
        raise ValueError("lost")

    async def loses() -> None:
        async with nothing_left():
            await asyncio.wait([asyncio.create_task(fails())])

    with pytest.raises(AssertionError, match="never retrieved"):
        await loses()
