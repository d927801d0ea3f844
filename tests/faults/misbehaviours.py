"""The ways in which a replica may misbehave towards a request, and what must come of each."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

from llmproxy.lab.simulator.server.faults import FaultKind
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, Script, answering, breaking, chunk, whole
from tests.faults.rig import SHORT, Misbehaviour
from tests.upstream.raw_server import Peer

EVENT = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"the engine is out of luck","type":"InternalServerError","code":500}}\n\n'
BODY = b'{"id":"1","choices":[{"message":{"content":"a"}}]}'
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
BEGUN = OK + b"transfer-encoding: chunked\r\n\r\n"
FIRST = STREAM_HEAD + chunk(EVENT)
FINISH = b'data: {"id":"1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
STREAM = FIRST + chunk(DONE) + STREAM_END
NO_MODEL = b'{"error":{"message":"The model `sim` does not exist.","type":"NotFoundError","param":"model","code":404}}'
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n" * 1000
LATER = b"retry-after: 7\r\n"


def says(*pieces: bytes) -> Script:
    """Sends these bytes in several packets and waits for the proxy."""

    async def script(peer: Peer, _: bytes) -> None:
        for piece in pieces:
            await peer.send(piece)
            await asyncio.sleep(0.02)
        await peer.until_eof()

    return script


def for_ever(first: bytes, piece: bytes, pause_s: float = 0.0) -> Script:
    """Never come to an end."""

    async def script(peer: Peer, _: bytes) -> None:
        await peer.send(first)
        while not peer.writer.is_closing():
            await peer.send(piece)
            await asyncio.sleep(pause_s)

    return script


async def slow_headers(peer: Peer, _: bytes) -> None:
    for byte in OK + b"x-padding: " + b"x" * 1000:
        await peer.send(bytes([byte]))
        await asyncio.sleep(0.02)


def status(line: str, extra: bytes = b"") -> Script:
    return answering(whole(b'{"error":{"message":"no"}}', line, extra=extra))


def passed(name: str, script: Script, plain: Script | None = None) -> Misbehaviour:
    """A misbehaviour that the client gets unchanged."""
    return Misbehaviour(name, script, plain, stream="own", verdict="served")


def passed_error(name: str, line: str) -> Misbehaviour:
    """An error of the client, which it gets as it came."""
    return Misbehaviour(name, status(line), stream=line[:3], verdict="served")


def late(name: str, *scripts: Script) -> Misbehaviour:
    """A misbehaviour that a time limit ends before the first byte."""
    return Misbehaviour(name, *scripts, whole="504", alone="504", verdict="timed_out", config=SHORT)


def torn(name: str, script: Script, plain: Script, **more: Any) -> Misbehaviour:
    """An answer that breaks in its middle. Another replica continues the stream, and repeats an answer in one piece."""
    return Misbehaviour(name, script, plain, stream="own", stream_alone="event", whole="other", **more)


def endless(name: str, script: Script, plain: Script) -> Misbehaviour:
    """An answer that a time limit ends in its middle. Another replica would need as long."""
    return Misbehaviour(name, script, plain, stream="event", whole="504", verdict="timed_out", config=SHORT)


MISBEHAVIOURS: list[Misbehaviour] = [
    # --- no answer ----------------------------------------------------------------------------------------------------
    Misbehaviour("refuses connections", says(), before=lambda bad: bad.hang(), verdict="connect_failed"),
    late("accepts and says nothing", says()),
    Misbehaviour("closes the connection without an answer", breaking()),
    Misbehaviour("resets the connection without an answer", breaking(reset=True)),
    # --- heads --------------------------------------------------------------------------------------------------------
    late("sends its headers byte by byte", slow_headers),
    late("sends a head and nothing more", says(STREAM_HEAD), says(BEGUN)),
    Misbehaviour("resets behind its head", breaking(STREAM_HEAD, reset=True), breaking(BEGUN, reset=True)),
    Misbehaviour("sends a status line of garbage", says(b"\x00\x01 garbage \xff\r\n\r\n")),
    Misbehaviour("answers 000", says(whole(BODY, "000 OK"))),
    Misbehaviour("speaks another protocol", says(b"SSH-2.0-OpenSSH_9.6\r\n")),
    Misbehaviour("sends a header of 1 MB", says(OK + b"x-large: " + b"x" * (1 << 20) + b"\r\n\r\n")),
    Misbehaviour("sends headers without end", for_ever(OK, b"x-more: and more\r\n" * 100)),
    Misbehaviour("sends one header line without end", for_ever(OK + b"x-more: ", b"x" * 65536)),
    passed("sends 1,000 times `100 Continue` first", answering(CONTINUE, STREAM), answering(CONTINUE, whole(BODY))),
    Misbehaviour("sends `102 Processing` without end", for_ever(b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 50)),
    Misbehaviour("sends two lengths that differ", says(OK + b"content-length: 5\r\ncontent-length: 50\r\n\r\n" + BODY)),
    Misbehaviour(
        "sends a length and chunks",
        says(OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(BODY) + STREAM_END),
    ),
    Misbehaviour(
        "switches to another protocol (101)",
        says(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nhello"),
        verdict="not_served",
    ),
    # --- bodies -------------------------------------------------------------------------------------------------------
    torn("resets in mid-answer", breaking(FIRST, reset=True), breaking(whole(BODY)[:-1], reset=True)),
    torn("falls silent in mid-answer", says(FIRST), says(whole(BODY)[:-1]), config=SHORT, whole_alone="504"),
    torn(
        "cuts a chunk in the middle", breaking(FIRST + b"40\r\n" + EVENT[:20]), breaking(BEGUN + b"40\r\n" + BODY[:20])
    ),
    torn("ends its chunks without the last one", breaking(FIRST), breaking(BEGUN + chunk(BODY))),
    torn("sends a chunk size of garbage", says(FIRST, b"zz\r\n"), says(BEGUN + chunk(BODY), b"zz\r\n")),
    Misbehaviour(
        "promises more bytes than it sends",
        breaking(whole(EVENT + DONE + b" " * 9, content_type="text/event-stream")[:-9]),
        breaking(whole(BODY + b" " * 9)[:-9]),
        stream="own",
        whole="other",
        verdict="served",
        whole_verdict="failed",
    ),
    passed(
        "sends more bytes than it promised",
        answering(whole(EVENT + DONE, content_type="text/event-stream") + b"HTTP/1.1 200 OK\r\n\r\nmore"),
        answering(whole(BODY) + b"HTTP/1.1 200 OK\r\n\r\nmore"),
    ),
    passed(
        "sends bytes that are no UTF-8",
        answering(STREAM.replace(b'"a"', b'"\xff"')),
        answering(whole(BODY.replace(b'"a"', b'"\xff\xfe"'))),
    ),
    passed(
        "compresses its answer without being asked",
        answering(whole(gzip.compress(BODY), extra=b"content-encoding: gzip\r\n")),
    ),
    passed("answers a stream in one piece, others with a stream", answering(whole(BODY)), answering(STREAM)),
    endless(
        "sends events without end", for_ever(STREAM_HEAD, chunk(EVENT), 0.005), for_ever(BEGUN, chunk(b" "), 0.005)
    ),
    endless(
        "sends one event without end",
        for_ever(STREAM_HEAD, chunk(b"data: " + b"x" * (1 << 18)), 0.01),
        for_ever(BEGUN, chunk(b"x"), 0.01),
    ),
    passed("ends a stream without `[DONE]`", answering(FIRST + chunk(FINISH) + STREAM_END), answering(whole(BODY))),
    Misbehaviour(
        "sends an error as its first event, then `[DONE]`, or 500 without a stream",
        answering(STREAM_HEAD + chunk(ERROR) + chunk(DONE) + STREAM_END),
        status("500 Internal Server Error"),
        alone="own",
        whole_alone="500",
    ),
    Misbehaviour(
        "sends an error in mid-stream, then `[DONE]`",
        answering(FIRST + chunk(ERROR) + chunk(DONE) + STREAM_END),
        answering(whole(b'{"error":{"message":"no"}}')),
        stream="own",
        whole_verdict="served",
    ),
    # --- statuses -----------------------------------------------------------------------------------------------------
    Misbehaviour("answers 500", status("500 Internal Server Error"), alone="500"),
    Misbehaviour("answers 502", status("502 Bad Gateway")),
    Misbehaviour("answers 503", status("503 Service Unavailable"), alone="503", verdict="busy"),
    Misbehaviour("answers 503 with Retry-After", status("503 Service Unavailable", LATER), alone="503", verdict="busy"),
    Misbehaviour("answers 429", status("429 Too Many Requests"), alone="429", verdict="busy"),
    Misbehaviour("answers 429 with Retry-After", status("429 Too Many Requests", LATER), alone="429", verdict="busy"),
    Misbehaviour("answers 529", status("529 Overloaded"), alone="529", verdict="busy"),
    Misbehaviour("answers 408", status("408 Request Timeout"), alone="408", verdict="busy"),
    Misbehaviour("answers 504", status("504 Gateway Timeout"), stream="504", verdict="timed_out"),
    Misbehaviour("answers 401 to the proxy's key", status("401 Unauthorized"), verdict="unauthorized"),
    Misbehaviour("answers 403 to the proxy's key", status("403 Forbidden"), verdict="unauthorized"),
    Misbehaviour(
        "answers 404 for a model that it lists",
        answering(whole(NO_MODEL, "404 Not Found")),
        alone="404",
        verdict="not_served",
    ),
    passed_error("answers 404 for a path", "404 Not Found"),
    passed_error("answers 400", "400 Bad Request"),
    Misbehaviour(
        "redirects elsewhere",
        answering(whole(b"", "307 Temporary Redirect", extra=b"location: http://x/\r\n")),
        verdict="not_served",
    ),
    Misbehaviour(
        "answers 500 with a body without end",
        for_ever(b"HTTP/1.1 500 Oh No\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b"x" * 65536)),
        alone="500",
    ),
    # --- as real engines break: simulated replicas --------------------------------------------------------------------
    Misbehaviour("is gone (SIGKILL)", fault=FaultKind.REFUSE, verdict="connect_failed"),
    Misbehaviour(
        "was asked to end (SIGTERM): the port refuses, open requests hang",
        fault=FaultKind.HANG,
        verdict="connect_failed",
    ),
    Misbehaviour(
        "drains: 500 to new requests, while `/health` is 200",
        fault=FaultKind.DRAINING_500,
        alone="500",
        verdict="draining",
    ),
    Misbehaviour("has a dead engine", fault=FaultKind.ENGINE_DEAD, alone="500", verdict="engine_dead"),
    Misbehaviour("is busy", fault=FaultKind.BUSY_503, alone="503", verdict="busy"),
]  # fmt: skip
