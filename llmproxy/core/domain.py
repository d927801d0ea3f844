"""The facts that go into decisions, and the decisions that come out. All are frozen.

Times are seconds on one monotonic clock chosen by the caller. They are `Struct`s and no dataclasses because every
request makes a dozen of them, and a frozen `Struct` of twenty fields is made in 0.1 µs instead of 2.
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
BAND_NAMES: Mapping[str, int] = {"critical": CRITICAL, "default": DEFAULT, "standard": DEFAULT, "sheddable": SHEDDABLE}


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
    REJECTED_LIMITS_AWAY = "rejected_limits_away"
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
    """What a backend is meant to compute: whole answers, prompts for others, or answers to prompts of others."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Stage(StrEnum):
    """The part of a request that one lease is for. A request that is split has one lease for each of two parts.

    The `prefill` computes the prompt, and the `decode` fetches what was computed and brings the answer.
    """

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


# Each decision asks for the stage some thirty times, and CPython 3.11 takes 0.14 µs to find a member in its class.
WHOLE: Final = Stage.WHOLE
PREFILL: Final = Stage.PREFILL
DECODE: Final = Stage.DECODE


class RequestFacts(Struct, frozen=True):
    """What scheduling needs of one request body.

    `model` is None when the body names none (absent, null or empty). `prompt_bytes` counts the UTF-8 bytes of the text
    that the engine will tokenise (images and audio are not text); `prompt_tokens` is set instead where the prompt came
    as token ids and is therefore exact. `sequences` is how many sequences the engine will run at once (`n` times the
    number of prompts). `prepared`: media, a grammar or a very large body, which take an engine time before it begins.
    """

    model: str | None
    stream: bool = False
    prompt_bytes: int = 0
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    sequences: int = 1
    prepared: bool = False


class Slo(Struct, frozen=True):
    """A latency objective: seconds from arrival to the first token, mean seconds per output token after it.

    None where that part is not asked for; at least one part is.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Whether an answer kept the objective; `ttft_s` is None where no token came, `tpot_s` where only one did."""
        if ttft_s is None or (self.ttft_s is not None and ttft_s > self.ttft_s):
            return False
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s


class Request(Struct, frozen=True):
    """One request as the scheduler sees it: identity, flow, band, cost, arrival and deadline.

    `weight` is the share of its flow. `limits` names the usage limits that it counts against (of its tenant, its
    model). `label` is what its client and the log call it. `prefix` are the chained hashes of its prompt's whole
    blocks, of about `prefix_tokens` tokens each. `session` is a hash that the requests of one session share, None
    without a session. `backend` is the only one that the request may go to, because it keeps what the request refers
    to; None when any backend may serve it. `splittable`: one backend may compute the prompt and another the answer;
    `stage` is the part that this is. `prepared` is as in `RequestFacts`. `avoid` names the backend that refused it as
    busy, "" for none: it goes to another one where one is up.
    """

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
    weight: float = 1.0
    slo: Slo | None = None
    limits: tuple[str, ...] = ()
    label: str = ""
    prefix: tuple[int, ...] = ()
    prefix_tokens: float = 0.0
    session: str | None = None
    backend: str | None = None
    splittable: bool = False
    stage: Stage = Stage.WHOLE
    prepared: bool = False
    avoid: str = ""


class Entry(StrEnum):
    """How a request comes into the waiting room."""

    NEW = "new"
    RETRY = "retry"
    PREEMPTED = "preempted"
    PREFILLED = "prefilled"  # Its prompt was computed on one backend, and it looks for another one for the answer.
    RESUMED = "resumed"  # It was admitted by another scheduler, which is gone.
    SEEKING = "seeking"  # It looks for the backend that keeps what it refers to; the excluded ones do not.


class ModelCard(Struct, frozen=True):
    """One entry of a backend's `/v1/models`. `parent` is the base model of an adapter, None for a base model."""

    name: str
    parent: str | None
    max_model_len: int | None
    fields: Mapping[str, Any] = field(default_factory=dict)


class Listing(Struct, frozen=True):
    """One answer of a backend's `/v1/models`, in its own order."""

    taken_at_s: float
    cards: tuple[ModelCard, ...]


class KnownLimit(Struct, frozen=True):
    """The batch limit of an engine as an earlier process learned it.

    `settled`: the engine was seen to run no more; else it was never seen to be full. It is true of an engine that lists
    the same base models (sorted), with the same context length.
    """

    limit: int
    settled: bool
    models: tuple[str, ...]
    max_model_len: int | None = None


class KnownCapacity(Struct, frozen=True):
    """What an earlier process learned of the replicas of a pool and of its requests, for `core.scaling`.

    `sums` are those of `StepCurve`. `sizes` are (size class of the prompt, answers seen, their tokens on average, the
    share of the prompt that was cached), and `squares` the means of the squares of those tokens, in the same order.
    """

    sums: tuple[float, ...]
    sizes: tuple[tuple[int, int, float, float], ...]
    squares: tuple[float, ...] = ()


class Reading(Struct, frozen=True):
    """The numbers of one scrape of one backend; a value the backend does not publish is None.

    `taken_at_s` is when the scrape was *sent*: work booked after it cannot be in these numbers. `kv_used` is 0..1.
    Of those `waiting`, the `deferred` ones wait for something else than a place, such as KV of another engine.
    `generated` counts the tokens that the engine has generated since its process began.
    `running_adapters` are those of the newest `lora_requests_info` series; they are surely resident, others may be.
    """

    taken_at_s: float
    running: int = 0
    waiting: int = 0
    kv_used: float | None = None
    kv_tokens: int | None = None
    running_adapters: frozenset[str] = frozenset()
    max_adapters: int | None = None
    deferred: int = 0
    generated: int | None = None


class Trouble(StrEnum):
    """Why a poll of a backend gave no reading. The kinds differ in how much they prove."""

    REFUSED = "refused"
    TIMEOUT = "no_answer"
    UNHEALTHY = "unhealthy"
    GARBAGE = "garbage"
    LOCAL_FAILURE = "local_failure"


# --- what the core answers --------------------------------------------------------------------------------------------


class Verdict(StrEnum):
    """What one attempt proved about its backend; set when the lease ends."""

    SERVED = "served"
    CLIENT_GONE = "client_gone"
    CONNECT_FAILED = "connect_failed"
    FAILED = "failed"
    ENGINE_DEAD = "engine_dead"
    TIMED_OUT = "timed_out"
    UNAUTHORIZED = "unauthorized"  # It refuses the key of the proxy.
    NOT_SERVED = "not_served"  # It does not serve what it lists.
    BUSY = "busy"
    DRAINING = "draining"
    LOST = "lost"
    PREEMPTED = "preempted"
    LOCAL_FAILURE = "local_failure"
    TRANSFER_FAILED = "transfer_failed"  # What another backend computed did not arrive; which side failed is open.


class Usage(Struct, frozen=True):
    """Tokens as the engine counted them; `cached_tokens` is None where the engine does not say."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


class Price(Struct, frozen=True):
    """What a request costs on one backend, in seconds; `terms` add up to `total_s`.

    Its client would see the first token `ttft_s` after dispatch and then one each `tpot_s`; `cached_tokens` of the
    prompt would be found in the cache; a `cold_adapter` has to be loaded or waited for. `fits`: there is room for it
    now.
    """

    backend: str
    total_s: float
    terms: tuple[tuple[str, float], ...]
    ttft_s: float
    tpot_s: float
    cached_tokens: float
    cold_adapter: bool
    fits: bool


class Predicted(Struct, frozen=True):
    """A time as it was predicted at dispatch: expected, and one that is exceeded in one case of ten."""

    expected_s: float
    p90_s: float

    def error_ratio(self, observed_s: float) -> float:
        """How far off it was, as a part of what was observed (> 0); the mean of many is known as MAPE."""
        return abs(self.expected_s - observed_s) / observed_s

    def covers(self, observed_s: float) -> bool:
        """Whether it took no longer than nine cases of ten should."""
        return observed_s <= self.p90_s


class Placed(Struct, frozen=True):
    """Where, and why: `terms` are the named parts of the chosen backend's score.

    `cached_tokens` of the prompt are expected in its prefix cache, and `held_tokens` in the KV-cache in any case,
    because requests in flight hold them. `ttft` (from dispatch) and `tpot` are as in `Price`, None without a
    prediction. `answers_on`: only the prompt is computed here, and that backend keeps a place for the answer.
    `unsplit`: the backends have roles, and this one is given the whole request.
    """

    backend: str
    score: float
    terms: tuple[tuple[str, float], ...]
    candidates: int
    cached_tokens: int = 0
    held_tokens: int = 0
    cold_adapter: bool = False
    ttft: Predicted | None = None
    tpot: Predicted | None = None
    answers_on: str | None = None
    unsplit: bool = False


class Explained(Struct, frozen=True):
    """One placement made at `at_s`: the prices of all candidates, and the backend that was chosen.

    `id`, `label` and `model` are those of the request.
    """

    id: str
    label: str
    model: str
    at_s: float
    prompt_tokens: int
    chosen: str
    prices: tuple[Price, ...]


class BackendPace(Struct, frozen=True):
    """One backend beside its pool: it takes `prefill_factor` and `step_factor` times as long for prompts and steps.

    `busy_share` of its time lately went into prompts, and `in_flight` sequences are there. `indexed_blocks` of prompts
    are believed to be in its prefix cache, and no more than `indexed_blocks_max` ever are.
    """

    backend: str
    prefill_factor: float
    step_factor: float
    busy_share: float
    in_flight: int
    indexed_blocks: int
    indexed_blocks_max: int


class Learned(Struct, frozen=True):
    """What was learned of a pool's speed so far.

    A prompt takes `prefill_base_s` and `prefill_token_s` for each token that is not cached, and the share
    `prefill_attention` of that more for each token before it. A token of an answer takes `step_s` where its sequence is
    alone, and `sequence_s` more for each other one. A cold adapter takes `adapter_s`.
    One case of ten exceeds what is expected of a first token `ttft_p90_factor` times, and of each further one
    `tpot_p90_factor` times.
    """

    prefill_base_s: float
    prefill_token_s: float
    prefill_attention: float
    step_s: float
    sequence_s: float
    adapter_s: float
    ttft_p90_factor: float
    tpot_p90_factor: float
    backends: tuple[BackendPace, ...]


class NoCapacity(Struct, frozen=True):
    """No backend has room under this band's ceiling. Lower bands are not served either, so that priority is strict."""


class NoMatch(Struct, frozen=True):
    """Some backend has room, but none for this request: the fairness policy may offer its next flow.

    `whole_model`: no backend with room serves the model at all, so that its other requests need not be tried. `later`
    names a full backend that this request should wait for, "" for none; other requests may still find a place.
    """

    whole_model: bool
    later: str = ""


class Reason(StrEnum):
    """Why the first request of a band waits."""

    NO_BACKEND = "no backend is up"
    FULL = "no backend has room"
    CEILING = "the room left is kept for higher bands"
    PROMPTS = "all backends have enough prompts to compute"
    HIGHER_BAND = "higher bands go first"
    LATER = "a full backend is expected to answer sooner than those with room"
    NO_MATCH = "no backend with room suits them yet"


class Waited(Struct, frozen=True):
    """Why a request waited.

    `rule` held it back last. `went_first` counts the grants since it began to wait, as `DrainRate.since` returns them.
    """

    rule: str
    went_first: tuple[tuple[int, str, int], ...] = ()


class Why(Struct, frozen=True):
    """Why this request was granted and no other, noted at the decision.

    `waiting` counts requests by band, highest first, this one among them; `flows` the flows of its band that had some.
    `standing` is what the fairness policy counted for its flow. `passed_over` requests of its band came before it
    and fitted nowhere. `guaranteed`: it went by the minimum share of its band, although a higher band waited.
    `inverted`: a waiting request of a higher band could have had the backend instead, which must never be.
    `waited` is None for a request that did not wait. `probe`: its backend was ejected, and the request
    tests whether it has recovered.
    """

    waiting: tuple[tuple[int, int], ...]
    flows: int
    standing: tuple[tuple[str, float], ...]
    passed_over: int
    guaranteed: bool = False
    inverted: bool = False
    waited: Waited | None = None
    probe: bool = False


class Grant(Struct, frozen=True):
    """`request` may use the backend of `placed` until the lease is finished; it is booked there already.

    `left_s` is what is left of its own time to wait, in case it has to wait again.
    """

    lease: int
    request: Request
    placed: Placed
    at_s: float
    queued_ahead: int
    why: Why
    left_s: float = inf


class Drop(Struct, frozen=True):
    """A queued request leaves the waiting room without a backend."""

    request: Request
    outcome: Outcome
    retry_after_s: float
    waited: Waited | None = None


class Revoke(Struct, frozen=True):
    """A lease whose backend is gone: nothing more will come from it."""

    lease: int
    request: Request
    backend: str


class Preempt(Struct, frozen=True):
    """A lease to be given back before its first byte, for a waiting request of a higher band.

    Its request goes back to the head of its flow, with the time that it has waited.
    """

    lease: int
    request: Request
    backend: str


Decision = Grant | Drop | Revoke | Preempt


class Refused(Exception):  # noqa: N818 - a refusal is an answer, not an error of this code
    """A request was not admitted to the waiting room, or had to leave it.

    `retry_after_s` is how long the client should wait, by the measured drain rate; None when waiting cannot help.
    """

    def __init__(self, outcome: Outcome, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.retry_after_s = retry_after_s
