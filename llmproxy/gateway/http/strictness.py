"""Refuses requests that two HTTP/1 servers could understand differently.

The parser refuses most malformed requests. This module refuses requests that the parser accepts and another server may
read differently (RFC 9112, sections 3.2, 6.1 and 11.2). A refusal closes the connection, because the position of the
next request is uncertain.
"""

from __future__ import annotations

import re

from aiohttp import HttpVersion10, HttpVersion11, web

from llmproxy.core.domain import Outcome
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.headers import named_in_connection

SINGLE = ("authorization", "x-api-key", "x-request-id", "content-encoding", "expect")
"""Fields that a request may have only once, because the proxy could read one of them and a backend another.

aiohttp's parser already refuses a repeated Host, Content-Length and Transfer-Encoding.
"""

LOOKALIKES = ("transfer_encoding", "content_length")
"""Fields that are refused: servers that turn `-` into `_` confuse them with the fields that frame the body."""

VERSIONS = (HttpVersion11, HttpVersion10)  # The accepted versions of HTTP.

_HOST = re.compile(r"([\w.~!$&'()*+,;=%-]*|\[[0-9a-fA-F:.]+\])(:\d{0,5})?", re.ASCII)


def check(request: web.BaseRequest, head_bytes_max: int) -> None:
    """Raises Failure if two HTTP servers may understand the request differently, or if it needs a feature that the
    proxy does not have (400, 405, 417, 501, 505).

    Raises Failure (431) if the request line and the header fields have more than `head_bytes_max` bytes.
    """
    # The parser limits each field, and the connection limits a head that has not ended. This limits the sum.
    if len(request.raw_path) + sum([len(name) + len(value) for name, value in request.raw_headers]) > head_bytes_max:
        raise head_too_large()
    if request.version not in VERSIONS:
        raise _refused("This proxy speaks HTTP/1.1 and HTTP/1.0.", status=505)
    if request.method == "CONNECT":
        raise _refused("This proxy opens no tunnels.", status=405)
    if "#" in request.raw_path:
        raise _refused("The target of a request has no fragment.")
    headers = request.headers
    coding = headers.get("transfer-encoding")
    if coding is not None:
        if request.version == HttpVersion10:
            raise _refused("A request of HTTP/1.0 has no transfer-encoding.", param="transfer-encoding")
        if coding.lower() != "chunked":
            message = "The only transfer-encoding that this proxy reads is chunked."
            raise _refused(message, status=501, param="transfer-encoding")
    host = headers.get("host", "")
    if not _HOST.fullmatch(host):
        raise _refused("The header field host names no host.", param="host")
    expects = headers.get("expect", "100-continue")
    if expects.lower() != "100-continue":
        raise _refused("The only expectation that this proxy meets is 100-continue.", status=417, param="expect")
    for name in LOOKALIKES:
        if name in headers:
            raise _refused(f"The header field {name} looks like a field that frames the body.", param=name)
    for name in SINGLE:
        if name in headers and len(headers.getall(name)) > 1:
            raise _refused(f"The header field {name} is given more than once.", param=name)


def asks_for_websocket(request: web.BaseRequest) -> bool:
    """Whether a request is the opening handshake of a WebSocket (RFC 6455, section 4.1), which is a GET of HTTP/1.1."""
    if request.method != "GET" or request.version != HttpVersion11:
        return False
    protocols = [token.strip().lower() for token in request.headers.get("upgrade", "").split(",")]
    return "websocket" in protocols and "upgrade" in named_in_connection(request.headers.items())


def no_websocket() -> Failure:
    """Returns the answer (426) to the opening handshake of a WebSocket (RFC 9110, section 15.5.22).

    The answer closes the connection, because frames that the client has already sent are no HTTP requests.
    """
    message = "This proxy speaks no WebSocket: send the same request by HTTP, a POST whose answer may be a stream."
    return _refused(message, status=426, headers={"Upgrade": "HTTP/1.1", "Connection": "upgrade, close"})


def head_too_large() -> Failure:
    message = "The request line and the header fields are too large (clients.head_bytes_max)."
    return _refused(message, status=431)


def _refused(
    message: str, *, status: int = 400, param: str | None = None, headers: dict[str, str] | None = None
) -> Failure:
    return Failure(Outcome.BAD_REQUEST, message, status=status, param=param, headers=headers or {"Connection": "close"})
