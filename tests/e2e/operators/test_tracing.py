"""Traces: the spans of a request, the trace context from clients and to backends, and a broken receiver."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from llmproxy.core.domain import Outcome
from llmproxy.lab.simulator.replica import Replica
from llmproxy.observe import spans as late_spans
from tests.e2e.processes import served
from tests.e2e.proxies import CHAT, FAST, HELLO, STREAM, ProxyUnderTest, all_of, one_seat, posts, serving, until
from tests.e2e.scripted import STREAM_HEAD, breaking, chunk, serving_script
from tests.otlp import Receiver, attributes, receiving, tree

OBJECTIVE = "x-llm-d-inference-objective"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID, PARENT_ID = PARENT.split("-")[1:3]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(late_spans, "LINGER_S", 0.02)


@asynccontextmanager
async def traced(
    monkeypatch: pytest.MonkeyPatch, sampler: str = "always_on", **settings: Any
) -> AsyncIterator[Receiver]:
    """A receiver to which proxies that start in the block send every trace."""
    async with receiving(**settings) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
        yield receiver


def sent_parent(proxy: ProxyUnderTest, backend: str = "b0") -> str:
    return proxy.sent(backend).headers["traceparent"]


async def test_the_tree_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch) as receiver:
        async with serving(FAST, tracing=True) as proxy:
            headers = {"traceparent": PARENT, "tracestate": "vendor=1", "x-request-id": "r"}
            assert (await proxy.chat(STREAM, headers=headers)).status == 200
            seen = proxy.sent().headers
        [request, queue, attempt] = receiver.of(TRACE_ID)
        assert [span.name for span in (request, queue, attempt)] == ["POST /v1/chat/completions", "queue", "chat base"]
        assert request.parent_span_id.hex() == PARENT_ID
        assert queue.parent_span_id == attempt.parent_span_id == request.span_id
        assert seen["traceparent"] == f"00-{TRACE_ID}-{attempt.span_id.hex()}-01", "the engine's parent is the attempt"
        assert seen["tracestate"] == "vendor=1"
        found = attributes(request)
        assert (found["http.route"], found["http.response.status_code"]) == ("/v1/chat/completions", 200)
        assert (found["llmproxy.request_id"], found["url.scheme"]) == ("r", "http")
        assert attributes(queue)["llmproxy.band"] == "default"
        assert attributes(queue)["llmproxy.why.flows"] == 1
        found = attributes(attempt)
        assert (found["llmproxy.backend"], found["llmproxy.verdict"]) == ("b0", "served")
        assert (found["gen_ai.operation.name"], found["gen_ai.usage.output_tokens"]) == ("chat", 4)
        assert any(name.startswith("llmproxy.price.") for name in found)
        assert found["llmproxy.predicted.ttft_s"] >= 0
        assert found["gen_ai.response.time_to_first_chunk"] > 0
        assert [event.name for event in attempt.events] == ["first token"]
        instants = [request.start_time_unix_nano, queue.start_time_unix_nano, queue.end_time_unix_nano]
        instants += [attempt.start_time_unix_nano, attempt.end_time_unix_nano, request.end_time_unix_nano]
        assert instants == sorted(instants)
        assert receiver.resources[0]["service.name"] == "llmproxy"
        assert "Hello there" not in str(receiver.spans)


async def test_a_retry_a_withdrawal_and_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch) as receiver:
        async with serving(FAST, FAST, tracing=True) as proxy:
            for replica in proxy.replicas:
                replica.faults.set("busy_503")
            answer = proxy.waiting(STREAM, **{"x-request-id": "retried"})
            await until(lambda: proxy.metric("llmproxy_attempts_total", verdict="busy") >= 1)
            for replica in proxy.replicas:
                replica.faults.clear()
            assert (await answer).status == 200
        async with serving(FAST, fixed_limit=1, scheduling={"look_ahead": 0}, tracing=True) as proxy:
            proxy.replicas[0].faults.set("frozen")
            sheddable = proxy.waiting(STREAM, **{OBJECTIVE: "sheddable", "x-request-id": "withdrawn"})
            await until(lambda: posts(proxy) == 1)
            critical = proxy.waiting(STREAM, **{OBJECTIVE: "critical"})
            await until(lambda: posts(proxy) == 2)
            refused = proxy.waiting(STREAM, **{"x-request-id": "refused", "x-llm-d-inference-ttl": "20ms"})
            assert (await refused).status == 429
            proxy.replicas[0].faults.clear()
            assert (await critical).status == (await sheddable).status == 200
        story = [(s.name, attributes(s).get("llmproxy.verdict")) for s in receiver.request("retried")]
        busy = ("chat base", "busy")
        assert story[:3] == [("POST /v1/chat/completions", None), ("queue", None), busy]
        assert story[-2:] == [("queue", None), ("chat base", "served")]
        failed = [s for s in receiver.request("retried") if attributes(s).get("llmproxy.verdict") == "busy"]
        assert [event.name for event in failed[0].events] == ["retried"]
        assert attributes(failed[0])["error.type"] == "503"
        assert failed[0].status.code == failed[0].status.STATUS_CODE_ERROR
        assert attributes(receiver.request("retried")[-1])["http.request.resend_count"] == len(failed)

        withdrawn = receiver.request("withdrawn")
        assert [s.name for s in withdrawn] == ["POST /v1/chat/completions", "queue", "chat base", "queue", "chat base"]
        assert [event.name for event in withdrawn[2].events] == ["withdrawn"]
        assert "error.type" not in attributes(withdrawn[2])
        assert attributes(withdrawn[0])["llmproxy.preemptions"] == 1

        request, queue = receiver.request("refused")
        assert (queue.name, attributes(queue)["llmproxy.outcome"]) == ("queue", Outcome.EXPIRED.value)
        assert attributes(request)["http.response.status_code"] == 429
        assert request.status.code == request.status.STATUS_CODE_UNSET, "a refusal is the client's to handle"
        for name in ("retried", "withdrawn", "refused"):
            print(f"\n{tree(receiver.request(name))}")


async def test_ends_that_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    event = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
    async with traced(monkeypatch) as receiver:
        async with one_seat(headers={"x-request-id": "left"}, tracing=True) as (proxy, running):
            running.close()
            await proxy.settled()
            assert (await proxy.chat(HELLO, headers={"x-request-id": "plain"})).status == 200
            assert (await proxy.chat({"model": "none"}, headers={"x-request-id": "unknown"})).status == 404
            assert (await proxy.chat(b"{", headers={"x-request-id": "bad"})).status == 400
        async with (
            serving_script(breaking(STREAM_HEAD + chunk(event)), tracing=True) as (proxy, _),
            proxy.stream(STREAM, **{"x-request-id": "broken"}) as stream,
        ):
            assert b"error" in await all_of(stream)
        left, broken, plain = (receiver.request(name) for name in ("left", "broken", "plain"))
        assert (attributes(left[0])["llmproxy.outcome"], attributes(left[-1])["llmproxy.verdict"]) == (
            "cancelled", "client_gone",
        )  # fmt: skip
        assert attributes(broken[0])["error.type"] == "broken_stream"
        assert "failed" in [attributes(span).get("error.type") for span in broken]
        assert plain[-1].events == []
        assert "gen_ai.response.time_to_first_chunk" not in attributes(plain[-1])
        for name in ("unknown", "bad"):
            assert [s.name for s in receiver.request(name)] == ["POST /v1/chat/completions"]


async def test_untrusted_client_does_not_decide_on_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    strange: dict[str, Any] = {"trust_headers": "none", "tracing": True}
    headers = {"traceparent": PARENT, "tracestate": "vendor=1", "x-request-id": "r"}
    async with traced(monkeypatch, "parentbased_always_off") as receiver:
        async with serving(FAST, **strange) as proxy:
            assert (await proxy.chat(headers=headers)).status == 200
            parent = sent_parent(proxy)
            assert parent.endswith("-00")
            assert TRACE_ID not in parent
            assert "tracestate" not in proxy.sent().headers
        assert receiver.spans == []
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_on")
        async with serving(FAST, **strange) as proxy:
            assert (await proxy.chat(headers=headers)).status == 200
        request = receiver.request("r")[0]
        [link] = request.links
        assert (link.trace_id.hex(), link.span_id.hex()) == (TRACE_ID, PARENT_ID)
        assert request.trace_id.hex() != TRACE_ID
        assert request.parent_span_id == b""


@pytest.mark.parametrize(
    ("sampler", "flags", "sampled"),
    [
        ("parentbased_always_off", "01", True),
        ("parentbased_always_on", "00", False),
        ("always_on", "00", True),
        ("always_off", "01", False),
    ],
)
async def test_trusted_client_decides_on_sampling(
    sampler: str, flags: str, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with traced(monkeypatch, sampler) as receiver:
        async with serving(FAST, tracing=True) as proxy:
            assert (await proxy.chat(headers={"traceparent": PARENT[:-2] + flags})).status == 200
            assert re.fullmatch(f"00-{TRACE_ID}-[0-9a-f]{{16}}-0{int(sampled)}", sent_parent(proxy))
        assert bool(receiver.of(TRACE_ID)) == sampled


async def test_without_tracing_the_fields_of_the_client_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch) as receiver:
        for tracing, disabled in ((False, "false"), (True, "TRUE")):
            monkeypatch.setenv("OTEL_SDK_DISABLED", disabled)
            async with serving(FAST, tracing=tracing) as proxy:
                await proxy.chat(headers={"traceparent": PARENT, "tracestate": "vendor=1"})
                assert sent_parent(proxy) == PARENT
                assert proxy.sent().headers["tracestate"] == "vendor=1"
        assert receiver.messages == 0


async def test_the_environment_names_the_service_and_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.url + "/v1/traces")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "edge")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.name=other")
        async with serving(FAST, tracing=True) as proxy:
            assert (await proxy.chat()).status == 200
        resource = receiver.resources[0]
        assert (resource["service.name"], resource["deployment.environment"]) == ("edge", "test")
        assert receiver.headers[0]["api-key"] == "secret"
        assert receiver.headers[0]["content-encoding"] == "gzip"


@pytest.mark.slow
@pytest.mark.timeout(300, method="thread")
async def test_workers_have_their_spans_sent_by_the_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch) as receiver, Replica(FAST) as replica:
        arguments = ("--port", "0", "--workers", "2", "--backend", replica.url, "--tracing", "true")
        async with served(tmp_path / "log", *arguments) as process, aiohttp.ClientSession() as http:
            url = await process.url()
            for number in range(8):
                headers = {"traceparent": PARENT, "x-request-id": f"r{number}"}
                async with http.post(url + CHAT, json=STREAM, headers=headers) as answer:
                    assert answer.status == 200
                    await answer.read()
            process.process.terminate()
            assert await process.ended() == 0
        assert len(receiver.of(TRACE_ID)) == 24, "what waited was sent at the end"
        [request] = [s for s in receiver.spans if attributes(s).get("llmproxy.request_id") == "r3"]
        assert request.parent_span_id.hex() == PARENT_ID
        polls = [seen for seen in replica.requests_seen if seen.method == "POST"]
        sent = {seen.headers["traceparent"].split("-")[2] for seen in polls}
        assert sent == {s.span_id.hex() for s in receiver.spans if s.name == "chat base"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param({"status": 500}, id="answers 500"),
        pytest.param({"status": 400}, id="refuses them"),
        pytest.param({"delay_s": 30.0}, id="slow"),
        pytest.param(None, id="down"),
    ],
)
async def test_a_receiver_in_trouble_costs_spans_alone(
    trouble: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_spans, "REQUESTS_MAX", 8)
    monkeypatch.setattr(late_spans, "BATCH_SPANS", 2)
    monkeypatch.setattr(late_spans, "CLOSE_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    async with traced(monkeypatch, **(trouble or {})) as receiver:
        if trouble is None:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
        loop = asyncio.get_running_loop()
        async with serving(FAST, tracing=True) as proxy:
            longest_s = 0.0
            for _ in range(30):
                before_s = loop.time()
                assert (await proxy.chat()).status == 200
                longest_s = max(longest_s, loop.time() - before_s)
            assert longest_s < 1.0, "no request waits for the receiver"
            await until(lambda: proxy.metric("llmproxy_spans_lost_total") > 0)
            metrics = proxy.app.metrics
        assert receiver.spans == []
        await until(lambda: metrics._spans_lost._value.get() == 90 or trouble == {"delay_s": 30.0})
