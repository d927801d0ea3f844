"""Odd requests, and their expected results."""

from __future__ import annotations

import json
from dataclasses import dataclass

CHAT = b"/v1/chat/completions"
BODY = json.dumps({"model": "base", "messages": [], "max_tokens": 1}).encode()
HOST = b"host: proxy.example"
JSON = b"content-type: application/json"


@dataclass(frozen=True, slots=True)
class Vector:
    """Bytes to send on a new connection, and the expected results."""

    name: str
    sent: bytes
    # The statuses of all answers, in order, interim answers included. Empty if the connection ends without an answer.
    statuses: tuple[int, ...]
    # The number of requests that reach the backend, all in canonical form.
    reached: int = 0
    # Whether the connection is closed after the last answer.
    closed: bool = False
    # Bytes that the last request at the backend must contain, and bytes that none may contain, in any letter case.
    seen: bytes = b""
    unseen: bytes = b""

    @property
    def waits(self) -> bool:
        """Whether the proxy first waits for more bytes, and then answers or closes the connection."""
        return 408 in self.statuses or (413 in self.statuses and self.closed)


def refused(name: str, sent: bytes, status: int = 400) -> Vector:
    """A refused request. The connection is closed, because the position of the next request is uncertain."""
    return Vector(name, sent, (status,), closed=True)


def declined(name: str, sent: bytes, status: int) -> Vector:
    """A refused request. The connection stays open, because the position of the next request is certain."""
    return Vector(name, sent, (status,))


def served(name: str, sent: bytes, seen: bytes = b"", unseen: bytes = b"", closed: bool = False) -> Vector:
    """A request that the backend answers."""
    return Vector(name, sent, (200,), reached=1, seen=seen, unseen=unseen, closed=closed)


def head(*fields: bytes, line: bytes = b"POST " + CHAT + b" HTTP/1.1", end: bytes = b"\r\n") -> bytes:
    """A request line and header fields as they are given, with the blank line."""
    return b"".join(part + end for part in (line, *fields, b""))


def post(*fields: bytes, target: bytes = CHAT, method: bytes = b"POST", version: bytes = b"HTTP/1.1") -> bytes:
    """A sound request for a completion, with additional `fields`."""
    line = method + b" " + target + b" " + version
    return head(HOST, JSON, b"content-length: %d" % len(BODY), *fields, line=line) + BODY


def framed(*fields: bytes, body: bytes = BODY) -> bytes:
    """A request with its framing in `fields` and `body` only."""
    return head(HOST, JSON, *fields) + body


def chunked(body: bytes, *fields: bytes) -> bytes:
    """A request in chunks; `body` is their bytes."""
    return framed(b"transfer-encoding: chunked", *fields, body=body)


SMUGGLED = post(b"x-smuggled: yes")
"""A request that an attacker hides, so that another server reads it as the next request."""
