"""Two thousand requests, clients that leave at any moment, and replicas that die and come back under load."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from random import Random

import aiohttp
import pytest

from tests.e2e.proxies import CHAT, FAST, ProxyUnderTest, all_of, all_up, serving, until

pytestmark = pytest.mark.slow

REQUESTS = 2000
AT_ONCE = 60
SMALL = replace(FAST, max_num_seqs=16, reply_tokens=(3, 20))


class Crowd:
    """Clients that come one after the other, each with a temper of its own; `met` says what became of them."""

    def __init__(self, proxy: ProxyUnderTest, rng: Random) -> None:
        self._proxy = proxy
        self._rng = rng
        self._left = REQUESTS
        self.met: Counter[str] = Counter()
        self.lost: list[str] = []

    @property
    def done(self) -> int:
        return sum(self.met.values())

    async def come(self) -> None:
        async with asyncio.TaskGroup() as clients:
            for _ in range(AT_ONCE):
                clients.create_task(self._one_after_the_other())

    async def _one_after_the_other(self) -> None:
        while self._left:
            self._left -= 1
            stream, temper = self._rng.random() < 0.7, self._rng.random()
            if temper < 0.2:
                fate = await self._impatient(stream, self._rng.uniform(0.0, 0.03))
            else:
                fate = await self._patient(stream, leaves=temper < 0.4)
            self.met[fate] += 1

    def _post(self, stream: bool) -> aiohttp.client._RequestContextManager:
        model = self._rng.choice(("base", "lora-0", "lora-1"))
        band = self._rng.choice(("critical", "default", "sheddable"))
        content = f"Number {self._rng.randrange(50)} " * self._rng.randrange(1, 60)
        body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": content}]}
        return self._proxy.http.post(self._proxy.url + CHAT, json=body, headers={"x-llm-d-inference-objective": band})

    async def _impatient(self, stream: bool, leaves_after_s: float) -> str:
        try:
            async with asyncio.timeout(leaves_after_s), self._post(stream) as response:
                await response.read()
        except TimeoutError:
            return "gave up"
        return "served"

    async def _patient(self, stream: bool, leaves: bool) -> str:
        """Wait for the first byte, come what may; `leaves` goes away then."""
        async with self._post(stream) as response:
            body = await response.content.readany()
            if response.status != 200 or not body:
                self.lost.append(f"{response.status} {body!r} {dict(response.headers)}")
                return "lost"
            if leaves:
                response.close()
                return "left"
            body += await all_of(response)
        if b"The stream broke" in body:
            return "broken"
        assert not stream or body.endswith(b"data: [DONE]\n\n")
        return "served"


async def test_no_request_is_lost_before_its_first_byte() -> None:
    async with serving(SMALL, SMALL, SMALL) as proxy:
        crowd = Crowd(proxy, Random(20))
        coming = asyncio.create_task(crowd.come())
        for name, fault, at in (("b1", "hang", 400), ("b2", "refuse", 1100)):
            await until(lambda at=at: crowd.done >= at or coming.done(), 60)  # type: ignore[misc]
            proxy.replica(name).faults.set(fault)
            await until(lambda at=at: crowd.done >= at + 300 or coming.done(), 60)  # type: ignore[misc]
            assert not coming.done(), "the load is still on"
            await proxy.replica(name).restart()
            await until(lambda: all_up(proxy))
            await until(lambda name=name: proxy.replica(name).in_flight)  # type: ignore[misc]
        await coming
        await proxy.settled()
        assert crowd.lost == []
        assert crowd.done == REQUESTS
        ended = proxy.outcomes()
        assert set(ended) <= {"completed", "cancelled", "broken_stream"}
        # Some of the most impatient went before the proxy heard of them; everybody else has one outcome.
        assert REQUESTS - crowd.met["gave up"] <= sum(ended.values()) <= REQUESTS
        assert (
            crowd.met["served"] <= ended["completed"] <= crowd.met["served"] + crowd.met["left"] + crowd.met["gave up"]
        )
        assert crowd.met["broken"] <= ended["broken_stream"] <= 2 * AT_ONCE
        assert crowd.met["left"] > 100
        assert crowd.met["gave up"] > 100
        assert proxy.metric("llmproxy_retries_total") > 0, "somebody's backend died before the first byte"
