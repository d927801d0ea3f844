"""Streams that break after their first byte: one error event in the client's own dialect, and a closed connection."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from llmproxy.gateway.proxying.response_writer import ResponseWriter
from tests.e2e.proxies import CHAT, ENDLESS, FAST, HELLO, STREAM, ProxyUnderTest, raw_post, serving, until
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, answering, breaking, chunk, serving_script, whole
from tests.faults.rig import read_answer, receive
from tests.upstream.raw_server import Peer

TEXT = "Hello there"
DIALECTS = {
    "chat": (CHAT, ENDLESS),
    "completions": ("/v1/completions", {"model": "base", "prompt": TEXT, "stream": True, "max_tokens": 30_000}),
    "responses": ("/v1/responses", {"model": "base", "input": TEXT, "stream": True, "max_output_tokens": 30_000}),
    "messages": ("/v1/messages", HELLO | {"stream": True, "max_tokens": 30_000}),
}
EVENT = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


def error_of(event: bytes, dialect: str) -> str:
    """The message of an error event, which must have the form that clients of the dialect look for."""
    lines = event.split(b"\n")
    payload: dict[str, Any] = json.loads(lines[-1].removeprefix(b"data: "))
    if dialect in ("chat", "completions"):
        assert len(lines) == 1
        assert (payload["error"]["type"], payload["error"]["code"]) == ("BadGatewayError", 502)
        return str(payload["error"]["message"])
    assert lines[0] == b"event: error"
    assert payload["type"] == "error"
    return str(payload["error"]["message"] if dialect == "messages" else payload["message"])


async def read_stream(proxy: ProxyUnderTest, path: str, body: object, *, whole: bool = False) -> list[bytes]:
    """The events of a stream, whose connection is closed without a last chunk unless it is `whole`."""
    received = await receive(proxy, raw_post(body, path))
    assert (received.status, received.headers["transfer-encoding"], received.whole) == (200, "chunked", whole)
    return received.events


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("after_bytes", [1500, 1501, 1650])
async def test_a_reset_in_mid_stream(dialect: str, after_bytes: int) -> None:
    async with serving(FAST) as proxy:
        proxy.replicas[0].faults.set("reset", after_bytes=after_bytes, times=1)
        events = await read_stream(proxy, *DIALECTS[dialect])
        errors = [event for event in events if b"The stream broke" in event]
        assert errors == events[-1:], "one error event, the last"
        assert error_of(errors[0], dialect).startswith("The stream broke: ")
        assert events[0].startswith((b"data: {", b"event: "))
        await proxy.settled()
        assert proxy.outcomes() == {"broken_stream": 1}
        assert proxy.metric("llmproxy_attempts_total", verdict="failed") == 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_backend_that_shuts_down_ends_every_request(dialect: str) -> None:
    async with serving(FAST) as proxy:
        path, body = DIALECTS[dialect]
        reading = asyncio.create_task(read_stream(proxy, path, body))
        await until(lambda: proxy.replicas[0].engine.counters.generation > 5)
        proxy.replicas[0].faults.set("hang")
        events = await reading
        assert "refuses connections" in error_of(events[-1], dialect)
        await proxy.settled()
        assert proxy.outcomes() == {"broken_stream": 1}


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_comments_do_not_make_up_for_a_first_token(path: str) -> None:
    """Nor do they bind the client to a replica."""
    chatty = replace(FAST, sse_keep_alive_s=0.02)
    config: dict[str, Any] = {"scheduling": {"placement": "round_robin"}, "timeouts": {"first_byte_s": 1.0}}
    async with serving(chatty, FAST, **config) as proxy:
        proxy.replicas[0].faults.set("frozen")
        events = await read_stream(proxy, path, STREAM, whole=True)
        assert events.count(b": keep-alive") > 1
        assert events[-1].endswith((b"[DONE]", b'{"type":"message_stop"}'))
        assert b"error" not in b"".join(events)
        await until(lambda: not proxy.replicas[0].in_flight)
        proxy.replicas[0].faults.clear()
        assert proxy.outcomes() == {"completed": 1}


async def test_after_comments_alone_a_failure_is_an_event() -> None:
    async with serving(replace(FAST, sse_keep_alive_s=0.02), timeouts={"first_byte_s": 0.5}) as proxy:
        proxy.replicas[0].faults.set("frozen")
        events = await read_stream(proxy, CHAT, STREAM, whole=True)
        assert set(events[:-1]) == {b": keep-alive"}
        error = json.loads(events[-1].removeprefix(b"data: "))["error"]
        assert (error["code"], "timeouts.first_byte_s" in error["message"]) == (504, True)
        await until(lambda: not proxy.replicas[0].in_flight)
        proxy.replicas[0].faults.clear()


OWN = b'data: {"error":{"message":"own","code":500}}\n\n'


@pytest.mark.parametrize(
    ("sent", "own"),
    [
        pytest.param(STREAM_HEAD + chunk(EVENT) + chunk(OWN), True, id="an engine that said why"),
        pytest.param(STREAM_HEAD + chunk(EVENT + b'data: {"id":"1","choices":[],"usage":{"prompt_'), False, id="usage"),
        pytest.param(STREAM_HEAD + chunk(EVENT) + chunk(b"data: begun") + STREAM_END, False, id="a regular end"),
        pytest.param(whole(EVENT * 9, content_type="text/event-stream")[: -8 * len(EVENT)], False, id="a length"),
    ],
)
async def test_a_stream_that_breaks_ends_with_one_error(sent: bytes, own: bool) -> None:
    async with serving_script(breaking(sent)) as (proxy, _):
        event, error = await read_stream(proxy, CHAT, ENDLESS)
        assert event == EVENT.strip()
        assert error == OWN.strip() if own else error_of(error, "chat")


async def test_an_error_beside_a_token_ends_the_answer_once() -> None:
    """The client gets such an event before the proxy reads it, and another answer on the same connection."""
    token = EVENT.replace(b"}]", b',"finish_reason":null}]')
    error = token.replace(b"}\n\n", b',"error":{"message":"own","code":500}}\n\n')
    got = asyncio.Event()

    async def script(peer: Peer, request: bytes) -> None:
        if b'"stream":' not in request:
            await peer.send(whole(b"{}"))
            return
        await peer.send(STREAM_HEAD)
        for event in (token, token, error):
            await peer.send(chunk(event))
            await got.wait()
            got.clear()
        await peer.send(chunk(b"data: [DONE]\n\n") + STREAM_END)

    async with serving_script(script) as (proxy, _), proxy.wire(raw_post(STREAM)) as (reader, writer):
        for event in (token, token, error):
            assert (await reader.readuntil(b"\n\n\r\n")).endswith(chunk(event))
            got.set()
        assert await reader.readuntil(b"0\r\n\r\n") == chunk(b"data: [DONE]\n\n") + STREAM_END
        writer.write(raw_post(HELLO))
        assert (await read_answer(reader)).body == b"{}"
        await proxy.settled()
        assert proxy.outcomes() == {"upstream_status": 1, "completed": 1}


async def test_a_stream_without_its_end_mark_is_passed_on_as_it_is() -> None:
    script = answering(STREAM_HEAD + chunk(EVENT) + chunk(b"data: begun") + STREAM_END)
    async with serving_script(script, retry={"continue": "off"}) as (proxy, _):
        assert (await proxy.chat(ENDLESS)).body == EVENT + b"data: begun"


async def test_the_sdk_hands_out_the_error_event_before_it_raises() -> None:
    async with (
        serving(FAST) as proxy,
        openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="k", max_retries=0) as sdk,
    ):
        stream = await sdk.responses.create(model="base", input=TEXT, max_output_tokens=30_000, stream=True)
        kinds = []

        async def follow() -> None:
            async for event in stream:
                kinds.append(event.type)
                if len(kinds) == 5:
                    proxy.replicas[0].faults.set("refuse")

        with pytest.raises(openai.APIConnectionError):
            await follow()
        assert kinds[-1] == "error"


async def test_a_stream_with_a_length_is_sent_without_it() -> None:
    usage = b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
    stream = EVENT + usage + b"data: [DONE]\n\n"
    async with serving_script(answering(whole(stream, content_type="text/event-stream"))) as (proxy, _):
        events = await read_stream(proxy, CHAT, ENDLESS, whole=True)
        assert events == [EVENT.strip(), b"data: [DONE]"], "the usage that the proxy asked for itself is taken out"


class Flood:
    """A script that answers with more than all buffers on the way hold."""

    def __init__(self) -> None:
        self.sent = 0

    async def __call__(self, peer: Peer, _: bytes) -> None:
        await peer.send(STREAM_HEAD)
        while not peer.writer.is_closing():
            await peer.send(chunk(b"data: " + b"x" * 65_000 + b"\n\n"))
            self.sent += 1

    async def until_blocked(self) -> None:
        """Until nothing more can be sent: everybody waits for the client."""
        before = -1
        while before != self.sent:
            before = self.sent
            await asyncio.sleep(0.1)


async def test_a_backend_that_goes_while_its_client_does_not_read() -> None:
    flood = Flood()
    async with serving_script(flood) as (proxy, backend), proxy.wire(raw_post(ENDLESS)):
        await until(lambda: flood.sent)
        await flood.until_blocked()
        backend.hang()
        await until(lambda: proxy.outcomes() == {"broken_stream": 1})
        assert proxy.app.handler.open_requests == 0


async def test_the_longest_time_of_an_answer_is_no_fault_of_a_slow_client() -> None:
    flood = Flood()
    async with serving_script(flood, timeouts={"total_s": 0.5}) as (proxy, _), proxy.wire(raw_post(ENDLESS)):
        await until(lambda: proxy.outcomes())
        assert proxy.outcomes() == {"broken_stream": 1}


async def test_a_goodbye_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def for_ever(_: ResponseWriter, **_how: bool) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("llmproxy.gateway.proxying.relay.GOODBYE_S", 0.05)
    monkeypatch.setattr(ResponseWriter, "end", for_ever)
    async with serving(FAST) as proxy, proxy.stream() as response:
        await response.content.readany()
        proxy.replicas[0].faults.set("refuse")
        await until(lambda: proxy.app.handler.open_requests == 0)
        assert proxy.outcomes() == {"broken_stream": 1}


async def test_an_error_that_its_client_does_not_read_has_an_end() -> None:
    script = answering(whole(b"x" * 1_000_000, status="400 Bad Request"))
    # The buffers of both sockets take more than one of them: only what exceeds these waits for its client.
    asked = raw_post(HELLO) * 20
    async with serving_script(script, timeouts={"stall_s": 0.2}) as (proxy, _), proxy.wire(asked):
        await until(lambda: proxy.outcomes()["cancelled"] == 1)
        assert proxy.app.handler.open_requests == 0


async def test_an_unread_answer_in_one_piece_ends() -> None:
    async with (
        serving_script(answering(whole(b"x" * 100_000)), timeouts={"stall_s": 0.2}) as (proxy, _),
        proxy.wire(raw_post(HELLO) * 200),
    ):
        await until(lambda: proxy.outcomes()["cancelled"] == 1)
        assert proxy.app.dispatcher.leases == 0


async def test_a_complete_stream_that_broke_and_is_not_read_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def for_ever(_: ResponseWriter) -> None:
        await asyncio.Event().wait()

    script = breaking(STREAM_HEAD + chunk(EVENT + b"data: [DONE]\n\n"), reset=True)
    monkeypatch.setattr(ResponseWriter, "drained", for_ever)
    async with serving_script(script, timeouts={"stall_s": 0.2}) as (proxy, _), proxy.wire(raw_post(STREAM)):
        await until(lambda: proxy.outcomes()["completed"] == 1)
        assert proxy.app.dispatcher.leases == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_backend_that_goes_when_all_of_its_answer_came(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    answer = STREAM_HEAD + chunk(EVENT + b"data: [DONE]\n\n") + STREAM_END if stream else whole(b"{}")
    slow, caught_up = asyncio.Event(), asyncio.Event()

    end = ResponseWriter.end

    async def slowly(writer: ResponseWriter, *, whole: bool = True) -> None:
        await end(writer, whole=whole)
        slow.set()
        await caught_up.wait()

    monkeypatch.setattr(ResponseWriter, "end", slowly)
    async with serving_script(answering(answer)) as (proxy, backend):
        async with proxy.wire(raw_post(STREAM if stream else HELLO)) as (reader, writer):
            await slow.wait()
            (lease,) = proxy.app.dispatcher._leases.values()
            backend.hang()
            await until(lambda: lease.revoked)
            for _ in range(5):
                # As many turns of the loop as it takes to end an attempt.
                await asyncio.sleep(0)
            caught_up.set()
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await read_answer(reader)).whole
            # Not one byte lies between them.
            assert (await read_answer(reader)).status == 200
        await proxy.settled()
        assert proxy.outcomes()["completed"] == 1


async def test_a_client_that_leaves_at_the_sight_of_the_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmproxy.gateway.proxying.relay.GOODBYE_S", 60.0)
    monkeypatch.setattr("llmproxy.gateway.proxying.relay.LINGER_S", 60.0)
    async with serving(FAST) as proxy:
        async with proxy.stream() as response:
            proxy.replicas[0].faults.set("refuse")
            while b"The stream broke" not in await response.content.readany():
                pass
        await proxy.settled()
        assert proxy.outcomes() == {"broken_stream": 1}
