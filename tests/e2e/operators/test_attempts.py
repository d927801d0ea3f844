"""The attempts of a request in its record: the whole story of where it waited and what became of each try."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from llmproxy.core.domain import Outcome, Verdict
from llmproxy.observe.exit import ATTEMPTS_MAX, RequestExit
from llmproxy.scheduling.attempt import Attempt
from tests.e2e.proxies import FAST, STREAM, one_seat, posts, serving, until
from tests.e2e.scripted import answering, serving_script, whole

OBJECTIVE = "x-llm-d-inference-objective"


@pytest.fixture(name="ended")
def _ended(monkeypatch: pytest.MonkeyPatch) -> dict[str, RequestExit]:
    """The records of all requests, by request id."""
    records: dict[str, RequestExit] = {}
    monkeypatch.setattr(
        "llmproxy.gateway.proxying.handler.log_exit", lambda ended: records.update({ended.request_id: ended})
    )
    return records


def in_order(ended: RequestExit) -> None:
    """Waits and attempts follow each other, within the request, and the waits add up."""
    instants = [ended.arrived_s, ended.ended_s]
    for attempt in ended.tried:
        instants[-1:-1] = [attempt.queued_s, attempt.granted_s, attempt.first_byte_s, attempt.ended_s]
    known = [instant for instant in instants if instant is not None]
    assert all(a <= b for a, b in pairwise(known)), instants
    if len(ended.tried) == ended.attempts and ended.queued_s is None:
        waits_s = [(one.granted_s or 0.0) - (one.queued_s or 0.0) for one in ended.tried]
        assert sum(waits_s) == pytest.approx(ended.queue_wait_s, abs=1e-6)


def story(ended: RequestExit) -> list[tuple[str | None, Verdict | None, bool]]:
    return [(one.backend, one.verdict, one.first_byte_s is not None) for one in ended.tried]


async def test_a_retry_is_a_second_attempt(ended: dict[str, RequestExit]) -> None:
    async with serving(FAST, FAST, scheduling={"placement": "cost", "seed": 1}) as proxy:
        proxy.replicas[0].faults.set("busy_503")
        proxy.replicas[1].faults.set("busy_503")
        await until(lambda: all(one.reading for one in proxy.app.pools.backends.values()))
        answer = asyncio.create_task(proxy.chat(STREAM, headers={"x-request-id": "r"}))
        await until(lambda: proxy.metric("llmproxy_attempts_total", verdict="busy") >= 1)
        for replica in proxy.replicas:
            replica.faults.clear()
        assert (await answer).status == 200
        await proxy.settled()
        record = ended["r"]
        *failed, last = record.tried
        assert failed
        assert {(one.verdict, one.status, one.error) for one in failed} == {
            (Verdict.BUSY, 503, "The backend answered 503.")
        }
        assert (last.verdict, last.status, last.error) == (Verdict.SERVED, 200, None)
        assert last is record.last
        assert record.attempts == len(record.tried)
        assert last.terms
        assert last.candidates
        assert last.why is not None
        assert last.predicted_ttft is not None
        in_order(record)
        # A request is found by each backend that it was sent to.
        for attempt in record.tried:
            found = (await proxy.get(f"/debug/requests?backend={attempt.backend}")).json
            assert [one["request_id"] for one in found["requests"]] == ["r"]
        assert (await proxy.get("/debug/requests?backend=")).json["requests"] == []


async def test_a_preempted_attempt_says_when_it_was_withdrawn(ended: dict[str, RequestExit]) -> None:
    async with serving(FAST, fixed_limit=1, scheduling={"look_ahead": 0}) as proxy:
        proxy.replicas[0].faults.set("frozen")
        sheddable = proxy.waiting(STREAM, **{OBJECTIVE: "sheddable", "x-request-id": "s"})
        await until(lambda: posts(proxy) == 1)
        critical = proxy.waiting(STREAM, **{OBJECTIVE: "critical", "x-request-id": "c"})
        await until(lambda: posts(proxy) == 2)
        proxy.replicas[0].faults.clear()
        assert (await critical).status == (await sheddable).status == 200
        await proxy.settled()
        assert story(ended["c"]) == [("b0", Verdict.SERVED, True)]
        assert story(ended["s"]) == [("b0", Verdict.PREEMPTED, False), ("b0", Verdict.SERVED, True)]
        withdrawn, again = ended["s"].tried
        (other,) = ended["c"].tried
        assert withdrawn.ended_s is not None
        assert other.granted_s is not None
        assert again.queued_s is not None
        assert withdrawn.ended_s <= other.granted_s, "its place went to the other one"
        assert withdrawn.ended_s <= again.queued_s
        in_order(ended["s"])


async def test_a_request_that_was_never_granted_says_since_when_it_waited(ended: dict[str, RequestExit]) -> None:
    async with one_seat(queue={"no_backend_wait_s": 0.0, "max_wait_s": 0.05}) as (proxy, running):
        assert (await proxy.chat(headers={"x-request-id": "r"})).status == 429
        running.close()
        await proxy.settled()
        record = ended["r"]
        assert record.outcome is Outcome.EXPIRED
        assert record.tried == []
        assert record.last == Attempt()
        assert record.queued_s is not None
        assert record.arrived_s is not None
        assert record.ended_s is not None
        assert record.arrived_s <= record.queued_s <= record.ended_s - 0.04


async def test_a_client_that_leaves_ends_its_attempt(ended: dict[str, RequestExit]) -> None:
    async with one_seat(headers={"x-request-id": "r"}) as (proxy, running):
        running.close()
        await proxy.settled()
        assert story(ended["r"]) == [("b0", Verdict.CLIENT_GONE, True)]
        in_order(ended["r"])


@pytest.mark.slow
async def test_the_record_has_the_latest_attempts_alone(
    ended: dict[str, RequestExit], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = answering(whole(b"{}", "503 Service Unavailable"))
    retry = {"extra_attempts": 40, "budget_ratio": 1.0}
    async with serving_script(busy, retry=retry, queue={"max_wait_s": 60.0}) as (proxy, _):
        monkeypatch.setattr(proxy.app.handler.budget, "take", lambda _: True)
        assert (await proxy.chat(headers={"x-request-id": "r"})).status >= 500
        await proxy.settled()
        record = ended["r"]
        assert record.attempts == 41
        assert len(record.tried) == ATTEMPTS_MAX
        in_order(record)
