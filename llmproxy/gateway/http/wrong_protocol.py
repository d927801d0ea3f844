"""Answers clients that begin with another protocol than the port speaks."""

from __future__ import annotations

from llmproxy.core.domain import Outcome
from llmproxy.gateway.http.errors import Failure

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of HTTP/2 with prior knowledge (RFC 9113, section 3.4)."""

_DATA, _HEADERS, _SETTINGS, _GOAWAY = 0, 1, 4, 7
_END_HEADERS, _END_STREAM = 4, 1
_HTTP_1_1_REQUIRED = (0xD).to_bytes(4, "big")
_STREAM = (1).to_bytes(4, "big")


class WrongProtocol(Failure):
    """The failure of a connection whose first bytes belong to another protocol. `hint` is advice for the log."""

    def __init__(self, message: str, hint: str, status: int = 400) -> None:
        super().__init__(Outcome.BAD_REQUEST, message, status=status)
        self.hint = hint


class _Http2(WrongProtocol):
    def __init__(self, has_request: bool) -> None:
        message = "This port speaks HTTP/1.1, and the client began with HTTP/2."
        super().__init__(
            message, "configure the client or gateway for HTTP/1.1 (curl: leave out --http2-prior-knowledge)", 505
        )
        self._request_came = has_request

    def raw(self) -> bytes:
        """Returns the answer, in HTTP/2 if the first request has arrived. The request itself is not read."""
        answer = super().raw()
        if not self._request_came:
            return answer
        # RFC 7541, section 6.2.2: literal fields that are not indexed, :status and content-type of the static table.
        head = b"\x08\x03%d\x0f\x10\x10application/json" % self.status
        return b"".join((
            _frame(_SETTINGS, 0, bytes(4), b""),
            _frame(_HEADERS, _END_HEADERS, _STREAM, head),
            _frame(_DATA, _END_STREAM, _STREAM, answer.partition(b"\r\n\r\n")[2]),
            _frame(_GOAWAY, 0, bytes(4), _STREAM + _HTTP_1_1_REQUIRED),
        ))  # fmt: skip


def wrong_protocol(begun: bytes) -> WrongProtocol | None:
    """Returns the failure for an HTTP connection that begins with these bytes; None if they may begin a request."""
    if begun[:2] == b"\x16\x03":
        # RFC 8446, section 5.1: a record of the handshake, of any version of TLS.
        return WrongProtocol(
            "This port speaks plain http, and the client began with TLS: its URL should begin with http://.",
            "use http:// in clients, or set tls.cert",
        )
    return _Http2(_has_request(begun)) if begun.startswith(HTTP2_PREFACE[:16]) else None


def plain_http() -> WrongProtocol:
    """Returns the failure of a client that speaks plain HTTP to a port with TLS."""
    return WrongProtocol(
        "This port speaks TLS, and the client began with plain http: its URL should begin with https://.",
        "use https:// in clients, or leave tls.cert out",
    )


def _frame(kind: int, flags: int, stream: bytes, payload: bytes) -> bytes:
    """Returns an HTTP/2 frame (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream + payload


def _has_request(begun: bytes) -> bool:
    """Returns whether the client has opened the first HTTP/2 stream. An answer on an idle stream would be an error."""
    at = len(HTTP2_PREFACE)
    while at + 9 <= len(begun):
        if begun[at + 3] == _HEADERS and begun[at + 5 : at + 9] == _STREAM:
            return True
        at += 9 + int.from_bytes(begun[at : at + 3], "big")
    return False
