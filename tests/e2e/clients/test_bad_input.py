"""Bad input gets an answer in the dialect of its endpoint, with the status that vLLM gives, before it could wait."""

from __future__ import annotations

import gzip
import io
import json
import re
from select import PIPE_BUF
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from tests.e2e.proxies import CHAT, FAST, HELLO, Answer, ProxyUnderTest, raw_post, serving

MESSAGES = "/v1/messages"
PATHS = [CHAT, "/v1/completions", "/v1/responses", MESSAGES, "/tokenize"]
JSON = {"content-type": "application/json"}


def message_of(answer: Answer, path: str) -> str:
    """The message of an error, which must have the form of the endpoint's dialect."""
    assert answer.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = answer.json["error"]
    if path.startswith(MESSAGES):
        assert answer.json["type"] == "error"
        assert set(error) == {"type", "message"}
    else:
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == answer.status
    return str(error["message"])


def nothing_was_sent(proxy: ProxyUnderTest) -> None:
    assert not [seen for replica in proxy.replicas for seen in replica.requests_seen if seen.method == "POST"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"{", b"nonsense", b"[]", b'"text"', b"null", b"17", b'{"model":"base",}', b"\xff\xfe{}",
     b'{"model":7}', b'{"model":["base"]}', b'{"model":true}'],
)  # fmt: skip
async def test_a_body_that_is_no_request(proxy: ProxyUnderTest, path: str, body: bytes) -> None:
    answer = await proxy.post(path, body)
    assert answer.status == 400
    assert message_of(answer, path)
    nothing_was_sent(proxy)
    assert proxy.outcomes() == {"bad_request": 1}


@pytest.mark.parametrize("path", PATHS)
async def test_an_unknown_model(proxy: ProxyUnderTest, path: str) -> None:
    with capture_logs() as lines:
        answer = await proxy.post(path, {"model": "nope"})
        await proxy.settled()
    assert (answer.status, answer.json["error"]["type"]) == (
        404,
        "not_found_error" if path == MESSAGES else "NotFoundError",
    )
    assert "The model `nope` does not exist" in message_of(answer, path)
    (line,) = [line for line in lines if line["event"] == "request"]
    assert (line["model"], line["unknown_model"]) == ("unknown", "nope")
    nothing_was_sent(proxy)


@pytest.mark.parametrize("letter", ["x", "\x01", "\N{GRINNING FACE}"])
async def test_a_log_line_stays_whole_for_any_model_name(proxy: ProxyUnderTest, letter: str) -> None:
    with capture_logs() as lines:
        answer = await proxy.post(CHAT, {"model": letter * 4_000})
        await proxy.settled()
    assert (answer.status, letter * 4_000 in message_of(answer, CHAT)) == (404, True)
    (line,) = [line for line in lines if line["event"] == "request"]
    assert "The model `" in line["error"]
    assert "characters)" in line["error"]
    assert line["unknown_model"] == letter * 100
    assert len(json.dumps(line)) < PIPE_BUF


@pytest.mark.parametrize("path", PATHS)
async def test_a_method_that_is_not_allowed(proxy: ProxyUnderTest, path: str) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = await proxy.request(method, path)
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        assert message_of(answer, path)


async def test_a_path_that_does_not_exist(proxy: ProxyUnderTest) -> None:
    for path in ("/v1/nothing", "/v1/messages/nothing", "/nothing"):
        answer = await proxy.post(path, HELLO)
        assert answer.status == 404
        assert path in message_of(answer, path)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
async def test_a_content_type_that_is_not_read(proxy: ProxyUnderTest, path: str, kind: str) -> None:
    answer = await proxy.post(path, json.dumps(HELLO).encode(), headers={"content-type": kind})
    assert answer.status == 400
    assert "application/json" in message_of(answer, path)


async def test_a_content_type_with_a_parameter(proxy: ProxyUnderTest) -> None:
    answer = await proxy.chat(json.dumps(HELLO).encode(), headers={"content-type": "Application/JSON; charset=utf-8"})
    assert answer.status == 200


@pytest.mark.parametrize("path", PATHS)
async def test_a_compressed_body(proxy: ProxyUnderTest, path: str) -> None:
    packed = gzip.compress(json.dumps(HELLO).encode())
    answer = await proxy.post(path, packed, headers=JSON | {"content-encoding": "gzip"})
    assert (answer.status, answer.headers["accept-encoding"]) == (415, "identity")
    assert "compressed" in message_of(answer, path)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_body_beyond_the_limit(path: str) -> None:
    async with serving(FAST, body_bytes_max=1000) as proxy:
        body = json.dumps(HELLO | {"x": "x" * 1000}).encode()
        for options in ({}, {"chunked": True}):
            answer = await proxy.post(path, body, **options)
            assert answer.status == 413
            assert "body_bytes_max" in message_of(answer, path)
        assert (await proxy.chat()).status == 200
        assert proxy.outcomes() == {"too_large": 2, "completed": 1}


@pytest.mark.parametrize(
    ("status", "path", "fields"),
    [
        (413, CHAT, "content-length: 99999999"),
        (415, CHAT, "content-length: 9\r\ncontent-encoding: gzip"),
        (401, CHAT, "content-length: 9\r\nauthorization: Bearer wrong"),
        (404, "/nothing", "transfer-encoding: chunked"),
    ],
)
async def test_a_refusal_before_the_body_closes_the_connection(status: int, path: str, fields: str) -> None:
    """The client may send another request in place of the body."""
    async with serving(FAST, body_bytes_max=1000, api_keys=["key"]) as proxy:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: key\r\nexpect: 100-continue\r\n{fields}\r\n\r\n"
        async with proxy.wire(head.encode()) as (reader, _):
            answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"\r\nconnection: close\r\n" in answer.lower()


async def test_a_request_id_that_does_not_fit_is_replaced(log: io.StringIO, proxy: ProxyUnderTest) -> None:
    for value in ("a b", "é", "x" * 257, "a\tb"):
        answer = await proxy.chat(headers={"x-request-id": value})
        assert answer.status == 200
        own = answer.headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", own)
        seen = [one for replica in proxy.replicas for one in replica.requests_seen if one.path == CHAT]
        assert own in [one.headers["x-request-id"] for one in seen]
    assert log.getvalue().count("request_id_replaced") == 1


async def test_no_model_means_the_only_one(proxy: ProxyUnderTest) -> None:
    for model in ({}, {"model": None}, {"model": ""}):
        answer = await proxy.chat({"messages": HELLO["messages"], "max_tokens": 2} | model)
        assert (answer.status, answer.json["model"]) == (200, "base")


async def test_a_large_body_arrives_whole_but_for_an_alias() -> None:
    async with serving(FAST, models=[{"name": "gpt", "target": "lora-0"}]) as proxy:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (12 << 20)}}
        for name in ("gpt", "lora-0"):
            body = json.dumps(HELLO | {"messages": [{"role": "user", "content": [image]}], "model": name}).encode()
            assert (await proxy.chat(body)).json["model"] == "lora-0"
            assert proxy.sent().body == body.replace(b'"gpt"', b'"lora-0"')


async def test_a_client_that_asks_before_it_sends(proxy: ProxyUnderTest) -> None:
    head, _, body = raw_post(HELLO, extra="expect: 100-Continue\r\n").partition(b"\r\n\r\n")
    async with proxy.wire(head + b"\r\n\r\n") as (reader, writer):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


async def test_a_form(proxy: ProxyUnderTest) -> None:
    form = aiohttp.FormData({"model": "base"})
    form.add_field("file", b"RIFF....", filename="a.wav", content_type="audio/wav")
    async with proxy.http.post(proxy.url + "/v1/audio/transcriptions", data=form) as response:
        assert response.status == 404, "the simulated engine has no such route, and says so itself"
        assert response.headers["x-llmproxy-backend"] in ("b0", "b1")
        assert await response.json() == {"detail": "Not Found"}
    refused = await proxy.post("/v1/audio/transcriptions", HELLO)
    assert (refused.status, "multipart/form-data" in refused.json["error"]["message"]) == (400, True)


async def test_refusals_need_no_backend() -> None:
    async with serving(wait=False, extra=["http://127.0.0.1:9"]) as proxy:
        assert (await proxy.chat(b"{")).status == 400
        assert (await proxy.get(CHAT)).status == 405
        assert (await proxy.get("/nothing")).status == 404
