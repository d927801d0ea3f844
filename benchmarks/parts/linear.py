"""Time against length for all readers of outside text: `python -m benchmarks.parts.linear`, over ten minutes, one core.

Two tables: every regular expression of the package (found in its source, see `patterns`) with the text that is slowest
for it, and every parser with texts up to the largest that the product accepts. The exponent compares the time for an
eighth of the length with that for the whole. Exits with 1 if one is above EXPONENT_MAX. With `--largest 1000000` no
text is longer than a megabyte, which takes two minutes.
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

MIB = 1 << 20
LENGTHS = 4
"""The number of lengths that are measured. Each is twice the one before."""
PATTERN_CHARS = 64 << 10
QUICK_S = 0.0002
"""What takes at most this for its largest text is too quick for a meaningful exponent."""

_LIMITS = Config()
_IDENTITY = {
    place: Identity(Config.model_validate({"scheduling": {"session": place}})) for place in ("header:x-s", "cookie:s")
}
_KEYS = Keys(_LIMITS)


@dataclass(frozen=True)
class Parser:
    """A reader of outside text. `text` makes a text of about a length, of which `largest` is the longest accepted."""

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
    """Every parser of outside text, with texts that are hard for it."""
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
    for name, text in shapes.items():
        for prefixes in (False, True):
            how = "scanned, chained" if prefixes else "scanned"
            read = _json(partial(_scanned, prefixes))
            yield Parser(f"JSON body {how}: {name}", body, text, read)
        yield Parser(f"JSON body parsed: {name}", PARSE_BYTES_MAX, text, _json(_parsed))
    form = b"multipart/form-data; boundary=cut"
    part = b"--cut\r\nContent-Disposition: form-data; name=x\r\n\r\n"
    parts = {
        "a file": _filled(part, b"x", b"\r\n--cut--"),
        "nearly boundaries": _filled(part, b"\r\n--cu", b"\r\n--cut--"),
        "preamble": _filled(b"\r\n", b"--cu\r\n", b"--cut--"),
        "parts": _filled(b"", part + b"\r\n", b"--cut--"),
    }
    for name, text in parts.items():
        yield Parser(f"form: {name}", body, text, _json(lambda data: drain(read_form(data, form.decode()))))
    heads = {
        "parameters": _filled(part[:-8], b"; x=y", b"\r\n\r\n"),
        "a quoted string": _filled(part[:-8] + b'; x="', b"\\x", b"\r\n\r\n"),
        "blanks": _filled(part[:-8] + b";", b" ", b"\r\n\r\n"),
        "lines": _filled(part[:-2], b"x:y\r\n", b"\r\n"),
    }
    for name, text in heads.items():
        yield Parser(
            f"head of a part: {name}", 16 << 10, text, _json(lambda data: drain(read_form(data, form.decode())))
        )
    types = {
        "parameters": _filled(form, b";x=y"),
        "quotes": _filled(form + b';x="', b'\\"'),
        "blanks": _filled(form, b" ;"),
    }
    for name, text in types.items():
        yield Parser(f"content type of a form: {name}", head, text, _json(lambda t: drain(read_form(b"", t.decode()))))
    for pump in (b"9", b"1s", b".", b" "):
        duration = _json(lambda value: parse_duration_s(value.decode()))
        yield Parser(f"time to wait: {pump.decode()!r}", head, _filled(b"", pump, b"x"), duration)
        slo = _header("x-slo-ttft-ms", lambda fields: _IDENTITY["header:x-s"].classify(fields, True, "m", "m"))
        yield Parser(f"objective in ms: {pump.decode()!r}", head, _filled(b" ", pump, b"x"), slo)
    yield Parser("request id", head, _filled(b"", b"x"), _header("x-request-id", request_id))
    yield Parser("key", head, _filled(b"Bearer ", b" x"), _header("authorization", _KEYS.check))
    for pump in (b"a=b;", b"=", b';"', b'a="\\', b" ", b"\\1"):
        for before in (b"", b's="'):
            cookies = _filled(before, pump)
            yield Parser(f"cookies: {(before + pump).decode()!r}", head, cookies, _session("cookie:s", "cookie"))
    connection = _json(lambda value: named_in_connection([("Connection", value.decode())]))
    yield Parser("fields of one hop", head, _filled(b"", b"a, "), connection)
    answer_field = _json(lambda value: to_client([("x", value.decode("utf-8", "surrogateescape"))]))
    yield Parser("field of an answer", 256 << 10, _filled(b"", b"\x01\xff"), answer_field)
    events = {
        "one event": _filled(b'data: {"id":"', b"x"),
        "blanks before a choice": _filled(b'data: {"choices": [', b" "),
        "line feeds": _filled(b"data: ", b"\n\r"),
        "names of usage": _filled(b"data: {", b'"usage":{', b"\n\n"),
        "no choices": _filled(b"data: {", b'"choices":[ ', b"\n\n"),
        "small events": _filled(b"", b"data: {}\n\n"),
    }
    for name, text in events.items():
        for piece_bytes in (64, MIB):
            for hide in (False, True):
                how = f"in pieces of {piece_bytes}{', hiding' if hide else ''}"
                yield Parser(f"stream {how}: {name}", 2 * BUFFERED_BYTES_MAX, text, _fed(piece_bytes, hide))
    yield Parser("end of an answer", USAGE_TAIL_BYTES, _filled(b"", b'"usage":{'), usage_in_tail)
    chat = _filled(b"", b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
    yield Parser("captured answer, a stream", ANSWER_BYTES_MAX, chat, lambda r: drain(parse_answer(r, BodyKind.CHAT)))
    tail = _filled(b"{", b"\ndata:")
    yield Parser(
        "captured answer, a response", ANSWER_BYTES_MAX, tail, lambda r: drain(parse_answer(r, BodyKind.RESPONSES))
    )
    pages = {
        "lines": _filled(b"", b"vllm:num_requests_running 1\n"),
        "names in a line": _filled(b"", b"vllm:num_requests_running"),
        "labels": _filled(b"vllm:num_requests_running 1\nvllm:cache_config_info{", b'a="",', b"} 1\n"),
        "escapes": _filled(
            b'vllm:num_requests_running 1\nvllm:lora_requests_info{running_lora_adapters="', b"\\n", b'"} 1'
        ),
        "caches": _filled(b"vllm:num_requests_running 1\n", b'vllm:cache_config_info{block_size="16"} 1\n'),
        "blanks": _filled(b"vllm:num_requests_running 1\nvllm:cache_config_info{", b" ", b"} 1\n"),
        "braces": _filled(b"vllm:num_requests_running 1\nvllm:cache_config_info{", b"}"),
    }
    for name, text in pages.items():
        yield Parser(f"page of metrics: {name}", PAGE_BYTES_MAX, text, _json(lambda p: drain(parse_reading(p, 0.0))))
        yield Parser(f"page of metrics, filtered?: {name}", PAGE_BYTES_MAX, text, is_filtered)
    models = {
        "cards": _filled(b'{"data":[', b'{"id":"a"},', b'{"id":"b"}]}'),
        "lists": _filled(b'{"data":[{"id":"a","x":[', b"[],", b"[]]}]}"),
        "open": _filled(b"", b"["),
    }
    for name, text in models.items():
        yield Parser(
            f"list of models: {name}", PAGE_BYTES_MAX, text, _json(lambda page: drain(parse_listing(page, 0.0)))
        )
    nested = _filled(b"", b"[")
    yield Parser("word on an adapter", ADAPTER_BYTES_MAX, nested, lambda answer: _message(400, answer))


def _scanned(prefixes: bool, body: bytes) -> None:
    drain(read_large(body, BodyKind.CHAT, prefixes, "user"))


def _parsed(body: bytes) -> None:
    # Like the body reader: bodies that are too dense are scanned.
    if parses_at_once(body):
        read_small(body, BodyKind.CHAT, "user")
        prompt_chain({"messages": []}, BodyKind.CHAT)


@dataclass(frozen=True)
class Growth:
    """The seconds that a text took at each length."""

    name: str
    lengths: tuple[int, ...]
    took_s: tuple[float, ...]

    @property
    def exponent(self) -> float:
        """The power of the length with which the time grew, from the shortest text to the longest."""
        doublings = log2(self.lengths[-1] / self.lengths[0])
        return log2(max(self.took_s[-1], 1e-9) / max(self.took_s[0], 1e-9)) / doublings

    @property
    def linear(self) -> bool:
        """Whether the time grows with the length alone, as far as the clock can show."""
        return self.took_s[-1] < QUICK_S or self.exponent < EXPONENT_MAX


def growth(name: str, largest: int, run: Callable[[int], Callable[[], object]]) -> Growth:
    """Measure at doubling lengths up to `largest`."""
    lengths = tuple(largest >> (LENGTHS - 1 - step) for step in range(LENGTHS))
    return Growth(name, lengths, tuple(cpu_s(run(length)) for length in lengths))


def growth_of_parser(parser: Parser, largest: int) -> Growth:
    def run(length: int) -> Callable[[], object]:
        text = parser.text(length)
        return lambda: parser.read(text)

    return growth(parser.name, largest, run)


def growth_of_pattern(found: Found) -> Growth:
    """A pattern with its slowest text. One that is not linear is measured at shorter lengths."""
    text, linear = slowest(found)
    chars = PATTERN_CHARS if linear else 24

    def run(length: int) -> Callable[[], object]:
        given = text(length)
        return lambda: found.run(given)

    return growth(f"{found.where} {'/'.join(found.methods)} {text(8)!r}", chars, run)


def show(title: str, growths: Iterable[Growth]) -> bool:
    """Print each as soon as it is measured. True if all are linear."""
    print(f"{title}\n{'':64} {'largest':>9}  ms at 1/8, 1/4, 1/2 and the whole of it {'exponent':>10}")
    linear = True
    for one in growths:
        took = " ".join(f"{took_s * 1e3:10.3f}" for took_s in one.took_s)
        exponent = "quick" if one.took_s[-1] < QUICK_S else f"{one.exponent:.2f}"
        verdict = "" if one.linear else "  NOT LINEAR"
        print(f"{one.name[:64]:64} {one.lengths[-1]:>9} {took} {exponent:>8}{verdict}", flush=True)
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
