"""Comments keep the connection of a stream alive that waits or has no token yet, and bind no attempt."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.e2e.proxies import CHAT, HELLO, STREAM, one_seat, serving
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, Script, chunk, scripted, serving_script, whole
from tests.upstream.raw_server import Peer

COMMENT = b": keep-alive\n\n"
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
KEPT_ALIVE: dict[str, Any] = {"timeouts": {"keep_alive_s": 0.02}}


def late(*pieces: bytes) -> Script:
    """Answer after some comments."""

    async def script(peer: Peer, _: bytes) -> None:
        await asyncio.sleep(0.1)
        for piece in pieces:
            await peer.send(piece)

    return script


def after_comments(body: bytes) -> bytes:
    """Returns the bytes after one or more comments."""
    assert body.startswith(COMMENT)
    rest = body.lstrip(b"\n")
    while rest.startswith(COMMENT):
        rest = rest.removeprefix(COMMENT)
    return rest


async def test_a_stream_that_computes_its_prompt_gets_comments_and_then_its_events() -> None:
    async with serving_script(late(STREAM_HEAD, chunk(TOKEN + DONE), STREAM_END), **KEPT_ALIVE) as (proxy, _):
        answer = await proxy.chat(STREAM)
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-request-id"]
        assert after_comments(answer.body) == TOKEN + DONE
        await proxy.settled()
        assert proxy.outcomes()["completed"] == 1


async def test_a_stream_that_waits_gets_comments_and_is_refused_by_an_event() -> None:
    async with one_seat(queue={"max_wait_s": 0.2}, **KEPT_ALIVE) as (proxy, _):
        answer = await proxy.chat(STREAM)
        assert answer.status == 200
        (event,) = after_comments(answer.body).split(b"\n\n")[:-1]
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == 429
        assert (await proxy.chat(HELLO)).status == 429, "without a stream there is nothing to keep alive"
        assert proxy.outcomes()["expired"] == 2


async def test_another_backend_is_tried_after_comments() -> None:
    busy, well = late(whole(b"{}", "503 Service Unavailable")), late(STREAM_HEAD, chunk(TOKEN + DONE), STREAM_END)
    asked: list[bytes] = []

    async def script(peer: Peer, request: bytes) -> None:
        asked.append(request)
        await (busy if len(asked) == 1 else well)(peer, request)

    async with (
        scripted(script) as first,
        scripted(script) as second,
        serving(extra=[first.url, second.url], **KEPT_ALIVE) as proxy,
    ):
        answer = await proxy.chat(STREAM)
        assert (answer.status, after_comments(answer.body), len(asked)) == (200, TOKEN + DONE, 2)


REFUSED = b'{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}'


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (CHAT, b"data: " + REFUSED + b"\n\n"),
        ("/v1/messages", b"event: error\ndata: " + REFUSED + b"\n\n"),
    ],
)
async def test_an_error_of_the_engine_after_comments_is_an_event(path: str, event: bytes) -> None:
    async with serving_script(late(whole(REFUSED, "400 Bad Request")), **KEPT_ALIVE) as (proxy, _):
        answer = await proxy.post(path, STREAM)
        assert (answer.status, after_comments(answer.body)) == (200, event)
        assert proxy.outcomes()["upstream_status"] == 1


async def test_an_answer_in_one_piece_to_a_stream_is_no_mix_of_both() -> None:
    async def script(peer: Peer, _: bytes) -> None:
        await asyncio.sleep(0.1)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n"
        await peer.send(head)
        await asyncio.sleep(0.1)
        await peer.send(b"{}")

    async with serving_script(script, **KEPT_ALIVE) as (proxy, _):
        answer = await proxy.chat(STREAM)
        (event,) = after_comments(answer.body).split(b"\n\n")[:-1]
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == 502


async def test_no_comment_comes_unless_asked_for() -> None:
    async with serving_script(late(STREAM_HEAD, chunk(TOKEN + DONE), STREAM_END)) as (proxy, _):
        assert (await proxy.chat(STREAM)).body == TOKEN + DONE
