"""CORS fields of all answers to pages of other origins. Other clients get no such fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmproxy.config import hash_of
from llmproxy.gateway.http.cors import EXPOSED
from tests.e2e.proxies import CHAT, FAST, HELLO, STREAM, Answer, ProxyUnderTest, serving
from tests.e2e.scripted import answering, serving_script, whole

APP, OTHER = "https://app.example", "https://other.example"
ASKED = {
    "origin": APP,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os,anthropic-dangerous-direct-browser-access",  # noqa: E501
}
ALLOWED: dict[str, Any] = {"clients": {"allowed_origins": [APP, "http://localhost:3000"]}}


def cors(answer: Answer) -> dict[str, str]:
    """Returns the CORS fields of an answer by names without their prefix. No field may occur twice."""
    prefix = "access-control-"
    fields = [(name.lower(), value) for name, value in answer.headers.items()]
    found = [(name.removeprefix(prefix), value) for name, value in fields if name.startswith(prefix)]
    assert len(dict(found)) == len(found)
    return dict(found)


def varies(answer: Answer) -> list[str]:
    return sorted(name.strip().lower() for value in answer.headers.getall("vary", []) for name in value.split(","))


READABLE = {"allow-origin": APP, "expose-headers": EXPOSED}


async def test_a_preflight_is_answered_for_pages_of_an_allowed_origin() -> None:
    async with serving(FAST, **ALLOWED) as proxy:
        for path in (CHAT, "/v1/models", "/v1/messages?beta=true", "/nothing"):
            answer = await proxy.request("OPTIONS", path, headers=ASKED)
            assert (answer.status, answer.body) == (204, b"")
            assert cors(answer) == READABLE | {
                "allow-methods": "GET, HEAD, POST",
                "allow-headers": ASKED["access-control-request-headers"],
                "max-age": "600",
            }
            assert varies(answer) == ["access-control-request-headers", "origin"]
        asked = ASKED | {"access-control-request-private-network": "true"}
        assert cors(await proxy.request("OPTIONS", CHAT, headers=asked))["allow-private-network"] == "true"
        broken = ASKED | {"access-control-request-headers": "a b, c"}
        assert "allow-headers" not in cors(await proxy.request("OPTIONS", CHAT, headers=broken))
        assert proxy.outcomes() == {}
        assert not [seen for seen in proxy.replicas[0].requests_seen if seen.method == "OPTIONS"]


async def test_a_preflight_of_another_origin_is_refused_in_words() -> None:
    async with serving(FAST, **ALLOWED) as proxy:
        for origin in (OTHER, "null", APP + ":8443", "http://app.example", APP + ".evil.example"):
            answer = await proxy.request("OPTIONS", CHAT, headers=ASKED | {"origin": origin})
            assert (answer.status, cors(answer), varies(answer)) == (403, {}, ["origin"])
            assert "clients.allowed_origins" in answer.json["error"]["message"]
        asked = b"OPTIONS /v1/models HTTP/1.1\r\nHost: a\r\nAccess-Control-Request-Method: POST\r\nOrigin: http://\xff\r\n\r\n"
        async with proxy.wire(asked) as (reader, _):
            assert (await reader.readline()).startswith(b"HTTP/1.1 403 ")


async def test_request_that_is_no_preflight_is_answered_as_ever() -> None:
    async with serving(FAST, **ALLOWED) as proxy:
        plain = await proxy.request("OPTIONS", CHAT, headers={"origin": APP})
        assert (plain.status, plain.headers["allow"]) == (405, "POST")
        assert cors(plain) == READABLE


@pytest.mark.parametrize("body", [HELLO, STREAM, HELLO | {"max_tokens": -1}, HELLO | {"model": "nobody"}, b"{"])
async def test_any_answer_may_be_read_by_the_pages_that_are_allowed_to_ask(body: Any) -> None:
    async with serving(FAST, **ALLOWED) as proxy:
        assert cors(await proxy.chat(body, headers={"origin": APP})) == READABLE
        for headers in ({}, {"origin": OTHER}):
            other = await proxy.chat(body, headers=headers)
            assert (cors(other), varies(other)) == ({}, ["origin"])


async def test_refusals_may_be_read_too() -> None:
    async with serving(FAST, tenants=[{"name": "one", "keys": [hash_of("k")]}], **ALLOWED) as proxy:
        unauthorized = await proxy.chat(headers={"origin": APP})
        assert (unauthorized.status, cors(unauthorized)) == (401, READABLE)
    clients = ALLOWED["clients"] | {"address_requests_per_s": 1e-3}
    async with serving(FAST, clients=clients) as proxy:
        assert (await proxy.chat(headers={"origin": APP})).status == 200
        limited = await proxy.chat(headers={"origin": APP})
        assert (limited.status, cors(limited)) == (429, READABLE)
        assert (await proxy.request("OPTIONS", CHAT, headers=ASKED)).status == 204, "to ask is free"
    async with serving(extra=["http://127.0.0.1:9"], wait=False, **ALLOWED) as proxy:
        nobody = await proxy.chat(headers={"origin": APP})
        assert (nobody.status, cors(nobody)) == (503, READABLE)
        assert "retry-after" in cors(nobody)["expose-headers"]


async def test_anybody_may_ask_where_all_origins_are_allowed() -> None:
    async with serving(FAST, clients={"allowed_origins": ["*"]}) as proxy:
        for origin in (APP, "null"):
            asked = await proxy.request("OPTIONS", CHAT, headers=ASKED | {"origin": origin})
            assert (asked.status, cors(asked)["allow-origin"]) == (204, "*")
            assert cors(await proxy.chat(headers={"origin": origin}))["allow-origin"] == "*"
        assert cors(await proxy.get("/v1/models"))["allow-origin"] == "*", "a cache may give it to anybody"


ENGINE = b"""access-control-allow-origin: *\r\naccess-control-allow-credentials: true\r\nvary: Accept, ORIGIN\r\n"""


async def of_an_engine(proxy: ProxyUnderTest, **headers: str) -> tuple[Answer, Answer]:
    made = await proxy.post("/v1/responses", {"model": "base", "input": "x"}, headers=headers)
    return made, await proxy.get("/v1/responses/resp_1", headers=headers)


@pytest.mark.parametrize("config", [ALLOWED, {}])
async def test_cors_fields_of_an_engine_are_replaced(config: dict[str, Any]) -> None:
    stored = whole(b'{"id":"resp_1","object":"response"}').replace(b"\r\n\r\n", b"\r\n" + ENGINE + b"\r\n", 1)
    async with serving_script(answering(stored), **config) as (proxy, backend):
        backend.polls[b"/v1/responses/resp_1"] = answering(stored)
        for answer in await of_an_engine(proxy, origin=APP):
            own = {"allow-origin": "*", "allow-credentials": "true"}
            assert cors(answer) == (READABLE if config else own)
            assert varies(answer) == ["accept", "origin"]


async def test_unless_configured_nothing_is_different_for_a_page() -> None:
    async with serving(FAST) as proxy:
        asked = await proxy.request("OPTIONS", CHAT, headers=ASKED)
        assert (asked.status, cors(asked), varies(asked)) == (405, {}, [])
        for path in ("/v1/models", "/nothing", "/version"):
            answer = await proxy.get(path, headers={"origin": APP})
            assert (cors(answer), varies(answer)) == ({}, [])
        assert cors(await proxy.chat(headers={"origin": APP})) == {}


@pytest.mark.parametrize("admin", [{}, {"port": 0}])
async def test_admin_pages_are_closed_to_web_pages(admin: dict[str, int]) -> None:
    async with serving(FAST, admin=admin, clients={"allowed_origins": ["*"]}) as proxy:
        base = proxy.app.admin_url if admin else proxy.url
        paths = ["/metrics", "/debug/queue", "/admin/backends", "/admin/backends/", "/v1/load_lora_adapter", "/debug/x"]
        for path in paths + (["/health", "/version", "/nothing"] if admin else []):
            for method in ("OPTIONS", "GET"):
                answer = await proxy.request(method, f"{base}{path}", headers=ASKED)
                assert (cors(answer), varies(answer)) == ({}, []), path
                assert answer.status != 204


async def test_origins_come_and_go_with_a_reload(tmp_path: Path) -> None:
    async with serving(FAST, file=tmp_path / "c.yaml", reload="signal") as proxy:
        file = tmp_path / "c.yaml"
        was = file.read_text()
        assert (await proxy.request("OPTIONS", CHAT, headers=ASKED)).status == 405
        file.write_text(was[:-1] + f', "clients": {{"allowed_origins": ["{APP}"]}}}}')
        assert proxy.app.reloader is not None
        done = await proxy.app.reloader.reload("test")
        assert ([change.key for change in done.changes], done.needs_restart) == (["clients.allowed_origins"], ())
        assert (await proxy.request("OPTIONS", CHAT, headers=ASKED)).status == 204
        assert cors(await proxy.chat(headers={"origin": APP})) == READABLE
        file.write_text(was)
        await proxy.app.reloader.reload("test")
        assert cors(await proxy.chat(headers={"origin": APP})) == {}
