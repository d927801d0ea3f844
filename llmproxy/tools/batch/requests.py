"""Reads batch files in OpenAI's format: JSON lines with `custom_id`, `method`, `url` and `body`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from llmproxy.tools.terminal import printable

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
PROBLEMS_MAX = 20  # The check of a file ends after this many problems.
LINE_BYTES_MAX = 64 << 20  # The maximum length of a line. A longer line would be a file without line breaks.


class BatchError(Exception):
    """The batch cannot continue. `problems` are the reasons."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class BatchRequest(msgspec.Struct, frozen=True):
    """A line of a batch file. `body` has the bytes of the file unchanged."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    model: str | None = None
    stream: object = None


_REQUEST = msgspec.json.Decoder(BatchRequest)
_BODY = msgspec.json.Decoder(_Body)


class RequestFile:
    """A batch file, whose lines are all checked.

    It keeps the position of each request in the file, and not the bodies.
    """

    def __init__(self, path: Path) -> None:
        """Checks the file. Raises BatchError with up to PROBLEMS_MAX problems."""
        self.path = path
        self.positions: dict[str, int] = {}
        """Maps each custom_id to the byte position of its line, in the order of the file."""
        self.models: set[str] = set()
        try:
            self._file = path.open("rb")
            if not self._file.seekable():
                self.close()
                raise BatchError(f"{path} is no regular file; a batch is read twice, so write it to a file")
            problems = self._problems()
        except OSError as error:
            raise BatchError(f"cannot read {path}: {error.strerror or error}") from None
        if problems:
            self.close()
            raise BatchError(*problems)

    def _problems(self) -> list[str]:
        problems, lines = list[str](), dict[str, int]()
        for number, position, line in _lines(self._file):
            try:
                request, model = _checked(line)
            except ValueError as error:
                problems.append(f"{self.path}, line {number}: {error}")
            else:
                before = lines.setdefault(request.custom_id, number)
                if before != number:
                    name = printable(request.custom_id)
                    problems.append(f"{self.path}, line {number}: line {before} has the custom_id {name} too")
                self.positions[request.custom_id] = position
                self.models |= {model} if model else set()
            if len(problems) == PROBLEMS_MAX:
                return [*problems, f"{self.path}: the lines below were not checked"]
        if not lines and not problems:
            problems.append(f"{self.path} has no requests")
        return problems

    def request(self, custom_id: str) -> BatchRequest:
        """Reads the request again. Raises BatchError if the file was changed after its check."""
        self._file.seek(self.positions[custom_id])
        with suppress(ValueError):
            request, _ = _checked(self._file.readline())
            if request.custom_id == custom_id:
                return request
        raise BatchError(f"{self.path} was changed while it was sent; run the command again")

    def close(self) -> None:
        self._file.close()


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yields the number, the byte position and the bytes of each line that is not blank."""
    position = 0
    for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX + 1), b""), 1):
        if line.strip():
            yield number, position, line
        if len(line) > LINE_BYTES_MAX:
            return
        position += len(line)


def _checked(line: bytes) -> tuple[BatchRequest, str | None]:
    """Returns the request of a line, and its model, None if it names none.

    Raises ValueError with the problem of the line.
    """
    if len(line) > LINE_BYTES_MAX:
        raise ValueError(f"is longer than {LINE_BYTES_MAX >> 20} MB")
    try:
        request = _REQUEST.decode(line)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        raise ValueError(f"is no JSON: {error}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if request.method != "POST":
        raise ValueError(f"the method is {printable(request.method)}, and should be POST")
    if request.url not in ENDPOINTS:
        raise ValueError(f"the url {printable(request.url)} is none of {', '.join(ENDPOINTS)}")
    body = _BODY.decode(request.body)
    if body.stream:
        raise ValueError("`stream` should be false in a batch")
    return request, body.model
