"""Classifies a request by its key, headers and configuration: band, flow, objective, limits and maximum wait."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from uuid import uuid4

from aiohttp import web
from xxhash import xxh64_hexdigest

from llmproxy.config import TRUST_WORDS, BackendConfig, Config, ModelConfig, model_limit, settings_of, tenant_limit
from llmproxy.config.external import external_keys
from llmproxy.core.domain import BAND_NAMES, DEFAULT, Outcome, Slo
from llmproxy.gateway.http.client_address import Client, InNetworks
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.headers import (
    FAIRNESS_HEADERS,
    OBJECTIVE_HEADERS,
    PRIVILEGED,
    TPOT_HEADERS,
    TTFT_HEADERS,
    Headers,
    as_text,
    to_backend,
)
from llmproxy.gateway.request.auth import NO_TENANT, Tenant
from llmproxy.observe.exit import RequestExit
from llmproxy.observe.trace_context import TraceContext

TTL_HEADER = "x-llm-d-inference-ttl"
REQUEST_ID_HEADER = "x-request-id"
FLOW_CHARS_MAX = 256
TIME_CHARS_MAX = 64  # The maximum length of a header with a duration. Go writes fewer than 32 characters.

_AGENT_CHARS_MAX = 64
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
# Possessive: with backtracking, digits that can be split in many ways would take exponential time.
_NUMBER = r"\d++(?:\.\d*+)?|\.\d++"
_MILLISECONDS = re.compile(rf"\s*+({_NUMBER})\s*+", re.ASCII)
_DURATION_PART = re.compile(rf"({_NUMBER})(ns|us|µs|μs|ms|s|m|h)", re.ASCII)  # Go accepts both characters for micro.
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class _Objective:
    """A band and an objective from one source: a header, a tenant or a model.

    For a value that is None, the next source counts.
    """

    band: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


_NOTHING = _Objective()


class Identity:
    """Finds the band, flow, objective and limits of requests.

    Headers that give an advantage count only from trusted clients and tenants.
    """

    def __init__(self, config: Config) -> None:
        self._trusted = InNetworks(config.trusted_networks())
        self._trusts_all = config.trusted_networks() == TRUST_WORDS["all"]
        self._trusts_proxies = config.trust_proxy_headers
        self._max_wait_s = config.queue.max_wait_s
        self._band_max_waits_s = config.by_band(config.queue.band_max_wait_s)
        self._models = {model.name: _model_objective(config, model) for model in config.models}
        self._objectives = {name: _Objective(band) for name, band in {**BAND_NAMES, **config.bands}.items()}
        for entry in config.objectives:
            band = None if entry.criticality is None else config.band(entry.criticality)
            self._objectives[entry.name] = _Objective(band, entry.ttft_s, entry.tpot_s)
        self._limits = settings_of(config).limits
        self._weights = config.scheduling.weights
        self._flow = config.scheduling.flow
        own = (self._flow.removeprefix("header:"),) if self._flow.startswith("header:") else ()
        self._flow_headers = FAIRNESS_HEADERS + own
        named = [place.partition(":") for place in config.scheduling.session]
        self._session_names = [(place, name) for place, _, name in named]
        self._privileged = PRIVILEGED.union(own)
        self._backend_key = config.backend_api_key
        self._external_keys = external_keys(config)
        self._keeps_credentials = config.forward_credentials

    def trusts(self, client: Client, tenant: Tenant = NO_TENANT) -> bool:
        """Returns whether headers of a request may set its band, flow and objective.

        They may if the tenant is trusted, the client is in a trusted network, or the request comes through a trusted
        proxy and `trust_proxy_headers` is set.
        """
        if tenant.trusted or (client.proxied and self._trusts_proxies):
            return True
        return (client.certain or self._trusts_all) and self._trusted[client.address]

    def backend_headers(
        self,
        http: web.BaseRequest,
        request_id: str,
        backend: BackendConfig,
        trusted: bool = False,
        trace: TraceContext | None = None,
        span_id: str = "",
        forwarded: dict[bool, Headers] | None = None,
    ) -> Headers:
        """Returns the header fields of a request to `backend`.

        PRIVILEGED fields are forwarded only for a `trusted` client. With a `trace`, `span_id` becomes the parent of the
        backend's spans. Without a `trace`, the client's trace fields are forwarded. `forwarded` is the cache of
        `to_backend` for an equal head. An external backend gets no field that tells about the client.
        """
        if backend.external.models:
            return self._external_headers(http, backend)
        key = backend.api_key or self._backend_key
        withheld = frozenset() if trusted else self._privileged
        headers = to_backend(
            http.headers.items(),
            request_id=request_id,
            withheld=withheld if trace is None else withheld | trace.replaced,
            authorization=f"Bearer {key}" if key else None,
            keep_credentials=self._keeps_credentials,
            forwarded=forwarded if trace is None else None,
        )
        if trace is not None:
            headers.append(("traceparent", trace.traceparent(span_id)))
        return headers

    def _external_headers(self, http: web.BaseRequest, backend: BackendConfig) -> Headers:
        """Returns the header fields for an external backend, which learns nothing about the client."""
        sent = [(name, http.headers[name]) for name in ("content-type", "accept") if name in http.headers]
        key = self._external_keys.get(backend.name)
        return [*sent, ("accept-encoding", "identity"), *([("authorization", f"Bearer {key}")] if key else [])]

    def sends_own_key(self, backend: BackendConfig) -> bool:
        """Returns whether requests to `backend` carry the proxy's own key, or no key, and never the client's key."""
        own = bool(backend.external.models or backend.api_key or self._backend_key)
        return own or not self._keeps_credentials

    def key_hint(self, backend: BackendConfig) -> str:
        """Returns advice for the log about a backend that refused the key of a request."""
        if backend.is_external:
            return f"{backend.name} does not accept its key (external.api_key_file, external.api_key_env or api_key)"
        if backend.api_key or self._backend_key:
            return f"{backend.name} does not accept the key that is configured for it (api_key or backend_api_key)"
        return f"{backend.name} wants a key: set backend_api_key, or its own api_key; keys of clients are not forwarded"

    @property
    def session_members(self) -> tuple[str, ...]:
        """The members of bodies that may name the session of a request."""
        return tuple(name for place, name in self._session_names if place == "body")

    def session(self, http: web.BaseRequest, in_body: Mapping[str, str], tenant: Tenant = NO_TENANT) -> str | None:
        """Returns the session of a request as a hash; None if the request names no session.

        The hash is equal in every process. The places in `scheduling.session` (header, cookie or member of the body)
        are tried in order. `in_body` maps `session_members` to their texts in the body. The same name from different
        tenants makes different sessions.
        """
        for place, name in self._session_names:
            if place == "header":
                named = http.headers.get(name)
            elif place == "body":
                named = in_body.get(name)
            else:
                # A parser of all cookies takes 0.3 s for a field of 120 KB.
                cookies = ";" + http.headers.get("cookie", "").replace("; ", ";")
                named = cookies.partition(f";{name}=")[2].partition(";")[0].strip(' "')
            if named:
                return xxh64_hexdigest(f"{tenant.name}\0{named}".encode("utf-8", "surrogatepass"))
        return None

    def classify(
        self,
        record: RequestExit,
        headers: Mapping[str, str],
        trusted: bool,
        requested: str,
        target: str,
        tenant: Tenant = NO_TENANT,
    ) -> None:
        """Sets the band, flow, weight, objective and maximum wait of a request in its `record`.

        `requested` is the model name of the client, and `target` the model behind this name. A trusted header takes
        precedence over the tenant, and the tenant over the model. No request gets above its tenant's `band_max`. If a
        tenant has none, a header raises the band only if the tenant is trusted. Any client can lower its band. Raises
        Failure (400) for an invalid time in a header of a trusted client, and for an invalid TTL header of any client.
        """
        named = _first(headers, OBJECTIVE_HEADERS)
        objective, unknown = _NOTHING, None
        if named is not None:
            known = self._objectives.get(named[1])
            if trusted:
                objective = _Objective(DEFAULT) if known is None else known
                unknown = named[1][:FLOW_CHARS_MAX] if known is None else None
            elif known is not None:
                objective = _Objective(known.band)
        sources = [_Objective(tenant.band, tenant.ttft_s, tenant.tpot_s)]
        sources += [self._models.get(name, _NOTHING) for name in (requested, target)]
        own = next((one.band for one in sources if one.band is not None), DEFAULT)
        band = own if objective.band is None else objective.band
        sources.insert(0, objective)
        if trusted:
            times = _milliseconds(headers, TTFT_HEADERS), _milliseconds(headers, TPOT_HEADERS)
            sources.insert(0, _Objective(None, *times))
        if not trusted or (tenant.band_max is None and tenant.name and not tenant.trusted):
            band = min(band, own)
        if tenant.band_max is not None:
            band = min(band, tenant.band_max)
        ttft_s = next((one.ttft_s for one in sources if one.ttft_s is not None), None)
        tpot_s = next((one.tpot_s for one in sources if one.tpot_s is not None), None)
        flow = self._flow_name(headers, trusted, requested, tenant)
        record.level, record.flow, record.max_wait_s = band, flow, self.max_wait_s(headers, band)
        record.weight = self._weights.get(flow, tenant.weight)
        record.slo = None if ttft_s is None and tpot_s is None else Slo(ttft_s, tpot_s)
        record.unknown_objective = unknown

    def _flow_name(self, headers: Mapping[str, str], trusted: bool, requested: str, tenant: Tenant) -> str:
        named = _first(headers, self._flow_headers) if trusted else None
        if named is not None:
            flow = named[1]
        elif self._flow == "tenant":
            flow = tenant.name
        elif self._flow == "tenant+model":
            flow = f"{tenant.name}+{requested}"
        else:
            flow = requested
        return flow[:FLOW_CHARS_MAX]

    def usage_limits(self, tenant: str, requested: str, target: str) -> tuple[str, ...]:
        """Returns the names of the usage limits that apply to a request.

        `requested` is the model name of the client, and `target` the model behind this name.
        """
        if not self._limits:
            return ()
        names = (tenant_limit(tenant), model_limit(requested), model_limit(target))
        # A name that is no alias is its own target, and counts once.
        return tuple(name for name in dict.fromkeys(names) if name in self._limits)

    def max_wait_s(self, headers: Mapping[str, str], band: int = DEFAULT) -> float:
        """Returns how many seconds a request of `band` may wait.

        This is the configured time, or less if the TTL header says so. Raises Failure (400) if the TTL header is not a
        positive duration.
        """
        max_wait_s, text = self._band_max_waits_s.get(band, self._max_wait_s), headers.get(TTL_HEADER)
        if text is None:
            return max_wait_s
        duration_s = parse_duration_s(text)
        if duration_s is None or duration_s <= 0:
            message = f"{TTL_HEADER} should be a positive duration such as 1.5s, 300ms or 1m30s"
            raise Failure(Outcome.BAD_REQUEST, message, param=TTL_HEADER)
        return min(max_wait_s, duration_s)


def _model_objective(config: Config, model: ModelConfig) -> _Objective:
    band = None if model.criticality is None else config.band(model.criticality)
    return _Objective(band, model.ttft_s, model.tpot_s)


def _milliseconds(headers: Mapping[str, str], names: Sequence[str]) -> float | None:
    """Returns the value, in seconds, of the first of these headers with a value; None if all are absent or empty.

    Raises Failure (400) if the value is not a positive number of milliseconds.
    """
    given = _first(headers, names)
    if given is None:
        return None
    header, text = given
    number = float(text) if len(text) <= TIME_CHARS_MAX and _MILLISECONDS.fullmatch(text) else 0.0
    if number == 0.0 or not isfinite(number):
        message = f"{header} should be a positive number of milliseconds, such as 500"
        raise Failure(Outcome.BAD_REQUEST, message, param=header)
    return number / 1e3


def parse_duration_s(text: str) -> float | None:
    """Returns the seconds of a duration in Go's notation (`1h2m3.5s`); None if the text is no duration."""
    body = text.strip().removeprefix("+")
    if body == "0":
        return 0.0
    if not 0 < len(body) <= TIME_CHARS_MAX:
        return None
    total_s, end = 0.0, 0
    while end < len(body):
        part = _DURATION_PART.match(body, end)
        if part is None:
            return None
        total_s += float(part[1]) * _UNIT_S[part[2]]
        end = part.end()
    return total_s


def request_id(headers: Mapping[str, str]) -> str | None:
    """Returns the client's request id.

    Returns None if it is missing, longer than 256 characters, or not printable ASCII without spaces.
    """
    given = headers.get(REQUEST_ID_HEADER)
    return given if given is not None and _REQUEST_ID.fullmatch(given) else None


def user_agent(headers: Mapping[str, str]) -> str | None:
    """Returns the first 64 characters of the client's User-Agent for the log; None if there is none."""
    agent = headers.get("user-agent", "")[:_AGENT_CHARS_MAX]
    return (agent if agent.isascii() else as_text(agent)) or None


def id_for_error(headers: Mapping[str, str]) -> str:
    """Returns the request id for a refused request: the client's id if `request_id` accepts it, otherwise a new id."""
    return request_id(headers) or uuid4().hex


def _first(headers: Mapping[str, str], names: Sequence[str]) -> tuple[str, str] | None:
    for name in names:
        value = headers.get(name)
        if value:
            return name, value if value.isascii() else as_text(value)
    return None
