"""Decision logs of the proxy as traces, to replay real traffic under another policy.

A log has a line for each ended request, in the order of the ends, and a header at each start of the proxy. Times in the
log count from the last header; times of arrivals count from the first arrival of the file. Recorded decisions are
ignored. A request whose answer has no known length gets its model's mean length, and is marked as guessed. A request
without a tenant has its flow as tenant.

The record of `llmproxy shadow` also has the `blocks` of each request. Its header has their size, `block_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

from llmproxy.lab.traces.arrival import Arrival, TraceError, in_time_order
from llmproxy.lab.traces.formats import (
    BLOCK_TOKENS_MAX,
    MOONCAKE_BLOCK_TOKENS,
    LineError,
    count_of,
    object_of,
    optionals_of,
    seconds_of,
)

HEADER = "llmproxy_decisions"
VERSION = 1
MARKS = ("request_id", "outcome")  # Keys that identify a part of a log without a header.
TAKEN = ("tenant", "adapter", "session", "criticality", "max_wait_s", "ttft_slo_s", "tpot_slo_s", "blocks")

Lines = Callable[[], Iterator[tuple[int, str]]]


def is_log(first: str) -> bool:
    """Returns whether a file that begins with the line `first` is a decision log."""
    try:
        given = object_of(first)
    except LineError:
        return False
    return HEADER in given or all(key in given for key in MARKS)


def block_tokens(first: str) -> int:
    """Returns the size of the blocks of a log that begins with the line `first`. Raises LineError."""
    given = object_of(first).get("block_tokens", MOONCAKE_BLOCK_TOKENS)
    return count_of("block_tokens", given, BLOCK_TOKENS_MAX)


def arrivals(path: Path, lines: Lines) -> Iterator[Arrival]:
    """Yields the arrivals in a log in the order of their times. Raises TraceError as `FILE:LINE: reason`.

    The log is read twice. The first pass finds the lengths of answers, and how far lines are out of order. So the
    second pass has in memory only the arrivals within the duration of the longest request.
    """
    found = _FirstPass()
    for arrival, model in _logged(path, lines()):
        found.add(arrival, model)
    if not found.count:
        raise TraceError(f"{path}: no requests: there is nothing below the first line")
    counted = (found.answered(path, *logged) for logged in _logged(path, lines()))
    yield from in_time_order((arrival.at_s - found.late_s, [arrival]) for arrival in counted)


@dataclass(slots=True)
class _FirstPass:
    """The first pass over a log. No request arrived more than `late_s` before a request on an earlier line."""

    count: int = 0
    first_s: float = inf
    late_s: float = 0.0
    _newest_s: float = 0.0
    _answers: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, arrival: Arrival, model: str) -> None:
        self.count += 1
        self.first_s = min(self.first_s, arrival.at_s)
        self._newest_s = max(self._newest_s, arrival.at_s)
        self.late_s = max(self.late_s, self._newest_s - arrival.at_s)
        if not arrival.guessed:
            answers, tokens = self._answers.get(model, (0, 0))
            self._answers[model] = (answers + 1, tokens + arrival.output_tokens)

    def answered(self, path: Path, arrival: Arrival, model: str) -> Arrival:
        """Returns the arrival, with its time counted from the first arrival, and with a length for its answer.

        An unknown length is the mean of the model's answers, or of all answers if the model has none.
        """
        arrival = replace(arrival, at_s=arrival.at_s - self.first_s)
        if not arrival.guessed:
            return arrival
        if not self._answers:
            raise TraceError(f"{path}: no request got an answer, so that the length of one is unknown")
        own = self._answers.get(model)
        answers, tokens = own or [sum(column) for column in zip(*self._answers.values(), strict=True)]
        return replace(arrival, output_tokens=max(1, round(tokens / answers)))


def _logged(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[Arrival, str]]:
    """Yields each request with its model. The request is `guessed` if the length of its answer is unknown."""
    start_s = newest_s = 0.0
    began: datetime | None = None
    torn: TraceError | None = None
    number = 0
    try:
        for number, line in lines:
            try:
                given = object_of(line)
            except LineError as error:
                if torn is not None:
                    raise torn from None
                torn = TraceError(f"{path}:{number}: {error}")
                continue
            if HEADER in given:
                wall_time = _wall_time(given)
                began = began or wall_time
                # A wall clock may be set back, but requests after a start arrived later than requests before it.
                start_s = max(newest_s, (wall_time - began).total_seconds())
            elif torn is not None:
                raise torn
            else:
                arrival = _parsed(given, start_s)
                newest_s = max(newest_s, arrival.at_s)
                model = given.get("model")
                yield arrival, model if isinstance(model, str) else ""
            # An invalid line before a header or the end of the file was cut off when the proxy was killed.
            torn = None
    except LineError as error:
        raise TraceError(f"{path}:{number}: {error}") from None


def _wall_time(header: Mapping[str, Any]) -> datetime:
    if header[HEADER] != VERSION:
        raise LineError(f"{HEADER} is not {VERSION}, the only version that is known")
    try:
        wall_time = datetime.fromisoformat(header["wall_time"])
    except (KeyError, TypeError, ValueError):
        wall_time = None
    if wall_time is None or wall_time.tzinfo is None:
        raise LineError("wall_time should be like 2027-01-31T18:00:00+00:00")
    return wall_time


def _parsed(given: Mapping[str, Any], start_s: float) -> Arrival:
    at_s = seconds_of("at_s", given.get("at_s")) + start_s
    prompt_tokens = count_of("prompt_tokens", given.get("prompt_tokens"))
    output_tokens = given.get("output_tokens")
    if output_tokens == 0:
        # An embedding is complete without output tokens. Any other request without tokens got no answer.
        output_tokens = 1 if given.get("outcome") == "completed" else None
    optional = optionals_of({key: given[key] for key in TAKEN if key in given})
    if "tenant" not in optional and given.get("flow"):
        optional |= optionals_of({"tenant": given["flow"]})
    return Arrival(
        at_s,
        prompt_tokens,
        1 if output_tokens is None else count_of("output_tokens", output_tokens),
        guessed=output_tokens is None,
        whole=given.get("stream") is False,
        **optional,
    )
