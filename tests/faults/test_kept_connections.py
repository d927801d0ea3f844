"""Connections that are kept for the next request: nothing of one request may reach the client of another."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.scripted import serving_script, whole
from tests.upstream.raw_server import Peer

MINE = whole(b'{"for":"you"}')
POISON = whole(b'{"for":"somebody else"}')


@pytest.mark.parametrize("late", [False, True], ids=["with its answer", "while nobody asks"])
async def test_an_answer_without_a_request_reaches_no_client(late: bool) -> None:
    let = asyncio.Event()

    async def script(peer: Peer, _: bytes) -> None:
        await peer.send(MINE if late else MINE + POISON)
        if late and not let.is_set():
            await let.wait()
            await peer.send(POISON)

    async with serving_script(script) as (proxy, _):
        for _ in range(3):
            assert (await proxy.chat()).json == {"for": "you"}
            let.set()
            # A turn of both ends, so that the sent bytes arrive.
            await asyncio.sleep(0.02)
        assert proxy.outcomes() == {"completed": 3}


async def test_an_unread_answer_reaches_no_other_client() -> None:
    """A large error is cut off in its middle; the rest of it must not begin the next answer."""

    async def script(peer: Peer, request: bytes) -> None:
        await peer.send(whole(b"x" * (3 << 20), "400 Oh") if b"large" in request else MINE)

    async with serving_script(script) as (proxy, _):
        for _ in range(3):
            assert (
                await proxy.chat({"model": "base", "messages": [{"role": "user", "content": "large"}]})
            ).status == 400
            assert (await proxy.chat()).json == {"for": "you"}
