"""The results file in OpenAI's format. A kill at any moment loses no written answer, and none is written twice."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG
from uuid import uuid4

import msgspec

from llmproxy.tools.batch.requests import BatchError


class Response(msgspec.Struct):
    """The answer of the server. `body` is JSON without line breaks."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct):
    """The reason why a request got no usable answer."""

    code: str
    message: str


class Result(msgspec.Struct):
    """A line of a results file."""

    custom_id: str
    response: Response | None
    error: Failure | None = None
    id: str = msgspec.field(default_factory=lambda: f"batch_req_{uuid4().hex}")

    @property
    def failed(self) -> bool:
        return self.error is not None or self.response is None or self.response.status_code >= 400


_RESULT = msgspec.json.Decoder(Result)
BEGIN = b'{"custom_id":'
"""The beginning of each line."""


class ResultFile:
    """A locked results file, to which whole lines are appended."""

    def __init__(self, path: Path) -> None:
        """Raises BatchError if the file cannot be written, or another process writes it."""
        self.path = path
        self._unsynced = False
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise self._broken(error) from None
        if not S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise BatchError(f"cannot write {path}: it is no regular file")
        try:
            # The kernel ends the lock with the process, however it ends.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise BatchError(
                f"another process writes {path}; wait for its end, or name another file with --out"
            ) from None

    def results(self) -> Iterator[Result]:
        """Yields the results of earlier runs, and cuts a torn last line. Raises BatchError for another broken line."""
        whole_bytes = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                # Only the beginning of a result is cut, because the user may have named another file. A crash of the
                # machine may leave zeros.
                begun = line.rstrip(b"\0")[: len(BEGIN)]
                if not line.endswith(b"\n") and begun == BEGIN[: len(begun)]:
                    break
                try:
                    result = _RESULT.decode(line)
                except (ValueError, RecursionError) as error:
                    raise BatchError(f"{self.path}, line {number}: {error}; choose another --out") from None
                whole_bytes += len(line)
                yield result
        os.ftruncate(self._fd, whole_bytes)

    def append(self, result: Result) -> None:
        """Writes a result, or nothing of it. Raises BatchError."""
        line = msgspec.json.encode(result) + b"\n"
        before = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, line) < len(line):
                raise OSError("the disk took only a part of a line")
        except OSError as error:
            os.ftruncate(self._fd, before)
            raise self._broken(error) from None
        self._unsynced = True

    def sync(self) -> None:
        """Brings the written lines to the disk. Raises BatchError."""
        if self._unsynced:
            self._unsynced = False
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise self._broken(error) from None

    def close(self) -> None:
        os.close(self._fd)

    def _broken(self, error: OSError) -> BatchError:
        return BatchError(f"cannot write {self.path}: {error.strerror or error}")
