"""Answers requests that need no engine: health probes, the list of models, and the pages for operators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

import orjson
from aiohttp import web

from llmproxy import __version__
from llmproxy.core.domain import Outcome, Refused
from llmproxy.core.pools import Pools
from llmproxy.gateway.admin.adapters import AdapterRoutes
from llmproxy.gateway.admin.backends import BackendRoutes
from llmproxy.gateway.admin.debug import ADAPTERS, EXPLAIN, QUEUE, UI, AdminPages
from llmproxy.gateway.admin.live import LivePages
from llmproxy.gateway.admin.scale import ScalePages
from llmproxy.gateway.admin.usage import UsagePage
from llmproxy.gateway.http.errors import Failure, nothing_at
from llmproxy.gateway.http.routes import LOAD_ADAPTER, METRICS, MODELS, PING, ROOT, UNLOAD_ADAPTER, USAGE
from llmproxy.gateway.proxying.handler import RequestHandler
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.observe.exit_batch import Exits
from llmproxy.observe.metrics import CONTENT_TYPE, Metrics

READY_RETRY_S = 1.0
NOT_UP = "No backend is known yet that serves this model. Try again shortly."
READY = "/ready"
PROBES = frozenset({"/health", READY, "/version"})  # Paths that both ports serve.
ANTHROPIC = "anthropic-version"  # The header field that every client of Anthropic's API sends.
ADDED: dict[str, tuple[str, Callable[[web.BaseRequest], web.Response]]] = {}
"""Path -> method and handler, from a program that embeds the proxy. They must be administrative
paths, and precede the proxy's own."""
OWN = PROBES | {ROOT, PING, MODELS, USAGE}
"""The paths that `Pages.show` answers, in addition to the paths of single models below MODELS."""


class Pages(Protocol):
    """Answers requests that need no engine."""

    async def show(self, path: str, request: web.BaseRequest) -> web.Response:
        """Returns the answer for a path in `OWN` or below `MODELS`. Raises Failure (401, 404, 503)."""

    async def administer(self, path: str, request: web.BaseRequest, on_admin_port: bool) -> web.Response:
        """Returns the answer for an administrative path. Raises Failure, also if the client may not use the path."""


class OwnPages:
    """The pages that this process answers itself. Worker processes forward such requests to the scheduler process."""

    def __init__(
        self,
        rulebook: Rulebook,
        pools: Pools,
        handler: RequestHandler,
        metrics: Metrics,
        exits: Exits,
        admin: AdminPages,
        adapters: AdapterRoutes,
        backends: BackendRoutes,
        live: LivePages,
        scale: ScalePages,
        usage: UsagePage,
    ) -> None:
        self._rulebook = rulebook
        self._pools = pools
        self._handler = handler
        self._exits = exits
        self._admin = admin
        self._adapters = adapters
        self._backends = backends
        self._live = live
        self._scale = scale
        self._usage = usage
        root = {"name": "llmproxy", "version": __version__, "models": MODELS, "ready": READY, "page": UI}
        self._own: dict[str, Callable[[web.BaseRequest], web.Response]] = {
            ROOT: lambda _: _json(root),
            "/health": lambda _: web.Response(),
            PING: lambda _: web.Response(),
            READY: lambda _: self._ready(),
            "/version": lambda _: _json({"version": __version__}),
            MODELS: self._models,
        }
        self._pages: dict[str, Callable[[web.BaseRequest], web.Response]] = {
            METRICS: lambda _: web.Response(body=metrics.page(), headers={"Content-Type": CONTENT_TYPE}),
            QUEUE: admin.queue,
            EXPLAIN: admin.explain,
            ADAPTERS: lambda _: admin.adapters(),
        }

    async def show(self, path: str, request: web.BaseRequest) -> web.Response:
        if path == USAGE:
            self._exits.flush()
            return await self._usage.show(self._rulebook.current.keys.check(request.headers))
        own = self._own.get(path)
        return self._one_model(request, path.removeprefix(MODELS + "/")) if own is None else own(request)

    def check(self, path: str, request: web.BaseRequest, on_admin_port: bool) -> None:
        """Raises Failure if the client may not send this request to an administrative path."""
        self._admin.check(path, request, on_admin_port)

    async def administer(self, path: str, request: web.BaseRequest, on_admin_port: bool) -> web.Response:
        self.check(path, request, on_admin_port)
        self._exits.flush()
        if path in ADDED:
            method, added = ADDED[path]
            check_method(request, method)
            return added(request)
        if path in (LOAD_ADAPTER, UNLOAD_ADAPTER):
            check_method(request, "POST")
            return await self._adapters.serve(path, request)
        if methods := self._backends.methods(path):
            check_method(request, *methods)
            return await self._backends.serve(path, request)
        page = self._live.page(path) or self._scale.page(path) or self._pages.get(path)
        if page is None:
            raise nothing_at(path)
        check_method(request, "GET", "HEAD")
        return page(request)

    def _ready(self) -> web.Response:
        if self._handler.shutting_down and not self._handler.replaced:
            return not_ready("draining")
        if not self._pools.ready(asyncio.get_running_loop().time()):
            return not_ready("no backend is available")
        return _json({"ready": True})

    def _models(self, request: web.BaseRequest) -> web.Response:
        entries = self._models_for(request)
        listed: dict[str, Any] = {"object": "list", "data": entries}
        if ANTHROPIC in request.headers:
            ids = [entry["id"] for entry in entries] or [None]
            listed |= {"first_id": ids[0], "last_id": ids[-1], "has_more": False}
        return _json(listed)

    def _one_model(self, request: web.BaseRequest, name: str) -> web.Response:
        """Returns the entry of any model name that requests may use, listed or not. Raises Failure (401, 404, 503)."""
        for entry in self._models_for(request):
            if entry["id"] == name:
                return _json(entry)
        if self._rulebook.current.keys.check(request.headers).allows(name):
            try:
                entry = self._pools.catalogue.model(name)
                return _json(entry | _anthropic(entry) if ANTHROPIC in request.headers else entry)
            except Refused as refused:
                if refused.outcome is Outcome.REJECTED_NO_BACKENDS:
                    raise Failure(refused.outcome, NOT_UP, retry_after_s=refused.retry_after_s) from None
        raise Failure(Outcome.UNKNOWN_MODEL, f"The model `{name[:200]}` does not exist.")

    def _models_for(self, request: web.BaseRequest) -> list[dict[str, Any]]:
        """Returns the models that the tenant of this request may use. Raises Failure (401).

        A request with the field `anthropic-version` gets the fields of Anthropic's API too.
        """
        tenant = self._rulebook.current.keys.check(request.headers)
        entries = [entry for entry in self._pools.catalogue.models() if tenant.allows(entry["id"])]
        return [entry | _anthropic(entry) for entry in entries] if ANTHROPIC in request.headers else entries


def _anthropic(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns the additional fields of a model entry in Anthropic's API."""
    # The engine's `created` may have any type and value.
    fields = {"type": "model", "display_name": entry["id"]}
    created_s = entry.get("created")
    if isinstance(created_s, int) and 0 <= created_s < 1 << 32:
        fields["created_at"] = datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return fields


def check_method(request: web.BaseRequest, *methods: str) -> None:
    """Raises Failure (405) if the method of the request is not in `methods`."""
    if request.method not in methods:
        allowed = ", ".join(methods)
        message = f"Method {request.method} is not allowed here; allowed: {allowed}."
        raise Failure(Outcome.BAD_REQUEST, message, status=405, headers={"Allow": allowed})


def not_ready(reason: str) -> web.Response:
    """Returns the answer (503) of READY while the proxy cannot serve requests."""
    return _json({"ready": False, "reason": reason}, status=503, headers={"Retry-After": f"{READY_RETRY_S:.0f}"})


def _json(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status, body=orjson.dumps(content), content_type="application/json", headers=headers or {}
    )
