"""Pages that relay workers were asked for, answered by the front door of the process that schedules.

The request comes as the bytes of one and goes through the server as every other, over a pair of sockets, but for what
the worker has judged already: its form and size, and what its address may use. Its answer is taken at the door, whole;
of what the server makes of it, only that it asks for a body is read.
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
from llmproxy.workers.protocol import PageRequest, PageResponse

CUT_AFTER_S = 0.1
"""How long what still runs behind an answer, or for nobody, gets before it is cut."""

_ANY_SIZE = ClientsConfig().model_copy(update={"head_bytes_max": 1 << 30, "head_fields_max": 1 << 30})


@dataclass(slots=True)
class _PageHandler:
    """A door for one request, behind which the answer to it stays."""

    front: Router
    clients: ClientLimits
    page: PageRequest
    answer: asyncio.Future[PageResponse]

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        response = await self.front.handle_checked(request.clone(remote=self.page.remote))
        assert isinstance(response, web.Response)
        return self._taken(response)

    def refuse(self, request: web.BaseRequest, failure: Failure) -> web.Response:
        return self._taken(self.front.refuse(request, failure))

    def reject(self, failure: Failure) -> bytes:
        self._taken(failure.response(Dialect.OPENAI, {}))
        return self.front.reject(failure)

    def _taken(self, response: web.Response) -> web.Response:
        # Now: the server is about to add what concerns its own connection.
        if not self.answer.done():
            body = response.body if isinstance(response.body, bytes) else b""
            fields = tuple(response.headers.items())
            self.answer.set_result(PageResponse(self.page.call, response.status, response.reason, fields, body))
        return response


async def answer_page(front: Router, page: PageRequest) -> PageResponse:
    """What the front door answers to a page that a client of a worker asked for; 100 where it waits for a body."""
    loop = asyncio.get_running_loop()
    handler = _PageHandler(front, ClientLimits(ClientsConfig()), page, loop.create_future())
    server = ClientServer(handler, _ANY_SIZE)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    told: asyncio.Future[bytes] | None = None
    try:
        with ours:
            await loop.connect_accepted_socket(server, theirs)
            await loop.sock_sendall(ours, page.request)
            told = loop.create_task(loop.sock_recv(ours, 1))
            await asyncio.wait((handler.answer, told), return_when=asyncio.FIRST_COMPLETED)
            # Bytes of a server that has not answered are an interim answer.
            return handler.answer.result() if handler.answer.done() else PageResponse(page.call, 100, "", (), b"")
    finally:
        if told is not None:
            told.cancel()
        await server.shutdown(CUT_AFTER_S)
