"""Answers of hostile backends: each case is the bytes of one answer, after which the connection stays or ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from tests.e2e.scripted import STREAM_END, STREAM_HEAD, chunk
from tests.hostile.edits import EVERY, LINE_ENDS, NASTY, everywhere, line_ends, several, spelt
from tests.hostile.requests import CODINGS, LENGTHS, SIZES
from tests.strictness.answers import BODY, CHUNK, LAST, SIZE, TE, whole_of

INNER = whole_of(b"content-length: 15\r\n", body=b'{"smuggled": 1}')
"""A message hidden in an answer, for the client or for the next request."""
EVENT = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
STREAM = STREAM_HEAD + chunk(EVENT) + chunk(b"data: [DONE]\n\n") + STREAM_END
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
SOUND = (
    whole_of(SIZE),
    whole_of(TE, body=CHUNK + LAST),
    whole_of(TE, body=b'3;a=b\r\n{"a\r\n4\r\n":1}\r\n0\r\nx-t: u\r\n\r\n'),
    INTERIM + whole_of(SIZE),
    STREAM,
)


def _sound(_: Random) -> Iterator[bytes]:
    yield from SOUND


def _status_lines(_: Random) -> Iterator[bytes]:
    for status in (*(b"%03d" % number for number in range(1100)), *b"2 20 +200 -200 2e2 0200 \xd9\xa2".split()):
        yield whole_of(SIZE, line=b"HTTP/1.1 %s OK" % status)
    for version in (*b"HTTP/1.0 HTTP/0.9 HTTP/2.0 HTTP/1.2 HTTP/1.10 http/1.1 ICY RTSP/1.0".split(), b""):
        yield whole_of(SIZE, line=version + b" 200 OK")
        yield whole_of(TE, line=version + b" 200 OK", body=CHUNK + LAST)
    line = b"HTTP/1.1 200 OK"
    yield from spelt(b"", line, whole_of(SIZE)[len(line) :], (0, 4, 5, 8, 9, 12, 13, 14, 15), EVERY)
    for count in (1, 2, 50):
        for status in (b"100 Continue", b"103 Hints", b"102 Processing", b"101 Upgrade", b"199 X"):
            interim = b"HTTP/1.1 %s\r\nx-evil: 1\r\n\r\n" % status * count
            yield interim + whole_of(SIZE)
            yield interim
            yield interim + whole_of(b"content-length: 9\r\n")[:-2]
    yield from (
        BODY,
        b"\r\n" * 9 + whole_of(SIZE),
        b"\n" + whole_of(SIZE),
        b"\x16\x03\x01\x02\x00",
        b"SSH-2.0-x\r\n",
        b"\x00",
    )


def _framing(_: Random) -> Iterator[bytes]:
    for first in (*LENGTHS, *CODINGS):
        for body in (BODY, CHUNK + LAST, b"", CHUNK + LAST + INNER, BODY + INNER):
            yield whole_of(first + b"\r\n", body=body)
        for second in (*LENGTHS, *CODINGS):
            yield whole_of(first + b"\r\n", second + b"\r\n", body=CHUNK + LAST + INNER)
    line = b"\r\nTransfer-Encoding: chunked\r\n"
    yield from spelt(whole_of()[: -len(BODY) - 4], line, b"\r\n" + CHUNK + LAST, range(len(line)), NASTY)
    line = b"\r\nContent-Length: 7\r\n"
    yield from spelt(whole_of()[: -len(BODY) - 4], line, b"\r\n" + BODY + INNER, range(len(line)), NASTY)


def _chunks(_: Random) -> Iterator[bytes]:
    before = whole_of(TE, body=b"")
    size = b'7;a="b"\r\n'
    yield from spelt(before, size, BODY + b"\r\n" + LAST, range(len(size)), EVERY)
    yield from spelt(before + CHUNK, b"0\r\nx-t: u\r\n\r\n", INNER, range(14), NASTY)
    for one in SIZES:
        for end in LINE_ENDS:
            yield before + CHUNK + one + end + b"abcde\r\n" + LAST + INNER
    for end in LINE_ENDS:
        yield before + CHUNK[:-2] + end + LAST
        yield before + CHUNK + b"0" + end + b"\r\n"
        yield before + CHUNK + b"0\r\n" + end + INNER


def _fields(_: Random) -> Iterator[bytes]:
    before, after = whole_of()[: -len(BODY) - 4], b"\r\n" + SIZE + b"\r\n" + BODY
    yield from spelt(before, b"\r\nx-name: value", after, (2, 4, 8, 9, 10, 12, 15), EVERY)
    for name in (b"connection", b"upgrade", b"trailer", b"keep-alive", b"set-cookie", b"server", b"x-llmproxy-backend"):
        for value in (b"close", b"content-length", b"h2c", b",", b"\xff", b"evil", b"x" * 70_000):
            yield whole_of(name + b": " + value + b"\r\n", SIZE)
    yield whole_of(*(b"x-%d: y\r\n" % i for i in range(5000)), SIZE)
    yield whole_of(b"x: " + b"y" * 300_000 + b"\r\n", SIZE)


def _behind(_: Random) -> Iterator[bytes]:
    """Cases with more than one answer, or with bytes after an answer."""
    for sound in SOUND:
        for other in (*SOUND, INNER, b"\r\n", b"\n", b"x", LAST, b"HTTP/1.1 ", b"\x00", BODY, INTERIM):
            yield sound + other


def _cut(_: Random) -> Iterator[bytes]:
    for sound in SOUND:
        yield from (sound[:at] for at in range(len(sound)))


def _bytes(_: Random) -> Iterator[bytes]:
    for sound in (SOUND[0], SOUND[2]):
        yield from everywhere(sound, NASTY)
    yield from everywhere(STREAM, NASTY, step=7)
    for sound in SOUND:
        yield from line_ends(sound)


def _random(random: Random) -> Iterator[bytes]:
    for sound in SOUND:
        yield from several(sound + INNER, random, 400)


GROUPS: dict[str, Callable[[Random], Iterator[bytes]]] = {
    "sound answers": _sound,
    "answers, status lines": _status_lines,
    "answers, framing": _framing,
    "answers, chunks": _chunks,
    "answers, fields": _fields,
    "answers, two in one": _behind,
    "answers, cut short": _cut,
    "answers, every byte": _bytes,
    "answers, several changes": _random,
}
