"""Finds the positions of the members of a JSON object, in slices that never block the event loop for long.

A parser turns every element into a Python object before it returns, which blocks the loop for a body of many megabytes.
The scan works on bytes in bulk instead: for each slice it masks escapes, splits at the quotes and sums up the brackets
between the strings, all in C. A string of 50 MB costs a few passes over memory and no Python loop.

The scan is exact for valid JSON and refuses broken structure. It does not check numbers or escapes in values that are
not read, because the engine reads the same bytes and reports such errors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import TypeVar

import orjson

from llmproxy.core.domain import Outcome
from llmproxy.gateway.http.errors import Failure

T = TypeVar("T")
Slices = Generator[None, None, T]  # A computation that yields after each bounded piece of work and returns a T.

PARSE_BYTES_MAX = 128 * 1024  # A larger body is never parsed in one call, but scanned in slices.
SLICE_BYTES = 64 * 1024  # The default number of bytes that a scan reads before it yields.
# The text size that an image or a sound counts as, like 1,000 tokens: the length of its base64 says nothing about its
# cost.
MEDIA_BYTES = 4000
MEDIA_HEAD_BYTES = 256  # The first bytes of a long string that decide whether it is an image or a sound.
KEY_BYTES_MAX = 4096  # A member name that is longer is no wanted name.
MEMBERS_MAX = 4096  # A scanned object with more members gets 400: each of them costs about 20 µs of Python.

_FIRST_SLICE_BYTES = 256
_BYTEWISE_BYTES = 64
_WHITESPACE = re.compile(rb"[ \t\r\n]*")
_LITERAL = re.compile(rb"[-+.0-9A-Za-z]*")
_MARKS = re.compile(rb'["\[\]{}]')
# How each byte changes the depth. Anything but a bracket does not change it.
_STEPS = bytes({ord("["): 1, ord("{"): 1, ord("]"): 255, ord("}"): 255}.get(byte, 0) for byte in range(256))
_NOT_BRACKETS = b" \t\r\n,:-+.0123456789truefalsniyEIN"
_MEDIA = re.compile(rb"data:[\w.+-]+\\?/[\w.+-]+[;,]|(?:[A-Za-z0-9+_-]|\\?/){200}")


class BadBody(Failure):
    """A request body that cannot be read (400). `message` never contains text of a prompt.

    `param` names the place in the body as vLLM does (`body.model`, `body.<position>`).
    """

    def __init__(self, message: str, param: str = "body") -> None:
        super().__init__(Outcome.BAD_REQUEST, message, param=param)


class Kind(Enum):
    """The JSON type of a member's value. `LITERAL` is a number, true, false or null."""

    STRING = "string"
    ARRAY = "array"
    OBJECT = "object"
    LITERAL = "literal"


@dataclass(slots=True)
class Member:
    """The value of a member, `body[start:end]`, and counts of its content, such as text bytes."""

    kind: Kind
    start: int
    end: int = 0
    # The estimated UTF-8 size of all strings and object keys without escapes. An image or sound counts MEDIA_BYTES.
    text_bytes: int = 0
    # How many strings, commas, arrays and objects the value contains, itself included. Commas in strings do not count.
    strings: int = 0
    commas: int = 0
    arrays: int = 0
    objects: int = 0


def is_media(head: bytes) -> bool:
    """Returns whether a string is a data URL or base64.

    The string must be longer than MEDIA_BYTES, and `head` are its first MEDIA_HEAD_BYTES.
    """
    return _MEDIA.match(head) is not None


def scan_members(
    body: bytes, wanted: Collection[str] | None, slice_bytes: int = SLICE_BYTES
) -> Slices[dict[str, Member]]:
    """Returns the result of `scan_every` as a mapping. Of a repeated name, the last value counts, as in engines."""
    return dict((yield from scan_every(body, wanted, slice_bytes)))


def scan_every(
    body: bytes, wanted: Collection[str] | None, slice_bytes: int = SLICE_BYTES
) -> Slices[list[tuple[str, Member]]]:
    """Finds the values of top-level members of the JSON object in `body`, in order, with repeated names.

    `wanted` are the names of these members; None for all. Yields after at most about `slice_bytes` of work. Raises
    BadBody if `body` is no well-formed object.
    """
    names = None if wanted is None else {name.encode(): name for name in wanted}
    found: list[tuple[str, Member]] = []
    at = yield from _run(_WHITESPACE, body, 0, slice_bytes)
    if at == len(body):
        raise BadBody("The request body is empty; send a JSON object.")
    if body[at] != 0x7B:
        raise BadBody("The request body must be a JSON object.")
    at = yield from _run(_WHITESPACE, body, at + 1, slice_bytes)
    closed = _byte(body, at, "the object") == b"}"
    members = 0
    while not closed:
        members += 1
        if members > MEMBERS_MAX:
            raise BadBody(f"An object of the request body has more than {MEMBERS_MAX} members.")
        key = Member(Kind.STRING, at)
        if body[at] != 0x22:
            raise _broken("expected a member name in double quotes", at)
        yield from _string(body, key, slice_bytes)
        at = yield from _run(_WHITESPACE, body, key.end, slice_bytes)
        if _byte(body, at, "a member") != b":":
            raise _broken("expected ':' after a member name", at)
        at = yield from _run(_WHITESPACE, body, at + 1, slice_bytes)
        value = yield from _value(body, at, slice_bytes)
        name = _name(body, key, names)
        if name is not None:
            found.append((name, value))
        at = yield from _run(_WHITESPACE, body, value.end, slice_bytes)
        separator = _byte(body, at, "the object")
        if separator not in (b",", b"}"):
            raise _broken("expected ',' or '}' after a member", at)
        closed = separator == b"}"
        if not closed:
            at = yield from _run(_WHITESPACE, body, at + 1, slice_bytes)
            _byte(body, at, "the object")
        yield
    at = yield from _run(_WHITESPACE, body, at + 1, slice_bytes)
    if at != len(body):
        raise _broken("unexpected bytes after the object", at)
    return found


def drain(slices: Slices[T]) -> T:
    """Runs a sliced computation to its end without a pause, and returns its result. Raises its exceptions."""
    while True:
        try:
            next(slices)
        except StopIteration as done:
            result: T = done.value
            return result


def _broken(what: str, at: int) -> BadBody:
    return BadBody(f"The request body is not valid JSON: {what} (byte {at}).", f"body.{at}")


def _byte(body: bytes, at: int, inside: str) -> bytes:
    byte = body[at : at + 1]
    if not byte:
        raise _broken(f"it ends inside {inside}", at)
    return byte


def _name(body: bytes, key: Member, names: dict[bytes, str] | None) -> str | None:
    """Returns the wanted name that a JSON key spells; None for any other key."""
    if key.end - key.start > KEY_BYTES_MAX and names is not None:
        return None
    raw = body[key.start + 1 : key.end - 1]
    if names is not None and b"\\" not in raw:
        return names.get(raw)
    try:
        name: str = orjson.loads(body[key.start : key.end])
        return name if names is None else names.get(name.encode())
    except orjson.JSONDecodeError:
        raise _broken("a member name has a bad escape", key.start) from None


def _run(pattern: re.Pattern[bytes], body: bytes, at: int, slice_bytes: int) -> Slices[int]:
    """Skips the bytes that match `pattern`, a repeated class of bytes.

    Returns the position after the last of these bytes.
    """
    while True:
        match = pattern.match(body, at, at + slice_bytes)
        assert match is not None  # The patterns match the empty string too.
        if match.end() < at + slice_bytes:
            return match.end()
        at = match.end()
        yield


def _value(body: bytes, at: int, slice_bytes: int) -> Slices[Member]:
    first = _byte(body, at, "a member")
    if first == b'"':
        value = Member(Kind.STRING, at)
        yield from _string(body, value, slice_bytes)
    elif first in (b"[", b"{"):
        value = Member(Kind.ARRAY if first == b"[" else Kind.OBJECT, at)
        yield from _container(body, value, slice_bytes)
    else:
        value = Member(Kind.LITERAL, at)
        value.end = yield from _run(_LITERAL, body, at, slice_bytes)
        if value.end == at:
            raise _broken("expected a value", at)
    return value


def _unescaped(piece: bytes) -> tuple[bytes, int]:
    """Returns `piece` with escaped quotes masked, and how many bytes its escapes add to the length of the text.

    The masked copy has the same length as `piece`.
    """
    if b"\\" not in piece:
        return piece, 0
    backslashes = piece.count(b"\\")
    masked = piece.replace(b"\\\\", b"__")
    singles = masked.count(b"\\")
    # \uXXXX has six bytes for a character of about three bytes. Any other escape has two bytes for one.
    added = (backslashes - singles) // 2 + singles + 2 * masked.count(b"\\u")
    return masked.replace(b'\\"', b"__"), added


def _piece(body: bytes, at: int, size: int) -> bytes:
    """Returns at most `size` bytes from position `at`, cut so that no backslash is split from the byte that it escapes.

    Raises BadBody at the end of `body`.
    """
    piece = body[at : at + size]
    if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
        piece = piece[:-1]
    if not piece:
        raise _broken("it ends inside a string or a container", at)
    return piece


def _string(body: bytes, string: Member, slice_bytes: int) -> Slices[None]:
    """Finds the end of the string that begins at `string.start`, and sets its `end` and counts."""
    at, size = string.start + 1, min(_FIRST_SLICE_BYTES, slice_bytes)
    string.strings = 1
    while not string.end:
        piece = _piece(body, at, size)
        quote = _unescaped(piece)[0].find(b'"')
        if quote >= 0:
            piece = piece[:quote]
            string.end = at + quote + 1
        string.text_bytes += len(piece) - _unescaped(piece)[1]
        at += len(piece)
        size = min(size * 4, slice_bytes)
        yield
    if string.text_bytes > MEDIA_BYTES and is_media(body[string.start + 1 : string.start + 1 + MEDIA_HEAD_BYTES]):
        string.text_bytes = MEDIA_BYTES


@dataclass(slots=True)
class _ScanState:
    """The state of a container's scan between two pieces."""

    arrays_open: int = 0
    objects_open: int = 0
    in_string: bool = False
    in_media: bool = False


def _container(body: bytes, container: Member, slice_bytes: int) -> Slices[None]:
    """Finds the end of the array or object that begins at `container.start`, and sets its `end` and counts."""
    at, state = container.start, _ScanState()
    size, size_max = min(_FIRST_SLICE_BYTES, slice_bytes), slice_bytes
    while not container.end:
        piece = _piece(body, at, size)
        masked, added = _unescaped(piece)
        parts = masked.split(b'"')
        outside = b"".join(parts[state.in_string :: 2])
        brackets = outside.translate(None, _NOT_BRACKETS)
        if _closes(brackets, state):
            # Sums need whole pieces. So pieces are halved until the end is near, and the last piece is read bytewise.
            if len(piece) > _BYTEWISE_BYTES:
                size = size_max = max(_BYTEWISE_BYTES, len(piece) // 2)
                yield
                continue
            container.end = at + _end_in(masked, state)
            masked, added = _unescaped(piece[: container.end - at])
            parts = masked.split(b'"')
            outside = b"".join(parts[state.in_string :: 2])
            brackets = outside.translate(None, _NOT_BRACKETS)
        if brackets.translate(None, b"[]{}"):
            raise _broken("unexpected characters between two strings or values", at)
        state.arrays_open += brackets.count(b"[") - brackets.count(b"]")
        state.objects_open += brackets.count(b"{") - brackets.count(b"}")
        container.arrays += brackets.count(b"[")
        container.objects += brackets.count(b"{")
        container.commas += outside.count(b",")
        _add_strings(body, at, container, state, parts, added)
        at += len(piece)
        size = min(size * 4, size_max)
        yield
    if state.arrays_open or state.objects_open:
        raise _broken("brackets do not match in the value that starts here", container.start)


def _closes(brackets: bytes, state: _ScanState) -> bool:
    """Returns whether the nesting depth falls to zero somewhere in these brackets."""
    if not brackets:
        return False
    steps = memoryview(brackets.translate(_STEPS)).cast("b")
    return state.arrays_open + state.objects_open + min(accumulate(steps)) <= 0


def _end_in(masked: bytes, state: _ScanState) -> int:
    """Returns the position after the bracket that closes the container. `masked` must contain this bracket."""
    depth, in_string = state.arrays_open + state.objects_open, state.in_string
    for mark in _MARKS.finditer(masked):
        byte = mark.group()
        if byte == b'"':
            in_string = not in_string
        elif not in_string:
            depth += 1 if byte in b"[{" else -1
            if depth == 0:
                return mark.end()
    raise AssertionError("the depth falls to zero in this piece")


def _add_strings(body: bytes, at: int, container: Member, state: _ScanState, parts: list[bytes], added: int) -> None:
    """Adds the strings of one slice to the counts, and advances `state`. `parts`: the slice, split at its quotes."""
    was_in_string, whole = state.in_string, len(parts) > 1
    inside = parts[not was_in_string :: 2]
    state.in_string = was_in_string != (len(parts) % 2 == 0)
    container.strings += len(inside) - was_in_string
    if was_in_string and not whole:
        container.text_bytes += 0 if state.in_media else len(parts[0]) - added
        return
    lengths = list(map(len, inside))
    text_bytes = sum(lengths) - added
    if was_in_string and state.in_media:
        text_bytes -= lengths.pop(0)
        inside = inside[1:]
    if state.in_string:
        # Whether a string that continues after the piece is media is decided by its first bytes, read from the body.
        start = at + sum(map(len, parts)) + len(parts) - 1 - len(parts[-1])
        state.in_media = is_media(body[start : start + MEDIA_HEAD_BYTES])
        if state.in_media:
            text_bytes += MEDIA_BYTES - lengths.pop()
            inside = inside[:-1]
    if max(lengths, default=0) > MEDIA_BYTES:
        text_bytes += sum(MEDIA_BYTES - len(part) for part in inside if len(part) > MEDIA_BYTES and is_media(part))
    container.text_bytes = max(0, container.text_bytes + text_bytes)
