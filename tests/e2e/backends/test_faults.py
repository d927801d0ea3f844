"""Backends that fail before their first byte: the request goes elsewhere and its client notices nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from llmproxy.gateway.proxying.stream_relay import BUFFERED_BYTES_MAX, read_answer
from llmproxy.lab.simulator.server.faults import FaultKind
from llmproxy.upstream.port import Exchange
from tests.e2e.proxies import CHAT, FAST, HELLO, STREAM, Answer, ProxyUnderTest, all_of, samples, serving, until
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, answering, chunk, scripted, serving_script, whole
from tests.upstream.raw_server import Peer

IN_TURN: dict[str, Any] = {"scheduling": {"placement": "round_robin"}}
"""The first request goes to b0, the second to b1."""
BLIND: dict[str, Any] = {"interval_s": 60, "page_interval_s": 60, "models_interval_s": 60}
"""Polls so rare that only requests meet the fault."""
STRICT: dict[str, Any] = {"ejection_s": 30}
"""An ejected backend stays out for the rest of the test."""
BODIES = [pytest.param(HELLO, id="whole"), pytest.param(STREAM, id="stream")]
BAD_GATEWAY = whole(b"bad", "502 Bad Gateway")


def served_by_b1_after_b0(answer: Answer) -> bool:
    return (answer.status, answer.backend, answer.headers["x-llmproxy-attempts"]) == (200, "b1", "2")


def attempts(proxy: ProxyUnderTest, verdict: str) -> int:
    return int(proxy.metric("llmproxy_attempts_total", backend="b0", verdict=verdict))


async def test_an_answer_in_one_piece_has_a_total_time_only() -> None:
    async with serving(FAST, FAST, **IN_TURN, timeouts={"first_byte_s": 0.05, "total_s": 0.4}) as proxy:
        proxy.replicas[0].faults.set("frozen")
        answer = await proxy.chat(HELLO)
        assert (answer.status, answer.headers["x-llmproxy-attempts"]) == (504, "1")
        assert "timeouts.total_s" in answer.json["error"]["message"]
        await until(lambda: not proxy.replicas[0].in_flight)
        proxy.replicas[0].faults.clear()


async def test_when_all_are_busy_the_client_gets_the_engines_own_words() -> None:
    async with serving(FAST, FAST, **IN_TURN) as proxy:
        for replica in proxy.replicas:
            replica.faults.set("busy_503")
        answer = await proxy.chat()
        assert (answer.status, answer.headers["x-llmproxy-attempts"]) == (503, "3")
        assert answer.json["error"]["type"] == "Service Unavailable"
        assert int(answer.headers["retry-after"]) >= 1


ERROR_FIRST = b'data: {"error":{"message":"no","code":400}}\n\n'
HIDDEN = b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":0}}\n\n'
DONE = b"data: [DONE]\n\n"


async def test_an_error_as_the_first_event_is_passed_on_to_its_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = asyncio.Event()

    async def noticed(exchange: Exchange) -> bytes:
        seen.set()
        return await read_answer(exchange)

    async def script(peer: Peer, _: bytes) -> None:
        # This may become the usage that the proxy asked for: its beginning is held back until that is known.
        await peer.send(STREAM_HEAD + chunk(ERROR_FIRST + b"data"))
        await seen.wait()
        await peer.send(chunk(b": [DONE]\n\n") + STREAM_END)

    monkeypatch.setattr("llmproxy.gateway.proxying.relay.read_answer", noticed)
    async with serving_script(script) as (proxy, _):
        assert (await proxy.chat(STREAM)).body == ERROR_FIRST + DONE


async def test_an_error_as_the_first_event_drops_a_wrong_length() -> None:
    script = answering(whole(ERROR_FIRST + HIDDEN + DONE, content_type="text/event-stream"))
    async with serving_script(script) as (proxy, _), asyncio.timeout(5):
        for _ in range(2):
            # A client that waits for more would take it from the next answer.
            assert (await proxy.chat(STREAM)).body == ERROR_FIRST + DONE


async def test_an_error_as_the_first_event_is_sent_whole_or_not() -> None:
    script = answering(STREAM_HEAD + chunk(ERROR_FIRST) + chunk(b":" + b"x" * BUFFERED_BYTES_MAX) + STREAM_END)
    async with serving_script(script) as (proxy, _):
        answer = await proxy.chat(STREAM)
        assert (answer.status, b"is not passed on" in answer.body) == (502, True)


@pytest.mark.parametrize(("fault", "attempts"), [("busy_503", "3"), ("stream_error", "2")])
async def test_there_are_two_extra_attempts_at_most_and_one_where_engines_compute(fault: str, attempts: str) -> None:
    async with serving(FAST, FAST, FAST, FAST) as proxy:
        for replica in proxy.replicas:
            replica.faults.set(fault)
        headers = (await proxy.chat(STREAM)).headers
        assert headers["x-llmproxy-attempts"] == attempts
        assert headers.get("x-should-retry") == ("false" if attempts == "2" else None)


@pytest.mark.parametrize("ask", [STREAM, HELLO])
async def test_a_request_ends_two_engines_at_most_and_a_fleet_goes_on(ask: dict[str, Any]) -> None:
    poison = ask | {"messages": [{"role": "user", "content": "POISON"}]}
    async with serving(FAST, FAST, FAST, FAST) as proxy:
        for replica in proxy.replicas:
            replica.faults.set("dies_of")
        await proxy.chat(poison)
        assert sum(replica.faults.kind is not FaultKind.DIES_OF for replica in proxy.replicas) == 2
        assert [(await proxy.chat(ask)).status for _ in range(8)] == [200] * 8


async def test_retries_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmproxy.core.retry.RETRY_RESERVE", 100.0)
    async with scripted(answering(BAD_GATEWAY)) as one, scripted(answering(BAD_GATEWAY)) as two:
        retry, health = {"budget_ratio": 0.1}, {"failures_before_ejection": 100_000}
        async with serving(extra=[one.url, two.url], retry=retry, health=health) as proxy:
            tried = [(await proxy.chat()).headers["x-llmproxy-attempts"] for _ in range(180)]
            assert tried[:40] == ["2"] * 40, "a backend that dies takes a handful at once"
            assert 1 <= tried[-60:].count("2") <= 7, "beyond that reserve, a tenth of all requests"


async def test_the_log_names_a_backend_that_cannot_be_spared() -> None:
    settings: dict[str, Any] = {"health": STRICT | {"failures_before_ejection": 1}, "retry": {"extra_attempts": 0}}
    with capture_logs() as logs:
        async with (
            scripted(answering(BAD_GATEWAY)) as one,
            scripted(answering(BAD_GATEWAY)) as other,
            serving(extra=[one.url, other.url], **IN_TURN, **settings) as proxy,
        ):
            for _ in range(4):
                assert (await proxy.chat()).status == 502
            await proxy.settled()
    ejected, spared = (
        [(line["backend"], line["why"]) for line in logs if line["event"] == event]
        for event in ("backend_ejected", "backend_not_ejected")
    )
    assert sorted(ejected + spared) == [("b0", "1 failures in a row"), ("b1", "1 failures in a row")]
    assert len(spared) == 1


async def test_a_backend_may_say_itself_when_to_come_back() -> None:
    full = whole(b"full", "503 Service Unavailable", extra=b"retry-after: 7\r\n")
    async with serving_script(answering(full), retry={"extra_attempts": 0}) as (proxy, _):
        answer = await proxy.chat()
        assert (answer.body, answer.headers.getall("retry-after")) == (b"full", ["7"])


async def test_a_request_that_waits_in_a_lost_engine_is_served_by_another() -> None:
    one_at_a_time = replace(FAST, max_num_seqs=1)
    options: dict[str, Any] = {"scheduling": {"look_ahead": 2}, "retry": {"continue": "off"}}
    async with serving(one_at_a_time, FAST, fixed_limit=1, **options) as proxy:
        proxy.replicas[1].faults.set("refuse")
        await until(lambda: proxy.app.pools.backends["b1"].health.down)
        async with proxy.stream() as running:
            await running.content.readany()
            # Read chunk by chunk: aiohttp drops unread bytes when the stream breaks.
            ran = asyncio.create_task(all_of(running))
            waiting = [asyncio.create_task(proxy.post(CHAT, body)) for body in (STREAM, HELLO)]
            await until(lambda: proxy.replicas[0].in_flight == 3)
            await proxy.replicas[1].restart()
            await until(lambda: not proxy.app.pools.backends["b1"].health.down)
            proxy.replicas[0].faults.set("hang")
            answers = await asyncio.gather(*waiting)
            assert all(map(served_by_b1_after_b0, answers)), (
                "noticed by the poller alone: a hanging stream says nothing"
            )
            assert b"The stream broke" in await ran
        await proxy.settled()
        assert proxy.outcomes() == {"completed": 2, "broken_stream": 1}


async def test_the_gauges_of_an_engine_end_with_its_last_reading() -> None:
    async with serving(FAST, poll=BLIND | {"stale_after_s": 0.3}) as proxy:

        def gauge(name: str) -> list[float]:
            page = proxy.app.metrics.page().decode()
            return [one.value for one in samples(page, f"llmproxy_backend_{name}", {"backend": "b0"})]

        await until(lambda: gauge("waiting") == gauge("running") == gauge("kv_used_ratio") == [0.0])
        await until(lambda: not gauge("waiting"))
        assert gauge("running") == gauge("kv_used_ratio") == []
        assert gauge("reading_age_seconds") >= [0.3], "the age goes on"
