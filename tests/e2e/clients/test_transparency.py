"""The client gets the engine's bytes, and the engine gets the client's."""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from itertools import chain
from typing import Any

import aiohttp
import pytest

from llmproxy.core.lease_events import LeaseEvent, Progress
from llmproxy.core.pools import Pools
from llmproxy.gateway.http.routes import SCHEDULED, BodyKind
from llmproxy.gateway.proxying import stream_relay as passing
from tests.e2e.proxies import CHAT, FAST, HELLO, STREAM, Answer, ProxyUnderTest, raw_post, serving, until
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, answering, chunk, scripted, serving_script, whole
from tests.upstream.raw_server import Peer

POSTED = [route for route in SCHEDULED.values() if route.method == "POST"]
RESPONSES = {"model": "base", "input": "Hello there", "max_output_tokens": 4}
MESSAGES: dict[str, Any] = {"model": "base", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello there"}]}
COMPLETION = {"model": "base", "prompt": "Hello", "max_tokens": 3}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

SAME: list[tuple[str, object]] = [
    (CHAT, HELLO),
    (CHAT, HELLO | USAGE),
    (CHAT, HELLO | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (CHAT, HELLO | {"n": 3, "unknown_field": {"kept": [1, 2.50, None]}}),
    (CHAT, HELLO | {"model": "lora-1"}),
    (CHAT, HELLO | {"model": None}),
    (CHAT, HELLO | {"model": ""}),
    (CHAT, {"messages": HELLO["messages"], "max_tokens": 2}),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", COMPLETION | {"prompt": ["one", "two"]}),
    ("/v1/completions", COMPLETION | {"prompt": [1, 2, 3]}),
    ("/v1/completions", COMPLETION | USAGE),
    ("/v1/responses", RESPONSES),
    ("/v1/responses", RESPONSES | {"stream": True}),
    ("/v1/messages", MESSAGES),
    ("/v1/messages", MESSAGES | {"stream": True}),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/tokenize", {"model": "base", "prompt": "Hello there", "return_token_strs": True}),
    ("/detokenize", {"model": "base", "tokens": [1214606444, 1869881344]}),
    # The client gets refusals in the engine's own words.
    (CHAT, {"model": "base", "max_tokens": 4}),
    (CHAT, {"model": "base", "messages": [], "max_tokens": 4}),
    (CHAT, HELLO | {"max_tokens": -1}),
    (CHAT, HELLO | {"max_tokens": 1_000_000}),
    (CHAT, HELLO | {"temperature": -1}),
    (CHAT, HELLO | {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}),
    (CHAT, HELLO | {"stream_options": {"include_usage": True}}),
    ("/v1/completions", {"model": "base"}),
    ("/v1/messages", {"model": "base", "messages": MESSAGES["messages"]}),
    ("/v1/embeddings", {"model": "base", "input": "Hello"}),
    ("/rerank", {"model": "base", "query": "a", "documents": ["b"]}),
]


def normal(body: bytes) -> bytes:
    """A body without what differs from one answer to the next: random ids and the time."""
    body = re.sub(rb'"(created|created_at)":\d+', rb'"\1":0', body)
    return re.sub(rb"(resp|msg)_[0-9a-f]{16}", rb"\1_", body)


def comparable(answer: Answer) -> tuple[int, set[tuple[str, str]], bytes]:
    ours = ("x-llmproxy-", "x-request-id", "date", "server")
    headers = {(name.lower(), value) for name, value in answer.headers.items()}
    return answer.status, {field for field in headers if not field[0].startswith(ours)}, normal(answer.body)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("path", "body"), SAME, ids=[f"{i}{path}" for i, (path, _) in enumerate(SAME)])
async def test_a_proxied_answer_is_the_direct_answer(path: str, body: object) -> None:
    async with serving(FAST) as proxy:
        named = {"x-request-id": "the-same-id"}
        direct = await proxy.post(proxy.replicas[0].url + path, body, headers=named)
        # The prefix cache has the direct request, and `usage` would show it.
        await proxy.replicas[0].restart()
        proxied = await proxy.post(path, body, headers=named)
        assert comparable(proxied) == comparable(direct)
        assert proxied.headers["x-llmproxy-backend"] == "b0"
        assert float(proxied.headers["x-llmproxy-queue-ms"]) >= 0
        assert proxied.headers["x-llmproxy-attempts"] == "1"


async def test_the_body_reaches_the_engine_byte_for_byte(proxy: ProxyUnderTest) -> None:
    messages = b'[{"role":"user","content":"h\\u00e9 \xc3\xa9"}]'
    body = b'{ "max_tokens":2,\t"messages":' + messages + b',"x":1.00,"x":[ ] ,"model":"base"}\n'
    answer = await proxy.chat(body)
    assert answer.status == 200
    assert proxy.sent(answer.backend).body == body


async def test_usage_is_asked_for_and_hidden(proxy: ProxyUnderTest) -> None:
    silent = await proxy.chat(STREAM)
    assert silent.events[-1] == b"data: [DONE]"
    assert b"usage" not in silent.body
    assert b"include_usage" in proxy.sent(silent.backend).body
    assert proxy.metric("llmproxy_tokens_total", direction="output") == 4, "hidden from the client, known to the proxy"

    asked = await proxy.chat(STREAM | {"stream_options": {"include_usage": True}})
    assert b'"completion_tokens":4' in asked.events[-2]
    # The hidden chunk has the fingerprint. Apart from it and the usage the streams are equal.
    assert [re.sub(rb'"id":"[^"]*"', b"", normal(e)) for e in silent.events] == [
        re.sub(rb'"id":"[^"]*"', b"", normal(e)) for e in asked.events if b'"usage"' not in e
    ]


@pytest.mark.parametrize("refusal", [{"include_usage": False}, {"continuous_usage_stats": True}])
async def test_a_client_without_usage_is_charged_the_same(proxy: ProxyUnderTest, refusal: dict[str, bool]) -> None:
    answer = await proxy.chat(STREAM | {"stream_options": refusal})
    assert b"usage" not in answer.body
    assert answer.events[-1] == b"data: [DONE]"
    assert proxy.metric("llmproxy_tokens_total", direction="output") == 4


@pytest.mark.parametrize("status", ["400 Bad Request", "422 Unprocessable Entity"])
async def test_a_backend_that_refuses_to_be_asked_for_usage_is_asked_without(status: str) -> None:
    token, done = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n', b"data: [DONE]\n\n"

    async def script(peer: Peer, request: bytes) -> None:
        if b"stream_options" in request:
            await peer.send(whole(b'{"message":"extra_forbidden: body.stream_options"}', status))
        else:
            await peer.send(STREAM_HEAD + chunk(token + done) + STREAM_END)

    async with serving_script(script) as (proxy, backend):
        answers = [await proxy.chat(STREAM) for _ in range(3)]
        assert [(answer.status, answer.body) for answer in answers] == [(200, token + done)] * 3
        assert answers[0].headers["x-llmproxy-attempts"] == "1", "it is no failure of the backend"
        assert [b"stream_options" in request for request in backend.requests] == [True, False, False, False]
        # The client gets the engine's error about options that the client chose itself.
        refused = await proxy.chat(STREAM | {"stream_options": {"include_usage": True}})
        assert refused.status == int(status[:3])


REPEATED = b"{'model': 'base', 'stream': True, 'stream_options': {'include_usage': True}}"
MISSING = b"'loc': ('body', 'messages'), 'msg': 'Field required'"


@pytest.mark.parametrize(
    ("status", "error", "calls"),
    [
        ("400 Bad Request", b'{"object":"error","message":"[{%b, \'input\': %b}]"}' % (MISSING, REPEATED), 1),
        ("422 Unprocessable", b'{"detail":[{"loc":["body"],"input":{"stream_options":{}}}]}', 1),
        ("400 Bad Request", b'{"error":{"message":"invalid: %b"}}' % REPEATED, 2),
    ],
    ids=["vllm-0.9", "fastapi", "begins-with-it"],
)
async def test_an_error_that_repeats_the_request_is_no_refusal_of_usage(status: str, error: bytes, calls: int) -> None:
    async def script(peer: Peer, request: bytes) -> None:
        fine = b'"messages"' in request
        stream = STREAM_HEAD + chunk(b"data: [DONE]\n\n") + STREAM_END
        await peer.send(stream if fine else whole(error, status))

    async with serving_script(script) as (proxy, backend):
        refused = await proxy.chat({"model": "base", "stream": True})
        assert (refused.status, refused.body, len(backend.requests)) == (int(status[:3]), error, calls)
        await proxy.chat(STREAM)
        assert b"include_usage" in backend.requests[-1], "it is still asked"


async def test_usage_that_an_engine_sends_to_everybody_passes_where_it_is_not_asked() -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n'
    stream = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n' + usage + b"data: [DONE]\n\n"
    async with (
        scripted(answering(STREAM_HEAD, chunk(stream), STREAM_END)) as backend,
        serving(backends=[{"url": backend.url, "ask_usage": False}]) as proxy,
    ):
        assert (await proxy.chat(STREAM)).body == stream
        assert b"stream_options" not in backend.requests[0]
        assert proxy.metric("llmproxy_tokens_total", direction="output") == 2, "it counts all the same"


async def test_a_request_id_is_taken_sent_on_and_echoed(proxy: ProxyUnderTest) -> None:
    answer = await proxy.chat(headers={"X-Request-Id": "mine-1"})
    assert answer.headers.getall("x-request-id") == ["mine-1"]
    assert answer.json["id"] == "chatcmpl-mine-1", "the engine got it"


async def test_open_requests_of_one_id_have_different_ids_in_the_engine() -> None:
    asked, go = asyncio.Semaphore(0), asyncio.Event()

    async def script(peer: Peer, _: bytes) -> None:
        asked.release()
        await go.wait()
        await peer.send(whole(b'{"object":"chat.completion","model":"base"}'))

    async with serving_script(script) as (proxy, backend):
        same = {"X-Request-Id": "mine-1"}
        tasks = [asyncio.create_task(proxy.chat(headers=same)) for _ in range(3)]
        for _ in tasks:
            await asyncio.wait_for(asked.acquire(), 10.0)
        go.set()
        answers = [await task for task in tasks]
        await proxy.settled()
        # The id is free again.
        answers.append(await proxy.chat(headers=same))
        sent = [re.findall(rb"(?i)x-request-id: (.+?)\r", request) for request in backend.requests]
        names = [name for [name] in sent]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine-1"] * 4
    assert len(set(names[:3])) == 3
    assert all(name.startswith(b"mine-1") for name in names)
    assert b"mine-1" in names[:3]
    assert names[3] == b"mine-1"


async def test_a_second_attempt_has_another_id_in_the_engine() -> None:
    requests: list[bytes] = []

    async def script(peer: Peer, request: bytes) -> None:
        requests.append(request)
        first_one = len(requests) == 1
        await peer.send(
            whole(b"{}", "503 Service Unavailable") if first_one else whole(b'{"object":"chat.completion"}')
        )

    async with (
        scripted(script) as first,
        scripted(script) as second,
        serving(extra=[first.url, second.url]) as proxy,
    ):
        answer = await proxy.chat(headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-llmproxy-attempts"] == "2"
    first_id, second_id = [name for one in requests for name in re.findall(rb"(?i)x-request-id: (.+?)\r", one)]
    assert first_id == b"mine-1"
    assert second_id.startswith(b"mine-1-")


async def test_a_path_in_the_url_of_a_backend_goes_before_every_path() -> None:
    paths: list[bytes] = []

    async def answer(peer: Peer, request: bytes) -> None:
        path = request.split(b" ", 2)[1].partition(b"?")[0]
        paths.append(path)
        listing = b'{"object":"list","data":[{"id":"base","object":"model"}]}'
        await peer.send(whole(listing if path.endswith(b"/v1/models") else b"{}"))

    async with scripted(answer) as backend:
        for path in (b"/engine-1/health", b"/engine-1/v1/models", b"/engine-1/metrics", b"/engine-1/server_info"):
            backend.polls[path] = answer
        async with serving(extra=[f"{backend.url}/engine-1/"]) as proxy:
            assert (await proxy.chat()).status == 200
    assert b"/engine-1/v1/chat/completions" in paths
    assert all(path.startswith(b"/engine-1/") for path in paths)
    assert b"/engine-1/health" in paths
    assert b"/engine-1/metrics" in paths


async def test_latin_1_in_a_header_passes_as_it_is(proxy: ProxyUnderTest) -> None:
    request = raw_post(HELLO, extra="x-title: Jos#\r\nx-llm-d-inference-fairness-id: Jos#\r\nconnection: close\r\n")
    async with proxy.wire(request.replace(b"#", b"\xe9")) as (reader, _):
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
    seen = [
        one.headers["x-title"] for one in chain(*(r.requests_seen for r in proxy.replicas)) if "x-title" in one.headers
    ]
    assert [title.encode("utf-8", "surrogateescape") for title in seen] == [b"Jos\xe9"]


async def test_a_byte_order_mark_before_json_is_left_out(proxy: ProxyUnderTest) -> None:
    body = json.dumps(HELLO).encode()
    answer = await proxy.chat(b"\xef\xbb\xbf" + body)
    assert answer.status == 200
    assert proxy.sent(answer.backend).body == body


async def test_a_request_id_is_made_where_there_is_none(proxy: ProxyUnderTest) -> None:
    first, second = await proxy.chat(), await proxy.chat()
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert first.json["id"] == "chatcmpl-" + first.headers["x-request-id"]
    refused = await proxy.chat(HELLO | {"model": "nobody"})
    assert refused.headers["x-request-id"]


REASONS = {
    b"Not Quite OK": b"Not Quite OK",
    b"": b"OK",
    b"a\x1b[31m\x00\x08b\x7f": b"a [31m  b ",
    b"tab\there": b"tab\there",
    "caf\u00e9".encode(): "caf\u00e9".encode(),
    b"\xff": "\u00ff".encode(),
}


@pytest.mark.parametrize("sent", REASONS)
async def test_a_reason_phrase_passes_without_control_characters(sent: bytes) -> None:
    stream = STREAM_HEAD + chunk(b"data: [DONE]\n\n") + STREAM_END
    for status, answer in ((b"200", whole(b"{}")), (b"500", whole(b"{}", "500 OK")), (b"200", stream)):
        script = answering(answer.replace(b" OK\r\n", b" " + sent + b"\r\n", 1))
        async with serving_script(script) as (proxy, _), proxy.wire(raw_post(STREAM)) as (reader, _):
            line = await reader.readuntil(b"\r\n")
            await proxy.settled()
        reason = b"Internal Server Error" if status == b"500" and not sent else REASONS[sent]
        assert line == b"HTTP/1.1 %s %s\r\n" % (status, reason)


async def test_an_old_client_without_chunks_gets_its_stream_too(proxy: ProxyUnderTest) -> None:
    async with proxy.wire(raw_post(STREAM, version="1.0")) as (reader, _):
        head, _, stream = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200")
    assert b"transfer-encoding" not in head.lower()
    assert stream.startswith(b"data: {")
    assert stream.endswith(b"data: [DONE]\n\n")


async def test_a_keep_alive_comment_is_forwarded_and_is_no_token() -> None:
    token = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    go_on = asyncio.Event()

    async def script(peer: Peer, _: bytes) -> None:
        await peer.send(STREAM_HEAD + chunk(b": keep-alive\n\n"))
        await go_on.wait()
        await peer.send(chunk(token) + chunk(b"data: [DONE]\n\n") + STREAM_END)

    async with serving_script(script) as (proxy, _), proxy.stream(STREAM) as response:
        assert await response.content.readany() == b": keep-alive\n\n"
        booking = next(iter(proxy.app.pools.backends["b0"].bookings.values()))
        assert not booking.started, "a comment is no token"
        go_on.set()
        assert await response.content.read() == token + b"data: [DONE]\n\n"
        await proxy.settled()
        assert proxy.metric("llmproxy_time_to_first_token_seconds_count") == 1


async def test_a_server_that_is_named_once_and_without_versions() -> None:
    named = b"server: uvicorn/0.30.1\r\n"
    stream = STREAM_HEAD.removesuffix(b"\r\n") + named + b"\r\n" + chunk(b"data: [DONE]\n\n") + STREAM_END
    for answered in (whole(b"{}", extra=named), whole(b"{}", "400 Bad Request", extra=named), stream):
        async with serving_script(answering(answered)) as (proxy, _):
            assert (await proxy.chat()).headers.getall("server") == ["llmproxy"]
    async with serving(FAST) as proxy:
        answers = [await proxy.get(path) for path in ("/health", "/v1/models", "/metrics", "/debug/queue", "/nothing")]
        answers += [await proxy.chat(b"{"), await proxy.post("/v1/responses", RESPONSES)]
        answers.append(await proxy.get(f"/v1/responses/{answers[-1].json['id']}"))
        for answer in answers:
            assert answer.headers.getall("server") == ["llmproxy"]
        for sent in (b"NO HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"b" * 200_000):
            async with proxy.wire(sent) as (reader, _):
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                assert b"server: llmproxy\r\n" in head or b"server:" not in head


@pytest.mark.parametrize("padding_bytes", [0, 200_000])
async def test_transfer_parameters_of_clients_reach_no_engine_by_any_route(padding_bytes: int) -> None:
    pull = {"do_remote_prefill": True, "remote_host": "10.0.0.9"}
    body = {"model": "base", "kv_transfer_params": pull, "ec_transfer_params": pull, "padding": "x" * padding_bytes}
    async with serving_script(answering(whole(b"{}"))) as (proxy, backend):
        for route in POSTED:
            if route.kind is BodyKind.FORM:
                with aiohttp.MultipartWriter("form-data") as form:
                    form.append("{}").set_content_disposition("form-data", name="kv_transfer_params")
                async with proxy.http.post(proxy.url + route.path, data=form) as refused:
                    assert refused.status == 400
                continue
            assert (await proxy.post(route.path, body)).status == 200, route.path
            reached = json.loads(backend.requests[-1].partition(b"\r\n\r\n")[2])
            assert reached.items() >= {"model": "base", "kv_transfer_params": None, "ec_transfer_params": None}.items()
        assert len(backend.requests) == sum(route.kind is not BodyKind.FORM for route in POSTED)
        hidden = {"model": "base", "vllm_xargs": {"kv_transfer_params": "x"}, "padding": "x" * padding_bytes}
        answer = await proxy.post("/inference/v1/generate", hidden)
        assert (answer.status, answer.json["error"]["param"]) == (400, "body.vllm_xargs.kv_transfer_params")
        assert "is not taken from clients" in answer.json["error"]["message"]


CHOOSING_FIELDS = {
    "x-vllm-priority": "-9", "x-data-parallel-rank": "1", "x-prefiller-host-port": "10.0.0.9:8000",
    "x-encoder-hosts-ports": "10.0.0.9:8000", "x-data-parallel-host-port": "10.0.0.9:8000",
}  # fmt: skip
SESSION = {"session_id": "s", "vllm_xargs": {"session_id": "s", "other": 1}}


@pytest.mark.parametrize("trusted", [False, True])
async def test_priorities_and_routing_fields_need_trust(trusted: bool) -> None:
    headers = CHOOSING_FIELDS | {"x-session-id": "s"}
    trust = "127.0.0.0/8" if trusted else "none"
    async with serving_script(answering(whole(b"{}")), trust_headers=trust) as (proxy, backend):
        for route in (route for route in POSTED if route.kind is not BodyKind.FORM):
            body = {"model": "base", "priority": -9, **SESSION}
            assert (await proxy.post(route.path, body, headers=headers)).status == 200
            head, _, reached = backend.requests[-1].partition(b"\r\n\r\n")
            assert json.loads(reached) == body | {"priority": -9 if trusted else 0}
            fields = {
                name.lower(): value for name, _, value in (line.partition(": ") for line in head.decode().split("\r\n"))
            }
            assert headers.keys() & fields.keys() == (headers if trusted else {"x-session-id": "s"}).keys()
            assert fields["x-session-id"] == "s"


# --- compressed on the way --------------------------------------------------------------------------------------------

EVENT = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
GZIP_HEAD = STREAM_HEAD.removesuffix(b"\r\n") + b"content-encoding: gzip\r\n\r\n"


class GzipHop:
    """Compresses answers in whole chunks that can be unpacked as they come, as servers before an engine do."""

    def __init__(self) -> None:
        self._packer = zlib.compressobj(wbits=31)

    def chunk(self, data: bytes, *, last: bool = False) -> bytes:
        return chunk(self._packer.compress(data) + self._packer.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH))


async def test_engines_are_asked_for_answers_as_they_are() -> None:
    async with serving_script(answering(whole(b"{}"))) as (proxy, backend):
        for headers in ({"accept-encoding": "gzip, br"}, {"accept-encoding": "*"}):
            assert (await proxy.chat(headers=headers)).status == 200
            head = backend.requests[-1].partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
            assert [line for line in head if line.startswith(b"accept-encoding")] == [b"accept-encoding: identity"]


async def test_a_stream_compressed_all_the_same_passes_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()
    reported: list[int] = []

    async def script(peer: Peer, _: bytes) -> None:
        hop = GzipHop()
        await peer.send(GZIP_HEAD + hop.chunk(EVENT))
        await go_on.wait()
        # The clock of the loop counts milliseconds.
        await asyncio.sleep(0.002)
        await peer.send(hop.chunk(EVENT) + hop.chunk(EVENT))
        await peer.send(hop.chunk(EVENT))
        await until(lambda: reported)
        await peer.send(hop.chunk(DONE, last=True) + STREAM_END)

    monkeypatch.setattr(passing, "PROGRESS_S", 0.0)
    apply = Pools.apply

    def spy(pools: Pools, event: LeaseEvent, now: float) -> None:
        if isinstance(event, Progress):
            reported.append(event.output_tokens)
        apply(pools, event, now)

    monkeypatch.setattr(Pools, "apply", spy)
    async with serving_script(script) as (proxy, _):
        async with proxy.wire(raw_post(STREAM)) as (reader, _):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"content-encoding: gzip\r\n" in head
            unpacker = zlib.decompressobj(wbits=31)
            text = unpacker.decompress(await next_chunk(reader))
            assert text == EVENT, "its first byte does not wait for its end"
            booking = next(iter(proxy.app.pools.backends["b0"].bookings.values()))
            assert booking.started
            go_on.set()
            while data := await next_chunk(reader):
                text += unpacker.decompress(data)
        assert text == EVENT * 4 + DONE
        assert unpacker.eof
        await proxy.settled()
        assert proxy.outcomes() == {"completed": 1}
        assert proxy.metric("llmproxy_time_to_first_token_seconds_count") == 1
        assert set(reported) == {0}, "its backend is heard, and nothing is said of its pace"


async def next_chunk(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readexactly(int(await reader.readline(), 16) + 2))[:-2]


async def test_a_broken_compressed_stream_gets_no_event() -> None:
    async def script(peer: Peer, _: bytes) -> None:
        await peer.send(GZIP_HEAD + GzipHop().chunk(EVENT))
        peer.writer.close()

    async with serving_script(script) as (proxy, _):
        async with proxy.wire(raw_post(STREAM)) as (reader, _):
            await reader.readuntil(b"\r\n\r\n")
            unpacker = zlib.decompressobj(wbits=31)
            assert unpacker.decompress(await next_chunk(reader)) == EVENT
            assert await reader.read() == b""
        await proxy.settled()
        assert proxy.outcomes() == {"broken_stream": 1}
