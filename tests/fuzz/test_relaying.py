"""From socket to socket: the client gets the bytes of an answer, in whatever chunks and packets they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.e2e.proxies import CHAT, ProxyUnderTest
from tests.e2e.scripted import Scripted, breaking, serving_script, whole
from tests.fuzz.profile import FUZZED
from tests.fuzz.rig import entered
from tests.upstream.raw_server import Peer

TOKEN = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
END = b"\n\ndata: [DONE]\n\n"
"""A stream without an end is continued elsewhere. The blank line ends the piece before it."""
PIECES = st.lists(st.sampled_from([TOKEN, USAGE, b": x\n\n", b"data: [DONE]\n\n"]) | st.binary(max_size=40), max_size=8)
SIZES = st.lists(st.integers(1, 90), min_size=1, max_size=6)
EXTENSIONS = st.sampled_from([b"", b";a=b", b';a="b"'])


@dataclass
class Rig:
    """A proxy over one scripted backend."""

    runner: asyncio.Runner
    proxy: ProxyUnderTest
    backend: Scripted


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with entered(serving_script(breaking(), health={"failures_before_ejection": 1000})) as (runner, opened):
        yield Rig(runner, *opened)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """`data` in pieces of these sizes, over and over."""
    pieces, at, turn = [], 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        pieces.append(data[at : at + size])
        at, turn = at + size, turn + 1
    return pieces


def exchanged(rig: Rig, packets: list[bytes], body: bytes) -> tuple[int, bytes]:
    """Returns the client's answer to a chat with this body when the backend answers in these packets."""

    async def answer(peer: Peer, _: bytes) -> None:
        for packet in packets:
            await peer.send(packet)
            await asyncio.sleep(0)

    async def asked() -> tuple[int, bytes]:
        got = await rig.proxy.post(CHAT, body)
        return got.status, got.body

    rig.backend.script = answer
    return rig.runner.run(asked())


@FUZZED
@given(PIECES, SIZES, SIZES, EXTENSIONS, st.booleans())
@example([TOKEN, USAGE], [1], [1], b"", True)
def test_a_chunked_answer_passes_whole(
    rig: Rig, pieces: list[bytes], chunks: list[int], packets: list[int], extension: bytes, stream: bool
) -> None:
    # The proxy holds back a first event that is an error, so the first event here is none.
    data = TOKEN + b"".join(pieces) + END if stream else b"{}" + b"".join(pieces)
    kind = b"text/event-stream" if stream else b"application/json"
    wire = b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\ntransfer-encoding: chunked\r\n\r\n"
    wire += b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in cut(data, chunks)) + b"0\r\n\r\n"
    # Usage that the client asked for itself is none of the proxy's business.
    asked = b'{"model":"base","messages":[],"stream":%s' % (b"true" if stream else b"false")
    asked += b',"stream_options":{"include_usage":true}}'
    assert exchanged(rig, cut(wire, packets), asked) == (200, data)
    assert rig.backend.requests[-1].endswith(b"\r\n\r\n" + asked)


@FUZZED
@given(st.binary(max_size=300), SIZES, st.sampled_from(["200 OK", "400 Bad", "404 None", "422 Odd", "500 Broken"]))
def test_an_answer_with_a_length_passes_whole(rig: Rig, data: bytes, packets: list[int], status: str) -> None:
    wire = whole(data, status)
    assert exchanged(rig, cut(wire, packets), b'{"model":"base"}') == (int(status[:3]), data)


@FUZZED
@given(st.binary(max_size=200), SIZES, st.integers(0, 200))
def test_no_answer_at_all_makes_the_proxy_fail(rig: Rig, junk: bytes, packets: list[int], keep: int) -> None:
    wire = whole(b"{}")[:keep] + junk

    async def asked() -> int | None:
        try:
            return (await rig.proxy.post(CHAT, b'{"model":"base"}')).status
        except OSError:
            return None
        except Exception as error:  # noqa: BLE001 - a client's library has many names for an answer that was cut off
            assert type(error).__module__.startswith("aiohttp")
            return None

    rig.backend.script = breaking(*cut(wire, packets))
    rig.runner.run(asked())
    assert not rig.proxy.outcomes()["internal"]
