"""Classification of failed attempts: the verdict on the backend, and whether the request may be retried."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from msgspec import Struct

from llmproxy.core.domain import Verdict
from llmproxy.core.token_bucket import TokenBucket

RETRY_RESERVE = 1024.0  # Burst of the retry budget: the batch of a dead backend, 1,024 in vLLM on large GPUs.
RETRY_WAIT_MIN_S = 1.0  # Minimum queue time of a retry, because earlier waits may have used up the time.
COMPUTED_MAX = 2  # Maximum number of engines that may start a request. If all fail, the request is the likely cause.
PLANNED_MAX = 8
"""Maximum number of planned ends that are not counted as failed attempts of a request, because an engine might abort
every answer. A rolling restart rarely hits a stream more than three times."""


class Cause(Enum):
    """The cause of a failed attempt, grouped by the progress of the attempt."""

    # Before the connection.
    LACK = "lack"  # This machine is out of file descriptors or ports, or cannot resolve the name.
    NO_CONNECTION = "no_connection"
    # The response head arrived, and mostly the engine computed nothing.
    BUSY = "busy"  # 408, 409, 425, 429, 503, 529, and error events with the same meaning.
    DRAINING = "draining"  # The 500, or the aborted answer, of an engine that shuts down.
    UNAUTHORIZED = "unauthorized"  # 401 or 403 to the proxy's own key.
    NOT_SERVED = "not_served"  # 404 of a model that the backend lists, a redirect, another protocol.
    REJECTED = "rejected"  # Any other 4xx, 501, and error events with the same meaning.
    NOT_TRANSFERRED = "not_transferred"  # A prefill answer has no usable parameters, or its engine is unreachable.
    # The engine accepted the body.
    BROKEN = "broken"  # The connection was reset or closed, or carried no HTTP.
    # No crash (BROKEN): the port refuses connections while this connection is open. Or, after a drain, the connection
    # broke or the drain's deadline passed.
    GONE = "gone"
    HUNG = "hung"  # Outlier detection found that the backend hangs.
    ENGINE_DEAD = "engine_dead"  # The server reports that its engine died.
    ERROR = "error"  # 500, 502, other 5xx, and error events with the same meaning.
    STALLED = "stalled"  # Silent for `timeouts.stall_s` after the first byte.
    LATE = "late"  # No first byte within `timeouts.first_byte_s`, or no prefill within its own limit.
    OVERRAN = "overran"  # Not complete within `timeouts.total_s`, or within the limit of a gateway (504).


class Again(Enum):
    """How often a request may be retried. After the first byte to the client, only NO and REST apply.

    Comments of a stream, which may come before its first event, do not count as bytes of an answer.
    """

    NO = "no"
    ELSEWHERE = "elsewhere"  # The request is not suspected: up to the retry limit and the retry budget.
    ANYWHERE_ELSE = "anywhere_else"  # Only the backend is to blame: once on each other backend.
    ONCE = "once"  # The engine accepted the body: up to COMPUTED_MAX engines.
    REST = "rest"  # The client has a part of the answer: another backend may generate the rest.


class Meaning(Struct, frozen=True):
    """The consequences of a failed attempt for its backend and for its request."""

    verdict: Verdict
    again: Again
    deadly: bool = False  # Whether the request may have crashed the engine.
    rest: bool = False  # Whether another backend may generate the rest of a stream (`Again.REST`).
    # Whether the backend ended on purpose. The attempt has then not failed, and the successor of the backend may get
    # the request again.
    planned: bool = False


MEANINGS: Mapping[Cause, Meaning] = {
    Cause.LACK: Meaning(Verdict.LOCAL_FAILURE, Again.ELSEWHERE),
    Cause.NO_CONNECTION: Meaning(Verdict.CONNECT_FAILED, Again.ELSEWHERE),
    Cause.BUSY: Meaning(Verdict.BUSY, Again.ELSEWHERE, rest=True),
    Cause.DRAINING: Meaning(Verdict.DRAINING, Again.ELSEWHERE, rest=True, planned=True),
    Cause.UNAUTHORIZED: Meaning(Verdict.UNAUTHORIZED, Again.ANYWHERE_ELSE),
    Cause.NOT_SERVED: Meaning(Verdict.NOT_SERVED, Again.ANYWHERE_ELSE),
    Cause.REJECTED: Meaning(Verdict.SERVED, Again.NO),
    Cause.NOT_TRANSFERRED: Meaning(Verdict.TRANSFER_FAILED, Again.ELSEWHERE),
    Cause.BROKEN: Meaning(Verdict.FAILED, Again.ONCE, deadly=True, rest=True),
    Cause.GONE: Meaning(Verdict.LOST, Again.ELSEWHERE, rest=True, planned=True),
    Cause.HUNG: Meaning(Verdict.LOST, Again.ONCE, deadly=True, rest=True),
    Cause.ENGINE_DEAD: Meaning(Verdict.ENGINE_DEAD, Again.ONCE, deadly=True, rest=True),
    Cause.ERROR: Meaning(Verdict.FAILED, Again.ONCE, rest=True),
    Cause.STALLED: Meaning(Verdict.FAILED, Again.ONCE, rest=True),
    Cause.LATE: Meaning(Verdict.TIMED_OUT, Again.ONCE),
    Cause.OVERRAN: Meaning(Verdict.TIMED_OUT, Again.NO),
}
"""The consequences of each cause.

After the first byte to the client, the verdict is the same, and only the rest of the answer may come from another
backend. There is no rest if a repetition would end the same way: the request itself was refused (REJECTED), or its
answer takes longer than a time limit (OVERRAN). The other causes without `rest` hardly occur after the first byte,
except LATE: streams of `/v1/responses` and `/v1/messages`, which have no rest, may begin with events without a token.

The connections of a process that crashed break at once. So an open connection to a port that refuses new ones belongs
to a process that shuts down (GONE), as vLLM after SIGTERM.
"""

_NOT_NOW = frozenset({408, 409, 425, 429, 503, 529})


def cause_of(status: int, *, own_key: bool = True) -> Cause:
    """Returns the cause of a failed response by its status. `own_key`: the request carried the proxy's key."""
    if status < 400:
        return Cause.NOT_SERVED
    if status in _NOT_NOW:
        return Cause.BUSY
    if status in (401, 403) and own_key:
        return Cause.UNAUTHORIZED
    if status == 504:
        return Cause.OVERRAN
    return Cause.REJECTED if status < 500 or status == 501 else Cause.ERROR


_FREE = (Verdict.CONNECT_FAILED, Verdict.LOST, Verdict.LOCAL_FAILURE, Verdict.DRAINING)


class RetryBudget:
    """Limits retries to a share of requests, so that retries do not overload a failing fleet.

    A retry is free if the failed attempt left no work in an engine: no byte was sent, or the process shuts down or
    hangs. The rest of a stream is never free, because its prompt is extra work for the other backends.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self._bucket = TokenBucket(RETRY_RESERVE, 0.0)  # Requests refill the bucket, not time.

    def request(self) -> None:
        """Counts a new request, which adds `ratio` retries to the budget."""
        self._bucket.take(-self.ratio, 0.0)

    def take(self, verdict: Verdict, *, rest: bool = False) -> bool:
        """Returns whether an attempt may be retried. If so, counts the retry, unless it is free.

        `rest`: the retry generates the rest of a stream.
        """
        return (not rest and verdict in _FREE) or self._bucket.try_take(1.0, 0.0)

    def give_back(self) -> None:
        """Reverts a retry that was counted and not made."""
        self._bucket.take(-1.0, 0.0)
