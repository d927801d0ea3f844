"""The lines of trace files, in published formats and in this project's format.

- Mooncake JSONL: `timestamp` in ms, `input_length`, `output_length`, `hash_ids` of 512-token blocks, and the optional
  fields of this project's format.
- Azure CSV: `TIMESTAMP` (absolute; counted from the first row), `ContextTokens`, `GeneratedTokens`.
- ServeGen CSV: `t_s`, `client`, `input_tokens`, `output_tokens`, and `reason_ratio`, which is ignored.
- arena CSV: `t_s`, `client`, `prompt_tokens`, `output_tokens`. In both formats a client is a tenant.
- This project's JSONL: the fields of `Arrival` by name. `at_s`, `prompt_tokens` and `output_tokens` are required.
  `criticality` is the band. `model` is the same as `adapter`, and `deadline_s` (after the arrival) the same as
  `max_wait_s`. A first line `{"llmproxy_trace": 1, "block_tokens": 512}` may set the size of a block.

The module `decisions` reads decision logs of the proxy.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from math import isfinite, nan
from typing import Any

import orjson

from llmproxy.config.value_types import nearest
from llmproxy.lab.traces.arrival import BASE_MODEL, Arrival

LENGTH_TOKENS_MAX = 10_000_000
TIME_MAX_S = 366 * 86_400.0  # A larger time is probably a calendar time. The replay would wait until then.
BLOCK_TOKENS_MAX = 1 << 20
NAME_CHARS_MAX = 512
MOONCAKE_BLOCK_TOKENS = 512
VERSION = 1

KNOWN = (
    "known are Mooncake JSONL (timestamp, input_length, output_length, hash_ids), "
    "Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens), ServeGen CSV (t_s,client,input_tokens,output_tokens), "
    "arena CSV (t_s,client,prompt_tokens,output_tokens), our own JSONL (at_s, prompt_tokens, output_tokens, ...) and "
    "decision logs of the proxy"
)


class LineError(Exception):
    """A line that cannot be replayed. The message is the reason, without file and line."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Parses the lines of one file. With `header`, the first line is no request.

    `parse` raises LineError. It may store the time of the first request, so each reading of a file needs a new layout.
    """

    parse: Callable[[str], Arrival]
    header: bool
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


def recognise(line: str) -> Layout:
    """Returns the layout of a file that begins with this line. Raises LineError."""
    return _json_layout(object_of(line)) if line.startswith("{") else _csv_layout(_fields(line))


# --- JSON lines -------------------------------------------------------------------------------------------------------

MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
REQUIRED = ("at_s", "prompt_tokens", "output_tokens")
HEADER = ("llmproxy_trace", "block_tokens")
NAMES = {"tenant": "tenant", "adapter": "adapter", "model": "adapter", "session": "session"}
SPANS = {"max_wait_s": "max_wait_s", "deadline_s": "max_wait_s", "ttft_slo_s": "ttft_slo_s", "tpot_slo_s": "tpot_slo_s"}
MORE = ("criticality", *NAMES, *SPANS)
OWN = (*REQUIRED, "blocks", *MORE)


def _json_layout(first: Mapping[str, Any]) -> Layout:
    if HEADER[0] in first:
        return _headed(first)
    if not first.keys().isdisjoint(REQUIRED):
        return Layout(partial(_own, MOONCAKE_BLOCK_TOKENS), header=False)
    if not first.keys().isdisjoint(MOONCAKE):
        return Layout(_mooncake, header=False)
    raise LineError(f"a trace of unknown format; {KNOWN}")


def _headed(first: Mapping[str, Any]) -> Layout:
    _all_known(first, HEADER)
    version, block_tokens = first[HEADER[0]], first.get(HEADER[1], MOONCAKE_BLOCK_TOKENS)
    if type(version) is not int or version != VERSION:
        raise LineError(f"llmproxy_trace is {_quoted(version)}; only version {VERSION} is known")
    return Layout(partial(_own, count_of("block_tokens", block_tokens, BLOCK_TOKENS_MAX)), True, block_tokens)


def _own(block_tokens: int, line: str) -> Arrival:
    given = object_of(line)
    _all_known(given, OWN)
    _all_there(given, REQUIRED)
    at_s, prompt_tokens = seconds_of("at_s", given["at_s"]), count_of("prompt_tokens", given["prompt_tokens"])
    output_tokens = count_of("output_tokens", given["output_tokens"])
    optional = optionals_of({key: value for key, value in given.items() if key not in REQUIRED})
    if "blocks" in optional:
        _fit("blocks", optional["blocks"], prompt_tokens + output_tokens, block_tokens)
    return Arrival(at_s, prompt_tokens, output_tokens, **optional)


def optionals_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Maps fields of `Arrival` to values, for the optional keys."""
    optional: dict[str, Any] = {}
    for key, value in given.items():
        if value is None:
            continue
        field, checked = _optional(key, value)
        if field in optional:
            aliases = " and ".join(k for k in OWN if k in given and (NAMES | SPANS).get(k) == field)
            raise LineError(f"{aliases} mean the same; give one of them")
        optional[field] = checked
    if optional.get("adapter") == BASE_MODEL:
        del optional["adapter"]
    return optional


def _optional(key: str, value: Any) -> tuple[str, Any]:
    """Returns the field of `Arrival` for a key, and its value."""
    if key in SPANS:
        return SPANS[key], _span(key, value)
    if key in NAMES:
        return NAMES[key], _text(key, value)
    if key == "blocks":
        return "blocks", _ids(key, value)
    return "band", value if type(value) is int else _text(key, value).strip().lower()


def _mooncake(line: str) -> Arrival:
    given = object_of(line)
    _all_there(given, MOONCAKE)
    # Unknown keys of another project's format are ignored.
    more = {key: value for key, value in given.items() if key in MORE}
    prompt_tokens = count_of("input_length", given["input_length"])
    output_tokens = count_of("output_length", given["output_length"])
    ids = _ids("hash_ids", given["hash_ids"])
    _fit("hash_ids", ids, prompt_tokens, MOONCAKE_BLOCK_TOKENS)
    at_s = seconds_of("timestamp", given["timestamp"], 1e-3)
    return Arrival(at_s, prompt_tokens, output_tokens, ids, **optionals_of(more))


def object_of(line: str) -> dict[str, Any]:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise LineError(f"not valid JSON: {error}; if this is the last line, the file was cut off") from None
    if not isinstance(found, dict):
        raise LineError(f"not a JSON object but {_quoted(found)}")
    return found


def _all_known(given: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            raise LineError(f'unknown key {_quoted(key)} (nearest: "{nearest(key, known)}")')


def _all_there(given: Mapping[str, Any], required: Sequence[str]) -> None:
    missing = [key for key in required if key not in given]
    if missing:
        raise LineError(f"{', '.join(missing)} missing")


def count_of(name: str, value: Any, most: int = LENGTH_TOKENS_MAX) -> int:
    if type(value) is not int:
        raise LineError(f"{name} is {_quoted(value)}; should be an integer")
    if not 1 <= value <= most:
        raise LineError(f"{name} is {value}; should be 1 to {most:,}")
    return value


def seconds_of(name: str, value: Any, unit_s: float = 1.0) -> float:
    if type(value) not in (int, float) or not isfinite(value):
        raise LineError(f"{name} is {_quoted(value)}; should be a number")
    at_s = float(value * unit_s)
    if not 0 <= at_s <= TIME_MAX_S:
        raise LineError(f"{name} is {value}; times count from the start of the trace, at most {TIME_MAX_S:,.0f} s")
    return at_s


def _span(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= TIME_MAX_S:
        raise LineError(f"{name} is {_quoted(value)}; should be a number of seconds above 0")
    return float(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= NAME_CHARS_MAX:
        raise LineError(f"{name} is {_quoted(value)}; should be a text of 1 to {NAME_CHARS_MAX} characters")
    return value


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        raise LineError(f"{name} should be a list of integers, none below 0")
    return tuple(value)


def _fit(name: str, ids: Sequence[int], tokens: int, block_tokens: int) -> None:
    room = -(-tokens // block_tokens)
    if len(ids) > room:
        raise LineError(f"{name} has {len(ids)} blocks, but {tokens:,} tokens fill {room} of {block_tokens} tokens")


def _quoted(value: Any) -> str:
    """Returns a value as JSON, cut for a message."""
    text = orjson.dumps(value, default=str).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- CSV --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Columns:
    format: str
    at: str
    prompt: str
    output: str
    client: str | None = None
    ignored: tuple[str, ...] = ()

    def required(self) -> list[str]:
        return [name for name in (self.at, self.client, self.prompt, self.output) if name is not None]


SERVEGEN = _Columns("ServeGen", "t_s", "input_tokens", "output_tokens", "client", ("reason_ratio",))
ARENA = _Columns("arena", "t_s", "prompt_tokens", "output_tokens", "client")
AZURE = _Columns("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _csv_layout(header: Sequence[str]) -> Layout:
    names = [name.strip() for name in header]
    # The format with the most columns in common is assumed. Of several such formats, it is the first.
    meant = max((SERVEGEN, ARENA, AZURE), key=lambda columns: len(set(columns.required()) & set(names)))
    if meant.at not in names and meant.prompt not in names:
        raise LineError(f"a trace of unknown format; {KNOWN}")
    for name in meant.required():
        if names.count(name) != 1:
            fault = "no column" if name not in names else "more than one column"
            raise LineError(f"{fault} {name}, which {meant.format} CSV has: {','.join(meant.required())}")
    known = (*meant.required(), *meant.ignored)
    for name in names:
        if name not in known:
            raise LineError(f'unknown column {_quoted(name)} in {meant.format} CSV (nearest: "{nearest(name, known)}")')
    time_of = _Stamps() if meant is AZURE else _number
    return Layout(partial(_row, meant, [names.index(name) for name in meant.required()], len(names), time_of), True)


def _row(
    columns: _Columns, places: Sequence[int], width: int, time_of: Callable[[str, str], float], line: str
) -> Arrival:
    fields = _fields(line)
    if len(fields) != width:
        raise LineError(f"{len(fields)} columns where the header has {width}")
    prompt_tokens = _digits(columns.prompt, fields[places[-2]])
    output_tokens = _digits(columns.output, fields[places[-1]])
    at_s = time_of(columns.at, fields[places[0]])
    if columns.client is None:
        return Arrival(at_s, prompt_tokens, output_tokens)
    return Arrival(at_s, prompt_tokens, output_tokens, (), _text(columns.client, fields[places[1]].strip()))


def _fields(line: str) -> list[str]:
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise LineError(f"not valid CSV: {error}") from None


def _digits(name: str, text: str) -> int:
    text = text.strip()
    # int() takes underscores and the digits of every script, and is slow to refuse a very long number.
    if len(text) < 12 and text.isascii() and text.isdigit() and 1 <= (value := int(text)) <= LENGTH_TOKENS_MAX:
        return value
    raise LineError(f"{name} is {_quoted(text)}; should be an integer from 1 to {LENGTH_TOKENS_MAX:,}")


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise LineError(f"{name} is {_quoted(text)}; should be a number of seconds")
    return seconds_of(name, value)


class _Stamps:
    """Converts timestamps to seconds since the first one."""

    def __init__(self) -> None:
        self._first: datetime | None = None

    def __call__(self, name: str, text: str) -> float:
        try:
            stamp = datetime.fromisoformat(text.strip())
            self._first = self._first or stamp
            at_s = (stamp - self._first).total_seconds()
        except (ValueError, TypeError):
            raise LineError(f"{name} is {_quoted(text)}; should be like 2023-11-16 18:15:46.6805900") from None
        if at_s < 0:
            raise LineError(f"{name} {text} is before the first request: sort the file by time")
        return seconds_of(name, at_s)
