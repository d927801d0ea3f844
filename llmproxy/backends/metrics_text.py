"""One page of a backend's `/metrics` becomes one `Reading`. Pure, and never raises: the page is somebody else's text.

Only the lines that matter are looked at. A page of vLLM is some 70 kB of histograms, scraped up to five times a second
from every backend, so a general parser would cost more than the proxying itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite

from llmproxy.core.domain import Reading

RUNNING = b"vllm:num_requests_running"
WAITING = b"vllm:num_requests_waiting"
KV_USED = b"vllm:kv_cache_usage_perc"
KV_USED_OLD = b"vllm:gpu_cache_usage_perc"
CACHE_CONFIG = b"vllm:cache_config_info"
LORA_INFO = b"vllm:lora_requests_info"

METRIC_NAMES: tuple[str, ...] = tuple(
    name.decode() for name in (RUNNING, WAITING, KV_USED, KV_USED_OLD, CACHE_CONFIG, LORA_INFO)
)
"""The names to ask for where a backend can filter its page."""

_VALUE_MAX = 1e15
_FOREIGN_LINE = re.compile(rb"^(?!#|[ \t\r]*$|(?:%s)\b)" % b"|".join(n.encode() for n in METRIC_NAMES), re.MULTILINE)
# Possessive, and matched one label after the other from a known place, so that no text takes more than linear time.
_LABEL = re.compile(rb'[\s,]*+([A-Za-z_][A-Za-z0-9_]*+)\s*+=\s*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def parse_reading(text: bytes, taken_at_s: float) -> Reading | None:
    """Read the load of one backend from its metrics page; `taken_at_s` is when the scrape was sent.

    Several engines behind one page are summed (requests, KV tokens) or averaged (KV use). None where neither running
    nor waiting requests are told: that is not a vLLM page, and a reading of zeroes would claim an idle engine.
    """
    running = list(_values(text, RUNNING))
    waiting = list(_values(text, WAITING))
    if not running and not waiting:
        return None
    kv_used = list(_values(text, KV_USED)) or list(_values(text, KV_USED_OLD))
    adapters, max_adapters = _newest_adapters(text)
    return Reading(
        taken_at_s=taken_at_s,
        running=round(sum(running)),
        waiting=round(sum(waiting)),
        kv_used=min(1.0, sum(kv_used) / len(kv_used)) if kv_used else None,
        kv_tokens=_kv_tokens(text),
        running_adapters=adapters,
        max_adapters=max_adapters,
    )


def is_filtered(text: bytes) -> bool:
    """Whether the page holds nothing but the series asked for, that is, whether the server honoured the filter."""
    return _FOREIGN_LINE.search(text) is None


def _samples(text: bytes, name: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Each line of the metric `name`, as (labels, rest of the line)."""
    at = -1
    while (at := text.find(name, at + 1)) >= 0:
        if at and text[at - 1] != 0x0A:
            continue
        end = text.find(b"\n", at)
        line = text[at + len(name) : end if end >= 0 else len(text)]
        if line[:1] == b"{":
            # A label may hold any character, a brace too; what follows the labels is but a number.
            close = line.rfind(b"}")
            if close > 0:
                yield line[1:close], line[close + 1 :]
        elif line[:1] in (b" ", b"\t"):
            yield b"", line


def _number(rest: bytes) -> float | None:
    """The value that opens `rest` (a time stamp may follow); None for NaN, infinity, negative or absurd values."""
    try:
        value = float(rest.split(None, 1)[0])
    except (ValueError, IndexError):
        return None
    return value if isfinite(value) and 0 <= value <= _VALUE_MAX else None


def _values(text: bytes, name: bytes) -> Iterator[float]:
    for _, rest in _samples(text, name):
        value = _number(rest)
        if value is not None:
            yield value


def _newest_adapters(text: bytes) -> tuple[frozenset[str], int | None]:
    # The engine never removes a series of this metric: each combination of adapters leaves one behind, whose value is
    # the time when it was last true.
    newest_s, newest = -1.0, None
    for labels, rest in _samples(text, LORA_INFO):
        at_s = _number(rest)
        if at_s is not None and at_s > newest_s:
            newest_s, newest = at_s, labels
    if newest is None:
        return frozenset(), None
    found = _labels(newest)
    names = (name.strip() for name in found.get("running_lora_adapters", "").split(","))
    return frozenset(name for name in names if name), _whole(found.get("max_lora"))


def _kv_tokens(text: bytes) -> int | None:
    total = None
    for labels, _ in _samples(text, CACHE_CONFIG):
        found = _labels(labels)
        tokens = _whole(found.get("kv_cache_size_tokens"))
        if tokens is None:
            blocks, block_tokens = _whole(found.get("num_gpu_blocks")), _whole(found.get("block_size"))
            tokens = blocks * block_tokens if blocks is not None and block_tokens is not None else None
        if tokens is not None:
            total = (total or 0) + tokens
    return total


def _whole(text: str | None) -> int | None:
    """A label value as an integer; None for the `"None"` that vLLM writes for whatever is not set."""
    number = _number(text.encode()) if text is not None else None
    return None if number is None else int(number)


def _labels(text: bytes) -> dict[str, str]:
    found, at = {}, 0
    while match := _LABEL.match(text, at):
        name, value = match[1].decode(), match[2].decode("utf-8", "replace")
        found[name] = _ESCAPE.sub(_unescape, value) if "\\" in value else value
        at = match.end()
    return found


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
