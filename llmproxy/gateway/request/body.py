"""Reads the bytes of a request body from the client, within limits of size and time."""

from __future__ import annotations

import asyncio
from io import BytesIO

from aiohttp import web

from llmproxy.config import ClientsConfig
from llmproxy.core.domain import Outcome
from llmproxy.gateway.http.client_request import arrived_body
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.request.body_budget import BodyBudget, BufferedBody

RETRY_AFTER_S = 1.0
"""The Retry-After of a refusal for lack of memory. Other request bodies free their bytes within about this time."""
_LIMITS = ClientsConfig()


async def read_body(
    request: web.BaseRequest, bytes_max: int, limits: ClientsConfig = _LIMITS, buffered: BufferedBody | None = None
) -> bytes:
    """Returns the whole request body, and counts its bytes in `buffered` as they arrive (None: no memory budget).

    Raises Failure: 413 as soon as the body is known to be larger than `bytes_max`, 429 if the memory budget is used up,
    408 if the body stalls or takes longer than `limits` allow, 400 for broken framing. The caller must call
    `buffered.release`, also after an error.
    """
    buffered = BufferedBody(BodyBudget()) if buffered is None else buffered
    if "expect" not in request.headers and (whole := arrived_body(request)) is not None:
        # Most bodies arrive with their head, and need no timer.
        if len(whole) > bytes_max:
            raise _too_large(bytes_max, sized=request.content_length is not None)
        if not buffered.add_whole(len(whole)):
            raise _no_room()
        return whole
    length = request.content_length
    if length is not None and length > bytes_max:
        raise _too_large(bytes_max, sized=True)
    _send_continue(request)
    content, body = request.content, BytesIO()
    now = asyncio.get_running_loop().time
    silence_s, latest_s = limits.body_idle_timeout_s, now() + limits.body_timeout_s
    limit = asyncio.timeout_at(min(now() + silence_s, latest_s))
    try:
        async with limit:
            buffered.begin(lambda: None if limit.expired() else limit.reschedule(now()))
            while piece := await content.readany():
                if body.tell() + len(piece) > bytes_max:
                    raise _too_large(bytes_max, sized=length is not None)
                if not buffered.add_piece(len(piece)):
                    raise _no_room(closes=True)
                body.write(piece)
                limit.reschedule(min(now() + silence_s, latest_s))
    except web.RequestPayloadError as broken:
        message = str(broken) or "The request body ended early."
        raise Failure(Outcome.BAD_REQUEST, message, headers={"Connection": "close"}) from None
    except TimeoutError:
        if buffered.refused:
            raise _no_room(closes=True) from None
        # Do not compare with the clock: timers of the loop go off up to a millisecond early.
        if limit.when() != latest_s:
            message = (
                f"The request body stopped arriving: nothing came for {silence_s:g} s (clients.body_idle_timeout_s)."
            )
        else:
            message = f"The request body took more than {limits.body_timeout_s:g} s (clients.body_timeout_s)."
        raise Failure(Outcome.BAD_REQUEST, message, status=408, headers={"Connection": "close"}) from None
    if not buffered.finish():
        raise _no_room(closes=True)
    # Unlike joining a list of pieces, this makes no second copy of all the bytes.
    return body.getvalue()


def _too_large(bytes_max: int, *, sized: bool) -> Failure:
    message = f"The request body is larger than {bytes_max} bytes, the proxy's limit (body_bytes_max)."
    # The rest of a body is read and dropped only where its length is known.
    return Failure(Outcome.TOO_LARGE, message, headers={} if sized else {"Connection": "close"})


def _no_room(*, closes: bool = False) -> Failure:
    message = "The proxy holds as many bytes of request bodies as it may (body_bytes_total_max). Try again later."
    headers = {"Connection": "close"} if closes else None
    return Failure(Outcome.REJECTED_CAPACITY, message, retry_after_s=RETRY_AFTER_S, headers=headers)


def _send_continue(request: web.BaseRequest) -> None:
    """Sends `100 Continue` if the client waits for it before it sends its body. Some clients wait without limit."""
    if request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
