"""The ways in which a replica may misbehave towards a request, and what must come of each."""

from __future__ import annotations

import asyncio
import gzip

from llmproxy.simulator.server.faults import FaultKind
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, Script, chunk, whole
from tests.faults.rig import SHORT, Misbehaviour
from tests.upstream.raw_server import Peer

EVENT = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"the engine is out of luck","type":"InternalServerError","code":500}}\n\n'
BODY = b'{"id":"1","choices":[{"message":{"content":"a"}}]}'
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def is_stream(request: bytes) -> bool:
    return b'"stream": true' in request


def says(*pieces: bytes) -> Script:
    """Send these bytes, not in one packet, and wait for what the proxy does."""

    async def script(peer: Peer, _: bytes) -> None:
        for piece in pieces:
            await peer.send(piece)
            await asyncio.sleep(0.02)
        await peer.until_eof()

    return script


def says_and_closes(*pieces: bytes) -> Script:
    async def script(peer: Peer, _: bytes) -> None:
        for piece in pieces:
            await peer.send(piece)
        peer.writer.close()

    return script


def says_and_resets(*pieces: bytes) -> Script:
    async def script(peer: Peer, _: bytes) -> None:
        for piece in pieces:
            await peer.send(piece)
        peer.reset()

    return script


def by_kind(stream: Script, one_piece: Script) -> Script:
    """One script for streams, another for answers in one piece."""

    async def script(peer: Peer, request: bytes) -> None:
        await (stream if is_stream(request) else one_piece)(peer, request)

    return script


def answers(data: bytes) -> Script:
    async def script(peer: Peer, _: bytes) -> None:
        await peer.send(data)

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


async def resets_at_once(peer: Peer, _: bytes) -> None:
    peer.reset()


async def closes_at_once(peer: Peer, _: bytes) -> None:
    peer.writer.close()


def status(line: str, retry_after: bool = False) -> Script:
    extra = b"retry-after: 7\r\n" if retry_after else b""
    return answers(whole(b'{"error":{"message":"no"}}', line, extra=extra))


BEGUN = OK + b"transfer-encoding: chunked\r\n\r\n"

MISBEHAVIOURS: list[Misbehaviour] = [
    # --- no answer ----------------------------------------------------------------------------------------------------
    Misbehaviour(
        name="refuses connections", script=says(), before=lambda bad: bad.hang(),
        stream="other", whole="other", alone=("502", "502"), verdict="connect_failed",
    ),
    Misbehaviour(
        name="accepts and says nothing", script=says(),
        stream="other", whole="504", alone=("504", "504"), verdict="failed", config=SHORT,
    ),
    Misbehaviour(
        name="closes the connection without an answer", script=closes_at_once,
        stream="other", whole="other", alone=("502", "502"), verdict="failed",
    ),
    Misbehaviour(
        name="resets the connection without an answer", script=resets_at_once,
        stream="other", whole="other", alone=("502", "502"), verdict="failed",
    ),
    # --- heads --------------------------------------------------------------------------------------------------------
    Misbehaviour(
        name="sends its headers byte by byte", script=slow_headers,
        stream="other", whole="504", alone=("504", "504"), verdict="failed", config=SHORT,
    ),
    Misbehaviour(
        name="sends a head and nothing more", script=by_kind(says(STREAM_HEAD), says(BEGUN)),
        stream="other", whole="504", alone=("504", "504"), verdict="failed", config=SHORT,
    ),
    Misbehaviour(
        name="resets behind its head", script=by_kind(says_and_resets(STREAM_HEAD), says_and_resets(BEGUN)),
        stream="other", whole="other", alone=("502", "502"), verdict="failed",
    ),
    Misbehaviour(
        name="sends a status line of garbage", script=says(b"\x00\x01 garbage \xff\r\n\r\n"),
        stream="other", whole="other", alone=("502", "502"), verdict="failed",
    ),
    Misbehaviour(
        name="answers 000", script=says(whole(BODY, "000 OK")),
        stream="other", whole="other", alone=("502", "502"), verdict="failed",
    ),
    Misbehaviour(
        name="speaks another protocol", script=says(b"SSH-2.0-OpenSSH_9.6\r\n"),
        stream="other", whole="other", alone=("502", "502"), verdict="failed",
    ),
    Misbehaviour(
        name="sends a header of 1 MB", script=says(OK + b"x-large: " + b"x" * (1 << 20) + b"\r\n\r\n"),
        stream="other", whole="other", alone=("502", "502"), verdict="failed",
    ),
    Misbehaviour(
        name="sends headers without end", script=for_ever(OK, b"x-more: and more\r\n" * 100),
        stream="other", whole="other", alone=("502", "502"), verdict="failed",
    ),
    Misbehaviour(
        name="sends one header line without end", script=for_ever(OK + b"x-more: ", b"x" * 65536),
        stream="other", whole="other", alone=("502", "502"), verdict="failed",
    ),
    Misbehaviour(
        name="sends 1,000 times `100 Continue` first",
        script=by_kind(
            answers(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000 + STREAM_HEAD + chunk(EVENT) + chunk(DONE) + STREAM_END),
            answers(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000 + whole(BODY)),
        ),
        stream="own", whole="own", alone=("own", "own"), verdict="served",
    ),
    Misbehaviour(
        name="sends `102 Processing` without end", script=for_ever(b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 50),
        stream="other", whole="other", alone=("502", "502"), verdict="failed",
    ),
    Misbehaviour(
        name="sends two lengths that differ",
        script=says(OK + b"content-length: 5\r\ncontent-length: 50\r\n\r\n" + BODY),
        stream="other", whole="other", alone=("502", "502"), verdict="failed",
    ),
    Misbehaviour(
        name="sends a length and chunks",
        script=says(OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(BODY) + STREAM_END),
        stream="other", whole="other", alone=("502", "502"), verdict="failed",
    ),
    Misbehaviour(
        name="switches to another protocol (101)",
        script=says(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nhello"),
        stream="other", whole="other", alone=("502", "502"), verdict="failed",
    ),
    # --- bodies -------------------------------------------------------------------------------------------------------
    Misbehaviour(
        name="resets in mid-answer",
        script=by_kind(says_and_resets(STREAM_HEAD + chunk(EVENT)), says_and_resets(whole(BODY)[:-1])),
        stream="event", whole="cut", alone=("event", "cut"), verdict="failed",
    ),
    Misbehaviour(
        name="falls silent in mid-answer",
        script=by_kind(says(STREAM_HEAD + chunk(EVENT)), says(whole(BODY)[:-1])),
        stream="event", whole="cut", alone=("event", "cut"), verdict="failed", config=SHORT,
    ),
    Misbehaviour(
        name="cuts a chunk in the middle",
        script=by_kind(
            says_and_closes(STREAM_HEAD + chunk(EVENT) + b"40\r\n" + EVENT[:20]),
            says_and_closes(BEGUN + b"40\r\n" + BODY[:20]),
        ),
        stream="event", whole="cut", alone=("event", "cut"), verdict="failed",
    ),
    Misbehaviour(
        name="ends its chunks without the last one",
        script=by_kind(says_and_closes(STREAM_HEAD + chunk(EVENT)), says_and_closes(BEGUN + chunk(BODY))),
        stream="event", whole="cut", alone=("event", "cut"), verdict="failed",
    ),
    Misbehaviour(
        name="sends a chunk size of garbage",
        script=by_kind(says(STREAM_HEAD + chunk(EVENT), b"zz\r\n"), says(BEGUN + chunk(BODY), b"zz\r\n")),
        stream="event", whole="cut", alone=("event", "cut"), verdict="failed",
    ),
    Misbehaviour(
        name="promises more bytes than it sends",
        script=by_kind(
            says_and_closes(whole(EVENT + DONE + b" " * 9, content_type="text/event-stream")[:-9]),
            says_and_closes(whole(BODY + b" " * 9)[:-9]),
        ),
        stream="own", whole="cut", alone=("own", "cut"), verdict="served", whole_verdict="failed",
    ),
    Misbehaviour(
        name="sends more bytes than it promised",
        script=by_kind(
            answers(whole(EVENT + DONE, content_type="text/event-stream") + b"HTTP/1.1 200 OK\r\n\r\nmore"),
            answers(whole(BODY) + b"HTTP/1.1 200 OK\r\n\r\nmore"),
        ),
        stream="own", whole="own", alone=("own", "own"), verdict="served",
    ),
    Misbehaviour(
        name="sends bytes that are no UTF-8",
        script=by_kind(
            answers(STREAM_HEAD + chunk(EVENT.replace(b'"a"', b'"\xff\xfe"')) + chunk(DONE) + STREAM_END),
            answers(whole(BODY.replace(b'"a"', b'"\xff\xfe"'))),
        ),
        stream="own", whole="own", alone=("own", "own"), verdict="served",
    ),
    Misbehaviour(
        name="compresses what nobody asked to be compressed",
        script=answers(whole(gzip.compress(BODY), extra=b"content-encoding: gzip\r\n")),
        stream="own", whole="own", alone=("own", "own"), verdict="served",
    ),
    Misbehaviour(
        name="answers a stream in one piece, and what is none with a stream",
        script=by_kind(answers(whole(BODY)), answers(STREAM_HEAD + chunk(EVENT) + chunk(DONE) + STREAM_END)),
        stream="own", whole="own", alone=("own", "own"), verdict="served",
    ),
    Misbehaviour(
        name="sends events without end",
        script=by_kind(for_ever(STREAM_HEAD, chunk(EVENT), 0.005), for_ever(BEGUN, chunk(b" "), 0.005)),
        stream="event", whole="cut", alone=("event", "cut"), verdict="failed", config=SHORT,
    ),
    Misbehaviour(
        name="sends one event without end",
        script=by_kind(
            for_ever(STREAM_HEAD, chunk(b"data: " + b"x" * (1 << 18)), 0.01), for_ever(BEGUN, chunk(b"x"), 0.01)
        ),
        stream="event", whole="cut", alone=("event", "cut"), verdict="failed", config=SHORT,
    ),
    Misbehaviour(
        name="ends a stream without `[DONE]`",
        script=by_kind(answers(STREAM_HEAD + chunk(EVENT) + STREAM_END), answers(whole(BODY))),
        stream="own", whole="own", alone=("own", "own"), verdict="served",
    ),
    Misbehaviour(
        name="sends an error as its first event, then `[DONE]`; 500 to what is no stream",
        script=by_kind(
            answers(STREAM_HEAD + chunk(ERROR) + chunk(DONE) + STREAM_END), status("500 Internal Server Error")
        ),
        stream="other", whole="500", alone=("own", "500"), verdict="failed",
    ),
    Misbehaviour(
        name="sends an error in mid-stream, then `[DONE]`",
        script=by_kind(
            answers(STREAM_HEAD + chunk(EVENT) + chunk(ERROR) + chunk(DONE) + STREAM_END),
            answers(whole(b'{"error":{"message":"no"}}')),
        ),
        stream="own", whole="own", alone=("own", "own"), verdict="failed", whole_verdict="served",
    ),
    # --- statuses -----------------------------------------------------------------------------------------------------
    Misbehaviour(
        name="answers 500", script=status("500 Internal Server Error"),
        stream="500", whole="500", alone=("500", "500"), verdict="failed",
    ),
    Misbehaviour(
        name="answers 502", script=status("502 Bad Gateway"),
        stream="other", whole="other", alone=("502", "502"), verdict="failed",
    ),
    Misbehaviour(
        name="answers 503", script=status("503 Service Unavailable"),
        stream="other", whole="other", alone=("503", "503"), verdict="busy",
    ),
    Misbehaviour(
        name="answers 503 with Retry-After", script=status("503 Service Unavailable", retry_after=True),
        stream="other", whole="other", alone=("503", "503"), verdict="busy",
    ),
    Misbehaviour(
        name="answers 429", script=status("429 Too Many Requests"),
        stream="429", whole="429", alone=("429", "429"), verdict="served",
    ),
    Misbehaviour(
        name="answers 429 with Retry-After", script=status("429 Too Many Requests", retry_after=True),
        stream="429", whole="429", alone=("429", "429"), verdict="served",
    ),
    Misbehaviour(
        name="answers 504", script=status("504 Gateway Timeout"),
        stream="504", whole="504", alone=("504", "504"), verdict="failed",
    ),
    Misbehaviour(
        name="redirects elsewhere", script=answers(whole(b"", "307 Temporary Redirect", extra=b"location: http://x/\r\n")),
        stream="502", whole="502", alone=("502", "502"), verdict="failed",
    ),
    Misbehaviour(
        name="answers 500 with a body without end",
        script=for_ever(b"HTTP/1.1 500 Oh No\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b"x" * 65536)),
        stream="500", whole="500", alone=("500", "500"), verdict="failed",
    ),
    # --- as real engines break: simulated replicas --------------------------------------------------------------------
    Misbehaviour(
        name="is gone (SIGKILL)", fault=FaultKind.REFUSE,
        stream="other", whole="other", alone=("502", "502"), verdict="connect_failed",
    ),
    Misbehaviour(
        name="was told to end (SIGTERM): the port refuses, open requests hang", fault=FaultKind.HANG,
        stream="other", whole="other", alone=("502", "502"), verdict="connect_failed",
    ),
    Misbehaviour(
        name="drains: 500 to what is new, while `/health` is 200", fault=FaultKind.DRAINING_500,
        stream="other", whole="other", alone=("500", "500"), verdict="draining",
    ),
    Misbehaviour(
        name="has a dead engine", fault=FaultKind.ENGINE_DEAD,
        stream="500", whole="500", alone=("500", "500"), verdict="failed",
    ),
    Misbehaviour(
        name="is busy", fault=FaultKind.BUSY_503,
        stream="other", whole="other", alone=("503", "503"), verdict="busy",
    ),
]  # fmt: skip
