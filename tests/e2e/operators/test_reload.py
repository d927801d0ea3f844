"""The configuration and the fleet change under traffic: nothing is lost, and a bad file changes nothing."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmproxy.config import ConfigError, hash_of, reload
from llmproxy.lab.simulator.replica import ReplicaOptions
from tests.e2e.proxies import CHAT, ENDLESS, FAST, HELLO, STREAM, ProxyUnderTest, all_up, is_poll, serving, until

ADMIN = {"authorization": "Bearer admin-1"}
KEYED: dict[str, Any] = {"admin_key": hash_of("admin-1"), "reload": "signal"}


@asynccontextmanager
async def reloadable(tmp_path: Path, *options: ReplicaOptions, **config: Any) -> AsyncIterator[ProxyUnderTest]:
    async with serving(*options, file=tmp_path / "c.yaml", **(KEYED | config)) as proxy:
        yield proxy


def write(proxy: ProxyUnderTest, **changed: Any) -> None:
    """Put the configuration of the proxy into its file, with some keys of the top set anew."""
    reloader = proxy.app.reloader
    assert reloader is not None
    reloader.file.write_text(json.dumps({**proxy.config_data, **changed}))


async def rewrite(proxy: ProxyUnderTest, **changed: Any) -> reload.Reloaded:
    write(proxy, **changed)
    assert proxy.app.reloader is not None
    return await proxy.app.reloader.reload("test")


def seen_chats(proxy: ProxyUnderTest, backend: str) -> int:
    return sum(seen.path == CHAT for seen in proxy.replica(backend).requests_seen)


async def states(proxy: ProxyUnderTest) -> dict[str, str]:
    page = (await proxy.get("/admin/backends", headers=ADMIN)).json
    return {one["backend"]: one["state"] for one in page["backends"]}


# --- reload -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_twenty_reloads_under_load_lose_nothing(tmp_path: Path) -> None:
    async with reloadable(tmp_path, FAST, FAST, fixed_limit=2) as proxy:
        both = proxy.config_data["backends"]
        async with proxy.stream(ENDLESS) as stream:
            asked = [proxy.waiting(STREAM | {"max_tokens": 30}) for _ in range(20)]
            for turn in range(20):
                fewer = both if turn % 2 else both[turn // 2 % 2 :][:1]
                weights = {"weights": {"base": 1.0 + turn}}
                await rewrite(proxy, backends=fewer, scheduling=weights, retry={"extra_attempts": turn % 3})
                asked += [proxy.waiting() for _ in range(3)]
                await asyncio.gather(*asked[-2:])
            answers = await asyncio.gather(*asked)
            assert {answer.status for answer in answers} == {200}
            assert await stream.content.readany()
        assert proxy.outcomes()["completed"] == 80


async def test_requests_wait_while_all_backends_are_replaced(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"queue": {"no_backend_wait_s": 30.0}, "scheduling": {"look_ahead": 0}}
    async with reloadable(tmp_path, FAST, FAST, fixed_limit=1, **settings) as proxy:
        old, new = proxy.config_data["backends"]
        await rewrite(proxy, backends=[old])
        await until(lambda: len(proxy.app.pools.backends) == 1)
        async with proxy.stream() as stream:
            assert await stream.content.readany()
            waiting = [proxy.waiting() for _ in range(3)]
            await until(lambda: proxy.queued == 3)
            await rewrite(proxy, backends=[new])
            answers = await asyncio.gather(*waiting)
            assert {(answer.status, answer.backend) for answer in answers} == {(200, "b1")}
            # Requests on a removed backend run to their end.
            assert await stream.content.readany()
            assert await states(proxy) == {"b0": "leaving", "b1": "up"}
        await until(lambda: list(proxy.app.pools.backends) == ["b1"])
        assert "b0" not in proxy.app.metrics.page().decode()


async def test_reload_applies_to_the_next_request(tmp_path: Path) -> None:
    tenant = {"name": "acme", "keys": [hash_of("acme-1")]}
    async with reloadable(tmp_path, FAST, tenants=[tenant], api_keys=["plain"]) as proxy:
        assert (await proxy.chat(headers={"x-api-key": "acme-1"})).status == 200
        model = {"name": "nick", "target": "base"}
        renewed = tenant | {"keys": [hash_of("acme-2")], "limits": {"requests_per_min": 1}}
        done = await rewrite(proxy, tenants=[renewed], api_keys=[], models=[model], body_bytes_max=300)
        changes = [str(change) for change in done.changes]
        assert changes == [
            "api_keys: changed, not shown",
            "body_bytes_max: 67108864 -> 300",
            "models[nick]: added {name: nick, target: base, limits: {}}",
            "tenants[acme].keys: changed, not shown",
            "tenants[acme].limits.requests_per_min: null -> 1.0",
        ]
        assert (await proxy.chat(headers={"x-api-key": "acme-1"})).status == 401
        assert (await proxy.chat(headers={"x-api-key": "plain"})).status == 401
        assert (await proxy.chat(HELLO | {"model": "nick"}, headers={"x-api-key": "acme-2"})).status == 200
        assert (await proxy.chat(headers={"x-api-key": "acme-2"})).status == 429
        large = HELLO | {"user": "x" * 300}
        assert (await proxy.chat(large, headers={"x-api-key": "acme-2"})).status == 413


@pytest.mark.slow
async def test_a_stream_outlives_the_key_it_came_with(tmp_path: Path) -> None:
    long, old = STREAM | {"max_tokens": 3000, "ignore_eos": True}, {"authorization": "Bearer old"}
    async with reloadable(tmp_path, FAST, api_keys=["old"]) as proxy, proxy.stream(long, **old) as stream:
        assert await stream.content.readany()
        await rewrite(proxy, api_keys=["new"], timeouts={"stall_s": 1.0})
        assert (await proxy.chat(headers=old)).status == 401
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")


async def test_an_old_key_is_seen_unused_until_it_is_removed(tmp_path: Path, log: io.StringIO) -> None:
    def tenants(*names: str) -> list[dict[str, Any]]:
        return [{"name": "acme", "keys": [{"hash": hash_of(f"secret-{name}"), "name": name} for name in names]}]

    async with reloadable(tmp_path, FAST, tenants=tenants("old", "new")) as proxy:
        for _ in range(2):
            assert (await proxy.chat(headers={"x-api-key": "secret-new"})).status == 200
        used = (await proxy.get("/v1/usage", headers={"x-api-key": "secret-old"})).json["month"]["by_key"]
        assert {name: one["requests"] for name, one in used.items()} == {"new": 2}
        assert " key=new " in log.getvalue()
        for key, seen in (("old", 0), ("new", 2)):
            assert len((await proxy.get(f"/debug/requests?key={key}", headers=ADMIN)).json["requests"]) == seen
        await rewrite(proxy, tenants=tenants("new", "newer"))
        assert (await proxy.chat(headers={"x-api-key": "secret-old"})).status == 401
        assert "secret-" not in log.getvalue()


async def test_keys_that_need_a_restart_are_logged_and_others_used(tmp_path: Path) -> None:
    async with reloadable(tmp_path, FAST) as proxy:
        write(proxy, port=1, scheduling={"placement": "session", "weights": {"base": 2.0}}, drain_timeout_s=1.0)
        answer = await proxy.post("/admin/reload", None, headers=ADMIN)
        assert answer.status == 200
        assert answer.json["needs_restart"] == ["port: 0 -> 1", "scheduling.placement: cost -> session"]
        assert answer.json["changes"] == ["drain_timeout_s: 5.0 -> 1.0", "scheduling.weights.base: added 2.0"]
        assert proxy.app.config.drain_timeout_s == 1.0
        assert proxy.app.config.scheduling.placement == proxy.app.pools.settings.placement == "cost"
        settings = (await proxy.get("/debug/config", headers=ADMIN)).json["settings"]
        shown = {one["key"]: (one["value"], one["origin"]) for one in settings}
        assert shown["scheduling.placement"] == ("cost", "default")
        assert shown["drain_timeout_s"][1].endswith("c.yaml:1")
        again = await proxy.post("/admin/reload", None, headers=ADMIN)
        assert (again.json["changes"], len(again.json["needs_restart"])) == ([], 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"backends": ["http://a"],\n "quue": {}}', 'c.yaml:2: quue: is not a known key (nearest known key: "queue")'),
        ("backends: [", "is no valid YAML"),
        ("port: 70000\n", "c.yaml:1: port: should be less than or equal to 65535"),
    ],
)
async def test_a_bad_file_changes_nothing_and_says_why(tmp_path: Path, text: str, problem: str) -> None:
    async with reloadable(tmp_path, FAST) as proxy:
        before = proxy.app.config
        assert proxy.app.reloader is not None
        proxy.app.reloader.file.write_text(text)
        answer = await proxy.post("/admin/reload", None, headers=ADMIN)
        assert answer.status == 400
        assert problem in answer.json["problems"][0]
        assert proxy.app.config is before
        assert (await proxy.chat()).status == 200
        assert proxy.metric("llmproxy_config_last_reload_successful") == 0.0
        assert proxy.metric("llmproxy_config_reloads_total", result="failure") == 1.0
        await rewrite(proxy)
        assert proxy.metric("llmproxy_config_last_reload_successful") == 1.0


async def test_a_changed_file_is_read_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "LOOK_S", 0.01)
    async with reloadable(tmp_path, FAST, reload="watch") as proxy:
        write(proxy, api_keys=["k"])
        await until(lambda: proxy.app.config.api_keys == ("k",))
        assert proxy.metric("llmproxy_config_reloads_total", result="success") == 1.0


async def test_a_client_that_leaves_does_not_stop_the_reload_it_asked_for(tmp_path: Path) -> None:
    async with reloadable(tmp_path, FAST) as proxy:
        assert proxy.app.reloader is not None
        write(proxy, api_keys=["k"])
        asked = asyncio.create_task(proxy.app.reloader.reload("test"))
        await asyncio.sleep(0)
        asked.cancel()
        await until(lambda: proxy.app.config.api_keys == ("k",))


async def test_backends_change_their_address_key_and_limit(tmp_path: Path) -> None:
    async with reloadable(tmp_path, FAST, replace(FAST, api_key="engine"), backend_api_key="engine") as proxy:
        assert proxy.app.reloader is not None
        first, second = (dict(one) for one in proxy.config_data["backends"])
        await rewrite(proxy, backends=[first], backend_api_key=None)
        await until(lambda: list(proxy.app.pools.backends) == ["b0"])
        moved = {"name": "b0", "url": second["url"], "api_key": "engine", "max_in_flight": 3}
        await rewrite(proxy, backends=[moved], backend_api_key=None)
        # Asked at once: over HTTP the answer could come after the first poll of the new address.
        assert proxy.app.pools.backends["b0"].health.down
        await until(lambda: all_up(proxy))
        assert (await proxy.chat()).status == 200
        assert seen_chats(proxy, "b1") == 1
        assert proxy.app.pools.backends["b0"].limit.value == 3


async def test_a_role_is_shown_wherever_its_backend_is(tmp_path: Path) -> None:
    async with reloadable(tmp_path, FAST) as proxy:
        (backend,) = proxy.config_data["backends"]
        for role in ("prefill", "decode"):
            await rewrite(proxy, backends=[{**backend, "role": role}])
            # A second passes, and with it the age of the document: the clock itself never comes so far.
            now = asyncio.get_running_loop().time()
            proxy.app.recorder.tick(max(proxy.app.recorder.history.last_s, now + 3_600.0) + 2.0)
            pages = [(await proxy.get(path, headers=ADMIN)).json for path in ("/admin/backends", "/debug/live")]
            (pool,) = (await proxy.get("/debug/queue", headers=ADMIN)).json["pools"]
            assert [one["role"] for page in (*pages, pool) for one in page["backends"]] == [role] * 3


async def test_every_part_uses_the_new_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[str] = []
    monkeypatch.setattr("llmproxy.gateway.build.logs.configure", lambda _, level: levels.append(level))
    async with reloadable(tmp_path, FAST, FAST, backend_api_key="engine-1") as proxy:
        again = {"authorization": "Bearer admin-2"}
        key: dict[str, Any] = {"admin_key": hash_of("admin-2"), "backend_api_key": "engine-2"}
        await rewrite(proxy, **key, retry={"budget_ratio": 0.5}, log_level="warning")
        assert levels == ["warning"]
        assert proxy.app.handler.budget.ratio == 0.5
        assert (await proxy.post("/admin/backends/b0/drain", None, headers=ADMIN)).status == 401
        body = {"lora_name": "sql", "lora_path": "/sql"}
        assert (await proxy.post("/v1/load_lora_adapter", body, headers=again)).status == 200
        assert proxy.sent().headers["authorization"] == "Bearer engine-2"
        seen = proxy.replicas[0].requests_seen
        await until(lambda: is_poll(seen[-1]) and seen[-1].headers["authorization"] == "Bearer engine-2")
        # A removed backend gets no order to load again, and no request waits for it.
        await rewrite(proxy, **key, backends=proxy.config_data["backends"][:1])
        await until(lambda: list(proxy.app.pools.backends) == ["b0"])
        (sql,) = (await proxy.get("/debug/adapters", headers=again)).json["adapters"]
        assert [one["backend"] for one in sql["replicas"]] == ["b0"]


async def test_a_reload_that_cannot_be_gone_by_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmproxy.backends.discovery.find_spec", lambda _: None)
    async with reloadable(tmp_path, FAST) as proxy:
        with pytest.raises(ConfigError, match="dnspython"):
            await rewrite(proxy, backends=["srv+http://_vllm._tcp.svc"], api_keys=["k"])
        assert proxy.app.config.api_keys == ()
        assert list(proxy.app.pools.backends) == ["b0"]


# --- drain ------------------------------------------------------------------------------------------------------------


async def test_a_drained_backend_ends_its_streams_and_comes_back(tmp_path: Path) -> None:
    async with reloadable(tmp_path, FAST, FAST) as proxy:
        async with proxy.stream() as stream:
            assert await stream.content.readany()
            busy = stream.headers["x-llmproxy-backend"]
            answer = await proxy.post(f"/admin/backends/{busy}/drain", None, headers=ADMIN)
            assert answer.json["state"] == "drained"
            assert answer.json["in_flight"] == 1
            before = seen_chats(proxy, busy)
            for _ in range(10):
                assert (await proxy.chat()).backend != busy
            assert seen_chats(proxy, busy) == before
            assert await stream.content.readany()
            # A reload does not undo a drain that was asked for.
            await rewrite(proxy, api_keys=[])
            assert (await states(proxy))[busy] == "drained"
            assert proxy.metric("llmproxy_backend_drained", backend=busy) == 1.0
        await proxy.post(f"/admin/backends/{busy}/undrain", None, headers=ADMIN)
        assert (await states(proxy)) == {"b0": "up", "b1": "up"}
        other = next(name for name in ("b0", "b1") if name != busy)
        await proxy.post(f"/admin/backends/{other}/drain", None, headers=ADMIN)
        assert (await proxy.chat()).backend == busy


async def test_a_backend_that_leaves_and_comes_back_meanwhile_stays(tmp_path: Path) -> None:
    async with reloadable(tmp_path, FAST) as proxy:
        async with proxy.stream() as stream:
            assert await stream.content.readany()
            await rewrite(proxy, backends=["http://127.0.0.1:9"])
            assert (await states(proxy))["b0"] == "leaving"
            await rewrite(proxy)
            await until(lambda: list(proxy.app.pools.backends) == ["b0"])
            assert (await proxy.chat()).backend == "b0"
        await proxy.settled()
        assert (await states(proxy)) == {"b0": "up"}
        assert (await proxy.chat()).backend == "b0"


async def test_backends_are_listed_for_clients_with_the_key(tmp_path: Path) -> None:
    async with reloadable(tmp_path, FAST) as proxy:
        (shown,) = (await proxy.get("/admin/backends", headers=ADMIN)).json["backends"]
        assert shown["since_s"] >= 0.0
        del shown["since_s"]
        url = proxy.replicas[0].url
        expected = {"backend": "b0", "url": url, "role": "both", "source": "config"}
        assert shown == {**expected, "state": "up", "in_flight": 0}
        assert (await proxy.post("/admin/backends/b9/drain", None, headers=ADMIN)).status == 404
        assert (await proxy.get("/admin/backends")).status == 401
        assert (await proxy.get("/admin/backends", headers={"x-forwarded-for": "10.0.0.1"})).status == 404


async def test_without_a_file_there_is_nothing_to_reload() -> None:
    async with serving(FAST, **KEYED) as proxy:
        assert (await proxy.post("/admin/reload", None, headers=ADMIN)).status == 409


# --- discovery --------------------------------------------------------------------------------------------------------


async def test_backends_come_and_go_with_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmproxy.backends.discovery.FileSource.interval_s", 0.01)
    listed = tmp_path / "backends.yaml"
    async with serving(FAST, FAST, file=tmp_path / "c.yaml", discovery={"file": str(listed)}, **KEYED) as proxy:
        one, other = proxy.config_data["backends"]
        pools = proxy.app.pools
        # The file does not exist yet and may name any backend, so no model is unknown.
        assert (await proxy.chat(HELLO | {"model": "elsewhere"})).status == 503
        listed.write_text(json.dumps({"backends": [other]}))
        await until(lambda: not pools.catalogue.expecting)
        await rewrite(proxy, backends=[one])
        await until(lambda: {s.name: s.source for s in proxy.app.registry.statuses()} == {"b0": "config", "b1": "file"})
        assert (await proxy.chat(HELLO | {"model": "elsewhere"})).status == 404
        listed.write_text("backends: [nonsense://x]")
        await until(lambda: proxy.metric("llmproxy_discovery_lookups_total", source="file", result="failure") > 0)
        await until(lambda: all_up(proxy))
        assert list(pools.backends) == ["b0", "b1"]
        listed.write_text("backends: []")
        await until(lambda: list(pools.backends) == ["b0"])
