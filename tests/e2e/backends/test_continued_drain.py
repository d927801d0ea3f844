"""A drain with a deadline moves the streams that have not ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llmproxy.backends.registry import BackendRegistry
from llmproxy.config import hash_of
from tests.e2e.backends.test_continued import CHAT_BODY, NUMBERED, WHOLE, Read
from tests.e2e.proxies import ProxyUnderTest, all_of, serving, until
from tests.numbered import fault_in

ADMIN = {"authorization": "Bearer for-admins"}
SLOW = replace(NUMBERED, speed=0.1)
LONG = CHAT_BODY | {"max_tokens": 200}
ROUND_ROBIN: dict[str, Any] = {"scheduling": {"placement": "round_robin"}, "admin_key": hash_of("for-admins")}


async def drain(proxy: ProxyUnderTest, name: str, deadline_s: str) -> int:
    path = f"/admin/backends/{name}/drain?deadline_s={deadline_s}"
    return (await proxy.post(path, None, headers=ADMIN)).status


def whole(found: Read) -> None:
    assert (found.errors, found.ends, found.done, fault_in(found.text)) == ([], ["length"], 1, None)


async def test_streams_go_on_elsewhere_at_the_deadline() -> None:
    async with (
        serving(SLOW, SLOW, **ROUND_ROBIN) as proxy,
        proxy.stream(LONG) as moves,
        proxy.stream(LONG | {"response_format": {"type": "text"}}) as other,
        proxy.stream(LONG | {"response_format": {"type": "json_object"}}) as stays,
    ):
        name = moves.headers["x-llmproxy-backend"]
        assert stays.headers["x-llmproxy-backend"] == name
        plain = [asyncio.create_task(proxy.chat(LONG | WHOLE)) for _ in range(2)]
        await until(lambda: proxy.replica(name).in_flight == 3)
        proxy.app.registry.drain(name, 0.0)
        await until(lambda: proxy.replica(name).in_flight == 1)
        found = [Read((await all_of(answer)).split(b"\n\n")) for answer in (moves, other, stays)]
        for one in found:
            whole(one)
        assert [len(one.comments) for one in found] == [1, 0, 0]
        assert sorted([(await answer).headers["x-llmproxy-attempts"] for answer in plain]) == ["1", "2"]
        await proxy.settled()
        assert set(proxy.outcomes()) == {"completed"}
        assert proxy.metric("llmproxy_attempts_total", verdict="lost") == 2


@pytest.mark.parametrize("ends", [BackendRegistry.undrain, BackendRegistry.drain])
async def test_an_end_of_the_drain_or_a_new_drain_ends_its_deadline(
    ends: Callable[[BackendRegistry, str], None],
) -> None:
    async with serving(SLOW, SLOW, **ROUND_ROBIN) as proxy, proxy.stream(LONG) as answer:
        name = answer.headers["x-llmproxy-backend"]
        assert await drain(proxy, name, "1") == 200
        proxy.app.registry.drain(name, 0.02)
        ends(proxy.app.registry, name)
        assert proxy.app.registry.moves_s() == {}
        found = Read((await all_of(answer)).split(b"\n\n"))
        whole(found)
        assert found.comments == []


async def test_streams_stay_while_no_other_backend_is_up() -> None:
    async with serving(SLOW, **ROUND_ROBIN) as proxy, proxy.stream(LONG) as answer:
        proxy.app.registry.drain("b0", 0.0)
        found = Read((await all_of(answer)).split(b"\n\n"))
        whole(found)
        assert found.comments == []


@pytest.mark.parametrize("deadline_s", ["0", "-1", "1.5", "soon", "", "99999999"])
async def test_a_deadline_is_a_number_of_seconds(deadline_s: str) -> None:
    async with serving(SLOW, **ROUND_ROBIN) as proxy:
        assert await drain(proxy, "b0", deadline_s) == 400
        assert proxy.app.registry.drained() == set()
