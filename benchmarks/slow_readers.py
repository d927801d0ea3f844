"""Clients that stop reading large answers: does the proxy's memory stay bounded, and do the others notice?

A backend offers every stream 50 MB as fast as it is taken; 200 clients read the first bytes of theirs and then nothing
more. Meanwhile, and in windows without them, other clients read short streams of a mock backend through the same proxy.
Proxy, backends and the other clients are processes of their own. Run `python -m benchmarks.slow_readers`; it takes
about a minute. It exits with 1 when the proxy grew by more than RSS_BYTES_MAX for each reader that does not read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvloop

from benchmarks import proxy
from benchmarks.fleet import free_port
from benchmarks.peers.cases import Case
from benchmarks.peers.measure import CHAT_PATH, READY_BODY, Bench, Running, Spread, Window

CHUNK_BYTES = 4096
RSS_BYTES_MAX = 1 << 20
"""What one reader that does not read may cost: the buffers of both legs, and the answer kept for the prefix index."""
PEAK_EVERY_S = 0.05
STILL_S = 1.0
"""A window begins once the backend could send nothing more for so long: all buffers on the way are full then, and what
it took to fill them, at the speed of loopback, is over."""


OTHERS = Case(name="others", title="30 streams of 100 chunks, 10 ms apart", clients=30, chunks=100, gap_us=10_000)


# --- the backend with large answers, a process of its own -------------------------------------------------------------


def framed(event: bytes) -> bytes:
    """One server-sent event as one HTTP chunk, as vLLM frames them."""
    data = b"data: " + event + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def rendered(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


CHUNK = framed(b'{"id":"c","choices":[{"index":0,"delta":{"content":"%b"}}]}' % (b"x" * CHUNK_BYTES))
MODELS = (
    b'{"object":"list","data":[{"id":"flood","object":"model","root":"flood","parent":null,"max_model_len":131072}]}'
)


class Flood:
    """Streams of `stream_bytes` each, sent as fast as they are taken; `/sent` shows what was taken."""

    def __init__(self, stream_bytes: int) -> None:
        self._stream_bytes = stream_bytes
        self._sent: list[int] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b" ", 2)
                if method == b"POST":
                    length = head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]
                    await reader.readexactly(int(length))
                    await self._stream(writer)
                else:
                    writer.write(self._page(path))
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        at = len(self._sent)
        self._sent.append(0)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        while self._sent[at] < self._stream_bytes:
            writer.write(CHUNK)
            self._sent[at] += len(CHUNK)
            await writer.drain()
        writer.write(framed(b"[DONE]") + b"0\r\n\r\n")

    def _page(self, path: bytes) -> bytes:
        if path == b"/v1/models":
            return rendered(b"200 OK", MODELS)
        if path == b"/health":
            return rendered(b"200 OK", b"")
        if path == b"/sent":
            return rendered(b"200 OK", json.dumps(self._sent).encode())
        return rendered(b"404 Not Found", b"{}")


async def flood(stream_bytes: int) -> None:
    server = await asyncio.start_server(Flood(stream_bytes).serve, "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


# --- the clients that do not read -------------------------------------------------------------------------------------


class SlowReaders:
    """Connections that asked for a stream, read its first bytes and then nothing more."""

    def __init__(self, port: int, count: int) -> None:
        self._port = port
        self._count = count
        body = b'{"model":"flood","stream":true,"messages":[{"role":"user","content":"Tell me all"}]}'
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        self._request = head.encode() + b"%d\r\n\r\n%b" % (len(body), body)
        self._writers: list[asyncio.StreamWriter] = []

    async def come(self) -> None:
        self._writers = await asyncio.gather(*(self._one() for _ in range(self._count)))

    async def _one(self) -> asyncio.StreamWriter:
        # With this limit nothing is read ahead beyond some kilobytes.
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=4096)
        writer.write(self._request)
        first = await reader.readuntil(b"\r\n\r\n")
        if not first.startswith(b"HTTP/1.1 200 "):
            raise proxy.BenchError(f"a slow reader was not served: {first!r}")
        return writer

    def go(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers = []


@contextmanager
def peak_of(served: Running) -> Iterator[list[int]]:
    """The largest resident memory of a proxy within the block, in bytes, as the one entry of a list."""
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(PEAK_EVERY_S):
            peak[0] = max(peak[0], proxy.rss_bytes(served.pids()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


# --- the measurement --------------------------------------------------------------------------------------------------


async def measure(bench: Bench, served: Running, flood_url: str, options: argparse.Namespace) -> bool:
    """Alternate windows with and without slow readers. True when the proxy's memory stayed within its bound."""
    readers = SlowReaders(served.port, options.readers)
    results: dict[bool, list[Window]] = {False: [], True: []}
    grown: list[float] = []
    taken: list[int] = []
    for _ in range(options.rounds):
        results[False].append(await asyncio.to_thread(bench.measure, OTHERS, served, options.seconds))
        before = proxy.rss_bytes(served.pids())
        with peak_of(served) as peak:
            await readers.come()
            taken = await until_still(flood_url, options.readers)
            results[True].append(await asyncio.to_thread(bench.measure, OTHERS, served, options.seconds))
        readers.go()
        await asyncio.sleep(1.0)
        grown.append((peak[0] - before) / options.readers)
        after = proxy.rss_bytes(served.pids())
        print(f"RSS before {before / 1e6:.1f} MB, peak with {options.readers} slow readers {peak[0] / 1e6:.1f} MB "
              f"({grown[-1] / 1e3:.0f} kB each), after they left {after / 1e6:.1f} MB", flush=True)  # fmt: skip
    print(f"the backend could send {statistics.mean(taken) / 1e6:.1f} MB of each {options.megabytes} MB "
          f"({max(taken) / 1e6:.1f} at most): it was stopped\n")  # fmt: skip
    print("| slow readers | TTFT p50 / p99 ms | transit p50 / p99 ms | proxy CPU | failures |\n" + "| --- " * 5 + "|")
    for slow, name in ((False, "none"), (True, str(options.readers))):
        runs = results[slow]
        cpu = statistics.mean((run.cpu_s or 0.0) / run.window_s for run in runs)
        ttft, transit = percentiles([run.ttft for run in runs]), percentiles([run.transit for run in runs])
        print(f"| {name} | {ttft} | {transit} | {cpu:.0%} "
              f"| {sum(sum(run.failures.values()) for run in runs)} |")  # fmt: skip
    return max(grown) < RSS_BYTES_MAX and max(taken) < options.megabytes * 1_000_000


async def until_still(flood_url: str, readers: int) -> list[int]:
    """Wait until the backend cannot send any more; the bytes that it could send of each of the last streams."""
    before: list[int] = []
    while True:
        sent = await asyncio.to_thread(_sent_of, flood_url)
        if sent == before and len(sent) % readers == 0:
            return sent[-readers:]
        before = sent
        await asyncio.sleep(STILL_S)


def _sent_of(flood_url: str) -> list[int]:
    with urllib.request.urlopen(flood_url + "/sent") as page:
        sent: list[int] = json.load(page)
        return sent


def percentiles(spreads: Sequence[Spread | None]) -> str:
    """The median over the windows of both percentiles."""
    known = [spread for spread in spreads if spread is not None]
    p50, p99 = (statistics.median(values) / 1e3 for values in zip(*((s.p50_us, s.p99_us) for s in known), strict=True))
    return f"{p50:.2f} / {p99:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=50, help="what each stream offers")
    parser.add_argument("--rounds", type=int, default=3, help="windows without and with slow readers")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a window")
    parser.add_argument("--flood", action="store_true", help="be the backend, as a child of this benchmark")
    options = parser.parse_args()
    if options.flood:
        uvloop.run(flood(options.megabytes * 1_000_000))
        return 0
    proxy.raise_open_files_limit()
    everywhere = proxy.Cores(None, frozenset(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmproxy-slow-")))
        bench = Bench(folder, everywhere, replicas=1)
        stack.callback(bench.stop)

        def started(argv: list[str], name: str, piped: bool) -> proxy.Child:
            child = proxy.Child([sys.executable, "-m", *argv], everywhere.harness, folder / name, piped=piped)
            stack.callback(child.stop)
            return child

        large = started(
            ["benchmarks.slow_readers", "--flood", "--megabytes", str(options.megabytes)], "flood.log", True
        ).line()
        port = free_port()
        argv = proxy.llmproxy_argv(port, [*bench.backends, large], folder / "config.yaml")
        serving = started(argv[2:], "proxy.log", False)
        proxy.wait_ready(f"http://127.0.0.1:{port}", CHAT_PATH, READY_BODY, serving)
        fine = asyncio.run(measure(bench, Running("llmproxy", port, serving), large, options))
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
