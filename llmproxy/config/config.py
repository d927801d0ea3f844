"""The whole configuration, and the checks between its sections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from math import fsum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from llmproxy.config import idle
from llmproxy.config.checks import Problem, band_of, bands_in, repeated, report, rising_ceilings, unknown_bands
from llmproxy.config.document import Place
from llmproxy.config.schema.backends import (
    BackendConfig,
    DiscoveryConfig,
    HealthConfig,
    PollConfig,
    ScalingConfig,
    repeated_backends,
)
from llmproxy.config.schema.process import (
    AdminConfig,
    ClientsConfig,
    ClusterConfig,
    TlsConfig,
    UsageConfig,
)
from llmproxy.config.schema.requests import (
    ModelConfig,
    ObjectiveConfig,
    QueueConfig,
    RetryConfig,
    SchedulingConfig,
    TenantConfig,
    TimeoutsConfig,
)
from llmproxy.config.schema.section import Section
from llmproxy.config.value_types import (
    AUTO_TRUST,
    TRUST_WORDS,
    ApiKey,
    Count,
    Integer,
    KeyHash,
    Module,
    Network,
    Number,
    PathOrNone,
    Trust,
    backend_from_text,
    criticality_of,
    hash_of,
    integer_of,
    is_loopback,
    one_of,
)
from llmproxy.core.backends.catalogue import ANY
from llmproxy.core.domain import BAND_NAMES, CRITICAL, DEFAULT, IDLE, SHEDDABLE

CEILINGS: Mapping[int, float] = {BAND_NAMES[name]: ceiling for name, ceiling in SchedulingConfig().ceilings.items()}
"""The default ceilings of the bands critical, default and sheddable."""
LOG_FORMATS = ("text", "json")
RELOADS = ("watch", "signal")
LOG_LEVELS = ("debug", "info", "warning", "error")
DRAIN_QUEUED = ("refuse", "finish")


class Config(Section):
    no_empty = frozenset({"api_keys", "tenants"})

    host: Annotated[str, Field(min_length=1)] = "0.0.0.0"
    """Address to listen on: 0.0.0.0 for IPv4, :: for IPv6 and IPv4."""
    port: Annotated[Integer, Field(ge=0, le=65535)] = 8080
    """Port to listen on. 0: a free port."""
    workers: Annotated[Integer, Field(ge=1, le=64)] = 1
    """Number of processes that relay requests. From two on, one more process schedules the requests of all."""
    tls: TlsConfig = TlsConfig()
    """Certificate and key for TLS on the client port and on the admin port."""
    clients: ClientsConfig = ClientsConfig()
    """Limits of the connections and requests of clients."""
    log_format: Annotated[str, one_of(LOG_FORMATS)] = "text"
    """Format of the log: text or json."""
    log_level: Annotated[str, one_of(LOG_LEVELS)] = "info"
    """Least severe level in the log: debug, info, warning or error."""
    api_keys: tuple[ApiKey, ...] = Field(default=(), repr=False)
    """API keys of clients without a tenant. Without keys and tenants, every client is accepted."""
    backend_api_key: ApiKey | None = Field(default=None, repr=False)
    """API key for backends without an api_key."""
    forward_credentials: bool = False
    """Send Authorization, x-api-key and Cookie of clients to backends. Only without API keys and tenants."""
    body_bytes_max: Count = 64 << 20
    """Largest request body in bytes; larger ones get 413."""
    body_bytes_total_max: Count = 2 << 30
    """Most bytes of request bodies in memory, divided among workers. Beyond this number, the largest arriving bodies
    are refused."""
    drain_timeout_s: Annotated[Number, Field(ge=0)] = 30.0
    """Longest time for requests to finish after SIGTERM and drain_delay_s. Then they are cut."""
    drain_delay_s: Annotated[Number, Field(ge=0)] = 0.0
    """Time after SIGTERM in which requests are accepted, but /ready is 503, so that clients move."""
    drain_queued: Annotated[str, one_of(DRAIN_QUEUED)] = "refuse"
    """Waiting requests after SIGTERM: refuse (503) or finish (within drain_timeout_s)."""
    trust_headers: Trust = Field(default=AUTO_TRUST, examples=["10.1.2.3"])
    """Clients whose objective, fairness and SLO headers are obeyed: loopback, all, none, or addresses and networks.
    auto: loopback if clients need no key, else none."""
    trust_proxy_headers: Annotated[bool, idle.unless_given("clients.trusted_proxies")] = False
    """Obey objective, fairness and SLO headers from clients.trusted_proxies, which must set or remove them."""
    admin_key: KeyHash | None = Field(default=None, repr=False)
    """Hash of the key for /debug, /admin, /scale and adapters (`llmproxy hash-key`). null: only this machine reads
    them, and nobody can change anything."""
    admin: AdminConfig = AdminConfig()
    """A separate port for operators."""
    decision_log: Path | None = None
    """File that gets a JSON line for each scheduled request when it ends. null: no file."""
    decision_log_sample: Annotated[Number, Field(ge=0, le=1), idle.unless_given("decision_log")] = 1.0
    """Share of requests (0 to 1) in the decision log."""
    tracing: bool = False
    """Send traces of requests by OpenTelemetry, which reads the OTEL_* variables. Needs the extra otel."""
    state_file: PathOrNone = Field(default="auto", examples=["/var/lib/llmproxy/limits.json"])
    """File of learned batch limits and capacities for the next start: auto (in the state directory), none or a path."""
    usage: UsageConfig = UsageConfig()
    """Tokens and requests of each tenant per day, which `/v1/usage` shows to the tenant."""
    plugins: tuple[Module, ...] = Field(default=(), examples=[["our_policies"]])
    """Python modules that are imported at the start, and register policies."""
    reload: Annotated[str, one_of(RELOADS)] = "watch"
    """watch: the configuration file is read again when it changes, on SIGHUP and by /admin/reload. signal: not when it
    changes."""
    backends: tuple[Annotated[BackendConfig, BeforeValidator(backend_from_text)], ...] = ()
    """vLLM servers: URLs, or entries with further keys."""
    discovery: DiscoveryConfig = DiscoveryConfig()
    """Where further backends are looked up while the proxy runs."""
    cluster: ClusterConfig = ClusterConfig()
    """Several proxies that share one queue and the limits of tenants and models: one schedules the requests of all."""
    bands: dict[str, Integer] = Field(default_factory=dict, examples=[{"urgent": 50}])
    """Further bands, beside critical 100, default 0, sheddable -100 and idle -200. Larger integers go first."""
    models: tuple[ModelConfig, ...] = ()
    """Settings of model names that clients request. A name without settings needs no entry."""
    objectives: tuple[ObjectiveConfig, ...] = ()
    """Bands and latency objectives that clients select by a header."""
    tenants: tuple[TenantConfig, ...] = ()
    """Clients by their API keys. With a tenant, every request needs a key."""
    scheduling: SchedulingConfig = SchedulingConfig()
    """How the next request and its backend are chosen."""
    queue: QueueConfig = Field(default=QueueConfig(), validate_default=True)
    """Limits of waiting requests and of their waits."""
    scaling: ScalingConfig = ScalingConfig()
    """How `/scale` computes the replicas that each pool needs."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Timeouts of one attempt on a backend."""
    retry: RetryConfig = RetryConfig()
    """Further attempts on other backends after a failed attempt, and continued streams."""
    health: HealthConfig = HealthConfig()
    """When a backend gets no requests, because it is down or ejected."""
    poll: PollConfig = PollConfig()
    """How often the health, load and models of backends are read."""
    _old_names: tuple[str, ...] = PrivateAttr(default=())
    _origins: Mapping[Place, str] = PrivateAttr(default_factory=dict)

    @field_validator("backends")
    @classmethod
    def _distinct_backends(cls, backends: tuple[BackendConfig, ...]) -> tuple[BackendConfig, ...]:
        report(repeated_backends(backends))
        return backends

    @field_validator("bands")
    @classmethod
    def _new_band_names(cls, bands: dict[str, int]) -> dict[str, int]:
        problems: list[Problem] = []
        named: dict[str, int] = {}
        for name, band in bands.items():
            if integer_of(name) is not None or not name.strip():
                problems.append(((name,), "should be a name: integers need none"))
            elif {**BAND_NAMES, **named}.get(name.strip().lower(), band) != band:
                problems.append(((name,), "is already the name of another band"))
            named[name.strip().lower()] = band
        report(problems)
        return named

    @field_validator("plugins")
    @classmethod
    def _imported(cls, plugins: tuple[str, ...]) -> tuple[str, ...]:
        """Imports the plugins before the validation of other sections, which may name policies of a plugin."""
        problems: list[Problem] = []
        for i, module in enumerate(plugins):
            try:
                import_module(module)
            except Exception as error:  # noqa: BLE001 - any error of a plugin is reported with its place
                problems.append(((i,), f"{module!r} cannot be imported: {type(error).__name__}: {error}"))
        report(problems)
        return plugins

    @field_validator("models")
    @classmethod
    def _sound_models(cls, models: tuple[ModelConfig, ...], info: ValidationInfo) -> tuple[ModelConfig, ...]:
        problems = repeated([model.name for model in models], "name") + _unknown(models, "criticality", info)
        aliases = {model.name for model in models if model.stands_for is not None}
        for i, model in enumerate(models):
            if model.target is not None and model.targets:
                problems.append(((i, "targets"), "is given beside target; put the target among them"))
            if model.base is not None and (model.stands_for is not None or model.base in aliases):
                problems.append(((i, "base"), "is a base model as engines list it, and not beside target or targets"))
            if model.name in (model.target, *model.targets) and len(model.targets) < 2:
                key = "targets" if model.targets else "target"
                problems.append(((i, key), f"{model.name!r} is an alias for itself"))
            given = {(i, "target"): model.target} | {(i, "targets", name): name for name in model.targets}
            problems += [
                (place, f"{name!r} is an alias too; name its model")
                for place, name in given.items()
                if name in aliases and name != model.name
            ]
            bare = ModelConfig(name=ANY, target=model.target, targets=model.targets)
            if model.name == ANY and model.base is None and (model.stands_for is None or model != bare):
                problems.append(
                    ((i,), f"{ANY} has a target or targets, and nothing else: limits and bands are theirs; or a base")
                )
        report(problems)
        return models

    @field_validator("objectives")
    @classmethod
    def _sound_objectives(
        cls, objectives: tuple[ObjectiveConfig, ...], info: ValidationInfo
    ) -> tuple[ObjectiveConfig, ...]:
        names = [objective.name for objective in objectives]
        report(repeated(names, "name") + _unknown(objectives, "criticality", info))
        return objectives

    @field_validator("tenants")
    @classmethod
    def _sound_tenants(cls, tenants: tuple[TenantConfig, ...], info: ValidationInfo) -> tuple[TenantConfig, ...]:
        problems = repeated([tenant.name for tenant in tenants], "name")
        problems += (unknown := _unknown(tenants, "criticality", info) + _unknown(tenants, "band_max", info))
        if "bands" in info.data and not unknown:
            problems += _above_their_ceiling(tenants, info.data["bands"])
        # A message must not repeat a hash, because it may be logged.
        first = {hash_of(key): "one of api_keys" for key in info.data.get("api_keys", ())}
        for i, tenant in enumerate(tenants):
            for j, key in enumerate(tenant.keys):
                if key.hash in first:
                    problems.append(((i, "keys", j), f"is the same key as {first[key.hash]}"))
                first.setdefault(key.hash, f"tenants[{i}].keys[{j}]")
        report(problems)
        return tenants

    @field_validator("scaling")
    @classmethod
    def _known_band(cls, scaling: ScalingConfig, info: ValidationInfo) -> ScalingConfig:
        report([(("from_band",), text) for _, text in _unknown((scaling,), "from_band", info)])
        return scaling

    @field_validator("scheduling")
    @classmethod
    def _sound_shares(cls, scheduling: SchedulingConfig, info: ValidationInfo) -> SchedulingConfig:
        if "bands" not in info.data:
            return scheduling
        given, problems = bands_in(scheduling.ceilings, "ceilings", info.data["bands"])
        ceilings = {**CEILINGS, **{band: scheduling.ceilings[name] for band, name in given.items()}}
        problems += rising_ceilings(ceilings, given)
        problems += bands_in(scheduling.min_shares, "min_shares", info.data["bands"])[1]
        promised = fsum(scheduling.min_shares.values())
        if promised >= 1:
            reason = f"add up to {promised:g}; the sum must be below 1"
            problems.append((("min_shares",), reason))
        report(problems)
        return scheduling

    @field_validator("body_bytes_total_max")
    @classmethod
    def _not_below_one_body(cls, total: int, info: ValidationInfo) -> int:
        if total < (body_bytes_max := info.data.get("body_bytes_max", 0)):
            report([((), f"{total} is below body_bytes_max {body_bytes_max}: such a body could never be read")])
        return total

    @field_validator("queue")
    @classmethod
    def _sound_queue(cls, queue: QueueConfig, info: ValidationInfo) -> QueueConfig:
        problems = (
            bands_in(queue.band_max_wait_s, "band_max_wait_s", info.data["bands"])[1] if "bands" in info.data else []
        )
        body_bytes_max = info.data.get("body_bytes_max", 0)
        rooms = {"bytes_max": queue.bytes_max, "band_bytes_max": queue.band_bytes_max}
        if queue.flow_bytes_max is not None:
            rooms["flow_bytes_max"] = queue.flow_bytes_max
        key = min(rooms, key=rooms.__getitem__)
        if rooms[key] < body_bytes_max:
            reason = f"{rooms[key]} is below body_bytes_max {body_bytes_max}: such a body could never wait"
            problems.append(((key,), reason))
        report(problems)
        return queue

    @model_validator(mode="after")
    def _without_conflicts(self) -> Config:
        for i, backend in enumerate(self.backends):
            problems = unknown_bands((backend.external,), "from_band", self.bands)
            report([(("backends", i, "external", "from_band"), text) for _, text in problems])
        if self.admin.port and self.admin.port == self.port:
            report([(("admin", "port"), f"{self.port} is the port of clients; null: both share it")])
        if self.forward_credentials and self.needs_key():
            reason = "would send the keys of this proxy to every backend; set backend_api_key for the backends"
            report([(("forward_credentials",), reason)])
        return self

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Restores an unpickled configuration, and imports all its plugins, so that their policies exist here too."""
        super().__setstate__(state)
        for module in self.plugins:
            import_module(module)

    def __eq__(self, other: object) -> bool:
        """Compares the values, and ignores their origins."""
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    @property
    def old_names(self) -> tuple[str, ...]:
        """Warnings for keys that the file, a flag or a variable sets under an old name."""
        return self._old_names

    def with_old_names(self, warnings: Sequence[str]) -> Config:
        """Sets `old_names` to `warnings`, and returns this configuration."""
        self._old_names = tuple(warnings)
        return self

    @property
    def origins(self) -> Mapping[Place, str]:
        """The origin of each given value, keyed by its place: a file with a line, a flag, a variable or a Kubernetes
        object.
        """
        return self._origins

    def with_origins(self, origins: Mapping[Place, str]) -> Config:
        """Sets `origins`, and returns this configuration."""
        self._origins = dict(origins)
        return self

    def band(self, criticality: str | int | None) -> int:
        """Returns the band for a name or integer; for None, the default band. Raises ValueError for an unknown name."""
        return DEFAULT if criticality is None else band_of(criticality_of(criticality), self.bands)

    def band_names(self) -> dict[int, str]:
        """Maps each named band to its name in logs and metrics."""
        names = {level: name for name, level in self.bands.items()}
        return names | {CRITICAL: "critical", DEFAULT: "default", SHEDDABLE: "sheddable", IDLE: "idle"}

    def ceilings(self) -> dict[int, float]:
        """Maps bands to their ceilings. A band without a configured ceiling has its ceiling in CEILINGS."""
        return {**CEILINGS, **self.by_band(self.scheduling.ceilings)}

    def by_band(self, section: Mapping[str, float]) -> dict[int, float]:
        """Replaces the band names that are keys of `section` by bands."""
        return {self.band(name): value for name, value in section.items()}

    def needs_key(self) -> bool:
        """Returns whether clients must present a key."""
        return bool(self.api_keys or self.tenants)

    def lends_keys(self) -> bool:
        """Returns whether clients on other machines need neither key nor certificate, but a backend needs a key."""
        closed = self.needs_key() or self.tls.client_ca is not None or is_loopback(self.host)
        return not closed and any((self.backend_api_key, *(backend.api_key for backend in self.backends)))

    def trusted_networks(self) -> tuple[Network, ...]:
        """Returns the networks of clients whose objective, fairness and SLO headers are obeyed (`trust_headers`)."""
        if isinstance(self.trust_headers, str):
            return TRUST_WORDS["none" if self.needs_key() else "loopback"]
        return self.trust_headers


def _unknown(entries: Iterable[object], key: str, info: ValidationInfo) -> list[Problem]:
    # `bands` is missing if it is wrong, which is already reported.
    return unknown_bands(entries, key, info.data["bands"]) if "bands" in info.data else []


def _above_their_ceiling(tenants: Iterable[TenantConfig], bands: Mapping[str, int]) -> list[Problem]:
    problems: list[Problem] = []
    for i, tenant in enumerate(tenants):
        if tenant.criticality is not None and tenant.band_max is not None:
            band, band_max = band_of(tenant.criticality, bands), band_of(tenant.band_max, bands)
            if band > band_max:
                problems.append(((i, "criticality"), f"is band {band}, above band_max, which is {band_max}"))
    return problems
