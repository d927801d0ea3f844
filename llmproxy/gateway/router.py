"""Routes each request of a client by its path."""

from __future__ import annotations

import asyncio
from copy import copy
from uuid import uuid4

import structlog
from aiohttp import web

from llmproxy.core.domain import Outcome
from llmproxy.gateway.http.client_address import Client
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.client_request import ClientRequest
from llmproxy.gateway.http.errors import INTERNAL_MESSAGE, Failure, nothing_at
from llmproxy.gateway.http.routes import (
    MODELS,
    PING,
    SCHEDULED,
    STORED_RESPONSES,
    USAGE,
    error_dialect,
    is_administrative,
)
from llmproxy.gateway.http.strictness import asks_for_websocket, no_websocket
from llmproxy.gateway.http.strictness import check as check_strictness
from llmproxy.gateway.http.wrong_protocol import WrongProtocol
from llmproxy.gateway.pages import OWN, PROBES, Pages, check_method
from llmproxy.gateway.proxying.handler import RequestHandler
from llmproxy.gateway.proxying.rules import Rulebook, Rules
from llmproxy.gateway.proxying.stored import StoredResponses
from llmproxy.gateway.request.auth import Tenant
from llmproxy.gateway.request.head_facts import HeadFacts
from llmproxy.gateway.request.identity import id_for_error, request_id, user_agent
from llmproxy.observe.exit import ExitSink, RequestExit
from llmproxy.observe.logs import log_internal

_log = structlog.get_logger()


class Router:
    """Passes each request to the handler of its path: engine routes, stored responses or pages.

    This router serves the port for clients. `for_admin_port` makes the router of the port for operators.
    """

    def __init__(
        self,
        rulebook: Rulebook,
        handler: RequestHandler,
        stored: StoredResponses,
        exits: ExitSink,
        pages: Pages,
        clients: ClientLimits,
        head_bytes_max: int,
    ) -> None:
        self.clients = clients
        self._on_admin_port = False
        self._head_bytes_max = head_bytes_max
        self._pages = pages
        self._rulebook = rulebook
        self._handler = handler
        self._logged_protocols: set[str] = set()
        self._stored = stored
        self._exits = exits

    def for_admin_port(self, clients: ClientLimits) -> Router:
        """Returns a router for the port for operators, with its own limits `clients` for connections."""
        twin = copy(self)
        twin.clients, twin._on_admin_port = clients, True
        return twin

    async def handle(self, request: web.BaseRequest, *, checked: bool = False) -> web.StreamResponse:
        """Returns the answer to a request. Errors become answers in the format of the endpoint.

        `checked`: a worker process has checked the request and adds the CORS fields to the answer.
        """
        rules = self._rulebook.current
        head = request.facts if isinstance(request, ClientRequest) else None
        path = head.path if isinstance(head, HeadFacts) else _path(request)
        try:
            if isinstance(head, HeadFacts) and head.rules is rules:
                self.clients.count_request(head.sender.address, asyncio.get_running_loop().time())
                response = await self._handler.serve(head, request)
            else:
                response = await self._answer(path, request, rules, checked)
        except Failure as failure:
            response = self.refuse(request, failure, path)
        except (ConnectionError, web.RequestPayloadError):
            # The client is gone. The server only needs a response to close the connection with.
            response = web.Response(status=400)
        except Exception as bug:  # noqa: BLE001 - a bug in handling one request becomes a 500 and a traceback in the log
            response = self._internal(path, request, bug)
        cors = self._rulebook.current.cors
        if cors is not None and not (
            checked or self._on_admin_port or response.prepared or is_administrative(_path(request))
        ):
            response.headers.extend(cors.answered(request.headers.get("origin")))
        if self._handler.shutting_down and not response.prepared:
            # On an open connection, the client would send its next request to a process that ends, and lose it.
            response.force_close()
        return response

    async def _answer(self, path: str, request: web.BaseRequest, rules: Rules, checked: bool) -> web.StreamResponse:
        """Answers a request without current facts about its head. Raises Failure."""
        if not checked:
            check_strictness(request, self._head_bytes_max)
        if is_administrative(path):
            return await self._pages.administer(path, request, self._on_admin_port)
        if self._on_admin_port and path not in PROBES:
            raise nothing_at(path)
        cors = rules.cors
        if cors is not None and not self._on_admin_port and (preflight := cors.preflight(request)) is not None:
            return preflight
        if asks_for_websocket(request):
            # Not logged as an error: some clients try a WebSocket first and then use HTTP.
            return no_websocket().response(error_dialect(path), {"x-request-id": id_for_error(request.headers)})
        sender = rules.clients.identify(request)
        if path not in OWN or path == USAGE:
            self.clients.count_request(sender.address, asyncio.get_running_loop().time())
        # The raw path: for a proxy in front that filters by path, %2f is no slash.
        route = SCHEDULED.get(request.rel_url.raw_path.rstrip("/"))
        if route is not None:
            check_method(request, route.method)
            query = request.rel_url.raw_query_string
            path_qs = f"{route.path}?{query}" if query else route.path
            given_id = request_id(request.headers)
            agent = user_agent(request.headers)
            head = HeadFacts(rules, route, sender, path, path_qs, request.method, given_id, agent)
            return await self._handler.serve(head, request)
        return await self._unscheduled(path, request, sender)

    def _internal(self, path: str, request: web.BaseRequest, bug: Exception) -> web.Response:
        own_id = id_for_error(request.headers)
        log_internal(own_id, bug)
        if path not in SCHEDULED:
            # The handler of scheduled requests records their end itself.
            self._record(request, path, own_id, Outcome.INTERNAL, 500, INTERNAL_MESSAGE)
        if request.writer.output_size and request.transport is not None:
            # An answer has begun, and the client would read another one as part of it.
            request.transport.abort()
        failure = Failure(Outcome.INTERNAL, INTERNAL_MESSAGE)
        return failure.response(error_dialect(path), {"x-request-id": own_id})

    def refuse(self, request: web.BaseRequest, failure: Failure, path: str = "") -> web.Response:
        """Counts and logs a refused request, and returns its answer.

        `path` is "" if the request could not be parsed.
        """
        own_id = id_for_error(request.headers)
        error = " ".join(filter(None, (failure.message, failure.detail)))
        self._record(request, path, own_id, failure.outcome, failure.status, error)
        return failure.response(error_dialect(path), {"x-request-id": own_id})

    def reject(self, failure: Failure) -> bytes:
        """Counts and logs a connection that is refused without a whole request, and returns the bytes of its answer.

        Each wrong protocol is logged only once, because a client with a wrong URL retries again and again.
        """
        ended = _exit("", "", uuid4().hex, failure.outcome, failure.status, failure.message)
        self._exits.record(ended)
        if not isinstance(failure, WrongProtocol):
            self._handler.log_lines.record(ended)
        elif failure.message not in self._logged_protocols:
            self._logged_protocols.add(failure.message)
            _log.warning("wrong_protocol", what=failure.message, hint=failure.hint)
        return failure.raw()

    async def _stored_response(
        self, path: str, request: web.BaseRequest, response_id: str, tenant: Tenant, sender: Client
    ) -> web.StreamResponse:
        own_id = id_for_error(request.headers)
        self._handler.begin_request()
        try:
            response, outcome, error = await self._stored.serve(
                path, request, response_id, own_id, tenant, sender, self._handler
            )
        except (asyncio.CancelledError, ConnectionError) as left:
            self._record(request, path, own_id, *self._handler.cancellation(left))
            raise
        finally:
            self._handler.end_request()
        self._record(request, path, own_id, outcome, response.status, error)
        return response

    def _record(
        self, request: web.BaseRequest, path: str, own_id: str, outcome: Outcome, status: int, error: str | None
    ) -> None:
        ended = _exit(request.method, path, own_id, outcome, status, error)
        self._exits.record(ended)
        self._handler.log_lines.record(ended)

    async def _unscheduled(self, path: str, request: web.BaseRequest, sender: Client) -> web.StreamResponse:
        if path in OWN or path.startswith(MODELS + "/"):
            check_method(request, "GET", "HEAD", *(["POST"] if path == PING else []))
            return await self._pages.show(path, request)
        if path.startswith(STORED_RESPONSES):
            tenant = self._rulebook.current.keys.check(request.headers)
            response_id, _, verb = path.removeprefix(STORED_RESPONSES).partition("/")
            if verb in ("", "cancel"):
                check_method(request, "POST" if verb else "GET")
                return await self._stored_response(path, request, response_id, tenant, sender)
        raise nothing_at(path)


def _path(request: web.BaseRequest) -> str:
    # An engine would answer a trailing slash with a redirect to its own address, which clients cannot reach.
    return request.path.rstrip("/") or "/"


def _exit(method: str, path: str, own_id: str, outcome: Outcome, status: int, error: str | None) -> RequestExit:
    return RequestExit(request_id=own_id, method=method, path=path[:256], outcome=outcome, status=status, error=error)
