"""Allows web pages of other origins to read answers (the CORS protocol of the Fetch standard).

A browser sends the origin of a page. Before a request that no HTML form could send, the browser asks for permission
(the preflight). The browser shows an answer to the page only if the answer allows it. CORS protects people who use
browsers. It does not protect servers, because any other client can read everything.
"""

from __future__ import annotations

import re

from aiohttp import web

from llmproxy.config import Config
from llmproxy.core.domain import Outcome
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.headers import Headers

METHODS = "GET, HEAD, POST"
EXPOSED = "retry-after, x-request-id, x-llmproxy-attempts, x-llmproxy-backend, x-llmproxy-queue-ms"
"""Fields of answers that pages may read, in addition to the few that browsers always show."""
MAX_AGE_S = 600  # How long a browser may remember the answer to a preflight.

_NAMES = re.compile(r"[\w!#$%&'*+.^`|~-]+(?:[ \t]*,[ \t]*[\w!#$%&'*+.^`|~-]+)*+", re.ASCII)


class Cors:
    """Allows pages of some origins to send requests and read answers, without credentials of the browser (cookies)."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origins)

    @classmethod
    def from_config(cls, config: Config) -> Cors | None:
        """Returns None if `clients.allowed_origins` is empty. The proxy then adds no CORS fields."""
        return cls(config.clients.allowed_origins) if config.clients.allowed_origins else None

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """Returns the answer to a preflight; None for any other request.

        Every header field is allowed, because no field contains a secret that a page does not know, and SDKs add their
        own fields. Raises Failure (403) for an origin that is not allowed.
        """
        asked = request.headers
        origin = asked.get("origin")
        if request.method != "OPTIONS" or origin is None or "access-control-request-method" not in asked:
            return None
        if not self._any and origin not in self._origins:
            message = f"Pages of {origin[:200]} may not ask here: it is not among clients.allowed_origins."
            raise Failure(Outcome.BAD_REQUEST, message, status=403, param="origin")
        fields = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        names = asked.get("access-control-request-headers", "")
        if _NAMES.fullmatch(names):
            fields["Access-Control-Allow-Headers"] = names
            fields["Vary"] = "Access-Control-Request-Headers"
        if asked.get("access-control-request-private-network") == "true":
            fields["Access-Control-Allow-Private-Network"] = "true"
        return web.Response(status=204, headers=fields)

    def answered(self, origin: str | None, varies: str = "") -> Headers:
        """Returns the CORS fields to add to the answer for a page of `origin`.

        `origin` is the request's Origin field; None if it is absent. For an origin that is not allowed, the result
        contains at most `Vary`. `varies` is the value of the Vary field that the answer already has.
        """
        fields: Headers = []
        if not self._any and not {"origin", "*"} & {name.strip() for name in varies.lower().split(",")}:
            fields.append(("Vary", "Origin"))
        if self._any or origin in self._origins:
            fields.append(("Access-Control-Allow-Origin", "*" if self._any else str(origin)))
            fields.append(("Access-Control-Expose-Headers", EXPOSED))
        return fields

    def passed_on(self, origin: str | None, fields: Headers) -> Headers:
        """Returns the `fields` of a backend's answer with the proxy's CORS fields in place of the backend's.

        Browsers accept only one set of CORS fields. `origin` is the request's Origin field; None if it is absent.
        """
        others = [field for field in fields if not field[0].lower().startswith("access-control-")]
        varies = ",".join(value for name, value in others if name.lower() == "vary")
        return others + self.answered(origin, varies)
