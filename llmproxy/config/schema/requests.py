"""Sections of requests: names and tenants, scheduling, and the limits of time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from llmproxy.config import idle
from llmproxy.config.schema.section import Section
from llmproxy.config.value_types import (
    SESSIONS,
    Count,
    Criticality,
    Disaggregated,
    Fraction,
    Integer,
    KeyHash,
    Moment,
    Name,
    Number,
    Rate,
    Seconds,
    Sessions,
    Weight,
    flow_of,
    from_text,
    named_in,
    one_of,
    salt_of,
)
from llmproxy.core.kv_connectors import connectors
from llmproxy.core.placement.policy import presets
from llmproxy.core.queueing.charge import charges
from llmproxy.core.queueing.fairness import policies
from llmproxy.core.queueing.ordering import orderings


class LimitsConfig(Section):
    in_flight: Count | None = None
    """Most requests in flight; others wait. null: no limit."""
    requests_per_min: Rate | None = None
    """Most requests per minute; others get 429. null: no limit."""
    tokens_per_min: Rate | None = None
    """Most prompt and output tokens per minute; then 429. null: no limit."""
    requests_per_day: Count | None = None
    """Most requests per day (usage.time_zone); others get 429. null: no limit."""
    tokens_per_day: Count | None = None
    """Most prompt and output tokens per day; then 429. null: no limit."""
    prompt_tokens_max: Count | None = None
    """Most estimated tokens of a prompt; longer ones get 400. null: the engine's limit."""
    max_tokens_max: Count | None = None
    """Most tokens that a request may ask for (max_tokens and its other names); more get 400. The default of chats,
    completions, responses and messages. null: the engine's limit."""


Ttft = Annotated[Seconds | None, idle.plausible("ttft_s", 600.0), idle.looked_at("ttft_s")]
Tpot = Annotated[Seconds | None, idle.plausible("tpot_s", 10.0), idle.looked_at("tpot_s")]


class ModelConfig(Section):
    name: Name = Field(examples=["gpt-4"])
    """A base model, an adapter or an alias. *: every name without an entry."""
    target: Name | None = Field(default=None, examples=["llama-3.1-8b"])
    """Base model or adapter behind an alias. null: no alias, or targets."""
    targets: dict[str, Weight] = Field(default={}, examples=[{"llama-3.1-8b": 9, "llama-3.3-8b": 1}])
    """Base models or adapters behind an alias, with weights; one may have its name. A session keeps its target. A
    target that no backend serves gets no requests."""
    base: Name | None = Field(default=None, examples=["llama-3.1-8b"])
    """Base model whose engines load this adapter at its first request (a LoRA resolver), even if none lists it. NAME*
    is every name with this prefix; they share band, objectives and limits. null: only listed names are served."""
    criticality: Criticality | None = Field(default=None, examples=["critical"])
    """Band: a name or an integer. null: the target's, else default."""
    ttft_s: Ttft = None
    """Objective for the time to first token, from arrival. null: the target's, else none."""
    tpot_s: Tpot = None
    """Objective for the mean time per further token. null: the target's, else none."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of all requests of this name. An alias counts for its target too."""

    @property
    def stands_for(self) -> str | Mapping[str, float] | None:
        """The target or targets of an alias; None without an alias."""
        return self.target if self.target is not None else self.targets or None


class ObjectiveConfig(Section):
    name: Name = Field(examples=["interactive"])
    """Value of the header x-llm-d-inference-objective, from trusted clients only."""
    criticality: Criticality | None = None
    """Band: a name or an integer. null: as without the header."""
    ttft_s: Ttft = None
    """Objective for the time to first token, from arrival. null: the tenant's or the model's."""
    tpot_s: Tpot = None
    """Objective for the mean time per further token. null: the tenant's or the model's."""


class KeyConfig(Section):
    hash: KeyHash = Field(repr=False)
    """Hash of an API key (`llmproxy hash-key`). A plain hash can be the whole entry."""
    expires: Moment | None = Field(default=None, examples=["2027-01-31"])
    """Date or timestamp from which the key is refused, in UTC without a zone. null: never."""
    name: Name | None = Field(default=None, examples=["laptop"])
    """Name in logs, on the page and in key_metrics. null: its position, such as keys[0]."""


class TenantConfig(Section):
    name: Name = Field(examples=["research"])
    """Name in logs and metrics."""
    keys: tuple[Annotated[KeyConfig, from_text("hash")], ...]
    """Hashes of API keys. With two, a tenant can replace one without an interruption."""
    criticality: Criticality | None = None
    """Band, unless a trusted header names another. null: the model's."""
    band_max: Criticality | None = None
    """Highest band. null: no limit if trusted, else headers do not raise the band."""
    weight: Annotated[Weight, idle.WEIGHTS, idle.Rule(idle.tenants_set_apart)] = 1.0
    """Weight of the tenant's flows against other flows of the band."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of all its requests."""
    models: tuple[Name, ...] | None = Field(default=None, examples=[["llama-3.1-8b"]])
    """Model names that it may request; others are unknown to it. null: all names."""
    cache_salt: Annotated[str, AfterValidator(salt_of)] | None = Field(default=None, repr=False)
    """Separates its prompts in prefix caches: auto, or a secret that tenants can share. null: none."""
    trusted: bool = False
    """Its objective, fairness and SLO headers count, from any address."""
    ttft_s: Ttft = None
    """Objective for the time to first token, from arrival. null: the model's."""
    tpot_s: Tpot = None
    """Objective for the mean time per further token. null: the model's."""

    def key_names(self) -> list[str]:
        """Returns the names of the keys, in order."""
        return [key.name or f"keys[{i}]" for i, key in enumerate(self.keys)]

    @field_validator("keys")
    @classmethod
    def _has_keys(cls, keys: tuple[KeyConfig, ...]) -> tuple[KeyConfig, ...]:
        if not keys:
            raise ValueError("is empty: a tenant is known by its keys; `llmproxy hash-key --new` makes one")
        names = Counter(key.name for key in keys if key.name is not None)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"has two keys of the name {twice[0]}: nobody could tell which of them is used")
        return keys

    @field_validator("models")
    @classmethod
    def _allows_something(cls, models: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if models == ():
            raise ValueError("is empty: nothing could be asked for; leave it out to allow all")
        return models


class SchedulingConfig(Section):
    fairness: Annotated[
        str, named_in(policies.names, locality_fair_share="fair_share"), idle.Rule(idle.objectives_measured)
    ] = "fair_share"
    """Next flow of a band: fair_share, slo, round_robin or fcfs."""
    ordering: Annotated[str, named_in(orderings.names, edf="least_slack", shortest="least_slack")] = "least_slack"
    """Next request of a flow: least_slack (by objectives; fcfs without) or fcfs."""
    placement: Annotated[
        str, named_in(presets.names, blend="cost", power_of_two="least_request", random="least_request")
    ] = "cost"
    """Backend of a request: cost, session, least_request or round_robin."""
    flow: Annotated[str, AfterValidator(flow_of)] = Field(default="model", examples=["header:x-team"])
    """Requests of one flow have the same model (the requested name), tenant, tenant+model or header:NAME (a trusted
    header)."""
    session: Annotated[Sessions, idle.SESSION] = Field(default=SESSIONS, examples=[["header:x-user-id", "cookie:SID"]])
    """Places of the session: header:NAME, cookie:NAME or body:NAME. The first with a value counts."""
    fairness_cost: Annotated[str, named_in(charges.names, kv_seconds="tokens"), idle.FAIRNESS_COST] = "tokens"
    """Cost that fair_share divides: tokens or requests."""
    ceilings: dict[str, Fraction] = Field(default={"critical": 1.0, "default": 0.95, "sheddable": 0.85})
    """Part of a backend (above 0, at most 1) that a band may fill. Other bands: as the next lower band; idle and below:
    0.01."""
    headroom_s: Annotated[Number, Field(ge=0)] = 60.0
    """Time after a request of a band in which lower bands leave it a free slot. 0: none."""
    min_shares: dict[str, Annotated[Number, Field(ge=0, le=1)]] = Field(default={}, examples=[{"sheddable": 0.05}])
    """Least share of the work (0 to 1) of a waiting band, against higher bands too."""
    weights: Annotated[dict[str, Weight], idle.WEIGHTS] = Field(default={}, examples=[{"my-model": 2.5}])
    """Weights of flows by name. Others: the tenant's, or 1."""
    input_weight: Annotated[Number, Field(ge=0), idle.TOKEN_WEIGHT] = 1.0
    """Cost of a prompt token."""
    output_weight: Annotated[Number, Field(gt=0), idle.TOKEN_WEIGHT] = 2.0
    """Cost of an output token."""
    slo_window_s: Annotated[Seconds, idle.unless_policy("fairness", "slo")] = 300.0
    """Window in which fairness `slo` counts objectives."""
    preemption: bool = True
    """Take requests of bands below default, before their first byte, back for requests of bands above default."""
    refuse_late: Annotated[bool, idle.unless(idle.has_objectives, idle.NO_OBJECTIVE)] = False
    """Refuse a request (429) that would miss its objective even as the next one."""
    look_ahead: Annotated[Integer, Field(ge=0)] | None = None
    """Requests above an engine's batch limit, so that it is never idle. null: measured."""
    prompt_window_s: Annotated[Seconds | None, idle.unless_policy("placement", "cost")] = 0.3
    """A backend gets no prompts while its present ones take longer than this. Placement `cost` only. null: no limit."""
    disaggregation: Annotated[Disaggregated, idle.WITHOUT_ROLES] = Field(default="auto", examples=[512])
    """Compute prompts on prefill backends: auto (if faster), always, never, or from so many tokens that no decode
    backend has cached."""
    kv_connector: Annotated[str, named_in(connectors.names), idle.WITHOUT_ROLES] = "nixl"
    """How backends pass KV caches on: nixl (NixlConnector; the second engine pulls) or store (LMCache, Mooncake, a
    folder)."""
    kv_lease_s: Annotated[Seconds, idle.WITHOUT_ROLES] = 30.0
    """Time for which an engine keeps a KV cache for another: vLLM's kv_lease_duration."""
    warm_up_pairs: Annotated[bool, idle.WITHOUT_ROLES] = True
    """Send a short prompt through each pair of prefill and decode backends after a start: the first transfer is
    slow."""
    initial_batch_limit: Count = 4
    """Batch limit of an engine until it is known."""
    kv_full_ratio: Fraction = 1.0
    """KV cache usage (above 0, at most 1) of a full backend, for placement and for `/scale`."""
    seed: Integer | None = None
    """Seed of random choices. null: another one at each start."""


class QueueConfig(Section):
    max_wait_s: Seconds = 60.0
    """Longest wait."""
    band_max_wait_s: dict[str, Seconds] = Field(default={}, examples=[{"sheddable": 600}])
    """Longest wait, by band."""
    no_backend_wait_s: Annotated[Number, Field(ge=0)] = 30.0
    """Longest further wait while no backend for the request is up. 0: refuse at once."""
    startup_wait_s: Annotated[Number, Field(ge=0)] = 10.0
    """Longest further wait after the start, until any backend has answered. The shorter of both times counts."""
    requests_max: Count = 20_000
    """Most waiting requests."""
    bytes_max: Count = 1 << 30
    """Most bytes of waiting bodies, a part of body_bytes_total_max."""
    tokens_max: Count | None = None
    """Most estimated tokens of waiting requests. null: no limit."""
    band_requests_max: Count = 10_000
    """Most waiting requests of a band."""
    band_bytes_max: Count = 1 << 30
    """Most bytes of waiting bodies of a band."""
    band_tokens_max: Count | None = None
    """Most estimated tokens of a band. null: no limit."""
    flow_requests_max: Count | None = None
    """Most waiting requests of a flow. null: no limit."""
    flow_bytes_max: Count | None = None
    """Most bytes of waiting bodies of a flow. null: no limit."""
    flow_tokens_max: Count | None = None
    """Most estimated tokens of a flow. null: no limit."""


class TimeoutsConfig(Section):
    connect_s: Seconds = 5.0
    """Longest time to connect."""
    first_byte_s: Seconds = 300.0
    """Longest time from dispatch to the first body byte of a stream."""
    stall_s: Seconds = 120.0
    """Longest pause in a stream."""
    total_s: Seconds = 3600.0
    """Longest time from dispatch to the last byte."""
    keep_alive_s: Seconds | None = None
    """Time between comments (`: keep-alive`) before a stream begins. The first sends status 200, so that later errors
    are events. null: no comments."""
    adapter_s: Seconds = 120.0
    """Longest time to load or unload an adapter."""


CONTINUED = ("off", "safe", "always")
"""The values of `retry.continue`."""


_WITH_RETRIES = idle.unless(lambda config: config.retry.extra_attempts > 0, "retry.extra_attempts is 0")


class RetryConfig(Section):
    extra_attempts: Annotated[Integer, Field(ge=0, le=100)] = 2
    """Most further attempts."""
    budget_ratio: Annotated[Number, Field(ge=0, le=1), _WITH_RETRIES] = 0.2
    """Most retries, as a share of all requests."""
    continue_: Annotated[str, one_of(CONTINUED), _WITH_RETRIES] = Field(default="safe", alias="continue")
    """Streams that continue on another replica when theirs fails. off: none. safe: those without options that depend on
    all tokens of the answer, such as `seed` and penalties. always: also with these options."""
