"""Preemption: a request without a first byte gives its place to a request of a higher band, unseen by its client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from llmproxy.scheduling import attempts
from tests.e2e.proxies import FAST, OWN_ID, STREAM, ProxyUnderTest, one_seat, serving, until

OBJECTIVE = "x-llm-d-inference-objective"
SHEDDABLE, CRITICAL = {OBJECTIVE: "sheddable"}, {OBJECTIVE: "critical"}


@asynccontextmanager
async def serving_one_frozen(**scheduling: Any) -> AsyncIterator[ProxyUnderTest]:
    """A proxy with one slot, on a replica that takes requests and does not move until it is thawed."""
    async with serving(FAST, fixed_limit=1, scheduling={"look_ahead": 0} | scheduling) as proxy:
        proxy.replicas[0].faults.set("frozen")
        yield proxy


def posted(proxy: ProxyUnderTest) -> list[str]:
    """Who reached the replica, in order; a second attempt has an id of its own there."""
    seen = [request for request in proxy.replicas[0].requests_seen if request.method == "POST"]
    return [OWN_ID.sub("", request.headers["x-request-id"]) for request in seen]


async def test_a_stream_without_a_byte_is_preempted() -> None:
    async with serving_one_frozen() as proxy:
        sheddable = proxy.waiting(STREAM, **SHEDDABLE, **{"x-request-id": "sheddable"})
        await until(lambda: posted(proxy) == ["sheddable"])
        behind = proxy.waiting(STREAM, **SHEDDABLE, **{"x-request-id": "behind"})
        await until(lambda: proxy.queued == 1)
        critical = proxy.waiting(STREAM, **CRITICAL, **{"x-request-id": "critical"})
        await until(lambda: posted(proxy) == ["sheddable", "critical"])
        assert proxy.queued == 2, "the preempted request waits again"
        proxy.replicas[0].faults.clear()
        for task in (critical, sheddable, behind):
            assert (await task).status == 200
        assert posted(proxy) == ["sheddable", "critical", "sheddable", "behind"], "it came back to the head of its flow"
        assert (await sheddable).headers["x-llmproxy-attempts"] == "2"
        assert proxy.outcomes() == {"completed": 3}


async def test_waiting_after_a_preemption_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "RETRY_WAIT_MIN_S", 0.08)
    async with serving_one_frozen() as proxy:
        sheddable = proxy.waiting(STREAM, **SHEDDABLE, **{"x-llm-d-inference-ttl": "80ms"})
        await until(lambda: len(posted(proxy)) == 1)
        critical = proxy.waiting(STREAM, **CRITICAL)
        assert (await sheddable).status == 429, "its time was over before its seat was free"
        assert proxy.metric("llmproxy_queue_wait_seconds_sum", band="sheddable") >= 0.07
        proxy.replicas[0].faults.clear()
        assert (await critical).status == 200


async def test_request_that_began_to_answer_is_not_preempted() -> None:
    async with one_seat(headers=SHEDDABLE) as (proxy, running):
        critical = proxy.waiting(**CRITICAL)
        await until(lambda: proxy.queued == 1)
        for _ in range(20):
            assert await running.content.readany(), "the stream goes on"
        running.close()
        assert (await critical).status == 200
        assert (await critical).headers["x-llmproxy-attempts"] == "1"
