"""The facts about a request that depend only on its head, its client and the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from llmproxy.core.domain import Slo
from llmproxy.gateway.http.client_address import Client
from llmproxy.gateway.http.headers import Headers
from llmproxy.gateway.http.routes import Route
from llmproxy.gateway.request.auth import NO_TENANT, Tenant

Standing = tuple[int | None, str | None, float | None, float, Slo | None, str | None]
"""Level, flow, maximum wait, weight, objective and unknown objective of a request, as its record has them."""


@dataclass(slots=True)
class HeadFacts:
    """The facts of one head. A connection keeps them while its requests repeat the head, and passes them on.

    A configuration that is reloaded makes other `rules`, and the facts are found again.
    """

    rules: object
    route: Route
    sender: Client
    path: str
    path_qs: str
    method: str
    # The request id that the client names.
    given_id: str | None
    user_agent: str | None
    # Whether the head has passed all checks, and its connection keeps these facts.
    kept: bool = False
    tenant: Tenant = NO_TENANT
    # Whether the client's headers about bands, flows and objectives count.
    trusted: bool = False
    # The requested model of the latest request with its target, and the standing of that request.
    standing_for: tuple[str, str] | None = None
    standing: Standing | None = None
    # The longest wait for a backend that serves the model.
    max_wait_s: float | None = None
    # Fields for backends, by whether the proxy has a key for the backend; None if the facts are not kept.
    forwarded: dict[bool, Headers] | None = None
