"""The settings of the gateway in the form that requests use. A reload replaces all of them in one step."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from llmproxy.config import Config, settings_of
from llmproxy.core.domain import Outcome
from llmproxy.core.kv_connectors import KvConnector, connectors
from llmproxy.core.placement.policy import presets
from llmproxy.core.settings import External
from llmproxy.gateway.http.client_address import Clients
from llmproxy.gateway.http.cors import Cors
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.routes import BodyKind, Route
from llmproxy.gateway.proxying.continued.rule import KINDS
from llmproxy.gateway.proxying.relay import Relay
from llmproxy.gateway.proxying.split.release import Releaser
from llmproxy.gateway.request.auth import Keys
from llmproxy.gateway.request.body_reader import BodyReader
from llmproxy.gateway.request.identity import Identity
from llmproxy.gateway.request.parsed_body import ParsedBody
from llmproxy.gateway.request.request_limits import RequestLimits
from llmproxy.upstream.port import Upstream


@dataclass(frozen=True, slots=True)
class Rules:
    """The parts of the gateway that depend on the configuration.

    A request uses the rules that were current when it came, so it never sees parts of two configurations.
    """

    config: Config
    keys: Keys
    clients: Clients
    identity: Identity
    request_limits: RequestLimits | None
    body_reader: BodyReader
    relay: Relay
    band_names: Mapping[int, str]
    cors: Cors | None
    connector: KvConnector
    releaser: Releaser
    # The kinds of bodies whose streams another backend continues if their backend fails.
    continues: frozenset[BodyKind]
    # The kinds of bodies whose answers without a stream another backend repeats if their backend fails.
    repeats: frozenset[BodyKind]
    externals: Mapping[str, External]

    @classmethod
    def build(cls, config: Config, upstream: Upstream) -> Rules:
        identity = Identity(config)
        # Prompts are only hashed for a placement that uses prefixes.
        prefixes = presets.reads_prefixes(config.scheduling.placement)
        connector = connectors.get(config.scheduling.kv_connector)(config.scheduling.kv_lease_s)
        continues = config.retry.continue_ != "off"
        body_reader = BodyReader(prefixes=prefixes, session_members=identity.session_members)
        return cls(
            config,
            Keys(config),
            Clients(config.clients.trusted_proxies),
            identity,
            RequestLimits(config) or None,
            body_reader,
            Relay(upstream, config.timeouts),
            config.band_names(),
            Cors.from_config(config),
            connector,
            Releaser(upstream, config, connector),
            KINDS if continues else frozenset(),
            frozenset(BodyKind) - {BodyKind.OTHER, BodyKind.FORM} if continues else frozenset(),
            settings_of(config).externals,
        )

    async def read(self, route: Route, http: web.BaseRequest, body: bytes) -> ParsedBody:
        """Parses the body of a request. Raises Failure (400), also for a wrong content type."""
        if route.method == "GET":
            # A GET names its model in the query.
            return ParsedBody(model=http.rel_url.query.get("model") or None, kind=route.kind, body=b"")
        content_type = http.headers.get("content-type", "")
        body = body if route.kind is BodyKind.FORM else body.removeprefix(BOM_UTF8)
        wanted = "multipart/form-data" if route.kind is BodyKind.FORM else "application/json"
        if content_type.partition(";")[0].strip().lower() != wanted:
            raise Failure(Outcome.BAD_REQUEST, f"Unsupported media type: the content type of this route is {wanted}.")
        return await self.body_reader.read(body, route.kind, content_type)


@dataclass(slots=True)
class Rulebook:
    """Refers to the current rules, which new requests use. A reload replaces them in one assignment."""

    current: Rules
