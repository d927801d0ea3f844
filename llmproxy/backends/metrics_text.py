"""Parses a backend's `/metrics` page into a `Reading`, in slices that do not block the event loop.

A page of vLLM has about 70 kB of histograms, and each backend is scraped several times a second. A general parser
would cost more than the proxying itself, so this parser reads only the lines that it needs.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from math import isfinite

from llmproxy.core.domain import Reading

RUNNING = b"vllm:num_requests_running"
WAITING = b"vllm:num_requests_waiting"
KV_USED = b"vllm:kv_cache_usage_perc"
KV_USED_OLD = b"vllm:gpu_cache_usage_perc"
CACHE_CONFIG = b"vllm:cache_config_info"
LORA_INFO = b"vllm:lora_requests_info"
WAITING_BY_REASON = b"vllm:num_requests_waiting_by_reason"
GENERATED = b"vllm:generation_tokens_total"

METRIC_NAMES: tuple[str, ...] = tuple(
    name.decode()
    for name in (RUNNING, WAITING, KV_USED, KV_USED_OLD, CACHE_CONFIG, LORA_INFO, WAITING_BY_REASON, GENERATED)
)
"""The names of the metrics that a scrape asks for, if the backend can filter its page."""

_OTHER_NAMES = (
    (b"ray_vllm_", b"vllm:"),
    (b"vllm_", b"vllm:"),
    (b"sglang:num_running_reqs", RUNNING),
    (b"sglang:num_queue_reqs", WAITING),
    (b"sglang:token_usage", KV_USED),
)
"""Beginning of a series name -> its beginning in vLLM, for Ray Serve, collectors that allow no colon, and SGLang."""

LABELS_BYTES_MAX = 64 << 10
"""The maximum bytes of the labels of a series. vLLM's longest labels have 1 KB, plus the names of waiting adapters."""

_LINES_PER_SLICE = 256
_LABELS_BYTES_PER_SLICE = 4 << 10
_JUDGED_BYTES = 128 << 10
_NUMBER_BYTES_MAX = 64
_VALUE_MAX = 1e15
_FOREIGN_LINE = re.compile(rb"^(?!#|[ \t\r]*$|(?:%s)\b)" % b"|".join(n.encode() for n in METRIC_NAMES), re.MULTILINE)
# Possessive quantifiers, and matches that begin where the last label ended: the time is linear in the text.
_LABEL = re.compile(rb'[\s,]*+([A-Za-z_][A-Za-z0-9_]*+)\s*+=\s*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def parse_reading(text: bytes, taken_at_s: float) -> Generator[None, None, Reading | None]:
    """Parses the load of one backend from its metrics page.

    `taken_at_s` is the time when the scrape was sent. If the page covers several engines, requests and tokens are
    summed, and the KV cache usage is averaged. Returns None for a page with neither metric of running nor of waiting
    requests: it is no page of an engine, and zeroes would mean an idle engine. Yields after at most some milliseconds
    of work. Raises ValueError, with a reason for people, if labels exceed LABELS_BYTES_MAX.
    """
    if RUNNING not in text:
        text = yield from _in_our_names(text)
    running = yield from _values(text, RUNNING)
    waiting = yield from _values(text, WAITING)
    if not running and not waiting:
        return None
    kv_used = (yield from _values(text, KV_USED)) or (yield from _values(text, KV_USED_OLD))
    adapters, max_adapters = yield from _newest_adapters(text)
    generated = yield from _values(text, GENERATED)
    return Reading(
        taken_at_s=taken_at_s,
        running=round(sum(running)),
        waiting=round(sum(waiting)),
        kv_used=min(1.0, sum(kv_used) / len(kv_used)) if kv_used else None,
        kv_tokens=(yield from _kv_tokens(text)),
        running_adapters=adapters,
        max_adapters=max_adapters,
        deferred=round(sum((yield from _values(text, WAITING_BY_REASON, b'"deferred"')))),
        generated=round(sum(generated)) if generated else None,
        engines=len(generated) or 1,
    )


def _in_our_names(text: bytes) -> Generator[None, None, bytes]:
    text = b"\n" + text
    for theirs, ours in _OTHER_NAMES:
        if (name := b"\n" + theirs) in text:
            text = text.replace(name, b"\n" + ours)
            yield
    return text


def is_filtered(text: bytes) -> bool:
    """Returns whether a metrics page has only the requested series, so the server applied the filter.

    Reads only the first _JUDGED_BYTES, because an unfiltered page begins with metrics of the server's own process.
    """
    end = len(text) if len(text) <= _JUDGED_BYTES else text.rfind(b"\n", 0, _JUDGED_BYTES) + 1
    return _FOREIGN_LINE.search(text, 0, end) is None


def _samples(text: bytes, name: bytes) -> Iterator[tuple[bytes, bytes] | None]:
    """Yields each line of the metric `name` as (labels, rest of the line). Yields None when the caller should pause."""
    at, names = -1, 0
    while (at := text.find(name, at + 1)) >= 0:
        names += 1
        if names % _LINES_PER_SLICE == 0:
            yield None
        if at and text[at - 1] != 0x0A:
            continue
        end = text.find(b"\n", at)
        line = text[at + len(name) : end if end >= 0 else len(text)]
        if line[:1] == b"{":
            # A label may hold any character, a brace too; only a number follows the labels.
            close = line.rfind(b"}")
            if close > 0:
                yield line[1:close], line[close + 1 :]
        elif line[:1] in (b" ", b"\t"):
            yield b"", line


def _number(rest: bytes) -> float | None:
    """Returns the number at the beginning of `rest`; None for NaN, infinity, and negative or absurd values."""
    try:
        value = float(rest[:_NUMBER_BYTES_MAX].split(None, 1)[0])
    except (ValueError, IndexError):
        return None
    return value if isfinite(value) and 0 <= value <= _VALUE_MAX else None


def _values(text: bytes, name: bytes, label: bytes = b"") -> Generator[None, None, list[float]]:
    """Returns the values of a metric. `label`: only series whose labels contain this text."""
    values = []
    for sample in _samples(text, name):
        if sample is None:
            yield
        elif label in sample[0] and (value := _number(sample[1])) is not None:
            values.append(value)
    return values


def _newest_adapters(text: bytes) -> Generator[None, None, tuple[frozenset[str], int | None]]:
    # Each combination of adapters leaves a series, whose value is the time when it last ran.
    newest_s, newest = -1.0, None
    for sample in _samples(text, LORA_INFO):
        if sample is None:
            yield
        elif (at_s := _number(sample[1])) is not None and at_s > newest_s:
            newest_s, newest = at_s, sample[0]
    if newest is None:
        return frozenset(), None
    found = _labels(newest)
    names = (name.strip() for name in found.get("running_lora_adapters", "").split(","))
    return frozenset(name for name in names if name), _whole(found.get("max_lora"))


def _kv_tokens(text: bytes) -> Generator[None, None, int | None]:
    total, read_bytes = None, 0
    for sample in _samples(text, CACHE_CONFIG):
        if sample is None:
            yield
            continue
        found = _labels(sample[0])
        read_bytes += len(sample[0])
        if read_bytes > _LABELS_BYTES_PER_SLICE:
            read_bytes = 0
            yield
        tokens = _whole(found.get("kv_cache_size_tokens"))
        if tokens is None:
            blocks, block_tokens = _whole(found.get("num_gpu_blocks")), _whole(found.get("block_size"))
            tokens = blocks * block_tokens if blocks is not None and block_tokens is not None else None
        if tokens is not None:
            total = (total or 0) + tokens
    return total


def _whole(text: str | None) -> int | None:
    """Parses an integer label value; None for `"None"`, which vLLM writes for an unset value."""
    number = _number(text.encode()) if text is not None else None
    return None if number is None else int(number)


def _labels(text: bytes) -> dict[str, str]:
    if len(text) > LABELS_BYTES_MAX:
        raise ValueError(f"a series has {len(text)} bytes of labels, more than the {LABELS_BYTES_MAX} that are read")
    found, at = {}, 0
    while match := _LABEL.match(text, at):
        name, value = match[1].decode(), match[2].decode("utf-8", "replace")
        if "\\" in value:
            value = _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], value)
        found[name] = value
        at = match.end()
    return found
