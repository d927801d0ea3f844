"""The longest iteration of the event loop while thousands of clients open streams at once, and leave at once.

    python -m benchmarks.crowd

`llmproxy serve` runs with its defaults and a timer in its event loop. The delay of the timer is the length of an
iteration of the loop. *CPU* is the CPU time of the loop's thread in an iteration, which other processes do not change.
Each round opens all streams, keeps them for HELD_S, and closes the connections of all clients: with FIN in one round,
and with RST in the next. *Done* is the time until every client has its first event, or until the proxy has no request.
The benchmark needs Linux and uses only loopback addresses.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import selectors
import socket
import struct
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import proxy
from benchmarks.fleet import free_port
from benchmarks.peers.measure import CHAT_PATH, READY_BODY, built
from benchmarks.proxy import BenchError, Child, Cores
from benchmarks.table import Table

TICK_S = 0.001
FIGURES = struct.Struct("dd")
"""The longest iteration and the most CPU time of an iteration since the file was cleared, in seconds."""
CHUNKS, GAP_US = 1000, 5_000_000
MESSAGE = {"role": "user", "content": "Tell me a story. " * 40}
BODY = json.dumps(
    {"model": "mock", "stream": True, "max_tokens": CHUNKS, "seed": GAP_US, "messages": [MESSAGE]}
).encode()
REQUEST = b"POST %b HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    CHAT_PATH.encode(), len(BODY), BODY,
)  # fmt: skip
EVENT = b"data: "
OPEN = ("llmproxy_in_flight_requests{", "llmproxy_queued_requests{")
HELD_S = 3.0  # How long all streams stay open in a round.
LIMIT_S = 120.0  # The longest wait until every client has its first event.
RESET = struct.pack("ii", 1, 0)  # The value of SO_LINGER with which a socket is closed with RST.


# --- in the process of the proxy --------------------------------------------------------------------------------------


class TimedLoop(uvloop.Loop):
    """The event loop of production, with a timer that writes its delays to `figures`."""

    figures: mmap.mmap

    def run_forever(self) -> None:
        self.call_later(TICK_S, self._tick, self.time() + TICK_S, time.thread_time())
        super().run_forever()

    def _tick(self, due_s: float, cpu_s: float) -> None:
        now, cpu_now = self.time(), time.thread_time()
        longest_s, most_s = FIGURES.unpack(self.figures[: FIGURES.size])
        worst = FIGURES.pack(max(longest_s, now - due_s), max(most_s, cpu_now - cpu_s))
        self.figures[: FIGURES.size] = worst
        self.call_later(TICK_S, self._tick, now + TICK_S, cpu_now)


def serve(file: str, argv: list[str]) -> None:
    """Runs the command line `argv` of llmproxy on a `TimedLoop`, which writes to `file`."""
    with Path(file).open("r+b") as opened:
        TimedLoop.figures = mmap.mmap(opened.fileno(), FIGURES.size)
    uvloop.new_event_loop = TimedLoop
    sys.argv = ["llmproxy", *argv]
    from llmproxy.cli import main as command

    command()


# --- in the process of the clients ------------------------------------------------------------------------------------


class Turns:
    """The figures that the proxy's event loop writes to a file."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(FIGURES.size))
        with file.open("r+b") as opened:
            self._shared = mmap.mmap(opened.fileno(), FIGURES.size)

    def take(self) -> tuple[float, float]:
        """Returns the longest iteration and the most CPU time of an iteration since the last call, in ms."""
        longest_s, most_s = FIGURES.unpack(self._shared[: FIGURES.size])
        self._shared[: FIGURES.size] = bytes(FIGURES.size)
        return longest_s * 1e3, most_s * 1e3


class Crowd:
    """Many clients that act at the same time, on non-blocking sockets."""

    def __init__(self, port: int, count: int) -> None:
        self._address = "127.0.0.1", port
        self._count = count
        self._ready = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []

    def open(self) -> None:
        """Opens all streams, and returns when every client has an event.

        Raises BenchError if a client gets none in LIMIT_S.
        """
        waiting: dict[socket.socket, bytes] = {}
        for _ in range(self._count):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(self._address)
            self._ready.register(one, selectors.EVENT_WRITE)
            waiting[one] = b""
            self._sockets.append(one)
        until_s = time.monotonic() + LIMIT_S
        while waiting:
            if time.monotonic() > until_s:
                raise BenchError(f"{len(waiting)} of {self._count} clients have no event after {LIMIT_S:.0f} s")
            for key, events in self._ready.select(1.0):
                client: Any = key.fileobj
                if events & selectors.EVENT_WRITE:
                    client.send(REQUEST)
                    self._ready.modify(client, selectors.EVENT_READ)
                elif client in waiting:
                    self._read_first(client, waiting)
                else:
                    client.recv(1 << 16)

    def _read_first(self, client: socket.socket, waiting: dict[socket.socket, bytes]) -> None:
        waiting[client] += (piece := client.recv(1 << 16))
        if EVENT in waiting[client]:
            del waiting[client]
        elif not piece or not waiting[client].startswith(b"HTTP/1.1 200"[: len(waiting[client])]):
            raise BenchError(f"a client got {waiting[client][:300]!r}")

    def hold(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for key, _ in self._ready.select(0.1):
                client: Any = key.fileobj
                client.recv(1 << 16)

    def leave(self, *, reset: bool) -> None:
        """Closes all connections at once; `reset`: with RST."""
        for client in self._sockets:
            self._ready.unregister(client)
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        for client in self._sockets:
            client.close()
        self._sockets.clear()


def open_requests(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(OPEN))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tree", type=Path, default=proxy.ROOT, help="the sources of the proxy")
    options = parser.parse_args()
    proxy.raise_open_files_limit()
    cores = Cores.split()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmproxy-crowd-")))
        mock = Child([str(built("mockd")), "4"], cores.harness, folder / "mock.log", piped=True)
        stack.callback(mock.stop)
        backends = [f"http://127.0.0.1:{port}" for port in mock.line().split()]
        file, port = folder / "turns", free_port()
        turns = Turns(file)
        argv = proxy.llmproxy_argv(port, backends, folder / "llmproxy.json")
        argv[1:3] = [str(Path(__file__)), "--serve", str(file)]
        env = {"PYTHONPATH": os.pathsep.join([str(options.tree), str(proxy.ROOT)])}
        own = cores.harness if cores.proxy is None else frozenset([cores.proxy])
        served = Child(argv, own, folder / "proxy.log", env=env)
        stack.callback(served.stop)
        url = f"http://127.0.0.1:{port}"
        proxy.wait_ready(url, CHAT_PATH, READY_BODY, served)
        measure(url, port, turns, options)


def measure(url: str, port: int, turns: Turns, options: argparse.Namespace) -> None:
    table = Table(f"{options.clients:,} clients", "longest turn ms", "CPU ms", "done s")
    crowd = Crowd(port, options.clients)
    turns.take()
    for number in range(options.rounds):
        began_s = time.monotonic()
        crowd.open()
        done_s = time.monotonic() - began_s
        table.row("open", *(f"{ms:.0f}" for ms in turns.take()), f"{done_s:.1f}")
        crowd.hold(HELD_S)
        table.row("stay", *(f"{ms:.0f}" for ms in turns.take()), "")
        began_s = time.monotonic()
        crowd.leave(reset=bool(number % 2))
        while open_requests(url):
            time.sleep(0.2)
        done_s = time.monotonic() - began_s
        kind = "leave with RST" if number % 2 else "leave with FIN"
        table.row(kind, *(f"{ms:.0f}" for ms in turns.take()), f"{done_s:.1f}")
        time.sleep(1.0)
        turns.take()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3:])
    else:
        main()
