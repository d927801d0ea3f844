"""Logs: one line per request at its exit, and a line for each change of state worth a person's attention.

Everything goes to standard error, as text for people or as JSON for machines, one event per line. Prompts, answers and
keys are in no event: callers hand over names, numbers and reasons only.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from textwrap import indent
from typing import Any, TextIO, cast

import orjson
import structlog
from structlog.typing import EventDict, WrappedLogger

from llmproxy.core.domain import Outcome, Why
from llmproxy.telemetry.exit import RequestExit

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
FORMATS = ("text", "json")

_COLOURS = {"debug": "\x1b[2m", "info": "\x1b[32m", "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
_RESET = "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# What the proxy itself got wrong, or what broke under a client that had already been served its first byte.
_ALARMING = {Outcome.INTERNAL: "error", Outcome.BROKEN_STREAM: "warning"}

_is_word = re.compile(r"[!#-<>-~]+").fullmatch
_Render = Callable[[WrappedLogger, str, EventDict], str]

_log = structlog.get_logger()


def configure(log_format: str, log_level: str, stream: TextIO | None = None) -> None:
    """Set up logging for the whole process; may be called again, and the last call counts.

    `log_format` is one of FORMATS, `log_level` one of LEVELS. Text is coloured only on a terminal. Raises KeyError for
    an unknown level and ValueError for an unknown format.
    """
    target = stream if stream is not None else sys.stderr
    level = LEVELS[log_level]
    render: _Render
    if log_format == "json":
        render = _json_renderer()
    elif log_format == "text":
        render = _text_renderer(colours=target.isatty())
    else:
        raise ValueError(f"unknown log format {log_format!r}; known: {', '.join(FORMATS)}")
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.format_exc_info, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Stream(target))),
        cache_logger_on_first_use=False,
    )
    _adopt_library_logs()


def log_exit(ended: RequestExit) -> None:
    """Write the one line of a request that has ended: who it was, what was decided, and how it went.

    Where the level is `debug`, it says as well why it was the turn of this request.
    """
    log, level = _log.bind(), _ALARMING.get(ended.outcome, "info")
    if not log.is_enabled_for(LEVELS[level]):
        return
    fields = _fields(ended)
    if ended.why is not None and log.is_enabled_for(LEVELS["debug"]):
        fields["why"] = why_fields(ended.why)
    getattr(log, level)("request", **fields)


def log_internal(request_id: str, error: BaseException) -> None:
    """Write the whole story of a bug of ours that one request met."""
    _log.error("internal", request_id=request_id, exc_info=error)


def _fields(ended: RequestExit) -> dict[str, Any]:
    """The record in reading order, without what was never known; seconds are rounded to 0.1 ms."""
    fields: dict[str, Any] = {
        "outcome": ended.outcome.value,
        "status": ended.status,
        "model": ended.model,
        "target": ended.target if ended.target != ended.model else None,
        "tenant": ended.tenant or None,
        "band": ended.band,
        "flow": ended.flow,
        "backend": ended.backend,
        "attempts": ended.attempts,
        "withdrawals": ended.withdrawals or None,
        "arrived_s": _rounded(ended.arrived_s),
        "granted_s": _rounded(ended.granted_s),
        "queued_ahead": ended.queued_ahead,
        "queue_wait_s": _rounded(ended.queue_wait_s),
        "ttft_s": _rounded(ended.ttft_s),
        "duration_s": _rounded(ended.duration_s),
        "met": ended.met,
        "unknown_objective": ended.unknown_objective,
        "prompt_tokens": ended.prompt_tokens,
        "cached_tokens": ended.cached_tokens,
        "expected_cached_tokens": ended.expected_cached_tokens,
        "output_tokens": ended.output_tokens,
        "stream": ended.stream,
        "chunks": ended.chunks or None,
        "max_gap_s": _rounded(ended.max_gap_s),
        "body_bytes": ended.body_bytes,
        "response_bytes": ended.response_bytes,
        "candidates": ended.candidates,
        "terms": {name: _rounded(value) for name, value in ended.terms} or None,
        "method": ended.method,
        "path": ended.path,
        "request_id": ended.request_id,
        "error": ended.error,
    }
    return {name: value for name, value in fields.items() if value is not None}


def why_fields(why: Why) -> dict[str, Any]:
    """Why it was a request's turn, by the names that logs have for it; bands are integers here."""
    return {
        "waiting": {str(level): waiting for level, waiting in why.waiting},
        "flows": why.flows,
        "standing": {name: _rounded(value) for name, value in why.standing},
        "passed_over": why.passed_over,
        "guaranteed": why.guaranteed,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


class _WallClock:
    """The time of day of a line. What only changes with the second is made once in each."""

    __slots__ = ("_at", "_format", "_local", "_prefix")

    def __init__(self, layout: str, *, local: bool) -> None:
        self._format = layout
        self._local = local
        self._at = 0
        self._prefix = ""

    def now(self) -> tuple[str, float]:
        """The text up to the second, and the fraction of it that is over."""
        now = time.time()  # noqa: TID251 - whoever reads a log wants the time of day
        at = int(now)
        if at != self._at:
            self._at = at
            self._prefix = time.strftime(self._format, time.localtime(at) if self._local else time.gmtime(at))
        return self._prefix, now - at


def _json_renderer() -> _Render:
    clock = _WallClock("%Y-%m-%dT%H:%M:%S", local=False)

    def render(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
        second, fraction = clock.now()
        at = f"{second}.{int(fraction * 1e6):06d}Z"
        told = {"timestamp": at, "level": event.pop("level"), "event": event.pop("event"), **event}
        try:
            return orjson.dumps(told, default=str).decode()
        except TypeError:
            # Bytes of a path that are no UTF-8, or a number beyond 64 bits: rare, and still to be told.
            return json.dumps(told, default=str)

    return render


def _text_renderer(colours: bool) -> _Render:
    clock = _WallClock("%H:%M:%S", local=True)

    def render(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
        second, fraction = clock.now()
        level, name, story = event.pop("level"), str(event.pop("event")), event.pop("exception", None)
        shown = f"{_COLOURS.get(level, '')}{level:<7}{_RESET}" if colours else f"{level:<7}"
        # Names come from clients: nothing in them may begin a line of its own or speak to the terminal.
        parts = [f"{second}.{int(fraction * 1e3):03d}", shown, name if name.isprintable() else json.dumps(name)]
        parts += [f"{key}={_shown(value)}" for key, value in event.items()]
        line = " ".join(parts)
        # Indented, so that no line of a story can pass for an event.
        return f"{line}\n{indent(_CONTROL.sub('?', story), '    ')}" if story else line

    return render


def _shown(value: object) -> str:
    """A value as one printable word."""
    if isinstance(value, str):
        if _is_word(value):
            return value
    elif isinstance(value, int | float):
        return str(value)
    elif isinstance(value, dict):
        return "{" + ",".join([f"{_shown(key)}:{_shown(inner)}" for key, inner in value.items()]) + "}"
    text = str(value)
    plain = text.isprintable() and " " not in text and '"' not in text and "=" not in text
    return text if plain and text else json.dumps(text)


class _Stream:
    """A text stream whose loss is survived: a log nobody can read any more must not fail the requests it tells of."""

    def __init__(self, target: TextIO) -> None:
        self._target = target

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._target.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._target.flush()


class _LibraryHandler(logging.Handler):
    """Hands on what libraries log through the standard module; rare, and never on the way of a request."""

    def emit(self, record: logging.LogRecord) -> None:
        level = next((name for name in ("error", "warning", "info") if record.levelno >= LEVELS[name]), "debug")
        fields: dict[str, Any] = {"logger": record.name}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        getattr(_log, level)(record.getMessage(), **fields)


def _adopt_library_logs() -> None:
    root = logging.getLogger()
    if not any(isinstance(handler, _LibraryHandler) for handler in root.handlers):
        root.addHandler(_LibraryHandler(logging.WARNING))
