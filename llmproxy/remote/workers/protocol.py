"""The messages between a relay worker and the scheduler process.

Times are on the clock of the loop, which is the machine's monotonic clock and the same in all its processes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import AdmissionKind, GrantReason, Outcome, Placed, Request, Stage, Usage, Verdict
from llmproxy.core.estimates.tokens import Estimate
from llmproxy.core.lease_events import AnyLeaseEvent, LeaseEvent
from llmproxy.observe.exit import RequestExit


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A message. The field `call` is the number of a pending call of the worker, `lease` the number of a `Grant`."""


Sendable = Message | LeaseEvent
"""A message, or an event of a lease."""

# --- from a worker ----------------------------------------------------------------------------------------------------


class Listening(Message, frozen=True, tag=1):
    """The worker accepts connections at this URL."""

    url: str


class Admit(Message, frozen=True, tag=2):
    """Calls `Dispatcher.admit`. Answered by `LeaseGranted` or `CallRefused`."""

    call: int
    request: Request
    excluded: frozenset[str]
    entry: AdmissionKind


class Resolve(Message, frozen=True, tag=3):
    """`Dispatcher.resolve`, for a name that the worker does not know. Answered by `NameResolved` or `CallRefused`."""

    call: int
    name: str | None
    no_backend_wait_s: float
    body_bytes: int
    key: str = ""
    beside: str | None = None


class PageRequest(Message, frozen=True, tag=4):
    """A request that is not for an engine. Answered by `PageResponse`.

    It is first sent without its body. After the answer 100 (Continue) it is sent again with its body.
    """

    call: int
    request: bytes
    """The request as HTTP/1 bytes."""
    remote: str
    """The address of the client."""
    passed_on: int = 1
    """Number of processes that forwarded the request."""


class DirectRequest(Message, frozen=True, tag=29):
    """Calls `Dispatcher.direct`, until the worker sends `CancelCall`.

    The call has no result. The scheduler process sends `CallRefused` if the worker must end the request.
    """

    call: int
    backend: str


class CancelCall(Message, frozen=True, tag=5):
    """The worker does not need the answer to a call any more. If the call was granted a lease, the lease ends."""

    call: int


class RequestEnded(Message, frozen=True, tag=10):
    """Calls `Dispatcher.ended` for the request with this id."""

    request_id: str
    met: bool | None


class PrefixCached(Message, frozen=True, tag=11):
    """Calls `Pools.cached`."""

    pool: str
    lease: int
    backend: str
    hashes: tuple[int, ...]


class AttemptEnded(Message, frozen=True, tag=12):
    """Calls `Metrics.attempted`."""

    backend: str
    verdict: Verdict


class ExitReport(Message, frozen=True, tag=13):
    """The end of a request, for the metrics and the decision log. The worker writes its log line itself."""

    record: RequestExit


class UsageLearned(Message, frozen=True, tag=14):
    """Calls `Estimator.learn`."""

    model: str
    prompt_bytes: int | None
    sequences: int | None
    usage: Usage


class WorkerIdle(Message, frozen=True, tag=15):
    """The shutting-down worker has no open request; if the proxy was replaced, it has no open connection either."""


class LogLinesLost(Message, frozen=True, tag=28):
    """Number of log lines that the worker dropped because its standard error was not read."""

    lines: int


class BufferedBytes(Message, frozen=True, tag=30):
    """The buffered bytes of request bodies, for the metrics."""

    body_bytes: int


# --- either way -------------------------------------------------------------------------------------------------------


class ResponseStored(Message, frozen=True, tag=16):
    """This backend has stored a response for this tenant."""

    response_id: str
    backend: str
    tenant: str


# --- to a worker ------------------------------------------------------------------------------------------------------


class WorkerStart(Message, frozen=True, tag=17):
    """The first message: the name of the worker, and the descriptors of its listening sockets."""

    name: str
    fds: tuple[int, ...]


class NewConfig(Message, frozen=True, tag=18):
    """The new configuration, pickled. A worker trusts the process that started it."""

    config: bytes


class KnownBackends(Message, frozen=True, tag=19):
    """All backends, and all names that requests may use."""

    backends: bytes
    """The pickled configurations of the backends."""
    targets: Mapping[str, Target]
    unnamed: Target | None
    """The target of requests without a model name; None: they are refused."""


class LearnedEstimates(Message, frozen=True, tag=20):
    """Estimates of these models, learned from the responses of all workers."""

    models: Mapping[str, Estimate]


class ShutdownState(Message, frozen=True, tag=21):
    """Progress of the shutdown; see `RequestHandler.begin_shutdown`, `Listener.close` and `Dispatcher.drain`."""

    leaving: bool = False
    replaced: bool = False
    closed: bool = False
    draining: bool = False
    granting: bool = True


class LeaseGranted(Message, frozen=True, tag=22):
    """The `Grant` of one stage of a request; the answer to `Admit`."""

    call: int
    lease: int
    stage: Stage
    placed: Placed
    at_s: float
    queued_ahead: int
    why: GrantReason
    left_s: float


class CallRefused(Message, frozen=True, tag=23):
    """The exception `Refused`; the answer to any call."""

    call: int
    outcome: Outcome
    message: str
    retry_after_s: float | None


class NameResolved(Message, frozen=True, tag=24):
    """The answer to `Resolve`."""

    call: int
    target: Target


class PageResponse(Message, frozen=True, tag=25):
    """The answer to `PageRequest`."""

    call: int
    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class LeaseCut(Message, frozen=True, tag=26):
    """The worker must end the attempt of a lease (`Lease.cut`)."""

    lease: int
    revoked: bool


class StopWorker(Message, frozen=True, tag=27):
    """Cut all remaining requests, and end the process."""


FromWorker = (
    Listening | Admit | Resolve | PageRequest | DirectRequest | CancelCall | AnyLeaseEvent | RequestEnded
    | PrefixCached | AttemptEnded | ExitReport | UsageLearned | WorkerIdle | ResponseStored | LogLinesLost
    | BufferedBytes
)  # fmt: skip
ToWorker = (
    WorkerStart | NewConfig | KnownBackends | LearnedEstimates | ResponseStored | ShutdownState | LeaseGranted
    | CallRefused | NameResolved | PageResponse | LeaseCut | StopWorker
)  # fmt: skip
