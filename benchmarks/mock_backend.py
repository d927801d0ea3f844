"""A mock vLLM server that costs next to nothing, so that what is measured is the proxy in front of it.

Run `python -m benchmarks.mock_backend --port 9001 --port 9002`. One process serves every port; it prints one URL per
line when it listens. Standard fields of a chat body steer the answer, so that they survive any proxy:

    max_tokens   how many chunks a stream has (1..10,000)
    seed         the time between two chunks, in microseconds; the first chunk leaves at once
    stream       false: one JSON answer of about 300 bytes, with usage

Every content chunk carries `@T<20 digits>@`, the `time.monotonic_ns()` of its sending, which a client on the same
machine subtracts from its own. It is no HTTP server for the world: one request at a time on a connection, bodies with a
content-length, everything rendered beforehand.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import orjson
import uvloop

MODEL = "mock"
CHUNKS_MAX = 10_000
REQUEST_BYTES_MAX = 1 << 20
STAMP = b"@T%020d@"


def rendered(status: bytes, content_type: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\nserver: mock\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, content_type, len(body)) + body


def framed(event: bytes) -> bytes:
    """One server-sent event as one HTTP chunk, as vLLM frames them."""
    data = b"data: " + event + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunk_json(choices: bytes, tail: bytes = b"") -> bytes:
    head = b'{"id":"chatcmpl-5eed5eed5eed5eed","object":"chat.completion.chunk","created":1700000000,"model":"mock",'
    return head + b'"choices":[' + choices + b"]" + tail + b"}"


def content(finish: bytes) -> tuple[bytes, bytes]:
    """A framed content chunk, cut where its stamp goes: the stamp's width is fixed, so the framing never changes."""
    choice = b'{"index":0,"delta":{"content":"%b"},"logprobs":null,"finish_reason":%b,"token_ids":null}'
    before, after = framed(chunk_json(choice % (STAMP % 0, finish))).split(STAMP % 0)
    return before, after


JSON = b"application/json"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
CONTENT = content(b"null")
LAST_CONTENT = content(b'"length"')
STREAM_END = framed(b"[DONE]") + b"0\r\n\r\n"
ANSWER = rendered(
    b"200 OK",
    JSON,
    b'{"id":"chatcmpl-5eed5eed5eed5eed","object":"chat.completion","created":1700000000,"model":"mock","choices":'
    b'[{"index":0,"message":{"role":"assistant","content":"The answer is forty-two."},"logprobs":null,'
    b'"finish_reason":"stop","stop_reason":null}],"system_fingerprint":"mock",'
    b'"usage":{"prompt_tokens":200,"total_tokens":208,"completion_tokens":8}}',
)
MODELS = rendered(
    b"200 OK",
    JSON,
    b'{"object":"list","data":[{"id":"mock","object":"model","created":1700000000,"owned_by":"vllm","root":"mock",'
    b'"parent":null,"max_model_len":131072}]}',
)
HEALTH = rendered(b"200 OK", JSON, b"")
NOT_FOUND = rendered(b"404 Not Found", JSON, b'{"detail":"Not Found"}')
BAD_REQUEST = (
    b'{"error":{"message":"the mock wants JSON with max_tokens in 1..10000 and seed (microseconds) >= 0",'
    b'"type":"BadRequestError","param":null,"code":400}}'
)


def usage_event(chunks: int) -> bytes:
    usage = b',"usage":{"prompt_tokens":200,"total_tokens":%d,"completion_tokens":%d}' % (200 + chunks, chunks)
    return framed(chunk_json(b"", usage))


class Replica:
    """What the connections of one port share: how many requests run, which is all its metrics tell."""

    def __init__(self) -> None:
        self.running = 0

    def metrics(self) -> bytes:
        """The series a balancer reads; the filtered and the whole page are the same here."""
        labels = b'{engine="0",model_name="mock"}'
        page = (
            b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running%b %d.0\n"
            b"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting%b 0.0\n"
            b"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc%b 0.0\n"
        ) % (labels, self.running, labels, labels)
        return rendered(b"200 OK", b"text/plain; version=0.0.4; charset=utf-8", page)


class Connection(asyncio.Protocol):
    """One keep-alive connection: waits for a whole request, answers it, looks for the next."""

    def __init__(self, replica: Replica, loop: asyncio.AbstractEventLoop) -> None:
        self._replica = replica
        self._loop = loop
        self._transport: asyncio.Transport
        self._buffer = b""
        self._timer: asyncio.TimerHandle | None = None
        self._streaming = False
        self._chunks_left = 0
        self._due_s = 0.0
        self._interval_s = 0.0
        self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport without inheriting from it.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._timer is not None:
            self._timer.cancel()
        if self._streaming:
            self._streaming = False
            self._replica.running -= 1

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        if len(self._buffer) > REQUEST_BYTES_MAX:
            self._transport.abort()
        elif not self._streaming:
            self._next_request()

    def _next_request(self) -> None:
        while self._buffer and not self._streaming:
            head_end = self._buffer.find(b"\r\n\r\n") + 4
            if head_end < 4:
                return
            head = self._buffer[:head_end]
            end = head_end + _content_length(head)
            if len(self._buffer) < end:
                return
            body, self._buffer = self._buffer[head_end:end], self._buffer[end:]
            method, path, _ = head.split(b" ", 2)
            self._answer(method, path.partition(b"?")[0], body)

    def _answer(self, method: bytes, path: bytes, body: bytes) -> None:
        if method == b"POST" and path == b"/v1/chat/completions":
            self._chat(body)
        elif method == b"GET" and path in (b"/metrics", b"/metrics/"):
            self._transport.write(self._replica.metrics())
        elif method == b"GET" and path == b"/v1/models":
            self._transport.write(MODELS)
        elif method == b"GET" and path == b"/health":
            self._transport.write(HEALTH)
        else:
            self._transport.write(NOT_FOUND)

    def _chat(self, body: bytes) -> None:
        try:
            ask = orjson.loads(body)
            if not ask.get("stream"):
                self._transport.write(ANSWER)
                return
            chunks, interval_us = int(ask["max_tokens"]), int(ask["seed"])
            with_usage = bool((ask.get("stream_options") or {}).get("include_usage"))
        except (ValueError, TypeError, KeyError, AttributeError):
            chunks, interval_us, with_usage = -1, -1, False
        if not 1 <= chunks <= CHUNKS_MAX or interval_us < 0:
            self._transport.write(rendered(b"400 Bad Request", JSON, BAD_REQUEST))
            return
        self._end = (usage_event(chunks) if with_usage else b"") + STREAM_END
        self._chunks_left = chunks
        self._interval_s = interval_us / 1e6
        self._due_s = self._loop.time()
        self._streaming = True
        self._replica.running += 1
        self._send_chunk(STREAM_HEAD)

    def _tick(self) -> None:
        self._send_chunk(b"")

    def _send_chunk(self, head: bytes) -> None:
        self._chunks_left -= 1
        if self._chunks_left:
            before, after = CONTENT
            self._transport.write(head + before + STAMP % time.monotonic_ns() + after)
            # Due times are multiples from the start, so a late chunk does not slow the rest of its stream.
            self._due_s += self._interval_s
            self._timer = self._loop.call_at(self._due_s, self._tick)
            return
        before, after = LAST_CONTENT
        self._transport.write(head + before + STAMP % time.monotonic_ns() + after + self._end)
        self._streaming = False
        self._replica.running -= 1
        self._next_request()


def _content_length(head: bytes) -> int:
    head = head.lower()
    at = head.find(b"\r\ncontent-length:")
    return int(head[at + 17 : head.find(b"\r\n", at + 17)]) if at >= 0 else 0


async def serve(ports: list[int], lifetime_s: float, announce: Callable[[str], None]) -> None:
    """Serves one replica per port (0: any free one) until SIGTERM, SIGINT or the end of `lifetime_s`."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.call_later(lifetime_s, stop.set)
    for port in ports:
        server = await loop.create_server(partial(Connection, Replica(), loop), "127.0.0.1", port, backlog=2048)
        announce(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    gc.freeze()
    gc.set_threshold(50_000, 50, 50)
    await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mock_backend", description="Mock vLLM servers.")
    parser.add_argument("--port", type=int, action="append", help="port on 127.0.0.1, repeatable; 0 is any free one")
    parser.add_argument("--lifetime-s", type=float, default=3600.0, help="end by itself after so long (3600)")
    options = parser.parse_args()
    try:
        uvloop.run(serve(options.port or [0, 0], options.lifetime_s, lambda url: print(url, flush=True)))
    except OSError as error:
        sys.exit(f"the mock backend cannot listen on {options.port}: {error}; choose other ports")


if __name__ == "__main__":
    main()
