"""The results file in OpenAI's format.

If the process is killed at any moment, no written result is lost, and no result is written twice.
"""

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
    """The answer of the server to one request. `body` is JSON without line breaks."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct):
    """The reason why a request got no usable answer."""

    code: str
    message: str


class Result(msgspec.Struct):
    """A line of a results file: the response to a request, or the reason of its failure."""

    custom_id: str
    response: Response | None
    error: Failure | None = None
    id: str = msgspec.field(default_factory=lambda: f"batch_req_{uuid4().hex}")

    @property
    def failed(self) -> bool:
        return self.error is not None or self.response is None or self.response.status_code >= 400


_RESULT = msgspec.json.Decoder(Result)
BEGIN = b'{"custom_id":'  # The bytes with which each line of a results file begins.


class ResultFile:
    """A results file that is locked for this process. Whole lines are appended."""

    def __init__(self, path: Path) -> None:
        """Opens and locks the file.

        Raises BatchError if the file cannot be written, or another process has locked it.
        """
        self.path = path
        self._unsynced = False
        self.broken = ""
        """Why results could not be written; "" if all were."""
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
        """Yields the results of earlier runs, and then cuts an incomplete last line off.

        Raises BatchError for any other line that is broken.
        """
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
        """Writes the whole line of a result, or nothing. Raises BatchError."""
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
        """Waits until the written lines are on the disk. Raises BatchError."""
        if self._unsynced:
            self._unsynced = False
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise self._broken(error) from None

    def close(self) -> None:
        os.close(self._fd)

    def _broken(self, error: OSError) -> BatchError:
        self.broken = f"cannot write {self.path}: {error.strerror or error}"
        return BatchError(self.broken)
