"""What a failed attempt says of its request and of its backend, and whether and how often it may be repeated."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from msgspec import Struct

from llmproxy.core.domain import Verdict
from llmproxy.core.rate_limit import TokenBucket

RETRY_RESERVE = 1024.0
"""Retries that may be made beyond the budget's share: a backend that dies takes all of its batch at once, and 1,024 is
the largest that vLLM runs unless configured otherwise."""
RETRY_WAIT_MIN_S = 1.0
"""What a retry may wait at least: its time was used up by a backend that failed, and another may have room at once."""
COMPUTED_MAX = 2
"""Engines that may compute one request without an answer. A second failure is in doubt the request's own."""


class Cause(Enum):
    """Why an attempt failed, by how far it had come."""

    # Before the connection.
    LACK = "lack"  # This machine lacks a descriptor, a port or a name.
    NO_CONNECTION = "no_connection"
    # The head was seen, and the engine computed nothing.
    BUSY = "busy"  # 408, 409, 425, 429, 503, 529, and events in their words.
    DRAINING = "draining"  # The 500 of an engine that shuts down.
    UNAUTHORIZED = "unauthorized"  # 401 or 403 to the proxy's own key.
    NOT_SERVED = "not_served"  # 404 of a model that the backend lists, a redirect, another protocol.
    REJECTED = "rejected"  # Any other 4xx, 501, and events in their words.
    NOT_TRANSFERRED = "not_transferred"  # What another backend computed did not arrive.
    # The engine took the body.
    BROKEN = "broken"  # The connection was reset or closed, or carried no HTTP.
    GONE = "gone"  # Polls showed that the process is gone, or streams that it hangs.
    ENGINE_DEAD = "engine_dead"  # The server says that its engine died.
    ERROR = "error"  # 500, 502, other 5xx, and events in their words.
    STALLED = "stalled"  # Silent for `timeouts.stall_s` after the first byte.
    LATE = "late"  # No first byte within `timeouts.first_byte_s`.
    OVERRAN = "overran"  # Not complete within `timeouts.total_s`, or within the limit of a gateway (504).


class Again(Enum):
    """Whether a request may be tried again, as long as its client has seen nothing."""

    NO = "no"
    ELSEWHERE = "elsewhere"  # Nothing was computed: as often as the limit and the budget of retries allow.
    ANYWHERE_ELSE = "anywhere_else"  # Nothing was computed, and only the backend is to blame: on each other one.
    ONCE = "once"  # The engine took the body: `COMPUTED_MAX`.


class Meaning(Struct, frozen=True):
    """What a failed attempt means. `deadly`: its request may have ended the engine."""

    verdict: Verdict
    again: Again
    deadly: bool = False


MEANINGS: Mapping[Cause, Meaning] = {
    Cause.LACK: Meaning(Verdict.LOCAL_FAILURE, Again.ELSEWHERE),
    Cause.NO_CONNECTION: Meaning(Verdict.CONNECT_FAILED, Again.ELSEWHERE),
    Cause.BUSY: Meaning(Verdict.BUSY, Again.ELSEWHERE),
    Cause.DRAINING: Meaning(Verdict.DRAINING, Again.ELSEWHERE),
    Cause.UNAUTHORIZED: Meaning(Verdict.UNAUTHORIZED, Again.ANYWHERE_ELSE),
    Cause.NOT_SERVED: Meaning(Verdict.NOT_SERVED, Again.ANYWHERE_ELSE),
    Cause.REJECTED: Meaning(Verdict.SERVED, Again.NO),
    Cause.NOT_TRANSFERRED: Meaning(Verdict.TRANSFER_FAILED, Again.ELSEWHERE),
    Cause.BROKEN: Meaning(Verdict.FAILED, Again.ONCE, deadly=True),
    Cause.GONE: Meaning(Verdict.LOST, Again.ONCE, deadly=True),
    Cause.ENGINE_DEAD: Meaning(Verdict.ENGINE_DEAD, Again.ONCE, deadly=True),
    Cause.ERROR: Meaning(Verdict.FAILED, Again.ONCE),
    Cause.STALLED: Meaning(Verdict.FAILED, Again.NO),
    Cause.LATE: Meaning(Verdict.TIMED_OUT, Again.ONCE),
    Cause.OVERRAN: Meaning(Verdict.TIMED_OUT, Again.NO),
}
"""Once a client has seen a byte, nothing is tried again, and the verdict is the same."""

_NOT_NOW = frozenset({408, 409, 425, 429, 503, 529})


def cause_of(status: int, *, own_key: bool = True) -> Cause:
    """The cause of an answer with this status (not 2xx), as far as the status alone says it.

    `own_key`: the request had the key of the proxy, not that of its client.
    """
    if status < 400:
        return Cause.NOT_SERVED
    if status in _NOT_NOW:
        return Cause.BUSY
    if status in (401, 403) and own_key:
        return Cause.UNAUTHORIZED
    if status == 504:
        return Cause.OVERRAN
    return Cause.REJECTED if status < 500 or status == 501 else Cause.ERROR


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
