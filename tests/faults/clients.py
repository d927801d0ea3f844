"""The ways in which a client may misbehave, and what must come of each."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from structlog.testing import capture_logs

from tests.e2e.proxies import CHAT, ENDLESS, HELLO, STREAM, ProxyUnderTest, raw_post, until
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, chunk, serving_script, whole
from tests.faults.rig import read_answer
from tests.upstream.raw_server import Peer

HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
EVENT = b'data: {"id":"1","choices":[{"delta":{"content":"%b"}}]}\n\n'
PIECE = chunk(EVENT % (b"x" * 65_000))
BLOCKED_BYTES_MAX = 24 << 20
"""The most bytes in the buffers of two TCP connections on loopback before a backend is stopped."""


class Engine:
    """The backend of these plays: answers at once, and what asks for 30,000 tokens gets a stream without end."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    async def __call__(self, peer: Peer, request: bytes) -> None:
        if b"30000" not in request:
            stream = STREAM_HEAD + chunk(EVENT % b"a") + chunk(b"data: [DONE]\n\n") + STREAM_END
            await peer.send(stream if b'"stream": true' in request else whole(b'{"id":"1"}'))
            return
        await peer.send(STREAM_HEAD)
        while not peer.reader.at_eof():
            await peer.send(PIECE)
            self.sent_bytes += len(PIECE)

    async def blocked(self) -> None:
        """Until nothing more can be sent for a while."""
        before = -1
        while before != self.sent_bytes:
            before = self.sent_bytes
            await asyncio.sleep(0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFault:
    """`act` misbehaves and returns the result for its client in words.

    `saw` and `outcomes` are what must come of it, and `cut` how many connections to the backend must be cut.
    """

    name: str
    act: Callable[[ProxyUnderTest, Engine], Awaitable[str]]
    saw: str
    outcomes: Mapping[str, int]
    cut: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The result at the client, in the metrics, at the backend and in the log."""

    client: str
    outcomes: Mapping[str, int]
    cut: int
    log: list[Mapping[str, Any]]


async def observe(fault: ClientFault) -> Observed:
    """Play it; on return the proxy was closed and checked, and a well-behaved client had been served."""
    engine = Engine()
    with capture_logs() as log:
        async with serving_script(engine, **fault.config) as (proxy, backend):
            client = await fault.act(proxy, engine)
            await proxy.settled()
            await until(lambda: not backend.answering, 2.0)
            seen = Observed(client=client, outcomes=+proxy.outcomes(), cut=backend.cuts, log=[])
            assert (await proxy.chat()).status == 200, "the next client is served"
    seen.log.extend(log[:-1])
    return seen


async def outcome_of(reader: asyncio.StreamReader) -> str:
    """Returns an answer in a few words: its status, if any, and the end of the connection."""
    async with asyncio.timeout(10):
        answer = await read_answer(reader)
        if not answer.status:
            return "no answer, the connection is closed"
        if not answer.whole:
            return f"{answer.status}, then the connection is cut"
        return str(answer.status)


# --- acts -------------------------------------------------------------------------------------------------------------


async def slow_body(proxy: ProxyUnderTest, _: Engine) -> str:
    async with proxy.wire(HEAD + b"content-length: 100\r\n\r\n{") as (reader, _writer):
        return await outcome_of(reader)


async def body_that_ends_early(proxy: ProxyUnderTest, _: Engine) -> str:
    async with proxy.wire(HEAD + b"content-length: 100\r\n\r\n{") as (reader, writer):
        writer.write_eof()
        return await outcome_of(reader)


async def half_close(proxy: ProxyUnderTest, _: Engine) -> str:
    async with proxy.wire(raw_post(STREAM)) as (reader, writer):
        writer.write_eof()
        return await outcome_of(reader)


async def pipelining(proxy: ProxyUnderTest, _: Engine) -> str:
    async with proxy.wire(raw_post(STREAM) + raw_post(HELLO) + raw_post(STREAM)) as (reader, _writer):
        return ", ".join([await outcome_of(reader) for _ in range(3)])


async def pipelined_flood(proxy: ProxyUnderTest, engine: Engine) -> str:
    """A thousand more requests follow a request whose answer is not read."""
    async with proxy.wire(raw_post(ENDLESS) + raw_post(HELLO) * 1000) as (reader, _writer):
        answer = await reader.readuntil(b"\r\n\r\n")
        await engine.blocked()
        return answer.split(b" ")[1].decode() + " to the first, the others were never begun"


async def stops_reading(proxy: ProxyUnderTest, engine: Engine) -> str:
    async with proxy.wire(raw_post(ENDLESS)) as (reader, _writer):
        await reader.readuntil(b"\r\n\r\n")
        await engine.blocked()
        assert 0 < engine.sent_bytes < BLOCKED_BYTES_MAX, "the replica is stopped, nothing is heaped up"
        await until(lambda: not proxy.app.handler.open_requests)
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
        return "200, then the connection is cut"


async def reads_on_after_a_pause(proxy: ProxyUnderTest, engine: Engine) -> str:
    async with proxy.wire(raw_post(ENDLESS)) as (reader, _writer):
        await reader.readuntil(b"\r\n\r\n")
        await engine.blocked()
        stopped = engine.sent_bytes
        while engine.sent_bytes < stopped + (4 << 20):
            assert await reader.read(1 << 20), "the stream goes on"
        return "200, and the stream goes on"


async def resets(proxy: ProxyUnderTest, engine: Engine) -> str:
    async with proxy.wire(raw_post(ENDLESS)) as (reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert engine.sent_bytes
    return "200, as long as it was there"


async def header_flood(proxy: ProxyUnderTest, _: Engine) -> str:
    async with proxy.wire(HEAD) as (reader, writer):
        with suppress(ConnectionError):
            for _n in range(2000):
                writer.write(b"x-more: " + b"y" * 1000 + b"\r\n")
                await writer.drain()
        return await outcome_of(reader)


async def one_endless_header(proxy: ProxyUnderTest, _: Engine) -> str:
    async with proxy.wire(HEAD + b"x-more: ") as (reader, writer):
        with suppress(ConnectionError):
            for _n in range(2000):
                writer.write(b"y" * 1000)
                await writer.drain()
        return await outcome_of(reader)


async def idle_connections(proxy: ProxyUnderTest, _: Engine) -> str:
    connections = [await asyncio.open_connection(*proxy.address) for _ in range(300)]
    assert (await proxy.chat()).status == 200
    for _reader, writer in connections:
        writer.transport.abort()
    return "nothing; everybody else is served"


async def leaves_a_crowd_at_once(proxy: ProxyUnderTest, engine: Engine) -> str:
    async def one() -> None:
        async with proxy.wire(raw_post(ENDLESS)) as (reader, _writer):
            await reader.readuntil(b"\r\n\r\n")

    await asyncio.gather(*(one() for _ in range(20)))
    assert engine.sent_bytes
    return "200, as long as they were there"


CLIENT_FAULTS = [
    ClientFault(
        name="sends part of its body and falls silent", act=slow_body, config={"clients": {"body_idle_timeout_s": 0.1}},
        saw="408", outcomes={"bad_request": 1},
    ),
    ClientFault(
        name="sends part of its body and half-closes", act=body_that_ends_early,
        saw="no answer, the connection is closed", outcomes={"cancelled": 1},
    ),
    ClientFault(
        name="half-closes behind its request", act=half_close,
        saw="no answer, the connection is closed", outcomes={"cancelled": 1},
    ),
    ClientFault(
        name="sends three requests at once (pipelining)", act=pipelining,
        saw="200, 200, 200", outcomes={"completed": 3},
    ),
    ClientFault(
        name="sends a thousand requests at once, and reads nothing", act=pipelined_flood,
        saw="200 to the first, the others were never begun", outcomes={"cancelled": 1}, cut=1,
    ),
    ClientFault(
        name="stops reading a stream, for longer than `stall_s`", act=stops_reading,
        config={"timeouts": {"stall_s": 0.5}, "health": {"failures_before_ejection": 1, "ejection_s": 30}},
        saw="200, then the connection is cut", outcomes={"cancelled": 1}, cut=1,
    ),
    ClientFault(
        name="stops reading a stream for a while, and reads on", act=reads_on_after_a_pause,
        saw="200, and the stream goes on", outcomes={"cancelled": 1}, cut=1,
    ),
    ClientFault(
        name="resets its connection in mid-stream", act=resets,
        saw="200, as long as it was there", outcomes={"cancelled": 1}, cut=1,
    ),
    ClientFault(
        name="leaves, and nineteen others in the same moment", act=leaves_a_crowd_at_once,
        saw="200, as long as they were there", outcomes={"cancelled": 20}, cut=20,
    ),
    ClientFault(
        name="sends 2 MB of headers", act=header_flood, saw="431", outcomes={"bad_request": 1},
    ),
    ClientFault(
        name="sends one header of 2 MB", act=one_endless_header, saw="431", outcomes={"bad_request": 1},
    ),
    ClientFault(
        name="opens 300 connections and says nothing", act=idle_connections,
        saw="nothing; everybody else is served", outcomes={"completed": 1},
    ),
]  # fmt: skip
