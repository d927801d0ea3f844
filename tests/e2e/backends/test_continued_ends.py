"""Streams that end without a part of their end."""

from __future__ import annotations

import orjson
import pytest

from llmproxy.gateway.http.routes import BodyKind
from tests.e2e.backends.test_continued import CHAT_BODY, Read, read
from tests.e2e.proxies import CHAT, serving, until
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, Script, breaking, chunk, scripted, serving_script
from tests.gateway.proxying.continued.engines import PIECES, events
from tests.upstream.raw_server import Peer

NO_USAGE = CHAT_BODY | {"stream_options": None}
TEXT = "".join(PIECES)


def sends(*streams: list[bytes]) -> Script:
    """A script that sends the first stream, and the second for the rest of an answer. Both end regularly."""

    async def script(peer: Peer, request: bytes) -> None:
        await peer.send(STREAM_HEAD + chunk(b"".join(streams[b"continue_final_message" in request])) + STREAM_END)

    return script


@pytest.mark.parametrize("usage", [True, False])
async def test_a_missing_end_mark_is_written_without_another_replica(usage: bool) -> None:
    answer = events(BodyKind.CHAT, usage=usage)[:-1]
    async with serving_script(breaking(STREAM_HEAD + chunk(b"".join(answer)))) as (proxy, backend):
        found = await read(proxy, CHAT, CHAT_BODY if usage else NO_USAGE)
        assert (found.text, found.done, len(found.usage), found.errors) == (TEXT, 1, usage, [])
        await proxy.settled()
        assert proxy.outcomes() == {"completed": 1}
        assert proxy.metric("llmproxy_continued_streams_total", how="end") == 1
        assert len(backend.requests) == 1
        # The backend failed nevertheless.
        assert proxy.metric("llmproxy_attempts_total", verdict="failed") == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(events(BodyKind.CHAT, usage=False)[:-1], id="usage"),
        pytest.param(events(BodyKind.CHAT)[:-3], id="the finish"),
    ],
)
async def test_a_stream_that_lacks_more_than_the_end_mark_needs_another_replica(answer: list[bytes]) -> None:
    async with serving_script(breaking(STREAM_HEAD + chunk(b"".join(answer)))) as (proxy, _):
        found = await read(proxy, CHAT, CHAT_BODY)
        assert (found.done, len(found.errors)) == (0, 1)


async def test_an_end_in_the_middle_of_an_answer_is_a_break() -> None:
    """An answer whose end is the end of its connection ends regularly when the engine dies."""
    script = sends([*events(BodyKind.CHAT)[:4], b'data: {"id"'], events(BodyKind.CHAT, 3))
    async with scripted(script) as first, scripted(script) as second, serving(extra=[first.url, second.url]) as proxy:
        found = await read(proxy, CHAT, CHAT_BODY)
        assert (found.text, found.done, found.errors, len(found.comments)) == (TEXT, 1, [], 1)
        await proxy.settled()
        assert proxy.metric("llmproxy_continued_streams_total", how="text") == 1


async def test_an_answer_that_ends_without_its_mark_is_whole() -> None:
    answer = events(BodyKind.CHAT)[:-1]
    async with serving_script(sends(answer)) as (proxy, _):
        assert (await proxy.chat(CHAT_BODY)).body == b"".join(answer)
        assert proxy.outcomes() == {"completed": 1}


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        pytest.param(
            b'{"id":"x","choices":[{"index":0,"delta":{"reasoning":"Hm"}}]}', "begins to reason", id="reasons"
        ),
        pytest.param(
            orjson.dumps({"id": "x", "choices": [{"index": 0, "delta": {"content": TEXT}}]}),
            "begins the answer again",
            id="again",
        ),
    ],
)
async def test_a_rest_that_cannot_be_joined_ends_the_stream_before_the_engine_has_finished(
    rest: bytes, why: str
) -> None:
    async def script(peer: Peer, request: bytes) -> None:
        if b"continue_final_message" in request:
            await peer.send(STREAM_HEAD + chunk(b"data: " + rest + b"\n\n"))
            await peer.reader.read()
        else:
            await peer.send(STREAM_HEAD + chunk(b"".join(events(BodyKind.CHAT)[:12])))
            peer.writer.close()

    async with scripted(script) as first, scripted(script) as second, serving(extra=[first.url, second.url]) as proxy:
        found = await read(proxy, CHAT, CHAT_BODY)
        assert [why in error["error"]["message"] for error in found.errors] == [True]
        await until(lambda: first.cuts + second.cuts == 1)
        await proxy.settled()
        assert proxy.outcomes() == {"upstream_status": 1}


async def test_a_stream_without_any_event_is_asked_for_elsewhere() -> None:
    streams = iter([[], events(BodyKind.CHAT)])

    async def script(peer: Peer, _: bytes) -> None:
        await peer.send(STREAM_HEAD + b"".join(map(chunk, next(streams))) + STREAM_END)

    async with scripted(script) as first, scripted(script) as second, serving(extra=[first.url, second.url]) as proxy:
        found = Read((await proxy.chat(CHAT_BODY)).events)
        assert (found.text, found.done, found.errors, found.comments) == (TEXT, 1, [], [])


ROLE_ALONE = [
    events(BodyKind.CHAT)[0],
    b'data: {"id":"first","choices":[],"usage":{"prompt_tokens":7,"total_tokens":7,"completion_tokens":0}}\n\n',
    b"data: [DONE]\n\n",
]
"""vLLM that shuts down ends chats that have no token yet like this."""


async def test_an_end_mark_without_a_finish_is_a_break() -> None:
    streams = iter([ROLE_ALONE, events(BodyKind.CHAT)])

    async def script(peer: Peer, _: bytes) -> None:
        await peer.send(STREAM_HEAD + b"".join(map(chunk, next(streams))) + STREAM_END)

    async with scripted(script) as first, scripted(script) as second, serving(extra=[first.url, second.url]) as proxy:
        found = await read(proxy, CHAT, CHAT_BODY)
        assert (found.text, found.done, found.ends, found.roles, found.errors) == (TEXT, 1, ["stop"], 1, [])
        assert [usage["completion_tokens"] for usage in found.usage] == [len(PIECES)]
        await proxy.settled()
        assert proxy.metric("llmproxy_continued_streams_total", how="anew") == 1
        assert proxy.metric("llmproxy_attempts_total", verdict="draining") == 1


async def test_an_end_mark_without_a_finish_is_passed_on_if_there_is_no_other_replica() -> None:
    async with serving_script(sends(ROLE_ALONE)) as (proxy, _):
        assert (await proxy.chat(CHAT_BODY)).body == b"".join(ROLE_ALONE)
        await proxy.settled()
        assert proxy.outcomes() == {"upstream_status": 1}
