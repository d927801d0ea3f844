"""The one record that a request leaves behind; the log line and the metrics are both made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llmproxy.core.domain import Outcome, Predicted, Slo, Verdict, Why

UNKNOWN_MODEL = "unknown"
"""The `model` of a request whose name is not in the catalogue: names that clients invent never become labels."""


# Not frozen: that alone would make each of them cost as much as the rest of its line.
@dataclass(slots=True, kw_only=True)
class RequestExit:
    """What became of one request. It holds no prompt, no answer text and no key.

    All durations are seconds: `queue_wait_s` waiting for a backend, over all attempts, or from arrival to the end where
    there was no grant; `ttft_s` from arrival to the first body byte handed to the client; `duration_s` from arrival to
    the end. `max_gap_s` is the longest wait between two consecutive chunks. None stands for whatever never came to be
    known: a request refused at the desk has no band, no backend and no wait. `arrived_s` and `granted_s` are instants
    on the scheduler's clock, so that the order of grants can be audited; `queued_ahead` is how many others of its pool
    waited when it was granted.

    `tenant` is "" for clients without one. `level` is the band as an integer, `ttl_s` how long it was allowed to wait,
    `slo` its objective and `met` whether it kept that; None where it had none, or where its client is why it did not.
    `unknown_objective` is what its header asked for where nobody configured that. `expected_prompt_tokens` is the
    estimate by which it was scheduled, None where it never came to the waiting room. `expected_cached_tokens` is what
    the last placement believed that its backend has cached of it, None where no placement looks at prompts. `why` tells
    why it was its turn at the last grant, `preemptions` how often it gave its backend up for a request of a higher
    band.

    `model` is the name that was asked for where the catalogue knows it, else `UNKNOWN_MODEL`; `target` is the base
    model or adapter that served it, `adapter` that adapter, None for a base model. `path` comes without its query.
    `attempts` counts the backends tried, and `terms` are the named parts of the last placement's score, among
    `candidates` backends. `predicted_ttft` (from the last grant) and `predicted_tpot` are what that placement expected,
    None where it predicts nothing; the last also for several sequences at once.
    """

    request_id: str
    method: str
    path: str
    outcome: Outcome
    status: int
    duration_s: float
    model: str = UNKNOWN_MODEL
    target: str | None = None
    adapter: str | None = None
    tenant: str = ""
    band: str | None = None
    level: int | None = None
    flow: str | None = None
    ttl_s: float | None = None
    slo: Slo | None = None
    met: bool | None = None
    unknown_objective: str | None = None
    stream: bool = False
    backend: str | None = None
    attempts: int = 0
    preemptions: int = 0
    why: Why | None = None
    candidates: int | None = None
    terms: tuple[tuple[str, float], ...] = ()
    predicted_ttft: Predicted | None = None
    predicted_tpot: Predicted | None = None
    arrived_s: float | None = None
    granted_s: float | None = None
    queued_ahead: int | None = None
    queue_wait_s: float | None = None
    ttft_s: float | None = None
    max_gap_s: float | None = None
    expected_prompt_tokens: int | None = None
    expected_cached_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    body_bytes: int = 0
    response_bytes: int = 0
    chunks: int = 0
    error: str | None = None

    @property
    def backend_ttft_s(self) -> float | None:
        """Seconds from the last grant to the first body byte of a stream; None where there was no such byte."""
        if self.ttft_s is None or self.arrived_s is None or self.granted_s is None or not self.stream:
            return None
        return self.ttft_s - (self.granted_s - self.arrived_s)

    @property
    def streaming_s(self) -> float | None:
        """Seconds from the first body byte of a stream to its end; None where there was no such byte."""
        return None if self.ttft_s is None or not self.stream else max(0.0, self.duration_s - self.ttft_s)

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean seconds per token after the first; None unless a stream of two or more known tokens was completed."""
        if self.outcome is not Outcome.COMPLETED or self.streaming_s is None or (self.output_tokens or 0) < 2:
            return None
        return self.streaming_s / ((self.output_tokens or 0) - 1)

    @property
    def mean_gap_s(self) -> float | None:
        """Mean seconds between two consecutive chunks; None with fewer than two."""
        return None if self.streaming_s is None or self.chunks < 2 else self.streaming_s / (self.chunks - 1)


class ExitSink(Protocol):
    """Who counts what has ended."""

    def record(self, ended: RequestExit) -> None:
        """Count one request."""

    def attempted(self, backend: str, verdict: Verdict) -> None:
        """Count one attempt."""

    def log_lines_lost(self, lines: int) -> None:
        """Count lines that the standard error of a process could not take."""
