"""Pages that another process answers: for a relay worker the scheduler process, for a cluster member the leader.

The request arrives as bytes and passes through a server of this process over a socket pair. The sender has already
checked its syntax, size and client limits. The response is captured before the server writes it. Of the written bytes,
only an interim response matters: it means that the server needs the request body.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from aiohttp import web

from llmproxy.config import ClientsConfig
from llmproxy.core.domain import Refused
from llmproxy.gateway.admin.adapters import BODY_BYTES_MAX
from llmproxy.gateway.http.client_limits import ClientLimits
from llmproxy.gateway.http.connection import ClientServer
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.routes import Dialect
from llmproxy.gateway.proxying.rules import Rulebook
from llmproxy.gateway.request.body import read_body
from llmproxy.gateway.router import Router
from llmproxy.remote.client import LeaseClient
from llmproxy.remote.messages import PageRequest, PageResponse

CUT_AFTER_S = 0.1  # Seconds for which a connection may stay open after its response was captured.
PASSED_ON = web.RequestKey("PASSED_ON", int)  # On a forwarded request: the number of processes that forwarded it.

_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"expect"})
"""Headers about the framing of a body, which differs on each connection."""
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


class RemotePages:
    """The `Pages` of a process that forwards requests to the scheduler or leader. The receiver checks keys."""

    def __init__(self, client: LeaseClient, rulebook: Rulebook) -> None:
        self._client = client
        self._rulebook = rulebook

    async def show(self, path: str, request: web.BaseRequest) -> web.Response:
        del path
        return await self._forward(request)

    async def administer(self, path: str, request: web.BaseRequest, on_admin_port: bool) -> web.Response:
        del path, on_admin_port
        return await self._forward(request)

    async def _forward(self, request: web.BaseRequest) -> web.Response:
        response = await self._ask(request, None)
        if response.status == 100:
            # Read only when it is needed, so that a client without permission is refused first.
            body = await read_body(request, BODY_BYTES_MAX, self._rulebook.current.config.clients)
            response = await self._ask(request, body)
        return web.Response(
            status=response.status, reason=response.reason, headers=list(response.headers), body=response.body
        )

    async def _ask(self, request: web.BaseRequest, body: bytes | None) -> PageResponse:
        raw = _raw(request, body)
        try:
            response = await self._client.answer(
                lambda call: PageRequest(call, raw, request.remote or "", request.get(PASSED_ON, 0) + 1)
            )
        except Refused as refused:
            raise Failure.from_refused(refused) from None
        assert isinstance(response, PageResponse)
        return response


def _raw(request: web.BaseRequest, body: bytes | None) -> bytes:
    """Returns the bytes of a request. If `body` is None, the header `Expect` makes the server ask for the body."""
    fields = [*request.raw_headers]
    if body is not None:
        fields = [field for field in fields if field[0].lower() not in _FRAMING]
        fields.append((b"Content-Length", b"%d" % len(body)))
    elif request.can_read_body and "expect" not in request.headers:
        fields.append((b"Expect", b"100-continue"))
    version = f"HTTP/{request.version.major}.{request.version.minor}"
    first = f"{request.method} {request.raw_path} {version}\r\n".encode("utf-8", "surrogateescape")
    return first + b"".join(b"%b: %b\r\n" % field for field in fields) + b"\r\n" + (body or b"")
