"""The front door: which path leads where, and the few answers that the proxy gives by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson
from aiohttp import web

from llmproxy import __version__
from llmproxy.core.domain import Outcome
from llmproxy.core.pools import Pools
from llmproxy.dispatcher import Dispatcher
from llmproxy.gateway.adapters import AdapterRoutes
from llmproxy.gateway.admin import ADAPTERS, EXPLAIN, QUEUE, AdminPages
from llmproxy.gateway.admin_backends import BackendRoutes
from llmproxy.gateway.auth import Tenant
from llmproxy.gateway.clients import Clients
from llmproxy.gateway.errors import INTERNAL_MESSAGE, Failure, nothing_at
from llmproxy.gateway.hygiene import check as check_hygiene
from llmproxy.gateway.identity import id_for_error, request_id
from llmproxy.gateway.routes import (
    LOAD_ADAPTER,
    METRICS,
    SCHEDULED,
    STORED_RESPONSES,
    UNLOAD_ADAPTER,
    dialect_of,
    is_administrative,
)
from llmproxy.gateway.rules import Rulebook
from llmproxy.gateway.stored import StoredResponses
from llmproxy.gateway.walk import Walker
from llmproxy.telemetry.exit import RequestExit
from llmproxy.telemetry.logs import log_exit, log_internal
from llmproxy.telemetry.metrics import CONTENT_TYPE, Metrics

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MODELS = "/v1/models"
READY_RETRY_S = 1.0
PROBES = frozenset({"/health", "/ready", "/version"})
"""What is answered on either port."""


class FrontDoor:
    """Sends each request where its path leads.

    `handle` is the one handler of the server for clients; those who run the proxy come in by `AdminDoor`.
    """

    def __init__(
        self,
        rulebook: Rulebook,
        pools: Pools,
        dispatcher: Dispatcher,
        walker: Walker,
        stored: StoredResponses,
        metrics: Metrics,
        admin: AdminPages,
        adapters: AdapterRoutes,
        fleet: BackendRoutes,
        clients: Clients,
        head_bytes_max: int,
    ) -> None:
        self.clients = clients
        self._head_bytes_max = head_bytes_max
        self._fleet = fleet
        self._admin = admin
        self._adapters = adapters
        self._rulebook = rulebook
        self._pools = pools
        self._dispatcher = dispatcher
        self._walker = walker
        self._stored = stored
        self._metrics = metrics
        self._own: dict[str, Handler] = {
            "/health": self._health,
            "/ready": self._ready,
            "/version": self._version,
            MODELS: self._models,
        }
        self._pages: dict[str, Callable[[web.BaseRequest], web.Response]] = {
            METRICS: self._metrics_page,
            QUEUE: admin.queue,
            EXPLAIN: admin.explain,
            ADAPTERS: lambda _: admin.adapters(),
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request of a client; whatever goes wrong, in the JSON of the endpoint's dialect."""
        return await self._handle(request, on_admin_port=False)

    async def handle_admin(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request on the port for those who run the proxy."""
        return await self._handle(request, on_admin_port=True)

    async def _handle(self, request: web.BaseRequest, on_admin_port: bool) -> web.StreamResponse:
        response = await self._answer(request, on_admin_port)
        if self._walker.leaving and not response.prepared:
            # A client that keeps its connection would send its next request into an ending process, and lose it.
            response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest, on_admin_port: bool) -> web.StreamResponse:
        path = request.path
        if len(path) > 1:
            # An engine would answer a trailing slash with a redirect to its own address, which clients cannot reach.
            path = path.rstrip("/") or "/"
        try:
            check_hygiene(request, self._head_bytes_max)
            if is_administrative(path):
                self._admin.check(path, request, on_admin_port)
                return await self._administer(path, request)
            if on_admin_port and path not in PROBES:
                raise nothing_at(path)
            if path not in self._own:
                self.clients.ask(request.remote or "", asyncio.get_running_loop().time())
            # By its very bytes: %2f is no slash where somebody else has decided what may pass.
            route = SCHEDULED.get(request.rel_url.raw_path.rstrip("/"))
            if route is not None:
                _only(request, "POST")
                return await self._walker.serve(route, request)
            return await self._by_itself(path, request)
        except Failure as failure:
            return self.refuse(request, failure, path)
        except (ConnectionError, web.RequestPayloadError):
            # Nobody is there to read it; the server only needs something to close the connection with.
            return web.Response(status=400)
        except Exception as bug:  # noqa: BLE001 - the last wall: a bug becomes one 500 and a full story in the log
            return self._internal(path, request, bug)

    def _internal(self, path: str, request: web.BaseRequest, bug: Exception) -> web.Response:
        own_id = id_for_error(request.headers)
        log_internal(own_id, bug)
        if path not in SCHEDULED:
            # A walk tells of its end itself.
            self._ended(request, path, own_id, Outcome.INTERNAL, 500, INTERNAL_MESSAGE)
        if request.writer.output_size and request.transport is not None:
            # An answer has begun; another one in the middle of it would pass for a part of it.
            request.transport.abort()
        failure = Failure(Outcome.INTERNAL, INTERNAL_MESSAGE)
        return failure.response(dialect_of(path), {"x-request-id": own_id})

    def refuse(self, request: web.BaseRequest, failure: Failure, path: str = "") -> web.Response:
        """Count and log what goes no further, and make the answer to it; without a path, it could not be parsed."""
        own_id = id_for_error(request.headers)
        story = " ".join(filter(None, (failure.message, failure.detail)))
        self._ended(request, path, own_id, failure.outcome, failure.status, story)
        return failure.response(dialect_of(path), {"x-request-id": own_id})

    def turn_away(self, failure: Failure) -> bytes:
        """Count and log a connection on which no request came about, and make the bytes of the answer to it."""
        self._count("", "", uuid4().hex, failure.outcome, failure.status, failure.message)
        return failure.raw()

    async def _stored_response(
        self, path: str, request: web.BaseRequest, response_id: str, tenant: Tenant
    ) -> web.StreamResponse:
        own_id = request_id(request.headers) or uuid4().hex
        try:
            response = await self._stored.serve(path, request, response_id, own_id, tenant)
        except (asyncio.CancelledError, ConnectionError):
            self._ended(request, path, own_id, Outcome.CANCELLED, 499, "the client left")
            raise
        served = response.status < 400
        outcome = Outcome.COMPLETED if served else Outcome.UPSTREAM_STATUS
        self._ended(request, path, own_id, outcome, response.status, None if served else "the backend's own answer")
        return response

    def _ended(
        self, request: web.BaseRequest, path: str, own_id: str, outcome: Outcome, status: int, error: str | None
    ) -> None:
        self._count(request.method, path, own_id, outcome, status, error)

    def _count(self, method: str, path: str, own_id: str, outcome: Outcome, status: int, error: str | None) -> None:
        ended = RequestExit(
            request_id=own_id,
            method=method,
            path=path[:256],
            outcome=outcome,
            status=status,
            duration_s=0.0,
            error=error,
        )
        self._metrics.record(ended)
        log_exit(ended)

    async def _by_itself(self, path: str, request: web.BaseRequest) -> web.StreamResponse:
        own = self._own.get(path)
        if own is not None:
            _only(request, "GET", "HEAD")
            return await own(request)
        if path.startswith(MODELS + "/"):
            _only(request, "GET", "HEAD")
            return self._one_model(request, path.removeprefix(MODELS + "/"))
        if path.startswith(STORED_RESPONSES):
            tenant = self._rulebook.current.keys.check(request.headers)
            response_id, _, verb = path.removeprefix(STORED_RESPONSES).partition("/")
            if verb in ("", "cancel"):
                _only(request, "POST" if verb else "GET")
                return await self._stored_response(path, request, response_id, tenant)
        raise nothing_at(path)

    async def _administer(self, path: str, request: web.BaseRequest) -> web.StreamResponse:
        """Answer at an administrative path; that whoever asks may do so was found out before."""
        if path in (LOAD_ADAPTER, UNLOAD_ADAPTER):
            _only(request, "POST")
            return await self._adapters.serve(path, request)
        if methods := self._fleet.methods(path):
            _only(request, *methods)
            return await self._fleet.serve(path)
        page = self._pages.get(path)
        if page is None:
            raise nothing_at(path)
        _only(request, "GET", "HEAD")
        return page(request)

    # --- the proxy's own pages ---------------------------------------------------------------------------------------

    async def _health(self, _: web.BaseRequest) -> web.Response:
        return web.Response()

    async def _ready(self, _: web.BaseRequest) -> web.Response:
        if self._walker.leaving and not self._walker.replaced:
            reason = "draining"
        elif not self._pools.ready(asyncio.get_running_loop().time()):
            reason = "no backend is available"
        else:
            return _json({"ready": True})
        return _json({"ready": False, "reason": reason}, status=503, headers={"Retry-After": f"{READY_RETRY_S:.0f}"})

    def _metrics_page(self, _: web.BaseRequest) -> web.Response:
        return web.Response(body=self._metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    async def _version(self, _: web.BaseRequest) -> web.Response:
        return _json({"version": __version__})

    async def _models(self, request: web.BaseRequest) -> web.Response:
        return _json({"object": "list", "data": self._models_for(request)})

    def _one_model(self, request: web.BaseRequest, name: str) -> web.Response:
        for entry in self._models_for(request):
            if entry["id"] == name:
                return _json(entry)
        raise Failure(Outcome.UNKNOWN_MODEL, f"The model `{name[:200]}` does not exist.")

    def _models_for(self, request: web.BaseRequest) -> list[dict[str, Any]]:
        """The models that the tenant of this request may ask for. Raises Failure (401)."""
        tenant = self._rulebook.current.keys.check(request.headers)
        return [entry for entry in self._pools.models() if tenant.allows(entry["id"])]


@dataclass(frozen=True, slots=True)
class AdminDoor:
    """The door on the port for those who run the proxy: connections of clients do not count there."""

    front: FrontDoor
    clients: Clients

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self.front.handle_admin(request)

    def refuse(self, request: web.BaseRequest, failure: Failure) -> web.Response:
        return self.front.refuse(request, failure)

    def turn_away(self, failure: Failure) -> bytes:
        return self.front.turn_away(failure)


def _only(request: web.BaseRequest, *methods: str) -> None:
    if request.method not in methods:
        allowed = ", ".join(methods)
        message = f"Method {request.method} is not allowed here; allowed: {allowed}."
        raise Failure(Outcome.BAD_REQUEST, message, status=405, headers={"Allow": allowed})


def _json(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status, body=orjson.dumps(content), content_type="application/json", headers=headers or {}
    )
