"""A request that was sent out too early for its rank comes back, and nobody notices but the one who needed its seat."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from llmproxy.gateway.proxying import handler as context
from tests.e2e.proxies import FAST, HELLO, STREAM, House, house, until

OBJECTIVE = "x-llm-d-inference-objective"
SHEDDABLE, CRITICAL = {OBJECTIVE: "sheddable"}, {OBJECTIVE: "critical"}


@asynccontextmanager
async def frozen_house(**scheduling: Any) -> AsyncIterator[House]:
    """A house with one seat, on a replica that takes requests and does not move until it is thawed."""
    async with house(FAST, fixed_limit=1, scheduling={"look_ahead": 0} | scheduling) as home:
        home.replicas[0].faults.set("frozen")
        yield home


def posted(home: House) -> list[str]:
    """Who reached the replica, in order."""
    return [seen.headers["x-request-id"] for seen in home.replicas[0].requests_seen if seen.method == "POST"]


async def test_a_sheddable_stream_without_a_byte_makes_room_for_a_critical_request() -> None:
    async with frozen_house() as home:
        sheddable = home.waiting(STREAM, **SHEDDABLE, **{"x-request-id": "sheddable"})
        await until(lambda: posted(home) == ["sheddable"])
        behind = home.waiting(STREAM, **SHEDDABLE, **{"x-request-id": "behind"})
        await until(lambda: home.queued == 1)
        critical = home.waiting(STREAM, **CRITICAL, **{"x-request-id": "critical"})
        await until(lambda: posted(home) == ["sheddable", "critical"])
        assert home.queued == 2, "the one that was withdrawn waits again"
        home.replicas[0].faults.clear()
        for task in (critical, sheddable, behind):
            assert (await task).status == 200
        assert posted(home) == ["sheddable", "critical", "sheddable", "behind"], "it came back to the head of its flow"
        assert (await sheddable).headers["x-llmproxy-attempts"] == "2"
        assert home.outcomes() == {"completed": 3}


async def test_waiting_after_a_withdrawal_is_told_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "RETRY_WAIT_MIN_S", 0.08)
    async with frozen_house() as home:
        sheddable = home.waiting(STREAM, **SHEDDABLE, **{"x-llm-d-inference-ttl": "80ms"})
        await until(lambda: len(posted(home)) == 1)
        critical = home.waiting(STREAM, **CRITICAL)
        assert (await sheddable).status == 429, "its time was over before its seat was free"
        assert home.metric("llmproxy_queue_wait_seconds_sum", band="sheddable") >= 0.07
        home.replicas[0].faults.clear()
        assert (await critical).status == 200


async def test_what_has_begun_to_answer_stays() -> None:
    async with house(FAST, fixed_limit=1, scheduling={"look_ahead": 0}) as home, home.stream(**SHEDDABLE) as running:
        await running.content.readany()
        critical = home.waiting(**CRITICAL)
        await until(lambda: home.queued == 1)
        for _ in range(20):
            assert await running.content.readany(), "the stream goes on"
        running.close()
        assert (await critical).status == 200
        assert (await critical).headers["x-llmproxy-attempts"] == "1"


@pytest.mark.parametrize("above", ["default", "sheddable"])
async def test_only_what_is_above_default_may_take_a_seat(above: str) -> None:
    async with frozen_house() as home:
        sheddable = home.waiting(STREAM, **SHEDDABLE)
        await until(lambda: len(posted(home)) == 1)
        other = home.waiting(STREAM, **{OBJECTIVE: above})
        await until(lambda: home.queued == 1)
        home.replicas[0].faults.clear()
        assert (await sheddable).status == (await other).status == 200
        assert len(posted(home)) == 2


async def test_withdrawal_can_be_switched_off() -> None:
    async with frozen_house(withdrawal=False) as home:
        sheddable = home.waiting(STREAM, **SHEDDABLE)
        await until(lambda: len(posted(home)) == 1)
        critical = home.waiting(STREAM, **CRITICAL)
        await until(lambda: home.queued == 1)
        home.replicas[0].faults.clear()
        assert (await sheddable).status == (await critical).status == 200
        assert len(posted(home)) == 2


async def test_a_plain_answer_that_may_have_begun_is_not_withdrawn() -> None:
    async with frozen_house() as home:
        sheddable = home.waiting(HELLO, **SHEDDABLE)
        await until(lambda: len(posted(home)) == 1)
        critical = home.waiting(STREAM, **CRITICAL)
        await until(lambda: home.queued == 1)
        home.replicas[0].faults.clear()
        assert (await sheddable).status == (await critical).status == 200
        assert len(posted(home)) == 2
