"""How many attempts may be retried when backends fail."""

from __future__ import annotations

from llmproxy.core.domain import Verdict
from llmproxy.core.rate_limit import TokenBucket

RETRY_RESERVE = 1024.0
"""Retries that may be made beyond the budget's share: a backend that dies takes all of its batch at once, and 1,024 is
the largest that vLLM runs unless configured otherwise."""
RETRY_WAIT_MIN_S = 1.0
"""What a retry may wait at least: its time was used up by a backend that failed, and another may have room at once."""


class RetryBudget:
    """Retries as a share of requests, so that retries do not overload a failing fleet.

    Attempts that cost no engine anything are not counted: connections that failed before a byte was sent, and work lost
    with a process that is gone or hangs.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        # Requests fill it, not time.
        self._bucket = TokenBucket(RETRY_RESERVE, 0.0)

    def request(self) -> None:
        """A new request came: it earns its share of a retry."""
        self._bucket.take(-self.ratio, 0.0)

    def take(self, verdict: Verdict) -> bool:
        """Whether an attempt that ended with `verdict` may be retried; counts the retry if so."""
        costs_nothing = verdict in (Verdict.CONNECT_FAILED, Verdict.LOST, Verdict.LOCAL_FAILURE)
        return costs_nothing or self._bucket.try_take(1.0, 0.0)
