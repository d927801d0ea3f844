"""`/admin/backends` and `/admin/reload`: who the backends are, draining them, and reading the configuration again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiohttp import web

from llmproxy.config import ConfigError
from llmproxy.config.reload import Reloader
from llmproxy.core.domain import Outcome
from llmproxy.gateway.admin.debug import shown
from llmproxy.gateway.http.errors import Failure, error_fields

BACKENDS = "/admin/backends"
RELOAD = "/admin/reload"
DRAINING = re.compile(rf"{BACKENDS}/(.{{1,300}})/(drain|undrain)", re.DOTALL)


class Standing(Protocol):
    """How one backend stands; `since_s` is on the clock of the loop."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def since_s(self) -> float: ...


class Fleet(Protocol):
    """Who knows the backends, and drains them."""

    def standings(self) -> Sequence[Standing]:
        """Every backend."""

    def standing(self, name: str) -> Standing:
        """One backend. Raises KeyError."""

    def drain(self, name: str) -> None:
        """Grant nothing new there. Raises KeyError."""

    def undrain(self, name: str) -> None:
        """Let it be given work again. Raises KeyError."""


class BackendRoutes:
    """Answers those who run the proxy; who that is was found out before. `reloader` is None where there is no file."""

    def __init__(self, fleet: Fleet, reloader: Reloader | None, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._reloader = reloader
        self._clock = clock

    @staticmethod
    def methods(path: str) -> tuple[str, ...]:
        """What may be done at a path; nothing where there is no such page."""
        if path == BACKENDS:
            return ("GET", "HEAD")
        return ("POST",) if path == RELOAD or DRAINING.fullmatch(path) else ()

    async def serve(self, path: str) -> web.Response:
        """Show or do what stands at a path that `methods` knows. Raises Failure."""
        if path == BACKENDS:
            return shown({"backends": [self._shown(one) for one in self._fleet.standings()]})
        if path == RELOAD:
            return await self._reload()
        found = DRAINING.fullmatch(path)
        assert found is not None
        name, verb = found.groups()
        try:
            (self._fleet.drain if verb == "drain" else self._fleet.undrain)(name)
            return shown(self._shown(self._fleet.standing(name)))
        except KeyError:
            message = f"There is no backend `{name}`; see {BACKENDS}."
            raise Failure(Outcome.BAD_REQUEST, message, status=404) from None

    def _shown(self, one: Standing) -> dict[str, Any]:
        return {
            "backend": one.name,
            "url": one.url,
            "source": one.source,
            "state": one.state,
            "in_flight": one.in_flight,
            "since_s": round(self._clock() - one.since_s, 3),
        }

    async def _reload(self) -> web.Response:
        if self._reloader is None:
            message = "There is nothing to read again: the proxy was started without a configuration file."
            raise Failure(Outcome.BAD_REQUEST, message, status=409)
        try:
            done = await self._reloader.reload("request")
        except ConfigError as error:
            wrong = error_fields(400, "The configuration was not reloaded, and nothing has changed.")
            return shown({"reloaded": False, "problems": list(error.problems), "error": wrong}, status=400)
        return shown(
            {
                "reloaded": True,
                "changes": [str(change) for change in done.changes],
                "needs_restart": [str(change) for change in done.needs_restart],
            }
        )
