"""Computes how many replicas a pool needs, from its load in replica-seconds.

The number is the largest of several terms, where the terms of arrivals (`ahead`) and of waiting requests (`queue`) are
added up. The unit of a term is one replica that is fully, but not overly, used.

    p     = replica-seconds of a prompt: uncached tokens times seconds per token (`curve`)
    s(n)  = seconds of a step with n sequences (`curve`)
    u     = p / (p + output * s(n) / n), the share of its time that a replica spends on prompts
    seats = the most sequences with which a replica meets its objective: the least of its batch limit, 0.9 of the
    tokens of its KV cache divided by the mean tokens of a request, and the largest n with s(n) / (1 - u) below 0.8 of
    the objective per output token
    w     = p + output * s(seats) / seats, replica-seconds of a request with `output` tokens in its answer

Each replica has its own seats and its own w. The usual replica has the mean of 1 / w over the replicas that are up. If
all replicas are full and requests have waited for `FULL_S`, all replicas are needed, so `work` is at least the number
of replicas that are up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, inf, sqrt

from msgspec import Struct

from llmproxy.core.backends.batch_limit import UNPUBLISHED
from llmproxy.core.domain import Learned, Role
from llmproxy.core.scaling.curve import StepCurve, StepLine
from llmproxy.core.scaling.mix import LONG_S, NO_TOKENS, SHORT_S, TREND_S, Mix, Sizes, Tokens, total_requests
from llmproxy.core.settings import ScalingSettings

MARGIN = 0.8  # The share of an objective per output token that may be planned with, because batches vary.
KV_MARGIN = 0.9  # The share of a KV cache to plan with. An engine with a full cache preempts answers.
AHEAD_MAX = 0.6  # Rising arrivals add at most this share of the work for the start time of a replica.
ASK_S = 15.0  # The interval at which an autoscaler reads the number, which delays new replicas.
SIGMAS = 2.0  # Standard deviations of a Poisson process. A larger change of the arrivals is not chance.
ENDED_MIN = 30  # Number of answers after which the computed number of replicas is trusted.
FULL_S = 10.0  # Seconds of uninterrupted waiting, with every replica full, after which the load is not a burst.
TURNS = 8
PRESENT = "unknown"  # The reason for as many replicas as there are, while nothing is known of the load.
DIGITS = 2  # KEDA truncates numbers after three digits. With two digits it computes the same whole number of replicas.


class ReplicaFacts(Struct, frozen=True):
    """The properties of a replica that scaling needs."""

    up: bool  # Whether it is neither down nor drained. It may be ejected, or busy for a moment.
    limit: int | None  # Learned or configured batch limit, None if unknown.
    kv_tokens: int | None  # Size of the KV cache in tokens, None if unknown.
    kv_used: float | None  # Usage of the KV cache (0..1).
    max_adapters: int | None = None
    pace: float = 1.0  # Speed relative to the usual replica.
    role: Role = Role.BOTH
    full: bool = False  # Whether the replica has no room for another request of `from_band` or above.


class Demand(Struct, frozen=True):
    """The waiting and running requests of a pool, as scaling needs them besides the arrivals."""

    running: int  # Sequences in flight of the bands from `from_band` on.
    others: int  # Sequences in flight of lower bands.
    waiting: Sizes
    on_hold: int  # Requests on hold for a pool without replicas.
    adapters: int  # Number of different adapters requested in the last `ADAPTERS_S`.
    idle_s: float  # Seconds since the last request; 0 while any is in flight or waits.
    waited_s: float = 0.0  # Seconds for which at least one request has been waiting.


class Capacity(Struct, frozen=True):
    """The capacity of a usual replica for this mix of requests."""

    seats: float  # Maximum number of sequences at once.
    prompt_s: float  # Replica-seconds of a request's prompt.
    output_s: float  # Replica-seconds of a request's answer.

    @property
    def request_s(self) -> float:
        return self.prompt_s + self.output_s

    @property
    def requests_per_s(self) -> float:
        return 1.0 / self.request_s if self.request_s > 0.0 else inf


class RoleNeed(Struct, frozen=True):
    """The needed replicas of a role (`desired` is `need` rounded up), and the replicas that are up."""

    desired: int
    need: float
    up: int


class Need(Struct, frozen=True):
    """The number of replicas that a pool needs, and why."""

    desired: int  # Whole replicas, within the configured bounds.
    need: float  # The number of replicas before rounding and bounds.
    reason: str  # Name of the largest of `terms`, or of the bound or rule that decided.
    sure: bool  # Whether enough is known. Otherwise the current number is kept, unless the pool is idle or full.
    up: int
    terms: dict[str, float]  # Name of each term, such as the work, -> the replicas that the term asks for.
    prefill: float  # The part of the work that prompts need, in replicas.
    decode: float  # The part of the work that answers need, in replicas.
    capacity: Capacity | None
    waiting: int  # Number of waiting requests that demand replicas.
    waiting_s: float  # Replica-seconds of the waiting requests.
    start_s: float  # Seconds until a new replica serves.
    # The need of this proxy's own requests, 0 if unknown. The sum over several proxies is the need of all.
    own: float = 0.0
    roles: dict[str, RoleNeed] = {}


def replica_capacity(
    came: Tokens, learned: Learned | None, curve: StepCurve, replicas: Sequence[ReplicaFacts], tpot_s: float | None,
    kv_full_ratio: float, usual_limit: float = UNPUBLISHED,
) -> Capacity | None:  # fmt: skip
    """Returns the capacity of a replica for requests like `came`; None while it is unknown.

    `tpot_s` is the objective per output token, None without an objective. `usual_limit` is the batch limit of replicas
    without a learned limit.
    """
    line = curve.line
    if came.requests == 0.0 or line is None:
        return None
    attention = 0.0 if learned is None else learned.prefill_attention
    token_s = line.token_s
    if learned is not None and any(one.role is Role.PREFILL for one in replicas):
        # Decode replicas compute few prompts, so their answers say little about the time of a prompt token.
        token_s = learned.prefill_token_s
    prompt_s = token_s * came.compute * (1.0 + attention * came.before) / came.requests
    tokens = max(1.0, came.output / came.requests)
    usual_kv = mean_known([one.kv_tokens for one in replicas], inf)
    kv_seats = KV_MARGIN * kv_full_ratio / max(1.0, came.kv_tokens)
    replicas = replicas or [ReplicaFacts(False, None, None, None)]
    places = [max(1.0, min(one.limit or usual_limit, kv_seats * (one.kv_tokens or usual_kv))) for one in replicas]
    if tpot_s is not None:
        most = _largest_batch(tpot_s, line, prompt_s, tokens, max(places))
        places = [min(one, most) for one in places]
    none_up = not any(one.up for one in replicas)
    counted, seats, rate, prompts = 0, 0.0, 0.0, 0.0
    for one, own in zip(replicas, places, strict=True):
        if one.up or none_up:
            own_s = prompt_s + tokens * line.at(own) / own
            counted += 1
            seats += own
            rate += one.pace / own_s
            prompts += prompt_s / own_s
    return Capacity(seats / counted, prompts / rate, (counted - prompts) / rate)


def _largest_batch(tpot_s: float, line: StepLine, prompt_s: float, tokens: float, most: float) -> float:
    """Returns the largest number of sequences, at most `most`, with which output tokens meet the objective `tpot_s`.

    A request takes `prompt_s` for its prompt and generates `tokens`. `line` predicts the time of a step.
    """
    seats = min(most, 1e6)
    for _ in range(TURNS):
        output_s = tokens * line.at(seats) / seats
        share = prompt_s / (prompt_s + output_s)
        room_s = MARGIN * tpot_s * (1.0 - share) - line.base_s
        beyond = room_s / line.sequence_s if line.sequence_s > 0.0 else most if room_s > 0.0 else 1.0
        seats = min(most, max(1.0, (seats + beyond) / 2.0))
    return seats


def pool_need(
    mix: Mix, learned: Learned | None, curve: StepCurve, replicas: Sequence[ReplicaFacts], demand: Demand,
    settings: ScalingSettings, tpot_s: float | None, start_s: float, kv_full_ratio: float, now: float,
    usual_limit: float = UNPUBLISHED,
) -> Need:  # fmt: skip
    """Returns the need of a pool. A new replica serves after `start_s`; `tpot_s` is the objective per output token."""
    up = sum(one.up for one in replicas)
    full = up if demand.waited_s >= FULL_S and all(one.full for one in replicas if one.up) else 0
    came = mix.tokens(mix.within(now, LONG_S))
    capacity = replica_capacity(came, learned, curve, replicas, tpot_s, kv_full_ratio, usual_limit)
    waiting = round(total_requests(demand.waiting.values())) + demand.on_hold
    # The restored data of an earlier process gives the cost of requests, but not the current rate of arrivals.
    known = mix.ended >= ENDED_MIN or (mix.restored and mix.span_s(now, SHORT_S) >= SHORT_S)
    if capacity is None or not known:
        return _unchanged(up, full, demand, settings, waiting, start_s)
    work, prefill = _work(mix, came, capacity, now)
    if work < full:
        work, prefill = float(full), prefill * _ratio(full, work)
    ahead = work * (1.0 + _trend(mix, start_s, now))
    waits = mix.tokens(demand.waiting) if waiting else NO_TOKENS
    prompts_s, answers_s = _seconds(waits, came, capacity)
    waiting_s = prompts_s + answers_s
    counted = _ratio(demand.running, demand.running + demand.others)
    adapters_max = [one.max_adapters for one in replicas if one.max_adapters]
    terms = {
        "work": work / settings.utilisation,
        "ahead": ahead / settings.utilisation,
        "queue": waiting_s / settings.target_wait_s,
        "seats": demand.running / capacity.seats,
        # A full cache counts as one replica, so replicas whose cache is always full do not ask for more replicas.
        "kv": counted * sum(min(1.0, (one.kv_used or 0.0) / kv_full_ratio) for one in replicas if one.up),
        "adapters": demand.adapters / min(adapters_max) if adapters_max else 0.0,
    }
    by = {name: terms[name] for name in ("seats", "kv", "adapters")}
    own = terms["ahead"] + terms["queue"]
    by["queue" if terms["queue"] > terms["ahead"] else "ahead" if ahead > work else "work"] = own
    reason = max(by, key=lambda name: by[name])
    need = by[reason]
    if demand.idle_s >= settings.idle_s and not waiting:
        reason, need, own = "idle", 0.0, 0.0
    need, own = round(need, DIGITS), round(own, DIGITS)
    desired, reason = _bounded(ceil(need), reason, settings)
    if waiting and desired == 0:
        desired, reason = 1, "queue"
    return Need(
        desired, need, reason, True, up, terms, prefill / settings.utilisation, (work - prefill) / settings.utilisation,
        capacity, waiting, waiting_s, start_s, own,
    )  # fmt: skip


def _unchanged(up: int, full: int, demand: Demand, settings: ScalingSettings, waiting: int, start_s: float) -> Need:
    """Returns the need while too little is known: the current replicas, more if all are full, fewer in an idle pool."""
    need = 0.0
    if demand.idle_s >= settings.idle_s and not waiting:
        # Without requests for `idle_s`, the pool is idle whatever its capacity.
        desired, reason = _bounded(0, "idle", settings)
    elif full:
        need = round(full / settings.utilisation, DIGITS)
        desired, reason = _bounded(ceil(need), "queue", settings)
    else:
        desired, reason = max(up, settings.min, 1 if waiting else 0), "queue" if waiting and not up else PRESENT
    return Need(desired, need or float(desired), reason, False, up, {}, 0.0, 0.0, None, waiting, 0.0, start_s)


def _seconds(some: Tokens, came: Tokens, capacity: Capacity) -> tuple[float, float]:
    """Returns the replica-seconds of `some` for prompts and for answers. `capacity` is for requests like `came`."""
    prompts_s = capacity.prompt_s * came.requests * _ratio(some.compute, came.compute)
    return prompts_s, capacity.output_s * came.requests * _ratio(some.output, came.output)


def _work(mix: Mix, came: Tokens, capacity: Capacity, now: float) -> tuple[float, float]:
    """Returns the work that arrives per second in replica-seconds, and the part of prompts in this work.

    Both are means over LONG_S, or over SHORT_S if the work of the last seconds is clearly larger.
    """
    per_s = came.requests / mix.span_s(now, LONG_S)
    work, prefill = per_s * capacity.request_s, per_s * capacity.prompt_s
    # The mix of the last seconds may differ from the mix of the last minutes.
    short = mix.tokens(mix.within(now, SHORT_S))
    span_s = mix.span_s(now, SHORT_S)
    prompts, outputs = (seconds / span_s for seconds in _seconds(short, came, capacity))
    noise = SIGMAS / sqrt(short.requests) if short.requests else inf
    if prompts + outputs > work * (1.0 + noise):
        return prompts + outputs, prompts
    return work, prefill


def _trend(mix: Mix, start_s: float, now: float) -> float:
    """Returns the share by which the load will have grown when a replica requested now serves, at most `AHEAD_MAX`."""
    if mix.span_s(now, LONG_S + TREND_S) < LONG_S + TREND_S:
        return 0.0
    new = mix.requests_within(now, TREND_S) * TREND_S / mix.span_s(now, TREND_S)
    old = mix.requests_within(now, LONG_S + TREND_S, LONG_S)
    if new <= 0.0 or new - old <= SIGMAS * sqrt(new + old):
        return 0.0
    # After a step change the latest two windows show no further rise, so the smaller slope counts.
    middle = mix.requests_within(now, 2 * TREND_S, TREND_S)
    slope = max(0.0, min((new - old) / LONG_S, (new - middle) / TREND_S)) / TREND_S
    return min(AHEAD_MAX, slope * (start_s + ASK_S) / (new / TREND_S))


def _bounded(desired: int, reason: str, settings: ScalingSettings) -> tuple[int, str]:
    if desired < settings.min:
        return settings.min, "min"
    if settings.max is not None and desired > settings.max:
        return settings.max, "max"
    return desired, reason


def mean_known(values: Iterable[int | None], otherwise: float) -> float:
    """Returns the mean of the values that are not None, or `otherwise` if all are None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else otherwise


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 0.0
