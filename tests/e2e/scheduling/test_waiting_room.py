"""Which requests wait, in which order, for how long, and what refused ones get."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.e2e.proxies import FAST, HELLO, OWN_ID, STREAM, Answer, ProxyUnderTest, one_seat, serving, until

OBJECTIVE = "x-llm-d-inference-objective"
FAIRNESS = "x-llm-d-inference-fairness-id"
TTL = "x-llm-d-inference-ttl"


class Queue:
    """Requests that enter one after the other, and the order in which they were served."""

    def __init__(self, proxy: ProxyUnderTest, seat: aiohttp.ClientResponse) -> None:
        self._proxy = proxy
        self._seat = seat
        self._tasks: list[asyncio.Task[Answer]] = []

    async def enter(self, name: str, body: object = None, **headers: str) -> None:
        self._tasks.append(await self._proxy.enter(name, body, **headers))

    async def served(self) -> list[str]:
        """Let the seat go, and wait for everybody's turn."""
        self._seat.close()
        answers = await asyncio.gather(*self._tasks)
        assert {answer.status for answer in answers} == {200}
        seen = [request for request in self._proxy.replicas[0].requests_seen if request.method == "POST"]
        return [OWN_ID.sub("", request.headers["x-request-id"]) for request in seen[1:]]


async def test_the_other_spelling_and_configured_objectives_and_models() -> None:
    config: dict[str, Any] = {
        "objectives": [{"name": "chatbot", "criticality": "critical"}, {"name": "nightly", "criticality": -500}],
        "models": [
            {"name": "lora-0", "criticality": "critical"},
            {"name": "batch", "target": "lora-1", "criticality": -50},
        ],
    }
    async with one_seat(**config) as (proxy, seat):
        queue = Queue(proxy, seat)
        await queue.enter("nightly", **{"x-gateway-inference-objective": "nightly"})
        await queue.enter("batch", HELLO | {"model": "batch"})
        await queue.enter("nobody-special", HELLO | {"model": "lora-1"})
        await queue.enter("lora-0", HELLO | {"model": "lora-0"})
        await queue.enter("chatbot", HELLO | {"model": "batch"}, **{OBJECTIVE: "chatbot"})
        assert await queue.served() == ["lora-0", "chatbot", "nobody-special", "batch", "nightly"]


async def test_flows_take_turns() -> None:
    async with one_seat(scheduling={"fairness": "round_robin"}) as (proxy, seat):
        queue = Queue(proxy, seat)
        for name, flow in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b")):
            await queue.enter(name, **{FAIRNESS: flow})
        assert await queue.served() == ["a1", "b1", "a2", "b2", "a3"]


async def test_strangers_cannot_choose_their_place() -> None:
    async with one_seat(trust_headers="none") as (proxy, seat):
        queue = Queue(proxy, seat)
        await queue.enter("first")
        await queue.enter("second", **{OBJECTIVE: "critical", FAIRNESS: "me", "x-vllm-priority": "-9"})
        await queue.enter("third", **{OBJECTIVE: "not-even-configured"})
        assert await queue.served() == ["first", "second", "third"]
        names = {name for request in proxy.replicas[0].requests_seen for name in request.headers}
        assert not {OBJECTIVE, FAIRNESS, "x-vllm-priority"} & names, "nor may the engine see it"


async def test_a_waiting_time_that_is_over() -> None:
    async with one_seat() as (proxy, _):
        answer = await proxy.chat(headers={TTL: "60ms"})
        assert (answer.status, answer.json["error"]["type"]) == (429, "RateLimitError")
        assert int(answer.headers["retry-after"]) >= 1
        assert "x-llmproxy-backend" not in answer.headers
        assert proxy.outcomes() == {"expired": 1}


@pytest.mark.parametrize("limit", ["requests_max", "band_requests_max"])
async def test_a_full_queue_says_when_to_come_back(limit: str) -> None:
    async with one_seat(queue={limit: 2}) as (proxy, seat):
        waiting = [proxy.waiting(), proxy.waiting()]
        await until(lambda: proxy.queued == 2)
        answer = await proxy.chat(STREAM)
        assert (answer.status, answer.json["error"]["type"]) == (429, "RateLimitError")
        assert limit in answer.json["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
        assert proxy.outcomes() == {"rejected_capacity": 1}
        seat.close()
        assert [(await task).status for task in waiting] == [200, 200]


async def test_a_request_is_bound_only_when_there_is_room() -> None:
    room_for_two = serving(FAST, FAST, fixed_limit=1, scheduling={"look_ahead": 0})
    async with room_for_two as proxy, proxy.stream() as one, proxy.stream() as two:
        await one.content.readany()
        await two.content.readany()
        assert {one.headers["x-llmproxy-backend"], two.headers["x-llmproxy-backend"]} == {"b0", "b1"}
        waiting = proxy.waiting()
        await until(lambda: proxy.queued == 1)
        assert sum(backend.own_in_flight for backend in proxy.app.pools.backends.values()) == 2
        two.close()
        answer = await waiting
        assert answer.backend == two.headers["x-llmproxy-backend"], "whoever has room first"
        assert float(answer.headers["x-llmproxy-queue-ms"]) > 0
