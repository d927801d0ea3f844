"""The facts about a request that depend only on its head, its client and the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from llmproxy.core.domain import Slo
from llmproxy.gateway.http.client_address import Client
from llmproxy.gateway.http.headers import Headers
from llmproxy.gateway.http.routes import Route
from llmproxy.gateway.request.auth import NO_TENANT, Tenant

Standing = tuple[int | None, str | None, float | None, float, Slo | None, str | None]
"""The result of `Identity.classify`:

band level, flow, maximum wait (s), weight, objective, and the name of an objective that is not configured.
"""


@dataclass(slots=True)
class HeadFacts:
    """The facts of one request head.

    A connection keeps the latest facts, and gives them to each later request with an equal head. They are used only if
    `rules` are still the current rules; after a reload of the configuration they are found again.
    """

    # The `Rules` by which the facts were found.
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
    # The requested model name and the target of the latest request, and the result of `Identity.classify` for them.
    standing_for: tuple[str, str] | None = None
    standing: Standing | None = None
    # The result of `Identity.max_wait_s`, which limits the wait for a first backend; None until it is computed.
    max_wait_s: float | None = None
    # The client's fields for backends (see `to_backend`): whether the proxy has a key for the backend -> fields. None
    # if the facts are not kept.
    forwarded: dict[bool, Headers] | None = None
