"""The front door: which path leads where."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from uuid import uuid4

import structlog
from aiohttp import web

from llmproxy.core.domain import Outcome
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.errors import INTERNAL_MESSAGE, Failure, nothing_at
from llmproxy.gateway.http.routes import MODELS, PING, SCHEDULED, STORED_RESPONSES, dialect_of, is_administrative
from llmproxy.gateway.http.strictness import asks_for_websocket, no_websocket
from llmproxy.gateway.http.strictness import check as check_hygiene
from llmproxy.gateway.http.wrong_protocol import WrongProtocol
from llmproxy.gateway.pages import OWN, PROBES, Pages, only
from llmproxy.gateway.proxying.handler import RequestHandler
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.gateway.proxying.stored import StoredResponses
from llmproxy.gateway.request.auth import Tenant
from llmproxy.gateway.request.identity import id_for_error, request_id
from llmproxy.telemetry.exit import ExitSink, RequestExit
from llmproxy.telemetry.logs import log_exit, log_internal

_log = structlog.get_logger()


class FrontDoor:
    """Sends each request where its path leads.

    `handle` is the one handler of the server for clients; those who run the proxy come in by `AdminDoor`.
    """

    def __init__(
        self,
        rulebook: Rulebook,
        handler: RequestHandler,
        stored: StoredResponses,
        metrics: ExitSink,
        pages: Pages,
        clients: ClientLimits,
        head_bytes_max: int,
    ) -> None:
        self.clients = clients
        self._head_bytes_max = head_bytes_max
        self._pages = pages
        self._rulebook = rulebook
        self._handler = handler
        self._misled: set[str] = set()
        self._stored = stored
        self._metrics = metrics

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request of a client; whatever goes wrong, in the JSON of the endpoint's dialect."""
        return await self._handle(request, on_admin_port=False)

    async def handle_admin(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request on the port for those who run the proxy."""
        return await self._handle(request, on_admin_port=True)

    async def handle_judged(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request of a client that the front door of a worker has let in."""
        return await self._handle(request, on_admin_port=False, judged=True)

    async def _handle(self, request: web.BaseRequest, on_admin_port: bool, judged: bool = False) -> web.StreamResponse:
        response = await self._answer(request, on_admin_port, judged)
        cors = self._rulebook.current.cors
        if cors is not None and not (judged or on_admin_port or response.prepared or is_administrative(_path(request))):
            response.headers.extend(cors.answered(request.headers.get("origin")))
        if self._handler.shutting_down and not response.prepared:
            # A client that keeps its connection would send its next request into an ending process, and lose it.
            response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest, on_admin_port: bool, judged: bool) -> web.StreamResponse:
        path = _path(request)
        try:
            if not judged:
                check_hygiene(request, self._head_bytes_max)
            if is_administrative(path):
                return await self._pages.administer(path, request, on_admin_port)
            if on_admin_port and path not in PROBES:
                raise nothing_at(path)
            cors = self._rulebook.current.cors
            if cors is not None and not on_admin_port and (asked := cors.preflight(request)) is not None:
                return asked
            if asks_for_websocket(request):
                # No error: clients that can do either ask for this first, and go on over HTTP at the sight of it.
                return no_websocket().response(dialect_of(path), {"x-request-id": id_for_error(request.headers)})
            if path not in OWN:
                self.clients.ask(request.remote or "", asyncio.get_running_loop().time())
            # By its very bytes: %2f is no slash where somebody else has decided what may pass.
            route = SCHEDULED.get(request.rel_url.raw_path.rstrip("/"))
            if route is not None:
                only(request, route.method)
                return await self._handler.serve(route, request)
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
        """Count and log a connection on which no request came about, and make the bytes of the answer to it.

        A wrong protocol is told once: who has the wrong URL tries it again and again.
        """
        ended = _exit("", "", uuid4().hex, failure.outcome, failure.status, failure.message)
        self._metrics.record(ended)
        if not isinstance(failure, WrongProtocol):
            log_exit(ended)
        elif failure.message not in self._misled:
            self._misled.add(failure.message)
            _log.warning("wrong_protocol", what=failure.message, hint=failure.hint)
        return failure.raw()

    async def _stored_response(
        self, path: str, request: web.BaseRequest, response_id: str, tenant: Tenant
    ) -> web.StreamResponse:
        own_id = request_id(request.headers) or uuid4().hex
        self._handler.begin_request()
        try:
            response, outcome, error = await self._stored.serve(
                path, request, response_id, own_id, tenant, lambda: self._handler.shutting_down
            )
        except (asyncio.CancelledError, ConnectionError) as left:
            self._ended(request, path, own_id, *self._handler.cancellation(left))
            raise
        finally:
            self._handler.end_request()
        self._ended(request, path, own_id, outcome, response.status, error)
        return response

    def _ended(
        self, request: web.BaseRequest, path: str, own_id: str, outcome: Outcome, status: int, error: str | None
    ) -> None:
        ended = _exit(request.method, path, own_id, outcome, status, error)
        self._metrics.record(ended)
        log_exit(ended)

    async def _by_itself(self, path: str, request: web.BaseRequest) -> web.StreamResponse:
        if path in OWN or path.startswith(MODELS + "/"):
            only(request, "GET", "HEAD", *(["POST"] if path == PING else []))
            return await self._pages.show(path, request)
        if path.startswith(STORED_RESPONSES):
            tenant = self._rulebook.current.keys.check(request.headers)
            response_id, _, verb = path.removeprefix(STORED_RESPONSES).partition("/")
            if verb in ("", "cancel"):
                only(request, "POST" if verb else "GET")
                return await self._stored_response(path, request, response_id, tenant)
        raise nothing_at(path)


def _path(request: web.BaseRequest) -> str:
    # An engine would answer a trailing slash with a redirect to its own address, which clients cannot reach.
    return request.path.rstrip("/") or "/"


def _exit(method: str, path: str, own_id: str, outcome: Outcome, status: int, error: str | None) -> RequestExit:
    return RequestExit(
        request_id=own_id,
        method=method,
        path=path[:256],
        outcome=outcome,
        status=status,
        duration_s=0.0,
        error=error,
    )


@dataclass(frozen=True, slots=True)
class AdminDoor:
    """The door on the port for those who run the proxy: connections of clients do not count there."""

    front: FrontDoor
    clients: ClientLimits

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self.front.handle_admin(request)

    def refuse(self, request: web.BaseRequest, failure: Failure) -> web.Response:
        return self.front.refuse(request, failure)

    def turn_away(self, failure: Failure) -> bytes:
        return self.front.turn_away(failure)
