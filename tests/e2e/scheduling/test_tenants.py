"""Tenants see nothing of each other: no names, no answers, and no earlier prompts by response times."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from llmproxy.config import hash_of
from llmproxy.gateway.http.routes import SCHEDULED, BodyKind
from tests.e2e.proxies import FAST, HELLO, REAL, Answer, ProxyUnderTest, decisions, serving
from tests.e2e.scheduling.test_prefix import LONG, cached_tokens, said
from tests.e2e.scripted import answering, breaking, serving_script, whole

TENANTS: list[dict[str, Any]] = [
    {"name": name, "keys": [hash_of(name)], "cache_salt": salt, "trusted": name == "boss"}
    for name, salt in (("acme", "auto"), ("zeta", "auto"), ("open", None), ("boss", "auto"))
]


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


# --- prefix caches ----------------------------------------------------------------------------------------------------


async def sent_with(proxy: ProxyUnderTest, path: str, body: dict[str, Any], tenant: str) -> dict[str, Any]:
    """The body of a request of `tenant` as its backend got it."""
    await proxy.post(path, body, headers=key(tenant))
    sent: dict[str, Any] = json.loads(proxy.sent().body or b"")
    return sent


JSON_POSTS = [p for p, route in SCHEDULED.items() if route.method == "POST" and route.kind is not BodyKind.FORM]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", JSON_POSTS)
async def test_bodies_are_salted_only_where_the_engine_knows_it(path: str) -> None:
    async with serving(FAST, tenants=TENANTS) as proxy:
        body = {"model": "base", "input": "x"}
        bare, own = (
            await sent_with(proxy, path, body, "acme"),
            await sent_with(proxy, path, body | {"cache_salt": "x"}, "acme"),
        )
        if not SCHEDULED[path].salted:
            assert (bare, own) == (body, body | {"cache_salt": "x"})
            return
        salts = {bare.pop("cache_salt"), own.pop("cache_salt"), "x"}
        assert (bare, own, len(salts)) == (body, body, 3)
        assert await sent_with(proxy, path, body | {"cache_salt": "x"}, "open") == body | {"cache_salt": "x"}


async def test_one_request_of_a_tenant_is_bounded_and_others_are_sent_as_they_came() -> None:
    bounded = {"name": "small", "keys": [hash_of("small")], "limits": {"prompt_tokens_max": 100, "max_tokens_max": 6}}
    async with serving(FAST, tenants=[*TENANTS, bounded]) as proxy:
        body = b'{ "messages" : [{"role":"user","content":"hello"}] }'
        for tenant in ("open", "small"):
            assert (await proxy.chat(body, headers=key(tenant))).status == 200
            assert proxy.sent().body == (body if tenant == "open" else body.replace(b"{", b'{"max_tokens":6,', 1))
        long = json.dumps({"messages": [{"role": "user", "content": "word " * 1_000}]}).encode()
        for asked, param in ((long, "prompt"), (b'{"max_tokens": 7, "messages": []}', "max_tokens")):
            error = (await proxy.chat(asked, headers=key("small"))).json["error"]
            assert (error["code"], error["type"], error["param"]) == (400, "BadRequestError", param)
            assert "of the tenant small" in error["message"]


async def test_a_large_body_is_salted_too() -> None:
    large = {"model": "base", "stream": True, "messages": [{"role": "user", "content": "word " * 40_000}]}
    async with serving(FAST, tenants=TENANTS) as proxy:
        for own in ({}, {"cache_salt": "mine"}):
            sent = await sent_with(proxy, "/v1/chat/completions", large | own, "acme")
            assert len(sent["cache_salt"]) == 43
            assert sent["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("own", [{}, {"cache_salt": "guess"}])
async def test_prompts_are_cached_and_expected_by_tenant(tmp_path: Path, own: dict[str, str]) -> None:
    path = tmp_path / "log"
    async with serving(REAL, REAL, tenants=TENANTS, decision_log=str(path)) as proxy:

        async def ask(name: str, tenant: str, *texts: str) -> Answer:
            answer = await proxy.chat(said(*texts) | own, headers=key(tenant) | {"x-request-id": name})
            assert answer.status == 200
            await proxy.settled()
            return answer

        first = await ask("first", "acme", LONG)
        assert cached_tokens(await ask("other", "zeta", LONG)) == 0
        assert cached_tokens(await ask("third", "boss", LONG)) == 0
        answered = first.json["choices"][0]["message"]["content"]
        assert cached_tokens(await ask("again", "acme", LONG, answered, "And?")) > 2000
    expected = {name: line["predicted"]["cached_tokens"] for name, line in decisions(path).items()}
    assert (expected["first"], expected["other"], expected["third"]) == (0, 0, 0)
    assert expected["again"] > 2000


# --- responses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 200_000])
async def test_a_response_of_another_tenant_cannot_be_continued(padding: int) -> None:
    async with serving(FAST, tenants=TENANTS, api_keys=["plain"]) as proxy:
        body = {"model": "base", "input": "a", "max_output_tokens": 2}
        made = (await proxy.post("/v1/responses", body, headers=key("acme"))).json["id"]
        further = body | {"previous_response_id": made, "input": "a" + " b" * (padding // 2)}
        for other in ("zeta", "plain"):
            answer = await proxy.post("/v1/responses", further, headers=key(other))
            assert (answer.status, answer.json["error"]["param"]) == (404, "previous_response_id")
            assert (await proxy.get(f"/v1/responses/{made}", headers=key(other))).status == 404
            assert (await proxy.post(f"/v1/responses/{made}/cancel", None, headers=key(other))).status == 404
        await proxy.post("/v1/responses", further, headers=key("acme"))
        assert json.loads(proxy.sent().body or b"")["previous_response_id"] == made
        invented = body | {"previous_response_id": "resp_invented"}
        assert (await proxy.post("/v1/responses", invented, headers=key("acme"))).status == 404


@pytest.mark.parametrize("padding", [0, 200_000])
@pytest.mark.parametrize("named", ['"request_id"', '"request\\u005fid"', '"store": false, "request_id"'])
async def test_a_client_cannot_choose_the_id_of_a_response(named: str, padding: int) -> None:
    async with serving(FAST, tenants=TENANTS, api_keys=["plain"]) as proxy:
        body = {"model": "base", "input": "the secret of acme", "max_output_tokens": 2}
        made = (await proxy.post("/v1/responses", body, headers=key("acme"))).json
        path, sent = f"/v1/responses/{made['id']}", proxy.sent()
        taking = f'{{"model": "base", "input": "a{" b" * (padding // 2)}", {named}: "{made["id"]}"}}'.encode()
        for other in ("zeta", "plain", "acme"):
            answer = await proxy.post("/v1/responses", taking, headers=key(other))
            assert (answer.status, answer.json["error"]["param"]) == (400, "body.request_id")
        assert proxy.sent() is sent, "no engine heard of it"
        assert [(await proxy.get(path, headers=key(name))).status for name in ("zeta", "plain")] == [404, 404]
        assert (await proxy.get(path, headers=key("acme"))).json == made


async def test_a_response_stays_with_the_tenant_that_made_it_first() -> None:
    async with (
        serving_script(answering(whole(b'{"id":"resp_1","object":"response"}')), tenants=TENANTS) as (proxy, backend),
    ):
        backend.polls[b"/v1/responses/resp_1"] = answering(whole(b"{}"))
        for tenant in ("acme", "zeta"):
            made = await proxy.post("/v1/responses", {"model": "base", "input": "a"}, headers=key(tenant))
            assert made.json["id"] == "resp_1"
        got = [(await proxy.get("/v1/responses/resp_1", headers=key(tenant))).status for tenant in ("acme", "zeta")]
        assert got == [200, 404]


# --- what answers show of the backends --------------------------------------------------------------------------------


async def test_answers_name_their_backend_to_tenants_that_are_trusted_alone() -> None:
    async with serving(FAST, tenants=TENANTS, api_keys=["plain"], trust_headers="none") as proxy:
        body = {"model": "base", "input": "a", "max_output_tokens": 2}
        for tenant, shown in (("acme", False), ("boss", True), ("plain", True)):
            made = await proxy.post("/v1/responses", body, headers=key(tenant))
            kept = await proxy.get(f"/v1/responses/{made.json['id']}", headers=key(tenant))
            assert ["x-llmproxy-backend" in answer.headers for answer in (made, kept)] == [shown, shown]
            assert "x-llmproxy-attempts" in made.headers


async def test_errors_name_no_backend_and_no_address_but_in_the_log(log: io.StringIO) -> None:
    once = breaking(whole(b'{"id":"resp_1","object":"response"}'))
    async with serving_script(once, tenants=TENANTS, trust_headers="none") as (proxy, backend):
        made = await proxy.post("/v1/responses", {"model": "base", "input": "a"}, headers=key("acme"))
        assert made.status == 200
        backend.hang()
        failed = [
            await proxy.get("/v1/responses/resp_1", headers=key("acme")),
            await proxy.chat(headers=key("acme")),
            await proxy.chat(HELLO | {"model": "nobody"}, headers=key("acme")),
        ]
    assert [answer.status // 100 for answer in failed] == [5, 5, 4]
    for answer in failed:
        shown = answer.body.decode() + str(answer.headers)
        assert "127.0.0.1" not in shown
        assert "x-llmproxy-backend" not in answer.headers
        assert b"b0" not in answer.body
    assert f"The backend that made this response failed. {backend.url}" in log.getvalue()
