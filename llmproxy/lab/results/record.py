"""The record of one request of a replay."""

from __future__ import annotations

from dataclasses import dataclass

from llmproxy.core.domain import Outcome, Predicted
from llmproxy.lab.traces.arrival import Arrival


@dataclass(slots=True)
class Record:
    """A request from its arrival to its end, in seconds of virtual time."""

    arrival: Arrival
    # The real arrival. In a closed loop it depends on earlier answers.
    arrived_s: float
    # The band in which the proxy schedules the request.
    band: int
    outcome: Outcome = Outcome.INTERNAL
    ended_s: float = 0.0
    # The backend of the last attempt.
    backend: str | None = None
    # The prefill replica of a split request.
    prefilled_on: str | None = None
    # Number of attempts, without preempted ones.
    attempts: int = 0
    preemptions: int = 0
    queue_wait_s: float | None = None
    # None without a first token, and for a whole answer, which shows its client no first token.
    ttft_s: float | None = None
    # Mean time per output token after the first; None for answers of one token, and for whole answers.
    tpot_s: float | None = None
    # From the last grant to the first token.
    backend_ttft_s: float | None = None
    # Predictions of `backend_ttft_s` and `tpot_s` by the placement; None without predictions.
    predicted_ttft: Predicted | None = None
    predicted_tpot: Predicted | None = None
    # Cached prompt tokens in the last attempt; None if its engine yielded no token.
    hit_tokens: int | None = None
    output_tokens: int = 0
    # Whether the answer was completed within both objectives.
    met: bool = False
