"""`/admin/backends` and `/admin/reload`: lists backends, drains them, and reloads the configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiohttp import web

from llmproxy.config import ConfigError
from llmproxy.config.reload import Reloader
from llmproxy.core.domain import Outcome
from llmproxy.core.snapshot import BackendStatus
from llmproxy.gateway.admin.debug import page_response, query_number
from llmproxy.gateway.admin.explained import page_fields
from llmproxy.gateway.http.errors import Failure, error_fields

BACKENDS = "/admin/backends"
RELOAD = "/admin/reload"
DEADLINE_MAX_S = 86_400
DRAINING = re.compile(rf"{BACKENDS}/(.{{1,300}})/(drain|undrain)", re.DOTALL)


class DrainableBackends(Protocol):
    """The backends and their administrative states. A method with a `name` raises KeyError for an unknown backend."""

    def statuses(self) -> Sequence[BackendStatus]:
        """The status of every backend."""

    def status(self, name: str) -> BackendStatus:
        """The status of one backend."""

    def drain(self, name: str, deadline_s: float | None) -> None:
        """Sends no new requests to a backend.

        After `deadline_s` (None: never), requests move to other backends that can continue them.
        """

    def undrain(self, name: str) -> None:
        """Sends new requests to a drained backend again."""


class BackendRoutes:
    """Serves the routes of this module. The caller must check first that the client may use them.

    `reloader` is None if the proxy was started without a configuration file.
    """

    def __init__(self, backends: DrainableBackends, reloader: Reloader | None, clock: Callable[[], float]) -> None:
        self._backends = backends
        self._reloader = reloader
        self._clock = clock

    @staticmethod
    def methods(path: str) -> tuple[str, ...]:
        """Returns the HTTP methods of a path; empty if this class does not serve the path."""
        if path == BACKENDS:
            return ("GET", "HEAD")
        return ("POST",) if path == RELOAD or DRAINING.fullmatch(path) else ()

    async def serve(self, path: str, request: web.BaseRequest) -> web.Response:
        """Answers a path for which `methods` is not empty.

        Raises Failure: 404 for an unknown backend, 409 for a reload without a file, 400 for a bad deadline. A
        configuration that is refused gets 400 with its problems.
        """
        if path == BACKENDS:
            return page_response({"backends": [self._shown(status) for status in self._backends.statuses()]})
        if path == RELOAD:
            return await self._reload()
        found = DRAINING.fullmatch(path)
        assert found is not None
        name, verb = found.groups()
        try:
            if verb == "undrain":
                self._backends.undrain(name)
            else:
                self._backends.drain(name, _deadline_s(request))
            return page_response(self._shown(self._backends.status(name)))
        except KeyError:
            message = f"There is no backend `{name}`; see {BACKENDS}."
            raise Failure(Outcome.BAD_REQUEST, message, status=404) from None

    def _shown(self, status: BackendStatus) -> dict[str, Any]:
        return page_fields(status, 3, name="backend") | {"since_s": round(self._clock() - status.since_s, 3)}

    async def _reload(self) -> web.Response:
        if self._reloader is None:
            message = "There is nothing to read again: the proxy was started without a configuration file."
            raise Failure(Outcome.BAD_REQUEST, message, status=409)
        try:
            done = await self._reloader.reload("request")
        except ConfigError as error:
            wrong = error_fields(400, "The configuration was not reloaded, and nothing has changed.")
            return page_response({"reloaded": False, "problems": list(error.problems), "error": wrong}, status=400)
        return page_response(
            {
                "reloaded": True,
                "changes": [str(change) for change in done.changes],
                "needs_restart": [str(change) for change in done.needs_restart],
            }
        )


def _deadline_s(request: web.BaseRequest) -> int | None:
    """Returns the seconds until the streams of a drained backend move; None without a deadline.

    Raises Failure (400).
    """
    deadline_s = query_number(request, "deadline_s", 0, DEADLINE_MAX_S)
    if deadline_s is None and "deadline_s" in request.query:
        raise Failure(
            Outcome.BAD_REQUEST, f"deadline_s must be an integer from 1 to {DEADLINE_MAX_S}.", param="deadline_s"
        )
    return deadline_s
