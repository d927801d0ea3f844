"""Ends of requests that look alike to the client and must have different outcomes."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import Counter
from types import SimpleNamespace

import openai
import pytest
from structlog.testing import capture_logs

from llmproxy.core.domain import Verdict
from llmproxy.core.retry import RetryBudget
from llmproxy.upstream.resolver import Address
from tests.e2e.proxies import FAST, HELLO, STREAM, ProxyUnderTest, all_up, raw_post, serving, until
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, answering, chunk, scripted, serving_script, whole
from tests.upstream.raw_server import Peer


async def test_a_client_that_leaves_at_the_end_mark_has_had_it_all() -> None:
    async def script(peer: Peer, _: bytes) -> None:
        await peer.send(STREAM_HEAD + chunk(b'data: {"id":"x","choices":[{"delta":{"content":"hi"}}]}\n\n'))
        await peer.send(chunk(b"data: [DONE]\n\n"))
        await asyncio.sleep(30)

    async with serving_script(script) as (proxy, _):
        async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="k", max_retries=0) as sdk:
            stream = await sdk.chat.completions.create(
                model="base", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            assert [piece.choices[0].delta.content async for piece in stream] == ["hi"]
            await stream.close()
        await until(lambda: proxy.app.handler.open_requests == 0)
        assert proxy.outcomes() == {"completed": 1}


async def test_an_error_event_for_a_bad_request_is_final() -> None:
    event = b'data: {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}\n\n'
    script = answering(STREAM_HEAD + chunk(event) + chunk(b"data: [DONE]\n\n") + STREAM_END)
    async with serving_script(script, health={"failures_before_ejection": 1}) as (proxy, _):
        for _ in range(3):
            answer = await proxy.chat(STREAM)
            assert (answer.status, answer.headers["x-llmproxy-attempts"]) == (200, "1")
        assert proxy.app.pools.ready(asyncio.get_running_loop().time())


async def test_a_lack_of_descriptors_blames_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(FAST, FAST) as proxy:

        def lacking(*_: object, **__: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        # For connections to backends alone, not for connections of the test.
        monkeypatch.setattr("aiohappyeyeballs.impl.socket", SimpleNamespace(**vars(socket) | {"socket": lacking}))
        async with proxy.wire(raw_post(HELLO)) as (reader, _):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nRetry-After: 1\r\n" in head
            error_text = await reader.readuntil(b"}}")
            assert b"Too many open files" in error_text
            assert b"LimitNOFILE" in error_text
            assert b"127.0.0.1" not in error_text
        assert proxy.metric("llmproxy_attempts_total", verdict="local_failure") == 2, "each was tried"
        assert all_up(proxy)
        assert not any(backend.health.ejected_times for backend in proxy.app.pools.backends.values())
        monkeypatch.setattr("aiohappyeyeballs.impl.socket", socket)
        assert (await proxy.chat()).status == 200
        assert proxy.outcomes() == {"rejected_capacity": 1, "completed": 1}


async def test_a_silent_name_server_keeps_known_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def look_up(host: str) -> list[Address]:
        asked.append(host)
        if asked.count("gpu.test") == 1 and host == "gpu.test":
            return [(socket.AF_INET, ("127.0.0.1", 0))]
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("llmproxy.upstream.resolver.ask_system", look_up)
    monkeypatch.setattr("llmproxy.upstream.resolver.REFRESH_S", 0.01)
    monkeypatch.setattr("llmproxy.upstream.resolver.ANSWER_MAX_S", 0.05)

    script = answering(whole(b'{"object":"chat.completion","choices":[]}', extra=b"connection: close\r\n"))
    async with scripted(script) as backend:
        urls = [backend.url.replace("127.0.0.1", "gpu.test"), *(f"http://gone-{i}.test:8000" for i in range(20))]
        with capture_logs() as logs:
            async with serving(extra=urls, wait=False, poll={"timeout_s": 0.2}) as proxy:
                pools = proxy.app.pools
                await until(lambda: pools.backends["b0"].listing is not None and asked.count("gpu.test") == 2)
                await until(lambda: sum(line["event"] == "name_not_resolved" for line in logs) == 21)
                assert [(await proxy.chat()).status for _ in range(20)] == [200] * 20
                assert backend.connections == 20, "each had to open one"
                await until(lambda: proxy.metric("llmproxy_poll_failures_total", backend="b20") >= 3)
                assert not pools.backends["b0"].health.down
                assert not pools.backends["b0"].health.ejected_times
                assert all(pools.backends[f"b{i}"].health.down for i in range(1, 21))
                assert not proxy.metric("llmproxy_poll_failures_total", backend="b0")
        assert max(Counter(asked).values()) == 2, "one question at a time"
        [warning] = [line for line in logs if line["event"] == "name_not_resolved" and line["name"] == "gone-7.test"]
        assert warning["why"] == "no answer within 0.05 s"


async def test_the_time_to_wait_does_not_run_while_a_body_arrives(proxy: ProxyUnderTest) -> None:
    head, end, body = raw_post(HELLO, extra="x-llm-d-inference-ttl: 50ms\r\n").partition(b"\r\n\r\n")
    async with proxy.wire(head + end) as (reader, writer):
        await asyncio.sleep(0.15)
        writer.write(body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


async def test_a_stored_response_is_logged_and_named_like_any_request(proxy: ProxyUnderTest) -> None:
    made = await proxy.post("/v1/responses", {"model": "base", "input": "hi", "max_output_tokens": 4})
    before = proxy.outcomes().get("completed", 0)
    got = await proxy.get(f"/v1/responses/{made.json['id']}", headers={"x-request-id": "mine"})
    assert (got.status, got.headers["x-request-id"]) == (200, "mine")
    assert proxy.outcomes()["completed"] == before + 1


async def test_a_refusal_at_the_door_has_an_id(proxy: ProxyUnderTest) -> None:
    answer = await proxy.get("/nothing", headers={"x-request-id": "mine"})
    assert (answer.status, answer.headers["x-request-id"]) == (404, "mine")


def test_only_attempts_with_work_take_from_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmproxy.core.retry.RETRY_RESERVE", 1.0)
    budget = RetryBudget(0.5)
    for verdict in (Verdict.LOST, Verdict.CONNECT_FAILED, Verdict.DRAINING):
        assert all(budget.take(verdict) for _ in range(10))
    assert budget.take(Verdict.FAILED)
    assert not budget.take(Verdict.FAILED)
    budget.request()
    budget.request()
    assert budget.take(Verdict.FAILED)
