"""Many requests on one connection: facts about a head count only while the head and the rules stay the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from llmproxy.config import hash_of
from llmproxy.gateway.request import auth
from tests.e2e.proxies import FAST, HELLO, ProxyUnderTest, raw_post, serving

KEPT_AFTER = 3
"""The third request with the same head uses the facts that the second one kept."""


class Connection:
    """A client with one connection, which repeats heads byte for byte."""

    def __init__(self, proxy: ProxyUnderTest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy, self._reader, self._writer = proxy, reader, writer

    async def status(self, key: str, extra: str = "", body: object = HELLO) -> int:
        return (await self._answer(key, extra, body))[0]

    async def _answer(self, key: str, extra: str, body: object) -> tuple[int, str]:
        self._writer.write(raw_post(body, extra=f"authorization: Bearer {key}\r\n{extra}"))
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        await self._reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
        return int(head.split()[1]), head.partition("x-request-id: ")[2].partition("\r\n")[0]

    async def record(self, key: str, extra: str = "", body: object = HELLO) -> Any:
        """Returns the record of another request."""
        status, request_id = await self._answer(key, extra, body)
        assert status == 200
        self._proxy.app.flush_records()
        return self._proxy.app.recorder.recent.find(request_id)


@asynccontextmanager
async def connection(proxy: ProxyUnderTest) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection(*proxy.address)
    try:
        yield Connection(proxy, reader, writer)
    finally:
        writer.close()


def tenant(name: str, key: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "keys": [{"hash": hash_of(key)} | more]}


async def rewrite(proxy: ProxyUnderTest, **changed: Any) -> None:
    reloader = proxy.app.reloader
    assert reloader is not None
    reloader.file.write_text(json.dumps({**proxy.config_data, **changed}))
    assert (await reloader.reload("test")).changes


async def test_a_key_that_was_rotated_is_refused_on_an_open_connection(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tenants": [tenant("acme", "old")], "reload": "signal"}
    async with serving(FAST, file=tmp_path / "c.yaml", **settings) as proxy, connection(proxy) as client:
        for _ in range(KEPT_AFTER + 1):
            assert await client.status("old") == 200
        await rewrite(proxy, tenants=[tenant("acme", "new")])
        assert await client.status("old") == 401
        assert await client.status("new") == 200


async def test_a_rule_that_was_changed_holds_on_an_open_connection(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tenants": [tenant("acme", "a")], "reload": "signal"}
    async with serving(FAST, file=tmp_path / "c.yaml", **settings) as proxy, connection(proxy) as client:
        for _ in range(KEPT_AFTER + 1):
            assert (await client.record("a")).band == "default"
        await rewrite(proxy, tenants=[tenant("acme", "a") | {"criticality": "sheddable"}], backend_api_key="own")
        for _ in range(KEPT_AFTER + 1):
            assert (await client.record("a")).band == "sheddable"


async def test_clients_that_share_a_connection_keep_their_own_tenants() -> None:
    tenants = [tenant("acme", "a"), tenant("blue", "b") | {"criticality": "critical"}]
    async with serving(FAST, tenants=tenants) as proxy, connection(proxy) as client:
        for key, name, band in [("a", "acme", "default"), ("b", "blue", "critical")] * 2:
            for _ in range(KEPT_AFTER):
                record = await client.record(key)
                assert (record.tenant, record.band) == (name, band)
        assert await client.status("c") == 401
        assert (await client.record("a")).tenant == "acme"


async def test_a_key_expires_on_an_open_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Later:
            return cls(2031, 1, 1, tzinfo=tz)

    expiring = tenant("acme", "a", expires="2030-12-31")
    async with serving(FAST, tenants=[expiring]) as proxy, connection(proxy) as client:
        assert datetime.now(UTC).year < 2030
        for _ in range(KEPT_AFTER + 1):
            assert await client.status("a") == 200
        monkeypatch.setattr(auth, "datetime", Later)
        assert await client.status("a") == 401


async def test_models_of_requests_with_the_same_head_are_told_apart() -> None:
    models = [{"name": "fast", "target": "base", "criticality": "critical"}]
    async with serving(FAST, models=models) as proxy, connection(proxy) as client:
        for _ in range(KEPT_AFTER):
            assert (await client.record("", body=HELLO)).band == "default"
            assert (await client.record("", body=HELLO | {"model": "fast"})).band == "critical"
