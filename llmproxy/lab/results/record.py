"""What became of one request of a replay."""

from __future__ import annotations

from dataclasses import dataclass

from llmproxy.core.domain import Outcome, Predicted
from llmproxy.lab.traces.arrival import Arrival


@dataclass(slots=True)
class Record:
    """One request from its arrival to its end, in seconds of virtual time.

    `arrived_s` is when it really arrived (a closed loop decides that late), `band` the resolved level. `backend` and
    `hit_tokens` (prompt tokens found cached) are those of the last attempt. `tpot_s` is the mean time per output token
    after the first, None for answers of one token. `backend_ttft_s` counts from the last grant; `predicted_ttft` of it
    and `predicted_tpot` are what the placement expected, None where it predicts nothing. `preemptions` are leases that
    were taken back, which are no attempts. `prefilled_on` computed the prompt, where another replica did. `met` says
    whether a completed answer kept both objectives.
    """

    arrival: Arrival
    arrived_s: float
    band: int
    outcome: Outcome = Outcome.INTERNAL
    ended_s: float = 0.0
    backend: str | None = None
    prefilled_on: str | None = None
    attempts: int = 0
    preemptions: int = 0
    queue_wait_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    backend_ttft_s: float | None = None
    predicted_ttft: Predicted | None = None
    predicted_tpot: Predicted | None = None
    hit_tokens: int = 0
    output_tokens: int = 0
    met: bool = False
