"""Odd answers of a backend, and the expected result for the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.e2e.proxies import STREAM, ProxyUnderTest, raw_post
from tests.e2e.scripted import Scripted, answering, serving_script, whole
from tests.strictness.reading import End, read_answers
from tests.strictness.vector import post
from tests.strictness.wire import connected
from tests.upstream.raw_server import Peer

BODY = b'{"a":1}'
SIZE = b"content-length: %d\r\n" % len(BODY)
TE = b"transfer-encoding: chunked\r\n"
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
LAST = b"0\r\n\r\n"
NEXT = b'{"next":1}'
"""The body of the answer to the next request."""
CONFIG: dict[str, Any] = {
    "retry": {"extra_attempts": 0},
    "health": {"failures_before_ejection": 1_000_000, "hung_s": None},
    # Only requests are answered in odd ways.
    "poll": {"interval_s": 60, "page_interval_s": 60, "models_interval_s": 60},
}


@dataclass(frozen=True, slots=True)
class AnswerVector:
    """An answer of a backend, and the expected result for the client."""

    name: str
    sent: bytes
    # The status for the client. Without an error, the client also gets the intended body.
    status: int = 200
    # Whether the client can see that the answer is incomplete.
    cut: bool = False
    # Whether the connection to the backend serves the next request too.
    kept: bool = True
    closes: bool = False
    # Bytes that the client must get, and bytes that it must not get, in any letter case.
    seen: bytes = b""
    unseen: bytes = b"evil"


@dataclass(frozen=True, slots=True)
class Got:
    """The client's bytes for the answer and for the next one, and whether the backend's connection was reused."""

    data: bytes
    next: bytes
    kept: bool


def whole_of(*fields: bytes, line: bytes = b"HTTP/1.1 200 OK", body: bytes = BODY, end: bytes = b"\r\n") -> bytes:
    """An answer with these fields and no others but its type; each field has its own end."""
    return line + end + b"content-type: application/json\r\n" + b"".join(fields) + b"\r\n" + body


ok = AnswerVector


def bad(name: str, sent: bytes, *, closes: bool = False) -> AnswerVector:
    """A broken answer. The client gets no part of it."""
    return AnswerVector(name, sent, 502, kept=False, closes=closes)


def _field(name: str, field: bytes, **expected: Any) -> AnswerVector:
    return ok(name, whole_of(field, SIZE), **expected)


def _bad_field(name: str, field: bytes) -> AnswerVector:
    return bad(name, whole_of(field, SIZE))


def _reason(name: str, sent: bytes, seen: bytes) -> AnswerVector:
    return ok(name, whole_of(SIZE, line=b"HTTP/1.1 200 " + sent), seen=seen)


def _chunks(data: bytes) -> bytes:
    return whole_of(TE, body=data)


ANSWERS = (
    ok("a length", whole_of(SIZE)),
    ok("chunks", _chunks(CHUNK + LAST)),
    ok("chunks with an extension and a trailer",
       _chunks(b"%x;evil=1\r\n%s\r\n0\r\nx-evil: 1\r\n\r\n" % (len(BODY), BODY))),
    ok("no length and no chunks: ends with the connection", whole_of(), kept=False, closes=True),
    ok("`Connection: close`", whole_of(b"connection: close\r\n", SIZE), kept=False, closes=True),
    ok("`100 Continue` before it", b"HTTP/1.1 100 Continue\r\n\r\n" + whole_of(SIZE)),
    ok("`103 Early Hints` with fields before it", b"HTTP/1.1 103 Hints\r\nx-evil: 1\r\n\r\n" + whole_of(SIZE)),
    ok("HTTP/1.0", whole_of(SIZE, line=b"HTTP/1.0 200 OK"), kept=False, closes=True),
    ok("no reason phrase", whole_of(SIZE, line=b"HTTP/1.1 200 ")),
    _field("a tab in a value", b"x-a: b\tc\r\n", seen=b"x-a: b\tc\r\n"),
    _field("UTF-8 in a value", "x-a: bä\r\n".encode(), seen="x-a: bä\r\n".encode()),
    _field("Latin-1 in a value: becomes UTF-8", "x-a: bä\r\n".encode("latin-1"), seen="x-a: bä\r\n".encode()),
    _field("`Content-Encoding: gzip`: passed on as it is", b"content-encoding: gzip\r\n",
           seen=b"content-encoding: gzip"),
    _field("a field named in `Connection`", b"connection: x-evil\r\nx-evil: 1\r\n"),
    _field("`X-Request-ID`, `Server`, `X-LLMProxy-Backend` of its own",
           b"x-request-id: evil\r\nserver: evil\r\nx-llmproxy-backend: evil\r\n"),
    _bad_field("two Content-Length that agree", SIZE),
    _bad_field("two Content-Length that differ", b"content-length: 3\r\n"),
    _bad_field("Content-Length and Transfer-Encoding", TE),
    _bad_field("Content-Length and Transfer-Encoding: gzip", b"transfer-encoding: gzip\r\n"),
    bad("Content-Length as a list", whole_of(b"content-length: 7, 7\r\n")),
    bad("Content-Length with a plus", whole_of(b"content-length: +7\r\n")),
    bad("Content-Length: -1", whole_of(b"content-length: -1\r\n")),
    bad("Content-Length of 2^64 + 7", whole_of(b"content-length: 18446744073709551623\r\n")),
    bad("Content-Length that is empty", whole_of(b"content-length:\r\n")),
    bad("Transfer-Encoding: identity, and a length", whole_of(b"transfer-encoding: identity\r\n", SIZE)),
    bad("Transfer-Encoding: gzip, chunked", whole_of(b"transfer-encoding: gzip, chunked\r\n", body=CHUNK + LAST)),
    bad("Transfer-Encoding: chunked, gzip", whole_of(b"transfer-encoding: chunked, gzip\r\n", body=CHUNK + LAST)),
    bad("Transfer-Encoding: gzip, and the end of the connection", whole_of(b"transfer-encoding: gzip\r\n")),
    bad("chunked before a tab", whole_of(b"transfer-encoding: chunked\t\r\n", body=CHUNK + LAST)),
    bad("chunked twice", whole_of(TE, TE, body=CHUNK + LAST)),
    ok("chunked in HTTP/1.0", whole_of(TE, line=b"HTTP/1.0 200 OK", body=CHUNK + LAST), kept=False),
    bad("a folded line", whole_of(b"x-a: b\r\n x-evil: c\r\n", SIZE)),
    bad("a bare LF in a value", whole_of(b"x-a: b\nx-evil: c\r\n", SIZE)),
    bad("a bare LF behind the status line", whole_of(SIZE, end=b"\n")),
    bad("lines that all end in a bare LF", whole_of(SIZE).replace(b"\r\n", b"\n")),
    _bad_field("a bare CR in a value", b"x-a: b\rx-evil: c\r\n"),
    _bad_field("NUL in a value", b"x-a: \x00\r\n"),
    _bad_field("BEL in a value", b"x-a: b\x07c\r\n"),
    _bad_field("DEL in a value", b"x-a: b\x7fc\r\n"),
    _bad_field("a control character in a name", b"x\x01a: b\r\n"),
    _bad_field("a space in a name", b"x a: b\r\n"),
    _bad_field("a space before the colon", b"x-a : b\r\n"),
    _bad_field("no colon", b"x-a\r\n"),
    _bad_field("no name", b": b\r\n"),
    bad("no status line (HTTP/0.9)", BODY + b"\r\n\r\n"),
    ok("HTTP/2.0 in the status line: read as 1.0", whole_of(SIZE, line=b"HTTP/2.0 200 OK"), kept=False),
    ok("HTTP/0.9 in the status line: read as 1.0", whole_of(SIZE, line=b"HTTP/0.9 200 OK"), kept=False),
    ok("RTSP/1.0 in the status line: read as HTTP", whole_of(SIZE, line=b"RTSP/1.0 200 OK"), kept=False),
    bad("HTTP/1.2", whole_of(SIZE, line=b"HTTP/1.2 200 OK")),
    bad("a status of two digits", whole_of(SIZE, line=b"HTTP/1.1 20 OK")),
    bad("a status of four digits", whole_of(SIZE, line=b"HTTP/1.1 2000 OK")),
    bad("the status 000", whole_of(SIZE, line=b"HTTP/1.1 000 OK")),
    bad("the status 099", whole_of(SIZE, line=b"HTTP/1.1 099 OK")),
    ok("the status 299", whole_of(SIZE, line=b"HTTP/1.1 299 OK"), status=299),
    _reason("control characters in the reason phrase: become spaces", b"a\x1b[31m\x00\x7fb", b" 200 a [31m  b\r\n"),
    bad("a bare CR in the reason phrase", whole_of(SIZE, line=b"HTTP/1.1 200 a\rx-evil: 1")),
    bad("`101 Switching Protocols`", b"HTTP/1.1 101 S\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nevil"),
    bad("an empty line and nothing else", b"\r\n\r\nevil\r\n\r\n"),
    bad("a chunk size that is no number", _chunks(CHUNK + b"zz\r\nevil\r\n")),
    bad("a chunk size with a minus", _chunks(CHUNK + b"-4\r\nevil\r\n")),
    bad("chunk lines that end in a bare LF", _chunks(CHUNK + b"4\nevil\n")),
    bad("a chunk that is longer than its size", _chunks(CHUNK + b"4\r\n    evil\r\n")),
    bad("the end of the connection before the last chunk", _chunks(CHUNK), closes=True),
    bad("the end of the connection before the length", whole_of(b"content-length: 9\r\n"), closes=True),
    ok("two answers", whole_of(SIZE) + whole_of(SIZE, line=b"HTTP/1.1 200 evil"), kept=False),
    ok("more bytes than its length", whole_of(SIZE, body=BODY + b"evil"), kept=False),
)  # fmt: skip


@asynccontextmanager
async def answer_bench(**config: Any) -> AsyncIterator[tuple[ProxyUnderTest, Scripted]]:
    """A proxy over one backend that answers as scripted."""
    async with serving_script(answering(whole(NEXT)), **CONFIG | config) as (proxy, backend):
        yield proxy, backend


async def observe_answer(
    proxy: ProxyUnderTest, backend: Scripted, sent: bytes, closes: bool, *, stream: bool = False, limit_s: float = 10.0
) -> Got:
    """Answer a request by the vector and the next one soundly, and return the results."""
    request = raw_post(STREAM, extra="connection: close\r\n") if stream else post(b"connection: close")

    async def script(peer: Peer, _: bytes) -> None:
        await peer.send(sent)
        if closes:
            peer.writer.close()

    async def asked() -> bytes:
        async with asyncio.timeout(limit_s), connected(proxy.url) as wire:
            wire.write(request)
            return await wire.all()

    backend.script = script
    data = await asked()
    connections = backend.connections
    backend.script = answering(whole(NEXT))
    return Got(data, await asked(), backend.connections == connections)


def answer_differences(vector: AnswerVector, got: Got) -> str:
    """How an observation differs from the table; "" if it does not."""
    wrong = []
    status, cut, body = client_saw(got)
    if (status, cut) != (vector.status, vector.cut):
        wrong.append(f"status {status}{' and cut' if cut else ''}: {got.data!r}")
    if status == 200 and body.rstrip() != BODY:
        wrong.append(f"the body {body!r}")
    if vector.kept != got.kept:
        wrong.append("kept" if got.kept else "closed")
    if vector.seen.lower() not in got.data.lower() or vector.unseen.lower() in got.data.lower():
        wrong.append(f"the bytes: {got.data!r}")
    following = read_answers(got.next, closed=True)
    if following.end is not End.CLEAN or [message.body for message in following.messages] != [NEXT]:
        wrong.append(f"the next answer: {got.next!r}")
    return "; ".join(wrong)


def answer_row(vector: AnswerVector, status: int, cut: bool, kept: bool) -> tuple[str, str]:
    """The name of one answer, and its outcome in cells of the table."""
    client = f"{status}, cut before its end" if cut else str(status)
    client += f", with `{vector.seen.decode().strip()}`" if vector.seen else ""
    return vector.name, f"{client} | {'kept' if kept else 'closed'}"


def client_saw(got: Got) -> tuple[int, bool, bytes]:
    """Status, whether the end is missing, and body of the answer. The status is 0 if it is not one sound answer."""
    reading = read_answers(got.data, closed=True)
    if reading.end is End.SHORT and reading.begun is not None and not reading.messages:
        return reading.begun.status, True, reading.begun.body
    if reading.end is End.CLEAN and len(reading.messages) == 1:
        return reading.messages[0].status, False, reading.messages[0].body
    return 0, True, got.data
