"""Refusals of a replica, in the words and shapes that were recorded from a real vLLM 0.32."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from llmproxy.lab.simulator.replica import Replica
from tests.lab.simulator.conftest import CHAT, CHAT_PATH, FAST, post

NOT_THERE = "The model `nope` does not exist. Valid aliases: base."
TOO_LONG = (
    "This model's maximum context length is 32768 tokens. However, your prompt contains at least 32769 input tokens, "
    "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
    "(parameter=input_tokens, value=32769)"
)


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "param", "message"),
    [
        ("chat/completions", CHAT | {"model": "nope"}, 404, "NotFoundError", "model", NOT_THERE),
        ("completions", {"model": "nope", "prompt": "x"}, 404, "NotFoundError", "model", NOT_THERE),
        ("responses", {"model": "nope", "input": "x"}, 404, "NotFoundError", "model", NOT_THERE),
        ("completions", {"prompt": "x" * 140_000}, 400, "BadRequestError", "input_tokens", TOO_LONG),
        ("chat/completions", CHAT | {"stream": True, "max_tokens": 0}, 400, "BadRequestError", "max_tokens", "got 0."),
        (
            "chat/completions",
            CHAT | {"max_tokens": 99_999},
            400,
            "BadRequestError",
            "max_tokens",
            "max_model_len=32768",
        ),
        ("chat/completions", CHAT | {"min_tokens": 4}, 400, "BadRequestError", None, "equal to max_tokens=3, got 4."),
        ("chat/completions", CHAT | {"max_tokens": "many"}, 400, "Bad Request", "body.max_tokens", "int_parsing"),
        ("chat/completions", CHAT | {"temperature": -1}, 400, "BadRequestError", "temperature", "got -1.0."),
        ("chat/completions", CHAT | {"stream_options": {"x": 1}}, 400, "BadRequestError", "stream_options", "`stream="),
        ("chat/completions", {"model": "base"}, 400, "Bad Request", "body.messages", "'<dict of 1 items>'"),
        ("chat/completions", CHAT | {"messages": []}, 400, "BadRequestError", None, "empty conversation"),
        ("chat/completions", CHAT | {"tools": [{}]}, 400, "BadRequestError", None, '"auto" tool choice requires'),
        ("chat/completions", CHAT | {"model": 5}, 400, "Bad Request", "body.model", "'input': '5'"),
        ("chat/completions", [], 400, "Bad Request", "body", "'<list of 0 items>'"),
        ("completions", {"model": "base"}, 400, "BadRequestError", "prompt", "Either prompt or prompt_embeds"),
    ],
)
async def test_bad_requests_get_the_recorded_errors(
    client: aiohttp.ClientSession, path: str, body: Any, status: int, kind: str, param: str | None, message: str
) -> None:
    got, answer = await post(client, f"/v1/{path}", body)
    error = answer["error"]
    assert (got, error["type"], error["param"], error["code"]) == (status, kind, param, status)
    assert message in error["message"]
    assert list(error) == ["message", "type", "param", "code"]


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "answered"),
    [
        (90, 10, 10),
        (90, 11, "requested 11 output tokens"),
        (99, None, 1),
        (100, None, "even without any output tokens"),
    ],
)
async def test_prompt_and_answer_may_fill_the_context_and_no_more(
    client: aiohttp.ClientSession, prompt_tokens: int, max_tokens: int | None, answered: int | str
) -> None:
    async with Replica(replace(FAST, max_model_len=100)) as replica:
        body = {"prompt": [1] * prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True}
        status, answer = await post(client, f"{replica.url}/v1/completions", body)
    if isinstance(answered, int):
        assert (status, answer["usage"]["completion_tokens"]) == (200, answered)
    else:
        assert status == 400
        assert answered in answer["error"]["message"]


async def test_bodies_that_are_no_json(replica: Replica, client: aiohttp.ClientSession) -> None:

    async def send(data: bytes, **headers: str) -> tuple[int, str]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with client.post(CHAT_PATH, data=data, headers=named) as answer:
            return answer.status, await answer.text()

    status, text = await send(b'{"model":"tiny", "messages": [', content_type="application/json")
    assert (status, json.loads(text)["error"]["param"]) == (400, "body.30")
    assert "JSON decode error" in text
    status, text = await send(json.dumps(CHAT).encode(), content_type="text/plain")
    assert status == 400
    assert "Only 'application/json' is allowed" in text
    status, text = await send(b"", content_type="application/json")
    assert (status, json.loads(text)["error"]["param"]) == (400, "body")
    packed = gzip.compress(json.dumps(CHAT).encode())
    assert await send(packed, content_type="application/json", content_encoding="gzip") == (
        400,
        '{"detail":"There was an error parsing the body"}',
    )
    assert replica.requests_seen[-1].body == packed, "bodies are not unpacked"


async def test_a_number_beyond_all_numbers_is_refused(client: aiohttp.ClientSession) -> None:
    body = json.dumps(CHAT).replace('"max_tokens": 3', '"max_tokens": 1e400')
    async with client.post(CHAT_PATH, data=body, headers={"content-type": "application/json"}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["type"], error["param"]) == (400, "Bad Request", "body.max_tokens")
    assert "finite_number" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/nowhere", 404, '{"detail":"Not Found"}'),
        ("POST", "/v1/embeddings", 404, '{"detail":"Not Found"}'),
        ("GET", "/v1/models/base", 404, '{"detail":"Not Found"}'),
        ("GET", CHAT_PATH, 405, '{"detail":"Method Not Allowed"}'),
        ("HEAD", "/health", 405, ""),
        ("HEAD", "/metrics", 200, ""),
        ("GET", "/health", 200, ""),
        ("POST", "/ping", 200, ""),
        ("GET", "/version", 200, '{"version":"0.32.0"}'),
        ("GET", "/load", 200, '{"server_load":0}'),
    ],
)
async def test_plain_routes(client: aiohttp.ClientSession, method: str, path: str, status: int, text: str) -> None:
    async with client.request(method, path) as answer:
        assert (answer.status, await answer.text()) == (status, text)
        assert answer.headers["vary"] == "Origin"


async def test_a_trailing_slash_is_redirected_to_the_replica_itself(
    replica: Replica, client: aiohttp.ClientSession
) -> None:
    async with client.post(CHAT_PATH + "/", json=CHAT, allow_redirects=False) as answer:
        assert answer.status == 307
        assert answer.headers["location"] == replica.url + CHAT_PATH


async def test_the_api_key_guards_only_some_paths(client: aiohttp.ClientSession) -> None:
    async with Replica(replace(FAST, api_key="secret")) as replica:
        for path, key, status in [
            ("/v1/models", None, 401),
            ("/v1/nowhere", None, 401),
            ("/v1/models", "wrong", 401),
            ("/v1/models", "secret", 200),
            ("/health", None, 200),
            ("/metrics", None, 200),
        ]:
            headers = {} if key is None else {"authorization": f"bearer {key}"}
            async with client.get(replica.url + path, headers=headers) as answer:
                assert answer.status == status, path
                if status == 401:
                    assert await answer.json() == {"error": "Unauthorized"}
                    assert "vary" not in answer.headers
