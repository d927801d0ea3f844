"""Keys and cookies give the right access, are not sent to backends, and appear in no log and on no page."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmproxy.config import ConfigError, hash_of, load
from tests.e2e.proxies import ENDLESS, FAST, HELLO, STREAM, ProxyUnderTest, serving, until
from tests.e2e.scripted import answering, scripted, whole

GUARDED = replace(FAST, api_key="secret-of-the-engine")
KEYS = ("secret-of-acme", "secret-of-small", "secret-plain", "secret-of-admins")
SECRETS = ("secret-", *(hash_of(key).removeprefix("sha256:") for key in KEYS))
TENANTS: dict[str, Any] = {
    "tenants": [
        {"name": "acme", "keys": [hash_of(KEYS[0])], "trusted": True},
        {"name": "small", "keys": [hash_of(KEYS[1])], "limits": {"requests_per_min": 1}},
    ],
    "api_keys": [KEYS[2]],
    "admin_key": hash_of(KEYS[3]),
    "backend_api_key": "secret-of-the-engine",
}
ACME = {"authorization": f"Bearer {KEYS[0]}", "cookie": "session=secret-of-a-browser"}


def hidden(*shown: str) -> None:
    for text in shown:
        for secret in SECRETS:
            assert secret not in text


# --- where they appear ------------------------------------------------------------------------------------------------


async def unauthorized(proxy: ProxyUnderTest) -> None:
    for headers in (
        {"authorization": "Bearer secret-guess"},
        {"authorization": "Basic secret-guess"},
        {"x-api-key": "secret-guess"},
    ):
        assert (await proxy.chat(headers=headers)).status == 401
        assert (await proxy.get("/v1/models", headers=headers)).status == 401
        assert (await proxy.post("/v1/load_lora_adapter", {}, headers=headers)).status == 401


async def client_errors(proxy: ProxyUnderTest) -> None:
    for body in (b"{", HELLO | {"model": "nobody"}, b"x" * 70_000):
        assert (await proxy.chat(body, headers=ACME)).status in (400, 404, 413)
    assert (await proxy.chat(headers=ACME | {"x-llm-d-inference-ttl": "never"})).status == 400
    for _ in range(2):
        last = await proxy.chat(headers={"x-api-key": KEYS[1]})
    assert last.status == 429


async def upstream_errors(proxy: ProxyUnderTest) -> None:
    for kind in ("busy_503", "draining_500"):
        proxy.replicas[0].faults.set(kind, times=1)
        await proxy.chat(headers=ACME)


async def a_client_that_leaves(proxy: ProxyUnderTest) -> None:
    async with proxy.stream(ENDLESS, **ACME) as stream:
        await stream.content.readany()


async def broken_requests(proxy: ProxyUnderTest) -> None:
    for broken in (b"Authorization: Bearer secret-\x01\r\n", b"Author ization: secret-\r\n"):
        async with proxy.wire(b"GET /health HTTP/1.1\r\nhost: x\r\n" + broken + b"\r\n") as (reader, _):
            assert (await reader.read()).startswith(b"HTTP/1.")


async def pages(proxy: ProxyUnderTest) -> None:
    admin = {"authorization": f"Bearer {KEYS[3]}"}
    loaded = await proxy.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "/x"}, headers=admin)
    assert loaded.status == 200
    assert (await proxy.post("/v1/responses", {"model": "base", "input": "a"}, headers=ACME)).status == 200


async def test_no_key_and_no_cookie_is_in_any_log_page_or_answer(log: io.StringIO, tmp_path: Path) -> None:
    decisions = tmp_path / "decisions.jsonl"
    config = TENANTS | {"body_bytes_max": 65_536, "decision_log": str(decisions)}
    async with serving(GUARDED, **config) as proxy:
        assert (await proxy.chat(headers=ACME)).status == 200
        assert (await proxy.chat(STREAM, headers={"x-api-key": KEYS[2]})).status == 200
        for scene in (unauthorized, client_errors, upstream_errors, a_client_that_leaves, broken_requests, pages):
            await scene(proxy)
        await until(lambda: not proxy.app.handler.open_requests)
        looked_at = ("/debug/queue", "/debug/explain", "/debug/adapters", "/metrics")
        shown = [repr(proxy.app.config), *[(await proxy.get(page)).body.decode() for page in looked_at]]
        outcomes = set(proxy.outcomes())
        assert outcomes >= {"completed", "unauthorized", "bad_request", "unknown_model", "too_large", "rate_limited"}
        assert outcomes >= {"cancelled", "upstream_status"}
    shown += [log.getvalue(), decisions.read_text()]
    assert "completed" in decisions.read_text()
    assert "This is no HTTP/1.1 request" in log.getvalue()
    hidden(*shown)


async def test_not_even_a_bug_shows_a_key(log: io.StringIO) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    async def provoke() -> None:
        async with serving(GUARDED, **TENANTS) as proxy:
            assert (await proxy.chat(headers=ACME)).status == 500

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmproxy.gateway.proxying.handler.make_request", fail)
        with pytest.raises(AssertionError, match="a bug of its own"):
            await provoke()
    assert "RuntimeError: a bug" in log.getvalue()
    hidden(log.getvalue())


# --- what goes on to backends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, {"backend_api_key": "secret-of-the-engine"}, {"api_keys": ["secret-of-acme"]}])
async def test_credentials_of_clients_stay_here(config: dict[str, Any]) -> None:
    async with serving(FAST, **config) as proxy:
        assert (await proxy.chat(headers=ACME | {"x-api-key": "secret-other"})).status == 200
        sent = {name.lower(): value for name, value in proxy.sent().headers.items()}
        assert not {"cookie", "x-api-key"} & sent.keys()
        assert sent.get("authorization") == ("Bearer secret-of-the-engine" if "backend_api_key" in config else None)


async def test_credentials_go_on_where_that_is_configured() -> None:
    async with serving(FAST, forward_credentials=True) as proxy:
        assert (await proxy.chat(headers=ACME | {"x-api-key": "secret-other"})).status == 200
        sent = {name.lower(): value for name, value in proxy.sent().headers.items()}
        assert ACME.items() <= sent.items()
        assert sent["x-api-key"] == "secret-other"
    async with serving(FAST, forward_credentials=True, backend_api_key="secret-of-the-engine") as proxy:
        assert (await proxy.chat(headers=ACME | {"x-api-key": "secret-other"})).status == 200
        sent = {name.lower(): value for name, value in proxy.sent().headers.items()}
        assert (sent["authorization"], "x-api-key" in sent) == ("Bearer secret-of-the-engine", False)


@pytest.mark.parametrize("keys", ["api_keys: [a]", f"tenants: [{{name: a, keys: ['{hash_of('a')}']}}]"])
def test_keys_of_the_proxy_itself_are_never_sent_on(write: Any, keys: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(f"{keys}\nforward_credentials: true"))
    (problem,) = caught.value.problems
    assert ":2: forward_credentials: would send the keys of this proxy to every backend" in problem


async def test_a_backend_that_wants_a_key_is_logged(log: io.StringIO) -> None:
    refusal = whole(b'{"error":"Unauthorized"}', "401 Unauthorized")
    async with scripted(answering(refusal)) as backend:
        async with serving(extra=[backend.url]) as proxy:
            answer = await proxy.chat()
            assert answer.status == 502, "its client did not choose the key"
        async with serving(extra=[backend.url], backend_api_key="secret-wrong") as proxy:
            await proxy.chat()
    assert "b0 wants a key: set backend_api_key, or its own api_key" in log.getvalue()
    assert "b0 does not accept the key that is configured for it" in log.getvalue()
    hidden(log.getvalue())


async def test_a_backend_that_lists_nothing_without_a_key_is_logged(log: io.StringIO) -> None:
    async with serving(GUARDED, wait=False):
        await until(lambda: "set backend_api_key, or its own api_key" in log.getvalue())
