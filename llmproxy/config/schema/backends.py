"""Sections about backends: their addresses, their health, and their limits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from llmproxy.config import idle
from llmproxy.config.checks import Problem, repeated, report
from llmproxy.config.pods_url import KUBERNETES
from llmproxy.config.schema.section import Section
from llmproxy.config.value_types import (
    DNS,
    LOOKED_UP,
    SRV,
    ApiKey,
    Count,
    Criticality,
    Integer,
    Name,
    Names,
    Number,
    PromptRange,
    Seconds,
    backend_from_text,
    backend_url,
    base_url,
    one_of,
)
from llmproxy.core.domain import Role


class BackendTlsConfig(Section):
    ca: Path | None = None
    """CA certificates (PEM), read again when they change. null: the CAs of the system."""
    server_name: Name | None = None
    """Name in the certificate, sent as SNI. null: the host of the URL."""
    insecure_skip_verify: bool = False
    """Accept any certificate. Anyone on the path can then read and answer requests."""


OF_ENGINES = ("role", "prompt_tokens", "forward_priority")
"""Keys without a meaning for an external backend."""
EXTERNAL_IN_FLIGHT = 32


class ExternalConfig(Section):
    models: dict[Name, Name] = Field(default_factory=dict, examples=[{"llama-3.1-8b": "gpt-4o-mini"}])
    """Models and adapters that the endpoint may serve in place of replicas, each with its name at the endpoint.
    {}: the server is an engine of your own, and the other keys have no effect."""
    max_per_day: Annotated[Number, Field(gt=0)] | None = Field(default=None, examples=[20])
    """Most money per day (usage.time_zone), in the currency of the prices. Required with `models`."""
    price_per_million_input: Annotated[Number, Field(ge=0)] | None = Field(default=None, examples=[0.15])
    """Price of a million prompt tokens. Required with `models`."""
    price_per_million_cached: Annotated[Number, Field(ge=0)] | None = Field(default=None, examples=[0.075])
    """Price of a million prompt tokens that the endpoint reports as cached. null: price_per_million_input."""
    price_per_million_output: Annotated[Number, Field(ge=0)] | None = Field(default=None, examples=[0.6])
    """Price of a million answer tokens. Required with `models`."""
    only_above_wait_s: Annotated[Number, Field(ge=0)] | None = 10.0
    """Wait from which a request goes to the endpoint although a replica is up. null: only while no replica is up."""
    from_band: Criticality = "default"
    """Lowest band whose requests go to the endpoint."""
    api_key_file: Path | None = None
    """File with the API key of the endpoint, read at the start and at a reload. null: no file."""
    api_key_env: Name | None = Field(default=None, examples=["OPENAI_API_KEY"])
    """Environment variable with the API key of the endpoint. null: the backend's api_key."""

    @model_validator(mode="after")
    def _complete(self) -> ExternalConfig:
        needed = ("max_per_day", "price_per_million_input", "price_per_million_output") if self.models else ()
        report([((name,), "is required beside models") for name in needed if getattr(self, name) is None])
        return self


class BackendConfig(Section):
    url: Annotated[str, AfterValidator(backend_url)] = Field(examples=["http://gpu-0:8000"])
    """Base URL of a vLLM server; its path precedes the path of requests. Several servers: dns+http://HOST:PORT (all
    addresses of HOST), srv+http://NAME (the SRV records of NAME), or kubernetes+http://TYPE/NAME (the pods of
    service/NAME, pods/SELECTOR or inferencepool/NAME)."""
    name: Name = Field(default_factory=lambda data: _place_of(data.get("url", "")), examples=["gpu-0"])
    """Name in logs, metrics and x-llmproxy-backend. Default: the URL without its scheme, or the pod."""
    max_in_flight: Count | None = None
    """Requests that the server runs at once (--max-num-seqs). A few more are sent (look_ahead), so that it is never
    idle. null: learned."""
    prompt_tokens: Annotated[PromptRange | None, idle.unless_policy("placement", "cost")] = Field(
        default=None, examples=[[1, 4000]]
    )
    """Preferred prompt lengths in tokens: [from, to]. Other prompts are sent to this backend only if other backends are
    much slower. null: any."""
    role: Annotated[str, one_of(tuple(Role)), idle.Rule(idle.both_roles)] = "both"
    """Stages of requests that the server computes: both, prefill (prompts, for other servers) or decode (answers)."""
    api_key: ApiKey | None = Field(default=None, repr=False)
    """API key sent to this backend. null: backend_api_key."""
    forward_priority: bool = False
    """Send the band of each request in vLLM's field `priority`, negated. Needs vLLM's --scheduling-policy priority."""
    ask_usage: bool = True
    """Ask for the usage of all streams, and hide it from clients that did not ask. A server that refuses is asked again
    after an hour. false: for --enable-force-include-usage."""
    tls: BackendTlsConfig = BackendTlsConfig()
    """How the certificate of an https URL is verified."""
    external: ExternalConfig = ExternalConfig()
    """A paid endpoint elsewhere with OpenAI's API, used last, with at most max_in_flight (by default 32) requests at
    once."""

    @field_validator("tls")
    @classmethod
    def _for_https(cls, tls: BackendTlsConfig, info: ValidationInfo) -> BackendTlsConfig:
        if tls != BackendTlsConfig() and not _by_https(info.data.get("url", "https:")):
            raise ValueError(f"has no effect: {info.data['url']} is no https URL")
        if tls.insecure_skip_verify and (tls.ca or tls.server_name):
            raise ValueError("insecure_skip_verify looks at neither ca nor server_name: leave it out, or them")
        return tls

    @field_validator("external")
    @classmethod
    def _no_engine(cls, external: ExternalConfig, info: ValidationInfo) -> ExternalConfig:
        if not external.models:
            return external
        given = {name for name in OF_ENGINES if info.data.get(name) not in (None, False, "both")}
        report([((), f"has no effect beside {name}, which is for engines of your own") for name in sorted(given)])
        if info.data.get("url", "").startswith(LOOKED_UP):
            raise ValueError("needs the URL of one endpoint, without a lookup")
        keys = (info.data.get("api_key"), external.api_key_file, external.api_key_env)
        if sum(key is not None for key in keys) > 1:
            raise ValueError("has its key in one place: api_key, external.api_key_file or external.api_key_env")
        return external

    @property
    def is_external(self) -> bool:
        """Whether this is a paid endpoint elsewhere, and no engine."""
        return bool(self.external.models)

    @property
    def by_https(self) -> bool:
        """Whether the proxy connects to the backend by TLS."""
        return _by_https(self.url)

    @property
    def looked_up(self) -> bool:
        """Whether DNS or Kubernetes lists the servers. Each server gets this configuration."""
        return self.url.startswith(LOOKED_UP)


def _by_https(url: str) -> bool:
    return url[url.startswith(LOOKED_UP) and url.index("+") + 1 :].startswith("https:")


def _place_of(url: str) -> str:
    return url if url.startswith(KUBERNETES) else url.partition("://")[2]


class BackendsFile(Section):
    """The content of the file that `discovery.file` names."""

    backends: tuple[Annotated[BackendConfig, BeforeValidator(backend_from_text)], ...]

    @field_validator("backends")
    @classmethod
    def _plain(cls, backends: tuple[BackendConfig, ...]) -> tuple[BackendConfig, ...]:
        reason = "needs a lookup: such backends belong in the configuration itself"
        report([((i, "url"), reason) for i, one in enumerate(backends) if one.looked_up])
        reason = "belongs in the configuration itself"
        report([((i, "external"), reason) for i, one in enumerate(backends) if one.is_external])
        report(repeated_backends(backends))
        return backends


def repeated_backends(backends: Iterable[BackendConfig]) -> list[Problem]:
    """Returns a problem for each backend with the URL or name of an earlier one."""
    urls, names = [backend.url for backend in backends], [backend.name for backend in backends]
    problems = repeated(urls, "url")
    repeated_urls = {place[0] for place, _ in problems}
    return problems + [problem for problem in repeated(names, "name") if problem[0][0] not in repeated_urls]


class DiscoveryConfig(Section):
    file: Path | None = Field(default=None, examples=["backends.yaml"])
    """File with a list `backends` (YAML or JSON), checked every second. null: no file."""
    dns_interval_s: Annotated[Seconds, idle.unless_url(DNS, SRV)] = 5.0
    """Time between lookups of dns+ and srv+."""
    misses_before_removal: Annotated[Count, idle.unless_url(DNS, SRV)] = 3
    """A backend is removed after so many lookups in a row without its address; after four times as many if the lookups
    find no address at all."""
    kubernetes_api: Annotated[Annotated[str, AfterValidator(base_url)] | None, idle.unless_url(KUBERNETES)] = Field(
        default=None, examples=["http://127.0.0.1:8001"]
    )
    """URL of the API server, such as of `kubectl proxy`; it does not get the token of the pod's service account. null:
    the proxy's own cluster."""


class HealthConfig(Section):
    failures_before_ejection: Count = 3
    """Failed requests in a row that eject a backend."""
    ejection_s: Seconds = 1.0
    """Time of the first ejection, in which the backend gets no requests. It doubles with each further ejection, until
    the backend has recovered."""
    ejection_max_s: Seconds = Field(default=30.0, validate_default=True)
    """Upper bound of the time of an ejection."""
    misses_before_down: Count = 2
    """Unanswered polls in a row until a backend is down."""
    ejected_ratio_max: Annotated[Number, Field(ge=0, le=1)] = 0.5
    """Largest share of a pool (0 to 1) that may be ejected at once. A single backend always may, but never the last
    backend of a model. A backend that accepts no connection, shuts down or has a dead engine is ejected all the
    same."""
    slow_start_s: Annotated[Number, Field(ge=0)] = 5.0
    """Time until a backend that comes back has its full share, if others have free slots. 0: at once."""
    hung_s: Seconds | None = 1.5
    """A backend is ejected if it sends nothing for so long while first bytes are due, unless long prompts explain the
    silence. null: never."""
    slow_factor: Annotated[Number, Field(gt=1)] | None = 5.0
    """A backend is ejected if it becomes so many times slower than before, unless its whole pool does. null: never."""

    @field_validator("ejection_max_s")
    @classmethod
    def _above_first(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("ejection_s", 0.0):
            raise ValueError(f"{value:g} should not be below ejection_s, which is {info.data['ejection_s']:g}")
        return value


class PollConfig(Section):
    interval_s: Seconds = 0.2
    """Time between scrapes of a short metrics page; once a second while idle."""
    page_interval_s: Seconds = 1.0
    """Time between scrapes of a full metrics page, if a backend has no short one."""
    models_interval_s: Seconds = 2.0
    """Time between requests for /v1/models."""
    timeout_s: Seconds = 2.0
    """Time limit of each request of a poll."""
    stale_after_s: Seconds = 5.0
    """Age from which the last scrape of a backend is ignored."""


class ScalingConfig(Section):
    pools: Names = Field(default=(), examples=[["llama-3.1-8b"]])
    """Base models that may have no replica: requests are held for queue.no_backend_wait_s and ask for a replica."""
    from_band: Criticality = "default"
    """Lowest band whose requests ask for replicas."""
    min: Annotated[Integer, Field(ge=0)] = 1
    """Fewest replicas of a pool."""
    max: Annotated[Integer, Field(ge=1)] | None = None
    """Most replicas of a pool. null: no limit."""
    target_wait_s: Seconds = 60.0
    """Time within which the waiting requests should be served. A shorter time asks for more replicas."""
    utilisation: Annotated[Number, Field(gt=0, le=1)] = 0.8
    """Share of a replica's time (above 0, at most 1) that is planned to be used. The rest is a reserve."""
    target_tpot_s: Seconds | None = None
    """Time per output token that replicas should keep. null: the mean objective of the requests, if they have any."""
    start_s: Seconds | None = None
    """Time until a new replica serves. While the load rises, replicas are asked for so long before they are needed.
    null: as observed, or 120."""
    idle_s: Seconds = 900.0
    """Time without requests after which a pool needs no replica, if `min` is 0."""

    @field_validator("max")
    @classmethod
    def _not_below_min(cls, value: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("min", 0)
        if value is not None and value < least:
            raise ValueError(f"{value} should not be below min, which is {least}")
        return value
