"""Standard error by a thread: a reader that stalls or is gone costs lines, which are counted, and never any time."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import pytest
import structlog

from llmproxy.observe import logs
from tests.exits import changed
from tests.observe.test_logs import SERVED

PIPE_BYTES = 65_536


class Piped:
    """This process with a pipe for its standard error, written by a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads, writes = os.pipe()
        self.end = os.fdopen(writes, "w")
        monkeypatch.setattr(sys, "stderr", self.end)
        monkeypatch.setattr(logs, "_standard_error", None)
        monkeypatch.setattr(logs.atexit, "register", lambda *_: None)  # type: ignore[attr-defined]
        logs.write_by_thread()
        logs.configure("json", "info")
        assert logs._standard_error is not None
        self.writer = logs._standard_error

    def ended(self, seen: bytes = b"") -> list[dict[str, Any]]:
        """All lines after `seen`, read to the end after the process has ended."""
        pieces = [seen]
        reader = Thread(target=self._read_to_end, args=(pieces,))
        reader.start()
        self.writer.close(30.0)
        self.end.close()
        reader.join(30.0)
        return [json.loads(line) for line in b"".join(pieces).splitlines()]

    def _read_to_end(self, pieces: list[bytes]) -> None:
        while piece := os.read(self.reads, PIPE_BYTES):
            pieces.append(piece)
        os.close(self.reads)


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Piped]:
    return lambda: Piped(monkeypatch)


def lines_lost_in(text: bytes) -> int:
    """How many lines are said to be lost, in the whole lines of this text."""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
    return sum(line["lines"] for line in lines if line["event"] == "log_lines_lost")


def say(lines: int) -> None:
    for number in range(lines):
        logs.log_exit(changed(SERVED, attempts=number))


def test_a_stalled_reader_costs_lines_that_are_counted(
    piped: Callable[[], Piped], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "BYTES_MAX", 20_000)
    pipe = piped()
    say(1_000)
    lost = logs.take_lines_lost()
    assert logs.take_lines_lost() == 0
    written = pipe.ended()
    # Before the pipe was full, the burst alone may have been too much for so small a buffer.
    assert sum(line["lines"] for line in written if line["event"] == "log_lines_lost") == lost
    numbers = [line["attempts"] for line in written if line["event"] == "request"]
    assert numbers == sorted(numbers)
    assert len(numbers) == 1_000 - lost
    assert lost > 500, "so much more than the pipe and the buffer can hold"


def test_lines_that_come_when_the_reader_reads_again_are_written(
    piped: Callable[[], Piped], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "BYTES_MAX", 20_000)
    pipe = piped()
    say(1_000)
    lost = logs.take_lines_lost()
    seen = b""
    while lines_lost_in(seen) < lost:
        seen += os.read(pipe.reads, PIPE_BYTES)
    structlog.get_logger().warning("draining")
    rest = pipe.ended(seen)
    assert rest[-1]["event"] == "draining"
    assert logs.take_lines_lost() == 0


def test_everything_that_is_said_goes_the_same_way_in_its_order(piped: Callable[[], Piped]) -> None:
    pipe = piped()
    logging.getLogger("some.library").warning("of a library")
    print('{"event": "printed"}', file=sys.stderr)
    say(1)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(json.dumps({"event": str(message)}), file=sys.stderr)
        warnings.simplefilter("always")
        warnings.warn("warned", stacklevel=1)
    assert [line["event"] for line in pipe.ended()] == ["of a library", "printed", "request", "warned"]


def test_a_reader_that_is_gone_costs_every_line_and_nothing_else(piped: Callable[[], Piped]) -> None:
    pipe = piped()
    os.close(pipe.reads)
    say(300)
    pipe.writer.close(30.0)
    pipe.end.close()
    assert logs.take_lines_lost() == 300


def test_a_non_blocking_descriptor_is_waited_for(piped: Callable[[], Piped]) -> None:
    pipe = piped()
    os.set_blocking(pipe.writer.fd, False)
    say(500)
    assert [line["attempts"] for line in pipe.ended()] == list(range(500))


def test_several_processes_that_share_a_pipe_tear_no_line() -> None:
    sizes: list[int] = []
    entered, free = Event(), Event()

    class Slow(logs._StandardError):
        def _write(self, data: bytes) -> None:
            sizes.append(len(data))
            assert data.endswith(b"\n")
            entered.set()
            free.wait(30.0)

    reads, writes = os.pipe()
    writer = Slow(writes)
    writer.start()
    writer.put(b"first\n", 6)
    assert entered.wait(30.0)
    for _ in range(100):
        writer.put(b"x" * 999 + b"\n", 1_000)
    writer.put(b"y" * 10_000 + b"\n", 10_001)
    free.set()
    writer.close(30.0)
    os.close(reads)
    os.close(writes)
    # A write does not exceed PIPE_BUF, except for a single line that is longer.
    assert sizes == [6] + [4_000] * 25 + [10_001]


CRASH = """
import sys
from llmproxy.observe import logs
from tests.exits import changed
logs.write_by_thread()
logs.configure("text", "info")
logs._log.info("last_line")
raise ValueError("broken")
"""


def test_the_last_words_of_a_process_come_out() -> None:
    ended = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "last_line" in ended.stderr.splitlines()[0]
    assert ended.stderr.splitlines()[-1] == "ValueError: broken"


@pytest.mark.slow
def test_a_process_ends_although_its_log_is_not_read() -> None:
    reads, writes = os.pipe()
    os.write(writes, b"x" * PIPE_BYTES)
    ended = subprocess.run([sys.executable, "-c", CRASH], stderr=writes, timeout=60, check=False)
    os.close(writes)
    os.close(reads)
    assert ended.returncode == 1
