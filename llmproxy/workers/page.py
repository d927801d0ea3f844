"""Pages that relay workers were asked for, answered by the front door of the process that schedules.

The request comes as the bytes of one and goes through the server as every other, over a pair of sockets; its answer is
taken at the door, whole, and what the server makes of it is read by nobody.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from aiohttp import web

from llmproxy.config import ClientsConfig
from llmproxy.gateway.clients import Clients
from llmproxy.gateway.connection import ClientServer
from llmproxy.gateway.errors import Failure
from llmproxy.gateway.routes import Dialect
from llmproxy.gateway.server import FrontDoor
from llmproxy.workers.wire import Page, Shown

CUT_AFTER_S = 0.1
"""How long what still runs behind an answer, or for nobody, gets before it is cut."""


@dataclass(slots=True)
class _Hatch:
    """A door for one request, behind which the answer to it stays."""

    front: FrontDoor
    clients: Clients
    page: Page
    answer: asyncio.Future[Shown]

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        response = await self.front.handle(request.clone(remote=self.page.remote))
        assert isinstance(response, web.Response)
        return self._taken(response)

    def refuse(self, request: web.BaseRequest, failure: Failure) -> web.Response:
        return self._taken(self.front.refuse(request, failure))

    def turn_away(self, failure: Failure) -> bytes:
        self._taken(failure.response(Dialect.OPENAI, {}))
        return self.front.turn_away(failure)

    def _taken(self, response: web.Response) -> web.Response:
        # Now: the server is about to add what concerns its own connection.
        if not self.answer.done():
            body = response.body if isinstance(response.body, bytes) else b""
            fields = tuple(response.headers.items())
            self.answer.set_result(Shown(self.page.call, response.status, response.reason, fields, body))
        return response


async def answer_page(front: FrontDoor, limits: ClientsConfig, page: Page) -> Shown:
    """What the front door answers to a page that a client of a worker asked for."""
    loop = asyncio.get_running_loop()
    # The worker has counted the connection and the request.
    hatch = _Hatch(front, Clients(ClientsConfig()), page, loop.create_future())
    server = ClientServer(hatch, limits)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    try:
        with ours:
            await loop.connect_accepted_socket(server, theirs)
            await loop.sock_sendall(ours, page.request)
            return await hatch.answer
    finally:
        await server.shutdown(CUT_AFTER_S)
