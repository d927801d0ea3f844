"""Sends a vector to a proxy below HTTP, and observes the outcome on both connections."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tests.e2e.proxies import ProxyUnderTest
from tests.e2e.scripted import Scripted, answering, serving_script, whole
from tests.strictness.vector import Vector
from tests.strictness.wire import connected

ANSWER = b'{"object":"chat.completion","choices":[]}'
FREE: dict[str, float] = {}
HASTY = {"body_idle_timeout_s": 0.2, "head_timeout_s": 0.2}
SENTINEL = b"GET /sentinel HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
_HOP = (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"http2-settings",
        b"proxy-connection", b"proxy-authorization")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Observed:
    """The results of a vector for client and backend. `last_body` is the body of the last answer."""

    statuses: tuple[int, ...]
    closed: bool
    reached: tuple[bytes, ...]
    last_body: bytes = b""


@asynccontextmanager
async def bench(clients: Mapping[str, float] = FREE, **config: Any) -> AsyncIterator[tuple[ProxyUnderTest, Scripted]]:
    """A proxy over one backend that answers soundly and records its received bytes.

    With limits for `clients`, the other delays of the proxy are short too.
    """
    with patch("llmproxy.gateway.http.connection.LINGER_S", 0.1 if clients else 10.0):
        async with serving_script(answering(whole(ANSWER)), body_bytes_max=100_000, clients=clients, **config) as both:
            yield both


async def observe(
    proxy: ProxyUnderTest, backend: Scripted, sent: bytes, limit_s: float = 20.0, pieces: int = 1
) -> Observed:
    """Send `sent` on a new connection, and a request after it to see whether that is still read.

    `sent` goes out in about `pieces` parts, between which the proxy may run. Raises TimeoutError without an outcome.
    """
    before = len(backend.requests)
    statuses: list[int] = []
    last_body, closed, asked = b"", True, False
    size = max(1, len(sent) // pieces)
    async with asyncio.timeout(limit_s), connected(proxy.url) as wire:
        for start in range(0, len(sent), size):
            wire.write(sent[start : start + size])
            await asyncio.sleep(0)
        while (answer := await wire.answer()) is not None:
            status, body = answer
            if status == 404 and b"/sentinel" in body:
                closed = False
                break
            statuses.append(status)
            last_body = body
            if status >= 200 and not asked:
                asked = True
                wire.write(SENTINEL)
    return Observed(tuple(statuses), closed, tuple(backend.requests[before:]), last_body)


def form_error(request: bytes) -> str:
    """Why a request at the backend is ambiguous; "" if it is in canonical form."""
    head, _, body = request.partition(b"\r\n\r\n")
    line, *fields = head.split(b"\r\n")
    names = [field.partition(b":")[0].lower() for field in fields]
    if not re.fullmatch(rb"POST /[\x21-\x7e]* HTTP/1\.1", line):
        return f"request line {line!r}"
    if any(not re.fullmatch(rb"[!#$%&'*+.^_`|~0-9a-zA-Z-]+: [^\x00-\x08\x0a-\x1f\x7f]*", field) for field in fields):
        return f"fields {fields}"
    if [names.count(name) for name in (b"content-length", b"host", b"x-request-id")] != [1, 1, 1]:
        return f"fields {names}"
    if any(name in names for name in _HOP):
        return f"hop-by-hop fields in {names}"
    if b"content-length: %d" % len(body) not in head.lower().split(b"\r\n"):
        return "the length of the body"
    return ""


def differences(vector: Vector, observed: Observed) -> str:
    """How an observation differs from the table; "" if it does not."""
    wrong = [form for form in map(form_error, observed.reached) if form]
    if vector.statuses != observed.statuses:
        wrong.append(f"statuses {observed.statuses}, not {vector.statuses}: {observed.last_body[:150]!r}")
    if vector.closed != observed.closed:
        wrong.append("closed" if observed.closed else "left open")
    if vector.reached != len(observed.reached):
        wrong.append(f"{len(observed.reached)} requests reached the backend, not {vector.reached}")
    elif vector.seen.lower() not in b"".join(observed.reached[-1:]).lower():
        wrong.append(f"{vector.seen!r} is not in {observed.reached[-1]!r}")
    if vector.unseen and any(vector.unseen.lower() in request.lower() for request in observed.reached):
        wrong.append(f"{vector.unseen!r} is in {observed.reached!r}")
    if b"evil" in observed.last_body and not observed.last_body.startswith(b"{"):
        wrong.append("an answer that is no JSON")
    return "; ".join(wrong)
