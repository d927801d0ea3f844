"""Whose request it is, how urgent, and how long it may wait: read from headers and the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import ip_address
from uuid import uuid4

from aiohttp import web

from llmproxy.config import BackendConfig, Config, Network
from llmproxy.core.domain import BAND_NAMES, Outcome
from llmproxy.gateway.errors import Failure
from llmproxy.gateway.headers import Headers, to_backend

OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
TTL_HEADER = "x-llm-d-inference-ttl"
REQUEST_ID_HEADER = "x-request-id"
FLOW_CHARS_MAX = 256

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_DURATION_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")  # Go writes micro with either sign.
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Standing:
    """What a request is worth to the waiting room: its band, its flow, and how long it may wait (seconds)."""

    band: int
    flow: str
    ttl_s: float


class Identity:
    """Reads a request's standing. Headers that give advantage count only from peers that are trusted."""

    def __init__(self, config: Config) -> None:
        self._trusted: Sequence[Network] = config.trust_headers
        self._ttl_s = config.queue.ttl_s
        self._default = config.band(None)
        self._models = {m.name: config.band(m.criticality) for m in config.models if m.criticality is not None}
        self._objectives = {**BAND_NAMES, **config.bands}
        self._objectives |= {o.name: config.band(o.criticality) for o in config.objectives}
        flow = config.scheduling.flow
        self._flow_headers = FAIRNESS_HEADERS + ((flow.removeprefix("header:"),) if flow.startswith("header:") else ())
        self._peers: dict[str, bool] = {}
        self._backend_key = config.backend_api_key
        self._keeps_auth = not config.api_keys

    def trusts(self, peer: str | None) -> bool:
        """True when the headers of this peer address count. A Unix socket's peer has none, and is local."""
        if peer is None:
            return True
        known = self._peers.get(peer)
        if known is None:
            if len(self._peers) >= 10_000:
                self._peers.clear()
            known = self._peers[peer] = self._in_networks(peer)
        return known

    def _in_networks(self, peer: str) -> bool:
        address = ip_address(peer.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None) or address
        return any(mapped in network for network in self._trusted if network.version == mapped.version)

    def to_backend(self, http: web.BaseRequest, request_id: str, backend: BackendConfig) -> Headers:
        """The header fields of a request as `backend` gets them: its own key, and no privilege of an untrusted peer."""
        key = backend.api_key or self._backend_key
        return to_backend(
            http.headers.items(),
            request_id=request_id,
            trusted=self.trusts(http.remote),
            authorization=f"Bearer {key}" if key else None,
            keep_auth=self._keeps_auth,
        )

    def standing(self, headers: Mapping[str, str], trusted: bool, requested: str, target: str) -> Standing:
        """Band, flow and time to wait of a request for `requested`, which means `target`.

        Raises Failure (400) for a header that counts and cannot be understood.
        """
        band = self._models.get(requested, self._models.get(target, self._default))
        flow = requested
        if trusted:
            objective = _first(headers, OBJECTIVE_HEADERS)
            if objective is not None:
                band = self._band_of(*objective)
            fairness = _first(headers, self._flow_headers)
            if fairness is not None:
                flow = fairness[1][:FLOW_CHARS_MAX]
        return Standing(band, flow, self._ttl(headers.get(TTL_HEADER)))

    def _band_of(self, header: str, objective: str) -> int:
        band = self._objectives.get(objective)
        if band is None:
            known = sorted(self._objectives)
            near = get_close_matches(objective, known, n=1)
            hint = f"; nearest: {near[0]}" if near else ""
            raise Failure(
                Outcome.BAD_REQUEST,
                f"{header} names an objective that is not configured; known: {', '.join(known[:20])}{hint}",
                param=header,
            )
        return band

    def _ttl(self, text: str | None) -> float:
        if text is None:
            return self._ttl_s
        duration_s = parse_duration_s(text)
        if duration_s is None or duration_s <= 0:
            message = f"{TTL_HEADER} should be a positive duration such as 1.5s, 300ms or 1m30s"
            raise Failure(Outcome.BAD_REQUEST, message, param=TTL_HEADER)
        return min(self._ttl_s, duration_s)


def parse_duration_s(text: str) -> float | None:
    """Seconds of a duration in Go's notation (`1h2m3.5s`), None where it is none."""
    body = text.strip().removeprefix("+")
    if body == "0":
        return 0.0
    total_s, end = 0.0, 0
    for part in _DURATION_PART.finditer(body):
        if part.start() != end:
            return None
        total_s += float(part[1]) * _UNIT_S[part[2]]
        end = part.end()
    return total_s if end and end == len(body) else None


def request_id(headers: Mapping[str, str]) -> str | None:
    """The client's own request id, None where it sent none. Raises Failure (400) for one unfit for a log line."""
    given = headers.get(REQUEST_ID_HEADER)
    if given is None:
        return None
    if not _REQUEST_ID.fullmatch(given):
        message = f"{REQUEST_ID_HEADER} should be 1 to 256 printable ASCII characters without spaces"
        raise Failure(Outcome.BAD_REQUEST, message, param=REQUEST_ID_HEADER)
    return given


def id_for_error(headers: Mapping[str, str]) -> str:
    """The id under which a refusal is told and logged: the client's where it is fit for that, else a new one."""
    given = headers.get(REQUEST_ID_HEADER)
    return given if given is not None and _REQUEST_ID.fullmatch(given) else uuid4().hex


def _first(headers: Mapping[str, str], names: Sequence[str]) -> tuple[str, str] | None:
    for name in names:
        value = headers.get(name)
        if value:
            return name, value
    return None
