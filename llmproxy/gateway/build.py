"""Builds the gateway, the part of the proxy that serves clients, in a single process or in each worker process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmproxy.config import BackendConfig, Config
from llmproxy.core.estimates.tokens import Estimator
from llmproxy.core.placement.policy import presets
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.pages import Pages
from llmproxy.gateway.proxying.answers import Answers
from llmproxy.gateway.proxying.handler import RequestHandler
from llmproxy.gateway.proxying.rules import Rulebook, Rules
from llmproxy.gateway.proxying.stored import StoredResponses
from llmproxy.gateway.router import Router
from llmproxy.observe import logs
from llmproxy.observe.exit import ExitSink
from llmproxy.observe.trace_context import Sampler
from llmproxy.scheduling.lease import Leasing
from llmproxy.upstream.port import Upstream


@dataclass(slots=True)
class Gateway:
    """The request handler and the objects that it depends on."""

    rulebook: Rulebook
    stored: StoredResponses
    handler: RequestHandler
    exits: ExitSink
    leasing: Leasing
    ids: str  # Prefix of the scheduler's request ids, different in each process.
    _upstream: Upstream

    @classmethod
    def build(
        cls,
        config: Config,
        backends: Mapping[str, BackendConfig],
        upstream: Upstream,
        dispatcher: Leasing,
        estimator: Estimator,
        exits: ExitSink,
        ids: str = "",
    ) -> Gateway:
        """Builds a gateway. Raises the errors of `Rules.build`.

        `backends` is shared with the registry, which changes it. `ids` is a prefix of the scheduler's request ids that
        differs in each process.
        """
        rulebook = Rulebook(Rules.build(config, upstream))
        stored = StoredResponses(rulebook, backends, upstream, dispatcher)
        answers = Answers(dispatcher.cached if presets.hears_answers(config.scheduling.placement) else None)
        handler = RequestHandler(
            rulebook, backends, estimator, dispatcher, stored, answers, exits, Sampler.of(config), ids=ids
        )
        return cls(rulebook, stored, handler, exits, dispatcher, ids, upstream)

    def router(self, pages: Pages, clients: ClientLimits) -> Router:
        """Returns a router for the requests of clients. `pages` answers the requests that need no engine."""
        head_bytes_max = self.rulebook.current.config.clients.head_bytes_max
        return Router(self.rulebook, self.handler, self.stored, self.exits, pages, clients, head_bytes_max)

    def reconfigure(self, config: Config) -> None:
        """Applies another configuration to new requests. If `Rules.build` raises an error, nothing changes."""
        rules = Rules.build(config, self._upstream)
        if config.log_level != self.rulebook.current.config.log_level:
            logs.configure(config.log_format, config.log_level)
        self.rulebook.current = rules
        self.handler.reconfigure(config)
