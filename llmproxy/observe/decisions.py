"""The decision log: a line of JSON for each scheduled request, written when the request has ended.

The lines have the format of the laboratory's traces, with the decision and its reasons, so that the log can be replayed
under another policy. Times are seconds since the log was opened, at `wall_time` of the header line. No line has a
prompt, an answer or a key. `output_tokens` is missing if the length of the answer is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import blake2b
from io import FileIO
from pathlib import Path

import orjson
import structlog

from llmproxy.observe.exit import RequestExit
from llmproxy.observe.exit_fields import decision_fields
from llmproxy.observe.writer import LineWriter

VERSION = 1
LINES_MAX = 8_192  # The maximum number of lines that wait for the disk. Further lines are dropped and counted.

_log = structlog.get_logger()


def open_to_append(path: Path) -> FileIO:
    """Opens a file for appending. Raises OSError, also if the path is no regular file."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
    # Readable too: the last byte shows whether the last line is complete.
    return FileIO(path, "ab+")


class DecisionLog(LineWriter[RequestExit]):
    """Writes the decision log to a file, on a thread.

    `sample` is the share of requests to write. A hash of the request id decides, so that several logs have the same
    requests. Times count from `origin_s`, on the clock of the exit records. `on_lost` is called with the number of lost
    lines, on any thread. Raises OSError if the header cannot be written. A later failure is logged once and loses only
    its lines.
    """

    def __init__(self, file: FileIO, sample: float, origin_s: float, on_lost: Callable[[int], None]) -> None:
        super().__init__("decision log", file, LINES_MAX)
        self._sample_below = sample * 2**64
        self._origin_s = origin_s
        self._on_lost = on_lost
        header = b"\n" if _ends_in_mid_line(file) else b""
        header += orjson.dumps({"llmproxy_decisions": VERSION, "wall_time": datetime.now(UTC).isoformat()}) + b"\n"
        try:
            self._write(header)
        except OSError:
            file.close()
            raise
        self.start()

    def record(self, ended: RequestExit) -> None:
        """Queues the line of a request, if the request was scheduled and is in the sample. Never waits."""
        if ended.expected_prompt_tokens is not None and self._sampled(ended.request_id):
            self.put(ended)

    def _sampled(self, request_id: str) -> bool:
        digest = blake2b(request_id.encode("utf-8", "replace"), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._sample_below

    def _lose(self, lines: int) -> None:
        super()._lose(lines)
        self._on_lost(lines)

    def _encoded(self, line: RequestExit) -> bytes:
        fields = decision_fields(line, self._origin_s)
        try:
            return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError:
            # The name of the flow came from a header that is not UTF-8.
            return json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace") + b"\n"

    def _failed(self, error: OSError) -> None:
        _log.error("decision_log_failed", error=str(error))

    def _resumed(self, lost: int) -> None:
        _log.info("decision_log_resumed", lost=lost)


def _ends_in_mid_line(file: FileIO) -> bool:
    """Returns whether the last line of the file is incomplete, as after a full disk."""
    if not file.seek(0, 2):
        return False
    file.seek(-1, 2)
    return file.read(1) != b"\n"
