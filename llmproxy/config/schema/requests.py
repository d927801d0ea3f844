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
    """Most requests in flight; further ones wait. null: no limit."""
    requests_per_min: Rate | None = None
    """Most requests per minute; further ones get 429. null: no limit."""
    tokens_per_min: Rate | None = None
    """Most prompt and output tokens per minute; further requests get 429. null: no limit."""
    requests_per_day: Count | None = None
    """Most requests per day (usage.time_zone); further ones get 429. null: no limit."""
    tokens_per_day: Count | None = None
    """Most prompt and output tokens per day (usage.time_zone); further requests get 429. null: no limit."""
    prompt_tokens_max: Count | None = None
    """Most estimated tokens of a prompt; requests with longer ones get 400. null: the engine's limit."""
    max_tokens_max: Count | None = None
    """Most tokens that a request may ask for (max_tokens and its other names); requests for more get 400. A chat,
    completion, response or message that asks for no number gets this one. null: the engine's limit."""


Ttft = Annotated[Seconds | None, idle.plausible("ttft_s", 600.0), idle.looked_at("ttft_s")]
Tpot = Annotated[Seconds | None, idle.plausible("tpot_s", 10.0), idle.looked_at("tpot_s")]


class ModelConfig(Section):
    name: Name = Field(examples=["gpt-4"])
    """A base model, an adapter or an alias. *: every name without an entry."""
    target: Name | None = Field(default=None, examples=["llama-3.1-8b"])
    """Base model or adapter behind an alias. null: no alias, or targets."""
    targets: dict[str, Weight] = Field(default={}, examples=[{"llama-3.1-8b": 9, "llama-3.3-8b": 1}])
    """Base models or adapters behind an alias, with their weights; one may have the name of the alias. A session keeps
    its target. A target that no backend serves gets no requests."""
    base: Name | None = Field(default=None, examples=["llama-3.1-8b"])
    """Base model whose engines load this adapter at its first request (a LoRA resolver), even if no engine lists it. An
    entry named PREFIX* is for every name with this prefix; these names share band, objectives and limits. null: the
    name is served only if an engine lists it."""
    criticality: Criticality | None = Field(default=None, examples=["critical"])
    """Band: a name or an integer. null: the target's, else default."""
    ttft_s: Ttft = None
    """Objective for the time to first token, from arrival. null: the target's, else none."""
    tpot_s: Tpot = None
    """Objective for the mean time per further token. null: the target's, else none."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of all requests for this name. Requests for an alias count for its target too."""

    @property
    def stands_for(self) -> str | Mapping[str, float] | None:
        """The target or targets of an alias; None without an alias."""
        return self.target if self.target is not None else self.targets or None


class ObjectiveConfig(Section):
    name: Name = Field(examples=["interactive"])
    """Value of the header x-llm-d-inference-objective. From clients without trust, it can only lower the band."""
    criticality: Criticality | None = None
    """Band: a name or an integer. null: as without the header."""
    ttft_s: Ttft = None
    """Objective for the time to first token, from arrival. null: the tenant's or the model's."""
    tpot_s: Tpot = None
    """Objective for the mean time per further token. null: the tenant's or the model's."""


class KeyConfig(Section):
    hash: KeyHash = Field(repr=False)
    """Hash of an API key (`llmproxy hash-key`). An entry with only a hash can be the hash itself."""
    expires: Moment | None = Field(default=None, examples=["2027-01-31"])
    """Date or timestamp from which the key is refused; in UTC if it has no time zone. null: never."""
    name: Name | None = Field(default=None, examples=["laptop"])
    """Name in logs, on the page and in `/v1/usage`. null: the position of the key, such as keys[0]."""


class TenantConfig(Section):
    name: Name = Field(examples=["research"])
    """Name of the tenant in logs and metrics."""
    keys: tuple[Annotated[KeyConfig, from_text("hash")], ...]
    """Hashes of API keys. With two, a tenant can replace one without an interruption."""
    criticality: Criticality | None = None
    """Band, unless a trusted header names another, or any header a lower one. null: the model's."""
    band_max: Criticality | None = None
    """Highest band of the tenant's requests, whatever a header asks for. null: only headers of a trusted tenant can
    raise the band."""
    weight: Annotated[Weight, idle.WEIGHTS, idle.Rule(idle.tenants_set_apart)] = 1.0
    """Weight of the tenant's flows against other flows of the band."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of all requests of the tenant."""
    models: tuple[Name, ...] | None = Field(default=None, examples=[["llama-3.1-8b"]])
    """Model names that the tenant may request; other names are unknown to the tenant. null: all names."""
    cache_salt: Annotated[str, AfterValidator(salt_of)] | None = Field(default=None, repr=False)
    """Salt that separates the prompts of the tenant from others in prefix caches: auto (a salt for each tenant), or a
    secret that several tenants can share. null: no salt."""
    trusted: bool = False
    """Obey the objective, fairness and SLO headers of the tenant's requests, from any address."""
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
    """Policy that chooses the next flow of a band: fair_share, slo, round_robin or fcfs."""
    ordering: Annotated[str, named_in(orderings.names, edf="least_slack", shortest="least_slack")] = "least_slack"
    """Policy that chooses the next request of a flow: least_slack (by objectives, or as fcfs without them) or fcfs."""
    placement: Annotated[
        str, named_in(presets.names, blend="cost", power_of_two="least_request", random="least_request")
    ] = "cost"
    """Policy that chooses the backend of a request: cost, session, least_request or round_robin."""
    flow: Annotated[str, AfterValidator(flow_of)] = Field(default="model", examples=["header:x-team"])
    """Property that the requests of one flow have in common: model (the requested name), tenant, tenant+model, or
    header:NAME (a header of trusted clients)."""
    session: Annotated[Sessions, idle.SESSION] = Field(default=SESSIONS, examples=[["header:x-user-id", "cookie:SID"]])
    """Fields that name the session of a request: header:NAME, cookie:NAME or body:NAME. The first of them that a
    request has counts."""
    fairness_cost: Annotated[str, named_in(charges.names, kv_seconds="tokens"), idle.FAIRNESS_COST] = "tokens"
    """Cost that fair_share divides fairly among flows: tokens, or requests (each request costs 1)."""
    ceilings: dict[str, Fraction] = Field(default={"critical": 1.0, "default": 0.95, "sheddable": 0.85})
    """Part of a backend's batch limit and KV cache (above 0, at most 1) that a band may fill. Without an entry,
    critical, default and sheddable keep their default, idle and lower bands have 0.01, and another band has the part of
    the next lower band (between sheddable and idle: of sheddable)."""
    headroom_s: Annotated[Number, Field(ge=0)] = 60.0
    """Time after a request of a band in which lower bands keep to their ceilings, and leave a slot free for this band.
    0: never."""
    min_shares: dict[str, Annotated[Number, Field(ge=0, le=1)]] = Field(default={}, examples=[{"sheddable": 0.05}])
    """Least share of the work (0 to 1) of a waiting band, against higher bands too."""
    weights: Annotated[dict[str, Weight], idle.WEIGHTS] = Field(default={}, examples=[{"my-model": 2.5}])
    """Weights of flows by name. Other flows have the weight of the tenant, or 1."""
    input_weight: Annotated[Number, Field(ge=0), idle.TOKEN_WEIGHT] = 1.0
    """Cost of an uncached prompt token for its flow, if fairness_cost is tokens."""
    output_weight: Annotated[Number, Field(gt=0), idle.TOKEN_WEIGHT] = 2.0
    """Cost of an output token for its flow, if fairness_cost is tokens."""
    slo_window_s: Annotated[Seconds, idle.unless_policy("fairness", "slo")] = 300.0
    """Time for which fairness `slo` counts whether a request met its objective."""
    preemption: bool = True
    """Take requests back from their backend before their first byte, if a request of a band above default needs the
    slot: of bands below default, and of default while they wait in the engine. The requests wait again."""
    refuse_late: Annotated[bool, idle.unless(idle.has_objectives, idle.NO_OBJECTIVE)] = False
    """Refuse a request (429) if its first token would miss the objective even if the request were served next."""
    look_ahead: Annotated[Integer, Field(ge=0)] | None = None
    """Requests that an engine gets beyond its batch limit, so that no place of its batch stays empty. null:
    measured."""
    prompt_window_s: Annotated[Seconds | None, idle.unless_policy("placement", "cost")] = 0.3
    """Longest time for the uncomputed prompts of a backend; above it, the backend gets no further prompts. Only for
    placement `cost`. null: no limit."""
    disaggregation: Annotated[Disaggregated, idle.WITHOUT_ROLES] = Field(default="auto", examples=[512])
    """Prompts that prefill backends compute: auto (if faster), always, never, or a number: those with at least so many
    tokens that are not cached on the best backend for the whole request."""
    kv_connector: Annotated[str, named_in(connectors.names), idle.WITHOUT_ROLES] = "nixl"
    """How a decode backend gets the KV cache of a prompt: nixl (from the prefill backend, by NixlConnector) or store
    (from LMCache, Mooncake or a folder)."""
    kv_lease_s: Annotated[Seconds, idle.WITHOUT_ROLES] = 30.0
    """Time for which a prefill engine keeps the KV cache of a prompt for a decode engine: vLLM's kv_lease_duration."""
    initial_batch_limit: Count = 4
    """Batch limit that is assumed for an engine until the real limit is learned."""
    kv_full_ratio: Fraction = 1.0
    """KV cache usage (above 0, at most 1) of a full backend, for placement and for `/scale`."""
    seed: Integer | None = None
    """Seed of random choices. null: another one at each start."""


class QueueConfig(Section):
    max_wait_s: Seconds = 60.0
    """Longest wait of a request while a backend is up. Then it gets 429."""
    band_max_wait_s: dict[str, Seconds] = Field(default={}, examples=[{"sheddable": 600}])
    """Longest wait by band, in place of `max_wait_s`."""
    no_backend_wait_s: Annotated[Number, Field(ge=0)] = 30.0
    """Longest wait while no backend for the request is up, apart from `max_wait_s`. Then it gets 503. 0: at once."""
    startup_wait_s: Annotated[Number, Field(ge=0)] = 10.0
    """Longest wait after the start while no backend has answered yet; `no_backend_wait_s` counts if it is shorter."""
    requests_max: Count = 20_000
    """Most waiting requests; beyond it 429, or a lower band loses its newest request."""
    bytes_max: Count = 1 << 30
    """Most bytes of waiting bodies, a part of body_bytes_total_max."""
    tokens_max: Count | None = None
    """Most estimated tokens of waiting requests. null: no limit."""
    band_requests_max: Count = 10_000
    """Most waiting requests of a band."""
    band_bytes_max: Count = 1 << 30
    """Most bytes of waiting bodies of a band."""
    band_tokens_max: Count | None = None
    """Most estimated tokens of waiting requests of a band. null: no limit."""
    flow_requests_max: Count | None = None
    """Most waiting requests of a flow. null: no limit."""
    flow_bytes_max: Count | None = None
    """Most bytes of waiting bodies of a flow. null: no limit."""
    flow_tokens_max: Count | None = None
    """Most estimated tokens of waiting requests of a flow. null: no limit."""


class TimeoutsConfig(Section):
    connect_s: Seconds = 5.0
    """Longest time to connect to a backend."""
    first_byte_s: Seconds = 300.0
    """Longest time from dispatch to the first body byte of a stream."""
    stall_s: Seconds = 120.0
    """Longest time between two chunks of an answer, and in which a client reads nothing of it."""
    total_s: Seconds = 3600.0
    """Longest time from dispatch to the last byte of an answer."""
    keep_alive_s: Seconds | None = None
    """Time between comments (`: keep-alive`) to the client before its stream begins. With the first comment, the client
    gets status 200, so that later errors are events of the stream. null: no comments."""
    adapter_s: Seconds = 120.0
    """Longest time to load or unload an adapter."""


CONTINUED = ("off", "safe", "always")
"""The values of `retry.continue`."""


_WITH_RETRIES = idle.unless(lambda config: config.retry.extra_attempts > 0, "retry.extra_attempts is 0")


class RetryConfig(Section):
    extra_attempts: Annotated[Integer, Field(ge=0, le=100)] = 2
    """Most further attempts for a request after its first attempt failed."""
    budget_ratio: Annotated[Number, Field(ge=0, le=1), _WITH_RETRIES] = 0.2
    """Most retries, as a share of all requests, beside a reserve of 1,024. With 0, only the reserve is left. Retries
    after attempts that left no work in an engine do not count, but continued streams always do."""
    continue_: Annotated[str, one_of(CONTINUED), _WITH_RETRIES] = Field(default="safe", alias="continue")
    """Streams that another replica continues when their replica fails. off: none. safe: streams without options that
    depend on all tokens of the answer, such as `seed` and penalties. always: also streams with these options."""
