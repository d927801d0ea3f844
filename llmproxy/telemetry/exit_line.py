"""The line of a request that has ended: its fields by name, and the same as text.

Both are written out field by field, because every request pays for its line: a text made from the fields, one value
after the other, costs three times as much. A test holds the two together.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llmproxy.core.domain import Why
from llmproxy.telemetry.exit import RequestExit

_is_word = re.compile(r"[!#-<>-~]+").fullmatch


def exit_fields(ended: RequestExit) -> dict[str, Any]:
    """The record in reading order, without what was never known; seconds are rounded to 0.1 ms."""
    fields: dict[str, Any] = {"outcome": ended.outcome.value, "status": ended.status, "model": ended.model}
    if ended.target is not None and ended.target != ended.model:
        fields["target"] = ended.target
    if ended.tenant:
        fields["tenant"] = ended.tenant
    if ended.band is not None:
        fields["band"] = ended.band
    if ended.flow is not None:
        fields["flow"] = ended.flow
    if ended.backend is not None:
        fields["backend"] = ended.backend
    fields["attempts"] = ended.attempts
    if ended.preemptions:
        fields["withdrawals"] = ended.preemptions
    if ended.arrived_s is not None:
        fields["arrived_s"] = round(ended.arrived_s, 4)
    if ended.granted_s is not None:
        fields["granted_s"] = round(ended.granted_s, 4)
    if ended.queued_ahead is not None:
        fields["queued_ahead"] = ended.queued_ahead
    if ended.queue_wait_s is not None:
        fields["queue_wait_s"] = round(ended.queue_wait_s, 4)
    if ended.ttft_s is not None:
        fields["ttft_s"] = round(ended.ttft_s, 4)
    fields["duration_s"] = round(ended.duration_s, 4)
    if ended.met is not None:
        fields["met"] = ended.met
    if ended.unknown_objective is not None:
        fields["unknown_objective"] = ended.unknown_objective
    if ended.prompt_tokens is not None:
        fields["prompt_tokens"] = ended.prompt_tokens
    if ended.cached_tokens is not None:
        fields["cached_tokens"] = ended.cached_tokens
    if ended.expected_cached_tokens is not None:
        fields["expected_cached_tokens"] = ended.expected_cached_tokens
    if ended.output_tokens is not None:
        fields["output_tokens"] = ended.output_tokens
    fields["stream"] = ended.stream
    if ended.chunks:
        fields["chunks"] = ended.chunks
    if ended.max_gap_s is not None:
        fields["max_gap_s"] = round(ended.max_gap_s, 4)
    fields["body_bytes"] = ended.body_bytes
    fields["response_bytes"] = ended.response_bytes
    if ended.candidates is not None:
        fields["candidates"] = ended.candidates
    if ended.terms:
        fields["terms"] = {name: round(value, 4) for name, value in ended.terms}
    fields["method"] = ended.method
    fields["path"] = ended.path
    fields["request_id"] = ended.request_id
    if ended.error is not None:
        fields["error"] = ended.error
    return fields


def exit_text(ended: RequestExit) -> str:
    """The fields of the record as `name=value`, each value one printable word."""
    model = ended.model
    line = f"outcome={ended.outcome.value} status={ended.status} model={_words[model]}"
    if ended.target is not None and ended.target != model:
        line += f" target={_words[ended.target]}"
    if ended.tenant:
        line += f" tenant={_words[ended.tenant]}"
    if ended.band is not None:
        line += f" band={_words[ended.band]}"
    if ended.flow is not None:
        line += f" flow={_words[ended.flow]}"
    if ended.backend is not None:
        line += f" backend={_words[ended.backend]}"
    line += f" attempts={ended.attempts}"
    if ended.preemptions:
        line += f" withdrawals={ended.preemptions}"
    if ended.arrived_s is not None:
        line += f" arrived_s={_seconds(ended.arrived_s)}"
    if ended.granted_s is not None:
        line += f" granted_s={_seconds(ended.granted_s)}"
    if ended.queued_ahead is not None:
        line += f" queued_ahead={ended.queued_ahead}"
    if ended.queue_wait_s is not None:
        line += f" queue_wait_s={_seconds(ended.queue_wait_s)}"
    if ended.ttft_s is not None:
        line += f" ttft_s={_seconds(ended.ttft_s)}"
    line += f" duration_s={_seconds(ended.duration_s)}"
    if ended.met is not None:
        line += f" met={ended.met}"
    if ended.unknown_objective is not None:
        line += f" unknown_objective={shown(ended.unknown_objective)}"
    if ended.prompt_tokens is not None:
        line += f" prompt_tokens={ended.prompt_tokens}"
    if ended.cached_tokens is not None:
        line += f" cached_tokens={ended.cached_tokens}"
    if ended.expected_cached_tokens is not None:
        line += f" expected_cached_tokens={ended.expected_cached_tokens}"
    if ended.output_tokens is not None:
        line += f" output_tokens={ended.output_tokens}"
    line += f" stream={ended.stream}"
    if ended.chunks:
        line += f" chunks={ended.chunks}"
    if ended.max_gap_s is not None:
        line += f" max_gap_s={_seconds(ended.max_gap_s)}"
    line += f" body_bytes={ended.body_bytes} response_bytes={ended.response_bytes}"
    if ended.candidates is not None:
        line += f" candidates={ended.candidates}"
    if ended.terms:
        line += " terms={" + ",".join([f"{_words[name]}:{_seconds(value)}" for name, value in ended.terms]) + "}"
    line += f" method={_words[ended.method]} path={_words[ended.path]} request_id={shown(ended.request_id)}"
    return line if ended.error is None else f"{line} error={shown(ended.error)}"


def why_fields(why: Why) -> dict[str, Any]:
    """Why it was a request's turn, by the names that logs have for it; bands are integers here."""
    return {
        "waiting": {str(level): waiting for level, waiting in why.waiting},
        "flows": why.flows,
        "standing": {name: round(value, 4) for name, value in why.standing},
        "passed_over": why.passed_over,
        "guaranteed": why.guaranteed,
    }


def shown(value: object) -> str:
    """A value as one printable word: nothing in it can begin a line of its own or speak to the terminal."""
    if isinstance(value, str):
        if _is_word(value):
            return value
    elif isinstance(value, int | float):
        return str(value)
    elif isinstance(value, dict):
        return "{" + ",".join([f"{shown(key)}:{shown(inner)}" for key, inner in value.items()]) + "}"
    elif isinstance(value, list | tuple | set | frozenset):
        items = value if isinstance(value, list | tuple) else sorted(value, key=str)
        return "[" + ",".join([shown(item) for item in items]) + "]"
    text = str(value)
    plain = text.isprintable() and " " not in text and '"' not in text and "=" not in text
    return text if plain and text else json.dumps(text)


class _Words(dict[str, str]):
    """Names that come back with every request, as they are shown. Clients bring names too, so it is bounded."""

    NAMES_MAX = 1_024
    NAME_CHARS_MAX = 256

    def __missing__(self, name: str) -> str:
        word = shown(name)
        if len(self) < self.NAMES_MAX and len(name) <= self.NAME_CHARS_MAX:
            self[name] = word
        return word


_words = _Words()


def _seconds(value: float) -> str:
    """The text of `round(value, 4)`, for the half of the price."""
    text = "%.4f" % value  # noqa: UP031 - the fastest of the ways to format
    # Beyond 15 digits there may be shorter texts of the same number; behind the last digit stands no zero.
    return text if text[-1] != "0" and len(text) <= 16 else str(round(value, 4))
