"""Writes lines to a file or pipe on a thread, so that a slow disk or reader never blocks the event loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from io import FileIO
from queue import SimpleQueue
from select import PIPE_BUF, POLLOUT, poll
from threading import Event, RLock, Thread
from typing import Generic, TypeVar

WRITE_BYTES = PIPE_BUF
"""The maximum bytes of a write of several lines. The kernel does not mix such writes of several processes to a pipe."""
LINGER_S = 0.02
"""How long the thread gathers lines between two writes. The first line after a pause is written at once."""
CLOSE_S = 5.0  # How long closing may wait for the disk.

Line = TypeVar("Line")


class LineWriter(ABC, Generic[Line]):
    """Writes lines in order on a thread, which `start` starts.

    If the waiting lines would exceed a total size of `size_max`, the new line is dropped and counted, and so are lines
    that the file refuses. A blocking file descriptor stays blocking, because other processes may share the open file.
    """

    def __init__(self, name: str, file: FileIO, size_max: int) -> None:
        self._file = file
        self._size_max = size_max
        self._begin = b""
        self._waiting: list[Line] = []
        self._size = 0
        self._lost = 0
        self._unreported = 0
        self._failing = False
        # A finalizer may log while its thread holds the lock, so the lock must be reentrant.
        self._lock = RLock()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._closing = Event()
        self._thread = Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _encoded(self, line: Line) -> bytes:
        """Returns the bytes of a line, with its line end."""

    @abstractmethod
    def _failed(self, error: OSError) -> None:
        """Reports a failed write; called on the thread. A failure that directly follows a failure is not reported."""

    @abstractmethod
    def _resumed(self, lost: int) -> None:
        """Reports that lines are written again after `lost` lines were dropped; called on the thread."""

    def start(self) -> None:
        self._thread.start()

    def put(self, line: Line, size: int = 1) -> None:
        """Queues a line that counts `size` toward `size_max`. Never waits. May be called from any thread."""
        with self._lock:
            if self._size + size > self._size_max:
                self._lose(1)
                return
            first = not self._waiting
            self._waiting.append(line)
            self._size += size
        if first:
            self._wake.put(None)

    def take_lost(self) -> int:
        """Returns the number of lines that were dropped since the last call."""
        with self._lock:
            lost, self._lost = self._lost, 0
        return lost

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Writes the waiting lines and closes the file.

        Returns after at most `timeout_s`, even if that is not finished.
        """
        self._closing.set()
        self._wake.put(None)
        self._thread.join(timeout_s)

    def _lose(self, lines: int) -> None:
        with self._lock:
            self._lost += lines
            self._unreported += lines

    # --- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wake.get()
            # Read before the flush, so that the flush has all lines from before `close`.
            closing = self._closing.is_set()
            self._flush()
            while (self._unreported and not self._failing) or (closing and self._waiting):
                self._flush()
            self._closing.wait(LINGER_S)
        self._file.close()

    def _flush(self) -> None:
        with self._lock:
            lines, self._waiting, self._size = self._waiting, [], 0
            unreported = 0 if self._failing else self._unreported
            self._unreported -= unreported
        if unreported:
            # The queue is empty now, so the report of the loss fits. It follows all lines from before the loss.
            self._resumed(unreported)
        data, count = b"", 0
        for line in lines:
            encoded = self._encoded(line)
            if count and len(data) + len(encoded) > WRITE_BYTES:
                self._try(data, count)
                data, count = b"", 0
            data += encoded
            count += 1
        if count:
            self._try(data, count)

    def _try(self, data: bytes, lines: int) -> None:
        try:
            self._write(data)
        except OSError as error:
            self._lose(lines)
            if not self._failing:
                self._failing = True
                self._failed(error)
        else:
            self._failing = False

    def _write(self, data: bytes) -> None:
        view = memoryview(self._begin + data)
        while view:
            taken = self._file.write(view)
            if taken is None:
                # Another process that shares the open file made it non-blocking, as some do with a terminal.
                ready = poll()
                ready.register(self._file, POLLOUT)
                ready.poll()
                continue
            # Some bytes are out: after a failure from here on, the next write must begin with a newline.
            self._begin = b"\n"
            view = view[taken:]
        self._begin = b""
