"""Pages that clients request from workers: the scheduler sees the client, and the response is complete."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from aiohttp import web

from llmproxy.core.domain import Outcome
from llmproxy.gateway.http.errors import Failure
from llmproxy.gateway.http.routes import Dialect
from llmproxy.gateway.request.body import read_body
from llmproxy.remote.messages import PageRequest, PageResponse
from llmproxy.remote.pages import answer_page


@dataclass(slots=True)
class Front:
    """A front door that remembers who came, and with what."""

    seen: list[tuple[str, str, str | None, bytes]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    async def handle(self, request: web.BaseRequest, *, checked: bool) -> web.StreamResponse:
        assert checked
        body = await request.read()
        self.seen.append((request.method, request.path_qs, request.remote, body))
        return web.Response(status=201, body=b"x" * 2_000_000, headers={"X-Twice": "a", "Retry-After": "1"})

    def refuse(self, request: web.BaseRequest, failure: Failure) -> web.Response:
        del request
        self.refused.append(failure.status)
        return failure.response(Dialect.OPENAI, {})

    def reject(self, failure: Failure) -> bytes:
        self.refused.append(failure.status)
        return failure.raw()


async def answered(front: Front, raw: bytes) -> PageResponse:
    return await answer_page(front, PageRequest(7, raw, "10.1.2.3"))  # type: ignore[arg-type]


async def test_a_page_request_keeps_its_client_and_gets_the_whole_answer() -> None:
    front = Front()
    raw = b"POST /a?b=c HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbody"
    shown = await answered(front, raw)
    assert front.seen == [("POST", "/a?b=c", "10.1.2.3", b"body")]
    assert (shown.call, shown.status, shown.reason, len(shown.body)) == (7, 201, "Created", 2_000_000)
    headers = {name.lower(): value for name, value in shown.headers}
    assert (headers["x-twice"], headers["retry-after"]) == ("a", "1")
    # Fields of the connection between the two processes are not for the client.
    assert headers.keys().isdisjoint({"connection", "content-length", "date", "server", "transfer-encoding"})


@pytest.mark.parametrize("raw", [b"NOT HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n"])
async def test_invalid_request_is_refused_like_everywhere(raw: bytes) -> None:
    front = Front()
    shown = await answered(front, raw)
    assert not front.seen
    assert [shown.status] == front.refused
    assert 400 <= shown.status < 500


async def test_a_refusal_comes_as_the_front_door_made_it() -> None:
    class Refusing(Front):
        async def handle(self, request: web.BaseRequest, *, checked: bool) -> web.StreamResponse:
            assert checked
            return self.refuse(request, Failure(Outcome.BAD_REQUEST, "Not here.", status=404))

    shown = await answered(Refusing(), b"GET /debug/queue HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (shown.status, b"Not here." in shown.body) == (404, True)


async def test_a_body_is_sent_for_when_it_is_read() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"

    class Reading(Front):
        async def handle(self, request: web.BaseRequest, *, checked: bool) -> web.StreamResponse:
            assert checked
            self.seen.append((request.method, request.path, request.remote, await read_body(request, 10)))
            return web.Response(status=201)

    front = Reading()
    assert (await answered(front, head)).status == 100
    assert not front.seen
    assert (await answered(front, head.replace(b"Expect", b"X") + b"body")).status == 201
    assert front.seen == [("POST", "/a", "10.1.2.3", b"body")]
