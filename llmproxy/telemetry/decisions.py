"""The decision log: one line of JSON for each request that came to the waiting room, written when it has ended.

A line is a line of the laboratory's own trace format and says besides what was decided and why, so that a log can be
replayed against another policy. Its times are seconds since the log was opened, as the header above it says; prompts,
answers and keys are in none of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Any

import orjson
import structlog

from llmproxy.telemetry.exit import RequestExit
from llmproxy.telemetry.exit_line import why_fields
from llmproxy.telemetry.writer import LineWriter

VERSION = 1
LINES_MAX = 8_192
"""Lines that wait for the disk; what comes beyond them is lost, and counted."""

_log = structlog.get_logger()


def appended(path: Path) -> FileIO:
    """The file, open at its end. Raises OSError, also for what is no regular file and might never take a line."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
    # What it ends in is read once.
    return FileIO(path, "ab+")


class DecisionLog(LineWriter[RequestExit]):
    """The lines of one file.

    `origin_s` is the instant from which times are counted, on the clock of the exit records; `on_lost` is told, on any
    thread, how many lines could not be written. A share of `sample` (0..1) of the requests is written, chosen by
    a hash of their ids: a request is in all logs of that share or in none. Raises OSError when the file takes nothing
    to begin with; whatever fails later is told once and costs its lines alone.
    """

    def __init__(self, file: FileIO, sample: float, origin_s: float, on_lost: Callable[[int], None]) -> None:
        super().__init__("decision log", file, LINES_MAX)
        self._sample_below = sample * 2**64
        self._origin_s = origin_s
        self._on_lost = on_lost
        header = b"\n" if _ends_within_a_line(file) else b""
        header += orjson.dumps({"llmproxy_decisions": VERSION, "wall_time": datetime.now(UTC).isoformat()}) + b"\n"
        try:
            self._write(header)
        except OSError:
            file.close()
            raise
        self.start()

    def record(self, ended: RequestExit) -> None:
        """Take one request that has ended; never waits."""
        if ended.expected_prompt_tokens is not None and self._sampled(ended.request_id):
            self.put(ended)

    def _sampled(self, request_id: str) -> bool:
        digest = blake2b(request_id.encode("utf-8", "replace"), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._sample_below

    def _lose(self, lines: int) -> None:
        super()._lose(lines)
        self._on_lost(lines)

    def _encoded(self, line: RequestExit) -> bytes:
        return _encoded(line_of(line, self._origin_s))

    def _failed(self, error: OSError) -> None:
        _log.error("decision_log_failed", error=str(error))

    def _resumed(self, lost: int) -> None:
        _log.info("decision_log_resumed", lost=lost)


def _ends_within_a_line(file: FileIO) -> bool:
    """Whether what was there before was cut short, as by a full disk."""
    if not file.seek(0, 2):
        return False
    file.seek(-1, 2)
    return file.read(1) != b"\n"


def line_of(ended: RequestExit, origin_s: float) -> dict[str, Any]:
    """The line of a request: first the keys of a trace, then what became of it; without what was never known.

    `output_tokens` is missing where it got no answer whose length is known.
    """
    slo, why = ended.slo, ended.why
    line = {
        "at_s": _since(origin_s, ended.arrived_s),
        "prompt_tokens": ended.prompt_tokens or ended.expected_prompt_tokens,
        "output_tokens": ended.output_tokens,
        "tenant": ended.tenant or None,
        "model": ended.model,
        "adapter": ended.adapter,
        "criticality": ended.level,
        "ttl_s": ended.ttl_s,
        "ttft_slo_s": slo.ttft_s if slo is not None else None,
        "tpot_slo_s": slo.tpot_s if slo is not None else None,
        "request_id": ended.request_id,
        "outcome": ended.outcome.value,
        "status": ended.status,
        "backend": ended.backend,
        "band": ended.band,
        "flow": ended.flow,
        "stream": ended.stream,
        "queue_wait_s": _rounded(ended.queue_wait_s),
        "ttft_s": _rounded(ended.ttft_s),
        "tpot_s": _rounded(ended.time_per_output_token_s),
        "met": ended.met,
        "attempts": ended.attempts,
        "withdrawals": ended.preemptions,
        "granted_at_s": _since(origin_s, ended.granted_s),
        "ended_at_s": _since(origin_s, ended.arrived_s, ended.duration_s),
        "queued_ahead": ended.queued_ahead,
        "why": why_fields(why) if why is not None else None,
        "candidates": ended.candidates,
        "placement": {name: _rounded(value) for name, value in ended.terms} or None,
        "predicted": _predicted(ended),
        "cached_tokens": ended.cached_tokens,
    }
    return {name: value for name, value in line.items() if value is not None}


def _predicted(ended: RequestExit) -> dict[str, Any] | None:
    """What the placement expected, without what it does not predict; None where that is everything."""
    ttft, tpot = ended.predicted_ttft, ended.predicted_tpot
    predicted = {
        "cached_tokens": ended.expected_cached_tokens,
        "ttft_s": _rounded(ttft.expected_s) if ttft is not None else None,
        "ttft_p90_s": _rounded(ttft.p90_s) if ttft is not None else None,
        "tpot_s": _rounded(tpot.expected_s) if tpot is not None else None,
        "tpot_p90_s": _rounded(tpot.p90_s) if tpot is not None else None,
    }
    return {name: value for name, value in predicted.items() if value is not None} or None


def _since(origin_s: float, at_s: float | None, later_s: float = 0.0) -> float | None:
    return None if at_s is None else _rounded(at_s + later_s - origin_s)


def _rounded(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s, 6)


def _encoded(line: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        # A header that was no UTF-8 named a flow: rare, and its other bytes still tell it apart.
        return json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
