"""Admin pages are reached by operators only, on a port of their own where there is one."""

from __future__ import annotations

from typing import Any

import pytest

from llmproxy.config import hash_of
from llmproxy.gateway.http.routes import LOAD_ADAPTER, UNLOAD_ADAPTER, is_administrative
from tests.e2e.proxies import CHAT, FAST, HELLO, serving

KEY = {"authorization": "Bearer for-admins"}
AFAR = {"x-forwarded-for": "1.2.3.4"}
"""A proxy on this machine forwards requests of a client elsewhere."""
PAGES = ("/metrics", "/debug/queue", "/debug/explain", "/debug/adapters", "/debug/live", "/scale")
CHANGES = (LOAD_ADAPTER, UNLOAD_ADAPTER, "/admin/reload", "/admin/backends/b0/drain")
TENANT: dict[str, Any] = {"tenants": [{"name": "acme", "keys": [hash_of("acme-1")]}]}
ACME = {"authorization": "Bearer acme-1"}


@pytest.mark.parametrize("path", [*PAGES, *CHANGES, "/debug", "/admin", "/debug/nothing"])
def test_one_rule_covers_every_administrative_path(path: str) -> None:
    assert is_administrative(path)


@pytest.mark.parametrize("path", [CHAT, "/health", "/ready", "/version", "/v1/models", "/administration", "/debugger"])
def test_no_other_path_is_administrative(path: str) -> None:
    assert not is_administrative(path)


async def test_with_a_port_of_their_own_these_paths_are_nowhere_else() -> None:
    async with serving(FAST, admin={"port": 0}, admin_key=hash_of("for-admins")) as proxy:
        assert proxy.app.admin_url is not None
        assert proxy.app.admin_url.startswith("http://127.0.0.1:")
        for path in PAGES:
            assert (await proxy.get(path, headers=KEY)).status == 404
            assert (await proxy.get(proxy.app.admin_url + path, headers=KEY)).status == 200
            assert (await proxy.request("POST", proxy.app.admin_url + path, {}, headers=KEY)).status == 405
            assert (await proxy.get(proxy.app.admin_url + path)).status == (200 if path == "/metrics" else 401)
        change = {"lora_name": "new", "lora_path": "/x"}
        assert (await proxy.post(LOAD_ADAPTER, change, headers=KEY)).status == 404
        assert (await proxy.post(proxy.app.admin_url + LOAD_ADAPTER, change)).status == 401
        assert (await proxy.post(proxy.app.admin_url + LOAD_ADAPTER, change, headers=KEY)).status == 200
        assert (await proxy.chat(HELLO | {"model": "new"})).status == 200


async def test_clients_are_served_on_their_own_port_alone() -> None:
    async with serving(FAST, admin={"port": 0}) as proxy:
        for path in ("/v1/models", "/v1/models/base", "/v1/responses/resp_1", "/"):
            assert (await proxy.get(f"{proxy.app.admin_url}{path}")).status == 404
        assert (await proxy.post(f"{proxy.app.admin_url}{CHAT}", HELLO)).status == 404
        for path in ("/health", "/ready", "/version"):
            assert (await proxy.get(f"{proxy.app.admin_url}{path}")).status == 200
            assert (await proxy.get(path)).status == 200


async def test_from_elsewhere_the_port_serves_metrics_or_the_key() -> None:
    async with serving(FAST, admin={"port": 0}, admin_key=hash_of("for-admins"), **TENANT) as proxy:
        for path in PAGES[1:]:
            assert (await proxy.get(f"{proxy.app.admin_url}{path}", headers=AFAR)).status == 404
            assert (await proxy.get(f"{proxy.app.admin_url}{path}", headers=AFAR | KEY)).status == 200
        assert (await proxy.get(f"{proxy.app.admin_url}/metrics", headers=AFAR)).status == 200


ADMIN: dict[str, Any] = {"admin_key": hash_of("for-admins")}


@pytest.mark.parametrize(
    ("config", "status", "local"),
    [
        ({}, 200, 200),
        ({"api_keys": ["k"]}, 200, 200),
        (ADMIN, 401, 401),
        (TENANT, 401, 200),
        (TENANT | ADMIN, 401, 401),
        (TENANT | ADMIN | {"admin": {"public_metrics": True}}, 200, 200),
    ],
)
async def test_metrics_need_the_admin_key_where_there_is_one_and_where_they_name_tenants(
    config: dict[str, Any], status: int, local: int
) -> None:
    async with serving(FAST, **config) as proxy:
        assert (await proxy.get("/metrics")).status == local
        for headers in (AFAR, AFAR | ACME):
            answer = await proxy.get("/metrics", headers=headers)
            assert answer.status == status
            assert (b"llmproxy_" in answer.body) is (status == 200)
        if status == 401:
            assert b"admin_key" in answer.body
            assert (await proxy.get("/metrics", headers=AFAR | KEY)).status == (200 if "admin_key" in config else 401)


LOOK = ("/debug", "/debug/live", "/debug/queue", "/admin/backends", "/admin/cluster", "/scale", "/scale/base", *PAGES)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8080", "[::1]", "", "llm.example.com"])
async def test_with_an_admin_key_nothing_is_open_to_this_machine_but_probes(host: str) -> None:
    async with serving(FAST, **TENANT, **ADMIN) as proxy:
        for path in LOOK:
            for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}, AFAR, ACME):
                answer = await proxy.get(path, headers=headers)
                assert answer.status in (401, 404), path
                assert answer.json["error"]["message"]
        for path in ("/health", "/ready", "/version", "/ui"):
            assert (await proxy.get(path)).status == 200


@pytest.mark.parametrize("path", CHANGES)
async def test_a_change_needs_the_key_even_on_this_machine(path: str) -> None:
    async with serving(FAST, admin_key=hash_of("for-admins"), api_keys=["acme-1"]) as proxy:
        for method in ("POST", "PUT", "DELETE"):
            assert (await proxy.request(method, path, {}, headers=AFAR)).status == 404, "there is nothing for others"
            assert (await proxy.request(method, path, {}, headers=ACME)).status == 401
            assert (await proxy.request(method, path, {})).status == 401
            assert (await proxy.request(method, path, {}, headers=KEY)).status != 401
        assert (await proxy.get(path, headers=KEY)).headers["allow"] == "POST"


async def test_a_change_without_a_configured_key_explains_it() -> None:
    async with serving(FAST) as proxy:
        answer = await proxy.post("/admin/reload", None)
        assert answer.status == 401
        assert b"llmproxy hash-key --new" in answer.body
        assert b"hash-key" not in (await proxy.post("/admin/reload", None, headers=AFAR)).body
    async with serving(FAST, admin_key=hash_of("for-admins")) as proxy:
        answer = await proxy.post("/admin/reload", None)
        assert answer.status == 401
        assert b"Authorization: Bearer" in answer.body
