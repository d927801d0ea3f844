"""Computes the chain of `prefix_hash` for a large body, in slices.

A parser would block the event loop. Instead, this module passes over the JSON once and hashes the canonical bytes value
by value, and long strings piece by piece. It reads at most two megabytes of text, and the media and skipped members in
between.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, repeat
from typing import Any

import orjson
from xxhash import xxh64, xxh64_hexdigest

from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.request.json_scan import PARSE_BYTES_MAX, SLICE_BYTES, Member, Slices
from llmproxy.gateway.request.prefix_hash import (
    BLOCKS_MAX,
    CACHE_CONTROL,
    CALLS,
    DEPTH_MAX,
    LAST,
    MEDIA,
    MEDIUM,
    MEMBER,
    MESSAGE,
    MESSAGE_DEPTH,
    MESSAGE_MEMBERS,
    PART,
    PREVIOUS,
    PROMPT_MEMBERS,
    ROLES,
    SALT,
    SKIPPED,
    TEXT,
    Chain,
    SystemText,
    empty_chain,
    id_bytes,
)

# More values than a body that is parsed in one go can have. The chain of a large body ends there.
_VALUES_MAX = 1 << 17
_VALUES_PER_SLICE = 1024
_JSON_DEPTH_MAX = 254  # The depth limit of orjson.

_BLANKS = re.compile(rb"[ \t\r\n]*")
_SEPARATORS = re.compile(rb"[ \t\r\n,:]*")
_EMPTY = re.compile(rb"\[[ \t\r\n]*\]|\{[ \t\r\n]*\}|null")
_NOTHING = re.compile(_EMPTY.pattern + rb'|""')
_LITERAL = re.compile(rb"[-+.0-9A-Za-z]+")
_IDS = re.compile(rb"\[[ \t\r\n]*(?:\[[ \t\r\n]*)?[0-9]")
# Matches whole characters and escapes only. The two halves of a surrogate pair count as one.
_STRING = re.compile(
    rb'(?:[^"\\]+|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*+', re.DOTALL
)


def large_prompt_chain(
    body: bytes, members: Mapping[str, Member], kind: BodyKind, slice_bytes: int = SLICE_BYTES
) -> Slices[Chain]:
    """Returns the chain of a body of any size.

    `members` must have an entry for each member of the body that is in `PROMPT_MEMBERS[kind]`, or is PREVIOUS or SALT.
    The result equals `prompt_chain`, except if an object repeats a member name or the body has more than PIECES_MAX
    pieces; clients send neither. The chain ends early if the JSON is invalid, which the engine reports, or has more
    than _VALUES_MAX values. Yields after about `slice_bytes` of text or 1,024 values, whichever comes first.
    `slice_bytes` must be at least 16.
    """
    try:
        begin = empty_chain(_salt(body, members.get(SALT)))
    except orjson.JSONDecodeError:
        return empty_chain(None)
    reader = _CanonicalReader(body, begin, slice_bytes)
    try:
        for name in PROMPT_MEMBERS.get(kind, ()):
            if name == "input" and PREVIOUS in members and not body.startswith(b"null", members[PREVIOUS].start):
                break
            member = members.get(name)
            if member is not None and not _NOTHING.match(body, member.start, member.end):
                yield from reader.read(name, member)
    except _NoPromptError:
        return begin
    except (_EndError, orjson.JSONDecodeError):
        pass
    return reader.chain()


def _salt(body: bytes, member: Member | None) -> Any:
    if member is None:
        return None
    if member.end - member.start > PARSE_BYTES_MAX:
        # No parsed body has a salt of this size, so its spelling may count.
        return xxh64_hexdigest(body[member.start : member.start + PARSE_BYTES_MAX])
    return orjson.loads(body[member.start : member.end])


class _EndError(Exception):
    """Ends the chain, because it is full or the rest of the body cannot be read."""


class _NoPromptError(Exception):
    """No engine accepts this prompt, so it gets no chain."""


_Sink = Callable[[bytes], object]


class _CanonicalReader:
    """Reads the prompt members of a JSON body value by value, and adds their canonical bytes to the hash chain.

    It never parses a whole member at once.
    """

    def __init__(self, body: bytes, begin: Chain, slice_bytes: int) -> None:
        self._body = body
        self._slice_bytes = slice_bytes
        self._at = self._end = 0
        self._chain = begin
        self._written: list[bytes] = []
        self._written_bytes, self._bytes_due = 0, slice_bytes
        self._between = b""  # Is written before the next text.
        self._values = 0
        self._values_due = _VALUES_PER_SLICE

    def chain(self) -> Chain:
        self._chain = self._chain.extended(b"".join(self._written))
        self._written = []
        return self._chain

    def read(self, name: str, member: Member) -> Slices[None]:
        self._at, self._end = member.start, member.end
        if name == "tools":
            yield from self._tools()
        elif name == "prompt":
            yield from self._prompt()
        elif name in ("messages", "input"):
            yield from self._messages()
        else:
            self._write(MEMBER)
            yield from self._system()

    def _write(self, text: bytes) -> None:
        if self._between and text:
            text, self._between = self._between + text, b""
        self._written.append(text)
        self._written_bytes += len(text)

    def _due(self) -> bool:
        """Returns whether the caller should yield now. If so, the written bytes have been added to the chain."""
        if self._values < self._values_due and self._written_bytes < self._bytes_due:
            return False
        if self._values > _VALUES_MAX or len(self.chain().hashes) == BLOCKS_MAX:
            raise _EndError
        self._values_due = self._values + _VALUES_PER_SLICE
        self._bytes_due = self._written_bytes + self._slice_bytes
        return True

    def _next(self, skipped: re.Pattern[bytes]) -> int:
        """Moves to the next byte that `skipped` does not match, and returns this byte. Raises _EndError at the end."""
        match = skipped.match(self._body, self._at, min(self._at + PARSE_BYTES_MAX, self._end))
        assert match is not None  # The patterns match the empty string too.
        self._at = match.end()
        # No small body can have as many blanks in a row.
        if self._at == self._end or self._at - match.start() == PARSE_BYTES_MAX:
            raise _EndError
        self._values += 1
        return self._body[self._at]

    def _list(self, read: Callable[[], Slices[None]]) -> Slices[None]:
        """Reads the list at the current position, with one call of `read` for each item."""
        self._at += 1
        while self._next(_SEPARATORS) != 0x5D:
            yield from read()
            if self._due():
                yield

    def _messages(self) -> Slices[None]:
        if self._next(_BLANKS) == 0x5B:
            yield from self._list(self._message)
            return
        self._write(MESSAGE)
        yield from self._content(2)
        self._write(MEMBER + b'role"user"')

    def _message(self) -> Slices[None]:
        self._write(MESSAGE)
        yield from self._content(1)

    def _system(self) -> Slices[None]:
        block = partial(self._content, 1, system=True)
        yield from self._list(block) if self._next(_BLANKS) == 0x5B else block()

    def _tools(self) -> Slices[None]:
        self._write(MEMBER)
        if self._next(_BLANKS) != 0x5B:
            yield from self._json(self._write)
            return
        marks = chain((b"[",), repeat(b","))
        yield from self._list(partial(self._tool, marks))
        self._write(b"]")

    def _tool(self, marks: Iterator[bytes]) -> Slices[None]:
        self._write(next(marks))
        if self._next(_SEPARATORS) != 0x7B:
            yield from self._json(self._write, 1)
            return
        self._at += 1
        between = b""
        self._write(b"{")
        while self._next(_SEPARATORS) != 0x7D:
            name = self._name()
            self._next(_SEPARATORS)
            if name == CACHE_CONTROL:
                yield from self._json(len)  # Reads and discards the value.
                if self._due():
                    yield
                continue
            self._write(between + orjson.dumps(name) + b":")
            between = b","
            yield from self._json(self._write, 2)
            if self._due():
                yield
        self._write(b"}")
        self._at += 1

    def _prompt(self) -> Slices[None]:
        first = self._next(_BLANKS)
        if ids := _IDS.match(self._body, self._at, self._at + PARSE_BYTES_MAX):
            self._at = ids.end() - 1
            yield from self._ids()
            return
        if first == 0x5B:
            self._at += 1
            first = self._next(_BLANKS)
        if first == 0x22:
            yield from self._string(self._write, as_json=False)

    def _ids(self) -> Slices[None]:
        end = -1
        while end < 0:
            stop = min(self._at + SLICE_BYTES, self._end)
            end = self._body.find(b"]", self._at, stop)
            to = self._body.rfind(b",", self._at, stop) if end < 0 else end
            if to < 0:
                raise _EndError
            try:
                ids = id_bytes(orjson.loads(b"[" + self._body[self._at : to] + b"]"))
            except (TypeError, OverflowError, orjson.JSONDecodeError):
                raise _NoPromptError from None
            self._write(ids)
            self._at = to + 1
            if self._due():
                yield

    def _content(self, depth: int, *, system: bool = False) -> Slices[None]:
        first = self._next(_SEPARATORS)
        if first == 0x22 and system:
            text = SystemText(self._write)
            yield from self._string(text.add, as_json=False)
            text.end()
        elif first == 0x22:
            yield from self._string(self._write, as_json=False)
        elif first not in b"[{":
            self._literal()  # Is no text.
        elif depth == DEPTH_MAX:
            self._write(MEMBER)
            yield from self._json(self._write)
        elif first == 0x7B:
            yield from self._item(depth, system=system)
        else:
            self._at += 1
            begin = self._written_bytes
            while self._next(_SEPARATORS) != 0x5D:
                before = self._written_bytes
                if before > begin:
                    self._between = PART
                yield from self._content(depth + 1, system=system)
                if begin < before == self._written_bytes:
                    self._between = b""
                if self._due():
                    yield
            self._at += 1

    def _item(self, depth: int, *, system: bool) -> Slices[None]:
        last: dict[str, list[bytes] | None] = dict.fromkeys(LAST)
        self._at += 1
        while self._next(_SEPARATORS) != 0x7D:
            name = self._name()
            self._next(_SEPARATORS)
            if name in TEXT:
                yield from self._content(depth + 1, system=system)
            elif name in SKIPPED:
                yield from self._json(len)  # Reads and discards the value.
            elif empty := _EMPTY.match(self._body, self._at, self._at + PARSE_BYTES_MAX):
                self._at = empty.end()
            elif name in MEDIA:
                digest = xxh64()
                yield from self._json(digest.update)
                self._write(MEDIUM + digest.digest())
            elif name in last:
                parts = last[name] = [MEMBER, name.encode()]
                yield from self._json(parts.append)
                if name == "role":
                    system = b"".join(parts) == ROLES["system"]
            elif name in CALLS:
                self._write(MEMBER + name.encode())
                yield from self._content(depth + 1)
            elif depth == MESSAGE_DEPTH and name not in MESSAGE_MEMBERS:
                yield from self._json(len)
            else:
                self._write(MEMBER + name.encode())
                yield from self._json(self._write)
            if self._due():
                yield
        self._at += 1
        for written in last.values():
            if written:
                self._write(b"".join(written))

    def _json(self, sink: _Sink, outside: int = 0) -> Slices[None]:
        """Passes the next value to `sink`, written as orjson would.

        `outside`: the number of containers around the value.
        """
        depth = 0
        while True:
            first = self._next(_BLANKS)
            if first == 0x22:
                sink(b'"')
                yield from self._string(sink, as_json=True)
                sink(b'"')
            elif first in b"[]{},:":
                depth += (first in b"[{") - (first in b"]}")
                if depth + outside > _JSON_DEPTH_MAX:
                    raise _NoPromptError
                sink(self._body[self._at : self._at + 1])
                self._at += 1
            else:
                sink(self._literal())
            if depth <= 0:
                return
            if self._due():
                yield

    def _name(self) -> str:
        match = _STRING.match(self._body, self._at + 1, self._at + PARSE_BYTES_MAX)
        if self._body[self._at] != 0x22 or match is None or self._body[match.end() : match.end() + 1] != b'"':
            raise _EndError
        raw = self._body[self._at : match.end() + 1]
        self._at = match.end() + 1
        return str(orjson.loads(raw))

    def _literal(self) -> bytes:
        match = _LITERAL.match(self._body, self._at, self._at + PARSE_BYTES_MAX)
        if match is None:
            raise _EndError
        self._at = match.end()
        return bytes(memoryview(orjson.dumps(orjson.loads(match.group()))))  # A copy, as in `_item` of `prefix_hash`.

    def _string(self, sink: _Sink, *, as_json: bool) -> Slices[None]:
        """Passes the text of the next string to `sink`, without its quotes. `as_json`: escaped as orjson does."""
        body, end = self._body, self._end
        self._at += 1
        while True:
            at = self._at
            stop = min(at + self._slice_bytes, end)
            to = body.find(b'"', at, stop)
            closed = to >= 0
            if not closed:
                to = stop
            escaped = body.find(b"\\", at, to) >= 0
            if escaped:
                match = _STRING.match(body, at, stop)
                to = at if match is None else match.end()
                closed = to < stop and body[to] == 0x22
            while not closed and to > at and 0x80 <= body[to] < 0xC0:
                to -= 1  # A piece must not end inside a character.
            if escaped:
                text = orjson.loads(b'"' + body[at:to] + b'"')
                sink(orjson.dumps(text)[1:-1] if as_json else text.encode())
            else:
                sink(body[at:to])
            if to == at and not closed:
                raise _EndError
            self._at = to + closed
            if closed:
                return
            self._due()
            yield
