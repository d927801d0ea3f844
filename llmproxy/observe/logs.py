"""Logs: a line for each finished request, and for each change of state that matters to an operator.

Events go to standard error, one per line, as text for people or as JSON. No event has a prompt, an answer or a key:
callers pass names, numbers and reasons only. A serving process writes on a thread (`write_by_thread`), so that a
stalled reader blocks nothing.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import FileIO, RawIOBase, TextIOWrapper
from textwrap import indent
from typing import IO, Any, Protocol, TextIO, cast

import orjson
import structlog
from structlog.typing import EventDict, WrappedLogger

from llmproxy.core.domain import GrantReason, Outcome
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.exit_fields import exit_fields, exit_text, why_fields
from llmproxy.observe.text import shown
from llmproxy.observe.writer import LineWriter

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
FORMATS = ("text", "json")
EXIT_EVENT = "request"
BYTES_MAX = 4 << 20
"""The maximum size of the lines that wait to be written to standard error. Further lines are dropped and counted."""
EXIT_S = 1.0  # How long the process waits at its end until the last lines are written.

_COLOURS = {"debug": "\x1b[2m", "info": "\x1b[32m", "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
_RESET = "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# INTERNAL is a bug of the proxy. BROKEN_STREAM is a stream that broke after the client had got the first byte.
_ALARMING = {Outcome.INTERNAL: "error", Outcome.BROKEN_STREAM: "warning"}

Listener = Callable[[str, str, Mapping[str, Any]], None]
"""Called with the level, the name and the fields of a log line."""
_listeners: list[Listener] = []

_log = structlog.get_logger()


def configure(log_format: str, log_level: str, stream: TextIO | None = None) -> None:
    """Configures logging for the whole process. The last call counts.

    `log_format` is in FORMATS, `log_level` in LEVELS. `stream` is by default standard error. Text has colours only on a
    terminal. Raises KeyError for an unknown level and ValueError for an unknown format.
    """
    global _exits
    target = stream if stream is not None else sys.stderr
    level, out = LEVELS[log_level], _Stream(target)
    render: _Render
    if log_format == "json":
        render = _JsonRender()
    elif log_format == "text":
        render = _TextRender(colours=target.isatty())
    else:
        raise ValueError(f"unknown log format {log_format!r}; known: {', '.join(FORMATS)}")
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            partial(_heard_at, level),
            structlog.processors.format_exc_info,
            render,
        ],
        # Listeners get lines from `info` on, also if the log begins at a higher level.
        wrapper_class=structlog.make_filtering_bound_logger(min(level, LEVELS["info"])),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, out)),
        cache_logger_on_first_use=False,
    )
    _exits = _Exits(level, render, out)
    _adopt_library_logs()


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Calls `listener` with each log line during the block.

    Leaves out the lines of finished requests, and lines below level `info`.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _heard_at(level: int, _logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Passes a line to the listeners, unless `heard_by` leaves it out. Drops a line below the level of the log."""
    if event["event"] != EXIT_EVENT and LEVELS.get(method, LEVELS["error"]) >= LEVELS["info"]:
        for listener in _listeners:
            listener(method, str(event["event"]), event)
    if LEVELS.get(method, LEVELS["error"]) < level:
        raise structlog.DropEvent
    return event


def write_by_thread() -> None:
    """Makes a thread write to standard error, until the process ends.

    A process that is going to serve calls this once, before `configure`.
    """
    global _standard_error
    _standard_error = _StandardError(sys.stderr.fileno())
    _standard_error.start()
    sys.stderr = TextIOWrapper(
        cast(IO[bytes], _LinesToWriter(_standard_error)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )
    atexit.register(_standard_error.close, EXIT_S)


def take_lines_lost() -> int:
    """Returns the number of lines that could not be written to standard error since the last call."""
    return _standard_error.take_lost() if _standard_error is not None else 0


def log_exit(ended: RequestExit) -> None:
    """Logs a finished request. At level `debug`, the line also has the reasons of the grant."""
    # Most requests complete, and hashing an outcome costs a call.
    outcome = ended.outcome
    level = "info" if outcome is Outcome.COMPLETED else _ALARMING.get(outcome, "info")
    # Bypasses structlog, which would double the time, unless something has replaced its last processor.
    if _exits is not None and structlog.get_config()["processors"][-1] is _exits.render:
        _exits.write(level, ended)
        return
    log = _log.bind()
    why = ended.last.why if log.is_enabled_for(LEVELS["debug"]) else None
    getattr(log, level)(EXIT_EVENT, **exit_fields(ended), **({} if why is None else {"why": why_fields(why)}))


def log_replaced_id(request_id: str) -> None:
    """Logs that `request_id` replaces a client's id, which is unsuitable for log lines."""
    hint = "x-request-id should be 1 to 256 printable ASCII characters without spaces"
    _log.warning("request_id_replaced", request_id=request_id, hint=hint)


def log_internal(request_id: str, error: BaseException) -> None:
    """Logs a bug of the proxy that one request met, with its traceback."""
    _log.error("internal", request_id=request_id, exc_info=error)


class _WallClock:
    """Makes the timestamps of log lines. Formats each second only once."""

    __slots__ = ("_at", "_format", "_local", "_prefix")

    def __init__(self, layout: str, *, local: bool) -> None:
        self._format = layout
        self._local = local
        self._at = 0
        self._prefix = ""

    def now(self) -> tuple[str, float]:
        """Returns the current time as a timestamp of whole seconds, and the fraction of the second."""
        now = time.time()  # noqa: TID251 - readers of a log want the time of day
        at = int(now)
        if at != self._at:
            self._at = at
            self._prefix = time.strftime(self._format, time.localtime(at) if self._local else time.gmtime(at))
        return self._prefix, now - at


class _Render(Protocol):
    """The last processor of structlog, which formats a log line.

    `exit` formats the line of a finished request, the most frequent one, without structlog.
    """

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict, /) -> str: ...

    def exit(self, level: str, ended: RequestExit, why: GrantReason | None) -> str:
        """Returns the log line of a finished request. `__call__` would return the same line for the same fields."""


class _JsonRender:
    def __init__(self) -> None:
        self._clock = _WallClock("%Y-%m-%dT%H:%M:%S", local=False)

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> str:
        return self._line(event.pop("level"), event.pop("event"), event)

    def exit(self, level: str, ended: RequestExit, why: GrantReason | None) -> str:
        fields = exit_fields(ended)
        if why is not None:
            fields["why"] = why_fields(why)
        return self._line(level, EXIT_EVENT, fields)

    def _line(self, level: str, name: object, fields: Mapping[str, Any]) -> str:
        second, fraction = self._clock.now()
        at = f"{second}.{int(fraction * 1e6):06d}Z"
        event = {"timestamp": at, "level": level, "event": name, **fields}
        try:
            return orjson.dumps(event, default=_plain).decode()
        except TypeError:
            # A path that is not UTF-8, or a number beyond 64 bits.
            return json.dumps(event, default=_plain)


def _plain(value: object) -> object:
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


class _TextRender:
    def __init__(self, colours: bool) -> None:
        self._clock = _WallClock("%Y-%m-%d %H:%M:%S", local=True)
        self._levels = {
            level: f"{colour}{level:<7}{_RESET}" if colours else f"{level:<7}" for level, colour in _COLOURS.items()
        }

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> str:
        level, name, traceback = event.pop("level"), str(event.pop("event")), event.pop("exception", None)
        # Names come from clients: nothing in them may begin a line of its own or control the terminal.
        parts = [self._begin(level), name if name.isprintable() else json.dumps(name)]
        parts += [f"{key}={shown(value)}" for key, value in event.items()]
        line = " ".join(parts)
        # Indented, so that no line of a traceback looks like an event.
        return f"{line}\n{indent(_CONTROL.sub('?', traceback), '    ')}" if traceback else line

    def exit(self, level: str, ended: RequestExit, why: GrantReason | None) -> str:
        line = f"{self._begin(level)} {EXIT_EVENT}{exit_text(ended)}"
        return line if why is None else f"{line} why={shown(why_fields(why))}"

    def _begin(self, level: str) -> str:
        second, fraction = self._clock.now()
        return f"{second}.{int(fraction * 1e3):03d} {self._levels[level]}"


class _Stream:
    """A text stream that ignores failures, because a log that cannot be written must not fail a request."""

    def __init__(self, target: TextIO) -> None:
        self._target = target
        # Standard error flushes each line itself.
        self._flushes_lines = target.line_buffering if isinstance(target, TextIOWrapper) else False

    def write(self, text: str) -> None:
        try:  # noqa: SIM105 - `suppress` costs three calls, for each line
            self._target.write(text)
        except (OSError, ValueError):
            pass

    def flush(self) -> None:
        if not self._flushes_lines:
            try:  # noqa: SIM105 - see `write`
                self._target.flush()
            except (OSError, ValueError):
                pass


class _StandardError(LineWriter[bytes]):
    def __init__(self, fd: int) -> None:
        super().__init__("log", FileIO(fd, "wb", closefd=False), BYTES_MAX)
        self.fd = fd

    def _encoded(self, line: bytes) -> bytes:
        return line

    def _failed(self, error: OSError) -> None:
        """Does nothing, because the error cannot be reported elsewhere."""

    def _resumed(self, lost: int) -> None:
        _log.warning("log_lines_lost", lines=lost, hint="the reader of the log did not read")


class _LinesToWriter(RawIOBase):
    """The raw stream under the text stream of standard error. Passes each line to the writer."""

    def __init__(self, writer: _StandardError) -> None:
        self._writer = writer

    def write(self, data: Any) -> int:
        line = bytes(data)
        self._writer.put(line, len(line))
        return len(line)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._writer.fd

    def isatty(self) -> bool:
        return os.isatty(self._writer.fd)


_standard_error: _StandardError | None = None


class _Exits:
    """Writes the lines of finished requests."""

    __slots__ = ("_debug", "_level", "_out", "render")

    def __init__(self, level: int, render: _Render, out: _Stream) -> None:
        self.render = render
        self._level = level
        self._debug = level <= LEVELS["debug"]
        self._out = out

    def write(self, level: str, ended: RequestExit) -> None:
        if LEVELS[level] >= self._level:
            self._out.write(self.render.exit(level, ended, ended.last.why if self._debug else None) + "\n")
            self._out.flush()


_exits: _Exits | None = None


class _LibraryHandler(logging.Handler):
    """Logs the rare records that libraries write by `logging`."""

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
