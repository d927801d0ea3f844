"""One client's connection below the requests on it: whatever is not HTTP/1 as it should be is refused here.

The server of aiohttp answers what it cannot parse in plain text, with the offending bytes in answer and log, and lets a
request wait whose body turns out to be broken. This is the one file that knows that server from inside; what it leans
on is held by `tests/hygiene`.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod, BadStatusLine, HttpProcessingError, InvalidURLError, LineTooLong
from aiohttp.web_protocol import _ErrInfo

from llmproxy.core.domain import Outcome
from llmproxy.gateway.errors import Failure

Refuse = Callable[[web.BaseRequest, Failure], web.Response]
"""Counts and logs what could not be read as a request, and makes the answer to it."""


class ClientConnection(web.RequestHandler):
    """aiohttp's connection with answers of our own to what it cannot parse."""

    __slots__ = ("_refuse",)

    def __init__(self, server: ClientServer, refuse: Refuse, **options: object) -> None:
        super().__init__(server, **options)  # type: ignore[arg-type] # as the server of aiohttp itself hands them on
        self._refuse = refuse

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        request = self._current_request
        if request is None or not self._messages or request.content.is_eof():
            return
        broken = self._messages[-1][0]
        if isinstance(broken, _ErrInfo) and isinstance(broken.exc, HttpProcessingError):
            # It is the body being read that cannot be parsed, and nothing else would tell its reader.
            request.content.set_exception(web.RequestPayloadError(_told(broken.exc).message))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what could not be parsed; anything else is a bug, whose story aiohttp tells."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        response = self._refuse(request, _told(exc))
        response.force_close()
        return response


class ClientServer(web.Server):
    """Makes a `ClientConnection` of every connection. `options` are those of aiohttp's connections."""

    def __init__(self, handle: Callable[..., object], refuse: Refuse, **options: object) -> None:
        super().__init__(handle, **options)  # type: ignore[arg-type]
        self._refuse = refuse

    def __call__(self) -> ClientConnection:
        return ClientConnection(self, self._refuse, loop=self._loop, **self._kwargs)


def _told(error: HttpProcessingError) -> Failure:
    """What a client is told of bytes that are no request. They are not repeated: they may hold a key."""
    if isinstance(error, LineTooLong):
        return Failure(Outcome.BAD_REQUEST, "The request line or a header field is too long.", status=431)
    if error.message == "Too many headers received":
        return Failure(Outcome.BAD_REQUEST, "The request has too many header fields.", status=431)
    if isinstance(error, InvalidURLError):
        why = "its target is no path"
    elif isinstance(error, BadHttpMethod):
        why = "its method is unknown"
    elif isinstance(error, BadStatusLine):
        why = "its request line is broken"
    else:
        # The parser's reason is one line; the bytes at which it stopped follow below it.
        why = error.message.partition("\n")[0].partition(": b'")[0].rstrip(":.")
    return Failure(Outcome.BAD_REQUEST, f"This is no HTTP/1.1 request: {why}.")
