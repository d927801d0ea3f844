"""Paths besides inference that the proxy serves or refuses, and its own pages."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmproxy import __version__
from llmproxy.config import hash_of
from llmproxy.gateway.http.routes import LOAD_ADAPTER, SCHEDULED, UNLOAD_ADAPTER
from tests.e2e.proxies import FAST, HELLO, ProxyUnderTest, is_poll, serving, until
from tests.e2e.vllm.vllm_requests import PATHS
from tests.gateway.http.test_routes import MANAGEMENT

RESPONSES = {"model": "base", "input": "Hello there", "max_output_tokens": 3}


async def test_models_are_the_union_of_all_pools_and_the_aliases() -> None:
    other = replace(FAST, model="other", adapters=("lora-9",), max_model_len=1000)
    async with serving(
        FAST, other, models=[{"name": "gpt", "target": "lora-0"}, {"name": "gone", "target": "nobody"}]
    ) as proxy:
        listed = (await proxy.get("/v1/models")).json
        assert listed["object"] == "list"
        cards = {card["id"]: card for card in listed["data"]}
        assert list(cards) == ["base", "other", "lora-0", "lora-1", "lora-9", "gpt"]
        direct = {card["id"]: card for card in (await proxy.get(proxy.replicas[1].url + "/v1/models")).json["data"]}
        for name in ("other", "lora-9"):
            # An engine makes two fields anew for each answer.
            made_anew = {field: direct[name][field] for field in ("created", "permission")}
            assert cards[name] | made_anew == direct[name], "real fields are kept"
        assert cards["other"]["max_model_len"] == 1000
        assert (cards["gpt"]["root"], cards["gpt"]["parent"]) == ("lora-0", "base")
        for name in cards:
            assert (await proxy.chat(HELLO | {"model": name})).status == 200
            assert (await proxy.get(f"/v1/models/{name}")).json == cards[name]
        assert (await proxy.get("/v1/models/nobody")).status == 404
        assert (await proxy.chat(HELLO | {"model": "other"})).backend == "b1"


async def test_a_model_that_requests_may_name_is_there_though_it_is_not_listed() -> None:
    tenant = {"name": "small", "keys": [hash_of("small-1")], "models": ["org/any"]}
    async with serving(FAST, models=[{"name": "*", "target": "lora-0"}], tenants=[tenant]) as proxy:
        small = {"authorization": "Bearer small-1"}
        found = (await proxy.get("/v1/models/org%2Fany", headers=small | {"anthropic-version": "1"})).json
        assert (found["id"], found["root"], found["parent"]) == ("org/any", "lora-0", "base")
        assert found["display_name"] == "org/any"
        assert (await proxy.get("/v1/models/other", headers=small)).status == 404
        assert (await proxy.get("/v1/models/org/any")).status == 401


async def test_health_and_version_need_no_backend() -> None:
    async with serving(wait=False, extra=["http://127.0.0.1:9"]) as proxy:
        unread = await proxy.get("/v1/models/any")
        assert (unread.status, unread.headers["retry-after"]) == (503, "1")
        assert (await proxy.get("/health")).status == 200
        assert (await proxy.get("/version")).json == {"version": __version__}
        ready = await proxy.get("/ready")
        assert (ready.status, ready.json["ready"]) == (503, False)
        assert int(ready.headers["retry-after"]) >= 1


async def test_ready_follows_the_backends(proxy: ProxyUnderTest) -> None:
    assert (await proxy.get("/ready")).status == 200
    proxy.replicas[0].faults.set("refuse")
    proxy.replicas[1].faults.set("refuse")
    await until(lambda: all(backend.health.down for backend in proxy.app.pools.backends.values()))
    assert (await proxy.get("/ready")).status == 503
    assert (await proxy.get("/health")).status == 200
    await proxy.replicas[1].restart()
    await until(lambda: not proxy.app.pools.backends["b1"].health.down)
    assert (await proxy.get("/ready")).status == 200


async def test_ready_without_a_replica_if_requests_are_held_for_one() -> None:
    scaling = {"pools": ["base"], "min": 0}
    async with serving(
        wait=False, extra=["http://127.0.0.1:9"], scaling=scaling, queue={"no_backend_wait_s": 30.0}
    ) as proxy:
        assert (await proxy.get("/ready")).json == {"ready": True}
    async with serving(
        wait=False, extra=["http://127.0.0.1:9"], scaling=scaling, queue={"no_backend_wait_s": 0.0}
    ) as proxy:
        assert (await proxy.get("/ready")).status == 503


@pytest.mark.parametrize("path", ["/", "/ping"])
async def test_probes_of_clients_are_answered_and_no_bad_requests(proxy: ProxyUnderTest, path: str) -> None:
    got = await proxy.get(path)
    assert (got.status, (await proxy.request("HEAD", path)).status) == (200, 200)
    assert (await proxy.post(path, {})).status == (200 if path == "/ping" else 405)
    if path == "/":
        assert got.json["name"] == "llmproxy"
        assert proxy.outcomes() == {"bad_request": 1}, "only the wrong method is counted"
    else:
        assert (got.body, proxy.outcomes()) == (b"", {})


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/realtime?model=base", "/v1/models", "/health"])
async def test_a_websocket_gets_a_hint_and_is_no_error(proxy: ProxyUnderTest, path: str) -> None:
    opening = f"GET {path} HTTP/1.1\r\nhost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
    async with proxy.wire(f"{opening}sec-websocket-version: 13\r\n\r\n".encode()) as (reader, _):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 426 Upgrade Required\r\n")
    assert {b"Upgrade: HTTP/1.1", b"Connection: upgrade, close"} <= set(head.split(b"\r\n"))
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == (426, "UpgradeRequiredError")
    assert "a POST" in error["message"]
    assert proxy.outcomes() == {}


async def test_clients_of_anthropics_api_get_its_fields_of_models(proxy: ProxyUnderTest) -> None:
    plain = (await proxy.get("/v1/models")).json
    asked = {"anthropic-version": "2023-06-01"}
    listed = (await proxy.get("/v1/models?limit=1000", headers=asked)).json
    assert plain.keys() == {"object", "data"}
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("base", "lora-1", False)
    for card, more in zip(plain["data"], listed["data"], strict=True):
        assert card.items() <= more.items()
        assert (more["type"], more["display_name"]) == ("model", card["id"])
        assert datetime.fromisoformat(more["created_at"]).timestamp() == card["created"]
        assert (await proxy.get(f"/v1/models/{card['id']}", headers=asked)).json == more


async def test_without_models_anthropics_list_has_no_ends() -> None:
    async with serving(wait=False, extra=["http://127.0.0.1:9"]) as proxy:
        listed = (await proxy.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json
        assert listed == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_tokenizer_info_of_an_engine_is_passed_on(proxy: ProxyUnderTest) -> None:
    direct = await proxy.get(proxy.replicas[0].url + "/tokenizer_info")
    got = await proxy.get("/tokenizer_info")
    assert (got.status, got.body) == (200, direct.body)
    assert proxy.sent(got.backend).method == "GET"
    assert (await proxy.get("/tokenizer_info?model=lora-0")).status == 200
    assert (await proxy.get("/tokenizer_info?model=nobody")).status == 404
    refused = await proxy.post("/tokenizer_info", {})
    assert (refused.status, refused.headers["allow"]) == (405, "GET")


async def test_the_tokenizer_of_the_named_model_is_used() -> None:
    async with serving(FAST, replace(FAST, model="other"), models=[{"name": "alias", "target": "other"}]) as proxy:
        refused = await proxy.get("/tokenizer_info")
        assert refused.status == 400
        assert "set `model` to one of base, other" in refused.json["error"]["message"]
        for model, backend in (("base", "b0"), ("other", "b1"), ("alias", "b1")):
            assert (await proxy.get(f"/tokenizer_info?model={model}")).backend == backend


async def test_metrics_can_be_scraped(proxy: ProxyUnderTest) -> None:
    await proxy.chat()
    await proxy.chat(HELLO | {"model": "made-up-by-a-client"})
    async with proxy.stream() as response:
        await response.content.readany()
        page = await proxy.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        families = {family.name: family for family in text_string_to_metric_families(page.body.decode())}
        in_flight = {s.labels["backend"]: s.value for s in families["llmproxy_in_flight_requests"].samples}
        assert sorted(in_flight.values()) == [0, 1]
        queued = {s.labels["band"]: s.value for s in families["llmproxy_queued_requests"].samples}
        assert queued == {"critical": 0, "default": 0, "sheddable": 0, "idle": 0}
        ended = {(s.labels["outcome"], s.labels["model"]): s.value for s in families["llmproxy_requests"].samples}
        assert ended == {("completed", "base"): 1, ("unknown_model", "unknown"): 1}, "clients make no labels"
    await proxy.settled()
    assert proxy.outcomes()["cancelled"] == 1


async def test_a_page_has_a_method(proxy: ProxyUnderTest) -> None:
    for path in ("/health", "/ready", "/metrics", "/version", "/v1/models"):
        assert (await proxy.get(path)).status == 200
        assert (await proxy.request("HEAD", path)).status == 200
        refused = await proxy.post(path, {})
        assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "path",
    [
        "/sim/fault", "/docs", "/openapi.json", "/debug", "/debug/queue/x", "/debug/pools", "/v1", "/v1/chat",
        "/v1/chat/completions/../../../sleep", "/v1/chat/completions/x", "//v1/chat/completions",
        "/V1/chat/completions",
    ],
)  # fmt: skip
async def test_unknown_paths_reach_no_engine(proxy: ProxyUnderTest, path: str) -> None:
    for method, body in (("GET", None), ("POST", {"lora_name": "x", "lora_path": "x"})):
        answer = await proxy.request(method, path, body)
        assert (answer.status, answer.json["error"]["code"]) == (404, 404)
    assert not [seen for replica in proxy.replicas for seen in replica.requests_seen if not is_poll(seen)]


OWN = {
    "/health", "/ping", "/version", "/metrics", "/v1/models", LOAD_ADAPTER, UNLOAD_ADAPTER,
    "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel",
}  # fmt: skip
"""Paths of vLLM that the proxy answers itself, or serves without placing them."""


def spellings(path: str) -> list[str]:
    """Ways to write a path that a server between a client and an engine might take for the path itself."""
    first, rest = path[1], path[2:]
    return [
        path, path + "/", path + "//", "/" + path, "/." + path, "/v1/.." + path, "/v1/completions/../.." + path,
        f"/%{ord(first):02x}{rest}", f"/v1/%2e%2e{path}", f"/v1/..%2f{path[1:]}", f"/%2f{path[1:]}", f"/{path[1:]}%2f",
        f"/v1/responses/..%2f..{path}", f"/v1/responses/..%2f..{path}/cancel", f"/v1/models/../..{path}",
        f"{path}?x=1", f"{path};x", f"{path}%3fx", f"{path}%00", path.upper(), f"http://other{path}", f"/\\{path[1:]}",
    ]  # fmt: skip


def test_each_path_of_an_engine_is_reached_or_not_by_decision() -> None:
    decided = SCHEDULED.keys() | OWN | set(MANAGEMENT)
    assert not [path for path in PATHS if path not in decided]
    assert not (SCHEDULED.keys() | OWN) & set(MANAGEMENT) - {LOAD_ADAPTER, UNLOAD_ADAPTER}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("path", sorted(set(MANAGEMENT) | {LOAD_ADAPTER, UNLOAD_ADAPTER}))
async def test_no_spelling_of_a_management_path_reaches_an_engine(proxy: ProxyUnderTest, path: str) -> None:
    for method in ("POST", "GET", "DELETE"):
        for spelt in spellings(path):
            body = b'{"lora_name":"x"}'
            head = f"{method} {spelt} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
            async with proxy.wire(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body) as (reader, _):
                status = int((await reader.read()).split(b" ", 2)[1])
            assert status in ({404, 401, 405, 400} if "lora_adapter" in path else {404, 405, 400}), (method, spelt)
    assert not [seen for replica in proxy.replicas for seen in replica.requests_seen if not is_poll(seen)]


async def test_a_trailing_slash_never_becomes_a_redirect(proxy: ProxyUnderTest) -> None:
    for path, body in (("/v1/chat/completions/", HELLO), ("/v1/completions/", {"model": "base", "prompt": "a"})):
        assert (await proxy.post(path, body)).status == 200
    assert (await proxy.get("/v1/models/")).status == 200
    assert (await proxy.get("/health/")).status == 200
    for replica in proxy.replicas:
        assert all(seen.path in SCHEDULED for seen in replica.requests_seen if seen.method == "POST")
