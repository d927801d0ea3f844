"""Time against length for all readers of outside text: `python -m benchmarks.parts.linear`, ten minutes, one core.

Two tables: every regular expression of the package (see `patterns`) with its slowest text, and every parser with texts
up to the largest that the product accepts. The exponent compares the times for an eighth of the length and for the
whole length. The exit status is 1 if an exponent is above EXPONENT_MAX. `--largest 1000000` limits texts to a megabyte,
which takes two minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import log2

from aiohttp.test_utils import make_mocked_request

from benchmarks.parts.patterns import EXPONENT_MAX, Found, cpu_s, found_patterns, slowest
from benchmarks.table import Table
from llmproxy.backends.adapter_keeper import ANSWER_BYTES_MAX as ADAPTER_BYTES_MAX
from llmproxy.backends.adapter_keeper import _message
from llmproxy.backends.metrics_text import is_filtered, parse_reading
from llmproxy.backends.models import parse_listing
from llmproxy.backends.poller import BODY_BYTES_MAX as PAGE_BYTES_MAX
from llmproxy.config import Config
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.headers import named_in_connection, to_client
from llmproxy.gateway.http.routes import BodyKind
from llmproxy.gateway.proxying.answers import ANSWER_BYTES_MAX, parse_answer
from llmproxy.gateway.proxying.sse import BUFFERED_BYTES_MAX, USAGE_TAIL_BYTES, StreamTap, usage_in_tail
from llmproxy.gateway.request.auth import Keys
from llmproxy.gateway.request.body_reader import parses_at_once, read_form, read_large, read_small
from llmproxy.gateway.request.identity import Identity, parse_duration_s, request_id
from llmproxy.gateway.request.json_scan import PARSE_BYTES_MAX, drain
from llmproxy.gateway.request.prefix_hash import prompt_chain
from llmproxy.observe.exit import RequestExit

MIB = 1 << 20
LENGTHS = 4  # The number of measured lengths. Each is twice the previous length.
PATTERN_CHARS = 64 << 10
QUICK_S = 0.0002  # A reader that takes less for its largest text is too quick for a meaningful exponent.

_LIMITS = Config()
_IDENTITY = {
    place: Identity(Config.model_validate({"scheduling": {"session": place}})) for place in ("header:x-s", "cookie:s")
}
_KEYS = Keys(_LIMITS)


@dataclass(frozen=True)
class Parser:
    """A reader of outside text.

    `text` returns a text of about a given length, and `largest` is the longest length that the product accepts.
    """

    name: str
    largest: int
    text: Callable[[int], bytes]
    read: Callable[[bytes], object]


def _filled(before: bytes, pump: bytes, after: bytes = b"") -> Callable[[int], bytes]:
    return lambda size: before + pump * max(1, (size - len(before) - len(after)) // len(pump)) + after


def _json(read: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def refused_too(body: bytes) -> None:
        with suppress(ValueError, Failure):
            read(body)

    return refused_too


def _header(name: str, read: Callable[[dict[str, str]], object]) -> Callable[[bytes], object]:
    return _json(lambda value: read({name: value.decode("latin-1")}))


def _session(place: str, header: str) -> Callable[[bytes], object]:
    def read(value: bytes) -> None:
        request = make_mocked_request("GET", "/", {header: value.decode("latin-1")})
        _IDENTITY[place].session(request, {})

    return read


def _fed(pieces_bytes: int, hide: bool) -> Callable[[bytes], object]:
    def read(stream: bytes) -> None:
        tap = StreamTap(hide)
        for at in range(0, len(stream), pieces_bytes):
            tap.feed(stream[at : at + pieces_bytes])

    return read


def parsers() -> Iterator[Parser]:
    """Yields every parser of outside text, with texts that are hard for it."""
    for title, largest, read, texts in _groups():
        for name, text in texts.items():
            yield Parser(f"{title}: {name}", largest, text, read)


Group = tuple[str, int, Callable[[bytes], object], dict[str, Callable[[int], bytes]]]
"""The title, the longest accepted length, the reader, and functions that make texts, by name."""


def _groups() -> Iterator[Group]:
    body, head = _LIMITS.body_bytes_max, _LIMITS.clients.head_bytes_max
    shapes = {
        "brackets": _filled(b'{"model":"m","messages":[', b"[],", b"[]]}"),
        "open brackets": _filled(b'{"messages":', b"["),
        "quotes": _filled(b'{"messages":[', b'"",', b'""]}'),
        "backslashes": _filled(b'{"messages":["', b"\\", b'"]}'),
        "escapes": _filled(b'{"messages":["', b"\\u00e9", b'"]}'),
        "media": _filled(b'{"messages":["data:image/png;base64,', b"iVBORw0K", b'"]}'),
        "blanks": _filled(b'{"messages":', b" ", b'""}'),
        "members": _filled(b"{", b'"\\u006d":[],', b'"m":1}'),
        "digits": _filled(b'{"n":', b"9", b"}"),
    }
    yield "JSON body scanned", body, _json(partial(_scanned, False)), shapes
    yield "JSON body scanned, chained", body, _json(partial(_scanned, True)), shapes
    yield "JSON body parsed", PARSE_BYTES_MAX, _json(_parsed), shapes
    form = b"multipart/form-data; boundary=cut"
    part = b"--cut\r\nContent-Disposition: form-data; name=x\r\n\r\n"
    parts = {
        "a file": _filled(part, b"x", b"\r\n--cut--"),
        "nearly boundaries": _filled(part, b"\r\n--cu", b"\r\n--cut--"),
        "preamble": _filled(b"\r\n", b"--cu\r\n", b"--cut--"),
        "parts": _filled(b"", part + b"\r\n", b"--cut--"),
    }
    heads = {
        "parameters": _filled(part[:-8], b"; x=y", b"\r\n\r\n"),
        "a quoted string": _filled(part[:-8] + b'; x="', b"\\x", b"\r\n\r\n"),
        "blanks": _filled(part[:-8] + b";", b" ", b"\r\n\r\n"),
        "lines": _filled(part[:-2], b"x:y\r\n", b"\r\n"),
    }
    types = {
        "parameters": _filled(form, b";x=y"),
        "quotes": _filled(form + b';x="', b'\\"'),
        "blanks": _filled(form, b" ;"),
    }
    as_form = _json(lambda data: drain(read_form(data, form.decode())))
    yield "form", body, as_form, parts
    yield "head of a part", 16 << 10, as_form, heads
    yield "content type of a form", head, _json(lambda text: drain(read_form(b"", text.decode()))), types
    pumps = (b"9", b"1s", b".", b" ")
    duration = _json(lambda value: parse_duration_s(value.decode()))
    yield "time to wait", head, duration, {repr(pump.decode()): _filled(b"", pump, b"x") for pump in pumps}
    record = RequestExit(request_id="", method="POST", path="/")
    slo = _header("x-slo-ttft-ms", lambda fields: _IDENTITY["header:x-s"].classify(record, fields, True, "m", "m"))
    yield "objective in ms", head, slo, {repr(pump.decode()): _filled(b" ", pump, b"x") for pump in pumps}
    yield "header", head, _header("x-request-id", request_id), {"request id": _filled(b"", b"x")}
    yield "header", head, _header("authorization", _KEYS.check), {"key": _filled(b"Bearer ", b" x")}
    cookies = {
        repr((before + pump).decode()): _filled(before, pump)
        for pump in (b"a=b;", b"=", b';"', b'a="\\', b" ", b"\\1")
        for before in (b"", b's="')
    }
    yield "cookies", head, _session("cookie:s", "cookie"), cookies
    connection = _json(lambda value: named_in_connection([("Connection", value.decode())]))
    yield "header", head, connection, {"fields of a hop": _filled(b"", b"a, ")}
    answer_field = _json(lambda value: to_client([("x", value.decode("utf-8", "surrogateescape"))]))
    yield "answer", 256 << 10, answer_field, {"a field": _filled(b"", b"\x01\xff")}
    events = {
        "one event": _filled(b'data: {"id":"', b"x"),
        "blanks before a choice": _filled(b'data: {"choices": [', b" "),
        "line feeds": _filled(b"data: ", b"\n\r"),
        "names of usage": _filled(b"data: {", b'"usage":{', b"\n\n"),
        "no choices": _filled(b"data: {", b'"choices":[ ', b"\n\n"),
        "small events": _filled(b"", b"data: {}\n\n"),
    }
    for piece_bytes in (64, MIB):
        for hide in (False, True):
            how = f"stream in pieces of {piece_bytes}{', hiding' if hide else ''}"
            yield how, 2 * BUFFERED_BYTES_MAX, _fed(piece_bytes, hide), events
    yield "answer", USAGE_TAIL_BYTES, usage_in_tail, {"the end": _filled(b"", b'"usage":{')}
    chat = {"a stream": _filled(b"", b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')}
    yield "captured answer", ANSWER_BYTES_MAX, lambda raw: drain(parse_answer(raw, BodyKind.CHAT)), chat
    response = {"a response": _filled(b"{", b"\ndata:")}
    yield "captured answer", ANSWER_BYTES_MAX, lambda raw: drain(parse_answer(raw, BodyKind.RESPONSES)), response
    running = b"vllm:num_requests_running 1\n"
    pages = {
        "lines": _filled(b"", running),
        "names in a line": _filled(b"", b"vllm:num_requests_running"),
        "labels": _filled(running + b"vllm:cache_config_info{", b'a="",', b"} 1\n"),
        "escapes": _filled(running + b'vllm:lora_requests_info{running_lora_adapters="', b"\\n", b'"} 1'),
        "caches": _filled(running, b'vllm:cache_config_info{block_size="16"} 1\n'),
        "blanks": _filled(running + b"vllm:cache_config_info{", b" ", b"} 1\n"),
        "braces": _filled(running + b"vllm:cache_config_info{", b"}"),
    }
    yield "page of metrics", PAGE_BYTES_MAX, _json(lambda page: drain(parse_reading(page, 0.0))), pages
    yield "page of metrics, filtered?", PAGE_BYTES_MAX, is_filtered, pages
    models = {
        "cards": _filled(b'{"data":[', b'{"id":"a"},', b'{"id":"b"}]}'),
        "lists": _filled(b'{"data":[{"id":"a","x":[', b"[],", b"[]]}]}"),
        "open": _filled(b"", b"["),
    }
    yield "list of models", PAGE_BYTES_MAX, _json(lambda page: drain(parse_listing(page, 0.0))), models
    nested = {"open brackets": _filled(b"", b"[")}
    yield "answer about an adapter", ADAPTER_BYTES_MAX, lambda answer: _message(400, answer), nested


def _scanned(prefixes: bool, body: bytes) -> None:
    drain(read_large(body, BodyKind.CHAT, prefixes, "user"))


def _parsed(body: bytes) -> None:
    # Like the body reader: bodies that are too dense are scanned.
    if parses_at_once(body):
        read_small(body, BodyKind.CHAT, "user")
        prompt_chain({"messages": []}, BodyKind.CHAT)


@dataclass(frozen=True)
class Growth:
    """The seconds that a reader took for a text at each length."""

    name: str
    lengths: tuple[int, ...]
    took_s: tuple[float, ...]

    @property
    def exponent(self) -> float:
        """The exponent of time over length, from the shortest text to the longest."""
        doublings = log2(self.lengths[-1] / self.lengths[0])
        return log2(max(self.took_s[-1], 1e-9) / max(self.took_s[0], 1e-9)) / doublings

    @property
    def linear(self) -> bool:
        """Whether the time grows linearly, within the precision of the clock."""
        return self.took_s[-1] < QUICK_S or self.exponent < EXPONENT_MAX


def growth(name: str, largest: int, run: Callable[[int], Callable[[], object]]) -> Growth:
    """Measures a reader at doubling lengths up to `largest`."""
    lengths = tuple(largest >> (LENGTHS - 1 - step) for step in range(LENGTHS))
    return Growth(name, lengths, tuple(cpu_s(run(length)) for length in lengths))


def growth_of_parser(parser: Parser, largest: int) -> Growth:
    def run(length: int) -> Callable[[], object]:
        text = parser.text(length)
        return lambda: parser.read(text)

    return growth(parser.name, largest, run)


def growth_of_pattern(found: Found) -> Growth:
    """Measures a pattern with its slowest text. A pattern that is not linear is measured with short texts only."""
    text, linear = slowest(found)
    chars = PATTERN_CHARS if linear else 24

    def run(length: int) -> Callable[[], object]:
        given = text(length)
        return lambda: found.run(given)

    return growth(f"{found.where} {'/'.join(found.methods)} {text(8)!r}", chars, run)


def show(title: str, growths: Iterable[Growth]) -> bool:
    """Prints each result as soon as it is measured. Returns whether all are linear."""
    table, linear = Table(title, "largest", "ms at 1/8", "1/4", "1/2", "whole", "exponent"), True
    for one in growths:
        took_ms = (f"{took_s * 1e3:.3f}" for took_s in one.took_s)
        exponent = "quick" if one.took_s[-1] < QUICK_S else f"{one.exponent:.2f}{'' if one.linear else ' NOT LINEAR'}"
        table.row(one.name[:64], one.lengths[-1], *took_ms, exponent)
        linear = linear and one.linear
    print()
    return linear


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts.linear", description=__doc__)
    parser.add_argument("--largest", type=int, default=1 << 40, help="No text is longer than so many bytes.")
    largest: int = parser.parse_args().largest
    patterns = show("Patterns", map(growth_of_pattern, found_patterns()))
    texts = show("Parsers", (growth_of_parser(parser, min(largest, parser.largest)) for parser in parsers()))
    return 0 if patterns and texts else 1


if __name__ == "__main__":
    sys.exit(main())
