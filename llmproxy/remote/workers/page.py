"""Pages that clients of relay workers request, answered by the scheduler process.

The request arrives as bytes and passes through a server of this process over a socket pair. Its syntax, size and client
limits are not checked again, because the worker has checked them. The response is captured before the server writes it.
Of the written bytes, only an interim response matters: it means that the server needs the request body.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from aiohttp import web

from llmproxy.config import ClientsConfig
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.connection import ClientServer
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.routes import Dialect
from llmproxy.gateway.router import Router
from llmproxy.remote.workers.protocol import PageRequest, PageResponse

CUT_AFTER_S = 0.1
"""How long a connection may stay open after its response is captured."""
PASSED_ON = web.RequestKey("PASSED_ON", int)
"""On a forwarded request: the number of processes that forwarded it."""

_ANY_SIZE = ClientsConfig().model_copy(update={"head_bytes_max": 1 << 30, "head_fields_max": 1 << 30})


@dataclass(slots=True)
class _PageHandler:
    """Handles one request with the router, and captures the response."""

    front: Router
    clients: ClientLimits
    page: PageRequest
    answer: asyncio.Future[PageResponse]

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        asked = request.clone(remote=self.page.remote)
        asked[PASSED_ON] = self.page.passed_on
        response = await self.front.handle(asked, checked=True)
        assert isinstance(response, web.Response)
        return self._captured(response)

    def refuse(self, request: web.BaseRequest, failure: Failure) -> web.Response:
        return self._captured(self.front.refuse(request, failure))

    def reject(self, failure: Failure) -> bytes:
        self._captured(failure.response(Dialect.OPENAI, {}))
        return self.front.reject(failure)

    def _captured(self, response: web.Response) -> web.Response:
        # Captured before the server adds the headers of its own connection.
        if not self.answer.done():
            body = response.body if isinstance(response.body, bytes) else b""
            fields = tuple(response.headers.items())
            self.answer.set_result(PageResponse(self.page.call, response.status, response.reason, fields, body))
        return response


async def answer_page(front: Router, page: PageRequest) -> PageResponse:
    """Returns the response to a forwarded request; status 100 if the body is needed first."""
    loop = asyncio.get_running_loop()
    handler = _PageHandler(front, ClientLimits(ClientsConfig()), page, loop.create_future())
    server = ClientServer(handler, _ANY_SIZE)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    interim: asyncio.Future[bytes] | None = None
    try:
        with ours:
            await loop.connect_accepted_socket(server, theirs)
            await loop.sock_sendall(ours, page.request)
            interim = loop.create_task(loop.sock_recv(ours, 1))
            await asyncio.wait((handler.answer, interim), return_when=asyncio.FIRST_COMPLETED)
            # Bytes before the response are an interim response (100 Continue).
            return handler.answer.result() if handler.answer.done() else PageResponse(page.call, 100, "", (), b"")
    finally:
        if interim is not None:
            interim.cancel()
        await server.shutdown(CUT_AFTER_S)
