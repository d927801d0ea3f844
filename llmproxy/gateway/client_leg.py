"""The client's side over aiohttp: reading the body within its bound, and sending an answer byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from io import BytesIO

from aiohttp import web
from multidict import CIMultiDict

from llmproxy.config import ClientsConfig
from llmproxy.core.domain import Outcome
from llmproxy.gateway.errors import Failure
from llmproxy.gateway.headers import Headers

_PATIENCE = ClientsConfig()


async def read_body(request: web.BaseRequest, bytes_max: int, patience: ClientsConfig = _PATIENCE) -> bytes:
    """The whole request body.

    Raises Failure: 413 as soon as it is known to be larger than `bytes_max`, 408 when it stops arriving or takes longer
    than `patience` allows, 400 where its framing is broken.
    """
    too_large = Failure(
        Outcome.TOO_LARGE, f"The request body is larger than {bytes_max} bytes, the proxy's limit (body_bytes_max)."
    )
    length = request.content_length
    if length is not None and length > bytes_max:
        raise too_large
    _invite(request)
    body = BytesIO()
    now = asyncio.get_running_loop().time
    silence_s, latest_s = patience.body_silence_s, now() + patience.body_timeout_s
    try:
        async with asyncio.timeout_at(min(now() + silence_s, latest_s)) as limit:
            while piece := await request.content.readany():
                if body.tell() + len(piece) > bytes_max:
                    raise too_large
                body.write(piece)
                limit.reschedule(min(now() + silence_s, latest_s))
    except web.RequestPayloadError as broken:
        message = str(broken) or "The request body ended early."
        raise Failure(Outcome.BAD_REQUEST, message, headers={"Connection": "close"}) from None
    except TimeoutError:
        if now() < latest_s:
            message = f"The request body stopped arriving: nothing came for {silence_s:g} s (clients.body_silence_s)."
        else:
            message = f"The request body took more than {patience.body_timeout_s:g} s (clients.body_timeout_s)."
        raise Failure(Outcome.BAD_REQUEST, message, status=408, headers={"Connection": "close"}) from None
    # Unlike joining a list of pieces, this hands out the bytes gathered so far without one more copy of all of them.
    return body.getvalue()


def _invite(request: web.BaseRequest) -> None:
    """Tell a client that asked first whether to send its body: some wait for this for ever."""
    if request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


class AiohttpClientLeg:
    """See `relay.ClientLeg`. `extra` are the proxy's own header fields, added to whichever answer is committed.

    `on_commit` is called when an answer begins, before the client can have seen any of it. `keep` is given each piece
    of the body, unless it is encoded. An answer that begins while `leaving()` asks the client to close its connection.
    """

    def __init__(
        self, request: web.BaseRequest, extra: dict[str, str], leaving: Callable[[], bool] = lambda: False
    ) -> None:
        self._request = request
        self._extra = extra
        self._leaving = leaving
        self.response: web.StreamResponse | None = None
        self.on_commit: Callable[[], None] | None = None
        self.keep: Callable[[bytes], None] | None = None
        self.status = 0
        self.sent_bytes = 0

    async def commit(self, status: int, reason: str, headers: Headers) -> None:
        fields = CIMultiDict(headers)
        fields.update(self._extra)
        response = web.StreamResponse(status=status, reason=reason or None, headers=fields)
        if self._leaving():
            response.force_close()
        self.response, self.status = response, status
        if self.on_commit is not None:
            self.on_commit()
        if fields.get("content-encoding", "identity").lower() != "identity":
            self.keep = None
        await response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        assert self.response is not None
        self.sent_bytes += len(data)
        if self.keep is not None:
            self.keep(data)
        await self.response.write(data)

    async def end(self) -> None:
        assert self.response is not None
        await self.response.write_eof()

    async def abort(self) -> None:
        assert self.response is not None
        self.response.force_close()
        if self._request.transport is not None:
            self._request.transport.abort()
