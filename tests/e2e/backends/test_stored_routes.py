"""Requests about one stored response: which backend gets them, and how their streams end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from llmproxy.gateway.listener import LocalFrontend
from llmproxy.gateway.proxying.response_writer import ResponseWriter
from tests.e2e.proxies import FAST, ProxyUnderTest, serving, until
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, Scripted, answering, breaking, chunk, serving_script, whole
from tests.upstream.raw_server import Peer

RESPONSES = {"model": "base", "input": "Hello there", "max_output_tokens": 3}


async def test_a_stored_response_is_asked_of_its_maker() -> None:
    async with serving(FAST, FAST, scheduling={"placement": "round_robin"}) as proxy:
        made = [(await proxy.post("/v1/responses", RESPONSES)) for _ in range(2)]
        assert {answer.backend for answer in made} == {"b0", "b1"}
        for answer in made:
            got = await proxy.get(f"/v1/responses/{answer.json['id']}")
            assert (got.status, got.json) == (200, answer.json)
            assert got.backend == answer.backend
            cancelled = await proxy.post(f"/v1/responses/{answer.json['id']}/cancel", {})
            assert cancelled.status == 400, "the engine's own answer"
            assert cancelled.json["error"]["message"] == "Cannot cancel a synchronous response."


@pytest.mark.parametrize("padding", [0, 200_000])
async def test_a_response_that_is_not_stored_takes_the_place_of_none(padding: int) -> None:
    async with serving(FAST, FAST, scheduling={"placement": "round_robin"}) as proxy:
        mine = RESPONSES | {"request_id": "resp_mine", "metadata": {"long": "x" * padding}}
        stored = await proxy.post("/v1/responses", mine)
        passing = await proxy.post("/v1/responses", mine | {"store": False})
        assert stored.backend != passing.backend
        assert (await proxy.get("/v1/responses/resp_mine")).json == stored.json
        unkept = await proxy.post("/v1/responses", RESPONSES | {"store": False})
        assert (await proxy.get(f"/v1/responses/{unkept.json['id']}")).status == 404


async def test_a_response_is_known_as_soon_as_its_client_can_name_it(proxy: ProxyUnderTest) -> None:
    endless = RESPONSES | {"stream": True, "max_output_tokens": 30_000}
    async with proxy.stream(endless, "/v1/responses") as response:
        created = (await response.content.readuntil(b"\n\n")).partition(b"data: ")[2]
        path = f"/v1/responses/{json.loads(created)['response']['id']}/cancel"
        cancelled = await proxy.post(path, {})
        assert cancelled.backend == response.headers["x-llmproxy-backend"], "it is the maker that answers"


STORED = b'{"id":"resp_1","object":"response","output":[]}'


@asynccontextmanager
async def a_stored_response(answer: bytes) -> AsyncIterator[ProxyUnderTest]:
    """A proxy whose backend made `resp_1`, and gives `answer` where it is asked for it."""
    async with serving_script(answering(whole(STORED))) as (proxy, backend):
        ask = answering(answer) if answer.endswith(STORED) else breaking(answer, reset=True)
        backend.polls[b"/v1/responses/resp_1"] = ask
        await proxy.post("/v1/responses", RESPONSES)
        yield proxy


async def test_a_stored_response_that_breaks_is_not_completed() -> None:
    async with a_stored_response(whole(STORED)[:-1]) as proxy:
        with pytest.raises(aiohttp.ClientPayloadError):
            await proxy.get("/v1/responses/resp_1")
        assert proxy.outcomes() == {"completed": 1, "broken_stream": 1}


async def test_a_broken_stored_stream_ends_in_an_error_event() -> None:
    begun = chunk(b'event: response.created\ndata: {"type":"response.created"}\n\n')
    async with (
        a_stored_response(STREAM_HEAD + begun) as proxy,
        proxy.wire(b"GET /v1/responses/resp_1?stream=true HTTP/1.1\r\nhost: x\r\n\r\n") as (reader, _),
    ):
        answer = await reader.read(-1)
        events = [event for event in answer.split(b"\n\n") if b"event: " in event]
        assert [b"event: response.created" in events[0], b"event: error" in events[1]] == [True, True]
        assert b"The stream broke" in events[1]
        assert not answer.endswith(STREAM_END), "it is not said to be whole"
        await proxy.settled()
        assert proxy.outcomes() == {"completed": 1, "broken_stream": 1}


async def test_a_broken_compressed_stored_stream_gets_no_event() -> None:
    head = STREAM_HEAD.removesuffix(b"\r\n") + b"content-encoding: gzip\r\n\r\n"
    async with (
        a_stored_response(head + chunk(b"\x1f\x8b\x08")) as proxy,
        proxy.wire(b"GET /v1/responses/resp_1?stream=true HTTP/1.1\r\nhost: x\r\n\r\n") as (reader, _),
    ):
        assert (await reader.read(-1)).partition(b"\r\n\r\n")[2] == chunk(b"\x1f\x8b\x08")
        await proxy.settled()
        assert proxy.outcomes() == {"completed": 1, "broken_stream": 1}


@pytest.mark.parametrize("line", ["302 Found", "101 Switching Protocols"])
async def test_a_stored_response_is_not_elsewhere(line: str) -> None:
    async with a_stored_response(f"HTTP/1.1 {line}\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n".encode()) as proxy:
        assert (await proxy.get("/v1/responses/resp_1")).status == 502
        assert proxy.outcomes() == {"completed": 1, "upstream_status": 1}


EVENT = chunk(b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n')
STORED_STREAM = b"GET /v1/responses/resp_1?stream=true HTTP/1.1\r\nhost: x\r\n\r\n"


@dataclass(slots=True)
class RunningStream:
    """A proxy in which the stream of a stored response has begun; after `go_on` the stream ends."""

    proxy: ProxyUnderTest
    backend: Scripted
    reader: asyncio.StreamReader
    go_on: asyncio.Event


@asynccontextmanager
async def a_running_stream(**config: Any) -> AsyncIterator[RunningStream]:
    go_on = asyncio.Event()

    async def ask(peer: Peer, _: bytes) -> None:
        # A request to be left open where the backend hangs, unlike a poll.
        backend._pollers.discard(peer.writer)
        await peer.send(STREAM_HEAD + EVENT)
        await go_on.wait()
        await peer.send(EVENT + STREAM_END)

    async with serving_script(answering(whole(STORED)), **config) as (proxy, backend):
        backend.polls[b"/v1/responses/resp_1"] = ask
        await proxy.post("/v1/responses", RESPONSES)
        async with proxy.wire(STORED_STREAM) as (reader, _):
            await reader.readuntil(EVENT)
            yield RunningStream(proxy, backend, reader, go_on)


async def test_a_stored_stream_is_in_flight_for_a_drain() -> None:
    async with a_running_stream() as one:
        proxy = one.proxy
        assert proxy.metric("llmproxy_in_flight_requests", backend="b0") == proxy.app.open_requests == 1
        listed = (await proxy.get("/admin/backends")).json["backends"]
        assert [backend["in_flight"] for backend in listed] == [1]
        draining = asyncio.create_task(proxy.app.drain())
        await until(lambda: proxy.app.dispatcher.draining)
        assert (await proxy.get("/v1/responses/resp_1")).status == 503, "new requests are refused"
        assert not draining.done()
        one.go_on.set()
        assert (await one.reader.readuntil(STREAM_END)).endswith(EVENT + STREAM_END)
        assert await draining
        assert proxy.metric("llmproxy_in_flight_requests", backend="b0") == 0
        assert proxy.outcomes() == {"completed": 2, "draining": 1}


async def test_a_stored_stream_that_outlives_the_drain_is_cut() -> None:
    async with a_running_stream(drain_timeout_s=0.05) as one:
        assert not await one.proxy.app.drain()
        assert one.proxy.app.open_requests == 1
        one.proxy.app.handler.cut()
        assert isinstance(one.proxy.app.front, LocalFrontend)
        await one.proxy.app.front.listener.runner.cleanup()
        assert not (await one.reader.read(-1)).endswith(STREAM_END)
        assert one.proxy.outcomes() == {"completed": 1, "draining": 1}


async def test_a_backend_is_removed_after_its_stored_stream() -> None:
    async with a_running_stream() as one:
        registry = one.proxy.app.registry
        registry.update("config", ())
        await asyncio.sleep(0.1)
        assert [(status.state, status.in_flight) for status in registry.statuses()] == [("leaving", 1)]
        one.go_on.set()
        await one.reader.readuntil(STREAM_END)
        await until(lambda: not registry.statuses())


async def test_the_stream_of_a_stored_response_ends_with_its_backend() -> None:
    async with a_running_stream() as one:
        one.backend.hang()
        rest = await one.reader.read(-1)
        assert b"event: error" in rest
        assert not rest.endswith(STREAM_END)
        await one.proxy.settled()
        assert one.proxy.outcomes() == {"completed": 1, "broken_stream": 1}
        one.go_on.set()


async def test_an_unread_stored_stream_keeps_no_backend() -> None:
    endless = chunk(b"data: " + b"x" * 60_000 + b"\n\n")

    async def ask(peer: Peer, _: bytes) -> None:
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(endless)

    async with serving_script(answering(whole(STORED)), timeouts={"stall_s": 0.2}) as (proxy, backend):
        backend.polls[b"/v1/responses/resp_1"] = ask
        await proxy.post("/v1/responses", RESPONSES)
        async with proxy.wire(b"GET /v1/responses/resp_1 HTTP/1.1\r\nhost: x\r\n\r\n"):
            await until(lambda: proxy.outcomes()["cancelled"] == 1)
            assert proxy.app.dispatcher.in_flight("b0") == 0


async def test_nothing_follows_the_end_of_a_stored_stream_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    end = ResponseWriter.end

    async def for_ever(client: ResponseWriter) -> None:
        await end(client)
        await asyncio.Event().wait()

    async with serving_script(answering(whole(STORED)), timeouts={"total_s": 0.3}) as (proxy, backend):
        backend.polls[b"/v1/responses/resp_1"] = answering(STREAM_HEAD + chunk(EVENT) + STREAM_END)
        await proxy.post("/v1/responses", RESPONSES)
        monkeypatch.setattr(ResponseWriter, "end", for_ever)
        async with proxy.wire(b"GET /v1/responses/resp_1 HTTP/1.1\r\nhost: x\r\n\r\n") as (reader, _):
            assert (await reader.read(-1)).endswith(chunk(EVENT) + STREAM_END)
        assert proxy.outcomes() == {"completed": 1, "broken_stream": 1}


async def test_a_stored_response_ends_its_connection_with_its_proxy() -> None:
    async with a_stored_response(whole(STORED)) as proxy:
        assert "connection" not in (await proxy.get("/v1/responses/resp_1")).headers
        proxy.app.handler.begin_shutdown()
        assert (await proxy.get("/v1/responses/resp_1")).headers["connection"] == "close"


async def test_a_response_that_was_not_made_here_is_not_found(proxy: ProxyUnderTest) -> None:
    for method, path in (("GET", "/v1/responses/resp_0"), ("POST", "/v1/responses/resp_0/cancel")):
        assert (await proxy.request(method, path)).status == 404
    assert (await proxy.get("/v1/responses/resp_0/input_items")).status == 404
    assert (await proxy.post("/v1/responses/resp_0", {})).status == 405


async def test_a_stored_response_of_a_gone_backend_is_an_error(proxy: ProxyUnderTest) -> None:
    made = await proxy.post("/v1/responses", RESPONSES)
    proxy.replica(made.backend).faults.set("refuse")
    got = await proxy.get(f"/v1/responses/{made.json['id']}")
    assert (got.status, got.json["error"]["type"]) == (502, "BadGatewayError")
