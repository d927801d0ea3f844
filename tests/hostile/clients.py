"""Hostile clients: each case is sent on its own connection, and rules are checked.

A strict reader finds the requests in the sent bytes. The backend may get only these requests, in their order and with
their bodies, each in canonical form. The client gets at most as many answers as there are requests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from llmproxy.gateway.http.routes import SCHEDULED
from tests.e2e.proxies import ProxyUnderTest, until
from tests.e2e.scripted import Scripted
from tests.hostile.requests import SENTINEL
from tests.strictness.observe import form_error
from tests.strictness.reading import End, Message, Reading, read_answers, read_requests
from tests.strictness.wire import connected

LIMIT_S = 8.0
"""How long a case may take; every limit of the proxy is far below."""
LIMITS: dict[str, Any] = {
    "head_timeout_s": 0.3,
    "body_idle_timeout_s": 0.3,
    "body_timeout_s": 1.0,
    "idle_timeout_s": 1.0,
}
OWN_FIELDS = {
    b"content-type", b"content-length", b"date", b"server", b"connection", b"x-request-id", b"allow", b"retry-after",
    b"x-llmproxy-backend", b"x-llmproxy-queue-ms", b"x-llmproxy-attempts", b"www-authenticate", b"accept-encoding",
}  # fmt: skip
"""The fields that an answer may have. A client cannot add fields to it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The bytes that a client got for a case, and the bytes of each request that reached the backend."""

    answered: bytes
    reset: bool
    reached: tuple[bytes, ...]


async def play(proxy: ProxyUnderTest, backend: Scripted, packets: list[bytes]) -> Seen:
    """Send one case and the sentinel after it. Raises TimeoutError if there is no outcome."""
    backend.requests.clear()
    async with asyncio.timeout(LIMIT_S), connected(proxy.url) as wire:
        for packet in packets:
            wire.write(packet)
            await asyncio.sleep(0)
        wire.write(SENTINEL)
        answered = await wire.all()
    # Late effects of this case must not count for the next case.
    await until(lambda: not proxy.app.handler.open_requests, LIMIT_S)
    return Seen(answered, wire.reset, tuple(backend.requests))


def violations(sent: bytes, seen: Seen, *, sound: bool = False) -> list[str]:
    """The violated rules. A `sound` case must also be served."""
    asked = read_requests(sent + SENTINEL)
    wrong = [f"a request reached the backend in a bad form: {form}" for form in map(form_error, seen.reached) if form]
    wrong += _wrong_requests(asked, seen.reached)
    wrong += _wrong_answers(asked, seen, expected_100=b"100-continue" in sent.lower())
    if sound and len(seen.reached) < (least := _least(asked)):
        wrong.append(f"{len(seen.reached)} of at least {least} sound requests reached the backend")
    return wrong


def _least(asked: Reading) -> int:
    """The number of sound requests that must be served: bytes after chunks with a trailer need not be read."""
    chunked = [bool(message.values(b"transfer-encoding")) for message in asked.messages]
    return chunked.index(True) + 1 if True in chunked else len(chunked)


def _wrong_requests(asked: Reading, reached: tuple[bytes, ...]) -> list[str]:
    possible = iter([(_target(message), message.body) for message in asked.messages if message.line[0] == b"POST"])
    wrong = []
    for request in reached:
        target = request.split(b" ", 2)[1]
        if target.partition(b"?")[0].decode() not in SCHEDULED:
            wrong.append(f"a path that is no route reached the backend: {target!r}")
        body = request.partition(b"\r\n\r\n")[2]
        if (target, body) not in possible:
            wrong.append(f"what reached the backend is no request of this client, or comes too often: {request!r}")
    return wrong


def _target(message: Message) -> bytes:
    """The target in the form in which it goes to a backend."""
    target = message.line[1]
    if target[:1] != b"/":
        target = b"/" + target.partition(b"://")[2].partition(b"/")[2]
    path, mark, query = target.partition(b"?")
    return (path.rstrip(b"/") or b"/") + (mark + query if query else b"")


def _wrong_answers(asked: Reading, seen: Seen, *, expected_100: bool) -> list[str]:
    answers = read_answers(seen.answered, closed=True)
    if answers.end is End.BROKEN or (answers.end is End.SHORT and not seen.reset):
        return [f"the answer is no sound HTTP: {seen.answered!r}"]
    wrong = []
    final = [message for message in answers.messages if message.status >= 200]
    if len(final) < len(answers.messages) and not expected_100:
        wrong.append(f"an interim answer without a request for it: {seen.answered!r}")
    if len(final) > len(asked.messages) + (asked.end is not End.CLEAN):
        wrong.append(f"{len(final)} answers to {len(asked.messages)} requests: {seen.answered!r}")
    if len(seen.reached) > len(final) and not seen.reset:
        wrong.append(f"{len(seen.reached)} requests reached the backend, and {len(final)} were answered")
    for message in final:
        if message.status >= 500 and message.status not in (501, 505):
            wrong.append(f"status {message.status}: {message.body!r}")
        if strange := {name for name, _ in message.fields} - OWN_FIELDS:
            wrong.append(f"fields {strange} in an answer: {seen.answered!r}")
        if message.body[:1] not in (b"{", b""):
            wrong.append(f"an answer that is no JSON: {message.body!r}")
    return wrong
