"""Requests of hostile clients: after the ideas of published collections (llhttp's vectors, smuggler's spellings,
http-garden's differences between parsers), in words of our own.

Each case is one packet, or more, on a connection of its own; the sentinel follows behind all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random

from tests.hostile.edits import EVERY, LINE_ENDS, NASTY, everywhere, line_ends, several, spelt
from tests.strictness.vector import CHAT, HOST, JSON, head

TE = b"transfer-encoding: chunked"


def body_of(user: str) -> bytes:
    """A body that names its user."""
    return json.dumps({"model": "base", "messages": [], "max_tokens": 1, "user": user}).encode()


def sized(user: str, *fields: bytes) -> bytes:
    body = body_of(user)
    return head(HOST, JSON, *fields, b"content-length: %d" % len(body)) + body


def in_chunks(user: str, *fields: bytes) -> bytes:
    body = body_of(user)
    first, second = body[:9], body[9:]
    chunks = b"%x\r\n%s\r\n%x;a=b\r\n%s\r\n" % (len(first), first, len(second), second)
    return head(HOST, JSON, *fields, TE) + chunks + b"0\r\nx-t: u\r\n\r\n"


SENTINEL = sized("sentinel", b"connection: close")
"""A sound request after every case. It is answered, read as part of a longer body, or not read at all."""
INNER = sized("smuggled", b"x-smuggled: yes")
"""A request that is hidden in the body of another one."""
OUTER = body_of("outer")
LAST = b"0\r\n\r\n"
CHUNK = b"%x\r\n%s\r\n" % (len(OUTER), OUTER)
HIDDEN = b"%x\r\n%s\r\n" % (len(INNER), INNER) + LAST
"""The hidden request as the content of a chunk."""


LENGTHS = (
    b"content-length: %d" % len(OUTER), b"content-length: 0", b"content-length: 4", b"content-length: 00",
    b"content-length: +%d" % len(OUTER), b"content-length: -1", b"content-length:", b"content-length: 0x10",
    b"content-length: %d, %d" % (len(OUTER), len(OUTER)), b"content-length : 0", b"content-length: 1e1",
    b"content-length: %d" % (2**64 + 4), b"content_length: 0", b"content-length\x00: 0", b"content-length: 4\r\n 0",
)  # fmt: skip
CODINGS = (
    TE, b"transfer-encoding: identity", b"transfer-encoding: gzip, chunked", b"transfer-encoding: chunked, identity",
    b"transfer-encoding: xchunked", b"transfer-encoding:\x0bchunked", b"transfer-encoding : chunked",
    b"transfer-encoding: chunked\t", b"transfer-encoding: \"chunked\"", b"Transfer-Encoding:chunked",
    b"transfer-encoding: cow\r\ntransfer-encoding: chunked", b"transfer_encoding: chunked",
    b" transfer-encoding: chunked", b"x: y\r\n transfer-encoding: chunked", b"transfer-encoding: chunked;q=1",
    b"transfer-encoding:", b"te: chunked",
    b"transfer-encoding: chun\r\n ked", b"transfer-encoding: ch\xffunked", b"x: y\ntransfer-encoding: chunked",
)  # fmt: skip
SIZES = (
    b"-1", b"+5", b"0x5", b"5 ", b" 5", b"5\t;a", b"05", b"5;", b"5;a=", b'5;a="\r\n"', b"5;a\n", b"5;\x00", b"5\n",
    b"5\r", b"5,5", b"5.0", b"", b"g", b"5h", b"ffffffffffffffff", b"10000000000000005", b"8000000000000000",
    b"0000000000000000000005", b"5;a=b;c", b"5 ; a = b", b"5;a=\"b", b"5\x0c", b"\xd9\xa5", b"5;\xff=\x80",
)  # fmt: skip
METHODS = (b"POST", b"GET", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE", b"CONNECT", b"PRI", b"post")
TARGETS = (
    CHAT, b"*", b"/", b"//x", b"http://x" + CHAT, b"http://a@b:1" + CHAT + b"?q", CHAT + b"/", CHAT + b"?" + b"q" * 999,
    CHAT + b"#f", b"x:80", b"/v1/../metrics", CHAT + b"%0d%0ax:y", CHAT + b"%00", b"", CHAT + b" /x", b"/v1/models",
)  # fmt: skip
VERSIONS = (
    b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.2", b"HTTP/1.10", b"HTTP/01.1", b"http/1.1",
    b"HTTP/1,1", b"HTTP/1.1 ", b"HTTP /1.1", b"ICE/1.1", b"",
)  # fmt: skip


def _sound(random: Random) -> Iterator[bytes]:
    for count in range(300):
        yield b"".join(random.choice((sized, in_chunks))(f"sound-{count}-{i}") for i in range(random.randint(1, 3)))


def _te_spelling(_: Random) -> Iterator[bytes]:
    line = b"\r\nTransfer-Encoding: chunked\r\n"
    slots = (1, 2, 6, 10, 19, 20, 21, 25, 28, 29)
    outsides = LAST + INNER
    cl_te = head(HOST, JSON, b"content-length: %d" % len(outsides))[:-4]
    yield from spelt(cl_te, line, b"\r\n" + outsides, slots, EVERY)
    te_cl = head(HOST, JSON, b"content-length: %d" % len(b"%x\r\n" % len(INNER)))[:-4]
    yield from spelt(te_cl, line, b"\r\n" + HIDDEN, range(len(line)), NASTY)
    # Without a length: a reader that ignores this line takes the body for the next request.
    yield from spelt(head(HOST, JSON)[:-4], line, b"\r\n" + HIDDEN, range(len(line)), NASTY)
    for coding in CODINGS:
        for end in LINE_ENDS:
            yield head(HOST, JSON)[:-4] + b"\r\n" + coding + end + b"\r\n" + HIDDEN


def _cl_spelling(_: Random) -> Iterator[bytes]:
    line = b"\r\nContent-Length: %d\r\n" % len(OUTER)
    before = head(HOST, JSON)[:-4]
    yield from spelt(before, line, b"\r\n" + OUTER + INNER, (2, 9, 16, 17, 18, 19, 20, 21), EVERY)
    # With the hidden request as the whole body: a reader without a length takes it for the next request (CL.0).
    line = b"\r\nContent-Length: %d\r\n" % len(INNER)
    yield from spelt(before, line, b"\r\n" + INNER, range(len(line)), NASTY)


def _doubled(_: Random) -> Iterator[bytes]:
    for length in LENGTHS:
        for coding in CODINGS:
            yield head(HOST, length, coding) + CHUNK + LAST + INNER
            yield head(HOST, coding, length) + HIDDEN
        for other in LENGTHS:
            yield head(HOST, length, b"x-a: b", other) + OUTER + INNER
    for coding in CODINGS:
        for other in CODINGS:
            yield head(HOST, coding, other) + HIDDEN
        yield head(HOST, coding, line=b"POST " + CHAT + b" HTTP/1.0") + HIDDEN
        yield head(HOST, coding, line=b"GET " + CHAT + b" HTTP/1.1") + HIDDEN


def _chunks(_: Random) -> Iterator[bytes]:
    before = head(HOST, JSON, TE)
    size = b'%x;a="b"\r\n' % len(OUTER)
    yield from spelt(before, size, OUTER + b"\r\n" + LAST + INNER, range(len(size)), EVERY)
    yield from spelt(before + CHUNK[:-2], b"\r\n0\r\nx-t: u\r\n\r\n", INNER, range(15), NASTY)
    yield from spelt(before + CHUNK, b"0\r\n\r\n", INNER, range(6), EVERY)
    for one in SIZES:
        for end in LINE_ENDS:
            yield before + CHUNK + one + end + b"abcde\r\n" + LAST + INNER
    for end in LINE_ENDS:
        yield before + CHUNK[:-2] + end + LAST + INNER
        yield before + CHUNK + b"0" + end + b"\r\n" + INNER
        yield before + CHUNK + b"0\r\n" + end + INNER
        yield before + CHUNK + b"0\r\ncontent-length: 5" + end + b"\r\n" + INNER
    whole = before + CHUNK + LAST
    yield from (whole[:at] for at in range(len(before), len(whole)))


def _request_lines(_: Random) -> Iterator[bytes]:
    after = head(HOST, JSON, b"content-length: %d" % len(OUTER), line=b"") + OUTER + INNER
    line = b"POST " + CHAT + b" HTTP/1.1"
    slots = (0, 2, 4, 5, 9, len(CHAT) + 5, len(CHAT) + 6, len(CHAT) + 9, len(line) - 3, len(line))
    yield from spelt(b"", line, after, slots, EVERY)
    for method in METHODS:
        for target in TARGETS:
            for version in VERSIONS:
                yield method + b" " + target + b" " + version + after


def _fields(_: Random) -> Iterator[bytes]:
    before, after = head(HOST)[:-4], b"\r\ncontent-length: %d\r\n\r\n" % len(OUTER) + OUTER + INNER
    field = b"\r\nx-name: value"
    yield from spelt(before, field, after, (2, 4, 8, 9, 10, 12, len(field)), EVERY)
    hosts = b"\r\nhost: again.example:80"
    yield from spelt(head(JSON)[:-4], hosts, after, range(2, len(hosts) + 1), NASTY)
    for name in (b"connection", b"upgrade", b"expect", b"trailer", b"te", b"keep-alive", b"content-encoding"):
        for value in b"close content-length host transfer-encoding h2c 100-continue gzip ,".split():
            yield sized("outer", name + b": " + value) + INNER


def _line_ends(_: Random) -> Iterator[bytes]:
    for message in (sized("outer", b"x-a: b"), in_chunks("outer"), sized("outer") + INNER):
        yield from line_ends(message)


def _bytes(_: Random) -> Iterator[bytes]:
    yield from everywhere(sized("outer", b"x-a: b"), NASTY)
    yield from everywhere(in_chunks("outer"), NASTY, step=2)
    yield from everywhere(sized("outer") + INNER, NASTY, step=4, start=100)


def _random(random: Random) -> Iterator[bytes]:
    for message in (sized("outer", b"x-a: b") + INNER, in_chunks("outer") + INNER):
        yield from several(message, random, 1000)


GROUPS: dict[str, Callable[[Random], Iterator[bytes]]] = {
    "sound requests": _sound,
    "requests, Transfer-Encoding": _te_spelling,
    "requests, Content-Length": _cl_spelling,
    "requests, framed twice": _doubled,
    "requests, chunks": _chunks,
    "requests, request lines": _request_lines,
    "requests, fields": _fields,
    "requests, line ends": _line_ends,
    "requests, every byte": _bytes,
    "requests, several changes": _random,
}
