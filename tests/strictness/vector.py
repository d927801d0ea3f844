"""Requests that show how the proxy reads HTTP, and their expected outcome."""

from __future__ import annotations

import json
from dataclasses import dataclass

CHAT = b"/v1/chat/completions"
BODY = json.dumps({"model": "base", "messages": [], "max_tokens": 1}).encode()
HOST = b"host: proxy.example"
JSON = b"content-type: application/json"


@dataclass(frozen=True, slots=True)
class Vector:
    """One thing to send on a fresh connection.

    `statuses` are those of all answers to it, in order, interim ones included; none where the connection just ends.
    `reached` is how many requests got to the backend. Each of them must be in canonical form; further, `seen` must be
    in the last of them and `unseen` in none, whatever the case. `closed` says that the connection was closed after the
    last answer.
    """

    name: str
    sent: bytes
    statuses: tuple[int, ...]
    reached: int = 0
    closed: bool = False
    seen: bytes = b""
    unseen: bytes = b""

    @property
    def waits(self) -> bool:
        """Whether its answer or its end comes only after the proxy has waited for more of it."""
        return 408 in self.statuses or (413 in self.statuses and self.closed)


def refused(name: str, sent: bytes, status: int = 400) -> Vector:
    """Refused, and the connection is closed, because it is not certain where the next request begins."""
    return Vector(name, sent, (status,), closed=True)


def declined(name: str, sent: bytes, status: int) -> Vector:
    """Refused, but the connection stays, because it is clear where the next request begins."""
    return Vector(name, sent, (status,))


def served(name: str, sent: bytes, seen: bytes = b"", unseen: bytes = b"", closed: bool = False) -> Vector:
    """Answered by the backend, as one request."""
    return Vector(name, sent, (200,), reached=1, seen=seen, unseen=unseen, closed=closed)


def head(*fields: bytes, line: bytes = b"POST " + CHAT + b" HTTP/1.1", end: bytes = b"\r\n") -> bytes:
    """A request line and header fields as they are given, with the blank line."""
    return b"".join(part + end for part in (line, *fields, b""))


def post(*fields: bytes, target: bytes = CHAT, method: bytes = b"POST", version: bytes = b"HTTP/1.1") -> bytes:
    """A sound request for a completion, `fields` beside those that it needs."""
    line = method + b" " + target + b" " + version
    return head(HOST, JSON, b"content-length: %d" % len(BODY), *fields, line=line) + BODY


def framed(*fields: bytes, body: bytes = BODY) -> bytes:
    """A request with its framing in `fields` and `body` only."""
    return head(HOST, JSON, *fields) + body


def chunked(body: bytes, *fields: bytes) -> bytes:
    """A request in chunks; `body` is their bytes."""
    return framed(b"transfer-encoding: chunked", *fields, body=body)


SMUGGLED = post(b"x-smuggled: yes")
"""What an attacker wants another server to take for the next request."""
