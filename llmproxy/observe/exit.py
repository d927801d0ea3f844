"""The record of a request that has ended. Log line, decision log and metrics are made from it; see `exit_fields`."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from llmproxy.core.domain import Outcome, Slo, Stage, Verdict
from llmproxy.observe.trace_context import TraceContext
from llmproxy.scheduling.attempts import AttemptRecord

UNKNOWN_MODEL = "unknown"
"""The `model` of a request whose name is not in the catalogue: names that clients invent never become labels."""
ATTEMPTS_MAX = 16
"""Attempts in one record; a request with more of them has its latest ones."""
ERROR_CHARS_MAX = 2_000
"""Of the error in a record, which may quote a client: a pipe may mix a line that is longer than it takes at once (4 KB)
with the lines of other processes."""
_BEGINNING_CHARS = 160


class Split(StrEnum):
    """How a request was served in a pool whose backends have roles, or what kept it from being split.

    `split`: in two stages. `whole`: by one backend, because that was cheaper, or nothing else was possible. All others
    name the stage that failed, or the parameters between the two, after which one backend served the whole.
    """

    SPLIT = "split"
    WHOLE = "whole"
    PREFILL_FAILED = "prefill_failed"
    PREFILL_REFUSED = "prefill_refused"
    NO_PARAMETERS = "no_parameters"
    BAD_PARAMETERS = "bad_parameters"
    LATE = "late_parameters"
    UNREACHABLE = "unreachable"
    TRANSFER_FAILED = "transfer_failed"
    DECODE_FAILED = "decode_failed"
    DECODE_REFUSED = "decode_refused"


class RequestInput(Struct, kw_only=True, omit_defaults=True):
    """What was asked for, and as what it was scheduled. It holds no prompt and no key: `key` is the name of one.

    `path` has no query. `model` is the requested name where the catalogue knows it, else `UNKNOWN_MODEL`; `target` is
    the base model or adapter that it stands for, None where it is the same name; `adapter` is None for a base model.
    `unknown_model` begins the requested name where the catalogue does not know it; it is never a label.
    `tenant` is "" for clients without one. `level` is the band as an integer, `weight` the share of its
    flow, `max_wait_s` the longest wait for a backend, `unknown_objective` the name in the objective header that nobody
    configured. `arrived_s` is an instant on the scheduler's clock. `expected_prompt_tokens` is the estimate that the
    scheduler used.

    A request that was refused before it was scheduled has None for what was not known yet: its band, its estimate.
    """

    request_id: str
    method: str
    path: str
    model: str = UNKNOWN_MODEL
    unknown_model: str | None = None
    target: str | None = None
    adapter: str | None = None
    tenant: str = ""
    key: str | None = None
    client: str | None = None
    user_agent: str | None = None
    band: str | None = None
    level: int | None = None
    flow: str | None = None
    weight: float = 1.0
    max_wait_s: float | None = None
    slo: Slo | None = None
    unknown_objective: str | None = None
    stream: bool = False
    arrived_s: float | None = None
    body_bytes: int = 0
    expected_prompt_tokens: int | None = None

    @property
    def ttft_slo_s(self) -> float | None:
        return None if self.slo is None else self.slo.ttft_s

    @property
    def tpot_slo_s(self) -> float | None:
        return None if self.slo is None else self.slo.tpot_s


_NEVER_GRANTED = AttemptRecord()


class RequestRouting(Struct, kw_only=True, omit_defaults=True):
    """Where it waited and which backends it tried.

    `attempts` counts the backends tried, `preemptions` those given back for a request of a higher band; `tried` has the
    latest ATTEMPTS_MAX of them, in their order. Both stages of a split request are one attempt and have a record each.
    `queue_wait_s` is the time in the waiting room over all attempts, or from arrival to the end without a grant.
    `queued_s` is since when it waited at its end, None where it did not wait.

    `split` is None in a pool without roles. Where it is `split`, `prefill_backend` took `prefill_s` for the prompt from
    its grant on, and the first token came `handover_s` after that; without a stream, the second backend was asked then.
    """

    tried: tuple[AttemptRecord, ...] = ()
    attempts: int = 0
    preemptions: int = 0
    queue_wait_s: float | None = None
    queued_s: float | None = None
    split: Split | None = None
    prefill_backend: str | None = None
    prefill_s: float | None = None
    handover_s: float | None = None

    def note_split(self, split: Split) -> None:
        """Say how the request was split, by the records of its attempts."""
        self.split = split
        if len(self.tried) < 2 or self.last.stage is not Stage.DECODE:
            return
        prefill, decode = self.tried[-2:]
        self.prefill_backend = prefill.backend
        if prefill.granted_s is None or prefill.ended_s is None:
            return
        self.prefill_s = prefill.ended_s - prefill.granted_s
        began_s = decode.first_byte_s or decode.granted_s
        self.handover_s = None if began_s is None else began_s - prefill.ended_s

    @property
    def last(self) -> AttemptRecord:
        """The last attempt; without any, one in which nothing is known."""
        return self.tried[-1] if self.tried else _NEVER_GRANTED


class RequestResult(Struct, kw_only=True, omit_defaults=True):
    """What became of it. It holds no text of the answer.

    All durations are seconds: `duration_s` from arrival to the end, `ttft_s` from arrival to the first body byte handed
    to the client, `max_gap_s` the longest wait between two consecutive chunks. `met` says whether it kept its
    objective; None where it had none, or where its client is why it did not.
    """

    outcome: Outcome
    status: int
    duration_s: float
    met: bool | None = None
    ttft_s: float | None = None
    max_gap_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    response_bytes: int = 0
    chunks: int = 0
    error: str | None = None


class RequestExit(Struct):
    """One request, from what came in to what became of it."""

    input: RequestInput
    result: RequestResult
    routing: RequestRouting = field(default_factory=RequestRouting)
    trace: TraceContext | None = None

    @property
    def ended_s(self) -> float | None:
        """The end as an instant on the scheduler's clock."""
        return None if self.input.arrived_s is None else self.input.arrived_s + self.result.duration_s

    def later(self, by_s: float) -> RequestExit:
        """The same with all instants `by_s` later, as another clock has them."""

        def moved(at_s: float | None) -> float | None:
            return None if at_s is None else at_s + by_s

        tried = tuple(
            replace(
                one, queued_s=moved(one.queued_s), granted_s=moved(one.granted_s), first_byte_s=moved(one.first_byte_s),
                ended_s=moved(one.ended_s),
            )
            for one in self.routing.tried
        )  # fmt: skip
        routing = replace(self.routing, tried=tried, queued_s=moved(self.routing.queued_s))
        asked = replace(self.input, arrived_s=moved(self.input.arrived_s))
        return RequestExit(asked, self.result, routing, self.trace)

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt as the engine counted them, else as they were estimated."""
        return self.result.prompt_tokens or self.input.expected_prompt_tokens

    @property
    def backend_ttft_s(self) -> float | None:
        """Seconds from the last grant to the first body byte of a stream; None where there was no such byte."""
        ttft_s, arrived_s, granted_s = self.result.ttft_s, self.input.arrived_s, self.routing.last.granted_s
        if ttft_s is None or arrived_s is None or granted_s is None or not self.input.stream:
            return None
        return ttft_s - (granted_s - arrived_s)

    @property
    def streaming_s(self) -> float | None:
        """Seconds from the first body byte of a stream to its end; None where there was no such byte."""
        ttft_s = self.result.ttft_s
        return None if ttft_s is None or not self.input.stream else max(0.0, self.result.duration_s - ttft_s)

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean seconds per token after the first; None unless a stream of two or more known tokens was completed."""
        output_tokens, streaming_s = self.result.output_tokens or 0, self.streaming_s
        if self.result.outcome is not Outcome.COMPLETED or streaming_s is None or output_tokens < 2:
            return None
        return streaming_s / (output_tokens - 1)

    @property
    def mean_gap_s(self) -> float | None:
        """Mean seconds between two consecutive chunks; None with fewer than two."""
        chunks, streaming_s = self.result.chunks, self.streaming_s
        return None if streaming_s is None or chunks < 2 else streaming_s / (chunks - 1)


def shortened(error: str) -> str | None:
    """An error for a record; None for an empty one."""
    # Measured as JSON, which makes up to twelve characters of one.
    if len(error) > _BEGINNING_CHARS and len(json.dumps(error)) > ERROR_CHARS_MAX:
        return f"{error[:_BEGINNING_CHARS]}... ({len(error)} characters)"
    return error or None


class ExitSink(Protocol):
    """Takes note of what has ended."""

    def record(self, ended: RequestExit) -> None:
        """Take note of one request."""

    def attempted(self, backend: str, verdict: Verdict) -> None:
        """Count one attempt."""

    def log_lines_lost(self, lines: int) -> None:
        """Count lines that the standard error of a process could not take."""


class Exits:
    """The `ExitSink` of the scheduler process: `counted` counts, and each of the `readers` gets every request too."""

    def __init__(self, counted: ExitSink, *readers: Callable[[RequestExit], None]) -> None:
        self.attempted, self.log_lines_lost = counted.attempted, counted.log_lines_lost
        self._readers = (counted.record, *readers)

    def record(self, ended: RequestExit) -> None:
        for read in self._readers:
            read(ended)
