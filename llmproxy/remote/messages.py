"""The messages between a client of leases (a relay worker or a cluster member) and the process that grants them.

A lease has the call number of its `Admit`. The client chose this number, which is valid under every later leader.

Processes of one machine share a clock, and send times of the event loop as they are. Cluster members share no clock:
the sender makes each time relative to its own clock, and the receiver makes it absolute again.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from llmproxy.core.backends.catalogue import Target
from llmproxy.core.domain import (
    AdmissionKind,
    GrantReason,
    KnownCapacity,
    KnownLimit,
    Outcome,
    Placed,
    Request,
    Stage,
    Usage,
    Verdict,
)
from llmproxy.core.estimates.tokens import Estimate
from llmproxy.core.lease_events import AnyLeaseEvent, LeaseEvent
from llmproxy.observe.exit import RequestExit

PROTOCOL = 1  # The version of the messages between members. Members with different versions do not connect.


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A message. A field `call` is the number of a client's call. A field `lease` is the call number of an `Admit`."""


class Answer(Message, frozen=True):
    """A message to a client about a call or a lease of this client."""


Sendable = Message | LeaseEvent  # A message, or an event of a lease.

# --- from a worker; members send the messages in `FromClient` too -----------------------------------------------------


class Listening(Message, frozen=True, tag=1):
    """The worker has started, and accepts connections at this URL."""

    url: str


class Admit(Message, frozen=True, tag=2):
    """Calls `Leasing.admit`. Answered by `LeaseGranted` or `CallRefused`."""

    call: int
    request: Request
    excluded: frozenset[str]
    entry: AdmissionKind


class Resolve(Message, frozen=True, tag=3):
    """Calls `Leasing.resolve` for a name that the client does not know, or for `LeaseClient.caught_up`.

    Answered by `NameResolved` or `CallRefused`.
    """

    call: int
    name: str | None
    no_backend_wait_s: float
    body_bytes: int
    key: str = ""
    beside: str | None = None


class PageRequest(Message, frozen=True, tag=4):
    """A request that is not for an engine. Answered by `PageResponse`.

    It is first sent without its body; after the answer 100 (Continue), again with its body.
    """

    call: int
    request: bytes  # The request as HTTP/1 bytes.
    remote: str  # The address of the client.
    passed_on: int = 1  # Number of processes that forwarded the request.


class DirectRequest(Message, frozen=True, tag=29):
    """A request goes to `backend` without a lease. The receiver keeps `Leasing.direct` open until `CancelCall`.

    If the backend is gone or the proxy drains, the receiver answers `CallRefused`, and the worker must end the request.
    """

    call: int
    backend: str


class CancelCall(Message, frozen=True, tag=5):
    """The client no longer needs the answer to a call. A lease granted to the call ends."""

    call: int


class RequestEnded(Message, frozen=True, tag=10):
    """A request has ended. The receiver calls `Leasing.ended`."""

    request_id: str
    met: bool | None


class PrefixCached(Message, frozen=True, tag=11):
    """Calls `Leasing.cached`: a backend has cached blocks of the prompt and the answer of a lease."""

    pool: str
    lease: int
    backend: str
    hashes: tuple[int, ...]


class AttemptEnded(Message, frozen=True, tag=12):
    """Calls `ExitSink.attempted` in the scheduler process: an attempt ended."""

    backend: str
    verdict: Verdict


class ExitReport(Message, frozen=True, tag=13):
    """The end of a request: from a worker, for all readers of exit records; from a member, for the leader's pages.

    The process that served the request writes the log line itself.
    """

    record: RequestExit


class UsageLearned(Message, frozen=True, tag=14):
    """Calls `Estimator.learn` in the scheduler process, with the usage of an answer."""

    model: str
    prompt_bytes: int | None
    sequences: int | None
    usage: Usage


class WorkerIdle(Message, frozen=True, tag=15):
    """The worker is shutting down, and no request is open; after a replacement without drain, no connection is open."""


class LogLinesLost(Message, frozen=True, tag=28):
    """The number of log lines that the worker could not write to standard error since the last such message."""

    lines: int


class BufferedBytes(Message, frozen=True, tag=30):
    """The buffered bytes of request bodies, for the metrics."""

    body_bytes: int


# --- either way -------------------------------------------------------------------------------------------------------


class ResponseStored(Message, frozen=True, tag=16):
    """A backend has stored a response for a tenant."""

    response_id: str
    backend: str
    tenant: str


# --- to a worker ------------------------------------------------------------------------------------------------------


class WorkerStart(Message, frozen=True, tag=17):
    """Starts a worker, with its name and the descriptors of its listening sockets."""

    name: str
    fds: tuple[int, ...]
    config: bytes  # The configuration, pickled. A worker trusts the process that started it.


class NewConfig(Message, frozen=True, tag=18):
    """The configuration was reloaded. The worker applies the new one."""

    config: bytes  # The new configuration, pickled.


class KnownBackends(Message, frozen=True, tag=19):
    """All backends, and the names that the worker resolves itself."""

    backends: bytes  # The pickled configurations of the backends.
    targets: Mapping[str, Target]
    unnamed: Target | None  # The target of requests without a model name; None: the worker sends a `Resolve`.


class LearnedEstimates(Message, frozen=True, tag=20):
    """Token estimates of some models, learned by all workers. Sent to a new worker, and ESTIMATES_S after a change."""

    models: Mapping[str, Estimate]


class ShutdownState(Message, frozen=True, tag=21):
    """Progress of the shutdown; see `RequestHandler.begin_shutdown`, `Listener.close` and `Dispatcher.drain`."""

    leaving: bool = False
    replaced: bool = False
    closed: bool = False
    draining: bool = False
    granting: bool = True


class LeaseGranted(Answer, frozen=True, tag=22):
    """The answer to `Admit`: the fields of the `Grant`. Of the request, only `stage` is sent."""

    call: int
    stage: Stage
    placed: Placed
    at_s: float
    queued_ahead: int
    why: GrantReason
    left_s: float


class CallRefused(Answer, frozen=True, tag=23):
    """The answer to a call that failed: the fields of the raised `Refused`, or the outcome INTERNAL after a bug."""

    call: int
    outcome: Outcome
    message: str
    retry_after_s: float | None


class NameResolved(Answer, frozen=True, tag=24):
    """The answer to `Resolve`: the target of the name."""

    call: int
    target: Target


class PageResponse(Answer, frozen=True, tag=25):
    """The answer to `PageRequest`: an HTTP response. Status 100 asks for the request with its body."""

    call: int
    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class LeaseCut(Answer, frozen=True, tag=26):
    """The present flags of a lease, after `Lease.cut` changed them in the process that granted the lease."""

    lease: int
    revoked: bool
    hung: bool = False
    preempted: bool = False
    leaving: bool = False


class StopWorker(Message, frozen=True, tag=27):
    """Cut all remaining requests, and end the process."""


# --- between cluster members ------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag=40):
    """The first message of a member on a connection. Sent again when a field has changed."""

    protocol: int
    version: str
    name: str
    incarnation: str  # Random id of the member's process, so that a restarted member is recognised as new.
    address: str
    config: str  # Hash of the configuration (`config_hash`).
    epoch: int  # The highest epoch that the member knows.
    candidate: bool = True  # Whether the member can become the leader.


class Welcome(Message, frozen=True, tag=41):
    """The leader accepts the member. All later grants on this connection belong to this epoch."""

    epoch: int
    name: str
    version: str
    config: str


class NotLeader(Message, frozen=True, tag=42):
    """The receiver of a Hello refuses the member, or stops leading. `why` has the reason in words."""

    why: str


class Resume(Message, frozen=True, tag=43):
    """The member's calls at the time of connecting. An `Admit` or `RunningLease` follows for each, then `Resumed`."""

    waiting: frozenset[int]  # Calls that wait for a lease.
    running: frozenset[int]  # Calls that have a running lease.


class RunningLease(Message, frozen=True, tag=44):
    """A running lease, as reported to a new leader or after a lost connection."""

    call: int
    request: Request
    placed: Placed
    age_s: float  # Seconds since the grant.
    started_age_s: float | None  # Seconds since the first token; None before it.
    committed: bool
    output_tokens: int


class Resumed(Message, frozen=True, tag=45):
    """The member has reported all its requests and leases."""


class Ping(Message, frozen=True, tag=46):
    """A heartbeat. Members send it every PING_S, because a link without messages is closed."""


class Members(Message, frozen=True, tag=47):
    """The names of all members with a session at the leader, sent whenever a member joins or is gone."""

    names: tuple[str, ...]


class Drained(Message, frozen=True, tag=48):
    """The backends that an operator has drained. All others are not drained.

    `moves_s` has the deadlines of drains on the leader's clock; in a message, the seconds until the deadline.
    """

    backends: frozenset[str]
    moves_s: dict[str, float] = {}

    def in_message(self, now: float) -> Drained:
        return Drained(self.backends, {name: max(0.0, at_s - now) for name, at_s in self.moves_s.items()})


class Balances(Message, frozen=True, tag=49):
    """Balances of flows in one band of a pool (`FairnessPolicy.balances`), for the next leader."""

    pool: str
    band: int
    flows: dict[str, float]


class Learned(Message, frozen=True, tag=51):
    """The batch limits and capacities that this leader and earlier ones have learned, for the next leader."""

    limits: dict[str, KnownLimit]  # Backend URL -> learned batch limit.
    capacities: dict[str, KnownCapacity]  # Name of a pool -> learned capacity of its replicas.


class RateDebts(Message, frozen=True, tag=52):
    """Debts of rate limits, for the next leader; see `RateLimits.debts`."""

    debts: tuple[tuple[str, str, float], ...]  # (Limit, kind, seconds until the limit has refilled).


class RememberedPrefix(Message, frozen=True, tag=53):
    """Blocks that a backend has cached, from an earlier request of the member. Sent on each new link to a leader."""

    pool: str
    backend: str
    hashes: tuple[int, ...]


class LeaseAcknowledged(Message, frozen=True, tag=50):
    """The member has received its lease. Without this message, the lease ends when the connection is lost."""

    call: int


FromClient = (
    Admit
    | AnyLeaseEvent
    | RequestEnded
    | PrefixCached
    | ExitReport
    | CancelCall
    | Resolve
    | PageRequest
    | ResponseStored
)
ToClient = LeaseGranted | CallRefused | LeaseCut | NameResolved | PageResponse | ResponseStored
FromWorker = (
    FromClient | Listening | DirectRequest | AttemptEnded | UsageLearned | WorkerIdle | LogLinesLost | BufferedBytes
)
ToWorker = ToClient | WorkerStart | NewConfig | KnownBackends | LearnedEstimates | ShutdownState | StopWorker
FromMember = FromClient | Hello | Resume | RunningLease | Resumed | LeaseAcknowledged | RememberedPrefix | Ping
ToMember = ToClient | Welcome | NotLeader | Members | Drained | Balances | Learned | RateDebts | Ping


def relative_to(request: Request, now: float) -> Request:
    """Makes the times of a request relative to `now`. `relative_to(request, -now)` makes them absolute again."""
    return replace(request, arrived_s=request.arrived_s - now, deadline_s=request.deadline_s - now)
