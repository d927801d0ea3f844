"""The inputs and outputs of scheduling decisions, all immutable.

Times are seconds on one monotonic clock chosen by the caller. The types are `Struct`s because each request creates a
dozen of them, and a frozen `Struct` of twenty fields is created in 0.1 µs, a frozen dataclass in 2 µs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import inf
from typing import Any, Final

from msgspec import Struct, field

CRITICAL = 100
DEFAULT = 0
SHEDDABLE = -100
IDLE = -200
BAND_NAMES: Mapping[str, int] = {
    "critical": CRITICAL,
    "default": DEFAULT,
    "standard": DEFAULT,
    "sheddable": SHEDDABLE,
    "idle": IDLE,
}


class Outcome(StrEnum):
    """How a request ended, as counted in metrics and written to the log."""

    COMPLETED = "completed"
    BAD_REQUEST = "bad_request"
    UNKNOWN_MODEL = "unknown_model"
    UNAUTHORIZED = "unauthorized"
    TOO_LARGE = "too_large"
    REJECTED_CAPACITY = "rejected_capacity"
    REJECTED_NO_BACKENDS = "rejected_no_backends"
    REJECTED_DEADLINE = "rejected_deadline"
    RATE_LIMITED = "rate_limited"
    EXPIRED = "expired"
    EXPIRED_NO_BACKENDS = "expired_no_backends"
    SHED = "shed"
    CANCELLED = "cancelled"
    CONNECT_FAILED = "connect_failed"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    UPSTREAM_STATUS = "upstream_status"
    BROKEN_STREAM = "broken_stream"
    DRAINING = "draining"
    INTERNAL = "internal"


class Role(StrEnum):
    """The stages of requests that a backend is configured to serve: prompts, answers or both."""

    BOTH = "both"  # Whole requests, prefill and decode stages.
    PREFILL = "prefill"  # Prompts whose answers other backends generate.
    DECODE = "decode"  # Answers to prompts that other backends computed.


class Stage(StrEnum):
    """The part of a request that one lease covers. A split request has two stages, and so two leases."""

    WHOLE = "whole"
    PREFILL = "prefill"  # Computes the prompt.
    DECODE = "decode"  # Fetches the KV blocks of the prompt and generates the answer.


# Each decision reads the stage some thirty times, and CPython 3.11 needs 0.14 µs to look up an enum member.
WHOLE: Final = Stage.WHOLE
PREFILL: Final = Stage.PREFILL
DECODE: Final = Stage.DECODE


class RequestFacts(Struct, frozen=True):
    """The properties of a request that scheduling needs and that its body contains."""

    model: str | None  # Requested model name; None if the body has no model, or a null or empty one.
    stream: bool = False
    prompt_bytes: int = 0  # UTF-8 bytes of the text that the engine tokenises. An image or sound counts as 4 KB.
    prompt_tokens: int | None = None  # Exact; None unless the prompt consists of token ids.
    max_tokens: int | None = None
    sequences: int = 1  # Sequences that the engine runs at once: `n` or `best_of`, times the number of prompts.
    prepared: bool = False  # Whether media, a grammar or a very large body keep the engine busy before prefill.


class Slo(Struct, frozen=True):
    """A latency objective. At least one field is set."""

    ttft_s: float | None = None  # Seconds from arrival to the first token.
    tpot_s: float | None = None  # Mean seconds per output token after the first one.

    def met(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Returns whether an answer with these times met the objective.

        `ttft_s` is None if no token came, and then the objective is missed. `tpot_s` is None if fewer than two tokens
        came, and then only `ttft_s` counts.
        """
        if ttft_s is None or (self.ttft_s is not None and ttft_s > self.ttft_s):
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s


class Request(Struct, frozen=True):
    """A request with everything that the scheduler needs to know about it."""

    id: str
    pool: str
    model: str
    adapter: str | None
    band: int
    flow: str
    arrived_s: float
    deadline_s: float
    body_bytes: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    sequences: int = 1
    stream: bool = False
    tenant: str = ""
    weight: float = 1.0  # Weight of the request's flow among the flows of the band.
    slo: Slo | None = None
    limits: tuple[str, ...] = ()  # Names of the usage limits (of the tenant and of the model) that count the request.
    label: str = ""  # The request id that the client gets (`x-request-id`) and that the log has.
    prefix: tuple[int, ...] = ()  # Chained hashes of the full blocks of the prompt.
    prefix_tokens: float = 0.0  # Approximate tokens per block of `prefix`.
    session: str | None = None  # Hash shared by the requests of one session.
    backend: str | None = None  # The only backend that may serve the request, because it stores a referenced response.
    splittable: bool = False  # Whether prefill and decode may run on two backends.
    stage: Stage = Stage.WHOLE
    prepared: bool = False  # As `RequestFacts.prepared`; also for a route that computes nothing.
    avoid: str = ""  # Name of a backend that refused the request as busy, so another backend is preferred; "" for none.
    overflows: bool = False  # Whether an external backend may serve the request.
    # Whether the request is the rest of a stream that broke. The prompt then includes the answer so far, for which
    # earlier attempts were charged.
    continued: bool = False


class AdmissionKind(StrEnum):
    """The reason why a request asks for a backend."""

    NEW = "new"
    RETRY = "retry"
    PREEMPTED = "preempted"
    PREFILLED = "prefilled"  # The prefill stage has ended, and the decode stage needs a backend.
    RESUMED = "resumed"  # Another scheduler has admitted the request: of another pool, or in another process.
    CONTINUED = "continued"  # The stream of the request broke, and another backend generates the rest.
    # The excluded backends do not store the response that the request names, or refuse the proxy's key or the model.
    OWNER_LOOKUP = "seeking"


class ModelCard(Struct, frozen=True):
    """An entry of a backend's `/v1/models`."""

    name: str
    parent: str | None  # The base model of an adapter; None for a base model.
    max_model_len: int | None
    fields: Mapping[str, Any] = field(default_factory=dict)


class Listing(Struct, frozen=True):
    """A response of a backend's `/v1/models`, with the entries in their order."""

    taken_at_s: float
    cards: tuple[ModelCard, ...]


class KnownLimit(Struct, frozen=True):
    """A batch limit that an earlier process learned. It applies to engines with these models and this context."""

    limit: int
    settled: bool  # Whether `limit` is proven to be the engine's own limit; otherwise the engine may run more.
    models: tuple[str, ...]  # The base models that the engine lists, sorted.
    max_model_len: int | None = None


class KnownCapacity(Struct, frozen=True):
    """The capacity of a replica and the sizes of a pool's requests, as an earlier process learned them."""

    sums: tuple[float, ...]  # The sums of `StepCurve`.
    # Per size class of prompts: class, number of answers, mean output tokens, mean cached share of the prompt.
    sizes: tuple[tuple[int, int, float, float], ...]
    squares: tuple[float, ...] = ()  # Mean squares of the tokens of the answers, in the order of `sizes`.


class Reading(Struct, frozen=True):
    """The metrics of one scrape of one backend. A value is None if the backend does not publish it."""

    taken_at_s: float  # Time at which the scrape was sent: the gauges cannot include requests booked later.
    running: int = 0
    waiting: int = 0
    kv_used: float | None = None  # Usage of the KV cache, 0..1.
    kv_tokens: int | None = None
    running_adapters: frozenset[str] = frozenset()  # From the newest `lora_requests_info`; more may be resident.
    max_adapters: int | None = None
    deferred: int = 0  # The part of `waiting` that waits for KV blocks of another engine, not for a batch slot.
    generated: int | None = None  # Tokens generated since the engine's process began.
    engines: int = 1  # Number of engines whose tokens `generated` counts, such as data-parallel ranks.

    def of_new_process(self, before: Reading) -> bool:
        """Returns whether the process is another one than in `before`: the same counter never falls in a process."""
        if self.generated is None or before.generated is None:
            return False
        return self.engines == before.engines and self.generated < before.generated


class Trouble(StrEnum):
    """The reason why a poll of a backend failed. Only several REFUSED in a row prove that the process is gone."""

    REFUSED = "refused"
    TIMEOUT = "no_answer"
    UNHEALTHY = "unhealthy"
    GARBAGE = "garbage"
    KEY = "key"
    LOCAL_FAILURE = "local_failure"


# --- outputs of the core ----------------------------------------------------------------------------------------------


class Verdict(StrEnum):
    """How one attempt ended, as evidence about the health of its backend."""

    SERVED = "served"
    CLIENT_GONE = "client_gone"
    CONNECT_FAILED = "connect_failed"
    FAILED = "failed"
    ENGINE_DEAD = "engine_dead"
    TIMED_OUT = "timed_out"
    UNAUTHORIZED = "unauthorized"  # The backend refused the key of the proxy.
    NOT_SERVED = "not_served"  # The backend does not serve a model that it lists.
    BUSY = "busy"
    DRAINING = "draining"
    LOST = "lost"
    PREEMPTED = "preempted"
    LOCAL_FAILURE = "local_failure"
    TRANSFER_FAILED = "transfer_failed"  # The KV transfer failed, on either side.


class Usage(Struct, frozen=True):
    """Token counts of an answer, as the engine reported them, over all its sequences."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None  # Prompt tokens that the engine found in its prefix cache; None if unreported.


class Price(Struct, frozen=True):
    """The estimated cost of a request on one backend."""

    backend: str
    total_s: float  # The sum of `terms`.
    terms: tuple[tuple[str, float], ...]
    ttft_s: float  # Seconds from the decision to the first token.
    tpot_s: float  # Seconds per token after the first one.
    cached_tokens: float  # Prompt tokens that are expected in the prefix cache of the backend.
    cold_adapter: bool  # Whether the adapter must be loaded, or its requests already wait for an adapter slot.
    fits: bool  # Whether the backend has a free slot now, and is open to prompts.


class Predicted(Struct, frozen=True):
    """The predicted duration of a part of an answer, at the grant."""

    expected_s: float
    p90_s: float

    def error_ratio(self, observed_s: float) -> float:
        """Returns the absolute error divided by `observed_s` (> 0). The mean over many predictions is the MAPE."""
        return abs(self.expected_s - observed_s) / observed_s

    def covers(self, observed_s: float) -> bool:
        """Returns whether `observed_s` is within the predicted 90th percentile."""
        return observed_s <= self.p90_s


class Placed(Struct, frozen=True):
    """The backend chosen for a request, and why it was chosen."""

    backend: str
    score: float
    terms: tuple[tuple[str, float], ...]  # Named components of `score`.
    candidates: int
    cached_tokens: int = 0  # Prompt tokens that are expected in the prefix cache of the backend.
    held_tokens: int = 0  # Prompt tokens in KV blocks that requests in flight use, so they need no new blocks.
    cold_adapter: bool = False
    ttft: Predicted | None = None  # Predicted time to the first token; None if the placement predicts none.
    tpot: Predicted | None = None
    # For a prefill stage, the backend that reserves a slot for the decode stage; else None.
    answers_on: str | None = None
    unsplit: bool = False  # Whether the backend serves both stages, although some backends of the pool have roles.


class Explained(Struct, frozen=True):
    """A placement decision, with the prices of all candidates."""

    id: str
    label: str
    model: str
    at_s: float
    prompt_tokens: int
    chosen: str
    prices: tuple[Price, ...]


class BackendPace(Struct, frozen=True):
    """The learned speed of one backend relative to its pool."""

    backend: str
    prefill_factor: float  # Prefill time relative to the pool; above 1 is slower.
    step_factor: float  # Time per decode step relative to the pool.
    busy_share: float  # Recent share of time spent on prefill.
    in_flight: int  # Sequences in flight on the backend.
    indexed_blocks: int  # Blocks of prompts believed to be in the prefix cache.
    indexed_blocks_max: int


class Learned(Struct, frozen=True):
    """The learned speed of a pool.

    The prefill of a prompt takes `prefill_base_s`, plus `prefill_token_s * (1 + prefill_attention * n)` for each
    uncached token that has `n` tokens before it.
    """

    prefill_base_s: float
    prefill_token_s: float
    prefill_attention: float
    step_s: float  # Time per output token of a sequence that runs alone.
    sequence_s: float  # Extra time per output token for each other sequence in the batch.
    adapter_s: float  # Seconds to load an adapter that the backend never had.
    ttft_p90_factor: float  # 90th percentile of the first-token time, divided by the expected time.
    tpot_p90_factor: float  # 90th percentile of the time per token, divided by the expected time.
    backends: tuple[BackendPace, ...]


class NoCapacity(Struct, frozen=True):
    """Each backend is full under the ceiling of this band, or closed to prompts. So lower bands wait too."""


class NoMatch(Struct, frozen=True):
    """The backends with a free slot cannot serve this request, or are worse than the full backend `later`."""

    # Whether no backend with room serves the model, so other requests for the model need not be tried.
    whole_model: bool
    later: str = ""  # A full backend that this request should wait for; other requests may still be placed.
    prefill_s: float = 0.0  # Predicted seconds to compute the request's prompt on the backend `later`.


class WaitReason(StrEnum):
    """The reason why the first request of a band waits."""

    NO_BACKEND = "no backend is up"
    FULL = "no backend has room"
    CEILING = "the room left is kept for higher bands"
    PROMPTS = "all backends have enough prompts to compute"
    HIGHER_BAND = "higher bands go first"
    LATER = "a full backend is expected to answer sooner than those with room"
    NO_MATCH = "no backend with room suits them yet"


class Waited(Struct, frozen=True):
    """The reason why a request waited."""

    rule: str  # The rule that blocked the request last.
    # Grants since the request began to wait, as `DrainRate.granted_since` returns them.
    went_first: tuple[tuple[int, str, int], ...] = ()


class GrantReason(Struct, frozen=True):
    """The state of the queue at a grant, which explains why this request was chosen."""

    waiting: tuple[tuple[int, int], ...]  # (band, waiting requests) from the highest band, including this request.
    flows: int  # Flows of the band with waiting requests, without rests of streams.
    standing: tuple[tuple[str, float], ...]  # Counters of the fairness policy for the flow.
    # Number of earlier requests of the band that were tried just before this one, and fitted on no backend.
    passed_over: int
    # Whether the grant was due to the minimum share of the band, although a higher band waited.
    guaranteed: bool = False
    # Whether a waiting request of a higher band could have used the backend, which must never happen.
    inverted: bool = False
    waited: Waited | None = None  # Why the request waited; None if it did not wait.
    probe: bool = False  # Whether the request tests an ejected backend.


class Grant(Struct, frozen=True):
    """Decision: `request` may use the backend of `placed` until its lease is finished. The slot is already counted."""

    lease: int
    request: Request
    placed: Placed
    at_s: float
    queued_ahead: int
    why: GrantReason
    left_s: float = inf  # Remaining queue time, in case the request has to wait again.


class Drop(Struct, frozen=True):
    """Decision: a waiting request leaves the waiting room without a backend."""

    request: Request
    outcome: Outcome
    retry_after_s: float
    waited: Waited | None = None


class Revoke(Struct, frozen=True):
    """Decision: a lease must end because its backend is gone or hangs."""

    lease: int
    request: Request
    backend: str
    # The backend hangs and may go on. The lease may go on too, if its stream has begun and can only go on there.
    hung: bool = False


class Preempt(Struct, frozen=True):
    """Decision: a lease must be returned before its first byte, for a waiting request of a higher band.

    The preempted request returns to the head of its flow, and the time that it has waited still counts.
    """

    lease: int
    request: Request
    backend: str


Decision = Grant | Drop | Revoke | Preempt


class Refused(Exception):  # noqa: N818 - a refusal is an answer, not an error of this code
    """A request was refused, or dropped from the waiting room. A retry may help after `retry_after_s`, if given."""

    def __init__(self, outcome: Outcome, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.retry_after_s = retry_after_s
