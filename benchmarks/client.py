"""One client of the load generator: sends a chat request, reads the answer by its framing, counts what it saw."""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import orjson

CHAT_PATH = "/v1/chat/completions"
HEAD_BYTES_MAX = 1 << 16
STAMP_BYTES = 23
# Longer than a stamp and than the end of a stream, so either is still found when a read cuts it.
REST_BYTES = 64
PROMPT = "You are a careful assistant. Answer in one short sentence, name your sources, and do not guess. " * 8


@dataclass(slots=True)
class Tally:
    """What the clients have counted; only what ends while `open` is true enters the samples."""

    open: bool = False
    started: int = 0
    requests: int = 0
    chunks: int = 0
    skipped: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    latency_ns: array[int] = field(default_factory=lambda: array("q"))
    ttft_ns: array[int] = field(default_factory=lambda: array("q"))
    transit_ns: array[int] = field(default_factory=lambda: array("q"))
    gap_ns: array[int] = field(default_factory=lambda: array("q"))


def chat_body(chunks: int = 0, interval_us: int = 0) -> bytes:
    """A chat body of about 0.9 KB: for one JSON answer, or for a stream of `chunks` chunks, `interval_us` apart."""
    ask: dict[str, object] = {"model": "mock", "messages": [{"role": "user", "content": PROMPT}]}
    if chunks:
        ask |= {"stream": True, "max_tokens": chunks, "seed": interval_us}
    return orjson.dumps(ask)


def request_bytes(target: str, chunks: int, interval_us: int) -> bytes:
    """A whole chat request, head and body, as it goes on the wire."""
    body = chat_body(chunks, interval_us)
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nhost: {urllib.parse.urlsplit(target).netloc}\r\nuser-agent: loadgen\r\n"
    head += f"accept: */*\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Client(asyncio.Protocol):
    """One connection with at most one request on it; `done` is called at the end of each good answer."""

    def __init__(self, tally: Tally, done: Callable[[Client], None]) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tally = tally
        self._done = done
        self._transport: asyncio.Transport
        self._busy = False
        self._head: bytes | None = b""
        self._stream = False
        self._rest = b""
        self._left: int | None = None
        self._sent_ns = 0
        self._last_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport without inheriting from it.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._busy:
            self._tally.failures[f"connection lost in an answer ({exc or 'closed'})"] += 1
        if not self.gone.done():
            self.gone.set_result(None)

    def send(self, request: bytes, stream: bool) -> None:
        self._busy = True
        self._head = b""
        self._stream = stream
        self._rest = b""
        self._last_ns = 0
        self._sent_ns = time.monotonic_ns()
        self._transport.write(request)

    def abandon(self) -> None:
        """Closes without counting the answer that is under way as failed."""
        self._busy = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        if not self._busy:
            self._fail("bytes that nobody asked for")
            return
        if self._head is not None:
            data = self._read_head(self._head + data)
        if self._head is None and self._busy:
            ended = self._stream_ended(data, now_ns) if self._stream else self._answer_ended(data)
            if ended:
                self._finish(now_ns)

    def _read_head(self, data: bytes) -> bytes:
        """Keeps an incomplete head; otherwise notes the framing and returns the first bytes of the body."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._head = data
            if len(data) > HEAD_BYTES_MAX:
                self._fail("a response head without an end")
            return b""
        status = data[9:12]
        if status != b"200":
            self._fail(f"status {status.decode(errors='replace')}")
            return b""
        self._head = None
        head = data[:end].lower()
        at = head.find(b"\r\ncontent-length:")
        self._left = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else None
        return data[end + 4 :]

    def _answer_ended(self, data: bytes) -> bool:
        if self._left is not None:
            self._left -= len(data)
            return self._left == 0
        self._rest = (self._rest + data)[-REST_BYTES:]
        return self._rest.endswith(b"0\r\n\r\n")

    def _stream_ended(self, data: bytes, now_ns: int) -> bool:
        buffer = self._rest + data
        tally = self._tally
        past = 0
        at = buffer.find(b"@T")
        while at >= 0 and len(buffer) >= at + STAMP_BYTES:
            if tally.open:
                tally.chunks += 1
                tally.transit_ns.append(now_ns - int(buffer[at + 2 : at + 22]))
                if self._last_ns:
                    tally.gap_ns.append(now_ns - self._last_ns)
                else:
                    tally.ttft_ns.append(now_ns - self._sent_ns)
            if not self._last_ns:
                tally.started += 1
            self._last_ns = now_ns
            past = at + STAMP_BYTES
            at = buffer.find(b"@T", past)
        self._rest = buffer[max(past, len(buffer) - REST_BYTES) :]
        if not self._rest.endswith(b"\r\n0\r\n\r\n"):
            return False
        if b"[DONE]" not in self._rest:
            self._fail("a stream that ended without [DONE]")
            return False
        return True

    def _finish(self, now_ns: int) -> None:
        self._busy = False
        if self._tally.open:
            self._tally.requests += 1
            self._tally.latency_ns.append(now_ns - self._sent_ns)
        self._done(self)

    def _fail(self, why: str) -> None:
        self._tally.failures[why] += 1
        self.abandon()
