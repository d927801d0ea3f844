"""Another backend answers the requests of a hung backend. The log has the reason and the return."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from tests.e2e.proxies import ENDLESS, FAST, STREAM, ProxyUnderTest, serving, until

HUNG_S = 0.2
OWED = STREAM | {"max_tokens": 16}


@pytest.fixture
def log() -> Iterator[list[EventDict]]:
    with capture_logs() as lines:
        yield lines


def events(log: list[EventDict], event: str, backend: str) -> list[EventDict]:
    return [line for line in log if line["event"] == event and line["backend"] == backend]


def asked(proxy: ProxyUnderTest, backend: str, request_id: str) -> int:
    """How often the replica behind a backend got a request; a second attempt has an id of its own there."""
    ids = [seen.headers.get("x-request-id", "") for seen in proxy.replica(backend).requests_seen]
    return sum(name == request_id or name.startswith(f"{request_id}-") for name in ids)


async def read(stream: aiohttp.ClientResponse) -> None:
    with suppress(aiohttp.ClientError):
        while await stream.content.readany():
            pass


async def test_a_request_on_a_hung_backend_is_tried_elsewhere(log: list[EventDict]) -> None:
    settings: dict[str, Any] = {"health": {"hung_s": HUNG_S}, "scheduling": {"placement": "round_robin"}}
    # With a seed, a stream that has begun stays where it is.
    stays = ENDLESS | {"seed": 1}
    async with serving(FAST, FAST, **settings) as proxy, proxy.stream(stays) as one, proxy.stream(stays) as other:
        hangs, speaks = (stream.headers["x-llmproxy-backend"] for stream in (one, other))
        assert hangs != speaks
        reading = asyncio.create_task(read(other))
        known = proxy.app.pools.backends[hangs]
        await until(lambda: known.reading is not None and known.reading.running)
        proxy.replica(hangs).faults.set("frozen")

        owed = proxy.waiting(OWED, **{"x-request-id": "owed"})
        await until(lambda: asked(proxy, hangs, "owed"))
        async with asyncio.timeout(15.0):
            answer = await owed
        assert answer.status == 200
        assert (answer.backend, answer.headers["x-llmproxy-attempts"]) == (speaks, "2")
        assert answer.events[-1] == b"data: [DONE]"
        assert sum(b'"content":' in event for event in answer.events) >= 16
        assert (asked(proxy, hangs, "owed"), asked(proxy, speaks, "owed")) == (1, 1)
        await until(lambda: proxy.replica(hangs).in_flight == 1)

        ejected = events(log, "backend_ejected", hangs)[0]
        assert ejected["log_level"] == "warning"
        assert ejected["why"].startswith("hung: silent for ")
        assert ejected["why"].endswith(" s, first bytes owed: 1")
        assert not events(log, "backend_back", hangs)

        proxy.replica(hangs).faults.clear()
        assert await one.content.readany(), "the stream that had begun goes on"
        async with asyncio.timeout(15.0):
            while not events(log, "backend_back", hangs):
                assert (await proxy.chat(OWED)).status == 200
        assert events(log, "backend_back", hangs)[0]["after_s"] > 0.0
        other.close()
        await reading
