"""Trace files, read line by line. Every error names its file and line."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

from llmproxy.lab.traces import decisions
from llmproxy.lab.traces.arrival import Arrival, Trace, TraceError
from llmproxy.lab.traces.formats import Layout, LineError, recognise

LINE_BYTES_MAX = 16 << 20
GZIP_MAGIC = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"  # A byte order mark, which some spreadsheets write before the header.


def open_trace(path: Path) -> Trace:
    """Returns the trace in a file, gzipped or not. The first nonempty line shows its format.

    Each call of `Trace.arrivals` reads the file again, line by line. A decision log is in the order of the ends, so it
    is read twice, and the requests that arrived within the longest duration of a request are in memory.

    Raises TraceError for a file that cannot be read, is empty, or has an unknown format. `Trace.arrivals` raises
    TraceError as `FILE:LINE: reason` for an invalid line.
    """
    if path.exists() and not path.is_dir() and not path.is_file():
        raise TraceError(f"{path}: not a regular file; a trace is read once per run, so save it to a file first")
    lines = partial(_lines, path)
    for number, line in islice(lines(), 1):
        if decisions.is_log(line):
            try:
                block_tokens = decisions.block_tokens(line)
            except LineError as error:
                raise TraceError(f"{path}:{number}: {error}") from None
            return Trace(_name(path), partial(decisions.arrivals, path, lines), block_tokens)
    _, layout = _begin(path, lines())
    return Trace(_name(path), partial(_read, path), layout.block_tokens)


def _name(path: Path) -> str:
    name = path.name
    for suffix in (".gz", ".jsonl", ".csv"):
        name = name.removesuffix(suffix)
    return name


def _begin(path: Path, lines: Iterator[tuple[int, str]]) -> tuple[tuple[int, str], Layout]:
    """Returns the first nonempty line, and the layout of its file."""
    for number, line in lines:
        try:
            return (number, line), recognise(line)
        except LineError as error:
            raise TraceError(f"{path}:{number}: {error}") from None
    raise TraceError(f"{path}: no requests: the file is empty")


def _read(path: Path) -> Iterator[Arrival]:
    lines = _lines(path)
    (number, line), layout = _begin(path, lines)
    parse, last_s, found = layout.parse, 0.0, False
    try:
        if not layout.header:
            arrival = parse(line)
            last_s, found = arrival.at_s, True
            yield arrival
        for number, line in lines:  # noqa: B007 (the number is for the message below)
            arrival = parse(line)
            if arrival.at_s < last_s:
                raise LineError(
                    f"arrives at {arrival.at_s:g} s, before the request above it at {last_s:g} s: sort the file by time"
                )
            last_s, found = arrival.at_s, True
            yield arrival
    except LineError as error:
        raise TraceError(f"{path}:{number}: {error}") from None
    if not found:
        raise TraceError(f"{path}: no requests: there is nothing below the first line")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number, line) of each nonempty line. Raises TraceError for bytes that are no text."""
    number = 0
    try:
        with path.open("rb") as raw:
            # The magic bytes are checked, because the suffix of a download is often wrong.
            zipped = raw.peek(2)[:2] == GZIP_MAGIC
            stream = cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 16) if zipped else raw)
            while line := stream.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise TraceError(f"{path}:{number}: the line is longer than {LINE_BYTES_MAX >> 20} MB")
                text = line.removeprefix(BOM).decode() if number == 1 else line.decode()
                if text := text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}:{number}: not UTF-8 text: {error.reason} at byte {error.start + 1}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}:{number + 1}: the gzip stream is broken: {error}; fetch the file again") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
