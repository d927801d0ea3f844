"""The record of a request.

Its log line, its line in the decision log and the metrics are made from it (`exit_fields`).
"""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from llmproxy.core.domain import Outcome, Slo, Stage, Verdict
from llmproxy.observe.trace_context import TraceContext
from llmproxy.scheduling.attempt import Attempt, Split
from llmproxy.scheduling.attempts import Routing

UNKNOWN_MODEL = "unknown"
"""Replaces a model name that is not in the catalogue: names that clients invent never become labels."""
ATTEMPTS_MAX = 16  # The maximum number of attempts in a finished record. The latest attempts are kept.

NEVER_GRANTED = Attempt()


class RequestExit(Routing, kw_only=True, omit_defaults=True):
    """The record of a request from its arrival to its end, for the log, metrics, pages and traces.

    The record has no text of the prompt or the answer, and only the name of the key. Values that are unknown when a
    request is refused, such as band and estimate, are None.
    """

    # The request.
    request_id: str
    method: str
    path: str  # Without the query.
    # The requested name, if the catalogue knows it. For a name that a pattern covers, the pattern or its target.
    model: str = UNKNOWN_MODEL
    unknown_model: str | None = None  # Beginning of a requested name that the catalogue does not know; never a label.
    target: str | None = None  # Base model or adapter behind an alias or pattern; None if it is `model`.
    adapter: str | None = None  # None for a base model.
    served_as: str | None = None  # The base model, whose usage limit counts the request too; None if it is `model`.
    tenant: str = ""  # "" without a tenant.
    key: str | None = None  # The name of the key.
    client: str | None = None  # The client's address.
    user_agent: str | None = None  # The beginning of the client's User-Agent.
    band: str | None = None
    level: int | None = None  # The band as an integer.
    flow: str | None = None
    weight: float = 1.0  # Fair-share weight of the flow.
    max_wait_s: float | None = None  # Longest allowed wait for a backend.
    slo: Slo | None = None
    unknown_objective: str | None = None  # Name in the objective header that is not configured.
    stream: bool = False
    arrived_s: float | None = None  # On the scheduler's clock.
    body_bytes: int = 0
    expected_prompt_tokens: int | None = None  # The scheduler's estimate.

    # How the request was split into prefill and decode.
    split: Split | None = None  # None in a pool without roles.
    prefill_backend: str | None = None  # Set for split requests, like the next two fields.
    prefill_s: float | None = None  # From the grant of the prefill to its end.
    # From the end of the prefill to the first token; without a stream, to the grant of the decode.
    handover_s: float | None = None

    # The result of the request. All durations are in seconds.
    outcome: Outcome = Outcome.INTERNAL
    status: int = 0
    duration_s: float = 0.0  # From arrival to the end.
    met: bool | None = None  # Whether the objective was met; None without one, or if the client caused the miss.
    ttft_s: float | None = None  # From arrival to the first body byte handed to the client.
    response_bytes: int = 0
    error: str | None = None
    trace: TraceContext | None = None

    def end(self, outcome: Outcome, status: int, error: str) -> None:
        """Sets the result of the request. A later call replaces it."""
        self.outcome, self.status, self.error = outcome, status, error

    def time_split(self) -> None:
        """Sets the prefill fields of a split request from its last two attempts."""
        if len(self.tried) < 2 or self.last.stage is not Stage.DECODE:
            return
        prefill, decode = self.tried[-2:]
        self.prefill_backend = prefill.backend
        if prefill.granted_s is None or prefill.ended_s is None:
            return
        self.prefill_s = prefill.ended_s - prefill.granted_s
        began_s = decode.first_byte_s or decode.granted_s
        self.handover_s = None if began_s is None else began_s - prefill.ended_s

    def later(self, by_s: float) -> RequestExit:
        """Returns a copy with all times of a clock `by_s` seconds later, to convert them to another process's clock."""

        def moved(at_s: float | None) -> float | None:
            return None if at_s is None else at_s + by_s

        tried = [
            replace(
                one, queued_s=moved(one.queued_s), granted_s=moved(one.granted_s), first_byte_s=moved(one.first_byte_s),
                ended_s=moved(one.ended_s),
            )
            for one in self.tried
        ]  # fmt: skip
        return replace(self, tried=tried, queued_s=moved(self.queued_s), arrived_s=moved(self.arrived_s))

    @property
    def last(self) -> Attempt:
        """The last attempt; an empty attempt if there was none."""
        return self.tried[-1] if self.tried else NEVER_GRANTED

    @property
    def first_byte_s(self) -> float | None:
        """When the first body byte of a stream came; None without one.

        In a continued stream, an earlier attempt sent it.
        """
        return next((one.first_byte_s for one in self.tried if one.first_byte_s is not None), None)

    @property
    def ended_s(self) -> float | None:
        """When the request ended, on the scheduler's clock; None if it has no arrival time."""
        return None if self.arrived_s is None else self.arrived_s + self.duration_s

    @property
    def ttft_slo_s(self) -> float | None:
        return None if self.slo is None else self.slo.ttft_s

    @property
    def tpot_slo_s(self) -> float | None:
        return None if self.slo is None else self.slo.tpot_s

    @property
    def known_prompt_tokens(self) -> int | None:
        """The prompt tokens that the engine counted, otherwise the estimate of the scheduler.

        None if the request ended before it was scheduled.
        """
        return self.last.prompt_tokens or self.expected_prompt_tokens

    @property
    def backend_ttft_s(self) -> float | None:
        """Seconds from the last grant to the first body byte of a stream, or of its rest if it was continued.

        None without a stream or without such a byte.
        """
        if self.ttft_s is None or self.arrived_s is None or not self.stream:
            return None
        last = self.last
        if last.granted_s is None:
            return None
        if self.continued is not None:
            return None if last.first_byte_s is None else last.first_byte_s - last.granted_s
        return self.ttft_s - (last.granted_s - self.arrived_s)

    @property
    def streaming_s(self) -> float | None:
        """Seconds from the first body byte of a stream to its end; None without a stream or without such a byte."""
        return None if self.ttft_s is None or not self.stream else max(0.0, self.duration_s - self.ttft_s)

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean seconds per token after the first.

        None unless a stream completed and the engine counted at least two tokens.
        """
        if not self.stream or self.outcome is not Outcome.COMPLETED:
            return None
        output_tokens = self.last.output_tokens or 0
        streaming_s = self.streaming_s if output_tokens >= 2 else None
        return None if streaming_s is None else streaming_s / (output_tokens - 1)

    @property
    def mean_gap_s(self) -> float | None:
        """Mean seconds between two consecutive chunks of a stream; None without a stream or with fewer than two."""
        if not self.stream:
            return None
        chunks = self.last.chunks if self.continued is None else sum([one.chunks for one in self.tried])
        streaming_s = self.streaming_s if chunks > 1 else None
        return None if streaming_s is None else streaming_s / (chunks - 1)


class ExitSink(Protocol):
    """Receives exit records, and counts of attempts and lost log lines."""

    def record(self, ended: RequestExit) -> None:
        """Records a finished request."""

    def attempted(self, backend: str, verdict: Verdict) -> None:
        """Counts an attempt on `backend`."""

    def log_lines_lost(self, lines: int) -> None:
        """Counts log lines that could not be written to standard error."""
