"""A client may leave at any wait of its request: its place is free, its engine stops, and the next one is served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.e2e.proxies import CHAT, FAST, HELLO, STREAM, ProxyUnderTest, raw_post, serving, until
from tests.e2e.scripted import answering, scripted, serving_script, whole
from tests.faults.misbehaviours import status
from tests.faults.rig import read_answer
from tests.faults.sweep import Moment, sweep

WAITS_MAX = 100
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (3 << 20)}}
LARGE = HELLO | {"messages": [{"role": "user", "content": [IMAGE]}]}
RESPONSE = {"model": "base", "input": "Hello", "stream": True, "max_output_tokens": 4}
REFUSED: dict[str, Any] = {"scheduling": {"placement": "round_robin"}, "health": {"failures_before_ejection": 100_000}}


@asynccontextmanager
async def one_seat() -> AsyncIterator[ProxyUnderTest]:
    async with serving(FAST, fixed_limit=1, scheduling={"look_ahead": 0}) as proxy:
        yield proxy


@asynccontextmanager
async def two_replicas() -> AsyncIterator[ProxyUnderTest]:
    async with serving(FAST, FAST) as proxy:
        yield proxy


@asynccontextmanager
async def one_that_refuses() -> AsyncIterator[ProxyUnderTest]:
    """A replica whose 502 makes every other request start with an attempt that fails."""
    async with scripted(status("502 Bad Gateway")) as bad, serving(FAST, extra=[bad.url], **REFUSED) as proxy:
        yield proxy


@asynccontextmanager
async def two_stages() -> AsyncIterator[ProxyUnderTest]:
    """A replica for prompts and one for answers. A prompt that nobody fetches is kept for a short lease."""
    nixl = replace(FAST, kv_transfer="nixl", kv_latency_s=0.0, kv_handshake_s=0.0, kv_lease_s=0.05)
    scheduling = {"disaggregation": "always", "kv_lease_s": 0.05}
    async with serving(nixl, nixl, roles={"b0": "prefill", "b1": "decode"}, scheduling=scheduling) as proxy:
        yield proxy
        await until(lambda: all(replica.engine.gauges().kv_used == 0.0 for replica in proxy.replicas))
        assert not any(scheduler._reservations.by_request for scheduler in proxy.app.pools.schedulers.values())


@asynccontextmanager
async def large_answers() -> AsyncIterator[ProxyUnderTest]:
    answer = answering(whole(b"x" * (4 << 20)))
    async with serving_script(answer) as (proxy, _):
        yield proxy


@dataclass(frozen=True, slots=True)
class Case:
    """`crowd` requests are sent at a time, so that all but one wait for the only place."""

    name: str
    opened: Callable[[], Any]
    body: dict[str, Any]
    path: str = CHAT
    crowd: int = 1


CASES = [
    Case("a stream", two_replicas, STREAM),
    Case("an answer in one piece", two_replicas, HELLO),
    Case("a response", two_replicas, RESPONSE, "/v1/responses"),
    Case("a large body", two_replicas, LARGE),
    Case("a large answer", large_answers, HELLO),
    Case("a split stream", two_stages, STREAM),
    Case("a split answer in one piece", two_stages, HELLO),
    Case("a queue", one_seat, STREAM, crowd=4),
    Case("a retry", one_that_refuses, STREAM, crowd=2),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_leaving_at_every_wait(case: Case, moment: Moment, monkeypatch: pytest.MonkeyPatch) -> None:
    async with case.opened() as proxy:
        sent = 0
        for at in range(1, WAITS_MAX):
            with monkeypatch.context() as patch:
                runs = sweep(patch, proxy.app.handler, at, moment)
                await asyncio.gather(*(one(proxy, case) for _ in range(case.crowd)))
                await proxy.settled()
            sent += case.crowd
            assert len(runs) == case.crowd
            proxy.check()
            assert sum(proxy.outcomes().values()) == sent, "one outcome for each, whoever left"
            if max(context.waits for context in runs) < at:
                break
        else:
            pytest.fail("no end of waits")
        assert at > 1, "something was waited for"
        assert set(proxy.outcomes()) <= {"completed", "cancelled"}
        answer = await proxy.post(case.path, json.dumps(case.body).encode())
        assert answer.status == 200, "whoever comes next is served"


async def one(proxy: ProxyUnderTest, case: Case) -> None:
    async with proxy.wire(raw_post(case.body, case.path)) as (reader, _), asyncio.timeout(10):
        await read_answer(reader)


async def test_the_sweep_is_one_of_every_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: a request with six waits is cancelled at each of them, and then comes through."""

    class Room:
        taken: list[int]

        async def serve(self, *_: object) -> None:
            for step in range(3):
                await asyncio.sleep(0)
                await asyncio.get_running_loop().run_in_executor(None, int)
                self.taken.append(step)

    room = Room()
    seen = []
    for at in range(1, 8):
        room.taken = []
        with monkeypatch.context() as patch:
            runs = sweep(patch, room, at, Moment.RESUMED)  # type: ignore[arg-type]
            task = asyncio.ensure_future(room.serve(None, None))
            await asyncio.wait([task])
        seen.append((task.cancelled(), len(room.taken), runs[0].waits))
    assert seen == [(at < 7, (at - 1) // 2, min(at, 6)) for at in range(1, 8)]
