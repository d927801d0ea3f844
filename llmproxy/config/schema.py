"""The sections of the configuration: every key with its type, default and meaning.

The description of a field is the only place where a key is explained: the help of its flag and its comment in
`config.example.yaml` repeat it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from llmproxy.config import idle
from llmproxy.config.checks import Problem, report
from llmproxy.config.pods_url import KUBERNETES
from llmproxy.config.value_types import (
    CLOSED,
    DNS,
    LOOKED_UP,
    SESSIONS,
    SRV,
    ApiKey,
    Count,
    Criticality,
    Disaggregated,
    Fraction,
    Integer,
    KeyHash,
    LockName,
    Moment,
    Name,
    Names,
    Networks,
    Number,
    Origins,
    PromptRange,
    Rate,
    Seconds,
    Sessions,
    Weight,
    backend_url,
    base_url,
    failure_of,
    flow_of,
    from_text,
    host_and_port,
    is_loopback,
    lock_of,
    named_in,
    one_of,
    salt_of,
    store_of,
)
from llmproxy.core.domain import Role
from llmproxy.core.kv_connectors import connectors
from llmproxy.core.placement.policy import presets
from llmproxy.core.queueing.charge import charges
from llmproxy.core.queueing.fairness import policies
from llmproxy.core.queueing.ordering import orderings


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_below_is_default(cls, data: Any) -> Any:
        """Treat null as the default of a section, list or mapping: YAML gives null if all its lines are comments."""
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
    trusted_proxies: Networks = Field(default=(), examples=["loopback", "10.1.2.3"])
    """Reverse proxies whose X-Forwarded-For counts: loopback, all, none, or a list of addresses and networks."""
    connections_max: Count = 65_536
    """Most client connections open at once. More are closed with 503. The limit of open files can lower it."""
    address_connections_max: Count | None = None
    """Most connections open at once from one address. More are closed with 429. null: no limit."""
    address_requests_per_s: Annotated[Number, Field(gt=0)] | None = None
    """Most requests per second from one address. More are refused with 429. null: no limit."""
    idle_timeout_s: Seconds = 75.0
    """A connection is closed after this time without a request, or without the client reading its response."""
    head_timeout_s: Seconds = 30.0
    """Longest time to receive the header of a request, and to complete a TLS handshake."""
    head_bytes_max: Count = 128 << 10
    """Largest header of a request: request line and header fields."""
    head_fields_max: Count = 128
    """Most header fields of a request."""
    body_idle_timeout_s: Seconds = 30.0
    """Longest pause between two pieces of a request body."""
    body_timeout_s: Seconds = 600.0
    """Longest time to receive a whole request body."""
    allowed_origins: Origins = Field(default=(), examples=[["https://app.example"]])
    """Origins of web pages that may call the proxy from a browser (CORS). * allows every origin."""


_WITH_CERT = idle.Rule(
    lambda config, _: None if config.tls.cert else "has no effect without tls.cert: llmproxy serve does not start"
)


class TlsConfig(Section):
    cert: Path | None = None
    """Certificate chain shown to clients (PEM). A changed file is read again. null: clients use plain http."""
    key: Annotated[Path | None, _WITH_CERT] = None
    """Private key of the certificate (PEM), without a passphrase. null: the key is in the same file."""
    client_ca: Annotated[Path | None, _WITH_CERT] = None
    """CA certificates (PEM) that must have signed the certificate of each client. null: no client certificates."""


class BackendTlsConfig(Section):
    ca: Path | None = None
    """CA certificates (PEM) to verify the backend with. A changed file is read again. null: the CAs of the system."""
    server_name: Name | None = None
    """Name that the certificate must hold, also sent as SNI. null: the host of the URL."""
    insecure_skip_verify: bool = False
    """Accept any certificate. Anyone on the network path can then read and answer requests."""


class BackendConfig(Section):
    url: Annotated[str, AfterValidator(backend_url)] = Field(examples=["http://gpu-0:8000"])
    """Base URL of a vLLM server; its path precedes the path of requests. dns+http://HOST:PORT: every address of HOST.
    srv+http://NAME: its SRV records. kubernetes+http://service/NAME, pods/SELECTOR, inferencepool/NAME: their pods."""
    name: Name = Field(default_factory=lambda data: _place_of(data.get("url", "")), examples=["gpu-0"])
    """Name in logs, metrics and the x-llmproxy-backend header. Without it: the URL without its scheme, or the name of
    the pod."""
    max_in_flight: Count | None = None
    """How many requests the server runs at once (its --max-num-seqs). The proxy sends a few more (look_ahead), so that
    the engine is never idle. null: the proxy learns the number."""
    prompt_tokens: Annotated[PromptRange | None, idle.unless_policy("placement", "cost")] = Field(
        default=None, examples=[[1, 4000]]
    )
    """Prompt tokens for which the backend is preferred: [from, to]. Other prompts go there only if all other backends
    are much slower. null: any."""
    group: Name | None = None
    """Group of equal replicas that an autoscaler scales as one; see replica_groups."""
    group_label: Annotated[Name | None, idle.Rule(idle.names_labels)] = Field(default=None, examples=["pool"])
    """Label of pods whose value is the group. null, and for pods without it: group."""
    role: Annotated[str, one_of(tuple(Role)), idle.Rule(idle.both_roles)] = "both"
    """Role of the server: both, prefill (computes prompts for other servers) or decode (generates their answers)."""
    api_key: ApiKey | None = Field(default=None, repr=False)
    """API key sent to this backend. null: backend_api_key."""
    forward_priority: bool = False
    """Send vLLM its own priority field. The server must run with --scheduling-policy priority."""
    ask_usage: bool = True
    """Request the usage of streams whose client did not, and remove the usage from the answer. false: for servers that
    always send usage (--enable-force-include-usage). A server that refuses is not asked again for an hour."""
    tls: BackendTlsConfig = BackendTlsConfig()
    """How to verify a backend with an https URL."""

    @field_validator("tls")
    @classmethod
    def _for_https(cls, tls: BackendTlsConfig, info: ValidationInfo) -> BackendTlsConfig:
        if tls != BackendTlsConfig() and not _by_https(info.data.get("url", "https:")):
            raise ValueError(f"has no effect: {info.data['url']} is no https URL")
        if tls.insecure_skip_verify and (tls.ca or tls.server_name):
            raise ValueError("insecure_skip_verify looks at neither ca nor server_name: leave it out, or them")
        return tls

    @property
    def by_https(self) -> bool:
        """Whether the proxy connects by TLS."""
        return _by_https(self.url)

    @property
    def looked_up(self) -> bool:
        """Whether DNS or Kubernetes names the servers. Each server gets this configuration."""
        return self.url.startswith(LOOKED_UP)


def _by_https(url: str) -> bool:
    return url[url.startswith(LOOKED_UP) and url.index("+") + 1 :].startswith("https:")


def _place_of(url: str) -> str:
    return url if url.startswith(KUBERNETES) else url.partition("://")[2]


class DiscoveryConfig(Section):
    file: Path | None = Field(default=None, examples=["backends.yaml"])
    """File with a list `backends` as in the configuration (YAML or JSON), checked every second. null: no file."""
    dns_interval_s: Annotated[Seconds, idle.unless_url(DNS, SRV)] = 5.0
    """Time between two DNS lookups of a backend whose url begins with dns+ or srv+."""
    misses_before_removal: Annotated[Count, idle.unless_url(DNS, SRV)] = 3
    """Lookups in a row without the address of a backend that remove the backend; four times as many if lookups find no
    address at all."""
    kubernetes_api: Annotated[Annotated[str, AfterValidator(base_url)] | None, idle.unless_url(KUBERNETES)] = Field(
        default=None, examples=["http://127.0.0.1:8001"]
    )
    """URL of the API server, for example of `kubectl proxy`. null: the API server of the proxy's own cluster."""


class ClusterTlsConfig(Section):
    cert: Path | None = None
    """Certificate chain that this member shows to the others (PEM). null: members talk without TLS."""
    key: Path | None = None
    """Private key of the certificate (PEM), without a passphrase. null: the key is in the same file."""
    ca: Path | None = None
    """CA certificates (PEM) that must have signed the certificates of all members. null: members talk without TLS."""
    name: Name = "llmproxy"
    """DNS name that the certificate of every member must hold."""


_IN_CLUSTER = idle.unless_given("cluster.listen")


class ClusterConfig(Section):
    listen: Annotated[str, AfterValidator(host_and_port)] | None = Field(default=None, examples=["0.0.0.0:8090"])
    """HOST:PORT to listen on for the other members of the cluster. null: this proxy is in no cluster."""
    advertise: Annotated[Annotated[str, AfterValidator(host_and_port)] | None, _IN_CLUSTER] = Field(
        default=None, examples=["10.0.0.7:8090"]
    )
    """HOST:PORT at which other members reach this one. null: `listen`, with the address of this machine's name."""
    lock: Annotated[str, AfterValidator(lock_of), _IN_CLUSTER] = Field(
        default="kubernetes", examples=["valkey://valkey:6379"], repr=False
    )
    """Lock that elects the leader: kubernetes (a Lease), or valkey://HOST:PORT (Redis too)."""
    lock_s: Annotated[Number, Field(ge=1), _IN_CLUSTER] = 4.0
    """Time after which a lock without a renewal expires. If a leader dies, grants pause so long and up to 1 s more."""
    standalone_after_s: Annotated[Seconds | None, _IN_CLUSTER] = None
    """Time without a leader after which each member decides alone, with its part of every limit: 1/N with N members.
    null: requests wait, and get 503 after `lock_s` and 5 s."""
    name: Annotated[LockName, _IN_CLUSTER] = "llmproxy"
    """Name of the cluster, and of its lock."""
    pools: Annotated[Names, _IN_CLUSTER] = Field(default=(), examples=[["llama-3.3-70b"]])
    """Base models that each have a separate lock, and so perhaps different leaders. All other models share one lock."""
    member: Annotated[Name | None, _IN_CLUSTER] = None
    """Name of this member. null: the host name."""
    plaintext: Annotated[bool, _IN_CLUSTER] = False
    """Allow connections between members without TLS from other machines. Anyone who can connect is trusted."""
    tls: Annotated[ClusterTlsConfig, _IN_CLUSTER] = ClusterTlsConfig()
    """TLS between members, with certificates on both sides."""

    @model_validator(mode="after")
    def _is_guarded(self) -> ClusterConfig:
        """Raises ValueError for members that would trust anyone without `plaintext`."""
        tls, listen = self.tls, self.listen
        if listen is None:
            return self
        problems: list[Problem] = []
        if tls.cert is not None and tls.ca is None:
            problems = [(("tls", "ca"), "is missing: this authority must sign the certificate of each member")]
        elif tls.cert is None and (tls.ca is not None or tls.key is not None):
            problems = [(("tls", "cert"), "is missing")]
        elif tls.cert is None and not self.plaintext and not is_loopback(listen.rpartition(":")[0]):
            reason = "members need tls.cert and tls.ca, or plaintext: true where no one else can connect"
            problems = [(("listen",), reason)]
        if self.standalone_after_s is not None and self.standalone_after_s < self.lock_s:
            problems.append(
                (("standalone_after_s",), f"is below lock_s ({self.lock_s:g}): a leader may decide for so long")
            )
        report(problems)
        return self


_RATED = idle.unless(idle.is_rated, "no tenant or model has requests_per_min or tokens_per_min")
_WITH_STORE = idle.unless_given("shared_limits.store")


class SharedLimitsConfig(Section):
    store: Annotated[Annotated[str, AfterValidator(store_of)] | None, _RATED] = Field(
        default=None, examples=["valkey://valkey:6379"], repr=False
    )
    """Store for requests_per_min and tokens_per_min that several proxies share: valkey://HOST:PORT (Redis too). null:
    each proxy counts alone."""
    name: Annotated[LockName, _WITH_STORE] = "llmproxy"
    """Proxies with the same name share their limits. The name is part of the keys in the store."""
    on_failure: Annotated[str, AfterValidator(failure_of), _WITH_STORE] = Field(default=CLOSED, examples=["1/3"])
    """While the store is unreachable: closed (requests under a rate limit get 503), or 1/N (each of N proxies applies
    this part of each rate limit)."""

    @property
    def proxies(self) -> int | None:
        """Number of proxies that divide the limits while the store is unreachable; None: requests are refused."""
        return None if self.on_failure == CLOSED else int(self.on_failure.partition("/")[2])


class LimitsConfig(Section):
    in_flight: Count | None = None
    """Most requests in flight at once. Further requests wait. null: no limit."""
    requests_per_min: Rate | None = None
    """Most requests per minute. More are refused with 429. null: no limit."""
    tokens_per_min: Rate | None = None
    """Most prompt and output tokens per minute. Further requests are refused with 429. null: no limit."""
    prompt_tokens_max: Count | None = None
    """Most tokens of the prompt of one request, as the proxy estimates them. Longer prompts are refused with 400. null:
    only the limit of the engine."""
    max_tokens_max: Count | None = None
    """Most tokens that one request may ask for (max_tokens and its other names). Higher values are refused with 400.
    Chats, completions, responses and messages without a limit get this one. null: only the limit of the engine."""


Ttft = Annotated[Seconds | None, idle.plausible("ttft_s", 600.0), idle.looked_at("ttft_s")]
Tpot = Annotated[Seconds | None, idle.plausible("tpot_s", 10.0), idle.looked_at("tpot_s")]


class ModelConfig(Section):
    name: Name = Field(examples=["gpt-4"])
    """Name that clients request: a base model, an adapter or an alias. *: every name that has no other entry here."""
    target: Name | None = Field(default=None, examples=["llama-3.1-8b"])
    """Base model or adapter behind an alias. null: the name is no alias, or has targets."""
    targets: dict[str, Weight] = Field(default={}, examples=[{"llama-3.1-8b": 9, "llama-3.3-8b": 1}])
    """Base models or adapters that share the requests of an alias, with their weights. The name of the alias may be one
    of the targets. Requests of one session get the same target. A target that no backend serves gets no requests."""
    base: Name | None = Field(default=None, examples=["llama-3.1-8b"])
    """Base model whose engines load the adapter of this name at its first request (a LoRA resolver). All engines of the
    base model may get requests, even if no engine lists the name. The name may end in * and then matches all names with
    this prefix; they share the band, objectives and limits of the entry. null: only listed names are served."""
    criticality: Criticality | None = Field(default=None, examples=["critical"])
    """Band of requests: a name or an integer. null: the band of the target, else the default band."""
    ttft_s: Ttft = None
    """Objective for the time to first token, from arrival. null: the objective of the target, else none."""
    tpot_s: Tpot = None
    """Objective for the mean time per further token. null: the objective of the target, else none."""
    limits: LimitsConfig = LimitsConfig()
    """Limits for all requests of this name together. A request for an alias counts for the alias and its target."""

    @property
    def stands_for(self) -> str | Mapping[str, float] | None:
        """The name or the names behind an alias; None if the name is no alias."""
        return self.target if self.target is not None else self.targets or None


class ObjectiveConfig(Section):
    name: Name = Field(examples=["interactive"])
    """Value of the header x-llm-d-inference-objective that selects this objective. Only trusted clients may send it."""
    criticality: Criticality | None = None
    """Band of the requests: a name or an integer. null: the band without the header."""
    ttft_s: Ttft = None
    """Objective for the time to first token, from arrival. null: the objective of the tenant or the model."""
    tpot_s: Tpot = None
    """Objective for the mean time per further token. null: the objective of the tenant or the model."""


class KeyConfig(Section):
    hash: KeyHash = Field(repr=False)
    """Hash of the API key, as `llmproxy hash-key` prints it. A plain hash may replace the whole entry."""
    expires: Moment | None = Field(default=None, examples=["2027-01-31"])
    """The key is refused from this moment on: a date or a timestamp, in UTC without a time zone. null: never."""
    name: Name | None = Field(default=None, examples=["laptop"])
    """Name of the key in logs, on the page and in key_metrics. null: its place among the keys, such as keys[0]."""


class TenantConfig(Section):
    name: Name = Field(examples=["research"])
    """Name of the tenant in logs and metrics."""
    keys: tuple[Annotated[KeyConfig, from_text("hash")], ...]
    """Hashes of the API keys. A tenant with two keys can replace a key without an interruption."""
    criticality: Criticality | None = None
    """Band of requests of the tenant, unless a trusted header names another band. null: the band of the model."""
    band_max: Criticality | None = None
    """Highest band of requests of the tenant. null: no limit if the tenant is trusted, else headers do not raise the
    band."""
    weight: Annotated[Weight, idle.WEIGHTS, idle.Rule(idle.tenants_set_apart)] = 1.0
    """Weight of flows of the tenant, relative to other flows of the same band."""
    limits: LimitsConfig = LimitsConfig()
    """Limits for all requests of the tenant together."""
    models: tuple[Name, ...] | None = Field(default=None, examples=[["llama-3.1-8b"]])
    """Model names that the tenant may request; other names are refused as unknown. null: all names."""
    cache_salt: Annotated[str, AfterValidator(salt_of)] | None = Field(default=None, repr=False)
    """Separates the tenant's prompts in prefix caches: auto, or a secret that tenants can share. null: none."""
    trusted: bool = False
    """Objective, fairness and SLO headers of the tenant count, from any address. See trust_headers."""
    ttft_s: Ttft = None
    """Objective for the time to first token, from arrival. null: the objective of the model."""
    tpot_s: Tpot = None
    """Objective for the mean time per further token. null: the objective of the model."""

    def key_names(self) -> list[str]:
        """The names of the keys, in order."""
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


_ON_CLIENT_PORT = idle.unless(
    lambda config: config.admin.port is None, "everybody who reaches admin.port sees /metrics there"
)


class AdminConfig(Section):
    host: Annotated[str, Field(min_length=1), idle.unless_given("admin.port")] = "127.0.0.1"
    """Address on which the admin port listens."""
    port: Annotated[Integer, Field(ge=0, le=65535)] | None = None
    """Port for /metrics, /debug, /admin and adapters. The client port then does not serve them. null: the client
    port."""
    public_metrics: Annotated[bool, _ON_CLIENT_PORT] = False
    """Serve /metrics on the client port without a key, even with tenants or an admin key."""


class SchedulingConfig(Section):
    fairness: Annotated[
        str, named_in(policies.names, locality_fair_share="fair_share"), idle.Rule(idle.objectives_measured)
    ] = "fair_share"
    """Which flow of a band goes next: fair_share, slo, round_robin or fcfs."""
    ordering: Annotated[str, named_in(orderings.names, edf="least_slack", shortest="least_slack")] = "least_slack"
    """Which request of a flow goes next: least_slack (by objectives; fcfs without) or fcfs."""
    placement: Annotated[
        str, named_in(presets.names, blend="cost", power_of_two="least_request", random="least_request")
    ] = "cost"
    """Which backend gets a request: cost, session, least_request or round_robin."""
    flow: Annotated[str, AfterValidator(flow_of)] = Field(default="model", examples=["header:x-team"])
    """Key of a flow: model (the requested name), tenant, tenant+model or header:NAME (a trusted header)."""
    session: Annotated[Sessions, idle.SESSION] = Field(default=SESSIONS, examples=[["header:x-user-id", "cookie:SID"]])
    """Where the placement `session` finds the session: header:NAME, cookie:NAME or body:NAME. The first
    place with a value counts."""
    fairness_cost: Annotated[str, named_in(charges.names, kv_seconds="tokens"), idle.FAIRNESS_COST] = "tokens"
    """Cost that fair_share divides: tokens or requests."""
    ceilings: dict[str, Fraction] = {"critical": 1.0, "default": 0.95, "sheddable": 0.85}
    """Saturation (above 0, at most 1) from which a band waits. Other bands use the ceiling of the next lower band."""
    headroom_s: Annotated[Number, Field(ge=0)] = 60.0
    """After a request, its band keeps one slot or more free of lower bands for this time. 0: none."""
    min_shares: dict[str, Annotated[Number, Field(ge=0, le=1)]] = Field(default={}, examples=[{"sheddable": 0.05}])
    """Least share of the work (0 to 1) of a waiting band, even against higher bands."""
    weights: Annotated[dict[str, Weight], idle.WEIGHTS] = Field(default={}, examples=[{"my-model": 2.5}])
    """Shares of flows by name. Other flows have the weight of their tenant, or 1."""
    input_weight: Annotated[Number, Field(ge=0), idle.TOKEN_WEIGHT] = 1.0
    """Cost of one prompt token."""
    output_weight: Annotated[Number, Field(gt=0), idle.TOKEN_WEIGHT] = 2.0
    """Cost of one output token."""
    slo_window_s: Annotated[Seconds, idle.unless_policy("fairness", "slo")] = 300.0
    """The fairness policy `slo` counts met and missed objectives over this time."""
    preemption: bool = True
    """Take sheddable requests back from a backend that has not begun them, when critical requests need the slot."""
    refuse_late: Annotated[bool, idle.unless(idle.has_objectives, idle.NO_OBJECTIVE)] = False
    """Refuse a request at once (429) if it could not meet its objective even as the next one served."""
    look_ahead: Annotated[Integer, Field(ge=0)] | None = None
    """Requests in flight above the batch limit of an engine, so that the engine is never idle. null: measured."""
    prompt_window_s: Annotated[Seconds | None, idle.unless_policy("placement", "cost")] = 0.3
    """A backend gets no further prompts while its present prompts take longer than this to compute. Requests then wait
    in the queue, and may still go to another backend. Placement `cost` only. null: no limit."""
    disaggregation: Annotated[Disaggregated, idle.WITHOUT_ROLES] = Field(default="auto", examples=[512])
    """Whether a prefill backend computes the prompt of a request that a decode backend answers: auto (if this takes
    less time), always, never, or a number: if so many tokens of the prompt or more are in no decode backend's cache."""
    kv_connector: Annotated[str, named_in(connectors.names), idle.WITHOUT_ROLES] = "nixl"
    """How backends hand the KV cache of a prompt over: nixl (NixlConnector, the second engine pulls) or store (a store
    that they share: LMCache, Mooncake, a folder)."""
    kv_lease_s: Annotated[Seconds, idle.WITHOUT_ROLES] = 30.0
    """Time for which an engine keeps the KV cache of a prompt for another engine: kv_lease_duration of vLLM."""
    warm_up_pairs: Annotated[bool, idle.WITHOUT_ROLES] = True
    """Send a short prompt through each pair of a prefill and a decode backend after a start, because the first transfer
    between two engines takes longer than later transfers."""
    initial_batch_limit: Count = 4
    """Batch limit assumed for an engine until its own numbers are known."""
    kv_full_ratio: Fraction = 1.0
    """KV cache usage (above 0, at most 1) from which a backend counts as full."""
    seed: Integer | None = None
    """Seed of random choices, for repeatable runs. null: another one at each start."""


class QueueConfig(Section):
    max_wait_s: Seconds = 60.0
    """Longest wait in the queue."""
    band_max_wait_s: dict[str, Seconds] = Field(default={}, examples=[{"sheddable": 600}])
    """Longest wait by band, instead of max_wait_s."""
    no_backend_wait_s: Annotated[Number, Field(ge=0)] = 30.0
    """Longest wait while no backend for the request is up, in addition to max_wait_s. 0: refuse at once."""
    startup_wait_s: Annotated[Number, Field(ge=0)] = 10.0
    """Replaces no_backend_wait_s until the first backend has answered after the start; the shorter time counts."""
    requests_max: Count = 20_000
    """Most waiting requests in all bands together."""
    bytes_max: Count = 1 << 30
    """Most bytes of waiting request bodies in all bands together. They count for body_bytes_total_max too."""
    tokens_max: Count | None = None
    """Most estimated tokens of waiting requests in all bands together. null: no limit."""
    band_requests_max: Count = 10_000
    """Most waiting requests of one band."""
    band_bytes_max: Count = 1 << 30
    """Most bytes of waiting request bodies of one band."""
    band_tokens_max: Count | None = None
    """Most estimated tokens of waiting requests of one band. null: no limit."""
    flow_requests_max: Count | None = None
    """Most waiting requests of one flow. null: no limit."""
    flow_bytes_max: Count | None = None
    """Most bytes of waiting request bodies of one flow. null: no limit."""
    flow_tokens_max: Count | None = None
    """Most estimated tokens of waiting requests of one flow. null: no limit."""


def _not_below_min(value: int | None, info: ValidationInfo) -> int | None:
    least = info.data.get("min", 0)
    if value is not None and value < least:
        raise ValueError(f"{value} should not be below min, which is {least}")
    return value


class ReplicaGroupConfig(Section):
    name: Name = Field(examples=["spot"])
    """Name of the group in backends[].group."""
    cost: Annotated[Number, Field(gt=0)] = 1.0
    """Price of a replica, in any unit. Groups that do the work most cheaply come first."""
    min: Annotated[Integer, Field(ge=0)] = 0
    """Fewest replicas of the group."""
    max: Annotated[Integer, Field(ge=1)] | None = None
    """Most replicas of the group; null for any number."""

    _above_min = field_validator("max")(_not_below_min)


class ScalingConfig(Section):
    pools: Names = Field(default=(), examples=[["llama-3.1-8b"]])
    """Base models that may have no replica at the moment. Requests for them are held for queue.no_backend_wait_s, and
    ask for one replica."""
    from_band: Criticality = "default"
    """Requests of this band and higher bands ask for replicas. Lower bands use the existing replicas."""
    min: Annotated[Integer, Field(ge=0)] = 1
    """Fewest replicas of a pool."""
    max: Annotated[Integer, Field(ge=1)] | None = None
    """Most replicas of a pool; null for any number."""
    target_wait_s: Seconds = 60.0
    """Target for the time until all waiting requests are served."""
    utilisation: Annotated[Number, Field(gt=0, le=1)] = 0.8
    """Share of a replica (above 0, to 1) that planned work may take."""
    target_tpot_s: Seconds | None = None
    """Time per output token that replicas should keep. null: the mean objective of the requests, if they have one."""
    start_s: Seconds | None = None
    """Time from the start of a replica until it serves. The trend of the load is extended by this time. null: the
    observed time, or 120."""
    idle_s: Seconds = 900.0
    """After this time without a request a pool needs no replica, if `min` is 0."""

    _above_min = field_validator("max")(_not_below_min)


class TimeoutsConfig(Section):
    connect_s: Seconds = 5.0
    """Longest time to connect to a backend."""
    first_byte_s: Seconds = 300.0
    """Longest time from dispatch to the first body byte of a stream."""
    stall_s: Seconds = 120.0
    """Longest pause between two pieces of a stream."""
    total_s: Seconds = 3600.0
    """Longest time of one attempt, from dispatch to the last byte."""
    keep_alive_s: Seconds | None = None
    """Time between comments (`: keep-alive`) to the client while its stream has not begun. The first comment sends
    status 200, so that a later error is an event of the stream. null: no comments."""
    adapter_s: Seconds = 120.0
    """Longest time in which one backend loads or unloads an adapter."""


_WITH_RETRIES = idle.unless(lambda config: config.retry.extra_attempts > 0, "retry.extra_attempts is 0")


class RetryConfig(Section):
    extra_attempts: Annotated[Integer, Field(ge=0, le=100)] = 2
    """Most further attempts for a request that failed before its first byte."""
    budget_ratio: Annotated[Number, Field(ge=0, le=1), _WITH_RETRIES] = 0.2
    """Most retries, as a share of all requests."""


class HealthConfig(Section):
    failures_before_ejection: Count = 3
    """Failed requests in a row that eject a backend."""
    ejection_s: Seconds = 1.0
    """Duration of the first ejection. Each further one lasts twice as long."""
    ejection_max_s: Seconds = Field(default=30.0, validate_default=True)
    """Longest ejection."""
    misses_before_down: Count = 2
    """Polls in a row without an answer that mark a backend as down."""
    ejected_ratio_max: Annotated[Number, Field(ge=0, le=1)] = 0.5
    """Largest share of a pool (0 to 1) ejected for failed, hung or slow requests. A single backend may always be
    ejected, but never the last that serves a model."""
    slow_start_s: Annotated[Number, Field(ge=0)] = 5.0
    """A backend that comes back reaches its full share after this time, if other backends have room. 0: at once."""
    hung_s: Seconds | None = 1.5
    """A backend is ejected if its first bytes are this late and long prompts do not explain it. null: never."""
    slow_factor: Annotated[Number, Field(gt=1)] | None = 5.0
    """A backend is ejected if it becomes this many times slower and its pool does not. null: never."""

    @field_validator("ejection_max_s")
    @classmethod
    def _above_first(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("ejection_s", 0.0):
            raise ValueError(f"{value:g} should not be below ejection_s, which is {info.data['ejection_s']:g}")
        return value


class PollConfig(Section):
    interval_s: Seconds = 0.2
    """Time between two readings of a backend with a short metrics page. An idle backend is read once a second."""
    page_interval_s: Seconds = 1.0
    """Time between two readings of a backend that has only the full metrics page."""
    models_interval_s: Seconds = 2.0
    """Time between two requests for /v1/models of a backend."""
    timeout_s: Seconds = 2.0
    """Longest time of one poll."""
    stale_after_s: Seconds = 5.0
    """Age from which a reading is no longer used."""
