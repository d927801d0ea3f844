"""A strict reader of HTTP/1.1 after RFC 9112, without code of the proxy.

The reader repairs nothing. It is lenient only about details that do not affect the framing: line ends before a message
(section 2.2), several spaces in a request line (section 3), and the protocol and the reason phrase of an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_TEXT = rb"[\t\x20-\x7e\x80-\xff]*"
_REASON = re.compile(_TEXT)
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") +([\x21-\x7e]+) +HTTP/1\.([01])")
_STATUS_LINE = re.compile(rb"(?:HTTP|RTSP|ICE)/(1\.[01]|0\.9|2\.0) ([1-9][0-9][0-9])(?: ([^\r\n]*))?")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):(" + _TEXT + rb")")
_CHUNK_LINE = re.compile(rb"(0*[0-9a-fA-F]{1,16})(?:[ \t]*;" + _TEXT + rb")?")
_FRAMING = (b"content-length", b"transfer-encoding")


class End(StrEnum):
    """Why a reading ended."""

    CLEAN = "clean"
    SHORT = "short"
    """The bytes are the beginning of a message."""
    BROKEN = "broken"
    """The bytes are no message, or are ambiguous."""


@dataclass(frozen=True, slots=True)
class Message:
    """`line` holds method, target and minor version of a request; version, status and reason of an answer."""

    line: tuple[bytes, bytes, bytes]
    fields: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def values(self, name: bytes) -> list[bytes]:
        """The values of all fields with this name, which is in lower case."""
        return [value for each, value in self.fields if each == name]

    @property
    def status(self) -> int:
        """Of an answer."""
        return int(self.line[1])

    @property
    def strict(self) -> bool:
        """Whether an answer has a correct status line too."""
        return self.line[0] in (b"1.0", b"1.1") and _REASON.fullmatch(self.line[2]) is not None


@dataclass(frozen=True, slots=True)
class Reading:
    """All messages before the end. `begun` is the part of a short message whose head is whole."""

    messages: tuple[Message, ...]
    end: End
    begun: Message | None = None


class _Stop(Exception):  # noqa: N818 - the end of a reading, not an error of it
    def __init__(self, end: End, begun: bytes | None = None) -> None:
        super().__init__(end)
        self.end = end
        self.begun = begun


def read_requests(data: bytes) -> Reading:
    """Read the requests of one connection, up to a request that closes the connection."""
    messages: list[Message] = []
    while True:
        data = data.lstrip(b"\r\n")
        if not data:
            return Reading(tuple(messages), End.CLEAN)
        try:
            line, fields, rest = _head(data, _request_line)
        except _Stop as stop:
            return Reading(tuple(messages), stop.end)
        head = Message(line, fields, b"")
        hosts = len(head.values(b"host"))
        if hosts > 1 or (hosts == 0 and line[2] == b"1"):
            return Reading(tuple(messages), End.BROKEN)
        try:
            body, data = _body(head, rest, line[2], None)
        except _Stop as stop:
            return Reading(tuple(messages), stop.end, _begun(head, stop))
        messages.append(Message(line, fields, body))
        if _closes(head, line[2]):
            return Reading(tuple(messages), End.CLEAN)


def read_answers(data: bytes, closed: bool) -> Reading:
    """Read the answers of one connection, interim answers included. `closed`: the connection has ended."""
    messages: list[Message] = []
    while data := data.lstrip(b"\r\n"):
        try:
            line, fields, rest = _head(data, _status_line)
        except _Stop as stop:
            return Reading(tuple(messages), stop.end)
        head = Message(line, fields, b"")
        if head.status == 101:
            # No request asked for another protocol.
            return Reading(tuple(messages), End.BROKEN)
        try:
            body, data = (b"", rest) if head.status < 200 else _body(head, rest, line[0], closed)
        except _Stop as stop:
            return Reading(tuple(messages), stop.end, _begun(head, stop))
        messages.append(Message(line, fields, body))
    return Reading(tuple(messages), End.CLEAN)


def _begun(head: Message, stop: _Stop) -> Message | None:
    return Message(head.line, head.fields, stop.begun) if stop.begun is not None else None


def _head(
    data: bytes, first_line: Callable[[bytes], tuple[bytes, bytes, bytes]]
) -> tuple[tuple[bytes, bytes, bytes], tuple[tuple[bytes, bytes], ...], bytes]:
    """The first line, the fields and the rest."""
    text, line_end, data = _line(data)
    try:
        first = first_line(text)
    except _Stop as stop:
        # Half a line may still become a whole one, unless it is already wrong.
        raise _Stop(End.SHORT if not line_end else stop.end) from None
    if not line_end:
        raise _Stop(End.SHORT)
    fields, data = _fields(data)
    return first, fields, data


def _line(data: bytes) -> tuple[bytes, bytes, bytes]:
    """A line without its end. The end is CR LF, and a CR or LF anywhere else is an error."""
    line, line_end, rest = data.partition(b"\r\n")
    if b"\n" in line or b"\r" in (line if line_end else line[:-1]):
        raise _Stop(End.BROKEN)
    return line, line_end, rest


def _fields(data: bytes) -> tuple[tuple[tuple[bytes, bytes], ...], bytes]:
    fields: list[tuple[bytes, bytes]] = []
    while True:
        line, line_end, data = _line(data)
        if not line_end:
            raise _Stop(End.SHORT)
        if not line:
            return tuple(fields), data
        found = _FIELD.fullmatch(line)
        if found is None:
            raise _Stop(End.BROKEN)
        fields.append((found[1].lower(), found[2].strip(b" \t")))


def _request_line(line: bytes) -> tuple[bytes, bytes, bytes]:
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        raise _Stop(End.BROKEN)
    return found[1], found[2], found[3]


def _status_line(line: bytes) -> tuple[bytes, bytes, bytes]:
    found = _STATUS_LINE.fullmatch(line)
    if found is None:
        raise _Stop(End.BROKEN)
    return found[1], found[2], found[3] or b""


def _body(head: Message, data: bytes, minor: bytes, closed: bool | None) -> tuple[bytes, bytes]:
    """The body and the rest. `closed` is None for a request, which never ends with its connection."""
    lengths, codings = head.values(b"content-length"), head.values(b"transfer-encoding")
    answer = closed is not None
    if len(lengths) + len(codings) > 1:
        raise _Stop(End.BROKEN)
    if codings:
        if codings[0].lower() != b"chunked" or (minor == b"0" and not answer):
            raise _Stop(End.BROKEN)
        if not (answer and head.status in (204, 304)):
            return _chunks(data)
    if lengths and not re.fullmatch(rb"[0-9]+", lengths[0]):
        raise _Stop(End.BROKEN)
    if answer and head.status in (204, 304):
        return b"", data
    if lengths:
        size = int(lengths[0])
        if len(data) < size:
            raise _Stop(End.SHORT, data)
        return data[:size], data[size:]
    if not answer:
        return b"", data
    if not closed:
        raise _Stop(End.SHORT, data)
    return data, b""


def _chunks(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        try:
            line, line_end, rest = _line(data)
        except _Stop as stop:
            raise _Stop(stop.end, body) from None
        if not line_end:
            raise _Stop(End.SHORT, body)
        found = _CHUNK_LINE.fullmatch(line)
        if found is None:
            raise _Stop(End.BROKEN, body)
        size = int(found[1], 16)
        if size == 0:
            break
        if len(rest) < size + 2:
            kept = rest[:size]
            broken = len(rest) > size and rest[size:] != b"\r"
            raise _Stop(End.BROKEN if broken else End.SHORT, body + kept)
        if rest[size : size + 2] != b"\r\n":
            raise _Stop(End.BROKEN, body + rest[:size])
        body += rest[:size]
        data = rest[size + 2 :]
    try:
        trailer, data = _fields(rest)
    except _Stop as stop:
        raise _Stop(stop.end, body) from None
    if any(name in _FRAMING for name, _ in trailer):
        raise _Stop(End.BROKEN, body)
    return body, data


def _closes(head: Message, minor: bytes) -> bool:
    options = [option.strip(b" \t").lower() for value in head.values(b"connection") for option in value.split(b",")]
    return b"close" in options or (minor == b"0" and b"keep-alive" not in options)
