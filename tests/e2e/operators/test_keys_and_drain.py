"""Who may come in, which keys go where, and how the proxy closes."""

from __future__ import annotations

import asyncio
import io
import os
from dataclasses import replace

import aiohttp
import pytest

from llmproxy.app import running
from llmproxy.config import Config, hash_of
from llmproxy.lifecycle.sockets import Sockets
from tests.e2e.proxies import CHAT, ENDLESS, FAST, HELLO, STREAM, ProxyUnderTest, one_seat, serving, until

GUARDED = replace(FAST, api_key="engine-key")
PRIVILEGES = {
    "x-llm-d-inference-objective": "critical",
    "x-gateway-inference-fairness-id": "me",
    "x-slo-ttft-ms": "50",
    "x-vllm-priority": "-9",
    "x-team": "blue",
}
TENANTS = [
    {"name": "acme", "keys": [hash_of("acme-1")]},
    {"name": "small", "keys": [hash_of("small-1")], "models": ["lora-0"]},
    {"name": "gateway", "keys": [hash_of("gateway-1")], "trusted": True},
]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer"}, {"authorization": "Basic key-1"},
     {"x-api-key": "wrong"}, {"authorization": "Bearer key-1 "+"x"}],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/models", "/v1/responses/resp_1"])
async def test_a_request_without_a_key_is_refused(headers: dict[str, str], path: str) -> None:
    async with serving(FAST, api_keys=["key-1", "key-2"]) as proxy:
        method = "POST" if path in (CHAT, "/v1/messages") else "GET"
        answer = await proxy.request(method, path, HELLO if method == "POST" else None, headers=headers)
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        kind = "authentication_error" if path == "/v1/messages" else "AuthenticationError"
        assert answer.json["error"]["type"] == kind
        assert proxy.outcomes() == {"unauthorized": 1}
        for page in ("/health", "/ready", "/metrics", "/version"):
            assert (await proxy.get(page)).status == 200


@pytest.mark.parametrize("headers", [{"authorization": "bearer key-2"}, {"x-api-key": "key-1"}])
async def test_a_clients_key_stays_here_and_the_backends_own_is_sent(headers: dict[str, str]) -> None:
    async with serving(GUARDED, api_keys=["key-1", "key-2"], backend_api_key="engine-key") as proxy:
        assert (await proxy.chat(headers=headers)).status == 200
        seen = proxy.sent().headers
        assert seen["authorization"] == "Bearer engine-key"
        assert "x-api-key" not in seen
        made = await proxy.post(
            "/v1/responses", {"model": "base", "input": "a", "max_output_tokens": 2}, headers=headers
        )
        assert (await proxy.get(f"/v1/responses/{made.json['id']}", headers=headers)).status == 200
        assert proxy.sent().headers["authorization"] == "Bearer engine-key"


async def test_a_wrong_backend_key_gets_the_engines_own_error() -> None:
    async with serving(GUARDED, FAST, wait=False, backend_api_key="wrong") as proxy:
        await until(lambda: proxy.app.pools.catalogue.models())
        assert (await proxy.chat(HELLO | {"model": "base"})).status == 200, "the other backend serves"
        assert proxy.app.pools.backends["b0"].listing is None


async def test_a_model_that_is_not_for_a_tenant_does_not_exist_for_it() -> None:
    async with serving(FAST, tenants=TENANTS) as proxy:
        small, acme = bearer("small-1"), bearer("acme-1")
        assert (await proxy.chat(HELLO | {"model": "lora-0"}, headers=small)).status == 200
        hidden = await proxy.chat(HELLO | {"model": "lora-1"}, headers=small)
        unknown = await proxy.chat(HELLO | {"model": "lora-9"}, headers=small)
        assert hidden.status == unknown.status == 404
        assert hidden.body == unknown.body.replace(b"lora-9", b"lora-1")
        listed = [entry["id"] for entry in (await proxy.get("/v1/models", headers=small)).json["data"]]
        assert listed == ["lora-0"]
        assert (await proxy.get("/v1/models/lora-0", headers=small)).status == 200
        assert (await proxy.get("/v1/models/lora-1", headers=small)).status == 404
        assert (await proxy.get("/v1/models/lora-1", headers=acme)).status == 200
        assert len((await proxy.get("/v1/models", headers=acme)).json["data"]) == 3


async def test_a_tenant_sees_only_its_own_models() -> None:
    other = {"name": "other", "keys": [hash_of("other-1")], "models": ["lora-0", "not-yet"]}
    async with serving(FAST, tenants=[other]) as proxy:
        for model, status in (("not-yet", 404), ("base", 404), ("", 400)):
            answer = await proxy.chat(HELLO | {"model": model}, headers=bearer("other-1"))
            assert answer.status == status
            assert b"lora-1" not in answer.body
            assert b"base" not in answer.body.replace(b"`base`", b""), "but where it was asked for"
        assert b"lora-0, not-yet" in answer.body
        assert proxy.outcomes() == {"unknown_model": 2, "bad_request": 1}


async def test_a_tenant_that_sends_more_than_it_may_has_missed_no_objective() -> None:
    eager = {"name": "eager", "keys": [hash_of("eager-1")], "ttft_s": 60.0, "limits": {"requests_per_min": 1}}
    async with serving(FAST, tenants=[eager]) as proxy:
        statuses = [(await proxy.chat(STREAM, headers=bearer("eager-1"))).status for _ in range(3)]
        assert statuses == [200, 429, 429]
        assert (proxy.metric("llmproxy_objectives_total", result="met"), proxy.outcomes()["rate_limited"]) == (1, 2)
        assert proxy.metric("llmproxy_objectives_total", result="missed") == 0


async def test_headers_of_untrusted_tenants_are_removed() -> None:
    async with serving(FAST, tenants=TENANTS, trust_headers="none", scheduling={"flow": "header:x-team"}) as proxy:
        assert (await proxy.chat(headers=bearer("acme-1") | PRIVILEGES)).status == 200
        assert not PRIVILEGES.keys() & {name.lower() for name in proxy.sent().headers}
        assert (await proxy.chat(headers=bearer("gateway-1") | PRIVILEGES)).status == 200
        assert PRIVILEGES.items() <= {name.lower(): value for name, value in proxy.sent().headers.items()}.items()


async def test_draining() -> None:
    async with one_seat(ENDLESS | {"max_tokens": 300}) as (proxy, running_stream):
        waiting = [proxy.waiting(), proxy.waiting(STREAM)]
        await until(lambda: proxy.queued == 2)
        draining = asyncio.create_task(proxy.app.drain())
        for task in waiting:
            answer = await task
            assert (answer.status, answer.json["error"]["type"]) == (503, "ServiceUnavailableError")
            assert int(answer.headers["retry-after"]) >= 1
        assert not draining.done()
        ready = await proxy.get("/ready")
        assert (ready.status, ready.json["reason"]) == (503, "draining")
        assert (await proxy.get("/health")).status == 200
        for path in (CHAT, "/v1/messages"):
            async with aiohttp.ClientSession() as newcomer, newcomer.post(proxy.url + path, json=HELLO) as refused:
                assert refused.status == 503, "the listener stays open"
                assert int(refused.headers["retry-after"]) >= 1
        assert (await running_stream.content.read()).endswith(b"data: [DONE]\n\n"), "what runs runs to its end"
        assert await draining
        assert proxy.outcomes() == {"draining": 4, "completed": 1}


async def test_draining_has_an_end() -> None:
    async with serving(FAST, drain_timeout_s=0.1) as proxy, proxy.stream() as running_stream:
        await running_stream.content.readany()
        assert not await proxy.app.drain()
        assert proxy.app.handler.open_requests == 1


async def test_a_request_that_fails_while_draining_is_not_tried_elsewhere() -> None:
    async with serving(FAST, FAST, fixed_limit=1, scheduling={"placement": "round_robin"}) as proxy:
        proxy.replicas[0].faults.set("frozen")
        waiting = proxy.waiting(STREAM)
        await until(lambda: proxy.replicas[0].in_flight == 1)
        draining = asyncio.create_task(proxy.app.drain())
        await until(lambda: proxy.app.dispatcher.draining)
        proxy.replicas[0].faults.clear()
        proxy.replicas[0].faults.set("refuse")
        assert (await waiting).status == 502
        assert await draining
        assert not [seen for seen in proxy.replicas[1].requests_seen if seen.method == "POST"]


async def test_a_port_that_is_taken_is_an_os_error(proxy: ProxyUnderTest) -> None:
    config = Config.model_validate({"host": "127.0.0.1", "port": int(proxy.url.rpartition(":")[2]), "backends": []})
    with pytest.raises(OSError, match="in use"):
        async with running(config):
            pass


async def test_drain_may_finish_waiting_requests() -> None:
    async with one_seat(ENDLESS | {"max_tokens": 300}, drain_queued="finish") as (proxy, _):
        waiting = [proxy.waiting(), proxy.waiting(STREAM)]
        await until(lambda: proxy.queued == 2)
        draining = asyncio.create_task(proxy.app.drain())
        await until(lambda: proxy.app.dispatcher.draining)
        assert (await proxy.chat()).status == 503, "new requests are refused all the same"
        assert [(await task).status for task in waiting] == [200, 200]
        assert await draining
        assert proxy.outcomes() == {"draining": 1, "completed": 3}


async def test_requests_that_wait_at_the_end_of_a_drain_are_refused() -> None:
    async with one_seat(drain_queued="finish", drain_timeout_s=0.05) as (proxy, _):
        waiting = proxy.waiting()
        await until(lambda: proxy.queued == 1)
        assert not await proxy.app.drain()
        answer = await waiting
        assert (answer.status, answer.headers["connection"]) == (503, "close")


@pytest.mark.slow
async def test_a_kept_connection_is_served_once_more_after_a_handover() -> None:
    one_place = serving(FAST, fixed_limit=1, scheduling={"look_ahead": 0})
    async with one_place as proxy, aiohttp.ClientSession() as idle, idle.get(proxy.url + "/health") as kept:
        await kept.read()
        async with proxy.stream(ENDLESS | {"max_tokens": 300}) as running_stream:
            await running_stream.content.readany()
            waiting = proxy.waiting()
            await until(lambda: proxy.queued == 1)
            handing_over = asyncio.create_task(proxy.app.hand_over())
            await until(lambda: proxy.app.handler.shutting_down)
            async with aiohttp.ClientSession() as newcomer:
                with pytest.raises(aiohttp.ClientConnectorError):
                    await newcomer.get(proxy.url + "/health")
            assert (await running_stream.content.read()).endswith(b"data: [DONE]\n\n")
            answer = await waiting
            assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert not handing_over.done(), "one client has kept its connection, and may send on it"
        async with idle.post(proxy.url + CHAT, json=HELLO) as last:
            assert (last.status, last.headers["connection"]) == (200, "close")
            await last.read()
        await handing_over


async def test_a_successor_hears_from_its_backends_before_it_accepts(proxy: ProxyUnderTest) -> None:
    config = Config.model_validate({"host": "127.0.0.1", "port": 0, "backends": [{"url": proxy.replicas[0].url}]})
    reads, writes = os.pipe()
    for ready_fd in (None, writes):
        sockets = Sockets(ready_fd)
        async with running(config, sockets=sockets) as started:
            assert bool(started.pools.catalogue.models()) is (ready_fd is not None)
            sockets.serving()
    assert os.read(reads, 1) == b"1"
    os.close(reads)


@pytest.mark.parametrize(
    ("sent", "logged"),
    [
        ("curl/8.5", "user_agent=curl/8.5 "),
        ('x" status=500', r'user_agent="x\" status=500" '),
        ("<b>é", "user_agent=<b>é "),
        ("long " * 40, f'user_agent="{("long " * 40)[:64]}" '),
    ],
)
async def test_client_of_a_request_is_logged_and_remembered(sent: str, logged: str, log: io.StringIO) -> None:
    async with serving(FAST, clients={"trusted_proxies": ["127.0.0.1"]}) as proxy:
        headers = {"user-agent": sent, "x-forwarded-for": "203.0.113.9", "x-request-id": "who"}
        assert (await proxy.chat(headers=headers)).status == 200
        proxy.app.flush_records()
        (line,) = [line for line in log.getvalue().splitlines() if " request " in line]
        assert f" client=203.0.113.9 {logged}" in line
        ended = proxy.app.recorder.recent.find("who")
        assert ended is not None
        assert (ended.client, ended.user_agent, ended.key) == ("203.0.113.9", sent[:64], None)
