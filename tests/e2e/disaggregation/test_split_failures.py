"""Stages that fail: the client gets its answer, later, and the cause is counted and logged once."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmproxy.config import hash_of
from llmproxy.core.kv_connectors import Parameters, connectors
from llmproxy.core.kv_connectors.nixl import Nixl
from llmproxy.core.placement.staged import FAILURES_MAX
from llmproxy.gateway.proxying.split import stages
from llmproxy.gateway.proxying.split.stages import Handover
from llmproxy.lab.simulator.replica import ReplicaOptions
from llmproxy.lab.simulator.server.text import WRONG_WORD
from llmproxy.scheduling.attempts import FAILED_STAGES_MAX
from tests.e2e.disaggregation.conftest import NIXL, hows, split
from tests.e2e.disaggregation.test_split import LONG, sent, text
from tests.e2e.proxies import CHAT, ProxyUnderTest, serving, until
from tests.e2e.scripted import STREAM_END, STREAM_HEAD, Script, answering, breaking, chunk, scripted, whole
from tests.upstream.raw_server import Peer

STREAM = LONG | {"stream": True}
SLOW = replace(NIXL, kv_latency_s=5.0)
QUICK = replace(NIXL, speed=20.0)
"""It finds in 0.25 s that nobody is there who keeps a prompt for it."""
ENDLESS = STREAM | {"max_tokens": 20_000}


async def right_answer(proxy: ProxyUnderTest, body: dict[str, Any] = LONG, replica: int = -1) -> None:
    """The client gets what one replica answers."""
    answer = await proxy.chat(body)
    assert answer.status == 200, answer.body
    alone = await proxy.post(proxy.replicas[replica].url + CHAT, body)
    if body.get("stream"):
        assert len(answer.events) == len(alone.events)
        assert answer.body.count(b'"role"') == 1
        assert b"error" not in answer.body
    else:
        assert text(CHAT, answer.json) == text(CHAT, alone.json)
    assert WRONG_WORD.encode() not in answer.body


# --- the first stage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [LONG, STREAM])
async def test_a_prefill_replica_that_dies_at_work_costs_time_alone(body: dict[str, Any]) -> None:
    slow = replace(NIXL, speed=0.01)
    async with split(slow, NIXL) as proxy:
        asked = asyncio.create_task(proxy.chat(body))
        await until(lambda: proxy.replicas[0].in_flight)
        await proxy.replicas[0].restart()
        assert (await asked).status == 200
        assert hows(proxy) == {"prefill_failed": 1}


@pytest.mark.parametrize("fault", ["busy_503", "draining_500", "engine_dead", "reset"])
async def test_a_failing_prefill_replica_costs_time_alone(fault: str) -> None:
    async with split() as proxy:
        proxy.replicas[0].faults.set(fault)
        await right_answer(proxy)
        assert hows(proxy) == {"prefill_failed": 1}
        assert proxy.metric("llmproxy_retries_total") >= 1


async def test_another_prefill_replica_is_tried_first() -> None:
    async with split(NIXL, NIXL, NIXL, roles="prefill prefill decode") as proxy:
        proxy.replicas[0].faults.set("engine_dead")
        await right_answer(proxy)
        answered = [seen for seen in proxy.replicas[2].requests_seen if b"do_remote_prefill" in bytes(seen.body)]
        assert len(answered) == 1


async def test_after_two_failed_stages_a_request_is_served_as_a_whole() -> None:
    """Beside the limit of attempts, which allows none here, because one replica would have served it."""
    retry = {"extra_attempts": 0}
    async with split(*[NIXL] * 4, roles="prefill prefill prefill decode", retry=retry) as proxy:
        for replica in proxy.replicas[:3]:
            replica.faults.set("error_rate")
        await right_answer(proxy)
        assert hows(proxy) == {"prefill_failed": 1}
        asked = [one for replica in proxy.replicas[:3] for one in replica.requests_seen if one.path == CHAT]
        assert len(asked) == FAILED_STAGES_MAX


async def test_failed_stages_leave_the_whole_its_further_attempts() -> None:
    retry = {"extra_attempts": 1}
    async with split(*[NIXL] * 4, roles="prefill prefill decode decode", retry=retry) as proxy:
        for replica in proxy.replicas[:3]:
            replica.faults.set("draining_500")
        # The other one is asked first.
        proxy.app.pools.backends["b3"].reserve_slots(1)
        await right_answer(proxy)
        proxy.app.pools.backends["b3"].reserve_slots(-1)
        assert [one.path for one in proxy.replicas[2].requests_seen].count(CHAT) == 1


async def test_a_prefill_that_hangs_before_its_work_ends_by_its_own_limit(
    monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    """Polls see an idle engine, which may be about to begin, so nothing but time shows that it hangs."""
    monkeypatch.setattr(stages, "PREFILL_LIMIT_S", 0.3)
    async with split(health={"hung_s": 0.1}) as proxy:
        for _ in range(3):
            await right_answer(proxy)
        async with proxy.stream(ENDLESS) as other:
            await other.content.readany()
            proxy.replicas[0].faults.set("frozen")
            assert (await proxy.chat(STREAM)).status == 200
            assert hows(proxy) == {"split": 3, "prefill_failed": 1}
            assert "did not compute the prompt within 0 s" in log.getvalue()
            proxy.replicas[0].faults.clear()


PARAMS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "e",
    "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1,
}  # fmt: skip


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in PARAMS.items() if key != name}


def prefilled(params: object) -> Script:
    """A prefill replica that answers with these parameters."""
    return answering(whole(json.dumps({"choices": [], "kv_transfer_params": params}).encode()))


@asynccontextmanager
async def scripted_prefill(
    script: Script, decode: ReplicaOptions = NIXL, **config: Any
) -> AsyncIterator[ProxyUnderTest]:
    """A real decode replica, b0, and a scripted one for prompts, b1."""
    async with (
        scripted(script) as backend,
        split(decode, roles="decode prefill", extra=[backend.url], **config) as proxy,
    ):
        yield proxy


ANSWERS: dict[str, tuple[Script, str]] = {
    "none": (answering(whole(b'{"choices":[]}')), "no_parameters"),
    "null": (prefilled(None), "no_parameters"),
    "no object": (prefilled([1]), "bad_parameters"),
    "no json": (answering(whole(b"<html>")), "bad_parameters"),
    "empty": (answering(whole(b"")), "bad_parameters"),
    "not for reading": (prefilled(PARAMS | {"do_remote_prefill": False}), "bad_parameters"),
    "no port": (prefilled(without("remote_port")), "bad_parameters"),
    "port of text": (prefilled(PARAMS | {"remote_port": "1"}), "bad_parameters"),
    "no request": (prefilled(without("remote_request_id")), "bad_parameters"),
    "no host": (prefilled(PARAMS | {"remote_host": ""}), "bad_parameters"),
    "too long": (prefilled(PARAMS | {"more": "x" * (1 << 21)}), "bad_parameters"),
    "a stream": (answering(STREAM_HEAD, chunk(b"data: {}\n\n"), STREAM_END), "bad_parameters"),
    "redirect": (answering(whole(b"", "302 Found")), "prefill_failed"),
    "refusal": (answering(whole(b'{"error":{}}', "400 Bad Request")), "prefill_refused"),
    "error": (answering(whole(b'{"error":{}}', "500 Internal Server Error")), "prefill_failed"),
    "cut": (breaking(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{"), "prefill_failed"),
}  # fmt: skip


@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", list(ANSWERS))
@pytest.mark.parametrize("body", [LONG, STREAM])
async def test_client_is_served_after_any_answer_of_a_prefill_replica(case: str, body: dict[str, Any]) -> None:
    script, how = ANSWERS[case]
    async with scripted_prefill(script) as proxy:
        await right_answer(proxy, body)
        assert hows(proxy) == {how: 1}
        # No engine is given what would kill it.
        assert not sent(proxy, "b0").get("kv_transfer_params")


async def test_a_long_request_makes_no_prefill_replica_look_broken() -> None:
    filler = "x" * (3 << 18)
    answer = json.dumps({"choices": [], "metadata": {"a": filler, "b": filler}}).encode()
    async with scripted_prefill(answering(whole(answer))) as proxy:
        assert (await proxy.chat(LONG | {"metadata": {"a": filler}})).status == 200
        assert hows(proxy) == {"no_parameters": 1}
        await right_answer(proxy)
        assert hows(proxy) == {"no_parameters": 1, "bad_parameters": 1}


ONE_AT_A_TIME = [{"name": "t", "keys": [hash_of("k")], "limits": {"in_flight": 1}}]


@pytest.mark.parametrize(
    "config", [{"fixed_limit": 1, "scheduling": {"look_ahead": 0}}, {"tenants": ONE_AT_A_TIME}], ids=["place", "limit"]
)
async def test_a_refused_prompt_does_not_wait_for_its_own_place(config: dict[str, Any]) -> None:
    script, how = ANSWERS["refusal"]
    async with scripted_prefill(script, queue={"max_wait_s": 5.0}, **config) as proxy:
        answer = await proxy.chat(LONG, headers={"authorization": "Bearer k"})
        assert answer.status == 200, answer.body
        assert hows(proxy) == {how: 1}
        # Nothing was computed that another one could fetch.
        assert proxy.app.pools.backends["b1"].kv_pinned_until_s(0.0) is None


async def test_prompt_that_was_not_handed_over_is_not_charged() -> None:
    usage = {"prompt_tokens": 211, "completion_tokens": 1, "total_tokens": 212}
    script = answering(whole(json.dumps({"choices": [], "usage": usage}).encode()))
    rated = [{"name": "t", "keys": [hash_of("k")], "limits": {"tokens_per_min": 600.0}}]
    async with scripted_prefill(script, tenants=rated) as proxy:
        answer = await proxy.chat(LONG, headers={"authorization": "Bearer k"})
        await proxy.settled()
        _, left = proxy.app.pools.limits.rates.left_per_min("tenant:t", asyncio.get_running_loop().time())
        # Ten a second come back, and both stages together would be twice the prompt.
        assert left is not None
        assert left >= 600 - answer.json["usage"]["total_tokens"]


async def test_cause_is_logged_once_with_advice(log: io.StringIO) -> None:
    async with scripted_prefill(prefilled(None)) as proxy:
        for _ in range(3):
            await proxy.chat(LONG)
        (line,) = [line for line in log.getvalue().splitlines() if "disaggregation_failed" in line]
        assert "cause=no_parameters" in line
        assert "backend=b1" in line
        assert "--kv-transfer-config" in line


async def test_a_prefill_replica_whose_prompts_never_arrive_rests() -> None:
    calls = 0

    async def script(peer: Peer, _: bytes) -> None:
        nonlocal calls
        calls += 1
        await peer.send(whole(json.dumps({"choices": [], "kv_transfer_params": PARAMS}).encode()))

    # Nobody listens on that port.
    async with scripted_prefill(script, QUICK) as proxy:
        for _ in range(FAILURES_MAX + 3):
            await right_answer(proxy, LONG, 0)
        assert calls == FAILURES_MAX
        assert hows(proxy) == {"transfer_failed": FAILURES_MAX, "whole": 3}


async def test_unknown_members_travel_as_they_came() -> None:
    odd = '{"do_remote_prefill": true,  "new_in_2030":{"a" :[1.50, "\\u00e9"]}, "remote_block_ids":[],'
    odd += '"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":1,"tp_size":2 }'
    script = answering(whole(b'{"id":1, "kv_transfer_params" : ' + odd.encode() + b', "choices":[]}'))
    asked: list[bytes] = []

    async def decode(peer: Peer, request: bytes) -> None:
        asked.append(request)
        await peer.send(whole(b'{"choices":[{"message":{"content":"x"}}]}'))

    async with scripted(script) as first, scripted(decode) as second:
        roles = {"b0": "prefill", "b1": "decode"}
        scheduling = {"disaggregation": "always"}
        async with serving(extra=[first.url, second.url], roles=roles, scheduling=scheduling) as proxy:
            assert (await proxy.chat(LONG)).status == 200
    assert b'"kv_transfer_params":' + odd.encode() + b"," in asked[0]


# --- the second stage -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("body", [LONG, STREAM])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_a_prefill_replica_that_dies_between_the_stages(body: dict[str, Any], policy: Any) -> None:
    async with split(NIXL, replace(SLOW, speed=5.0, kv_load_failure_policy=policy)) as proxy:
        asked = asyncio.create_task(proxy.chat(body))
        await until(lambda: proxy.replicas[1].in_flight)
        await proxy.replicas[0].restart()
        answer = await asked
        assert answer.status == 200
        assert b"error" not in answer.body
        assert WRONG_WORD.encode() not in answer.body
        assert answer.body.count(b'"role"') == 1
        assert hows(proxy) == ({"transfer_failed": 1} if policy == "fail" else {"split": 1})
        assert proxy.app.pools.backends["b1"].health.available(asyncio.get_running_loop().time())


@pytest.mark.slow
async def test_a_decode_replica_that_dies_before_its_first_token() -> None:
    async with split(NIXL, SLOW, NIXL, roles="prefill decode decode") as proxy:
        proxy.replicas[2].faults.set("busy_503")
        asked = asyncio.create_task(proxy.chat(STREAM))
        await until(lambda: proxy.replicas[1].in_flight or proxy.replicas[2].in_flight)
        proxy.replicas[2].faults.clear()
        await until(lambda: proxy.replicas[1].in_flight)
        await proxy.replicas[1].restart()
        answer = await asked
        assert answer.status == 200
        assert answer.body.count(b'"role"') == 1


REFUSALS: dict[str, tuple[Script, str]] = {
    "400": (answering(whole(b'{"error":{"message":"no params here"}}', "400 Bad Request")), "decode_refused"),
    "500": (answering(whole(b'{"error":{}}', "500 Internal Server Error")), "transfer_failed"),
    "503": (answering(whole(b"{}", "503 Service Unavailable")), "decode_failed"),
    "cut": (breaking(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n"), "decode_failed"),
    "error behind the role": (
        answering(
            STREAM_HEAD,
            chunk(b'data: {"id":"1","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'),
            chunk(b'data: {"error":{"message":"Internal server error","code":500}}\n\ndata: [DONE]\n\n'),
            STREAM_END,
        ),
        "transfer_failed",
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", list(REFUSALS))
async def test_decode_replica_refuses_the_computed_prompt(case: str) -> None:
    script, how = REFUSALS[case]
    times = 0

    async def once(peer: Peer, request: bytes) -> None:
        nonlocal times
        times += 1
        if times == 1:
            await script(peer, request)
            return
        await peer.send(STREAM_HEAD + chunk(b'data: {"id":"1","choices":[{"delta":{"content":"x"}}]}\n\n'))
        await peer.send(chunk(b"data: [DONE]\n\n") + STREAM_END)

    async with scripted(once) as decode, split(NIXL, roles="prefill decode", extra=[decode.url]) as proxy:
        # A prefill replica answers as well as any, where no other is left.
        answer = await proxy.chat(STREAM)
        assert answer.status == 200
        assert b"error" not in answer.body
        assert hows(proxy) == {how: 1}
        assert times == (2 if how in ("decode_refused", "transfer_failed") else 1)


async def test_a_decode_replica_that_refuses_to_be_asked_for_usage_gets_each_prompt_once() -> None:
    """The refusal has freed the prompt, so the second call must not fetch it."""

    async def script(peer: Peer, request: bytes) -> None:
        if b"stream_options" in request:
            await peer.send(whole(b'{"message":"extra_forbidden: body.stream_options"}', "400 Bad Request"))
            return
        await peer.send(STREAM_HEAD + chunk(b'data: {"id":"1","choices":[{"delta":{"content":"x"}}]}\n\n'))
        await peer.send(chunk(b"data: [DONE]\n\n") + STREAM_END)

    async with scripted(script) as decode, split(NIXL, roles="prefill decode", extra=[decode.url]) as proxy:
        for _ in range(2):
            answer = await proxy.chat(STREAM)
            assert answer.status == 200
            assert b"error" not in answer.body
        fetched = [found[0] for one in decode.requests if (found := re.findall(rb'"remote_request_id":"([^"]+)"', one))]
        assert len(fetched) == len(set(fetched)) == 2
        assert hows(proxy) == {"decode_refused": 1, "split": 1}


async def test_a_compressed_answer_is_not_held_to_its_end() -> None:
    """Nobody knows where its opening events end."""
    ends = asyncio.Event()

    async def script(peer: Peer, _: bytes) -> None:
        await peer.send(STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: x-own\r\n\r\n") + chunk(b"begin"))
        await ends.wait()
        await peer.send(chunk(b"end") + STREAM_END)

    async with scripted(script) as decode, split(NIXL, roles="prefill decode", extra=[decode.url]) as proxy:
        async with proxy.stream(STREAM) as stream:
            try:
                assert await asyncio.wait_for(stream.content.readany(), 5.0) == b"begin"
            finally:
                ends.set()
            assert await stream.content.read() == b"end"
        assert hows(proxy) == {"split": 1}


class Late(Nixl):
    """Its parameters are too old when they come."""

    def parameters(self, answer: bytes) -> Parameters:
        return structs.replace(super().parameters(answer), age_max_s=-1.0)


async def test_parameters_that_are_too_old_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connectors._factories, "late", Late)
    handover = Handover("p", "http://p", Parameters(b"{}", age_max_s=10.0), 100.0)
    assert (handover.too_late(110.0), handover.too_late(110.1)) == (False, True)
    # In a lease of 3 s they are old after one.
    assert Nixl(3.0).parameters(json.dumps({"kv_transfer_params": PARAMS}).encode()).age_max_s == 1.0
    async with split(scheduling={"kv_connector": "late"}) as proxy:
        await right_answer(proxy)
        assert hows(proxy) == {"late_parameters": 1}
        assert "kv_transfer_params" not in sent(proxy, "b1")
        (scheduler,) = proxy.app.pools.schedulers.values()
        scheduler._placement.transferred("b0", 0.0, arrived=False)
        await right_answer(proxy)
        # A prompt that nobody fetched did not arrive either.
        assert scheduler._placement._failures == {"b0": 1}


@pytest.mark.parametrize(
    ("host", "first", "second", "unreachable"),
    [
        ("localhost", "http://gpu-0:1", "http://gpu-1:1", True),
        ("127.0.0.1", "http://gpu-0:1", "http://gpu-1:1", True),
        ("localhost", "http://gpu-0:1", "http://gpu-0:2", False),
        ("localhost", "http://localhost:1", "http://127.0.0.1:2", False),
        ("gpu-0", "http://gpu-0:1", "http://gpu-1:1", False),
        (None, "http://gpu-0:1", "http://gpu-1:1", False),
    ],
)
def test_localhost_of_another_machine_is_not_asked(
    host: str | None, first: str, second: str, unreachable: bool
) -> None:
    assert Handover("p", first, Parameters(b"{}", host), 0.0).unreachable_from(second) is unreachable
