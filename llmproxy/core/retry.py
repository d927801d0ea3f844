"""How often a failing fleet may be asked again."""

from __future__ import annotations

from llmproxy.core.domain import Verdict

RETRY_RESERVE = 1024.0
"""Retries that may be made beyond the budget's share: a backend that dies takes all of its batch at once, and 1,024 is
the largest that vLLM runs unless told otherwise."""
RETRY_WAIT_MIN_S = 1.0
"""What a retry may wait at least: its time was used up by a backend that failed, and another may have room at once."""


class RetryBudget:
    """Retries as a share of requests, so that a failing fleet is not asked ever more.

    Attempts that cost no engine anything are not counted: connections that failed before a byte was sent, and work lost
    with a process that is gone or hangs.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self._left = RETRY_RESERVE

    def request(self) -> None:
        self._left = min(RETRY_RESERVE, self._left + self.ratio)

    def take(self, verdict: Verdict) -> bool:
        if verdict in (Verdict.CONNECT_FAILED, Verdict.LOST, Verdict.LOCAL_FAILURE):
            return True
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
