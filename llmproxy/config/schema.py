"""What may be configured, section by section: every key with its kind of value, its default and what it means.

The description of a field is the only place where a key is explained: the help of its flag and its comment in
`config.example.yaml` repeat it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from llmproxy.config.other_routers import PLACEMENTS
from llmproxy.config.value_types import (
    DNS,
    SESSIONS,
    SRV,
    ApiKey,
    Count,
    Criticality,
    Fraction,
    Integer,
    KeyHash,
    Moment,
    Name,
    Number,
    Origins,
    PromptRange,
    Rate,
    Seconds,
    Sessions,
    Weight,
    backend_url,
    flow_of,
    from_text,
    registered,
    salt_of,
)
from llmproxy.core.placement import presets
from llmproxy.core.queueing.charge import charges
from llmproxy.core.queueing.fairness import policies
from llmproxy.core.queueing.ordering import orderings


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_below_is_default(cls, data: Any) -> Any:
        """A section, list or mapping of which every line is commented out is null in YAML, and means its default."""
        if not isinstance(data, dict):
            return data
        below = {name for name, field in cls.model_fields.items() if _holds_lines(field) and not may_be_null(field)}
        return {key: value for key, value in data.items() if value is not None or key not in below}


def may_be_null(field: FieldInfo) -> bool:
    """Whether null is a value of this key."""
    return type(None) in get_args(field.annotation)


def _holds_lines(field: FieldInfo) -> bool:
    kind = get_origin(field.annotation) or field.annotation
    return isinstance(kind, type) and issubclass(kind, Section | tuple | dict)


class ClientsConfig(Section):
    connections_max: Count = 65_536
    """Most connections open at once, if twice as many files may be open; more of them are closed with 503."""
    address_connections_max: Count | None = None
    """Most connections open at once from one address; more of them are closed with 429. null is no limit."""
    address_requests_per_s: Annotated[Number, Field(gt=0)] | None = None
    """Most requests a second from one address; more of them are refused with 429. null is no limit."""
    idle_timeout_s: Seconds = 75.0
    """How long a connection is kept on which nothing is asked, or whose client does not read what is left for it."""
    head_timeout_s: Seconds = 30.0
    """Longest time from the first byte of a request to the end of its header fields, and for a TLS handshake."""
    head_bytes_max: Count = 128 << 10
    """Largest head of a request: its request line and header fields."""
    head_fields_max: Count = 128
    """Most header fields of a request."""
    body_silence_s: Seconds = 30.0
    """Longest silence between two pieces of a request body."""
    body_timeout_s: Seconds = 600.0
    """Longest time for a whole request body to arrive."""
    allowed_origins: Origins = ()
    """Where web pages may come from that ask here from a browser (CORS): https://app.example, or * for anywhere."""


class TlsConfig(Section):
    cert: Path | None = None
    """Certificate shown to clients, with its chain (PEM); followed when the file changes. null: plain http."""
    key: Path | None = None
    """Its private key (PEM), without a passphrase; null where it is in the same file."""
    client_ca: Path | None = None
    """Authorities (PEM) of which clients must have a certificate; null asks for none. Read at the start."""


class BackendTlsConfig(Section):
    ca: Path | None = None
    """Authorities (PEM) that its certificate must come from, followed when the file changes; null: this machine's."""
    server_name: Name | None = None
    """Name that is asked for and must be in its certificate; null is the host of its URL."""
    insecure_skip_verify: bool = False
    """Whether to believe any certificate: whoever stands between can then read and answer."""


class BackendConfig(Section):
    url: Annotated[str, AfterValidator(backend_url)]
    """Base URL of one vLLM server; dns+http://HOST:PORT is every address of HOST, srv+http://NAME its SRV records."""
    name: Name = Field(default_factory=lambda data: urlsplit(data.get("url", "")).netloc)
    """What logs, metrics and the x-llmproxy-backend header call it; host:port unless given."""
    max_in_flight: Count | None = None
    """Most requests in flight at once, the engine's --max-num-seqs; null learns it from the engine."""
    prompt_tokens: PromptRange | None = None
    """Lengths of prompts that it is meant for, [from, to]; others come where all else is much dearer. null: any."""
    api_key: ApiKey | None = Field(default=None, repr=False)
    """Key sent to this backend instead of backend_api_key."""
    forward_priority: bool = False
    """Whether to send it vLLM's own priority (lower first); its engine must run --scheduling-policy priority."""
    tls: BackendTlsConfig = BackendTlsConfig()
    """How to trust a backend that is reached by https."""

    @field_validator("tls")
    @classmethod
    def _for_https(cls, tls: BackendTlsConfig, info: ValidationInfo) -> BackendTlsConfig:
        if tls != BackendTlsConfig() and not info.data.get("url", "https:").removeprefix(DNS).removeprefix(
            SRV
        ).startswith("https:"):
            raise ValueError(f"has no effect: {info.data['url']} is no https URL")
        if tls.insecure_skip_verify and (tls.ca or tls.server_name):
            raise ValueError("insecure_skip_verify looks at neither ca nor server_name: leave it out, or them")
        return tls

    @property
    def by_https(self) -> bool:
        """It is reached by TLS."""
        return self.url.removeprefix(DNS).removeprefix(SRV).startswith("https:")

    @property
    def looked_up(self) -> bool:
        """It stands for all servers that DNS names, each of which gets what is configured here."""
        return self.url.startswith((DNS, SRV))


class DiscoveryConfig(Section):
    file: Path | None = None
    """File with a list `backends` as here (YAML or JSON), looked at once a second; null is none."""
    dns_interval_s: Seconds = 5.0
    """Time between two look-ups of a backend whose url begins with dns+ or srv+."""
    gone_after: Count = 3
    """Look-ups in a row that miss an address until its backend leaves; four times as many where they find none."""


class LimitsConfig(Section):
    in_flight: Count | None = None
    """Most requests in flight at once; more of them wait. null is no limit."""
    requests_per_min: Rate | None = None
    """Most requests in a minute; more of them are refused with 429. null is no limit."""
    tokens_per_min: Rate | None = None
    """Most tokens of prompts and answers in a minute, beyond which requests are refused. null is no limit."""


class ModelConfig(Section):
    name: Name
    """Name that clients ask for: a base model, an adapter or an alias."""
    target: Name | None = None
    """Base model or adapter that an alias stands for; null where the name is no alias."""
    criticality: Criticality | None = None
    """Band of its requests, by name or integer; null is the default band."""
    ttft_s: Seconds | None = None
    """Objective of its requests: seconds to the first token, from arrival. null is none."""
    tpot_s: Seconds | None = None
    """Objective of its requests: mean seconds for each further token. null is none."""
    limits: LimitsConfig = LimitsConfig()
    """What all requests for this name together may use; those for an alias count for the alias and its target."""


class ObjectiveConfig(Section):
    name: Name
    """What a trusted x-llm-d-inference-objective header may say."""
    criticality: Criticality | None = None
    """Band of such requests, by name or integer; null leaves the one that they have without the header."""
    ttft_s: Seconds | None = None
    """Seconds to the first token, from arrival; null leaves the objective of the tenant or the model."""
    tpot_s: Seconds | None = None
    """Mean seconds for each further token; null leaves the objective of the tenant or the model."""


class KeyConfig(Section):
    hash: KeyHash = Field(repr=False)
    """Hash of the key, as `llmproxy hash-key` prints it; the plain text of a hash may stand for an entry."""
    expires: Moment | None = None
    """When the key stops to open anything: a date (its first moment) or a timestamp, in UTC unless it names a zone."""


class TenantConfig(Section):
    name: Name
    """What logs and metrics call the tenant."""
    keys: tuple[Annotated[KeyConfig, from_text("hash")], ...]
    """Its keys; several allow one to be replaced without a break."""
    criticality: Criticality | None = None
    """Band of its requests unless a trusted header names another; null is that of the model."""
    band_max: Criticality | None = None
    """Highest band that its requests may have, whatever asks for more; null is no such limit."""
    weight: Weight = 1.0
    """Share of its flows beside others of their band."""
    limits: LimitsConfig = LimitsConfig()
    """What all its requests together may use."""
    models: tuple[Name, ...] | None = None
    """Names that it may ask for; all others are unknown to it. null allows all."""
    cache_salt: Annotated[str, AfterValidator(salt_of)] | None = Field(default=None, repr=False)
    """Keeps its prompts apart in engines' prefix caches: auto, or a secret that tenants may share; null does not."""
    trusted: bool = False
    """Whether its headers that give advantage count, from wherever it comes; see trust_headers."""
    ttft_s: Seconds | None = None
    """Objective of its requests: seconds to the first token, from arrival; null is that of the model."""
    tpot_s: Seconds | None = None
    """Objective of its requests: mean seconds for each further token; null is that of the model."""

    @field_validator("keys")
    @classmethod
    def _has_keys(cls, keys: tuple[KeyConfig, ...]) -> tuple[KeyConfig, ...]:
        if not keys:
            raise ValueError("is empty: a tenant is known by its keys; `llmproxy hash-key --new` makes one")
        return keys

    @field_validator("models")
    @classmethod
    def _allows_something(cls, models: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if models == ():
            raise ValueError("is empty: nothing could be asked for; leave it out to allow all")
        return models


class AdminConfig(Section):
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address on which that port listens."""
    port: Annotated[Integer, Field(ge=0, le=65535)] | None = None
    """Port for /metrics, /debug, /admin and adapters, which are then nowhere else; null: they share that of clients."""


class SchedulingConfig(Section):
    fairness: Annotated[str, registered(policies)] = "fair_share"
    """Which flow of a band goes next: fair_share, locality_fair_share, slo, round_robin or fcfs."""
    ordering: Annotated[str, registered(orderings)] = "fcfs"
    """Which request of a flow goes next: fcfs, edf, least_slack or shortest."""
    placement: Annotated[str, registered(presets, PLACEMENTS)] = "cost"
    """Where it goes: cost, blend, least_request, power_of_two, round_robin, random, session, epp_blend, epp_sticky."""
    flow: Annotated[str, AfterValidator(flow_of)] = "model"
    """What makes a flow: model (the requested name), tenant, tenant+model or header:NAME (a trusted header)."""
    session: Sessions = SESSIONS
    """What the placement session keeps together: header:NAME, cookie:NAME or body:NAME; the first given counts."""
    charged: Annotated[str, registered(charges)] = "tokens"
    """What fair_share and locality_fair_share share out: tokens, requests or kv_seconds (KV-cache held over time)."""
    ceilings: dict[str, Fraction] = {"critical": 1.0, "default": 0.95, "sheddable": 0.85}
    """Saturation (0..1] at which a band waits; bands not named here take that of the next lower one."""
    headroom_s: Annotated[Number, Field(ge=0)] = 60.0
    """How long after the last request of a band its room is kept free, a slot at least; 0: no room is kept."""
    min_shares: dict[str, Annotated[Number, Field(ge=0, le=1)]] = {}
    """Least share of the work (0..1) of a band that waits, even against higher ones: {sheddable: 0.05}."""
    weights: dict[str, Weight] = {}
    """Shares of flows, by the name of the flow; others have that of their tenant, else 1: {my-model: 2.5}."""
    input_weight: Annotated[Number, Field(ge=0)] = 1.0
    """Cost of one prompt token."""
    output_weight: Annotated[Number, Field(gt=0)] = 2.0
    """Cost of one generated token."""
    quantum_tokens: Annotated[Number, Field(gt=0)] = 16_384.0
    """Most that a flow gets at a stretch under locality_fair_share, in what is charged, for each unit of its weight."""
    slo_window_s: Seconds = 300.0
    """How far back `slo` looks for requests that kept or missed their objective."""
    ageing_s: Seconds = 30.0
    """Wait after which `shortest` serves a request by its age."""
    preemption: bool = True
    """Whether sheddable requests that a backend has but has not begun go back to wait when critical ones need room."""
    refuse_late: bool = False
    """Whether to refuse at once (429) what could not meet its objective even if it were served next."""
    look_ahead: Annotated[Integer, Field(ge=0)] | None = None
    """Requests allowed in flight above an engine's batch limit, so that it never starves; null: by batch and times."""
    start_limit: Count = 4
    """Batch limit assumed of an engine before its own numbers teach better."""
    kv_full: Fraction = 1.0
    """Use of its KV-cache (0..1] above which a backend counts as full."""
    seed: Integer | None = None
    """Seed of random choices, for runs that can be repeated; null differs each time."""


class QueueConfig(Section):
    ttl_s: Seconds = 60.0
    """Longest wait in the queue, in seconds."""
    band_ttl_s: dict[str, Seconds] = {}
    """Longest wait of single bands, in seconds, instead of ttl_s: {sheddable: 600}."""
    hold_s: Annotated[Number, Field(ge=0)] = 30.0
    """Longest wait, beside the above, while no backend that serves the request is up; 0 refuses it at once."""
    first_hold_s: Annotated[Number, Field(ge=0)] = 10.0
    """The same while no backend has answered since the start, where that is shorter: an address may be wrong."""
    requests_max: Count = 20_000
    """Most requests waiting, over all bands."""
    bytes_max: Count = 1 << 30
    """Most bytes of waiting request bodies, over all bands; below body_bytes_total_max, which counts them too."""
    tokens_max: Count | None = None
    """Most tokens, as estimated, of waiting requests over all bands; null is no limit."""
    band_requests_max: Count = 10_000
    """Most requests waiting in one band."""
    band_bytes_max: Count = 1 << 30
    """Most bytes of waiting request bodies in one band."""
    band_tokens_max: Count | None = None
    """Most tokens, as estimated, of waiting requests of one band; null is no limit."""
    flow_requests_max: Count | None = None
    """Most requests waiting in one flow; null is no limit."""
    flow_bytes_max: Count | None = None
    """Most bytes of waiting request bodies in one flow; null is no limit."""
    flow_tokens_max: Count | None = None
    """Most tokens, as estimated, of waiting requests of one flow; null is no limit."""


class TimeoutsConfig(Section):
    connect_s: Seconds = 5.0
    """Longest time to open a connection to a backend."""
    first_byte_s: Seconds = 300.0
    """Longest time from dispatch to the first body byte of a stream."""
    stall_s: Seconds = 120.0
    """Longest silence between two pieces of a stream."""
    total_s: Seconds = 3600.0
    """Longest time of one attempt, from dispatch to its last byte."""
    adapter_s: Seconds = 120.0
    """Longest time for one backend to load or unload an adapter."""


class RetryConfig(Section):
    extra_attempts: Annotated[Integer, Field(ge=0, le=100)] = 2
    """Most further backends tried after the first one failed before its first byte."""
    budget_ratio: Annotated[Number, Field(ge=0, le=1)] = 0.2
    """Most retries, as a share of all requests."""


class HealthConfig(Section):
    failures: Count = 3
    """Failed requests in a row that eject a backend."""
    backoff_s: Seconds = 1.0
    """How long a first ejection lasts; each further one lasts twice as long."""
    backoff_max_s: Seconds = Field(default=30.0, validate_default=True)
    """Longest ejection."""
    unreachable_after: Count = 2
    """Polls in a row without an answer that mark a backend down."""
    ejected_max: Annotated[Number, Field(ge=0, le=1)] = 0.5
    """Most of a pool's backends (0..1) that failed, hung or slow requests eject; one may always be."""
    slow_start_s: Annotated[Number, Field(ge=0)] = 5.0
    """How long a backend that comes back takes to its full share, while others have room; 0 gives it all at once."""
    hung_s: Seconds | None = 1.5
    """Silence that ejects a backend that owes first bytes, if long prompts do not explain it; null never does."""
    slow_factor: Annotated[Number, Field(gt=1)] | None = 5.0
    """How many times as slow as it was, beside its pool, a backend is ejected; null never does that."""

    @field_validator("backoff_max_s")
    @classmethod
    def _above_first(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("backoff_s", 0.0):
            raise ValueError(f"{value:g} should not be below backoff_s, which is {info.data['backoff_s']:g}")
        return value


class PollConfig(Section):
    interval_s: Seconds = 0.2
    """Time between two readings of a backend that answers the short metrics page; without work, one a second."""
    page_interval_s: Seconds = 1.0
    """Time between two readings of a backend that has only the full metrics page."""
    models_interval_s: Seconds = 2.0
    """Time between two looks at a backend's /v1/models."""
    timeout_s: Seconds = 2.0
    """Longest time for one poll."""
    stale_after_s: Seconds = 5.0
    """Age at which a reading is no longer believed."""
