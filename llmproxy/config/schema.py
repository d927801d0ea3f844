"""What may be configured: every key with its kind of value, its default and what it means.

The description of a field is the only place where a key is explained: the help of its flag and its comment in
`config.example.yaml` repeat it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from llmproxy.config.kinds import (
    TRUST_WORDS,
    ApiKey,
    Count,
    Criticality,
    Fraction,
    Integer,
    Name,
    Network,
    Number,
    Seconds,
    base_url,
    criticality_of,
    flow_of,
    from_text,
    integer_of,
    nearest,
    networks_of,
    one_of,
)
from llmproxy.core.domain import BAND_NAMES, CRITICAL, DEFAULT, SHEDDABLE
from llmproxy.core.fairness import policies
from llmproxy.core.placement import presets

FAIRNESS_POLICIES = policies.names()
PLACEMENT_PRESETS = presets.names()
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
CEILINGS: Mapping[int, float] = {CRITICAL: 1.0, DEFAULT: 0.95, SHEDDABLE: 0.85}


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        """A key without a value, as a section is whose keys are all commented out, means its default."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}


class BackendConfig(Section):
    url: Annotated[str, AfterValidator(base_url)]
    """Base URL of one vLLM server."""
    name: Name = Field(default_factory=lambda data: urlsplit(data.get("url", "")).netloc)
    """What logs, metrics and the x-llmproxy-backend header call it; host:port unless given."""
    max_in_flight: Count | None = None
    """Most requests in flight at once, the engine's --max-num-seqs; null learns it from the engine."""
    api_key: ApiKey | None = Field(default=None, repr=False)
    """Key sent to this backend instead of backend_api_key."""


class ModelConfig(Section):
    name: Name
    """Name that clients ask for: a base model, an adapter or an alias."""
    target: Name | None = None
    """Base model or adapter that an alias stands for; null where the name is no alias."""
    criticality: Criticality | None = None
    """Band of its requests, by name or integer; null is the default band."""


class ObjectiveConfig(Section):
    name: Name
    """What a trusted x-llm-d-inference-objective header may say."""
    criticality: Criticality
    """Band of such requests, by name or integer."""


class SchedulingConfig(Section):
    fairness: Annotated[str, one_of(FAIRNESS_POLICIES)] = "fair_share"
    """Which flow of a band goes next: fcfs, round_robin or fair_share."""
    placement: Annotated[str, one_of(PLACEMENT_PRESETS)] = "blend"
    """Which backend a request goes to: blend, round_robin, random, least_request or power_of_two."""
    flow: Annotated[str, AfterValidator(flow_of)] = "model"
    """What makes a flow: model (the requested name) or header:NAME (a trusted header)."""
    ceilings: dict[str, Fraction] = {"critical": 1.0, "default": 0.95, "sheddable": 0.85}
    """Saturation (0..1] at which a band waits; bands not named here take that of the next lower one."""
    weights: dict[str, Annotated[Number, Field(gt=0)]] = {}
    """Shares of flows under fair_share, 1 unless given: {my-model: 2.5}."""
    input_weight: Annotated[Number, Field(ge=0)] = 1.0
    """Cost of one prompt token."""
    output_weight: Annotated[Number, Field(gt=0)] = 2.0
    """Cost of one generated token."""
    look_ahead: Annotated[Integer, Field(ge=0)] = 2
    """Requests allowed in flight above an engine's batch limit, so that it never starves."""
    start_limit: Count = 32
    """Batch limit assumed of an engine before its own numbers teach better."""
    kv_full: Fraction = 0.95
    """Use of its KV-cache (0..1] above which a backend counts as full."""
    seed: Integer | None = None
    """Seed of random choices, for runs that can be repeated; null differs each time."""


class QueueConfig(Section):
    ttl_s: Seconds = 60.0
    """Longest wait in the queue, in seconds."""
    requests_max: Count = 20_000
    """Most requests waiting, over all bands."""
    bytes_max: Count = 2 << 30
    """Most bytes of waiting request bodies, over all bands."""
    band_requests_max: Count = 10_000
    """Most requests waiting in one band."""
    band_bytes_max: Count = 1 << 30
    """Most bytes of waiting request bodies in one band."""


class TimeoutsConfig(Section):
    connect_s: Seconds = 5.0
    """Longest time to open a connection to a backend."""
    first_byte_s: Seconds = 300.0
    """Longest time from dispatch to the first body byte of a stream."""
    stall_s: Seconds = 120.0
    """Longest silence between two pieces of a stream."""
    total_s: Seconds = 3600.0
    """Longest time of one attempt, from dispatch to its last byte."""


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

    @field_validator("backoff_max_s")
    @classmethod
    def _above_first(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("backoff_s", 0.0):
            raise ValueError(f"{value:g} should not be below backoff_s, which is {info.data['backoff_s']:g}")
        return value


class PollConfig(Section):
    interval_s: Seconds = 0.2
    """Time between two readings of a backend that answers the short metrics page."""
    page_interval_s: Seconds = 1.0
    """Time between two readings of a backend that has only the full metrics page."""
    models_interval_s: Seconds = 2.0
    """Time between two looks at a backend's /v1/models."""
    timeout_s: Seconds = 2.0
    """Longest time for one poll."""
    stale_after_s: Seconds = 5.0
    """Age at which a reading is no longer believed."""


class Config(Section):
    host: Annotated[str, Field(min_length=1)] = "0.0.0.0"
    """Address to listen on."""
    port: Annotated[Integer, Field(ge=0, le=65535)] = 8080
    """Port to listen on; 0 takes a free one."""
    log_format: Annotated[str, one_of(LOG_FORMATS)] = "text"
    """Form of log lines: text or json."""
    log_level: Annotated[str, one_of(LOG_LEVELS)] = "info"
    """Least severe level that is logged: debug, info, warning or error."""
    api_keys: tuple[ApiKey, ...] = Field(default=(), repr=False)
    """Keys that clients must present (any one of them); none lets everybody in."""
    backend_api_key: ApiKey | None = Field(default=None, repr=False)
    """Key sent to every backend that has no api_key of its own."""
    body_bytes_max: Count = 64 << 20
    """Largest request body."""
    drain_timeout_s: Annotated[Number, Field(ge=0)] = 30.0
    """How long running requests may take to end after SIGTERM."""
    trust_headers: Annotated[tuple[Network, ...], PlainValidator(networks_of)] = TRUST_WORDS["loopback"]
    """Peers whose objective and fairness headers count: loopback, all, none, or a list of networks."""
    backends: tuple[Annotated[BackendConfig, from_text("url")], ...] = ()
    """The vLLM servers; a plain URL may stand for an entry."""
    bands: dict[str, Integer] = {}
    """Further bands, larger integers first, beside critical 100, default 0 and sheddable -100: {urgent: 50}."""
    models: tuple[ModelConfig, ...] = ()
    """What is special about names that clients ask for; all others need no entry."""
    objectives: tuple[ObjectiveConfig, ...] = ()
    """Objectives that headers may name."""
    scheduling: SchedulingConfig = SchedulingConfig()
    """Who goes next, and where."""
    queue: QueueConfig = Field(default=QueueConfig(), validate_default=True)
    """Limits of the waiting room."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Limits of one attempt."""
    retry: RetryConfig = RetryConfig()
    """New attempts after a failure before the first byte."""
    health: HealthConfig = HealthConfig()
    """When a backend is left alone."""
    poll: PollConfig = PollConfig()
    """How backends are read."""

    @field_validator("backends")
    @classmethod
    def _distinct_backends(cls, backends: tuple[BackendConfig, ...]) -> tuple[BackendConfig, ...]:
        urls, names = [backend.url for backend in backends], [backend.name for backend in backends]
        repeated = _repeated(urls, "url")
        told = {place[0] for place, _ in repeated}
        _report(repeated + [finding for finding in _repeated(names, "name") if finding[0][0] not in told])
        return backends

    @field_validator("bands")
    @classmethod
    def _new_band_names(cls, bands: dict[str, int]) -> dict[str, int]:
        findings: list[Finding] = []
        named: dict[str, int] = {}
        for name, band in bands.items():
            if integer_of(name) is not None or not name.strip():
                findings.append(((name,), "should be a name: integers need none"))
            elif {**BAND_NAMES, **named}.get(name.strip().lower(), band) != band:
                findings.append(((name,), "is already the name of another band"))
            named[name.strip().lower()] = band
        _report(findings)
        return named

    @field_validator("models")
    @classmethod
    def _sound_models(cls, models: tuple[ModelConfig, ...], info: ValidationInfo) -> tuple[ModelConfig, ...]:
        findings = _repeated([model.name for model in models], "name") + _unknown_bands(models, info)
        aliases = {model.name for model in models if model.target is not None}
        for i, model in enumerate(models):
            if model.target == model.name:
                findings.append(((i, "target"), f"{model.name!r} is an alias for itself"))
            elif model.target in aliases:
                findings.append(((i, "target"), f"{model.target!r} is an alias too; name the model that it stands for"))
        _report(findings)
        return models

    @field_validator("objectives")
    @classmethod
    def _sound_objectives(
        cls, objectives: tuple[ObjectiveConfig, ...], info: ValidationInfo
    ) -> tuple[ObjectiveConfig, ...]:
        _report(_repeated([objective.name for objective in objectives], "name") + _unknown_bands(objectives, info))
        return objectives

    @field_validator("scheduling")
    @classmethod
    def _falling_ceilings(cls, scheduling: SchedulingConfig, info: ValidationInfo) -> SchedulingConfig:
        if "bands" not in info.data:
            return scheduling
        findings: list[Finding] = []
        given: dict[int, str] = {}
        for name in scheduling.ceilings:
            try:
                number = integer_of(name)
                band = _band(name if number is None else number, info.data["bands"])
            except ValueError as error:
                findings.append((("ceilings", name), str(error)))
                continue
            if band in given:
                findings.append((("ceilings", name), f"is the same band as {given[band]!r}"))
            given[band] = name
        values = {**CEILINGS, **{band: scheduling.ceilings[name] for band, name in given.items()}}
        for upper, lower in pairwise(sorted(values, reverse=True)):
            if values[lower] > values[upper]:
                place = given.get(lower) or given[upper]
                findings.append(
                    (
                        ("ceilings", place),
                        f"band {lower} would wait at {values[lower]:g}, above band {upper} at {values[upper]:g}:"
                        " ceilings must not rise as priority falls",
                    )
                )
        _report(findings)
        return scheduling

    @field_validator("queue")
    @classmethod
    def _room_for_one_body(cls, queue: QueueConfig, info: ValidationInfo) -> QueueConfig:
        body_bytes_max = info.data.get("body_bytes_max", 0)
        room_bytes = min(queue.bytes_max, queue.band_bytes_max)
        if room_bytes < body_bytes_max:
            key = "bytes_max" if room_bytes == queue.bytes_max else "band_bytes_max"
            _report([((key,), f"{room_bytes} is below body_bytes_max {body_bytes_max}: such a body could never wait")])
        return queue

    def band(self, criticality: str | int | None) -> int:
        """The band that a name or integer means; None is the default band. Raises ValueError for an unknown name."""
        return DEFAULT if criticality is None else _band(criticality_of(criticality), self.bands)

    def band_names(self) -> dict[int, str]:
        """The name by which logs and metrics call each named band."""
        names = {level: name for name, level in self.bands.items()}
        return names | {CRITICAL: "critical", DEFAULT: "default", SHEDDABLE: "sheddable"}

    def ceilings(self) -> dict[int, float]:
        """Ceilings by band: those given, over the defaults."""
        return {**CEILINGS, **{self.band(name): value for name, value in self.scheduling.ceilings.items()}}


# --- values that are wrong only beside each other ---------------------------------------------------------------------

Finding = tuple[tuple[str | int, ...], str]
"""A place below the validated field, and what is wrong there."""


def _report(findings: Sequence[Finding]) -> None:
    """Raise values that are wrong only beside each other as one error, whose context still names every place."""
    if findings:
        told = "; ".join(f"{'.'.join(map(str, place))}: {reason}" for place, reason in findings)
        raise PydanticCustomError("findings", "{told}", {"told": told, "findings": list(findings)})


def _repeated(texts: Sequence[str], key: str) -> list[Finding]:
    return [((i, key), f"{text!r} is given twice") for i, text in enumerate(texts) if text in texts[:i]]


def _band(criticality: str | int, bands: Mapping[str, int]) -> int:
    if isinstance(criticality, int):
        return criticality
    known = {**BAND_NAMES, **bands}
    if criticality.lower() not in known:
        raise ValueError(
            f"{criticality!r} is no band; known: {', '.join(known)}, or any integer"
            f' (nearest: "{nearest(criticality, tuple(known))}")'
        )
    return known[criticality.lower()]


def _unknown_bands(entries: Sequence[ModelConfig | ObjectiveConfig], info: ValidationInfo) -> list[Finding]:
    findings: list[Finding] = []
    # Bands that are wrong themselves are missing here: they are reported once, not again at every use.
    for i, entry in enumerate(entries if "bands" in info.data else ()):
        try:
            _band(DEFAULT if entry.criticality is None else entry.criticality, info.data["bands"])
        except ValueError as error:
            findings.append(((i, "criticality"), str(error)))
    return findings
